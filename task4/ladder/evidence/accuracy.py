"""How accurate a rung is, compared with the kernel of PyTorch that sets its bar.

    float16, bfloat16   at most 1.1 x the loss of SDPA's flash backend (FlashAttention-2)
    float32             at most 2 x the loss of SDPA's memory-efficient backend, PyTorch's fused fp32 kernel

The loss is the distance from float64: root mean square, and largest. The largest error of millions is chance and
differs by tens of per cent between two kernels that round alike, so each head's largest is compared, and the geometric
mean over the heads counts. For float32 no single head may be worse either: one whose values are 1e4 times smaller than
another's has to be as good as that one. So every head's root mean square is compared, and the largest error of all, in
units of the largest value of its head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from common.check import Rng
from common.check.attention import attention_float64
from common.timing import Backend, sdpa
from task4.ladder.call import ladder_attention
from task4.ladder.evidence.inputs import ACCURACY, make_inputs
from task4.ladder.rungs import BF16, FP16, FP32, Rung

ALLOWED = {FP16: 1.1, BF16: 1.1, FP32: 2.0}
YARDSTICK = {FP16: Backend.FLASH, BF16: Backend.FLASH, FP32: Backend.EFFICIENT}
INPUTS = {FP16: ACCURACY[:3], BF16: ACCURACY[:3], FP32: ACCURACY}


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


def shape_for(rung: Rung, head_dim: int, causal: bool) -> tuple[int, int, int, int]:
    """(batch, rows, heads, head_dim) of a comparison; long rows, which a rung may treat in its own way."""
    if rung.number <= 3:
        return 4, 1024, 8, head_dim
    return (2, 4096, 8, head_dim) if causal else (4, 2048, 8, head_dim)


def compare(
    rung: Rung, inputs: str, rng: Rng, head_dim: int, dtype: torch.dtype, causal: bool
) -> dict[str, float]:
    """A rung's loss as a multiple of the yardstick's, on inputs of that name.

    Raises:
        RuntimeError: the yardstick does not run here.
    """
    q, k, v = make_inputs(inputs, rng, shape_for(rung, head_dim, causal), dtype)
    truth = attention_float64(q, k, v, causal=causal)
    theirs = Loss.of(sdpa(q, k, v, backend=YARDSTICK[dtype], causal=causal), truth)
    return Loss.of(ladder_attention(q, k, v, causal=causal, rung=rung.number), truth).ratios(theirs)


def worst(rung: Rung, seed: int, head_dim: int, dtype: torch.dtype) -> dict[str, float]:
    """The largest ratio over inputs and masks, by what is compared."""
    found = [
        compare(rung, inputs, Rng(seed, "cuda", "accuracy", inputs), head_dim, dtype, causal)
        for inputs in INPUTS[dtype]
        for causal in (False, True)
    ]
    return {what: max(ratios[what] for ratios in found) for what in found[0]}
