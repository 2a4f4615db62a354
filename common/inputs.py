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
