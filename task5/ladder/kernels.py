"""The rungs as kernels, and what a call of decode is to them."""

from typing import NamedTuple

import torch

from common.build import Kernels, dtype_code

KERNELS = {
    1: Kernels(__file__, "01_shared_work.cu"),
    2: Kernels(__file__, "02_dependent_launch.cu"),
    3: Kernels(__file__, "03_clusters.cu"),
    4: Kernels(__file__, "04_deeper.cu"),
    5: Kernels(__file__, "05_keys_as_rows.cu"),
    6: Kernels(__file__, "06_eight_warps.cu"),
    7: Kernels(__file__, "07_in_step.cu"),
    8: Kernels(__file__, "08_by_length.cu"),
    9: Kernels(__file__, "09_by_length_shallow.cu"),
    10: Kernels(__file__, "10_by_length_eight_warps.cu"),
    11: Kernels(__file__, "11_more_rows.cu"),
    12: Kernels(__file__, "12_more_rows_by_length.cu"),
}
RUNGS = tuple(KERNELS)
KEYS_AS_ROWS, EIGHT_WARPS, IN_STEP = 5, 6, 7
MORE_ROWS, MORE_ROWS_BY_LENGTH = 11, 12  # of q in a pair: up to 32
# Lengths decide how many clusters a pair has; blocks are as of rungs 4, 3, 6 and 11.
BY_LENGTH = (8, 9, 10, MORE_ROWS_BY_LENGTH)
OF_EIGHT_WARPS = (EIGHT_WARPS, IN_STEP, 10, MORE_ROWS, MORE_ROWS_BY_LENGTH)  # head_dim up to 128
IN_16_BITS = (KEYS_AS_ROWS, MORE_ROWS, MORE_ROWS_BY_LENGTH)
# Batch-invariant, they have the same bits; and so have the two of more rows.
ONE_TREE = (3, 4, EIGHT_WARPS, IN_STEP, 8, 9, 10)
WARPS = 4  # of a block; rungs 6, 7 and 10 to 12 have twice as many
ROWS = 16  # of q in a pair of rungs 3, 4 and 6 to 10, at most; in 16 bits
LONG = 32  # tiles of a block that fill all of its stages
MOST_BLOCKS = 16  # of a cluster; of a pair, where its blocks are no cluster
MOST_SEQUENCES = 128  # whose lengths a warp of rungs 8 to 10 and 12 holds
# Keys of all kv heads, head_dim 128 or twice as many of 64. Where every other SM is no longer as fast as all of them,
# with the promise, and without it.
FEW_KEYS, MOST_KEYS = 20_000, 1 << 18
# Up to which four warps load ahead of the wait: where clusters of four fill all SMs, elsewhere, and where one or two
# blocks of each pair are on most SMs.
CROWDED_KEYS, SHARED_KEYS, KEYS_OF_FEW_BLOCKS = 15_000, 33_000, 39_000
LONG_BYTES = 400e6  # of K and V, from which blocks without clusters are faster, if memory decides


class Call(NamedTuple):
    """What a kernel is chosen by."""

    device: torch.device
    dtype: int
    head_dim: int
    rows: int  # of q that read a kv head
    sms: int  # of the GPU; without one, as many blocks as share a pair
    hopper: bool  # kernels for sm_90a run there

    @property
    def item_size(self) -> int:
        """Bytes of a number."""
        return 4 if self.dtype == dtype_code(torch.float32) else 2

    @property
    def two_tiles(self) -> bool:
        """Whether the rows of a kv head are two pairs of rungs 3, 4 and 6 to 10; of the others one."""
        return ROWS < self.rows <= 2 * ROWS and self.head_dim <= 128

    @property
    def compute_bound(self) -> bool:
        """Whether half of the SMs need longer to compute than the memory to deliver the keys."""
        return self.item_size == 4 or self.head_dim == 256

    @property
    def much_to_compute(self) -> bool:
        """Whether all SMs are faster than half of them: in float32, or where two tiles of rows see each key."""
        return self.item_size == 4 or self.two_tiles

    def query(self, rung: int, name: str, **arguments: int) -> int:
        """What a rung's source says of this call: its function ``name``, with the dtype, head_dim and rows."""
        given = dict(dtype=self.dtype, head_dim=self.head_dim, rows=self.rows, **arguments)
        return KERNELS[rung].query(name, self.device, **given)


class Plan(NamedTuple):
    """What a rung is launched with, and the scratch that it needs."""

    rung: int
    blocks: int  # of the grid
    chunks: int = (
        0  # parts or leaves that the keys of a sequence are cut into, batch-invariant; else 0
    )
    slots: int = 0  # parts (m, l, O) that go through global memory
    floats: int = 0  # of scratch for them
    counters: int = 0  # int32: of blocks that have left their parts


class Choice(NamedTuple):
    """How a call is made."""

    rung: int
    ahead: bool = False  # keys are loaded ahead of the wait, which the caller has to allow
    every_other_sm: bool = False  # its blocks leave the other SMs to those of the launch behind it


def power_of_two(n: int) -> int:
    """The largest one up to n, at least 1."""
    return 1 << max(1, n).bit_length() - 1


def are_on_most_sms(call: Call, pairs: int, blocks: int) -> bool:
    """Whether so many blocks of each pair are one on almost each SM."""
    return 9 * pairs * blocks >= (8 if blocks <= 2 else 7) * call.sms


def is_crowded(call: Call, pairs: int, blocks: int) -> bool:
    """Whether clusters of four are on almost all SMs: the next launch's find no four free ones ahead."""
    return blocks == 4 and 20 * pairs * blocks >= 19 * call.sms


def fill_every_other_sm(call: Call, pairs: int) -> bool:
    """Whether a power of two of blocks for each pair, of more than four, is almost one on every other SM."""
    of_half = power_of_two(call.sms // 2 // pairs)
    enough = 10 * pairs * min(MOST_BLOCKS, of_half) >= 9 * (call.sms // 2)
    return enough and power_of_two(call.sms // pairs) > 4


def keys_loaded_ahead(call: Call, pairs: int, blocks: int) -> int:
    """Up to how many keys of all pairs four warps load them ahead of the wait."""
    if is_crowded(call, pairs, blocks):
        return CROWDED_KEYS
    few = blocks <= 2 and are_on_most_sms(call, pairs, blocks)
    return KEYS_OF_FEW_BLOCKS if few else SHARED_KEYS


def has_large_states(call: Call) -> bool:
    """Whether of a warp's states two do not fit in registers, so that several leaves take four warps longer."""
    return call.rows > ROWS // 2 and call.head_dim == 128
