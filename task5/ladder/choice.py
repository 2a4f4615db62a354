"""Which rung a call of decode takes: from shapes alone, never from lengths."""

from task5.ladder.by_length import (
    FEW_PAIRS,
    MANY_UNEVEN_BYTES,
    SOME_PAIRS,
    UNEVEN_BYTES,
    fastest_by_length,
    has_more_blocks,
    uneven_bytes,
)
from task5.ladder.chunk import UNEVEN_BYTES as MORE_UNEVEN_BYTES  # of more than 16 rows
from task5.ladder.chunk import by_length_pays
from task5.ladder.kernels import (
    EIGHT_WARPS,
    FEW_KEYS,
    IN_STEP,
    KEYS_AS_ROWS,
    LONG_BYTES,
    MORE_ROWS,
    MORE_ROWS_BY_LENGTH,
    MOST_BLOCKS,
    MOST_KEYS,
    MOST_SEQUENCES,
    ONE_TREE,
    ROWS,
    SHARED_KEYS,
    Call,
    Choice,
    are_on_most_sms,
    fill_every_other_sm,
    is_crowded,
    keys_loaded_ahead,
    power_of_two,
)
from task5.ladder.plan import MOST_SPREAD, is_spread
from task5.ladder.trees import fastest_of_trees, leaves_and_warps

SHORT_CACHE, LONG_CACHE = 1024, 8192  # keys: where another rung is the fastest, see fastest()
# Of 17 to 32 rows: K and V from which on one read of them may be faster than two by twice as many blocks. And of more,
# where kv heads are more than SMs: up to how many rows two reads by rung 11 are faster than one by rung 5.
ONE_READ_BYTES, ROWS_OF_TWO_READS = 35e6, 48
# Of 17 to 32 rows: K and V from which on chunk_attention is faster, contiguous, and in pages of a multiple of so many
# keys. Of more: up to which keys, counted for each 16 rows, pairs of 16 are.
CHUNK_BYTES, CHUNK_BYTES_IN_PAGES, CHUNK_PAGE, KEYS_OF_PAIRS = 15e6, 25e6, 64, 80_000
# Keys, counted as those, from which on eight warps are faster than four: of 17 to 32 rows, and of more.
KEYS_OF_EIGHT_WARPS = 32 * 1024, 16 * 1024
# Of more than 16 rows: keys of all kv heads where loading ahead of the wait stops to pay.
MEDIUM_KEYS = 40_000
# In pages, of one or two blocks of each pair on most SMs: up to which four warps load ahead of the wait, and up to
# which they are faster than eight.
KEYS_IN_PAGES = 45_000, 75_000
# Contiguous, where blocks are on some SMs alone: between which four warps are the fastest without keys ahead.
KEYS_ON_SOME_SMS = 27_000, 43_000
# In float32: up to which keys are loaded ahead of the wait, and from which on eight warps are faster.
FEW_KEYS_OF_FLOAT32, MANY_KEYS_OF_FLOAT32 = 12_500, 70_000
PAIR_KEYS = 4095  # of one or two pairs: up to so many, four warps take less time than eight
PAIRS_OF_16_BITS = 12  # up to so many any number of blocks pays where all lengths are equal


def is_faster_as_a_chunk(
    call: Call,
    heads: int,
    kv_len: int,
    *,
    batch_invariant: bool = False,
    page_size: int | None = None,
    lengths: int = 1,
) -> bool:
    """Whether chunk_attention takes less time: of more than 16 rows, unless keys are few, or pages small.

    Of up to 32 rows not where lengths decide, unless they do so for a chunk, too. Batch-invariant, rows alone may
    decide. Arguments are those of :func:`fastest`.
    """
    if not call.hopper or call.item_size == 4 or call.head_dim == 256 or call.rows <= ROWS:
        return False
    if batch_invariant:
        return True
    if call.rows > 2 * ROWS:
        return not _has_few_keys(call, heads, kv_len)
    bytes_ = 2 * heads * kv_len * call.head_dim * call.item_size
    uneven = 2 <= lengths <= MOST_SEQUENCES and bytes_ >= MORE_UNEVEN_BYTES
    enough = bytes_ >= (CHUNK_BYTES_IN_PAGES if page_size else CHUNK_BYTES)
    if uneven and not by_length_pays(heads, bytes_, call.sms):
        return False
    return enough and (page_size or 0) % CHUNK_PAGE == 0


def _has_few_keys(call: Call, heads: int, kv_len: int) -> bool:
    """Whether pairs of 16 rows take less time for more than 32 rows: the keys that each of them reads come from L2."""
    pairs = heads * -(-call.rows // ROWS)
    return pairs <= 2 * call.sms and pairs * kv_len * call.head_dim // 128 < KEYS_OF_PAIRS


def fastest(
    call: Call,
    heads: int,
    kv_len: int,
    *,
    batch_invariant: bool = False,
    page_size: int | None = None,
    promised: bool = False,
    batch: int = 1,
    lengths: int = 1,
) -> Choice:
    """The fastest for ``heads`` kv heads of all sequences, as NOTES.md has measured it.

    Batch-invariant, a sequence has the same bits from rungs 3, 4 and 6 to 10, others from 5, others from 11 and 12, and
    others as a chunk: which of these it is depends on what is the same in any batch, and whatever room there is.

    Args:
        call: what a kernel is chosen by.
        heads: kv heads of all sequences.
        kv_len: keys for which a sequence has room, or that a window lets its tokens see.
        batch_invariant: whether a sequence must have the same bits in any batch.
        page_size: keys of a page; None for a contiguous cache.
        promised: whether keys may be loaded ahead of the wait.
        batch: how many sequences there are.
        lengths: how many sequences there are whose lengths may differ.
    """
    choice = _fastest_of_equal_lengths(
        call, heads, kv_len, batch_invariant=batch_invariant, page_size=page_size,
        promised=promised, batch=batch,
    )  # fmt: skip
    bytes_ = 2 * heads * kv_len * call.head_dim * call.item_size
    may_differ = 2 <= lengths <= MOST_SEQUENCES
    if choice.rung == MORE_ROWS:
        fit = heads * -(-call.rows // (2 * ROWS)) <= call.sms
        by_length = may_differ and fit and bytes_ >= MORE_UNEVEN_BYTES
        return Choice(MORE_ROWS_BY_LENGTH, choice.ahead) if by_length else choice
    pairs = heads * (1 + call.two_tiles)
    long = bytes_ >= MANY_UNEVEN_BYTES
    most = (FEW_PAIRS if long else SOME_PAIRS) if batch_invariant else 2
    if pairs <= most and is_spread(call, pairs, kv_len):
        return choice  # by length a pair that is not cut would have one cluster
    enough = bytes_ >= uneven_bytes(call, pairs, page_size, batch_invariant)
    # Equal lengths may have as many blocks of a pair as there is room for, too.
    more = not batch_invariant and has_more_blocks(call, pairs)
    long_and_few = pairs <= PAIRS_OF_16_BITS and bytes_ >= UNEVEN_BYTES
    pays = more and (call.compute_bound or long_and_few) and batch <= MOST_SEQUENCES
    if (may_differ or pays) and enough and choice.rung in ONE_TREE:
        return fastest_by_length(call, pairs, bytes_, page_size, batch_invariant, promised)
    return choice


def _fastest_of_equal_lengths(
    call: Call,
    heads: int,
    kv_len: int,
    *,
    batch_invariant: bool,
    page_size: int | None,
    promised: bool,
    batch: int,
) -> Choice:
    sms = call.sms
    if not call.hopper:
        return Choice(1)
    if call.item_size == 4:
        return _fastest_of_float32(call, heads, kv_len, batch_invariant, page_size, promised, batch)
    if _in_step(call, heads, kv_len, batch_invariant, page_size):
        return Choice(IN_STEP, promised)
    if call.rows > ROWS:
        return _fastest_of_many_rows(call, heads, kv_len, batch_invariant, promised)
    if call.head_dim == 256:  # no two blocks fit on an SM
        # Clusters of four on almost all SMs: the next launch's need four free ones, we suppose, and find none ahead.
        crowded = 9 * sms < 40 * heads <= 10 * sms
        few_keys = heads * kv_len * call.head_dim // 128 <= MOST_KEYS
        return Choice(4, promised and few_keys and not crowded)
    if heads > sms:
        rung = _fastest_of_many_pairs(call, heads, kv_len, batch_invariant, page_size)
        return Choice(rung, promised)
    if batch_invariant:
        return fastest_of_trees(call, heads, kv_len, page_size, promised, batch)
    return _fastest_of_few_pairs(call, heads, kv_len, page_size, promised)


def _fastest_of_few_pairs(
    call: Call, heads: int, kv_len: int, page_size: int | None, promised: bool
) -> Choice:
    """The fastest where each pair has an SM, or several: a power of two of them.

    What counts is how many SMs have a block then. On almost all of them rung 6 is the fastest, as its blocks read most
    at once; on fewer, rung 4's: they leave the memory to the next launch's, which finds idle SMs in any case. Only few
    keys are better loaded ahead of the wait there.
    """
    pair_keys = kv_len * call.head_dim // 128
    keys, blocks = heads * pair_keys, power_of_two(call.sms // heads)
    if is_spread(call, heads, kv_len):
        fills = heads <= 2 or 20 * heads * min(MOST_SPREAD, blocks) >= 19 * call.sms
        return Choice(EIGHT_WARPS, promised) if fills else Choice(4)
    if blocks > MOST_BLOCKS:  # SMs are left over
        most = PAIR_KEYS if heads <= 2 else LONG_CACHE // 2
        return Choice(4 if pair_keys <= most else EIGHT_WARPS, promised)
    every_other_sm = fill_every_other_sm(call, heads)
    on_most_sms = are_on_most_sms(call, heads, blocks)
    if page_size and every_other_sm and call.rows > ROWS // 2 and keys > FEW_KEYS:
        return Choice(EIGHT_WARPS, promised)  # more to compute than half of the SMs can
    some = not (page_size or on_most_sms or blocks == MOST_BLOCKS)
    if some and KEYS_ON_SOME_SMS[0] < keys <= KEYS_ON_SOME_SMS[1]:
        return Choice(4)
    of_few_blocks = page_size and blocks <= 2 and on_most_sms
    if keys <= (KEYS_IN_PAGES[0] if of_few_blocks else keys_loaded_ahead(call, heads, blocks)):
        if blocks < MOST_BLOCKS or not promised:
            return Choice(4, promised, every_other_sm and not promised)
        # With pages blocks of clusters of 16 find what they load too late.
        late = every_other_sm and bool(page_size) and keys > FEW_KEYS
        return Choice(4, not late, every_other_sm and (late or keys <= FEW_KEYS))
    if blocks == MOST_BLOCKS:
        if every_other_sm:
            return Choice(4, every_other_sm=True) if keys <= MOST_KEYS else Choice(EIGHT_WARPS)
        return Choice(4) if page_size else Choice(EIGHT_WARPS, every_other_sm=True)
    if not on_most_sms:
        if promised and keys < 2.5 * FEW_KEYS and not page_size:
            return Choice(EIGHT_WARPS, ahead=True)
        return Choice(4, promised and keys > (10 if page_size else 20) * FEW_KEYS)
    if is_crowded(call, heads, blocks):
        return Choice(EIGHT_WARPS, promised and keys <= SHARED_KEYS)
    most = MOST_KEYS if every_other_sm else KEYS_IN_PAGES[1] if blocks <= 2 else 0
    if not promised or (page_size and keys <= most):
        return Choice(4, every_other_sm=every_other_sm)
    return Choice(EIGHT_WARPS, ahead=True)


def _in_step(
    call: Call, heads: int, kv_len: int, batch_invariant: bool, page_size: int | None
) -> bool:
    """Whether rung 7 is faster than 4 and 6: where an SM reads more than 3 MB in order, and computes little with it."""
    if call.head_dim > 128 or call.rows * call.item_size > ROWS or heads > call.sms:
        return False
    blocks = power_of_two(call.sms // heads)
    if blocks > MOST_BLOCKS or not are_on_most_sms(call, heads, blocks):
        return False
    if page_size or (batch_invariant and call.item_size == 4):
        return False
    long_bytes = LONG_BYTES if call.head_dim == 128 or blocks > 2 else LONG_BYTES / 2
    return 2 * heads * kv_len * call.head_dim * call.item_size >= long_bytes


def _fastest_of_float32(
    call: Call,
    heads: int,
    kv_len: int,
    batch_invariant: bool,
    page_size: int | None,
    promised: bool,
    batch: int,
) -> Choice:
    """The fastest where a warp computes four times as long with a key as in 16 bits.

    Eight warps on an SM are faster than four where few SMs have a block, or where two large clusters find no room
    beside each other; four are where most SMs have a block, as the next launch's stands beside it, unless a key has
    more than four rows.
    """
    if call.head_dim == 256:
        return Choice(4)
    if call.head_dim == 128 and _in_step(call, heads, kv_len, batch_invariant, page_size):
        return Choice(IN_STEP)
    pairs = heads * -(-call.rows // ROWS)
    if pairs > call.sms:
        return Choice(4 if pairs <= 2 * call.sms or _idle(call, pairs, 2) <= 0.2 else 3)
    pair_keys = kv_len * call.head_dim // 128
    keys, blocks = pairs * pair_keys, power_of_two(call.sms // pairs)
    compute_much, many_keys = call.rows > ROWS // 4, keys > MANY_KEYS_OF_FLOAT32
    if compute_much and batch_invariant and keys > FEW_KEYS_OF_FLOAT32:
        leaves, warps = leaves_and_warps(call, pairs, kv_len, batch, heads // batch)
        if leaves > warps:
            return Choice(EIGHT_WARPS)
    enough = many_keys and blocks > 1 and (pairs > 2 or call.head_dim == 128)
    if compute_much and enough and not batch_invariant:
        return Choice(EIGHT_WARPS)
    if is_spread(call, pairs, kv_len):
        return Choice(4)
    if 16 * pairs <= call.sms and pair_keys >= 4 * SHORT_CACHE:
        return Choice(EIGHT_WARPS)
    if keys <= FEW_KEYS_OF_FLOAT32:
        return Choice(4, promised)
    if is_crowded(call, pairs, blocks):
        return Choice(EIGHT_WARPS if keys > 2 * FEW_KEYS else 4)
    on_most_sms = blocks <= 2 and 6 * pairs * blocks >= 5 * call.sms
    eight = many_keys and call.head_dim == 128 and not on_most_sms
    return Choice(EIGHT_WARPS if eight else 4)


def _fastest_of_many_rows(
    call: Call, heads: int, kv_len: int, batch_invariant: bool, promised: bool
) -> Choice:
    """The fastest of more than 16 rows: rung 11; of few keys, pairs of up to 16; of many kv heads, rung 5.

    Of two pairs of each kv head the keys are asked for twice, at neighbouring blocks.
    """
    sms, pairs = call.sms, heads * -(-call.rows // ROWS)
    if call.head_dim == 256:
        return Choice(KEYS_AS_ROWS)
    if call.two_tiles:
        if heads > sms and not batch_invariant:
            return Choice(KEYS_AS_ROWS)
        one_read = not batch_invariant and _one_read_pays(call, heads, kv_len)
    elif not batch_invariant and _has_few_keys(call, heads, kv_len):
        one_read = False
    else:  # rung 5 reads the keys once for 64 rows, and 11 twice
        one_read = batch_invariant or heads <= sms or not ROWS_OF_TWO_READS < call.rows <= 64
        if not one_read:
            return Choice(KEYS_AS_ROWS)
    if one_read:
        of_more_rows = heads * -(-call.rows // (2 * ROWS))
        blocks = power_of_two(sms // of_more_rows)
        on_most_sms = of_more_rows >= sms or are_on_most_sms(call, of_more_rows, blocks)
        return Choice(MORE_ROWS, promised and on_most_sms and call.head_dim == 128)
    keys = pairs * kv_len * call.head_dim // 128
    early = promised and keys < MEDIUM_KEYS
    if pairs <= sms and is_spread(call, pairs, kv_len):
        return Choice(4, early)
    eight = pairs <= sms or batch_invariant
    least = KEYS_OF_EIGHT_WARPS[call.rows > 2 * ROWS]
    return Choice(EIGHT_WARPS if eight and keys >= least else 4, early)


def _one_read_pays(call: Call, heads: int, kv_len: int) -> bool:
    """Whether 17 to 32 rows take one block where two would read the same keys."""
    if heads == 2:
        return False
    blocks = power_of_two(call.sms // heads)
    bytes_ = 2 * heads * kv_len * call.head_dim * call.item_size
    if blocks == 1 or (blocks in (8, 16) and are_on_most_sms(call, heads, blocks)):
        return bytes_ >= ONE_READ_BYTES
    return bytes_ >= (2 if call.head_dim == 128 and heads != 4 else 3) * ONE_READ_BYTES


def _fastest_of_many_pairs(
    call: Call, heads: int, kv_len: int, batch_invariant: bool, page_size: int | None
) -> int:
    """The fastest where pairs are more than SMs: each has a block, so it counts how full the last wave of them is."""
    if call.head_dim == 64 and heads > 4 * call.sms and kv_len <= SHORT_CACHE:
        return 3 if batch_invariant else KEYS_AS_ROWS
    if _idle(call, heads, 2) <= 0.2:
        in_order = call.head_dim == 128 and not page_size and kv_len >= 4 * SHORT_CACHE
        return IN_STEP if batch_invariant and in_order and _idle(call, heads, 1) <= 0.1 else 4
    few = heads <= 2 * call.sms
    if batch_invariant:
        return 3 if few or call.head_dim == 64 else EIGHT_WARPS
    return 3 if few or _idle(call, heads, 3) <= 0.15 else EIGHT_WARPS


def _idle(call: Call, heads: int, at_once: int) -> float:
    """The share of the blocks for which there is room that are missing in the last wave, of so many to an SM."""
    room = at_once * call.sms
    return -heads % room / (heads + -heads % room)
