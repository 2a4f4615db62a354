"""How precise a rung is, beside the kernel of PyTorch that it has to be as precise as.

    float16, bfloat16   at most 1.1 times the loss of SDPA's flash backend (FlashAttention-2)
    float32             at most 2 times the loss of SDPA's memory-efficient backend, PyTorch's fused fp32 kernel

The loss is the distance from float64: root of the mean square, and largest. The largest error of millions is chance and
differs by tens of per cent between two kernels that round alike, so each head's largest is compared, and the geometric
mean over the heads counts. For float32 no single head may be worse either: one whose values are 1e4 times smaller than
another's has to be as good as that one. So every head's root mean square is compared, and the largest error of all, in
units of the largest value of its head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from common.check import Rng
from common.check.attention import attention_float64, visible_keys
from task4.ladder.rungs import FP32, Rung, ladder_attention

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
    relative: Tensor  # the largest, each head's in units of its largest value

    @classmethod
    def of(cls, got: Tensor, truth: Tensor) -> "Loss":
        """From ``(batch, rows, heads, head_dim)``; infinite if ``got`` has a NaN or an infinity."""
        error = (got.double() - truth).abs().nan_to_num(nan=torch.inf)
        squares, largest = error.square(), error.amax((1, 3))
        relative = _ratios(largest, truth.abs().amax((1, 3))).max()
        return cls(squares.mean().sqrt(), largest, squares.mean((1, 3)).sqrt(), relative)

    def ratios(self, yardstick: "Loss") -> dict[str, float]:
        """How many times more than the yardstick's, by what is compared."""
        return {
            "largest": _ratios(self.head_largest, yardstick.head_largest).log().mean().exp().item(),
            "rms": _ratios(self.rms, yardstick.rms).item(),
            "largest in units of its head": _ratios(self.relative, yardstick.relative).item(),
            "rms of a head": _ratios(self.head_rms, yardstick.head_rms).max().item(),
        }


def _ratios(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(a == 0, 0.0, a / b)


def yardstick(dtype: torch.dtype) -> str:
    """The kernel of PyTorch that a rung is compared with."""
    return EFFICIENT if dtype == FP32 else FLASH


def by_yardstick(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Attention by that kernel; as many keys as queries.

    Raises:
        RuntimeError: it does not run here.
    """
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    with sdpa_kernel(
        SDPBackend.EFFICIENT_ATTENTION if q.dtype == FP32 else SDPBackend.FLASH_ATTENTION
    ):
        return scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def by_fused_float32(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None
) -> Tensor:
    """Attention by PyTorch's fused float32 kernel, for any lengths. It needs a mask with aligned rows for that.

    Raises:
        RuntimeError: it does not run here.
    """
    group, kv_len = q.shape[2] // k.shape[2], k.shape[1]
    seen = torch.nn.functional.pad(visible_keys(q, k, causal=causal), (0, -kv_len % 8))
    mask = torch.zeros(seen.shape, device=q.device).masked_fill_(~seen, -torch.inf)[..., :kv_len]
    mask = mask.expand(-1, q.shape[2], -1, -1)
    k, v = (t.repeat_interleave(group, 2) for t in (k, v))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2)
    return out.masked_fill(~seen.any(-1).transpose(1, 2)[..., None], 0.0)


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


def shape_for(rung: Rung, head_dim: int, causal: bool) -> tuple[int, int, int, int]:
    """(batch, rows, heads, head_dim) of a comparison; long rows, which a rung may treat in its own way."""
    if rung.number <= 3:
        return 4, 1024, 8, head_dim
    return (2, 4096, 8, head_dim) if causal else (4, 2048, 8, head_dim)


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
    q, k, v = make_inputs(kind, rng, shape, dtype)
    truth = attention_float64(q, k, v, causal=causal)
    theirs = Loss.of(by_yardstick(q, k, v, causal), truth)
    return Loss.of(ladder_attention(q, k, v, causal=causal, rung=rung.number), truth).ratios(theirs)
