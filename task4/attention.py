"""Task 4: FlashAttention-2 as one CUDA kernel, ``attention_kernel.cu``."""

import functools
import math

import torch
from torch import Tensor

from common.build import Kernels, dtype_code
from common.inputs import check_attention, check_lengths, heads_view, kv_heads_of
from common.layer import AttentionLayer

_kernels = Kernels(__file__, "attention_kernel.cu")

# (B_r, B_c) by the head_dim that the kernel is compiled for, the fastest first; `python -m task4.test` times them all.
# The first that fits in the GPU's shared memory runs. 32 x 32 fits everywhere, and suits few queries.
TILES = {64: ((128, 64), (32, 32)), 128: ((128, 64), (32, 32))}


@functools.cache
def shared_memory(tile: tuple[int, int], head_dim: int, device: torch.device) -> int:
    """Bytes of shared memory that a block takes, as the .cu says."""
    B_r, B_c = tile
    return _kernels.query("shared_memory_bytes", device, B_r=B_r, B_c=B_c, head_dim=head_dim)


@functools.cache
def _shared_memory_limit(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def choose_tile(head_dim: int, q_len: int, device: torch.device) -> tuple[int, int]:
    """The tile (B_r, B_c) for this head_dim, number of queries and device."""
    return (32, 32) if q_len <= 32 or device.type == "cpu" else _largest_tile(head_dim, device)


@functools.cache
def _largest_tile(head_dim: int, device: torch.device) -> tuple[int, int]:
    return next(t for t in TILES[64 if head_dim <= 64 else 128] if tile_fits(t, head_dim, device))


def tile_fits(tile: tuple[int, int], head_dim: int, device: torch.device) -> bool:
    """Whether a block on this device has the shared memory that the tile needs."""
    if device.type == "cpu":
        return True
    return shared_memory(tile, head_dim, device) <= _shared_memory_limit(device)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    seqlens_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    tile: tuple[int, int] | None = None,
) -> Tensor:
    """softmax(scale q k^T) v without the scores ever leaving the chip. [FA2] arXiv:2307.08691, Algorithm 1.

    Args:
        q: ``(batch, q_len, heads, head_dim)``, float32, float16 or bfloat16, head_dim at most 128. Any strides with a
            contiguous last dimension: slices and transposed views are read in place.
        k, v: ``(batch, kv_len, kv_heads, head_dim)``; kv_heads divides heads, and each serves heads / kv_heads of
            them (grouped-query attention).
        causal: query i of sequence b sees the keys ``j <= i + seqlens_k[b] - q_len``: the last one sees all.
        scale: factor of the scores; ``1 / sqrt(head_dim)`` if None.
        seqlens_k: int32 ``(batch,)`` on q's device, keys up to which a sequence reads; kv_len if None. Read by the
            kernel: lengths above kv_len count as kv_len.
        leftpad_k: int32 ``(batch,)``, keys to skip at the start of each sequence; 0 if None.
        tile: (B_r, B_c), one of ``TILES``; :func:`choose_tile` if None.

    Returns:
        ``(batch, q_len, heads, head_dim)``, contiguous, q's dtype. A query that sees no key gives 0.

    Raises:
        ValueError: arguments that do not fit, named.
    """
    batch, heads, kv_heads, q_len, kv_len, head_dim = check_attention(q, k, v)
    check_lengths("seqlens_k", seqlens_k, q)
    check_lengths("leftpad_k", leftpad_k, q)
    if tile is None:
        tile = choose_tile(head_dim, q_len, q.device)
    else:
        _check_tile(tile, head_dim, q.device)
    out = torch.empty((batch, q_len, heads, head_dim), dtype=q.dtype, device=q.device)
    if kv_len == 0:
        return out.zero_()
    if batch and q_len and heads:
        _kernels.launch(
            "flash_attention", q=q, k=k, v=v, out=out, seqlens_k=seqlens_k, leftpad_k=leftpad_k,
            scale=1 / math.sqrt(head_dim) if scale is None else scale, causal=causal, dtype=dtype_code(q.dtype),
            B_r=tile[0], B_c=tile[1],
        )  # fmt: skip
    return out


def _check_tile(tile: tuple[int, int], head_dim: int, device: torch.device) -> None:
    compiled = TILES[64 if head_dim <= 64 else 128]
    if tile not in compiled:
        raise ValueError(f"tile must be one of {compiled}; got {tile}")
    if not tile_fits(tile, head_dim, device):
        needed, limit = shared_memory(tile, head_dim, device), _shared_memory_limit(device)
        raise ValueError(
            f"a tile of {tile[0]} x {tile[1]} at head_dim {head_dim} needs {needed:,} bytes of shared memory; "
            f"a block on {torch.cuda.get_device_name(device)} has {limit:,}"
        )


def custom_flash_attention(
    q: Tensor, k: Tensor, v: Tensor, num_heads: int, causal: bool = False
) -> Tensor:
    """:func:`flash_attention` on ``(batch, seq, num_heads * head_dim)`` tensors.

    ``k`` and ``v`` may be narrower than ``q``: they then hold fewer heads of the same head_dim.

    Raises:
        ValueError: arguments that do not fit, named.
    """
    q_heads = heads_view("q", q, num_heads)
    kv_heads = kv_heads_of(q_heads, k)
    k_heads, v_heads = heads_view("k", k, kv_heads), heads_view("v", v, kv_heads)
    return flash_attention(q_heads, k_heads, v_heads, causal=causal).flatten(2)


class CustomFlashAttention(AttentionLayer):
    """Multi-head self-attention through your fused kernel."""

    def forward(self, x: Tensor, causal: bool = False) -> Tensor:
        """``x (batch, seq, hidden_dim)`` to the same shape."""
        q, k, v = self.project_qkv(x)
        return self.project_output(custom_flash_attention(q, k, v, self.num_heads, causal))
