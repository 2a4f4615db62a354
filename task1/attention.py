"""Task 1: multi-head self-attention, written out.

The projections q = x w_q^T, k = x w_k^T and v = x w_v^T are split into heads of width d = hidden_dim / num_heads. Each
head computes

    S = q k^T / sqrt(d)          how well each token (row) matches each other token (column)
    P = softmax(S)               each row turned into weights that sum to 1
    o = P v                      each token's mix of the values

and the concatenated heads are projected with w_o. In causal attention a token sees itself and the tokens before it: S
is set to -inf right of the diagonal, and softmax turns that into exact zeros.

Source: Vaswani et al., "Attention Is All You Need", arXiv:1706.03762, section 3.2.
"""

import torch
from torch import Tensor

from common.layer import AttentionLayer


class CustomSelfAttention(AttentionLayer):
    """Multi-head self-attention from matrix products and a softmax.

    ``CustomSelfAttention(w_q, w_k, w_v, w_o, hidden_dim, num_heads)``; the weights are ``(hidden_dim, hidden_dim)`` and
    are applied as ``x @ w.T``, as ``torch.nn.Linear`` does. The base class keeps them as parameters and provides

    - ``self.project_qkv(x)``: q, k and v, each ``(batch, seq, hidden_dim)``; it raises ValueError for a wrong x;
    - ``self.project_output(o)``: ``o @ w_o.T``, the last step;
    - ``self.num_heads`` and ``self.head_dim``; head h is columns ``h * head_dim`` to ``(h + 1) * head_dim`` of q, k
      and v.
    """

    def forward(self, x: Tensor, causal: bool = False) -> Tensor:
        """Attention of every token to every token, or with ``causal`` to itself and those before it.

        Args:
            x: ``(batch, seq, hidden_dim)``, the weights' dtype and device, any strides.
            causal: hide from each token those after it.

        Returns:
            ``(batch, seq, hidden_dim)``, the dtype of x.

        Raises:
            ValueError: x has another rank, width, dtype or device than the weights.
        """
        # BEGIN SOLUTION
        q, k, v = self.project_qkv(x)  # each (batch, seq, hidden_dim)
        heads = (self.num_heads, self.head_dim)
        q = q.unflatten(-1, heads).transpose(1, 2)  # (batch, heads, seq, head_dim)
        k = k.unflatten(-1, heads).transpose(1, 2)
        v = v.unflatten(-1, heads).transpose(1, 2)

        # q is scaled rather than S: it is the smaller tensor, and in float16 q k^T then stays in range.
        S = (q * self.head_dim**-0.5) @ k.transpose(-1, -2)  # (batch, heads, seq, seq)
        if causal:
            seq = x.shape[1]
            after = torch.ones(seq, seq, dtype=torch.bool, device=x.device).triu(diagonal=1)
            S = S.masked_fill(after, -torch.inf)
        P = torch.softmax(S, dim=-1)
        o = P @ v  # (batch, heads, seq, head_dim)

        o = o.transpose(1, 2).flatten(2)  # (batch, seq, hidden_dim), the heads side by side
        return self.project_output(o)
        # END SOLUTION
