"""Sequences of different lengths in one call, beside the libraries that take lengths, and the bar."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from common.record.grid import Grid
from common.timing import reference
from common.timing.compare import Measured
from task5.ladder import beside
from task5.ladder.benchmark import INVARIANT, OURS, Prepare, Shape, ours, paged
from task5.ladder.peers import LENGTH_PEERS

EQUAL_BLOCKS, PAGE = "4 deeper", 64
ONE_LONG, EVEN = "one long", "1 to all"
SHORT = 32  # the room is as many times a short sequence's keys


@dataclass(frozen=True)
class Uneven(Shape):
    """As a batch of a server: ``spread`` says how lengths differ.

    Attributes:
        spread: ONE_LONG: the last sequence fills its room, each other one the SHORT-th part of it. EVEN: lengths are
            evenly spread up to the room, in a random order that is always the same.
    """

    spread: str = EVEN

    @property
    def key(self) -> str:
        """In records."""
        return f"{super().key}, {self.spread}"

    @property
    def lengths(self) -> tuple[int, ...]:
        """Keys of each sequence, the same ones in every run."""
        if self.spread == ONE_LONG:
            return (self.kv_len // SHORT,) * (self.batch - 1) + (self.kv_len,)
        lengths = [self.kv_len * (b + 1) // self.batch for b in range(self.batch)]
        return tuple(random.Random(self.batch).sample(lengths, self.batch))


SHAPES = (
    *(
        Uneven(batch, 32, 8, kv_len, spread=spread)
        for spread in (EVEN, ONE_LONG)
        for batch, kv_len in ((8, 8192), (16, 16384), (32, 8192), (64, 4096), (128, 2048))
    ),
    Uneven(8, 32, 8, 65536, spread=ONE_LONG),
    Uneven(16, 32, 32, 2048),
    Uneven(16, 32, 32, 16384, spread=ONE_LONG),
    Uneven(32, 28, 4, 8192),
    Uneven(64, 12, 12, 1024, 64),
    Uneven(64, 12, 12, 8192, 64, spread=ONE_LONG),
    # Several queries: 32 to 128 rows of a kv head.
    Uneven(16, 32, 8, 16384, q_len=8, spread=ONE_LONG),
    Uneven(32, 32, 8, 8192, q_len=16),
    Uneven(32, 32, 8, 8192, q_len=16, spread=ONE_LONG),
    Uneven(32, 32, 8, 8192, 64, q_len=16, spread=ONE_LONG),
    Uneven(16, 64, 8, 16384, q_len=16, spread=ONE_LONG),
)
SIDES: dict[str, Prepare] = {
    OURS: ours,
    EQUAL_BLOCKS: partial(ours, rung=4),
    INVARIANT: partial(ours, batch_invariant=True),
    paged(PAGE): partial(ours, page_size=PAGE),
}


def time_lengths(seed: int, say: Callable[[str], object]) -> Grid:
    """Time SHAPES on the current GPU, and judge them. ``say`` gets the name of each that begins."""
    found = beside.time_shapes(SHAPES, SIDES | LENGTH_PEERS, seed, say)
    return judge(SHAPES, found, reference().read_gb_per_s)


def judge(shapes: Sequence[Uneven], found: Mapping[str, Measured], read_gb_per_s: float) -> Grid:
    """The table of these times, beside the bar."""
    columns = {
        "MB": lambda shape, _: f"{shape.bytes / 1e6:.0f}",
        "floor": lambda shape, _: f"{shape.bytes / read_gb_per_s / 1e3:.1f}",
    }
    return beside.judge(shapes, found, columns | beside.of_sides(SIDES), list(LENGTH_PEERS))
