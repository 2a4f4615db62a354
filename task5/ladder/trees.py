"""Which rung a batch-invariant call of few pairs takes: how many leaves its warps have decides, beside SMs and keys."""

import math

from task5.ladder.kernels import (
    EIGHT_WARPS,
    FEW_KEYS,
    MOST_BLOCKS,
    MOST_KEYS,
    ROWS,
    SHARED_KEYS,
    WARPS,
    Call,
    Choice,
    are_on_most_sms,
    fill_every_other_sm,
    has_large_states,
    is_crowded,
    keys_loaded_ahead,
    power_of_two,
)
from task5.ladder.plan import is_spread, plan, used_leaves

# Keys of all pairs, head_dim 128 or twice as many of 64. From which on eight warps on all SMs are faster than four that
# have several leaves on every other SM; of few pairs, whose warps have one each, from which on loading ahead of the
# wait stops to pay; of pairs on some SMs, whose warps have several, up to which eight are faster.
KEYS_OF_LARGE_TREES, KEYS_OF_LEAVES, KEYS_OF_SEVERAL_LEAVES = 30_000, 16_000, 80_000
# Of pairs with several clusters: from which eight warps are faster.
KEYS_OF_A_TREE, KEYS_OF_SEVERAL_TREES = 500_000, 80_000


def leaves_and_warps(
    call: Call, pairs: int, kv_len: int, batch: int, kv_heads: int
) -> tuple[int, int]:
    """Leaves of a sequence that fills its cache, and how many warps rung 4 has for a pair of it."""
    work = plan(call, batch, kv_heads, kv_len, True, 4)
    return used_leaves(call, 4, kv_heads, kv_len), work.blocks // pairs * WARPS


def fastest_of_trees(
    call: Call, pairs: int, kv_len: int, page_size: int | None, promised: bool, batch: int
) -> Choice:
    """The fastest in 16 bits, where each pair has an SM, or several; head_dim up to 128, up to 16 rows.

    Each further leaf of a warp takes as long as a tile or two. Eight warps of a block have half as many each, and while
    one of a scheduler's merges the other computes. But their blocks are alone on an SM.
    """
    keys, blocks = pairs * (kv_len * call.head_dim // 128), power_of_two(call.sms // pairs)
    leaves, warps = leaves_and_warps(call, pairs, kv_len, batch, pairs // batch)
    several = leaves > warps
    if is_spread(call, pairs, kv_len):
        if several and promised:
            return Choice(EIGHT_WARPS, ahead=True)
        return Choice(EIGHT_WARPS if keys >= _keys_of_large_trees(call, pairs, batch) else 4)
    if blocks > MOST_BLOCKS:  # SMs are left over
        if several and (promised or pairs <= 2):
            return Choice(EIGHT_WARPS, promised)
        return Choice(4, promised and keys < KEYS_OF_LEAVES)
    every_other_sm = fill_every_other_sm(call, pairs)
    several_on_half = leaves > WARPS * (blocks // 2)
    if page_size and every_other_sm and call.rows > ROWS // 2 and keys > 2 * FEW_KEYS:
        return Choice(EIGHT_WARPS, promised)
    large = keys > (FEW_KEYS if page_size else KEYS_OF_LARGE_TREES)
    if promised and several_on_half and large and blocks == MOST_BLOCKS:
        return Choice(EIGHT_WARPS, ahead=True)
    if is_crowded(call, pairs, blocks) and promised and leaves > 2 * WARPS:  # on half of the SMs
        return Choice(EIGHT_WARPS, keys <= SHARED_KEYS)
    if keys <= keys_loaded_ahead(call, pairs, blocks):
        if blocks < MOST_BLOCKS or not promised:
            return Choice(4, promised, every_other_sm and not promised)
        # With pages blocks of clusters of 16 find what they load too late.
        late = keys > FEW_KEYS and every_other_sm and (bool(page_size) or not several_on_half)
        return Choice(4, not late, late or (keys <= FEW_KEYS and not several_on_half))
    if blocks == MOST_BLOCKS:
        if every_other_sm:
            return Choice(4, every_other_sm=True) if keys <= MOST_KEYS else Choice(EIGHT_WARPS)
        return Choice(4) if page_size else Choice(EIGHT_WARPS, promised)
    if not are_on_most_sms(call, pairs, blocks):
        if several and has_large_states(call):
            return Choice(EIGHT_WARPS, promised)
        if promised and ((several and keys < KEYS_OF_SEVERAL_LEAVES) or leaves >= 8 * warps):
            return Choice(EIGHT_WARPS, ahead=True)
        return Choice(4, promised and keys > (10 if page_size else 20) * FEW_KEYS)
    if is_crowded(call, pairs, blocks):
        return Choice(EIGHT_WARPS, promised and keys <= SHARED_KEYS)
    if page_size and promised and every_other_sm and several_on_half:
        return Choice(4, ahead=True)
    if not promised or (page_size and every_other_sm and keys <= MOST_KEYS):
        return Choice(4, every_other_sm=every_other_sm)
    return Choice(EIGHT_WARPS, ahead=True)


def _keys_of_large_trees(call: Call, pairs: int, batch: int) -> int | float:
    """Of pairs with several clusters, from which keys on rung 4's warps have several leaves, which takes them longer.

    Where states are large, or of one or two pairs. Several sequences have more leaves than one that has as many kv
    heads.
    """
    if has_large_states(call):
        return KEYS_OF_SEVERAL_TREES if batch > 1 else KEYS_OF_A_TREE
    return KEYS_OF_A_TREE if pairs <= 2 else math.inf
