"""How many blocks share the work of a call: from shapes alone, never from lengths."""

import functools

import torch

from task5.ladder.by_length import blocks_by_length, grid_on_all_sms, plan_by_length
from task5.ladder.kernels import (
    BY_LENGTH,
    EIGHT_WARPS,
    KEYS_AS_ROWS,
    LONG,
    LONG_BYTES,
    MORE_ROWS,
    MORE_ROWS_BY_LENGTH,
    MOST_BLOCKS,
    OF_EIGHT_WARPS,
    ROWS,
    RUNGS,
    WARPS,
    Call,
    Plan,
    are_on_most_sms,
    power_of_two,
)

CLUSTERS = RUNGS[2:]
OF_FOUR_WARPS = (3, 4)
# Where a pair's blocks are several clusters in rungs 4 and 6: see is_spread().
SPREAD = (4, EIGHT_WARPS)
MOST_SPREAD = 32  # blocks of a pair that are clusters of two, at most
# Keys, 16-bit and of head_dim 128 or as many bytes: of each pair, of one or two; and of all pairs, by the blocks that
# each may have.
SPREAD_PAIR_KEYS, SPREAD_KEYS = 8192, {32: 50_000, 16: 100_000, 8: 150_000, 4: 300_000}
SPREAD_KEYS_OF_TWO_TILES = {32: 100_000, 16: 100_000, 8: 200_000, 4: 200_000}  # each tile counted
SPREAD_KEYS_OF_FLOAT32 = {32: 30_000, 16: 30_000, 8: 30_000, 4: 60_000}
MOST_CLUSTERS = 8  # of a pair, in rung 5
MANY_KEYS = 512  # of a block of rung 5, so that more clusters pay
LONG_BYTES_COMPUTE_BOUND = 100e6  # as LONG_BYTES, where computing takes longer than the memory
MOST_LEAVES = 512  # as in cluster.cuh


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
    """How many blocks share the work: from shapes alone, never from lengths.

    Args:
        call: what the kernel is chosen by.
        batch, kv_heads: sequences, and kv heads of each.
        kv_len: keys for which a sequence has room.
        batch_invariant: whether parts depend on a sequence's own length alone.
        rung: which kernel.
        every_other_sm: whether half of the SMs are left to the next launch's blocks.
    """
    if rung == KEYS_AS_ROWS:
        pairs = batch * _pairs(call, rung, kv_heads)
        of_a_cluster = _of_a_cluster(call, rung, kv_heads, batch, kv_len)
        clusters = _clusters_of_a_pair(call, pairs * of_a_cluster, kv_len // of_a_cluster)
        chunks = MOST_BLOCKS if batch_invariant else 0
        return _in_clusters(call, rung, pairs, of_a_cluster, clusters, chunks)
    if rung in CLUSTERS:
        pairs, leaves = batch * _pairs(call, rung, kv_heads), 0
        warps, most = 2 * WARPS if rung in OF_EIGHT_WARPS else WARPS, call.sms
        if batch_invariant:
            leaves = _leaves(call, rung, kv_heads)
            most = max(1, used_leaves(call, rung, kv_heads, kv_len) // warps)
        if rung in SPREAD and is_spread(call, pairs, kv_len):
            return _in_clusters(call, rung, pairs, *_spread(call, pairs, most), leaves)
        if rung == MORE_ROWS:
            return _in_clusters(
                call, rung, pairs, *_of_more_rows(call, pairs, kv_len, most), leaves
            )
        bytes_ = 2 * batch * kv_heads * kv_len * call.head_dim * call.item_size
        few, of_a_cluster, room = 2 * pairs <= call.sms, 0, call.sms
        if rung == MORE_ROWS_BY_LENGTH or (rung in BY_LENGTH and few):
            of_a_cluster = 2 if few and most > 1 else 1
            if few and not leaves and rung != MORE_ROWS_BY_LENGTH:
                of_a_cluster, _ = blocks_by_length(call, pairs)
        elif not leaves and (grid := grid_on_all_sms(call, pairs, bytes_)) and grid.rung == rung:
            of_a_cluster, room = grid.of_a_cluster, grid.of_an_sm * call.sms
        if of_a_cluster:
            return plan_by_length(
                call, rung, batch, pairs // batch, of_a_cluster, kv_len, leaves, room
            )
        most = min(most, MOST_BLOCKS)
        sms = call.sms // 2 if every_other_sm else None
        of_a_cluster = _of_a_cluster(
            call, rung, kv_heads, batch, kv_len, most, sms, batch_invariant
        )
        clusters = 1
        long_bytes = LONG_BYTES_COMPUTE_BOUND if call.compute_bound else LONG_BYTES
        if bytes_ >= long_bytes:
            # Clusters leave SMs idle that single blocks use.
            single = power_of_two(min(most, call.sms // pairs))
            if single > of_a_cluster:
                of_a_cluster, clusters = 1, single
        if rung in BY_LENGTH:
            return plan_by_length(call, rung, batch, pairs // batch, of_a_cluster, kv_len, leaves)
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


def is_spread(call: Call, pairs: int, kv_len: int) -> bool:
    """Whether a pair's blocks are several clusters in rungs 4 and 6, as one of 16 would have too little of the memory.

    A cluster lies in one part of the chip, a GPC, which gets some 0.8 TB/s. Of other numbers of pairs than these, one
    cluster is as fast.
    """
    pair_keys = kv_len * call.head_dim * call.item_size // 256
    if pairs <= 2:
        return pair_keys >= SPREAD_PAIR_KEYS
    blocks = min(MOST_SPREAD, power_of_two(call.sms // pairs))
    fits = blocks == MOST_SPREAD
    if call.head_dim < 256:
        fits = fits or are_on_most_sms(call, pairs, blocks)
        if not call.much_to_compute:
            fits = fits or blocks == 8 or pairs == 5
    least = SPREAD_KEYS_OF_TWO_TILES if call.two_tiles else SPREAD_KEYS
    if call.item_size == 4:
        least = SPREAD_KEYS_OF_FLOAT32
    blocks = MOST_SPREAD if pairs == 5 else blocks
    return fits and blocks in least and pairs * pair_keys >= least[blocks]


def _spread(call: Call, pairs: int, most: int) -> tuple[int, int]:
    """Blocks of a cluster, and clusters of a pair: small ones on all SMs, or those of eight on half of them."""
    blocks, small = power_of_two(call.sms // pairs), 2
    large = blocks > MOST_SPREAD
    if large and not call.much_to_compute:
        blocks = power_of_two(call.sms // 2 // pairs)
    if call.two_tiles and blocks <= 8:
        small = 1
    blocks = power_of_two(min(blocks, most))
    of_a_cluster = min(blocks, 8 if large or 2 * blocks * pairs <= call.sms else small)
    return of_a_cluster, blocks // of_a_cluster


def _of_more_rows(call: Call, pairs: int, kv_len: int, most: int) -> tuple[int, int]:
    """Blocks of a cluster, and clusters of a pair, of rung 11: one on each SM, with two tiles or more.

    Clusters of two fill all SMs. One or two pairs are faster on half of them, in clusters of eight.
    """
    tiles = -(-kv_len // call.query(MORE_ROWS, "keys_of_a_tile"))
    of_a_pair = power_of_two(call.sms // (2 if pairs <= 2 else 1) // pairs)
    blocks = min(of_a_pair, power_of_two(min(most, -(-tiles // 2))))
    small = 2 if are_on_most_sms(call, pairs, blocks) else 4
    of_a_cluster = min(blocks, 8 if pairs <= 2 else small)
    return of_a_cluster, blocks // of_a_cluster


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
    """How many warps could share a pair of a sequence: a power of two.

    From 128 on a quarter of them have a leaf each, on half of the SMs: of 3, 5, 6 or 7 pairs on too few, so these have
    twice as many. Where a warp has much to compute, that is half of 128.
    """
    pairs = _pairs(call, rung, kv_heads)
    blocks = power_of_two(call.sms // pairs)
    if blocks >= MOST_BLOCKS and 8 * pairs * blocks < 7 * call.sms:
        blocks *= 2
    leaves = (WARPS if call.head_dim == 256 and call.item_size == 4 else 2 * WARPS) * blocks
    if leaves >= 2 * WARPS * MOST_BLOCKS and (call.item_size == 4 or call.rows > ROWS):
        return 2 * leaves
    return leaves


def used_leaves(call: Call, rung: int, kv_heads: int, kv_len: int) -> int:
    """Batch-invariant, into how many leaves so many keys are cut: as bits_of_leaves() and cut() of cluster.cuh say."""
    warps = 2 * WARPS if rung in OF_EIGHT_WARPS else WARPS
    tiles = -(-kv_len * warps // call.query(rung, "keys_of_a_tile"))
    most = _leaves(call, rung, kv_heads).bit_length() - 1
    tile_bits = (tiles + tiles // 3).bit_length() - 1
    rows, one_tile, two_tiles = call.query(rung, "rows_of_a_pair"), 4, 6
    if call.item_size == 2:
        one_tile, two_tiles = 3, 9 if rows * call.head_dim <= 1024 else 7 if rows == 8 else 5
        if call.head_dim == 256:
            two_tiles = min(two_tiles, most - 3)
    small = max(min(tile_bits, one_tile), min(tile_bits - 1, two_tiles))
    few = min(max(small, tile_bits - 2), most - 1, max(most - 2, 5))
    many = max(min(tile_bits - 4, most - 1), min(tile_bits - 6, most))
    return 1 << max(0, min(max(few, many), MOST_LEAVES.bit_length() - 1))


def _of_a_cluster(
    call: Call,
    rung: int,
    kv_heads: int,
    batch: int,
    kv_len: int,
    most: int = MOST_BLOCKS,
    room: int | None = None,
    batch_invariant: bool = False,
) -> int:
    """How many blocks share a pair: a power of two.

    All are there at once: as many as ``room``, or one on each SM; and each has two tiles at least. Of four warps one is
    enough where half of the SMs hold them all, so that the next launch's find the others idle; those of the largest
    clusters only if the GPU has room for twice as many. Batch-invariant, ``most`` says it: with fewer each warp has
    several leaves. Rung 5 takes the memory's time with a block on every other SM.
    """
    pairs = batch * _pairs(call, rung, kv_heads)
    tiles = -(-kv_len // call.query(rung, "keys_of_a_tile"))
    at_once = room or (call.sms // 2 if rung == KEYS_AS_ROWS else call.sms)
    if rung in BY_LENGTH and 9 * pairs >= 8 * call.sms and tiles >= 2 * LONG:
        at_once *= 2  # almost each SM has two: a long sequence's last blocks share one with others
    blocks = 1
    while 2 * blocks <= most and pairs * 2 * blocks <= at_once:
        fit = call.query(rung, "clusters_at_once", blocks=2 * blocks, tiles=min(tiles, LONG))
        roomy = 2 * blocks < MOST_BLOCKS or 2 * pairs <= fit
        few = 2 * pairs * 2 * blocks <= call.sms and roomy and rung in OF_FOUR_WARPS
        if pairs > fit or (not batch_invariant and 2 * blocks > (tiles if few else tiles // 2)):
            break
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
