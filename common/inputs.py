"""Argument checks. Each says what was expected and what came, before anything runs or is written."""

from collections.abc import Sequence

import torch
from torch import Tensor

from common.dtypes import dtype_name

MAX_HEAD_DIM = 128
MAX_GRID = 65535  # blocks along y or z
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def describe(value: object) -> str:
    """``(4, 128) float64 on cpu`` for a tensor; type and value for anything else."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {dtype_name(value.dtype)} on {value.device}"
    return f"{type(value).__name__} {value!r}"


def expect(
    name: str,
    value: object,
    *,
    shape: Sequence[int | str],
    dtype: torch.dtype | Sequence[torch.dtype] | None = None,
    device: torch.device | None = None,
) -> None:
    """Raise ValueError unless ``value`` is a tensor of this shape, dtype and device.

    A word in ``shape`` stands for any size: ``("batch", "seq", 64)``.
    """
    dtypes = (dtype,) if isinstance(dtype, torch.dtype) else dtype
    fits = (
        isinstance(value, Tensor)
        and value.dim() == len(shape)
        and all(isinstance(s, str) or s == n for s, n in zip(shape, value.shape, strict=True))
        and (dtypes is None or value.dtype in dtypes)
        and (device is None or value.device == device)
    )
    if not fits:
        wanted = "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"
        if dtypes is not None:
            wanted += " " + " or ".join(map(dtype_name, dtypes))
        if device is not None:
            wanted += f" on {device}"
        raise ValueError(f"{name} must be {wanted}; got {describe(value)}")


def check_head_split(hidden_dim: int, num_heads: int, name: str = "hidden_dim") -> int:
    """``hidden_dim / num_heads``; ValueError unless it is a positive whole number."""
    if num_heads < 1 or hidden_dim < 1 or hidden_dim % num_heads:
        raise ValueError(
            f"{name} must be a positive multiple of num_heads; got {name} {hidden_dim}, num_heads {num_heads}"
        )
    return hidden_dim // num_heads


def check_head_dim(head_dim: int, limit: int = MAX_HEAD_DIM) -> None:
    """ValueError for a head_dim that the kernel is not compiled for."""
    if not 1 <= head_dim <= limit:
        raise ValueError(f"head_dim must be from 1 to {limit} for this kernel; got {head_dim}")


def check_device(tensor: Tensor) -> None:
    """ValueError for a device that has no kernels."""
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"the kernels run on cpu and cuda tensors; got {describe(tensor)}")


def check_contiguous_rows(name: str, tensor: Tensor) -> None:
    """ValueError unless the last dimension is contiguous, the kernels' only requirement on strides."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(
            f"{name} must have a contiguous last dimension (stride 1); got strides {tensor.stride()}"
        )


def heads_view(name: str, tensor: Tensor, num_heads: int) -> Tensor:
    """``(batch, seq, heads * head_dim)`` as a ``(batch, seq, heads, head_dim)`` view; nothing is copied."""
    expect(name, tensor, shape=("batch", "seq", "heads * head_dim"))
    check_contiguous_rows(name, tensor)
    check_head_split(tensor.shape[-1], num_heads, name=f"the last dimension of {name}")
    return tensor.unflatten(-1, (num_heads, -1))


def check_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dtypes: Sequence[torch.dtype] = KERNEL_DTYPES,
    max_head_dim: int = MAX_HEAD_DIM,
) -> tuple[int, int, int, int, int, int]:
    """Check ``q (batch, q_len, heads, head_dim)`` and ``k, v (batch, kv_len, kv_heads, head_dim)``.

    Returns:
        batch, heads, kv_heads, q_len, kv_len, head_dim.

    Raises:
        ValueError: ranks, shapes, dtypes or devices that do not fit together, a head_dim past the limit, kv heads
            that do not divide the heads, or a last dimension that is not contiguous.
    """
    if sizes := _sizes_if_all_fits(q, k, v, dtypes, max_head_dim):
        return sizes
    expect("q", q, shape=("batch", "q_len", "heads", "head_dim"), dtype=dtypes)
    batch, q_len, heads, head_dim = q.shape
    expect("k", k, shape=(batch, "kv_len", "kv_heads", head_dim), dtype=q.dtype, device=q.device)
    kv_len, kv_heads = k.shape[1:3]
    expect("v", v, shape=(batch, kv_len, kv_heads, head_dim), dtype=q.dtype, device=q.device)
    check_device(q)
    check_head_dim(head_dim, max_head_dim)
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"kv heads must divide the query heads; got {heads} and {kv_heads}")
    if max(batch, heads) > MAX_GRID:
        raise ValueError(
            f"at most {MAX_GRID} sequences and heads fit a grid; got {batch} and {heads}"
        )
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_contiguous_rows(name, tensor)
    return batch, heads, kv_heads, q_len, kv_len, head_dim


def _sizes_if_all_fits(
    q: Tensor, k: Tensor, v: Tensor, dtypes: Sequence[torch.dtype], max_head_dim: int
) -> tuple[int, int, int, int, int, int] | None:
    """check_attention's result if nothing is wrong: a third of the time of the checks that name the error."""
    try:
        batch, q_len, heads, head_dim = q.shape
        k_batch, kv_len, kv_heads, k_head_dim = k_shape = k.shape
        dtype, index, on_cpu = q.dtype, q.get_device(), q.is_cpu
        fits = (
            k_batch == batch and k_head_dim == head_dim and v.shape == k_shape
            and dtype in dtypes and k.dtype == dtype and v.dtype == dtype
            and (on_cpu or q.is_cuda)  # comparing devices takes a microsecond
            and k.get_device() == index and v.get_device() == index
            and k.is_cpu == on_cpu and v.is_cpu == on_cpu
            and 1 <= head_dim <= max_head_dim and kv_heads and heads % kv_heads == 0
            and batch <= MAX_GRID and heads <= MAX_GRID
            and q.stride()[3] == 1 and k.stride()[3] == 1 and v.stride()[3] == 1
        )  # fmt: skip
    except (AttributeError, TypeError, ValueError):  # not tensors, or of another rank
        return None
    return (batch, heads, kv_heads, q_len, kv_len, head_dim) if fits else None


def check_cache(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor) -> None:
    """Check caches ``(batch, max_seq_len, hidden)`` and the rows ``(batch, n, hidden)`` that go there.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, a last dimension that is not contiguous, or an
            expanded cache.
    """
    try:
        batch, _, hidden = cache_shape = k_cache.shape
        k_batch, _, k_hidden = k_shape = k.shape
        dtype, index, on_cpu = k_cache.dtype, k_cache.get_device(), k_cache.is_cpu
        if (
            k_batch == batch and k_hidden == hidden and v_cache.shape == cache_shape and v.shape == k_shape
            and dtype in KERNEL_DTYPES and v_cache.dtype == dtype and k.dtype == dtype and v.dtype == dtype
            and (on_cpu or k_cache.is_cuda)
            and v_cache.get_device() == index and k.get_device() == index and v.get_device() == index
            and v_cache.is_cpu == on_cpu and k.is_cpu == on_cpu and v.is_cpu == on_cpu
            and k_cache.stride()[2] == 1 and v_cache.stride()[2] == 1 and k.stride()[2] == 1 and v.stride()[2] == 1
            and all(k_cache.stride()) and all(v_cache.stride())
        ):  # fmt: skip
            return  # a third of the time of the checks below, which name the error
    except (AttributeError, TypeError, ValueError):  # not tensors, or of another rank
        pass
    expect("k_cache", k_cache, shape=("batch", "max_seq_len", "hidden"), dtype=KERNEL_DTYPES)
    batch, _, hidden = k_cache.shape
    expect("v_cache", v_cache, shape=k_cache.shape, dtype=k_cache.dtype, device=k_cache.device)
    expect("k", k, shape=(batch, "n", hidden), dtype=k_cache.dtype, device=k_cache.device)
    expect("v", v, shape=k.shape, dtype=k_cache.dtype, device=k_cache.device)
    check_device(k_cache)
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache), ("k", k), ("v", v)):
        check_contiguous_rows(name, tensor)
    check_written(k_cache=k_cache, v_cache=v_cache)


def check_written(**tensors: Tensor) -> None:
    """ValueError for an expanded tensor, or one whose rows overlap: what is written must be in memory once."""
    for name, tensor in tensors.items():
        extent = 0  # from the first to the last element of the dimensions with smaller strides
        for stride, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
            if n > 1 and stride <= extent:
                raise ValueError(
                    f"{name} is written in place, so it must not be expanded nor have rows that overlap; got"
                    f" {describe(tensor)} with strides {tensor.stride()}"
                )
            extent += (n - 1) * stride


def check_lengths(name: str, lengths: Tensor | None, q: Tensor) -> None:
    """ValueError unless ``lengths`` is None or one int32 per sequence on q's device."""
    if lengths is not None:
        expect(name, lengths, shape=(q.shape[0],), dtype=torch.int32, device=q.device)
        check_contiguous_rows(name, lengths)


def kv_heads_of(q_heads: Tensor, k: Tensor) -> int:
    """Number of heads of q's head_dim in ``k (batch, kv_len, kv_heads * head_dim)``."""
    expect("k", k, shape=("batch", "kv_len", "kv_heads * head_dim"))
    head_dim = q_heads.shape[-1]
    if k.shape[-1] % head_dim:
        raise ValueError(
            f"the last dimension of k must be a multiple of head_dim {head_dim}; got {describe(k)}"
        )
    return k.shape[-1] // head_dim
