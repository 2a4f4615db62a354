"""Which rung a call of decode takes: from shapes alone, never from lengths."""

from typing import NamedTuple

from task5.ladder.plan import (
    BY_LENGTH,
    EIGHT_WARPS,
    IN_STEP,
    KEYS_AS_ROWS,
    LONG_BYTES,
    MOST_BLOCKS,
    MOST_SEQUENCES,
    ONE_TREE,
    ROWS,
    Call,
    power_of_two,
)

UNEVEN_BYTES = 400e6  # of room for K and V, from which lengths decide: below, that costs over 1 %
SHORT_CACHE, LONG_CACHE = 1024, 8192  # keys: where another rung is the fastest, see fastest()
# Keys of all kv heads, head_dim 128 or twice as many of 64: where all SMs begin to be faster than every other one,
# where they stop to be, and where they are again. See _fastest_of_few_pairs().
FEW_KEYS, MEDIUM_KEYS, MOST_KEYS = 20_000, 40_000, 1 << 18
LONG_BOX = 64  # keys of a page: of fewer, rung 5's copies are too small


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
    is depends on what is the same in any batch, and whatever room there is.

    Args:
        call: what a kernel is chosen by.
        heads: kv heads of all sequences.
        kv_len: keys for which a sequence has room.
        batch_invariant: whether a sequence must have the same bits in any batch.
        page_size: keys of a page; None for a contiguous cache.
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
        # Clusters of four on almost all SMs: the next launch's need four free ones, we suppose, and find none ahead.
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
    blocks = heads * min(MOST_BLOCKS, power_of_two(call.sms // 2 // heads))
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
