"""What complete runs on a GPU found, in table.json: the bars, those of several GPUs, the endurance run, and
float32 products.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.record import provenance
from common.record.typed import Run, Tables, read, write
from task6.generation.benchmark import Found

FOLDER = Path(__file__).parent
TABLE = FOLDER / "table.json"
MODULES = ("decoder", "elementwise", "graph", "parallel", "persistent", "product", "weights")
SOURCES = (
    "task6/generation/*.cu",
    "task6/generation/*.cuh",
    *(f"task6/generation/{name}.py" for name in MODULES),
    "common/products/*",
    "task4/prefill.py",
    "task5/ladder/*.cu",
    "task5/ladder/*.cuh",
    "task5/ladder/append.py",
    "task5/ladder/call.py",
    "task5/ladder/by_length.py",
    "task5/ladder/choice.py",
    "task5/ladder/kernels.py",
    "task5/ladder/plan.py",
    "task5/ladder/trees.py",
    "task5/ladder/chunk.py",
    "task5/ladder/gpu.py",
)
GRADED_SOURCES = (
    "common/products/*",
    "common/layer.py",
    "task4/prefill.py",
    "task4/ladder/*.cu",
    "task4/ladder/*.cuh",
    "task4/ladder/rungs.py",
)


@dataclass
class Times:
    """A run over some cases."""

    run: Run
    read_gb_per_s: float  # of a pure read, measured in the same run
    found: list[Found] = field(default_factory=list)


@dataclass
class Record:
    """What is known."""

    bars: Times | None = None
    shared: dict[str, Times] = field(default_factory=dict)  # by the number of GPUs
    tokens: Tables | None = None
    graded: Tables | None = None


def load() -> Record:
    """The record; empty before the first run."""
    return read(Record, TABLE)


def save(record: Record) -> None:
    """Write the record."""
    write(TABLE, record)


def origin(device: str, seed: int, sources: Sequence[str] = SOURCES) -> Run:
    """Where a run's figures come from."""
    return provenance(sources, device=device, seed=seed)
