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
    8: Kernels(__file__, "08_by_length.cu"),
}
RUNGS = tuple(KERNELS)
CLUSTERS = (3, 4, 5, 6, 7, 8)  # of the rungs
KEYS_AS_ROWS = 5  # for 16 bits
EIGHT_WARPS, IN_STEP = 6, 7
OF_EIGHT_WARPS = (EIGHT_WARPS, IN_STEP)  # for head_dim up to 128
BY_LENGTH = 8  # lengths decide how many clusters a pair has
ONE_TREE = (3, 4, *OF_EIGHT_WARPS, BY_LENGTH)  # batch-invariant, they have the same bits
MOST_BLOCKS = 16  # of a cluster; of a pair, where its blocks are no cluster
WARPS = 4  # of a block; rungs 6 and 7 have twice as many
MOST_CLUSTERS = 8  # of a pair, in rung 5
MANY_KEYS = 512  # of a block of rung 5, so that more clusters pay
# Bytes of K and V from which blocks without clusters are faster in rungs 3, 4 and 6 to 8: memory-bound, compute-bound.
LONG_BYTES, LONG_BYTES_COMPUTE_BOUND = 400e6, 100e6
# As in bits_of_leaves() of cluster.cuh.
TILES_OF_A_LEAF = 64  # with fewer, a half or a quarter of the leaves are used
MOST_LEAVES = 128
MOST_SEQUENCES = 128  # whose lengths a warp of rung 8 holds
UNEVEN_BYTES = 400e6  # of room for K and V, from which lengths decide: below, that costs over 1 %
SHORT_CACHE, LONG_CACHE = 1024, 8192  # keys: where another rung is the fastest, see fastest()
# Keys of all kv heads, head_dim 128 or twice as many of 64: where all SMs begin to be faster than every other one,
# where they stop to be, and where they are again. See _fastest_of_few_pairs().
FEW_KEYS, MEDIUM_KEYS, MOST_KEYS = 20_000, 40_000, 1 << 18
LONG_BOX = 64  # keys of a page: of fewer, rung 5's copies are too small
ROWS = 16  # of q in a pair of rungs 3, 4 and 6 to 8, at most; in 16 bits


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


class Choice(NamedTuple):
    """How a call is made."""

    rung: int
    ahead: bool = False  # keys are loaded ahead of the wait, which the caller has to allow
    every_other_sm: bool = False  # its blocks leave the other SMs to those of the launch behind it


def fastest(
    call: Call,
    heads: int,
    kv_len: int,
    *,
    batch_invariant: bool = False,
    page_size: int | None = None,
    promised: bool = False,
    lengths: int = 1,
) -> Choice:
    """The fastest for ``heads`` kv heads of all sequences, as NOTES.md has measured it.

    Batch-invariant, a sequence has the same bits from rungs 3, 4 and 6 to 8, and others from 5: which of the two it
    is, is told from what is the same in any batch, and whatever room there is.

    Args:
        promised: whether keys may be loaded ahead of the wait.
        lengths: how many sequences there are whose lengths may differ.
    """
    choice = _fastest_of_equal_lengths(
        call, heads, kv_len, batch_invariant=batch_invariant, page_size=page_size, promised=promised
    )
    bytes_ = 2 * heads * kv_len * call.head_dim * call.item_size
    if 2 <= lengths <= MOST_SEQUENCES and bytes_ >= UNEVEN_BYTES and choice.rung in ONE_TREE:
        return Choice(BY_LENGTH, promised)
    return choice


def _fastest_of_equal_lengths(
    call: Call,
    heads: int,
    kv_len: int,
    *,
    batch_invariant: bool,
    page_size: int | None,
    promised: bool,
) -> Choice:
    sms = call.sms
    if not call.hopper:
        return Choice(1)
    if call.item_size == 4:
        return Choice(_fastest_of_float32(call, heads, kv_len, batch_invariant, page_size))
    if _in_step(call, heads, kv_len, batch_invariant, page_size):
        return Choice(IN_STEP, promised)
    if call.rows > ROWS:
        rung = _fastest_of_many_rows(call, heads, kv_len, batch_invariant)
        early = rung != KEYS_AS_ROWS and 2 * heads * kv_len * call.head_dim // 128 < MEDIUM_KEYS
        return Choice(rung, promised and early)
    if call.head_dim == 256:  # no two blocks fit on an SM
        # Where clusters of four are on almost all SMs, four have to be free before the next one begins.
        crowded = 9 * sms < 40 * heads <= 10 * sms
        few_keys = heads * kv_len * call.head_dim // 128 <= MOST_KEYS
        return Choice(4, promised and few_keys and not crowded)
    if heads > sms:
        rung = _fastest_of_many_pairs(call, heads, kv_len, batch_invariant, page_size)
        return Choice(rung, promised)
    keys = heads * kv_len * call.head_dim // 128
    if 4 * heads > sms:
        if not promised:
            return Choice(EIGHT_WARPS if 2 * heads <= sms and kv_len >= LONG_CACHE else 4)
        return Choice(EIGHT_WARPS if keys >= MEDIUM_KEYS else 4, keys > FEW_KEYS)
    if 64 * heads <= sms and not batch_invariant:  # a cluster for each would leave most SMs idle
        if kv_len > 2 * LONG_CACHE and (page_size or LONG_BOX) >= LONG_BOX:
            return Choice(KEYS_AS_ROWS)
        return Choice(EIGHT_WARPS if promised else 4, promised)
    return _fastest_of_few_pairs(call, heads, keys, batch_invariant, page_size, promised)


def _fastest_of_few_pairs(
    call: Call,
    heads: int,
    keys: int,
    batch_invariant: bool,
    page_size: int | None,
    promised: bool,
) -> Choice:
    """The fastest where several blocks share each pair.

    The keys of up to 100 MB come as fast to half of the SMs as to all, and then the next launch's blocks find an SM
    before this one ends. Of some, one launch ends as another one's loads begin: there all SMs are faster, if keys are
    loaded ahead of the wait.
    """
    many = 8 * heads > call.sms  # two blocks each are on half of the SMs
    if _fill_every_other_sm(call, heads):
        if keys <= FEW_KEYS:
            return Choice(4, promised, every_other_sm=True)
        # With pages, blocks of clusters of 16 find what they load too late.
        large = page_size and MOST_BLOCKS * heads <= call.sms
        enough = 3 * MEDIUM_KEYS // 4 if large else MEDIUM_KEYS
        # There all SMs have more blocks, unless a batch-invariant call has no more leaves.
        more = (MOST_BLOCKS // 2 if batch_invariant else MOST_BLOCKS) * heads > call.sms // 2
        if promised and keys < enough and more:
            return Choice(EIGHT_WARPS if many else 4, ahead=True)
        return Choice(4, every_other_sm=True) if keys <= MOST_KEYS else Choice(EIGHT_WARPS)
    if keys <= FEW_KEYS:
        return Choice(4)
    if promised:
        return Choice(EIGHT_WARPS if keys >= MEDIUM_KEYS else 4, ahead=True)
    return Choice(4 if keys <= 2 * MEDIUM_KEYS else EIGHT_WARPS)


def _fill_every_other_sm(call: Call, heads: int) -> bool:
    """Whether a power of two of blocks for each pair is almost one on every other SM."""
    blocks = heads * min(MOST_BLOCKS, _power_of_two(call.sms // 2 // heads))
    return 10 * blocks >= 9 * (call.sms // 2)


def _in_step(
    call: Call, heads: int, kv_len: int, batch_invariant: bool, page_size: int | None
) -> bool:
    """Whether rung 7 is faster than 4 and 6: where an SM reads more than 3 MB in order, and computes little with it."""
    if call.head_dim > 128 or call.rows * call.item_size > ROWS or heads > call.sms:
        return False
    if page_size or (batch_invariant and call.item_size == 4):
        return False
    long_bytes = LONG_BYTES if call.head_dim == 128 else LONG_BYTES / 2
    return 2 * heads * kv_len * call.head_dim * call.item_size >= long_bytes


def _fastest_of_float32(
    call: Call, heads: int, kv_len: int, batch_invariant: bool, page_size: int | None
) -> int:
    if call.head_dim == 256:
        return 4
    if call.head_dim == 128 and _in_step(call, heads, kv_len, batch_invariant, page_size):
        return IN_STEP
    return EIGHT_WARPS if 8 * heads <= call.sms and kv_len >= LONG_CACHE else 4


def _fastest_of_many_rows(call: Call, heads: int, kv_len: int, batch_invariant: bool) -> int:
    """The fastest of more than 16 rows: rung 5, unless two pairs of each kv head find more SMs that are idle.

    Then the keys are asked for twice, at neighbouring blocks.
    """
    sms, pairs = call.sms, 2 * heads
    few_and_long = 32 * pairs <= sms and kv_len > 2 * LONG_CACHE
    if not call.two_tiles or (not batch_invariant and (pairs > sms or few_and_long)):
        return KEYS_AS_ROWS
    return EIGHT_WARPS if pairs * kv_len >= 32 * SHORT_CACHE else 4


def _fastest_of_many_pairs(
    call: Call, heads: int, kv_len: int, batch_invariant: bool, page_size: int | None
) -> int:
    """The fastest where pairs are more than SMs: each has a block, so it counts how full the last wave of them is."""

    def idle(at_once: int) -> float:
        """The share of the blocks for which there is room, where an SM has so many at once."""
        room = at_once * call.sms
        return -heads % room / (heads + -heads % room)

    in_order = not page_size and kv_len >= (4 if call.head_dim == 128 else 2) * SHORT_CACHE
    if call.head_dim == 64:
        if in_order:
            return IN_STEP
        if batch_invariant:
            return 3
        # With pages, or of few, a block of rung 5 that takes one pair after the other is the fastest.
        few = idle(2) <= idle(1) and heads <= 6 * call.sms
        if page_size or few:
            return KEYS_AS_ROWS
        one_wave = call.rows <= 8 and heads <= 3 * call.sms and idle(3) < 0.05
        return 3 if one_wave else EIGHT_WARPS
    if batch_invariant and in_order:
        return IN_STEP
    if idle(2) <= idle(1):
        return 4
    three = call.rows <= 8 and not batch_invariant and kv_len <= SHORT_CACHE
    return 3 if three and idle(3) <= idle(1) else EIGHT_WARPS


@functools.lru_cache(maxsize=1024)
def plan(
    call: Call,
    batch: int,
    kv_heads: int,
    kv_len: int,
    batch_invariant: bool,
    rung: int,
    every_other_sm: bool = False,
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
            used = min(leaves, MOST_LEAVES)
            if kv_len < TILES_OF_A_LEAF * used * keys:
                used = min(leaves // 2, max(leaves // 4, 32), MOST_LEAVES)
            most = max(1, min(most, used // warps))
        sms = call.sms // 2 if every_other_sm else None
        of_a_cluster, clusters = _of_a_cluster(call, rung, kv_heads, batch, kv_len, most, sms), 1
        long_bytes = LONG_BYTES_COMPUTE_BOUND if call.compute_bound else LONG_BYTES
        if 2 * batch * kv_heads * kv_len * call.head_dim * call.item_size >= long_bytes:
            # Clusters leave SMs idle that single blocks use.
            single = _power_of_two(min(most, call.sms // pairs))
            if single > of_a_cluster:
                of_a_cluster, clusters = 1, single
        if rung == BY_LENGTH:
            return _by_length(call, batch, pairs // batch, of_a_cluster, kv_len, leaves)
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


def _by_length(
    call: Call, batch: int, pairs: int, of_a_cluster: int, kv_len: int, chunks: int
) -> Plan:
    """A cluster for each pair, or as many as the GPU holds at once; and room for the parts of fewer than these."""
    tiles = -(-kv_len // call.query(BY_LENGTH, "keys_of_a_tile"))
    at_once = call.query(BY_LENGTH, "clusters_at_once", blocks=of_a_cluster, tiles=min(tiles, LONG))
    if 7 * at_once <= 8 * batch * pairs:
        # A few clusters without a pair would only be in the next launch's way.
        at_once = min(at_once, batch * pairs)
    blocks = max(batch, -(-at_once // pairs)) * pairs * of_a_cluster
    parts = 4 * at_once // 3 + 1  # of clusters with more than three quarters of a share
    floats = parts * call.query(BY_LENGTH, "rows_of_a_pair") * call.head_dim // 4 * 6
    counters = batch * pairs * of_a_cluster + 1
    return Plan(BY_LENGTH, blocks, chunks, at_once, floats, counters)


def _pairs(call: Call, rung: int, kv_heads: int) -> int:
    """Of a kv head and rows that share one read of its keys, for one sequence."""
    return kv_heads * -(-call.rows // call.query(rung, "rows_of_a_pair"))


def _leaves(call: Call, rung: int, kv_heads: int) -> int:
    """How many warps could share a pair of a sequence: a power of two.

    From 128 on a quarter of them have a leaf each, on half of the SMs. Where a warp has much to compute, that is half
    of 128.
    """
    blocks = _power_of_two(call.sms // _pairs(call, rung, kv_heads))
    leaves = (WARPS if call.head_dim == 256 else 2 * WARPS) * blocks
    if leaves >= MOST_LEAVES and (call.item_size == 4 or call.rows > ROWS):
        return 2 * MOST_LEAVES
    return leaves


def _power_of_two(n: int) -> int:
    """The largest one up to n, at least 1."""
    return 1 << max(1, n).bit_length() - 1


def _of_a_cluster(
    call: Call,
    rung: int,
    kv_heads: int,
    batch: int,
    kv_len: int,
    most: int = MOST_BLOCKS,
    room: int | None = None,
) -> int:
    """How many blocks share a pair: a power of two.

    All are there at once: as many as ``room``, or one on each SM, or two where each has much to do; and each has two
    tiles at least. Rung 5 takes the memory's time with a block on every other SM.
    """
    pairs = batch * _pairs(call, rung, kv_heads)
    tiles = -(-kv_len // call.query(rung, "keys_of_a_tile"))
    sms = call.sms
    blocks = 1

    def at_once(blocks: int) -> int:
        if rung == KEYS_AS_ROWS:
            return sms // 2
        return room or (2 * sms if tiles >= LONG * blocks else sms)

    while (
        2 * blocks <= min(most, tiles // 2)
        and pairs * 2 * blocks <= at_once(2 * blocks)
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
