"""How precise a rung is, beside the kernel of PyTorch that it has to be as precise as.

    float16, bfloat16   at most 1.1 times the loss of SDPA's flash backend (FlashAttention-2)
    float32             at most 2 times the loss of SDPA's memory-efficient backend, PyTorch's fused fp32 kernel

The loss is the distance from float64: root of the mean square, and largest. The largest error of millions is chance and
differs by tens of per cent between two kernels that round alike, so each head's largest is compared, and the geometric
mean over the heads counts. For float32 no single head may be worse either, in its largest error and in root mean
square: one whose values are 1e4 times smaller than another's has to be as good as that one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from common.check import Rng
from task4.ladder.rungs import Rung, ladder_attention

FLASH, EFFICIENT = "SDPA flash", "SDPA memory-efficient"
ALLOWED = {torch.float16: 1.1, torch.bfloat16: 1.1, torch.float32: 2.0}
INPUTS = (
    "normal",
    "large scores",
    "one huge key",
    "rows 1e4 apart",
    "heads 1e4 apart",
    "tiny values",
)


@dataclass(frozen=True)
class Loss:
    """Distance from the truth, of the whole output and of single heads."""

    rms: Tensor
    head_largest: Tensor  # (batch, heads)
    head_rms: Tensor

    @classmethod
    def of(cls, got: Tensor, truth: Tensor) -> "Loss":
        """From ``(batch, rows, heads, head_dim)``; infinite if ``got`` has a NaN or an infinity."""
        error = (got.double() - truth).abs().nan_to_num(nan=torch.inf)
        squares = error.square()
        return cls(squares.mean().sqrt(), error.amax((1, 3)), squares.mean((1, 3)).sqrt())

    def ratios(self, yardstick: "Loss") -> dict[str, float]:
        """How many times more than the yardstick's, by what is compared."""
        return {
            "largest": _ratios(self.head_largest, yardstick.head_largest).log().mean().exp().item(),
            "rms": _ratios(self.rms, yardstick.rms).item(),
            "largest of a head": _ratios(self.head_largest, yardstick.head_largest).max().item(),
            "rms of a head": _ratios(self.head_rms, yardstick.head_rms).max().item(),
        }


def _ratios(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(a == 0, 0.0, a / b)


def yardstick(dtype: torch.dtype) -> str:
    """The kernel of PyTorch that a rung is compared with."""
    return EFFICIENT if dtype == torch.float32 else FLASH


def by_yardstick(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Attention by that kernel.

    Raises:
        RuntimeError: it does not run here.
    """
    backend = (
        SDPBackend.EFFICIENT_ATTENTION if q.dtype == torch.float32 else SDPBackend.FLASH_ATTENTION
    )
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def make_inputs(
    kind: str, rng: Rng, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """q, k and v of one of ``INPUTS``, each of ``shape`` (batch, rows, heads, head_dim)."""
    q, k, v = (rng.randn(*shape) for _ in range(3))
    batch, rows, heads, _ = shape
    if kind == "large scores":
        q, k = 4 * q, 4 * k
    elif kind == "one huge key":
        k[:, rows // 2] *= 100
    elif kind == "rows 1e4 apart":  # of q (from flat to peaked weights) and of v
        q, v = (t * 10 ** rng.uniform(-3, 1, batch, rows, heads, 1) for t in (q, v))
    elif kind == "heads 1e4 apart":
        v = v * 10 ** torch.linspace(-4, 0, heads, device=v.device)[:, None]
    elif kind == "tiny values":
        q, k, v = q * 1e-3, k * 1e-3, v * 1e-6
    return tuple(t.to(dtype) for t in (q, k, v))


def compare(
    rung: Rung,
    kind: str,
    rng: Rng,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    causal: bool,
) -> dict[str, float]:
    """How many times more a rung loses than the yardstick, on inputs of one kind.

    Raises:
        RuntimeError: the yardstick does not run here.
    """
    from common.check.attention import attention_float64

    q, k, v = make_inputs(kind, rng, shape, dtype)
    truth = attention_float64(q, k, v, causal=causal)
    theirs = Loss.of(by_yardstick(q, k, v, causal), truth)
    return Loss.of(ladder_attention(q, k, v, causal=causal, rung=rung.number), truth).ratios(theirs)
