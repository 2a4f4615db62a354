"""Task 3: the forward pass of FlashAttention-2 in PyTorch, one tile at a time.

Naive attention writes all of S = Q K^T, seq x seq numbers per head, to memory and reads it back twice. FlashAttention
never holds more of S than one tile of B_r rows by B_c columns. The softmax is updated tile by tile (online softmax):
m_i is the maximum of a row so far, l_i its sum of exponentials so far, O_i its weighted sum of values so far. When a
tile raises the maximum from m' to m, the sums made relative to m' are rescaled by exp(m' - m).

The letters, and the line numbers at the ends of lines, are those of Algorithm 1 in Dao, "FlashAttention-2",
arXiv:2307.08691. Line 10 is printed there with a typo:

    O_i = diag(exp(m' - m))^-1 O_i + P V_j

The ^-1 is wrong: it divides O_i by exp(m' - m), where line 9 multiplies l_i by the same factor, so O_i would grow each
time the maximum does. The kernel of task 4 takes the same steps with the tiles in shared memory and registers.
"""

import torch
from torch import Tensor

from common.inputs import check_head_split, expect
from common.layer import AttentionLayer


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_heads: int,
    B_r: int = 64,
    B_c: int = 64,
    causal: bool = False,
) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) v for each head, one tile of q k^T at a time.

    Args:
        q: ``(batch, q_len, num_heads * head_dim)``; head h is columns ``h * head_dim`` to ``(h + 1) * head_dim``.
        k: ``(batch, kv_len, num_heads * head_dim)``, dtype and device of q.
        v: as k. All three may have any strides.
        num_heads: heads; must divide the width of q.
        B_r: rows (queries) per tile, at least 1; need not divide q_len.
        B_c: columns (keys) per tile, at least 1; need not divide kv_len.
        causal: query i sees the keys j <= i + kv_len - q_len: the last query sees all of them.

    Returns:
        ``(batch, q_len, num_heads * head_dim)``, the dtype of q; sums of float16 and bfloat16 are kept in float32. The
        output of a query that sees no key is 0.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit each other, or a size below 1.
    """
    head_dim = _check_arguments(q, k, v, num_heads, B_r, B_c)
    # BEGIN SOLUTION
    batch, q_len, kv_len = q.shape[0], q.shape[1], k.shape[1]
    split = (num_heads, head_dim)
    # views, (batch, heads, length, head_dim)
    Q, K, V = (t.unflatten(-1, split).transpose(1, 2) for t in (q, k, v))
    O = q.new_empty(batch, q_len, num_heads, head_dim)
    wide = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
    scale = head_dim**-0.5
    offset = kv_len - q_len  # row i crosses the diagonal at column i + offset

    for i in range(0, q_len, B_r):  # line 3
        rows = torch.arange(i, min(i + B_r, q_len), device=q.device)
        Q_i = Q[:, :, i : i + B_r].to(wide) * scale  # line 4: (batch, heads, B_r, head_dim)
        O_i = torch.zeros_like(Q_i)  # line 5
        l_i = Q_i.new_zeros(*Q_i.shape[:-1], 1)  # (batch, heads, B_r, 1)
        m_i = torch.full_like(l_i, -torch.inf)

        # The last row of this tile sees the most keys; tiles beyond those are fully masked and skipped.
        seen = min(kv_len, i + len(rows) + offset) if causal else kv_len
        for j in range(0, seen, B_c):  # line 6
            K_j = K[:, :, j : j + B_c].to(wide)  # line 7: (batch, heads, B_c, head_dim)
            V_j = V[:, :, j : j + B_c].to(wide)
            S = Q_i @ K_j.transpose(-1, -2)  # line 8: (batch, heads, B_r, B_c)
            if causal and j + B_c - 1 > i + offset:  # the tile crosses the diagonal
                columns = torch.arange(j, j + K_j.shape[2], device=q.device)
                S = S.masked_fill(columns > rows[:, None] + offset, -torch.inf)

            m = torch.maximum(m_i, S.amax(dim=-1, keepdim=True))  # line 9
            # A row that has seen no key yet has m = -inf, and -inf - -inf is NaN: use 0 there.
            shift = m.masked_fill(m == -torch.inf, 0)
            P = torch.exp(S - shift)  # line 9
            rescale = torch.exp(m_i - shift)
            l_i = rescale * l_i + P.sum(dim=-1, keepdim=True)  # line 9
            O_i = rescale * O_i + P @ V_j  # line 10: (batch, heads, B_r, head_dim)
            m_i = m

        O_i = O_i / l_i.masked_fill(l_i == 0, 1)  # line 12
        O[:, i : i + B_r] = O_i.transpose(1, 2)  # line 14: (batch, B_r, heads, head_dim)
    # Lines 13 and 15 store L = m + log(l) for the backward pass, which this course leaves out.
    return O.flatten(2)  # line 17: (batch, q_len, heads * head_dim)
    # END SOLUTION


class CustomFlashAttention(AttentionLayer):
    """Multi-head self-attention with :func:`flash_attention` between its projections.

    ``CustomFlashAttention(w_q, w_k, w_v, w_o, hidden_dim, num_heads)``, weights as in task 1.
    """

    def forward(self, x: Tensor, causal: bool = False) -> Tensor:
        """As in task 1: ``(batch, seq, hidden_dim)`` to the same shape.

        Raises:
            ValueError: x has another rank, width, dtype or device than the weights.
        """
        # BEGIN SOLUTION
        q, k, v = self.project_qkv(x)  # each (batch, seq, hidden_dim)
        return self.project_output(flash_attention(q, k, v, self.num_heads, causal=causal))
        # END SOLUTION


def _check_arguments(q: Tensor, k: Tensor, v: Tensor, num_heads: int, B_r: int, B_c: int) -> int:
    """head_dim, or ValueError."""
    expect("q", q, shape=("batch", "q_len", "heads * head_dim"))
    batch, _, width = q.shape
    expect("k", k, shape=(batch, "kv_len", width), dtype=q.dtype, device=q.device)
    expect("v", v, shape=(batch, k.shape[1], width), dtype=q.dtype, device=q.device)
    if B_r < 1 or B_c < 1:
        raise ValueError(f"B_r and B_c must be at least 1; got B_r {B_r}, B_c {B_c}")
    return check_head_split(width, num_heads, name="the width of q")
