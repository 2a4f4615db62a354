"""Where lengths decide how many blocks a pair has: from how many bytes on, the rung that a call takes, and its grid."""

import math
from typing import NamedTuple

from task5.ladder.kernels import (
    BY_LENGTH,
    LONG,
    LONG_BYTES,
    MOST_BLOCKS,
    ROWS,
    Call,
    Choice,
    Plan,
    are_on_most_sms,
    has_large_states,
    power_of_two,
)

# Of room for K and V, from which lengths decide: see uneven_bytes().
FEW_UNEVEN_BYTES, SOME_UNEVEN_BYTES, UNEVEN_BYTES, MANY_UNEVEN_BYTES = 125e6, 200e6, 250e6, 400e6
UNEVEN_BYTES_COMPUTE_BOUND, UNEVEN_BYTES_OF_WAVES = 300e6, 150e6
# Pairs for each SM where lengths decide: up to which rung 8 is the fastest, 9 with three blocks on an SM, 8 with two at
# once, and 10.
ALMOST_ONE, ONE_AND_A_HALF, TWO_AT_ONCE, FEW_WAVES = 1.17, 1.6, 2, 3
SOME_SMS = 0.3  # and up to which rung 8 loads keys ahead of the wait below MANY_UNEVEN_BYTES
MANY_SMS = 0.4  # and from which on rung 10 is faster where the states of leaves are large
# Of the SMs that have a block: up to which rung 8 is faster without keys ahead.
MOST_WITHOUT_AHEAD = 0.8
# Batch-invariant pairs that have several clusters each: of so few, lengths decide nothing; and below
# MANY_UNEVEN_BYTES. Of so few others they decide where those of more pairs cost more.
FEW_PAIRS, SOME_PAIRS = 5, 8
# Of the SMs. By length: blocks that are on almost all, of few pairs; and pairs up to which blocks on all pay: clusters
# of two, single ones with head_dim 256, and others.
ALMOST_ALL, ALMOST_ALL_OF_256 = 0.95, 0.9
MORE_THAN_HALF, MOST_OF_256, MOST_OF_16_BITS = 0.58, 0.62, 0.69


def has_more_blocks(call: Call, pairs: int) -> bool:
    """Whether any number of blocks of a pair is so many more than a power of two that all SMs count."""
    _, blocks = blocks_by_length(call, pairs)
    return 2 * pairs <= call.sms and 4 * blocks > 5 * power_of_two(call.sms // pairs)


def uneven_bytes(call: Call, pairs: int, page_size: int | None, batch_invariant: bool) -> float:
    """Of room for K and V, from which lengths decide: below, equal ones lose more than others gain."""
    wide, float32 = call.head_dim == 256, call.item_size == 4
    many_rows = _has_many_rows(call)
    if float32 and wide and call.rows > ROWS // 4:
        return math.inf  # compute-bound
    as_few = batch_invariant or call.rows > ROWS or (wide and (float32 or many_rows))
    if as_few or pairs <= SOME_PAIRS:
        return _uneven_bytes_of_few(call, pairs, page_size, batch_invariant)
    if pairs > call.sms:
        return _uneven_bytes_of_waves(call, pairs, page_size)
    if float32:
        return FEW_UNEVEN_BYTES
    least = SOME_UNEVEN_BYTES if many_rows or page_size else FEW_UNEVEN_BYTES
    if 2 * pairs <= call.sms:
        # Without lengths, clusters of two or eight on all SMs are the fastest of those.
        blocks = power_of_two(call.sms // pairs)
        full = blocks != 4 and pairs * blocks >= ALMOST_ALL * call.sms
        return SOME_UNEVEN_BYTES if full else least
    if grid_on_all_sms(call, pairs, UNEVEN_BYTES):
        return least
    if page_size and (wide or many_rows):
        return MANY_UNEVEN_BYTES
    if not are_on_most_sms(call, pairs, 1):
        return least
    return UNEVEN_BYTES if many_rows else SOME_UNEVEN_BYTES


def _uneven_bytes_of_waves(call: Call, pairs: int, page_size: int | None) -> float:
    """The same of more pairs than SMs."""
    for_each_sm, float32 = pairs / call.sms, call.item_size == 4
    if call.head_dim == 256 or _has_many_rows(call):
        some = ALMOST_ONE < for_each_sm <= ONE_AND_A_HALF and not (float32 or page_size)
        return UNEVEN_BYTES_OF_WAVES if some else MANY_UNEVEN_BYTES
    if for_each_sm > TWO_AT_ONCE:
        return MANY_UNEVEN_BYTES
    if float32 and not page_size:
        return FEW_UNEVEN_BYTES
    if for_each_sm > ONE_AND_A_HALF:
        return UNEVEN_BYTES
    return SOME_UNEVEN_BYTES if page_size else UNEVEN_BYTES_OF_WAVES


def _uneven_bytes_of_few(
    call: Call, pairs: int, page_size: int | None, batch_invariant: bool
) -> float:
    """The same of few pairs; and of batch-invariant ones, of many rows, and of float32 with head_dim 256."""
    if 2 * pairs > call.sms:
        one = pairs <= call.sms or ALMOST_ONE < pairs / call.sms <= ONE_AND_A_HALF
        return UNEVEN_BYTES if one and not (call.compute_bound or page_size) else MANY_UNEVEN_BYTES
    more = not batch_invariant and has_more_blocks(call, pairs)
    if page_size:
        _, blocks = blocks_by_length(call, pairs)
        full = not batch_invariant and pairs * blocks >= ALMOST_ALL * call.sms
        return UNEVEN_BYTES if full or more else MANY_UNEVEN_BYTES
    if not call.compute_bound:
        return UNEVEN_BYTES
    return FEW_UNEVEN_BYTES if more else UNEVEN_BYTES_COMPUTE_BOUND


def fastest_by_length(
    call: Call,
    pairs: int,
    bytes_: float,
    page_size: int | None,
    batch_invariant: bool,
    promised: bool,
) -> Choice:
    """The fastest where lengths decide: the one whose blocks give all SMs as much to do.

    Rung 10 has one pair on an SM after the other. Where pairs are far more than SMs, most of them may be short, and two
    at a time take less time. In float32 eight warps compute faster, unless almost each SM has a pair; and they read
    faster where very few pairs fill all SMs, and where almost each SM has a pair and its part is short.
    """
    deep, _, of_eight_warps, _ = BY_LENGTH
    for_each_sm = pairs / call.sms
    if call.head_dim == 256:
        return Choice(deep)
    if for_each_sm > 1:
        return _fastest_of_waves(call, pairs, bytes_, page_size, batch_invariant, promised)
    if 2 * pairs <= call.sms and not batch_invariant:
        # Of rung 8's blocks an SM that is left over gets two of the next launch's, which makes that slower. So it is
        # for keys that are loaded ahead, and where many SMs are left over.
        _, blocks = blocks_by_length(call, pairs)
        used = pairs * blocks / call.sms
        eight = call.item_size == 4 or used >= (ALMOST_ALL if promised else MOST_WITHOUT_AHEAD)
        return Choice(of_eight_warps if eight else deep, promised)
    if not batch_invariant and (grid := grid_on_all_sms(call, pairs, bytes_)):
        return Choice(grid.rung, promised and grid.ahead)
    on_most_sms = are_on_most_sms(call, pairs, 1)
    merge = batch_invariant and for_each_sm > MANY_SMS and has_large_states(call)
    fill = are_on_most_sms(call, pairs, power_of_two(call.sms // pairs))
    if (call.item_size == 4 and not on_most_sms) or merge or (fill and pairs <= SOME_PAIRS):
        return Choice(of_eight_warps)
    few_rows = not (batch_invariant or _has_many_rows(call))
    one_each = few_rows and on_most_sms and call.item_size == 2
    if one_each and bytes_ < UNEVEN_BYTES:
        return Choice(of_eight_warps, promised)
    in_pages = (
        page_size is not None and not batch_invariant
    )  # the next launch finds its pages earlier
    early = one_each or in_pages or bytes_ >= MANY_UNEVEN_BYTES or for_each_sm <= SOME_SMS
    return Choice(deep, promised and early)


def _fastest_of_waves(
    call: Call,
    pairs: int,
    bytes_: float,
    page_size: int | None,
    batch_invariant: bool,
    promised: bool,
) -> Choice:
    """The same of more pairs than SMs."""
    deep, shallow, of_eight_warps, _ = BY_LENGTH
    for_each_sm = pairs / call.sms
    if for_each_sm > FEW_WAVES:
        return Choice(deep)  # keys ahead would take the memory from the blocks before them
    if for_each_sm > TWO_AT_ONCE:
        return Choice(of_eight_warps, promised)
    if batch_invariant or _has_many_rows(call):
        if for_each_sm <= ALMOST_ONE:
            return Choice(deep)
        return Choice(shallow if for_each_sm <= ONE_AND_A_HALF else of_eight_warps, promised)
    if for_each_sm > ONE_AND_A_HALF:
        return Choice(deep, promised)
    if page_size or (call.item_size == 2 and bytes_ < SOME_UNEVEN_BYTES):
        return Choice(shallow, promised)
    return Choice(deep)


def _has_many_rows(call: Call) -> bool:
    return call.rows > ROWS // 2


def blocks_by_length(call: Call, pairs: int) -> tuple[int, int]:
    """Blocks of a cluster where lengths decide and pairs are few, and of a pair if all are as long as each other.

    A pair may have any number of clusters. They are of two blocks, which read in order together, unless single ones are
    more, and these are on almost all SMs, or there is much to compute. Large states are merged faster by two.
    """
    single, of_two = call.sms // pairs, call.sms // 2 // pairs * 2
    float32, wide = call.item_size == 4, call.head_dim == 256
    enough = float32 or pairs * single >= (ALMOST_ALL_OF_256 if wide else ALMOST_ALL) * call.sms
    if of_two < single <= MOST_BLOCKS and enough and not (wide and _has_many_rows(call)):
        return 1, single
    return 2, of_two


class Grid(NamedTuple):
    """Of a launch by length that has blocks on all SMs."""

    rung: int
    of_a_cluster: int  # blocks
    of_an_sm: int
    ahead: bool  # keys are loaded ahead of the wait, where the caller allows it


def grid_on_all_sms(call: Call, pairs: int, bytes_: float) -> Grid | None:
    """By length, of more pairs than half of the SMs, and fewer than all; None where it has a cluster for each pair.

    On all SMs it may have many idle blocks. These are in the next launch's way, which costs equal lengths more than it
    gains others where pairs are many. In float32 computing takes longer than that; with more than four rows two blocks
    on an SM compute no faster than one.
    """
    if not call.sms < 2 * pairs < 2 * call.sms:
        return None
    deep, _, of_eight_warps, _ = BY_LENGTH
    used = pairs / call.sms
    if call.head_dim == 256:
        return Grid(deep, 1, 1, False) if call.item_size == 2 and used <= MOST_OF_256 else None
    if call.item_size == 4:
        few_rows = call.rows <= ROWS // 4
        return Grid(deep, 1, 2, True) if few_rows else Grid(of_eight_warps, 1, 1, False)
    if used <= MORE_THAN_HALF and bytes_ >= LONG_BYTES:
        return Grid(deep, 2, 2, False)
    return Grid(deep, 1, 2, True) if used <= MOST_OF_16_BITS else None


def plan_by_length(
    call: Call,
    rung: int,
    batch: int,
    pairs: int,
    of_a_cluster: int,
    kv_len: int,
    chunks: int,
    room: int = 0,
) -> Plan:
    """A cluster for each pair, or as many as fit into ``room`` blocks; and room for the parts of fewer than these."""
    tiles = -(-kv_len // call.query(rung, "keys_of_a_tile"))
    at_once = call.query(rung, "clusters_at_once", blocks=of_a_cluster, tiles=min(tiles, LONG))
    clusters = max(batch, min(at_once, room // of_a_cluster) // pairs) * pairs
    at_once = min(at_once, clusters)
    parts = 4 * at_once // 3 + 1  # of clusters with more than three quarters of a share
    floats = parts * call.query(rung, "rows_of_a_pair") * call.head_dim // 4 * 6
    counters = (batch * pairs + parts) * of_a_cluster + 1  # of pairs, and of groups of parts
    return Plan(rung, clusters * of_a_cluster, chunks, at_once, floats, counters)
