"""Float32 products on tensor cores beside PyTorch's in float32: single products, and the course's graded layer.

    x @ w.T, 4,096 and up    3 x PyTorch's speed, at least, and 1 x its error against float64, at most
    the graded layer         3 x torch.nn.MultiheadAttention's speed, at least, causal and not

The layer is task 4's at B64 S4096, timed as ``task4/test.py`` times it. ``python -m task6.generation --bars``.
"""

import gc
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from common.check import Rng
from common.check.hard_inputs import FACTORS, make_factors
from common.layer import AttentionLayer
from common.memory import fit_batch
from common.products import TensorCoreLinear
from common.record.grid import Grid
from common.timing import Timing, all_alike, float32_products, measure
from task4.prefill import fast_attention
from task6.generation.table import spread

BATCH, SEQ, HIDDEN, HEADS = 64, 4096, 4096, 32
SIZES = ((4096, 4096, 4096), (8192, 8192, 8192), (BATCH * SEQ, HIDDEN, HIDDEN))  # M, N, K
FASTER = 3.0  # x PyTorch's, at least: a product, and the layer
ERROR = 1.0  # x PyTorch's, at most: the root mean square of a product
CHECKED = 4096  # rows of a product that are compared with float64
SECONDS = {
    "product": 1.0,
    "layer": 3.0,
}  # of timing, without the warm-up; each side runs five times at least


@dataclass(frozen=True)
class Beside:
    """Times of ours and of PyTorch's, in one run.

    Args:
        name: what was run, with its sizes.
        ours, theirs: of one call.
        note: what was scaled down; empty if nothing was.
        flops: of one call.
        errors: of ours as multiples of PyTorch's, root mean square and largest, by the name of the inputs.
    """

    name: str
    ours: Timing
    theirs: Timing
    note: str
    flops: float = 0.0
    errors: Mapping[str, tuple[float, float]] | None = None

    @property
    def title(self) -> str:
        """Its name in tables, with what there is to say."""
        return f"{self.name}; {self.note}" if self.note else self.name

    @property
    def faster(self) -> float:
        """How many times as fast ours is."""
        return self.theirs.median_ms / self.ours.median_ms


def grids(seed: int, device: torch.device | str = "cuda") -> Iterator[Grid]:
    """The two tables with their bars, each as soon as it is measured; on an H200 in less than a minute.

    Args:
        seed: of inputs and weights.
        device: a GPU. Where it has too little memory there are fewer rows, or a smaller batch, and the table says so.

    Raises:
        NotEnoughMemory: not even a single row or sequence fits.
        AssertionError: results that differ from PyTorch's: nothing is printed then.
    """
    gc.collect()  # of what was measured before
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    yield product_grid([time_product(*size, seed, device) for size in SIZES])
    yield layer_grid(time_layers(seed, device))


def product_grid(found: list[Beside]) -> Grid:
    """The products; of the errors those on the inputs where ours compares worst."""
    bars = f"bars: {FASTER:g} x PyTorch's speed, {ERROR:g} x its rms error"
    title = f"x (M, K) @ w (N, K).T in float32; times in ms ({bars})"
    columns = ["M x N x K", "ours", "10 to 90 %", "PyTorch", "10 to 90 %", "TFLOP/s", "x PyTorch"]
    grid = Grid(title, [*columns, "rms error", "on inputs", "largest error"])
    for row in found:
        hardest, rms, largest = worst(row.errors or {})
        texts = [f"{row.flops / row.ours.median_ms / 1e9:.0f}", _faster(grid, row)]
        texts += [grid.judged(rms, ERROR, at_most=True), hardest, f"{largest:.2f}"]
        grid.rows.append([*_times(row), *texts])
    return grid


def layer_grid(found: list[Beside]) -> Grid:
    """The graded layer, causal and not."""
    title = f"The graded layer in float32; times in ms (bar: {FASTER:g} x nn.MultiheadAttention)"
    columns = ["", "ours", "10 to 90 %", "nn.MultiheadAttention", "10 to 90 %"]
    grid = Grid(title, [*columns, "x nn.MultiheadAttention"])
    grid.rows = [[*_times(row), _faster(grid, row)] for row in found]
    return grid


@float32_products(tf32=False)
@torch.inference_mode()
def time_product(M: int, N: int, K: int, seed: int, device: torch.device | str) -> Beside:
    """``x (M, K) @ w (N, K).T``: times on normal inputs, and the errors on all of FACTORS.

    w is split before, once; x within the time, as in use.
    """
    # x, the outputs, and what makes and compares them
    M, note = fit_batch(M, lambda m: 12 * 4 * max(m, N) * max(N, K), device, "a product")
    errors = {}
    for inputs in FACTORS:
        x, w = make_factors(inputs, Rng(seed, device, "product", inputs), M, N, K)
        errors[inputs] = relative_errors(TensorCoreLinear()(x, w), F.linear(x, w), x, w)
    x, w = make_factors("normal", Rng(seed, device, "product"), M, N, K)
    linear = TensorCoreLinear()
    times = measure(
        {"ours": lambda: linear(x, w), "PyTorch": lambda: F.linear(x, w)},
        check=all_alike,
        seconds=SECONDS["product"],
    )
    name = f"{M:,} x {N:,} x {K:,}"
    return Beside(name, times["ours"], times["PyTorch"], note, 2.0 * M * N * K, errors)


def relative_errors(ours: Tensor, theirs: Tensor, x: Tensor, w: Tensor) -> tuple[float, float]:
    """The errors of ours as multiples of theirs: root mean square, and largest.

    An error is the distance from float64 in units of ``|x| |w|.T`` of its element, so that small elements count as much
    as large ones. Of many rows every ``M / CHECKED``-th is compared.

    Args:
        ours, theirs: ``(M, N)``.
        x, w: ``(M, K)`` and ``(N, K)``.

    Returns:
        Infinite or NaN where one of them has such elements.
    """
    every = max(1, len(x) // CHECKED)
    rows, columns = x[::every].double(), w.double().T
    truth, size = rows @ columns, (rows.abs() @ columns.abs()).clamp_min(1e-300)
    a, b = (((t[::every] - truth) / size).nan_to_num(nan=torch.inf) for t in (ours, theirs))
    rms, largest = (
        torch.where(mine == 0, 0.0, mine / other).item()
        for mine, other in (
            (a.square().mean().sqrt(), b.square().mean().sqrt()),
            (a.abs().max(), b.abs().max()),
        )
    )
    return rms, largest


def worst(errors: Mapping[str, tuple[float, float]]) -> tuple[str, float, float]:
    """The inputs of the largest rms error, that error, and the largest error on any inputs; NaN is larger than all."""
    if not errors:
        return "-", math.nan, math.nan

    def size(error: float) -> float:
        return math.inf if math.isnan(error) else error

    hardest = max(errors, key=lambda inputs: size(errors[inputs][0]))
    return hardest, errors[hardest][0], max((largest for _, largest in errors.values()), key=size)


@float32_products(tf32=False)
def time_layers(seed: int, device: torch.device | str) -> list[Beside]:
    """The graded layer with products on tensor cores around the fastest attention, not causal and causal."""
    torch.manual_seed(seed)
    # Its weights require gradients, as they do by default: without, PyTorch's layer is 6 times slower in float32.
    baseline = torch.nn.MultiheadAttention(
        HIDDEN, HEADS, bias=False, batch_first=True, device=device
    ).eval()
    for weight in baseline.parameters():
        weight.data.normal_(std=HIDDEN**-0.5)
    weights = (*baseline.in_proj_weight.chunk(3), baseline.out_proj.weight)
    layer = AttentionLayer(*weights, HIDDEN, HEADS, products="tensor cores")
    # x, q, k, v, the outputs, the packed qkv of the baseline and a workspace, with room for copies
    batch, note = fit_batch(BATCH, lambda b: 14 * 4 * b * SEQ * HIDDEN, device, "the graded layer")
    x = torch.randn(batch, SEQ, HIDDEN, device=device)
    found = []
    for causal in (False, True):
        mask = torch.ones(SEQ, SEQ, dtype=torch.bool, device=device).triu(1) if causal else None

        def ours(causal: bool = causal) -> Tensor:
            q, k, v = (t.unflatten(-1, (HEADS, -1)) for t in layer.project_qkv(x))
            return layer.project_output(fast_attention(q, k, v, causal=causal).flatten(2))

        def theirs(mask: Tensor | None = mask) -> Tensor:
            return baseline(x, x, x, attn_mask=mask, need_weights=False)[0]

        sides = {"ours": ours, "PyTorch": theirs}
        with torch.inference_mode():
            times = measure(sides, check=all_alike, seconds=SECONDS["layer"])
        name = f"B{batch} S{SEQ} hidden {HIDDEN}, {HEADS} heads"
        name += f", {'causal' if causal else 'non-causal'}"
        found.append(Beside(name, times["ours"], times["PyTorch"], note))
    return found


def _times(row: Beside) -> list[str]:
    sides = ((f"{t.median_ms:.4g}", spread(t)) for t in (row.ours, row.theirs))
    return [row.title, *(text for side in sides for text in side)]


def _faster(grid: Grid, row: Beside) -> str:
    return grid.judged(row.faster, FASTER)
