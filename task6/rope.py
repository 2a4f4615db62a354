"""Rotary position embedding: a position becomes a rotation. [RoFormer] arXiv:2104.09864.

Each head's query and key are split into head_dim / 2 pairs, and pair i of the vector at position p is rotated by the
angle ``p * base^(-2i / head_dim)``. The product of a rotated query and a rotated key then depends only on the distance
between them, and nothing has to be learned or added to the embedding.

Which two elements form a pair is a convention, and weights trained with one do not work with the other. This is
"rotate-half", as in GPT-NeoX and in Hugging Face's Llama: element i is paired with element ``i + head_dim / 2``. The
paper pairs neighbours, ``2i`` with ``2i + 1``.
"""

import torch
from torch import Tensor, nn

from common.inputs import describe, expect


class RoPE(nn.Module):
    """A table of the cosines and sines of every position, computed once.

    Args:
        head_dim: width of a head; even.
        max_seq_len: positions in the table.
        base: the slowest pair rotates once in about ``2 pi base`` positions.
        device, dtype: of the tables; PyTorch's defaults if None. The angles themselves are float64: in float32 they
            would be off by up to 0.0005 rad at position 8,191.

    Attributes:
        cos, sin: ``(max_seq_len, head_dim / 2)``. Buffers, so ``.to()`` moves them; not in ``state_dict()``, because
            they follow from the arguments.

    Raises:
        ValueError: an odd head_dim, or a size that is not positive.
    """

    def __init__(
        self,
        head_dim: int,
        max_seq_len: int = 8192,
        base: float = 10000,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if head_dim < 2 or head_dim % 2:
            raise ValueError(
                f"RoPE rotates pairs: head_dim must be even and positive; got {head_dim}"
            )
        if max_seq_len < 1 or base <= 0:
            raise ValueError(f"max_seq_len and base must be positive; got {max_seq_len} and {base}")
        self.head_dim, self.max_seq_len, self.base = head_dim, max_seq_len, base
        dtype = torch.get_default_dtype() if dtype is None else dtype
        pair = (
            torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
        )  # 2i / head_dim
        position = torch.arange(max_seq_len, dtype=torch.float64, device=device)
        angle = position[:, None] * base**-pair  # (max_seq_len, head_dim / 2)
        self.register_buffer("cos", angle.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angle.sin().to(dtype), persistent=False)

    def forward(self, seq: int, current_pos: int = 0) -> tuple[Tensor, Tensor]:
        """Views of cos and sin, ``(seq, head_dim / 2)``, starting at position ``current_pos``.

        Raises:
            ValueError: positions outside the table.
        """
        if seq < 0 or current_pos < 0 or current_pos + seq > self.max_seq_len:
            raise ValueError(
                f"the RoPE table has the positions 0 to {self.max_seq_len - 1}; "
                f"got {seq} positions from current_pos {current_pos}"
            )
        return self.cos[current_pos : current_pos + seq], self.sin[current_pos : current_pos + seq]


def apply_rotary_emb(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate every pair ``(x[i], x[i + head_dim / 2])`` by the angle of its position.

    Args:
        x: ``(batch, seq, heads, head_dim)``, queries or keys; any strides.
        cos, sin: ``(seq, head_dim / 2)``, from :class:`RoPE`, x's dtype and device.

    Returns:
        A new tensor of x's shape and dtype.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together.
    """
    expect("x", x, shape=("batch", "seq", "heads", "head_dim"))
    if x.shape[-1] % 2:
        raise ValueError(
            f"RoPE rotates pairs: the last dimension of x must be even; got {describe(x)}"
        )
    for name, table in (("cos", cos), ("sin", sin)):
        expect(name, table, shape=(x.shape[1], x.shape[3] // 2), dtype=x.dtype, device=x.device)
    a, b = x.chunk(2, dim=-1)  # (batch, seq, heads, head_dim / 2) each
    cos, sin = cos[:, None], sin[:, None]  # (seq, 1, head_dim / 2): the same for every head
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
