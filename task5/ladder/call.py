"""Calling a rung of decode."""

import ctypes
import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from common.build import Kernels, dtype_code
from common.inputs import check_attention, check_device, check_lengths, describe, expect

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (16, 256)  # from, to; multiples of 16
MAX_QUERIES = 16
MAX_KEYS = 1 << 24
MAX_BATCH = 65535
MAX_TILES = (1 << 31) - 1
MAX_POOL = (1 << 36) - 16  # bytes: a kernel counts them in 32 bits, by 16
ON_CPU = 6  # blocks where there is no GPU: enough to share a pair
LONG = 32  # tiles of a block that make up for a second block on its SM
_KERNELS = {
    1: Kernels(__file__, "01_shared_work.cu"),
    2: Kernels(__file__, "02_dependent_launch.cu"),
    3: Kernels(__file__, "03_clusters.cu"),
    4: Kernels(__file__, "04_deeper.cu"),
    5: Kernels(__file__, "05_keys_as_rows.cu"),
    6: Kernels(__file__, "06_eight_warps.cu"),
    7: Kernels(__file__, "07_in_step.cu"),
}
RUNGS = tuple(_KERNELS)
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
SHORT_CACHE, LONG_CACHE = 1024, 8192  # keys: where another rung is the fastest, see _fastest()
KEYS_OF_ALL = (
    1 << 16
)  # of all kv heads, some 500 for an SM: where rung 6 begins to be faster, see _fastest_ahead()
LONG_BOX = 64  # keys of a page: of fewer, rung 5's copies are too small
ROWS = 16  # of q in a pair of rungs 3, 4, 6 and 7, at most; in 16 bits


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    seqlens_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    block_table: Tensor | None = None,
    window: int | None = None,
    new_keys: int | None = None,
    batch_invariant: bool = False,
    rung: int | None = None,
) -> Tensor:
    """softmax(scale q k^T) v for the newest tokens of each sequence against its cache, which is read in place, once.

    Nothing is read on the host: a CUDA graph that captured a call stays right while sequences grow.

    Args:
        q: ``(batch, q_len, heads, head_dim)``, float32, float16 or bfloat16, head_dim 64, 128 or 256, at most 16
            tokens. Token i sees the keys up to ``seqlens_k[b] - q_len + i``.
        k, v: ``(batch, max_seq, kv_heads, head_dim)``; with ``block_table`` the pages of all sequences,
            ``(pages, page_size, kv_heads, head_dim)``, page_size a multiple of 16 up to 256, all of them within 64
            GiB. kv_heads divides heads.
        scale: factor of the scores, above 0; ``1 / sqrt(head_dim)`` if None.
        seqlens_k: int32 ``(batch,)`` on q's device, keys of each sequence, the new tokens' included; all for which
            there is room if None, and where a length is larger. A negative one counts as 0.
        leftpad_k: int32 ``(batch,)``, keys to skip at the start of each sequence; a negative number counts as 0.
        block_table: int32 ``(batch, max_pages)``, contiguous: key j is row ``j % page_size`` of page
            ``block_table[b, j // page_size]``. Sequences may share pages. A page outside of the pool is not read, and
            its keys are not seen.
        window: how many keys a token sees at most, itself included; None: no limit.
        new_keys: a promise about the launch directly ahead on the stream: of ``k`` and ``v`` it writes at most so many
            keys of each sequence, its newest. In a decode step that is ``q_len``, which :func:`append_rope` writes.
            Older keys are then loaded before that launch is complete; lengths and page numbers need no promise. None:
            it may write any key.
        batch_invariant: a sequence's result has the same bits alone, in any batch and order, contiguous or paged.
        rung: 1, or of GPUs on Hopper 2 to 7, 5 for 16 bits alone, 6 and 7 for head_dim up to 128; the fastest for these
            shapes if None.

    Returns:
        ``(batch, q_len, heads, head_dim)``, contiguous, q's dtype. A query that sees no key gives 0.

    Raises:
        ValueError: arguments that do not fit, named.
    """
    batch, kv_len = _check(q, k, v, block_table)
    check_lengths("seqlens_k", seqlens_k, q)
    check_lengths("leftpad_k", leftpad_k, q)
    expect_scale(scale)
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ValueError(f"window must be at least 1 key, or None; got {window!r}")
    if new_keys is not None and (not isinstance(new_keys, int) or new_keys < 0):
        raise ValueError(f"new_keys must be at least 0 keys, or None; got {new_keys!r}")
    _, q_len, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    _check_rung(q, rung)
    out = torch.empty((batch, q_len, heads, head_dim), dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    if kv_len == 0 or not k.numel():
        return out.zero_()
    call = _Call(q.device, dtype_code(q.dtype), head_dim, heads // kv_heads * q_len)
    page_size = None if block_table is None else k.shape[1]
    if rung is None:
        given = call, batch * kv_heads, kv_len, batch_invariant, page_size
        rung = None if new_keys is None else _fastest_ahead(*given)
        if rung is None:  # nothing is loaded ahead of the wait
            rung, new_keys = _fastest(*given), None
    plan = _plan(call, batch, kv_heads, kv_len, batch_invariant, rung)
    partial, counters = None, None
    if plan.floats:
        partial, counters = workspace(q.device, plan.floats, plan.counters)
    _KERNELS[plan.rung].launch(
        "decode", q=q, k=k, v=v, out=out, seqlens_k=seqlens_k, leftpad_k=leftpad_k, block_table=block_table,
        max_pages=0 if block_table is None else block_table.shape[1], window=min(window or 0, kv_len),
        new_keys=kv_len if new_keys is None else min(new_keys, kv_len),
        scale=1 / math.sqrt(head_dim) if scale is None else scale, chunks=plan.chunks, partial=partial,
        slots=plan.slots, counters=counters, blocks=plan.blocks, dtype=call.dtype,
    )  # fmt: skip
    return out


def _check(q: Tensor, k: Tensor, v: Tensor, block_table: Tensor | None) -> tuple[int, int]:
    """batch, and the keys for which a sequence has room."""
    if block_table is None:
        batch, heads, kv_heads, q_len, kv_len, head_dim = check_attention(
            q, k, v, DTYPES, HEAD_DIMS[-1]
        )
    else:
        expect("q", q, shape=("batch", "q_len", "heads", "head_dim"), dtype=DTYPES)
        like_q = {"dtype": q.dtype, "device": q.device}
        expect("k", k, shape=("pages", "page_size", "kv_heads", q.shape[3]), **like_q)
        expect("v", v, shape=k.shape, **like_q)
        check_device(q)
        (batch, q_len, heads, head_dim), (_, page_size, kv_heads, _) = q.shape, k.shape
        if kv_heads == 0 or heads % kv_heads:
            raise ValueError(f"kv heads must divide the query heads; got {heads} and {kv_heads}")
        least, most = PAGE_SIZES
        if page_size % least or not least <= page_size <= most:
            raise ValueError(
                f"page_size must be a multiple of {least} up to {most}; got {page_size}"
            )
        expect("block_table", block_table, shape=(batch, "max_pages"), dtype=torch.int32, device=q.device)  # fmt: skip
        if not block_table.is_contiguous():
            raise ValueError(f"block_table must be contiguous; got strides {block_table.stride()}")
        kv_len = block_table.shape[1] * page_size
        for name, pool in (("k", k), ("v", v)):
            steps = zip(pool.shape[:2], pool.stride()[:2], strict=True)
            span = sum((n - 1) * step for n, step in steps) * pool.element_size()
            if span >= MAX_POOL:
                raise ValueError(
                    f"pages of {name} must begin within {MAX_POOL:,} bytes of the first; got {span:,}"
                )
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim must be 64, 128 or 256; got {head_dim}")
    if not 1 <= q_len <= MAX_QUERIES:
        raise ValueError(f"q must have from 1 to {MAX_QUERIES} tokens; got {q_len}")
    expect_loadable(q=q, k=k, v=v)
    if batch > MAX_BATCH:
        raise ValueError(f"batch must be at most {MAX_BATCH:,}; got {batch:,}")
    if kv_len > MAX_KEYS:
        raise ValueError(f"a sequence must have room for at most {MAX_KEYS:,} keys; got {kv_len:,}")
    pairs = batch * kv_heads * -(-heads // max(1, kv_heads) * q_len // ROWS)
    if pairs * -(-kv_len // ROWS) > MAX_TILES:
        raise ValueError(
            f"there must be at most {MAX_TILES:,} tiles of {ROWS} keys for {ROWS} rows in a call; got batch {batch:,},"
            f" {heads} heads, {kv_heads} kv heads, {q_len} tokens and room for {kv_len:,} keys"
        )
    return batch, kv_len


def loadable(x: Tensor) -> bool:
    """Whether 16 bytes at a time can be loaded of its rows: each contiguous, from a multiple of 16 bytes on."""
    used = (s for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n > 1)
    pitches = (s * x.element_size() for s in used)
    return x.stride(-1) == 1 and not any(pitch % 16 for pitch in (*pitches, x.data_ptr()))


def expect_loadable(**tensors: Tensor | None) -> None:
    """ValueError that names the first of these that is not :func:`loadable`."""
    for name, tensor in tensors.items():
        if tensor is not None and not loadable(tensor):
            raise ValueError(
                f"{name} must have a contiguous last dimension, and rows that begin at multiples of 16 bytes; got"
                f" {describe(tensor)} with strides {tensor.stride()}"
            )


def expect_scale(scale: float | None) -> None:
    """ValueError for one that is not above 0, or too large for float32."""
    if scale is not None and not 0 < scale <= torch.finfo(torch.float32).max:
        raise ValueError(f"scale must be above 0 and finite; got {scale}")


def is_hopper(device: torch.device) -> bool:
    """Whether kernels for sm_90a run there."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def sms_of(device: torch.device) -> int:
    """How many blocks are at work at once, one on each SM."""
    if device.type == "cpu":
        return ON_CPU
    return torch.cuda.get_device_properties(device).multi_processor_count


def _check_rung(q: Tensor, rung: int | None) -> None:
    if rung is not None and rung not in RUNGS:
        raise ValueError(f"rung must be one of {RUNGS}; got {rung!r}")
    if rung is not None and rung > 1 and q.is_cuda and not is_hopper(q.device):
        raise ValueError(
            f"of GPUs, rung {rung} runs on Hopper alone; the tensors are on {q.device}"
        )
    if rung == KEYS_AS_ROWS and q.dtype == torch.float32:
        raise ValueError(f"rung {rung} computes in 16 bits; got {describe(q)}")
    if rung in OF_EIGHT_WARPS and q.shape[3] > 128:
        raise ValueError(f"rung {rung} is for head_dim up to 128; got {q.shape[3]}")


class _Call(NamedTuple):
    """What a kernel is chosen by."""

    device: torch.device
    dtype: int
    head_dim: int
    rows: int  # of q that read a kv head

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
        return _KERNELS[rung].query(name, self.device, **given)


class _Plan(NamedTuple):
    rung: int
    blocks: int
    chunks: int = 0
    slots: int = 0
    floats: int = 0  # of scratch
    counters: int = 0


def _fastest(
    call: _Call, heads: int, kv_len: int, batch_invariant: bool, page_size: int | None
) -> int:
    """The rung that is the fastest for ``heads`` kv heads of all sequences, as NOTES.md has measured it.

    Batch-invariant, a sequence has the same bits from rungs 3, 4, 6 and 7, and others from 5: which of the two it is,
    is told from what is the same in any batch, and whatever room there is.
    """
    sms = sms_of(call.device)
    if not is_hopper(call.device):
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
    call: _Call, heads: int, kv_len: int, batch_invariant: bool, page_size: int | None
) -> bool:
    """Whether rung 7 is faster than 4 and 6: where an SM reads more than 3 MB in order, and computes little with it."""
    if call.head_dim != 128 or call.rows * call.item_size > ROWS or heads > sms_of(call.device):
        return False
    if page_size or (batch_invariant and call.item_size == 4):
        return False
    return 2 * heads * kv_len * call.head_dim * call.item_size >= LONG_BYTES


def _fastest_of_many_rows(call: _Call, heads: int, kv_len: int, batch_invariant: bool) -> int:
    """The fastest of more than 16 rows: rung 5, unless two pairs of each kv head find more SMs that are idle.

    Then the keys are asked for twice, at neighbouring blocks.
    """
    sms, pairs = sms_of(call.device), 2 * heads
    few_and_long = 32 * pairs <= sms and kv_len > 2 * LONG_CACHE
    if not call.two_tiles or (not batch_invariant and (pairs > sms or few_and_long)):
        return KEYS_AS_ROWS
    return EIGHT_WARPS if pairs * kv_len >= KEYS_OF_ALL else 4


def _fastest_of_many_pairs(call: _Call, kv_len: int) -> int:
    """The fastest of the rungs with the same bits, batch-invariant, where pairs are more than SMs.

    Of long sequences a warp has many leaves: with eight warps half as many. Of head_dim 64 three blocks fit on an SM.
    """
    if call.head_dim == 64:
        return 3
    return IN_STEP if kv_len >= 4 * SHORT_CACHE else 4


def _fastest_ahead(
    call: _Call, heads: int, kv_len: int, batch_invariant: bool, page_size: int | None
) -> int | None:
    """The same for calls that load keys ahead of the wait; None where that gains nothing, as NOTES.md has measured it.

    What is ahead of the wait has to fit into the time of a launch: that of the shortest calls is as short.
    """
    sms, keys = sms_of(call.device), heads * kv_len
    if call.item_size == 4 or call.head_dim == 256 or not is_hopper(call.device):
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
def _plan(
    call: _Call, batch: int, kv_heads: int, kv_len: int, batch_invariant: bool, rung: int
) -> _Plan:
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
            single = 1 << max(1, min(most, sms_of(call.device) // pairs)).bit_length() - 1
            if single > of_a_cluster:
                of_a_cluster, clusters = 1, single
        return _in_clusters(call, rung, pairs, of_a_cluster, clusters, leaves)
    tall = call.query(rung, "rows_of_a_pair")
    pairs, room = _pairs(call, rung, kv_heads), _blocks(call, rung)
    tiles = -(-kv_len // call.query(rung, "keys_of_a_tile"))
    blocks = min(room, batch * pairs * tiles)
    chunks = -(-room // pairs) if batch_invariant else 0
    slots = batch * pairs * chunks if chunks else 2 * blocks
    return _Plan(
        rung, blocks, chunks, slots, slots * tall * (call.head_dim + 2), counters=batch * pairs
    )


def _in_clusters(
    call: _Call, rung: int, pairs: int, of_a_cluster: int, clusters: int, chunks: int
) -> _Plan:
    """With so many blocks of a cluster, and clusters of a pair: if several, each leaves its part in global memory."""
    blocks = pairs * of_a_cluster * clusters
    if clusters == 1:
        return _Plan(rung, blocks, chunks)
    rows = call.query(rung, "rows_of_a_pair")
    floats = pairs * clusters * rows * call.head_dim // 4 * 6  # of four columns O, m and l
    return _Plan(rung, blocks, chunks, pairs * clusters, floats, counters=pairs * of_a_cluster)


def _pairs(call: _Call, rung: int, kv_heads: int) -> int:
    """Of a kv head and rows that share one read of its keys, for one sequence."""
    return kv_heads * -(-call.rows // call.query(rung, "rows_of_a_pair"))


def _leaves(call: _Call, rung: int, kv_heads: int) -> int:
    """How many warps share a pair of a long sequence by itself, with all SMs: a power of two."""
    blocks = sms_of(call.device) // _pairs(call, rung, kv_heads)
    return (WARPS if call.head_dim == 256 else 2 * WARPS) * min(
        MOST_BLOCKS, 1 << max(1, blocks).bit_length() - 1
    )


def _of_a_cluster(
    call: _Call, rung: int, kv_heads: int, batch: int, kv_len: int, most: int = MOST_BLOCKS
) -> int:
    """How many blocks share a pair: a power of two.

    All are there at once, one on each SM, or two where each has much to do; and each has two tiles at least. Rung 5
    takes the memory's time with a block on every other SM.
    """
    pairs = batch * _pairs(call, rung, kv_heads)
    tiles = -(-kv_len // call.query(rung, "keys_of_a_tile"))
    sms = sms_of(call.device)
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


def _clusters_of_a_pair(call: _Call, blocks: int, keys: int) -> int:
    """How many clusters share a pair, where ``blocks`` of one cluster a pair would leave SMs idle: a power of two.

    They merge through global memory, which pays where each block still has many of its ``keys``.
    """
    sms = sms_of(call.device)
    clusters = 1
    while (
        2 * clusters <= MOST_CLUSTERS
        and blocks * 2 * clusters <= sms // 2
        and keys >= MANY_KEYS * 2 * clusters
    ):
        clusters *= 2
    return clusters


def _blocks(call: _Call, rung: int) -> int:
    """How many blocks the GPU holds at once; two on an SM, where these fit."""
    if call.device.type == "cpu":
        return ON_CPU
    gpu = torch.cuda.get_device_properties(call.device)
    reserved = 1024  # bytes of each block, for the system
    per_sm = gpu.shared_memory_per_multiprocessor // (
        call.query(rung, "shared_memory_bytes") + reserved
    )
    return gpu.multi_processor_count * max(1, min(2, per_sm))


class _Workspace(NamedTuple):
    capture: int  # of which it is; 0: outside of one
    floats: Tensor
    counters: Tensor


_workspaces: dict[tuple[torch.device, int], _Workspace] = {}


def workspace(device: torch.device, floats: int, counters: int) -> tuple[Tensor, Tensor]:
    """Scratch of at least this size, and int32 counters that are 0 when the current stream's next launch begins.

    A launch leaves the counters so. A CUDA graph that is captured gets its own, and zeroes them before the first call
    on a stream: it may be replayed beside others, on any stream, and before or after them.
    """

    def new() -> tuple[Tensor, Tensor]:
        return torch.empty(floats, device=device), torch.zeros(
            counters, dtype=torch.int32, device=device
        )

    if device.type == "cpu":
        return new()  # because a launch that fails there does not end the process
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    capture = _capture_of(stream) if torch.cuda.is_current_stream_capturing() else 0
    known = _workspaces.get((device, stream))
    if (
        known is None
        or known.capture != capture
        or known.floats.numel() < floats
        or known.counters.numel() < counters
    ):
        known = _workspaces[device, stream] = _Workspace(capture, *new())
    return known.floats, known.counters


def _capture_of(stream: int) -> int:
    """The number of the capture that a stream takes part in, which no other one has."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    error = _capture_info()(stream, ctypes.byref(status), ctypes.byref(number), None, None, None)
    if error:
        raise RuntimeError(f"cuStreamGetCaptureInfo_v2 failed with status {error}")
    return number.value


@functools.cache
def _capture_info() -> ctypes._CFuncPtr:
    function = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    function.argtypes = [ctypes.c_void_p] * 6
    return function
