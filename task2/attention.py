"""Task 2: multi-head attention with your own CUDA kernels for the softmax and the matrix products.

The kernels are in ``attention_kernel.cu``. The functions here check the arguments, allocate the output, and launch
them; on cpu tensors the same file runs through the CUDA-on-CPU layer.
"""

import math

import torch
from torch import Tensor

from common.build import Kernels
from common.inputs import (
    MAX_GRID,
    check_attention,
    check_device,
    expect,
    heads_view,
)
from common.layer import AttentionLayer

_kernels = Kernels(__file__, "attention_kernel.cu")

MAX_ROWS = 2**31 - 1  # blocks along x of a grid


def test_batched_softmax(inp: Tensor, dim: int = -1) -> Tensor:
    """Softmax of a ``(batch, rows, n)`` float32 tensor along its last dimension or the one before; one block per row.

    Rows that are -inf throughout become 0 (PyTorch gives NaN).

    Args:
        inp: ``(batch, rows, n)``, or ``(rows, n)`` for a batch of one; any strides.
        dim: the dimension whose elements are to add up to 1: the last (-1) or the one before it (-2).

    Raises:
        ValueError: another rank, dtype, device or ``dim``, or more rows than fit a grid.
    """
    rank = 2 if isinstance(inp, Tensor) and inp.dim() == 2 else 3
    expect("inp", inp, shape=("batch", "rows", "n")[-rank:], dtype=torch.float32)
    check_device(inp)
    if dim not in (-2, -1, rank - 2, rank - 1):
        raise ValueError(f"dim must be the last dimension (-1) or the one before (-2); got {dim}")
    rows = math.prod(inp.shape) // max(inp.shape[dim], 1)
    if rows > MAX_ROWS:
        raise ValueError(f"at most {MAX_ROWS} rows fit a grid; got {rows}")
    out = torch.empty_like(inp)
    if inp.numel():
        # (batch, rows, n), where a row is what adds up to 1
        x, y = (t.unsqueeze(0) if rank == 2 else t for t in (inp, out))
        if dim in (-2, rank - 2):
            x, y = x.mT, y.mT
        _kernels.launch("batched_softmax", inp=x, out=y)
    return out


def test_batched_GEMM_NT(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b.mT`` for float32 ``a (batch, M, K)`` and ``b (batch, N, K)``, any strides: ``(batch, M, N)``.

    Raises:
        ValueError: shapes that do not fit, another dtype or device.
    """
    expect("a", a, shape=("batch", "M", "K"), dtype=torch.float32)
    expect("b", b, shape=(a.shape[0], "N", a.shape[2]), dtype=torch.float32, device=a.device)
    return _gemm("batched_GEMM_NT", a, b, b.shape[1])


def test_batched_GEMM_NN(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` for float32 ``a (batch, M, K)`` and ``b (batch, K, N)``, any strides: ``(batch, M, N)``.

    Raises:
        ValueError: shapes that do not fit, another dtype or device.
    """
    expect("a", a, shape=("batch", "M", "K"), dtype=torch.float32)
    expect("b", b, shape=(a.shape[0], a.shape[2], "N"), dtype=torch.float32, device=a.device)
    return _gemm("batched_GEMM_NN", a, b, b.shape[2])


def _gemm(launcher: str, a: Tensor, b: Tensor, n: int) -> Tensor:
    check_device(a)
    batch, m, _ = a.shape
    if batch > MAX_GRID:
        raise ValueError(f"at most {MAX_GRID} matrices fit a grid; got {batch}")
    c = torch.empty(batch, m, n, device=a.device)
    if c.numel():
        # (batch, rows, columns) -> (batch, 1, rows, columns): one head
        _kernels.launch(launcher, A=a.unsqueeze(1), B=b.unsqueeze(1), C=c.unsqueeze(1))
    return c


def custom_attention(
    q: Tensor, k: Tensor, v: Tensor, num_heads: int, causal: bool = False
) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) v for each head, through the four kernels.

    Args:
        q: ``(batch, q_len, num_heads * head_dim)`` float32, last dimension contiguous.
        k, v: ``(batch, kv_len, num_heads * head_dim)``.
        num_heads: heads, side by side in a row.
        causal: query i sees the keys ``j <= i + kv_len - q_len``.

    Returns:
        ``(batch, q_len, num_heads * head_dim)``. The scores take ``batch * num_heads * q_len * kv_len`` floats of
        scratch memory.

    Raises:
        ValueError: arguments that do not fit, named.
    """
    heads = [heads_view(name, t, num_heads) for name, t in (("q", q), ("k", k), ("v", v))]
    batch, _, kv_heads, q_len, kv_len, head_dim = check_attention(*heads, dtypes=(torch.float32,))
    if kv_heads != num_heads:
        raise ValueError(f"k and v must have num_heads {num_heads} heads as q has; got {kv_heads}")
    if batch * num_heads > MAX_GRID:
        raise ValueError(f"at most {MAX_GRID} heads in all fit a grid; got {batch} x {num_heads}")
    out = torch.empty(q.shape, device=q.device)
    if kv_len == 0:
        return out.zero_()
    if out.numel():
        scores = torch.empty(batch, num_heads, q_len, kv_len, device=q.device)
        # (batch, seq, heads, head_dim) -> (batch, heads, seq, head_dim): one matrix per head
        q, k, v, o = (t.transpose(1, 2) for t in (*heads, out.unflatten(-1, (num_heads, head_dim))))
        _kernels.launch(
            "custom_attention", q=q, k=k, v=v, scores=scores, out=o,
            scale=1 / math.sqrt(head_dim), causal=causal,
        )  # fmt: skip
    return out


class CustomSelfAttention(AttentionLayer):
    """Multi-head self-attention whose attention runs in your kernels."""

    def forward(self, x: Tensor, causal: bool = False) -> Tensor:
        """``x (batch, seq, hidden_dim)`` float32 to the same shape."""
        q, k, v = self.project_qkv(x)
        return self.project_output(custom_attention(q, k, v, self.num_heads, causal))
