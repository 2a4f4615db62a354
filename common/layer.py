"""The projections around an attention: tasks 1 to 5 are given them, and write the forward between them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.inputs import check_head_split, expect

# BEGIN STAFF
from common.products import linear_of

# END STAFF


def _third(whole: str, i: int) -> property:
    """The i-th of the three tensors stacked in the parameter ``whole``, as a view; None where the layer has none."""

    def get(layer: "AttentionLayer") -> Tensor | None:
        stacked = getattr(layer, whole)
        return None if stacked is None else stacked.chunk(3)[i]

    return property(get)


class AttentionLayer(nn.Module):
    """Projections of a multi-head attention layer, without the attention.

    Args:
        w_q, w_k, w_v, w_o: weights ``(hidden_dim, hidden_dim)``, one dtype and device; applied as ``x @ w.T``, as
            ``torch.nn.Linear`` does.
        hidden_dim: width of the layer.
        num_heads: heads; must divide ``hidden_dim``.
        b_q, b_k, b_v, b_o: optional biases ``(hidden_dim,)``. If only some of b_q, b_k and b_v are given, the others
            are 0.

    Attributes:
        w_qkv: w_q, w_k and w_v stacked, ``(3 * hidden_dim, hidden_dim)``: one product gives q, k and v. If the weights
            already follow each other in memory, as ``in_proj_weight.chunk(3)`` of a ``torch.nn.MultiheadAttention``,
            the layer shares that memory; otherwise it copies them once.
        b_qkv: the biases likewise, ``(3 * hidden_dim,)``, or None.
        w_o, b_o: as given.
        w_q, w_k, w_v, b_q, b_k, b_v: views of w_qkv and b_qkv.

    w_qkv, w_o and the biases are parameters, so ``.to()``, ``state_dict()`` and ``parameters()`` see them.

    Raises:
        ValueError: ``num_heads`` does not divide ``hidden_dim``, or a weight has another shape, dtype or device.
    """

    w_q, w_k, w_v = (_third("w_qkv", i) for i in range(3))
    b_q, b_k, b_v = (_third("b_qkv", i) for i in range(3))
    # BEGIN STAFF
    _linear_qkv = _linear_o = staticmethod(F.linear)
    # END STAFF

    def __init__(
        self,
        w_q: Tensor,
        w_k: Tensor,
        w_v: Tensor,
        w_o: Tensor,
        hidden_dim: int,
        num_heads: int,
        b_q: Tensor | None = None,
        b_k: Tensor | None = None,
        b_v: Tensor | None = None,
        b_o: Tensor | None = None,
        # BEGIN STAFF
        *,
        products: str = "torch",  # or "tensor cores", for float32 on a Hopper: common.products.TensorCoreLinear
        # END STAFF
    ) -> None:
        super().__init__()
        self.hidden_dim = hidden_dim
        self.num_heads = num_heads
        self.head_dim = check_head_split(hidden_dim, num_heads)
        weights = {"w_q": w_q, "w_k": w_k, "w_v": w_v, "w_o": w_o}
        biases = {"b_q": b_q, "b_k": b_k, "b_v": b_v, "b_o": b_o}
        expect("w_q", w_q, shape=(hidden_dim, hidden_dim))
        for name, value in weights.items():
            expect(name, value, shape=w_q.shape, dtype=w_q.dtype, device=w_q.device)
        for name, value in biases.items():
            if value is not None:
                expect(name, value, shape=(hidden_dim,), dtype=w_q.dtype, device=w_q.device)
        b_qkv = None
        if any(b is not None for b in (b_q, b_k, b_v)):
            zero = w_q.new_zeros(hidden_dim)
            b_qkv = _stacked([zero if b is None else b for b in (b_q, b_k, b_v)])
        self.w_qkv = _parameter(_stacked([w_q, w_k, w_v]))
        self.b_qkv = _parameter(b_qkv)
        self.w_o = _parameter(w_o)
        self.b_o = _parameter(b_o)
        # BEGIN STAFF
        if products != "torch":
            self._linear_qkv, self._linear_o = linear_of(products), linear_of(products)
        # END STAFF

    def project_qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``x (batch, seq, hidden_dim)`` to q, k, v of the same shape: slices of one tensor, 3 * hidden_dim wide.

        Raises:
            ValueError: ``x`` has another rank, width, dtype or device than the weights.
        """
        w = self.w_qkv
        expect("x", x, shape=("batch", "seq", self.hidden_dim), dtype=w.dtype, device=w.device)
        # BEGIN STAFF, for students: q, k, v = F.linear(x, w, self.b_qkv).chunk(3, dim=-1)
        q, k, v = self._linear_qkv(x, w, self.b_qkv).chunk(3, dim=-1)
        # END STAFF
        return q, k, v

    def project_output(self, o: Tensor) -> Tensor:
        """``o @ w_o.T + b_o`` for the concatenated heads ``o (batch, seq, hidden_dim)``."""
        # BEGIN STAFF, for students: return F.linear(o, self.w_o, self.b_o)
        return self._linear_o(o, self.w_o, self.b_o)
        # END STAFF


def _parameter(value: Tensor | None) -> nn.Parameter | None:
    """For inference: the kernels have no backward pass."""
    return None if value is None else nn.Parameter(value, requires_grad=False)


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """``torch.cat(parts)`` for tensors of one shape, without a copy if they follow each other in memory."""
    parts = [part.detach() for part in parts]
    first, n = parts[0], parts[0].numel()
    adjacent = all(
        part.is_contiguous()
        and part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and part.storage_offset() == first.storage_offset() + i * n
        for i, part in enumerate(parts)
    )
    if not adjacent:
        return torch.cat(parts)
    return first.as_strided((len(parts) * n,), (1,)).view(-1, *first.shape[1:])
