"""What complete runs found, in table.json: the times, the bars and the endurance run."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from common.record import write_json
from common.record.grid import Grid
from common.record.typed import from_json
from common.timing import Timing
from common.timing.compare import Measured
from task5.ladder.benchmark import Shape
from task5.ladder.rungs import FOLDER

TABLE = FOLDER / "table.json"
Run = dict[str, Any]  # common.record.provenance, and the libraries' versions as "peers"


@dataclass
class Times:
    """A run over all shapes. A timing is of one call."""

    run: Run
    read_gb_per_s: float  # measured in the same run
    shapes: dict[str, Measured] = field(default_factory=dict)  # by their keys

    def find(self, shape: Shape, side: str) -> Timing | None:
        """A side's time for a shape."""
        found = self.shapes.get(shape.key)
        return found and found.times.get(side)

    def microseconds(self, shape: Shape, side: str) -> float | None:
        """The median of it."""
        timing = self.find(shape, side)
        return timing and 1e3 * timing.median_ms

    def floor(self, shape: Shape) -> float:
        """Microseconds in which K and V can be read once."""
        return shape.bytes / self.read_gb_per_s / 1e3


@dataclass
class Tables:
    """What else a run printed."""

    run: Run
    grids: list[Grid]


@dataclass
class Record:
    """What is known."""

    times: Times | None = None
    bars: Tables | None = None
    steps: Tables | None = None


def load() -> Record:
    """The record; empty before the first run."""
    return from_json(Record, json.loads(TABLE.read_text())) if TABLE.exists() else Record()


def save(**parts: Times | Tables) -> Record:
    """Let these take the place of what the record has under their names."""
    record = load()
    for name, found in parts.items():
        setattr(record, name, found)
    write_json(TABLE, asdict(record, dict_factory=_without_samples))
    return record


def _without_samples(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """There are some hundred times: with their samples the file would be several times as large."""
    return {name: value for name, value in fields if name != "samples_ms"}
