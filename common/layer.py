"""The weights around an attention: what tasks 1 to 5 are given, and what differs is their forward."""

import torch
from torch import Tensor, nn

from common.inputs import check_head_split, expect


class AttentionLayer(nn.Module):
    """Projections of a multi-head attention layer, without the attention.

    Args:
        w_q, w_k, w_v, w_o: weights ``(hidden_dim, hidden_dim)``, one dtype and device; applied as ``x @ w``.
        hidden_dim: width of the layer.
        num_heads: heads; must divide ``hidden_dim``.
        b_q, b_k, b_v, b_o: optional biases ``(hidden_dim,)``.

    The weights are parameters, so ``.to()``, ``state_dict()`` and ``parameters()`` see them.

    Raises:
        ValueError: ``num_heads`` does not divide ``hidden_dim``, or a weight has another shape, dtype or device.
    """

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
    ) -> None:
        super().__init__()
        self.hidden_dim = hidden_dim
        self.num_heads = num_heads
        self.head_dim = check_head_split(hidden_dim, num_heads)
        weights = {"w_q": w_q, "w_k": w_k, "w_v": w_v, "w_o": w_o}
        biases = {"b_q": b_q, "b_k": b_k, "b_v": b_v, "b_o": b_o}
        for name, value in (weights | biases).items():
            if value is None and name in biases:
                self.register_parameter(name, None)
                continue
            shape = (hidden_dim, hidden_dim) if name in weights else (hidden_dim,)
            expect(name, value, shape=shape, dtype=w_q.dtype, device=w_q.device)
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))

    def project_qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``x (batch, seq, hidden_dim)`` to q, k, v of the same shape.

        Raises:
            ValueError: ``x`` has another rank, width, dtype or device than the weights.
        """
        expect(
            "x",
            x,
            shape=("batch", "seq", self.hidden_dim),
            dtype=self.w_q.dtype,
            device=self.w_q.device,
        )
        return (
            _project(x, self.w_q, self.b_q),
            _project(x, self.w_k, self.b_k),
            _project(x, self.w_v, self.b_v),
        )

    def project_output(self, o: Tensor) -> Tensor:
        """The heads' outputs, concatenated to ``(batch, seq, hidden_dim)``, through w_o and b_o."""
        return _project(o, self.w_o, self.b_o)


def _project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.matmul(x, weight) if bias is None else torch.matmul(x, weight) + bias
