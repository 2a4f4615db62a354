"""Chunked prefill: a chunk of a prompt against a long cache."""

import functools
import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from common.build import Kernels, dtype_code
from common.inputs import check_lengths
from task5.ladder.by_length import ALMOST_ALL
from task5.ladder.checks import (
    MAX_BATCH,
    check_cached,
    expect_loadable,
    expect_scale,
    expect_window,
    loadable,
)
from task5.ladder.gpu import is_hopper, sms_of, workspace
from task5.ladder.kernels import power_of_two

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128)
ROWS, KEYS = 128, 128  # of a tile: B_r, B_c
MAX_GROUP = ROWS  # query heads of a kv head
FEW = 64  # rows of a tile whose keys the consumers of a block share
MANY = 192  # rows of a tile with three consumers, of head_dim 64
# Of a tile's keys in a cluster. Clusters of 3, 5 or 6 blocks lie unevenly on the chip.
SPLITS = (1, 2, 4, 8)
MOST_CLUSTERS = 16  # of a tile
# By length, so that tiles of sequences much longer than others have more clusters: of up to so many sequences, whose
# lengths a warp holds; tiles for each SM, which are short then; and from so many bytes of K and V on, or where more
# tiles than one for every fourth SM fill almost all of them anyway. Elsewhere equal lengths lose too much.
MOST_SEQUENCES, MOST_UNEVEN_TILES, UNEVEN_BYTES, MANY_UNEVEN_BYTES = 128, 4.5, 100e6, 150e6
# Of tiles of few rows, so many SMs for each from which on these are very few; and up to how many times as many tiles as
# fill the SMs, or half of them, have parts for several rounds. See _by_length().
SMS_OF_FEWEST, HALF_MORE = 24, 1.5
# In the time that a block of ROWS rows takes for KEYS keys: a launch with its first loads and the merging in clusters;
# several clusters' merging, and each of their parts: of many rows, and of FEW, unless batch-invariant.
OVERHEAD, MERGING, PART = 9, (2, 1), (1, 0.25)
# The same keys: computed by a block with so many rows; and, of a head_dim, delivered by the memory, where all SMs ask
# for others. Batch-invariant, how much longer computing takes.
COMPUTED, DELIVERED = {FEW: 0.42, ROWS: 1, MANY: 1.07}, {64: 0.25, 128: 1.3}
BATCH_INVARIANT = {FEW: 2, ROWS: 1.1}
LADDER = {ROWS: 1, MANY: 1.1}  # of a block of task 4's ladder with so many rows, for KEYS keys
LADDER_OF_MANY = 1024  # queries: of more the ladder has tiles of MANY rows, with head_dim 64
# Batch-invariant: into how many leaves a tile's keys are cut at most; the time that each of several leaves of a block
# takes to be kept, with head_dim 128; and warps of a block that keep some.
MOST_LEAVES, LEAF, WARPS = 256, 1.75, 8
# And the sizes of subtrees that wait in shared memory, of a head_dim: LEVELS of chunk_tile.cuh.
IN_SHARED = {64: 2, 128: 1}
# Of GPUs, for Hopper. GAPS: rows that do not see all keys before their own, or keys in pages
_KERNELS, _GAPS = Kernels(__file__, "chunk.cu"), Kernels(__file__, "chunk_with_gaps.cu")
_BATCH_INVARIANT = Kernels(__file__, "chunk_batch_invariant.cu")


def chunk_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    seqlens_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    block_table: Tensor | None = None,
    window: int | None = None,
    batch_invariant: bool = False,
    split: tuple[int, int] | None = None,
) -> Tensor:
    """softmax(scale q k^T) v where q has few rows and k many: the keys of a tile of q are split among blocks.

    Args:
        q: ``(batch, q_len, heads, head_dim)``, float16 or bfloat16, head_dim 64 or 128.
        k, v: ``(batch, kv_len, kv_heads, head_dim)``; with ``block_table`` the pages of all sequences,
            ``(pages, page_size, kv_heads, head_dim)``, page_size a multiple of 16 up to 256. kv_heads divides heads, at
            most 128 heads for a kv head.
        causal: query i sees the keys ``j <= i + kv_len - q_len``.
        scale: factor of the scores, above 0; ``1 / sqrt(head_dim)`` if None.
        seqlens_k: int32 ``(batch,)`` on q's device, in place of kv_len the keys of each sequence: all for which there
            is room where it is larger, none where it is negative. None of these tensors is read on the host. In large
            caches the kernel splits the keys of longer sequences among more blocks.
        leftpad_k: int32 ``(batch,)``, keys to skip at the start of each sequence; a negative number counts as 0.
        block_table: int32 ``(batch, max_pages)``, contiguous: key j is row ``j % page_size`` of page
            ``block_table[b, j // page_size]``, and kv_len is max_pages * page_size. Sequences may share pages. A page
            outside of the pool is not read, and its keys are not seen.
        window: with ``causal`` how many keys a query sees at most, its own included; None: no limit.
        batch_invariant: a sequence's result has the same bits alone, in any batch and order, contiguous or paged.
        split: how many blocks of a cluster share the keys of a tile, 1, 2, 4 or 8, and how many clusters, 1 to 16,
            batch-invariant a power of two; what should be fastest if None.

    Returns:
        ``(batch, q_len, heads, head_dim)``, contiguous, q's dtype. A query that sees no key gives 0.

    Raises:
        ValueError: arguments that do not fit, named; or tensors on a GPU that is no Hopper.
    """
    batch, heads, kv_heads, q_len, kv_len, head_dim = check_cached(
        q, k, v, block_table, DTYPES, HEAD_DIMS
    )
    if kv_heads and heads // kv_heads > MAX_GROUP:
        raise ValueError(
            f"a kv head must have at most {MAX_GROUP} query heads; got {heads // kv_heads}"
        )
    expect_scale(scale)
    check_lengths("seqlens_k", seqlens_k, q)
    check_lengths("leftpad_k", leftpad_k, q)
    expect_window(window)
    if window is not None and not causal:
        raise ValueError("a window ends with a query's own key: it is for causal=True")
    if split is not None and split not in itertools.product(SPLITS, range(1, MOST_CLUSTERS + 1)):
        raise ValueError(
            f"split must be one of {SPLITS} blocks, and 1 to {MOST_CLUSTERS} clusters; got {split!r}"
        )
    if batch_invariant and split is not None and split[1] & (split[1] - 1):
        raise ValueError(f"batch-invariant, clusters must be a power of two; got {split[1]}")
    if q.is_cuda and not is_hopper(q.device):
        raise ValueError(
            f"of GPUs, chunk_attention runs on Hopper alone; the tensors are on {q.device}"
        )
    expect_loadable(q=q, k=k, v=v)
    out = torch.empty((batch, q_len, heads, head_dim), dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    if kv_len == 0 or not k.numel():
        return out.zero_()
    if not _has_room(batch, kv_heads):
        raise ValueError(
            f"there must be at most {MAX_BATCH:,} sequences and {MAX_BATCH // MOST_CLUSTERS:,} kv heads; got batch"
            f" {batch:,} and {kv_heads:,} kv heads"
        )
    gaps = not (block_table is None and leftpad_k is None and window is None)
    seen = kv_len if window is None else min(kv_len, window + q_len - 1)
    works, at_once = _works(batch, q_len, heads, kv_heads, seen, head_dim), _at_once(q.device)
    if gaps or batch_invariant:
        works = tuple(work for work in works if work.rows != MANY)
    leaves = _leaves(works[0], kv_heads, sms_of(q.device)) if batch_invariant else 0
    if split is None:
        work, (splits, clusters) = _fastest(works, at_once, leaves)
    else:
        splits, clusters = split
        work = min(works, key=lambda work: _cost(work, at_once, split))
    by_length = 0  # of how many clusters
    parts = work.tiles * clusters if clusters > 1 else 0
    if (
        split is None
        and 2 <= batch <= MOST_SEQUENCES
        and (seqlens_k is not None or leftpad_k is not None)
        and by_length_pays(
            work.tiles, 2 * batch * seen * kv_heads * head_dim * q.element_size(), sms_of(q.device)
        )
    ):
        by_length, clusters = at_once[SPLITS.index(splits)], 1
        if not batch_invariant:
            splits, by_length = _by_length(work, splits, at_once, sms_of(q.device))
        parts = 4 * by_length // 3 + 1  # each has three quarters of a share, or more
    floats, counts = parts * work.rows * (head_dim + 2), parts * splits
    more = {}
    if batch_invariant:
        of_a_consumer = _used(leaves, work.blocks + 1) // (splits * clusters * work.consumers)
        levels = max(0, max(1, of_a_consumer).bit_length() - 1 - IN_SHARED[head_dim])
        at_work = sms_of(q.device) if q.is_cuda else (work.tiles * clusters + parts) * splits
        slots = at_work if levels else 0
        floats, counts = floats + slots * levels * WARPS * 16 * (head_dim + 2), counts + slots
        more = dict(leaf_bits=leaves.bit_length() - 1, slots=slots, levels=levels)
    partial, counters = workspace(q.device, floats, counts) if floats else (None, None)
    if gaps or batch_invariant:
        max_pages = 0 if block_table is None else block_table.shape[1]
        more |= dict(
            leftpad_k=leftpad_k,
            block_table=block_table,
            max_pages=max_pages,
            window=min(window or 0, kv_len),
        )
    (_BATCH_INVARIANT if batch_invariant else _GAPS if gaps else _KERNELS).launch(
        "chunk", q=q, k=k, v=v, out=out, seqlens_k=seqlens_k, **more,
        scale=1 / math.sqrt(head_dim) if scale is None else float(scale), causal=int(causal), rows=work.rows,
        splits=splits, clusters=clusters, at_once=by_length, parts=parts, partial=partial, counters=counters,
        dtype=dtype_code(q.dtype),
    )  # fmt: skip
    return out


def by_length_pays(tiles: int, bytes_: float, sms: int) -> bool:
    """Whether clusters should have as much to do, where lengths may differ: ``bytes_`` of room for K and V."""
    full = tiles * power_of_two(sms // tiles) >= ALMOST_ALL * sms
    least = MANY_UNEVEN_BYTES if full and 4 * tiles > sms else UNEVEN_BYTES
    return bytes_ >= least and tiles <= MOST_UNEVEN_TILES * sms


def faster_than_the_ladder(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether :func:`chunk_attention` takes such tensors, and should take less time for them than task 4's ladder.

    The ladder has a block for each 128 rows of each head. Where these are few, or half empty, splitting is faster.
    """
    if not (
        q.device.type == "cuda"
        and q.dtype in DTYPES
        and q.dim() == k.dim() == 4
        and q.shape[3] in HEAD_DIMS
        and 0 < q.shape[1] < k.shape[1]
        and k.shape[2]
        and q.shape[2] >= k.shape[2]
        and is_hopper(q.device)
        and all(map(loadable, (q, k, v)))
    ):
        return False
    batch, q_len, heads, head_dim = q.shape
    if not fits(batch, heads, k.shape[2]):
        return False
    shape = (batch, q_len, heads, k.shape[2], k.shape[1], head_dim)
    if not _is_faster(*shape, _all_fit(sms_of(q.device))):
        return False  # chunk.cu does not have to be built to say so
    return _is_faster(*shape, _at_once(q.device))


class Work(NamedTuple):
    """What a call has to do.

    Attributes:
        heads: kv heads, of all sequences.
        tiles_of_a_head: a tile has some queries, of all heads of a group.
        blocks: of KEYS keys.
        rows: for which a tile has room: FEW, ROWS or MANY.
        head_dim: of the keys.
    """

    heads: int
    tiles_of_a_head: int
    blocks: int
    rows: int = ROWS
    head_dim: int = HEAD_DIMS[-1]

    @property
    def consumers(self) -> int:
        """Of a block, that share its keys."""
        return 2 if self.rows == FEW else 1

    @property
    def tiles(self) -> int:
        """Of all heads."""
        return self.heads * self.tiles_of_a_head


@functools.lru_cache(maxsize=1024)
def _works(
    batch: int, q_len: int, heads: int, kv_heads: int, kv_len: int, head_dim: int
) -> tuple[Work, ...]:
    """What a call has to do, by the sizes of tiles that it may have."""
    group = heads // kv_heads
    sizes = (ROWS, MANY) if head_dim == 64 else (ROWS,)
    return tuple(
        Work(batch * kv_heads, -(-q_len // (rows // group)), -(-kv_len // KEYS), rows, head_dim)
        for rows in ((FEW,) if q_len * group <= FEW else sizes)
    )


def fits(batch: int, heads: int, kv_heads: int) -> bool:
    """Whether :func:`chunk_attention` takes so many sequences, heads and kv heads."""
    return heads // kv_heads <= MAX_GROUP and _has_room(batch, kv_heads)


def _has_room(batch: int, kv_heads: int) -> bool:
    """Whether the grid has room, whose second and third sizes are the clusters of kv heads and the batch."""
    return max(batch, kv_heads * MOST_CLUSTERS) <= MAX_BATCH


AtOnce = tuple[int, ...]  # clusters that the GPU holds at once, by SPLITS


@functools.lru_cache
def _at_once(device: torch.device) -> AtOnce:
    if device.type == "cpu":
        return _all_fit(sms_of(device))
    return tuple(
        max(1, _KERNELS.query("clusters_at_once", device, splits=splits)) for splits in SPLITS
    )


def _all_fit(sms: int) -> AtOnce:
    """If no SM were left over. Clusters are of neighbours, and some are."""
    return tuple(max(1, sms // splits) for splits in SPLITS)


def _by_length(work: Work, splits: int, at_once: AtOnce, sms: int) -> tuple[int, int]:
    """Where lengths may differ: blocks of a cluster, and of how many clusters each would have the same share.

    Tiles of few rows have clusters of two on all SMs: one long tile needs their bandwidth as much as several equal ones
    do. Very few tiles have ``splits``, as a tile has at most MOST_CLUSTERS. Two or three times as many shares as there
    is room for leave no SM idle, where tiles are somewhat more than SMs, and the last ones would be alone; or half as
    many, and computing takes most of the time.
    """
    if work.rows == FEW and SMS_OF_FEWEST * work.tiles > sms:
        splits = 2 if 2 * work.tiles <= sms else 1
    compute = work.head_dim == 64 and work.rows != FEW
    more = sms < (2 if compute else 1) * work.tiles <= HALF_MORE * sms
    rounds = (3 if work.head_dim == 64 and not compute else 2) if more else 1
    return splits, at_once[SPLITS.index(splits)] * rounds


@functools.lru_cache(maxsize=1024)
def _is_faster(
    batch: int,
    q_len: int,
    heads: int,
    kv_heads: int,
    kv_len: int,
    head_dim: int,
    at_once: AtOnce,
) -> bool:
    works = _works(batch, q_len, heads, kv_heads, kv_len, head_dim)
    rows = MANY if head_dim == 64 and q_len > LADDER_OF_MANY else ROWS
    waves = -(-batch * heads * -(-q_len // rows) // at_once[0])
    ladder = LADDER[rows] * waves * works[0].blocks + OVERHEAD
    work, split = _fastest(works, at_once)
    return _cost(work, at_once, split) < ladder


def _leaves(work: Work, kv_heads: int, sms: int) -> int:
    """Batch-invariant, into how many leaves a tile's keys are cut at most: as many as consumers of a sequence alone."""
    blocks = max(1, sms // (kv_heads * work.tiles_of_a_head))
    return min(MOST_LEAVES, work.consumers << blocks.bit_length() - 1)


def _used(leaves: int, blocks: int) -> int:
    """Leaves of a tile with so many blocks of KEYS: as bits_of_leaves() of chunk_tile.cuh."""
    bits = max(1, blocks * KEYS).bit_length() - 1
    return min(leaves, 1 << max(0, bits - 7 - min(max(0, (bits - 10) // 2), 1)))


def _fastest(
    works: tuple[Work, ...], at_once: AtOnce, leaves: int = 0
) -> tuple[Work, tuple[int, int]]:
    """The size of tiles, and the split, that finish first."""

    def cost(work: Work) -> float:
        return _cost(work, at_once, best_split(work, at_once, leaves), leaves)

    work = min(works, key=cost)
    return work, best_split(work, at_once, leaves)


def _cost(work: Work, at_once: AtOnce, split: tuple[int, int], leaves: int = 0) -> float:
    """Time of a call, in that of KEYS keys of a block of ROWS rows."""
    splits, clusters = split
    blocks, room = splits * clusters, at_once[SPLITS.index(splits)]
    at_work = splits * min(room, work.tiles * clusters) / at_once[0]
    few = work.rows == FEW and not leaves
    if few and splits > 1 and at_work > 0.5:
        at_work = 1  # some clusters share what others have alone, and are no faster than with all SMs at work
    computed = COMPUTED[work.rows] * (BATCH_INVARIANT[work.rows] if leaves else 1)
    # Tiles of a head read its keys together. The pace is that of what takes longer, and a little of the other's.
    delivered = DELIVERED[work.head_dim] * at_work / work.tiles_of_a_head
    pace = (computed**4 + delivered**4) ** 0.25
    waves = -(-work.tiles * clusters // room)
    cost = waves * (-(-work.blocks // blocks) * pace + OVERHEAD)
    if clusters > 1:
        cost += MERGING[few] + PART[few] * clusters / splits
    if leaves:
        of_a_consumer = _used(leaves, work.blocks) // (blocks * work.consumers)
        cost += LEAF * work.head_dim / 128 * max(0, of_a_consumer - 1)
    return cost


@functools.lru_cache(maxsize=1024)
def best_split(work: Work, at_once: AtOnce, leaves: int = 0) -> tuple[int, int]:
    """Blocks of a cluster and clusters that finish first, where each SM computes block after block.

    Args:
        work: of the call.
        at_once: clusters that the GPU holds, for each of SPLITS.
        leaves: batch-invariant, into how many the keys of a tile are cut at most; else 0.
    """
    most, several = max(1, work.blocks), range(1, MOST_CLUSTERS + 1)
    if leaves:
        most = max(1, _used(leaves, work.blocks) // work.consumers)
        several = (1, 2, 4, 8, 16)
    return min(
        (
            (splits, clusters)
            for splits in SPLITS
            for clusters in several
            if splits * clusters <= most
        ),
        key=lambda split: (_cost(work, at_once, split, leaves), split[0] * split[1]),
    )
