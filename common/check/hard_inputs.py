"""Inputs that a kernel may find hard, by name."""

from dataclasses import dataclass

import torch
from torch import Tensor

from common.check import AttentionCase, Rng

# What accuracy is compared on: in 16 bits the first three, in float32 all.
ACCURACY = ("normal", "large scores", "one huge key", "rows 1e4 apart", "heads 1e4 apart", "tiny values")  # fmt: skip
# float32 at its limits.
FLOAT32 = ("rows of 1e4 x larger scores", "one key of 1e3", "15 decades of v", "subnormal v")
# What a product of float32 matrices may find hard: the same for what is q, k or a row of v there.
FACTORS = (
    "normal", "positive", "large", "tiny", "one huge row", "rows 1e4 apart", "columns 1e4 apart", "w inverse to x",
    "15 decades of rows", "15 decades of columns", "outliers", "opposite ends", "subnormal",
)  # fmt: skip
# What a running maximum may find hard: the first two move it all the time.
LAZY = ("rising scores", "jumps of more than 2^126", "sharp", "local", "sink", "spikes", "outliers")


def make_inputs(
    name: str, rng: Rng, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """q, k and v of that name, each of ``shape`` (batch, rows, heads, head_dim).

    Raises:
        ValueError: there are no such inputs.
    """
    q, k, v = (rng.randn(*shape) for _ in range(3))
    batch, rows, heads, head_dim = shape
    middle, per_row = rows // 2, (batch, rows, heads, 1)
    match name:
        case "normal":
            pass
        case "large scores" | "sharp":
            q, k = 4 * q, 4 * k
        case "one huge key":
            k[:, middle] *= 100
        case "rows 1e4 apart":  # of q (from flat to peaked weights) and of v
            q, v = (t * 10 ** rng.uniform(-3, 1, *per_row) for t in (q, v))
        case "heads 1e4 apart":
            v = v * 10 ** torch.linspace(-4, 0, heads, device=v.device)[:, None]
        case "tiny values":
            q, k, v = q * 1e-3, k * 1e-3, v * 1e-6
        case "rows of 1e4 x larger scores":
            q[:, ::8] *= 1e4
        case "one key of 1e3":
            k[:, middle] *= 1e3
        case "15 decades of v":
            v = v * 10 ** rng.uniform(-7.5, 7.5, *per_row)
        case "subnormal v":
            v = v * 1e-40
        case "rising scores":  # kernels walk from the last key to the first
            add_to_scores(q, k, torch.linspace(60.0, 0.0, rows))
        case "jumps of more than 2^126":  # that is 87; three keys, each as far above the one before
            jumps = torch.zeros(rows)
            jumps[[rows // 64, middle, rows - rows // 8]] = torch.tensor([300.0, 200.0, 100.0])
            add_to_scores(q, k, jumps)
        case "local":  # weights fall with the distance
            steps = torch.tensor([0.0005, 0.003, 0.02], device=q.device)
            angle = torch.arange(rows, device=q.device)[:, None] * steps
            waves = torch.cat([angle.cos(), angle.sin()], -1)[:, None]
            q[..., :6], k[..., :6] = 8 * waves, head_dim**0.5 * waves
        case "sink":
            add_to_scores(q, k, torch.cat([torch.tensor([12.0]), torch.zeros(rows - 1)]))
        case "spikes":
            k[:, rng.integers(0, rows, rows // 256)] *= 10
        case "outliers":  # in two channels
            q[..., :2], k[..., :2] = 4 * q[..., :2], 10 * k[..., :2]
        case _:
            raise ValueError(f"there are no inputs {name!r}")
    return tuple(t.to(dtype) for t in (q, k, v))


def make_factors(name: str, rng: Rng, M: int, N: int, K: int) -> tuple[Tensor, Tensor]:
    """x ``(M, K)`` and w ``(N, K)``, float32, of that name.

    Raises:
        ValueError: there are no such inputs.
    """
    x, w = rng.randn(M, K), rng.randn(N, K, scale=K**-0.5)
    match name:
        case "normal":
            pass
        case "positive":
            x, w = x.abs(), w.abs()
        case "large":
            x, w = 4e3 * x, 4e3 * w
        case "tiny":
            x, w = 1e-20 * x, 1e-15 * w
        case "one huge row":
            x[M // 2] *= 1e3
            w[N // 2] *= 1e3
        case "rows 1e4 apart":
            x, w = (t * 10 ** rng.uniform(-3, 1, len(t), 1) for t in (x, w))
        case "columns 1e4 apart":
            x = x * 10 ** rng.uniform(-3, 1, 1, K)
        case "w inverse to x":
            scale = 10 ** rng.uniform(-2, 2, 1, K)
            x, w = x * scale, w / scale
        case "15 decades of rows":
            x, w = (t * 10 ** rng.uniform(-7.5, 7.5, len(t), 1) for t in (x, w))
        case "15 decades of columns":
            x = x * 10 ** rng.uniform(-7.5, 7.5, 1, K)
        case "outliers":
            x[:, :2] *= 100
            w[:, :2] *= 10
        case "opposite ends":
            x, w = 1e-37 * x, 1e37 * w
        case "subnormal":
            x = 1e-40 * x
        case _:
            raise ValueError(f"there are no factors {name!r}")
    return x, w


def add_to_scores(q: Tensor, k: Tensor, amounts: Tensor, rows: Tensor | None = None) -> None:
    """Add ``amounts`` (kv_len,) to the scores of the keys, in place; times ``rows`` (q_len,), 1 if None."""
    share = torch.ones(q.shape[1]) if rows is None else rows
    q[..., 0] = 8 * share[:, None].to(q)
    k[..., 0] = (amounts * k.shape[3] ** 0.5 / 8)[:, None].to(k)


@dataclass(frozen=True, kw_only=True, repr=False)
class HardCase(AttentionCase):
    """A case whose scores move the running maximum.

    Args:
        drift: added to the first key's scores and to the last's, in between in proportion.
        cliff: added to key 40's, which is in the first block: 0 in the first row to all in the last.
    """

    drift: tuple[float, float] | None = None
    cliff: float | None = None

    def numbers(self, rng: Rng) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().numbers(rng)
        if self.drift:
            add_to_scores(q, k, torch.linspace(*self.drift, self.kv_len))
        if self.cliff:
            amounts = torch.zeros(self.kv_len)
            amounts[40] = self.cliff
            add_to_scores(q, k, amounts, rows=torch.linspace(0, 1, self.q_len))
        return q, k, v
