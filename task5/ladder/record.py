"""What complete runs found, in table.json: times, bars, uneven lengths, chunked prefill and the endurance run."""

from dataclasses import dataclass, field

from common.record.typed import Run, Tables, read, write
from common.timing import Timing
from common.timing.compare import Measured
from task5.ladder.benchmark import Shape
from task5.ladder.rungs import FOLDER

TABLE = FOLDER / "table.json"


@dataclass
class Times:
    """A run over all shapes. A timing is of one call."""

    run: Run  # with the libraries' versions as "peers"
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
class Record:
    """What is known."""

    times: Times | None = None
    bars: Tables | None = None
    uneven: Tables | None = None
    prefill: Tables | None = None
    steps: Tables | None = None


def load() -> Record:
    """The record; empty before the first run."""
    return read(Record, TABLE)


def save(**parts: Times | Tables) -> Record:
    """Let these take the place of what the record has under their names."""
    record = load()
    for name, found in parts.items():
        setattr(record, name, found)
    write(TABLE, record)
    return record
