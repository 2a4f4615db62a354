"""How much a result loses against float64, compared with what another one loses.

The loss is the distance from float64: root mean square, and largest. The largest error of millions is chance and
differs by tens of per cent between two kernels that round alike, so each head's largest is compared, and the geometric
mean over the heads counts. Where no single head may be worse either (one whose values are 1e4 times smaller than
another's has to be as good as that one), every head's root mean square is compared, and the largest error of all, in
units of the largest value of its head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Loss:
    """Distance from the truth, of the whole output and of single heads."""

    rms: Tensor
    head_largest: Tensor  # (batch, heads)
    head_rms: Tensor
    relative: Tensor  # the largest, each head's in units of its largest value

    @classmethod
    def of(cls, got: Tensor, truth: Tensor) -> "Loss":
        """From ``(batch, rows, heads, head_dim)``; infinite if ``got`` has a NaN or an infinity."""
        error = (got.double() - truth).abs().nan_to_num(nan=torch.inf)
        squares, largest = error.square(), error.amax((1, 3))
        relative = _ratios(largest, truth.abs().amax((1, 3))).max()
        return cls(squares.mean().sqrt(), largest, squares.mean((1, 3)).sqrt(), relative)

    def ratios(self, yardstick: "Loss") -> dict[str, float]:
        """As a multiple of the yardstick's, by what is compared."""
        return {
            "largest": _ratios(self.head_largest, yardstick.head_largest).log().mean().exp().item(),
            "rms": _ratios(self.rms, yardstick.rms).item(),
            "largest in units of its head": _ratios(self.relative, yardstick.relative).item(),
            "rms of a head": _ratios(self.head_rms, yardstick.head_rms).max().item(),
        }


def _ratios(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(a == 0, 0.0, a / b)
