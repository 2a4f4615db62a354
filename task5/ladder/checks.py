"""What calls of decode, of chunks and of the new rows of a cache refuse."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from common.inputs import check_attention, check_device, describe, expect

MAX_BATCH = 65535
PAGE_SIZES = (16, 256)  # from, to; multiples of 16
MAX_KEYS = 1 << 24
MAX_POOL = (1 << 36) - 16  # bytes: a kernel counts them in 32 bits, by 16
# Of scores: kernels multiply by it, and by log2(e), in float32.
SCALES = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max * math.log(2)


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
    """ValueError for one that is no number, not above 0, or too small or large for float32."""
    if scale is None:
        return
    least, most = SCALES
    if not (isinstance(scale, (int, float)) and least <= scale <= most):
        raise ValueError(
            f"scale must be above 0 and finite, from {least:.3g} to {most:.3g}; got {scale!r}"
        )


def check_cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_table: Tensor | None,
    dtypes: Sequence[torch.dtype],
    head_dims: Sequence[int],
) -> tuple[int, int, int, int, int, int]:
    """Check q against a cache, ``(batch, kv_len, kv_heads, head_dim)`` or, with a block table, pages.

    Returns:
        batch, heads, kv_heads, q_len, kv_len, head_dim; kv_len: keys for which a sequence has room.

    Raises:
        ValueError: what does not fit.
    """
    if block_table is None:
        sizes = check_attention(q, k, v, dtypes, head_dims[-1])
    else:
        sizes = _check_pages(q, k, v, block_table, dtypes)
    head_dim = sizes[-1]
    if head_dim not in head_dims:
        *others, last = head_dims
        raise ValueError(
            f"head_dim must be {', '.join(map(str, others))} or {last}; got {head_dim}"
        )
    return sizes


def _check_pages(
    q: Tensor, k: Tensor, v: Tensor, block_table: Tensor, dtypes: Sequence[torch.dtype]
) -> tuple[int, int, int, int, int, int]:
    expect("q", q, shape=("batch", "q_len", "heads", "head_dim"), dtype=dtypes)
    like_q = {"dtype": q.dtype, "device": q.device}
    expect("k", k, shape=("pages", "page_size", "kv_heads", q.shape[3]), **like_q)
    expect("v", v, shape=k.shape, **like_q)
    check_device(q)
    (batch, q_len, heads, head_dim), (_, page_size, kv_heads, _) = q.shape, k.shape
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"kv heads must divide the query heads; got {heads} and {kv_heads}")
    least, most = PAGE_SIZES
    if page_size % least or not least <= page_size <= most:
        raise ValueError(f"page_size must be a multiple of {least} up to {most}; got {page_size}")
    expect("block_table", block_table, shape=(batch, "max_pages"), dtype=torch.int32, device=q.device)  # fmt: skip
    if not block_table.is_contiguous():
        raise ValueError(f"block_table must be contiguous; got strides {block_table.stride()}")
    for name, pool in (("k", k), ("v", v)):
        steps = zip(pool.shape[:2], pool.stride()[:2], strict=True)
        span = sum((n - 1) * step for n, step in steps) * pool.element_size()
        if span >= MAX_POOL:
            raise ValueError(
                f"pages of {name} must begin within {MAX_POOL:,} bytes of the first; got {span:,}"
            )
    kv_len = block_table.shape[1] * page_size
    expect_room(kv_len)
    return batch, heads, kv_heads, q_len, kv_len, head_dim


def expect_room(kv_len: int) -> None:
    """ValueError for more keys of a sequence than a kernel of decode, or one that finds pages, counts."""
    if kv_len > MAX_KEYS:
        raise ValueError(f"a sequence must have room for at most {MAX_KEYS:,} keys; got {kv_len:,}")


def expect_window(window: int | None) -> None:
    """ValueError for one that is no number of keys."""
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ValueError(f"window must be at least 1 key, or None; got {window!r}")
