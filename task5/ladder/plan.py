"""Which rung a call of decode takes, and how many blocks share its work: from shapes alone, never from lengths."""

import functools
from typing import NamedTuple

import torch

from common.build import Kernels, dtype_code

LONG = 32  # tiles of a block that make up for a second block on its SM
KERNELS = {
    1: Kernels(__file__, "01_shared_work.cu"),
    2: Kernels(__file__, "02_dependent_launch.cu"),
    3: Kernels(__file__, "03_clusters.cu"),
    4: Kernels(__file__, "04_deeper.cu"),
    5: Kernels(__file__, "05_keys_as_rows.cu"),
    6: Kernels(__file__, "06_eight_warps.cu"),
    7: Kernels(__file__, "07_in_step.cu"),
}
RUNGS = tuple(KERNELS)
CLUSTERS = (3, 4, 5, 6, 7)  # of the rungs
KEYS_AS_ROWS = 5  # for 16 bits
EIGHT_WARPS, IN_STEP = 6, 7
OF_EIGHT_WARPS = (EIGHT_WARPS, IN_STEP)  # for head_dim up to 128
ONE_TREE = (3, 4, *OF_EIGHT_WARPS)  # batch-invariant, they have the same bits
MOST_BLOCKS = 16  # of a cluster; of a pair, where its blocks are no cluster
WARPS = 4  # of a block; rungs 6 and 7 have twice as many
MOST_CLUSTERS = 8  # of a pair, in rung 5
MANY_KEYS = 512  # of a block of rung 5, so that more clusters pay
# Bytes of K and V from which blocks without clusters are faster in rungs 3, 4, 6 and 7: memory-bound, compute-bound.
LONG_BYTES, LONG_BYTES_COMPUTE_BOUND = 400e6, 100e6
TILES_OF_A_LEAF = (
    64  # as in bits_of_leaves() of cluster.cuh: with fewer, half of the leaves are used
)
SHORT_CACHE, LONG_CACHE = 1024, 8192  # keys: where another rung is the fastest, see fastest()
KEYS_OF_ALL = (
    1 << 16
)  # of all kv heads, 500 for an SM: where rung 6 begins to be faster, see fastest_ahead()
LONG_BOX = 64  # keys of a page: of fewer, rung 5's copies are too small
ROWS = 16  # of q in a pair of rungs 3, 4, 6 and 7, at most; in 16 bits


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
        """Whether the rows of a kv head are two pairs of all rungs but 5."""
        return ROWS < self.rows <= 2 * ROWS and self.head_dim <= 128

    @property
    def compute_bound(self) -> bool:
        """Whether half of the SMs need longer to compute than the memory to deliver the keys."""
        return self.item_size == 4 or self.head_dim == 256

    def query(self, rung: int, name: str, **arguments: int) -> int:
        given = dict(dtype=self.dtype, head_dim=self.head_dim, rows=self.rows, **arguments)
        return KERNELS[rung].query(name, self.device, **given)


class Plan(NamedTuple):
    rung: int
    blocks: int
    chunks: int = 0
    slots: int = 0
    floats: int = 0  # of scratch
    counters: int = 0


def fastest(
    call: Call, heads: int, kv_len: int, batch_invariant: bool, page_size: int | None
) -> int:
    """The rung that is the fastest for ``heads`` kv heads of all sequences, as NOTES.md has measured it.

    Batch-invariant, a sequence has the same bits from rungs 3, 4, 6 and 7, and others from 5: which of the two it is,
    is told from what is the same in any batch, and whatever room there is.
    """
    sms = call.sms
    if not call.hopper:
        return 1
    if _in_step(call, heads, kv_len, batch_invariant, page_size):
        return IN_STEP
    if call.item_size == 4:
        if call.head_dim == 256:
            return 4 if batch_invariant else 1
        return EIGHT_WARPS if 8 * heads <= sms and kv_len >= LONG_CACHE else 4
    if call.rows > ROWS:
        return _fastest_of_many_rows(call, heads, kv_len, batch_invariant)
    if call.head_dim == 256:  # no two blocks fit on an SM
        return 4 if batch_invariant or heads <= sms else 1
    if heads > sms:
        return (
            _fastest_of_many_pairs(call, kv_len)
            if batch_invariant
            else 4
            if call.head_dim == 128
            else 3
        )
    if 4 * heads > sms:
        return EIGHT_WARPS if 2 * heads <= sms and kv_len >= LONG_CACHE else 4
    if 8 * heads > sms:
        return EIGHT_WARPS if kv_len >= SHORT_CACHE else 4
    if kv_len * call.head_dim >= 2 * LONG_CACHE * 128:
        return EIGHT_WARPS
    if kv_len < 2 * SHORT_CACHE or (32 * heads <= sms and kv_len <= LONG_CACHE):
        return 4
    if call.head_dim == 64:
        return 3 if kv_len >= LONG_CACHE else 4
    medium = kv_len < 4 * SHORT_CACHE
    if 16 * heads <= sms:  # a cluster of 16 blocks for each
        if batch_invariant:
            return 4 if medium else 3
    elif batch_invariant:
        return 3 if medium else 4
    elif kv_len <= 4 * SHORT_CACHE:
        return 3
    return 3 if (page_size or LONG_BOX) < LONG_BOX else KEYS_AS_ROWS


def _in_step(
    call: Call, heads: int, kv_len: int, batch_invariant: bool, page_size: int | None
) -> bool:
    """Whether rung 7 is faster than 4 and 6: where an SM reads more than 3 MB in order, and computes little with it."""
    if call.head_dim != 128 or call.rows * call.item_size > ROWS or heads > call.sms:
        return False
    if page_size or (batch_invariant and call.item_size == 4):
        return False
    return 2 * heads * kv_len * call.head_dim * call.item_size >= LONG_BYTES


def _fastest_of_many_rows(call: Call, heads: int, kv_len: int, batch_invariant: bool) -> int:
    """The fastest of more than 16 rows: rung 5, unless two pairs of each kv head find more SMs that are idle.

    Then the keys are asked for twice, at neighbouring blocks.
    """
    sms, pairs = call.sms, 2 * heads
    few_and_long = 32 * pairs <= sms and kv_len > 2 * LONG_CACHE
    if not call.two_tiles or (not batch_invariant and (pairs > sms or few_and_long)):
        return KEYS_AS_ROWS
    return EIGHT_WARPS if pairs * kv_len >= KEYS_OF_ALL else 4


def _fastest_of_many_pairs(call: Call, kv_len: int) -> int:
    """The fastest of the rungs with the same bits, batch-invariant, where pairs are more than SMs.

    Of long sequences a warp has many leaves: with eight warps half as many. Of head_dim 64 three blocks fit on an SM.
    """
    if call.head_dim == 64:
        return 3
    return IN_STEP if kv_len >= 4 * SHORT_CACHE else 4


def fastest_ahead(
    call: Call, heads: int, kv_len: int, batch_invariant: bool, page_size: int | None
) -> int | None:
    """The same for calls that load keys ahead of the wait; None where that gains nothing, as NOTES.md has measured it.

    What is ahead of the wait has to fit into the time of a launch: that of the shortest calls is as short.
    """
    sms, keys = call.sms, heads * kv_len
    if call.item_size == 4 or call.head_dim == 256 or not call.hopper:
        return None
    if call.rows > ROWS:
        rung = _fastest_of_many_rows(call, heads, kv_len, batch_invariant)
        return None if rung == KEYS_AS_ROWS else rung
    if _in_step(call, heads, kv_len, batch_invariant, page_size):
        return IN_STEP
    if heads > sms:
        if batch_invariant:
            return _fastest_of_many_pairs(call, kv_len)
        return KEYS_AS_ROWS if call.head_dim == 64 else 4
    as_rows = not batch_invariant and (page_size or LONG_BOX) >= LONG_BOX
    if call.head_dim == 64 and keys >= 4 * KEYS_OF_ALL:
        return KEYS_AS_ROWS if as_rows and 2 * heads > sms else 4
    if 2 * keys < KEYS_OF_ALL:
        few = call.head_dim == 128 and as_rows and not page_size and 8 * keys > KEYS_OF_ALL
        return KEYS_AS_ROWS if few else None
    some = 4 * heads <= sms < 8 * heads and kv_len >= SHORT_CACHE
    return EIGHT_WARPS if some or keys >= KEYS_OF_ALL else 4


@functools.lru_cache(maxsize=1024)
def plan(
    call: Call, batch: int, kv_heads: int, kv_len: int, batch_invariant: bool, rung: int
) -> Plan:
    """How many blocks share the work: from shapes alone, never from lengths."""
    if rung == KEYS_AS_ROWS:
        pairs = batch * _pairs(call, rung, kv_heads)
        of_a_cluster = _of_a_cluster(call, rung, kv_heads, batch, kv_len)
        clusters = _clusters_of_a_pair(call, pairs * of_a_cluster, kv_len // of_a_cluster)
        chunks = MOST_BLOCKS if batch_invariant else 0
        return _in_clusters(call, rung, pairs, of_a_cluster, clusters, chunks)
    if rung in CLUSTERS:
        pairs, leaves = batch * _pairs(call, rung, kv_heads), 0
        warps, most = 2 * WARPS if rung in OF_EIGHT_WARPS else WARPS, MOST_BLOCKS
        if batch_invariant:
            leaves = _leaves(call, rung, kv_heads)
            keys = call.query(rung, "keys_of_a_tile") // warps  # of a warp's tile
            long = kv_len >= TILES_OF_A_LEAF * leaves * keys
            most = max(1, min(most, leaves // (warps if long else 2 * warps)))
        of_a_cluster, clusters = _of_a_cluster(call, rung, kv_heads, batch, kv_len, most), 1
        long_bytes = LONG_BYTES_COMPUTE_BOUND if call.compute_bound else LONG_BYTES
        if 2 * batch * kv_heads * kv_len * call.head_dim * call.item_size >= long_bytes:
            # Clusters leave SMs idle that single blocks use.
            single = 1 << max(1, min(most, call.sms // pairs)).bit_length() - 1
            if single > of_a_cluster:
                of_a_cluster, clusters = 1, single
        return _in_clusters(call, rung, pairs, of_a_cluster, clusters, leaves)
    tall = call.query(rung, "rows_of_a_pair")
    pairs, room = _pairs(call, rung, kv_heads), _blocks(call, rung)
    tiles = -(-kv_len // call.query(rung, "keys_of_a_tile"))
    blocks = min(room, batch * pairs * tiles)
    chunks = -(-room // pairs) if batch_invariant else 0
    slots = batch * pairs * chunks if chunks else 2 * blocks
    return Plan(
        rung, blocks, chunks, slots, slots * tall * (call.head_dim + 2), counters=batch * pairs
    )


def _in_clusters(
    call: Call, rung: int, pairs: int, of_a_cluster: int, clusters: int, chunks: int
) -> Plan:
    """With so many blocks of a cluster, and clusters of a pair: if several, each leaves its part in global memory."""
    blocks = pairs * of_a_cluster * clusters
    if clusters == 1:
        return Plan(rung, blocks, chunks)
    rows = call.query(rung, "rows_of_a_pair")
    floats = pairs * clusters * rows * call.head_dim // 4 * 6  # of four columns O, m and l
    return Plan(rung, blocks, chunks, pairs * clusters, floats, counters=pairs * of_a_cluster)


def _pairs(call: Call, rung: int, kv_heads: int) -> int:
    """Of a kv head and rows that share one read of its keys, for one sequence."""
    return kv_heads * -(-call.rows // call.query(rung, "rows_of_a_pair"))


def _leaves(call: Call, rung: int, kv_heads: int) -> int:
    """How many warps share a pair of a long sequence by itself, with all SMs: a power of two."""
    blocks = call.sms // _pairs(call, rung, kv_heads)
    return (WARPS if call.head_dim == 256 else 2 * WARPS) * min(
        MOST_BLOCKS, 1 << max(1, blocks).bit_length() - 1
    )


def _of_a_cluster(
    call: Call, rung: int, kv_heads: int, batch: int, kv_len: int, most: int = MOST_BLOCKS
) -> int:
    """How many blocks share a pair: a power of two.

    All are there at once, one on each SM, or two where each has much to do; and each has two tiles at least. Rung 5
    takes the memory's time with a block on every other SM.
    """
    pairs = batch * _pairs(call, rung, kv_heads)
    tiles = -(-kv_len // call.query(rung, "keys_of_a_tile"))
    sms = call.sms
    blocks = 1

    def room(blocks: int) -> int:
        if rung == KEYS_AS_ROWS:
            return sms // 2
        return 2 * sms if tiles >= LONG * blocks else sms

    while (
        2 * blocks <= min(most, tiles // 2)
        and pairs * 2 * blocks <= room(2 * blocks)
        and pairs <= call.query(rung, "clusters_at_once", blocks=2 * blocks, tiles=min(tiles, LONG))
    ):
        blocks *= 2
    return blocks


def _clusters_of_a_pair(call: Call, blocks: int, keys: int) -> int:
    """How many clusters share a pair, where ``blocks`` of one cluster a pair would leave SMs idle: a power of two.

    They merge through global memory, which pays where each block still has many of its ``keys``.
    """
    sms = call.sms
    clusters = 1
    while (
        2 * clusters <= MOST_CLUSTERS
        and blocks * 2 * clusters <= sms // 2
        and keys >= MANY_KEYS * 2 * clusters
    ):
        clusters *= 2
    return clusters


def _blocks(call: Call, rung: int) -> int:
    """How many blocks the GPU holds at once; two on an SM, where these fit."""
    if call.device.type == "cpu":
        return call.sms
    gpu = torch.cuda.get_device_properties(call.device)
    reserved = 1024  # bytes of each block, for the system
    per_sm = gpu.shared_memory_per_multiprocessor // (
        call.query(rung, "shared_memory_bytes") + reserved
    )
    return gpu.multi_processor_count * max(1, min(2, per_sm))
