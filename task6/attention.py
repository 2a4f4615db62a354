"""Task 6: attention for a language model. One forward() serves prompts and single tokens."""

import torch
from torch import Tensor, nn

from common.inputs import check_head_dim, check_head_split, expect
from task4.prefill import fast_attention
from task5.attention import flash_attention_decode, update_kv_cache
from task6.rope import RoPE, apply_rotary_emb


class customAttention(nn.Module):
    """Multi-head causal self-attention with RoPE and a KV cache.

    Args:
        hidden_dim: width of the layer.
        num_heads: heads; must divide ``hidden_dim`` into an even head_dim of at most 128.
        rope: the table of rotations for that head_dim; the layers of a model share one.
        device, dtype: of the weights; PyTorch's defaults if None.

    Attributes:
        qkv_proj: ``hidden_dim`` to ``3 * hidden_dim``: q, k and v side by side, because one large product is faster
            than three small ones. The kernels read each as a slice of the result, in place.
        o_proj: ``hidden_dim`` to ``hidden_dim``.

    Raises:
        ValueError: sizes that do not fit.
    """

    def __init__(
        self,
        hidden_dim: int,
        num_heads: int,
        rope: RoPE,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        head_dim = check_head_split(hidden_dim, num_heads)
        check_head_dim(head_dim)
        if rope.head_dim != head_dim:
            raise ValueError(f"rope must be for head_dim {head_dim}; got one for {rope.head_dim}")
        self.hidden_dim, self.num_heads, self.head_dim = hidden_dim, num_heads, head_dim
        self.rope = rope
        place = dict(device=device, dtype=dtype)
        self.qkv_proj = nn.Linear(hidden_dim, 3 * hidden_dim, bias=False, **place)
        self.o_proj = nn.Linear(hidden_dim, hidden_dim, bias=False, **place)
        self.requires_grad_(False)  # the kernels have no backward pass

    def forward(self, x: Tensor, kv_cache: tuple[Tensor, Tensor], current_pos: int = 0) -> Tensor:
        """Append x's keys and values to the cache at ``current_pos``; x attends to the cache up to itself.

        A single position (seq 1) is a decode step, anything longer is a prompt or a chunk of one. In both, row i of x
        sees the positions ``0 ... current_pos + i``.

        Args:
            x: ``(batch, seq, hidden_dim)``, the weights' dtype and device.
            kv_cache: ``(k_cache, v_cache)``, each ``(batch, max_seq_len, hidden_dim)``; extended in place.
            current_pos: how many positions of the cache are filled.

        Returns:
            ``(batch, seq, hidden_dim)``.

        Raises:
            ValueError: arguments that do not fit; the cache is then untouched.
        """
        w = self.o_proj.weight
        expect("x", x, shape=("batch", "seq", self.hidden_dim), dtype=w.dtype, device=w.device)
        k_cache, v_cache = kv_cache
        seq = x.shape[1]
        cos, sin = self.rope(seq, current_pos)
        # BEGIN SOLUTION
        heads, end = self.num_heads, current_pos + seq
        qkv = self.qkv_proj(x).unflatten(-1, (3, heads, -1))  # (batch, seq, 3, heads, head_dim)
        qk = qkv[:, :, :2].flatten(2, 3)  # (batch, seq, 2 * heads, head_dim): both rotated at once
        q, k = apply_rotary_emb(qk, cos, sin).chunk(2, dim=2)  # (batch, seq, heads, head_dim) each
        v = qkv[:, :, 2]
        update_kv_cache(k_cache, v_cache, k.flatten(2), v.flatten(2), current_pos)

        # (batch, end, heads, head_dim): views, the caches are read in place
        k, v = (cache[:, :end].unflatten(-1, (heads, -1)) for cache in (k_cache, v_cache))
        o = flash_attention_decode(q, k, v) if seq == 1 else fast_attention(q, k, v, causal=True)
        return self.o_proj(o.flatten(2))
        # END SOLUTION
