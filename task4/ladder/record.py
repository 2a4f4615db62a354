"""What complete runs found, in table.json: by precision the times, and the tables of the bars and of the profile."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from common.record import write_json
from common.record.grid import Grid
from common.record.typed import from_json
from common.timing import Timing
from common.timing.compare import Measured
from task4.ladder.benchmark import Cell, Method
from task4.ladder.rungs import FOLDER

TABLE = FOLDER / "table.json"
Run = dict[str, Any]  # common.record.provenance, and FlashAttention-3's version


@dataclass
class Times:
    """A run over all cells."""

    run: Run
    references: dict[str, float]  # TFLOP/s of the matrix products, by their names
    cells: dict[str, Measured] = field(default_factory=dict)  # by their keys

    def cell(self, cell: Cell) -> Measured | None:
        return self.cells.get(cell.key)

    def find(self, cell: Cell, method: Method) -> Timing | None:
        """A method's time in a cell."""
        found = self.cell(cell)
        return found and found.times.get(method.label)


@dataclass
class Tables:
    """What else a run printed."""

    run: Run
    grids: list[Grid]


@dataclass
class Record:
    """What is known of one precision."""

    times: Times | None = None
    bars: Tables | None = None
    profile: Tables | None = None


def load() -> dict[str, Record]:
    """The records by precision; none before the first run."""
    return from_json(dict[str, Record], json.loads(TABLE.read_text()) if TABLE.exists() else {})


def save(precision: str, part: str, found: Times | Tables) -> None:
    """Let ``found`` take the place of that part of a precision's record; of times without their samples."""
    records = load()
    setattr(records.setdefault(precision, Record()), part, found)
    write_json(TABLE, {name: asdict(r, dict_factory=_statistics) for name, r in records.items()})


def _statistics(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """The table has some hundred times: with the samples of each it would be several times as large."""
    return {name: value for name, value in fields if name != "samples_ms"}
