"""What limits each rung and each library's kernel in one cell. ``python -m task4.ladder --profile``."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial

from torch import Tensor

from common.record.grid import Grid
from common.timing.counters import COUNTERS, RESOURCES, Subject, count, resources, run_counted
from common.timing.peers import MATH, Peer
from task4.ladder.benchmark import PRECISIONS, Cell, Method, Precision, call_of
from task4.ladder.rungs import RUNGS, Rung


def profile(ladder: Sequence[Rung], precision: Precision, cell: Cell) -> Iterator[Grid]:
    """What the kernels of these rungs and of the libraries take of an SM, which do not run, and what ncu counts.

    Raises:
        NoCounters: it cannot.
    """
    title = f"{precision.name}, {cell.key}"
    kernels, refused = resources(_subjects(ladder, precision, cell))
    yield Grid(f"{title}: resources", RESOURCES, kernels)
    if refused:
        yield Grid(f"{title}: not profiled", ["", "reason"], refused)
    command = [sys.executable, "-m", __spec__.name, precision.name, json.dumps(asdict(cell))]
    counted = count(kernels, command, advice="ask for fewer rungs with --rung")
    yield Grid(f"{title}: ncu, in per cent of what each unit could do", COUNTERS, counted)


def _subjects(ladder: Sequence[Rung], precision: Precision, cell: Cell) -> list[Subject]:
    return [
        Subject(
            m.label, partial(_call, m, precision, cell), m.source if isinstance(m, Rung) else None
        )
        for m in precision.methods
        if (m in ladder and cell.head_dim in m.head_dims)
        or (isinstance(m, Peer) and m != MATH)  # which launches dozens of kernels
    ]


def _call(method: Method, precision: Precision, cell: Cell) -> Callable[[], Tensor]:
    """A call of it. Slow rungs get less to do, because ncu runs each kernel many times."""
    slow = isinstance(method, Rung) and method.number < 7
    inputs = [t[:1] if slow else t for t in cell.inputs(precision)]
    return call_of(method, inputs, cell.causal)


if __name__ == "__main__":
    precision, cell = PRECISIONS[sys.argv[1]], Cell(**json.loads(sys.argv[2]))
    run_counted(_subjects(RUNGS, precision, cell), sys.argv[3:])
