"""What complete runs found, in table.json: by precision the times, and the tables of the bars and of the profile."""

from dataclasses import dataclass, field

from common.record.typed import Run, Tables, read, write
from common.timing import Timing
from common.timing.compare import Measured
from task4.ladder.benchmark import Cell, Method
from task4.ladder.rungs import FOLDER

TABLE = FOLDER / "table.json"


@dataclass
class Times:
    """A run over all cells."""

    run: Run  # with FlashAttention-3's version
    references: dict[str, float]  # TFLOP/s of the matrix products, by their names
    cells: dict[str, Measured] = field(default_factory=dict)  # by their keys

    def cell(self, cell: Cell) -> Measured | None:
        return self.cells.get(cell.key)

    def find(self, cell: Cell, method: Method) -> Timing | None:
        """A method's time in a cell."""
        found = self.cell(cell)
        return found and found.times.get(method.label)


@dataclass
class Record:
    """What is known of one precision."""

    times: Times | None = None
    bars: Tables | None = None
    profile: Tables | None = None


def load() -> dict[str, Record]:
    """The records by precision; none before the first run."""
    return read(dict[str, Record], TABLE)


def save(precision: str, part: str, found: Times | Tables) -> None:
    """Let ``found`` take the place of that part of a precision's record; of times without their samples."""
    records = load()
    setattr(records.setdefault(precision, Record()), part, found)
    write(TABLE, records)
