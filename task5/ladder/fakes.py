"""What the tests of the ladder's command share: some shapes and made-up times."""

from common.record import provenance
from common.timing import Backend, Timing
from common.timing.compare import Measured
from task5.ladder import __main__ as command
from task5.ladder import peers, table
from task5.ladder.benchmark import INVARIANT, OURS, Shape, paged
from task5.ladder.record import Times
from task5.ladder.rungs import RUNGS

ON_CPU = [rung for rung in RUNGS if rung.number == 1]
CUDNN, XQA = Backend.CUDNN.value, "XQA"
SMALL = Shape(2, 4, 2, 100, 64)
LARGE = Shape(16, 32, 8, 8192)  # 537 MB: 122.6 us at 4,380 GB/s
SHORT = Shape(1, 32, 8, 4096)


def run(date="2026-01-01"):
    facts = provenance(command.SOURCES, device="cpu", seed=1)
    gpu = {"gpu": "NVIDIA H200", "driver": "580", "cuda": "13.0"}
    peers = {"FlashAttention-3": "3", "FlashInfer": "0.6.13"}
    return facts | {"date": date, "machine": facts["machine"] | gpu, "peers": peers}


def at(microseconds, **left_out):
    """A shape whose sides take so long."""
    times = {
        side: Timing(us / 1e3, us / 1.01e3, us / 0.99e3, 20) for side, us in microseconds.items()
    }
    return Measured(times, left_out)


def times(shapes=None):
    """A run, of a made-up model of all shapes if none are given."""
    found = Times(run(), 4380.0)
    if shapes is None:
        for shape in table.TIMED:
            own = 4 + 1.04 * found.floor(shape)
            sides = {OURS: own, INVARIANT: 1.02 * own, paged(64): 1.01 * own, paged(16): 1.2 * own}
            slower = dict(
                zip(peers.peer_sides(shape.dtype), (1.1, 1.3, 1.2, 1.7, 1.4), strict=False)
            )
            sides |= {rung.label: own + rung.number for rung in RUNGS}
            sides |= {peer: 3 + factor * own for peer, factor in slower.items()}
            found.shapes[shape.key] = at(sides)
    else:
        found.shapes = {shape.key: measured for shape, measured in shapes.items()}
    return found
