"""How fast a student's kernels are beside the course's own: on the same GPU, in one run, in turns.

Every timed call has new random inputs at new addresses and an output full of NaN, and every timed output is checked
against the course's kernel, which runs on the same numbers afterwards: while theirs runs, no right answer is in the
GPU's memory.
"""

import importlib
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from common.build import Kernels
from common.paths import ROOT
from common.record import WORTH
from common.staff.judge.exchanged import Exchanged, used_by
from common.timing import IMPOSSIBLE, reference
from common.timing.measure import Turns

ROUND = 10  # pairs of calls between two looks at the interval
SECONDS = 5.0  # after which a ratio that lies on a boundary is decided


@dataclass(frozen=True)
class Workload:
    """What is timed of a stage.

    Args:
        name: as a page shows it.
        inputs: new random inputs on the GPU.
        call: from the stage's module and the inputs to the output.
        flops: floating-point operations of a call.
        bytes: that a call has to read and write at least.
    """

    name: str
    inputs: Callable[[Generator], tuple[Tensor, ...]]
    call: Callable[..., Tensor]
    flops: float = 0
    bytes: float = 0


def _attention(
    name: str, batch: int, seq: int, heads: int, dim: int, dtype: torch.dtype, causal: bool
) -> Workload:
    def inputs(rng: Generator) -> tuple[Tensor, ...]:
        return tuple(_randn(rng, dtype, batch, seq, heads, dim) for _ in range(3))

    flops = 4 * batch * heads * seq * seq * dim / (2 if causal else 1)
    return Workload(
        name, inputs, lambda task, q, k, v: task.flash_attention(q, k, v, causal=causal), flops
    )


def _decode(name: str, batch: int, kv_len: int, dtype: torch.dtype) -> Workload:
    heads, dim = 32, 128

    def inputs(rng: Generator) -> tuple[Tensor, ...]:
        return tuple(_randn(rng, dtype, batch, n, heads, dim) for n in (1, kv_len, kv_len))

    return Workload(
        name,
        inputs,
        lambda task, q, k, v: task.flash_attention_decode(q, k, v),
        bytes=2 * batch * kv_len * heads * dim * dtype.itemsize,
    )


def _naive(name: str, batch: int, seq: int, heads: int, dim: int) -> Workload:
    def inputs(rng: Generator) -> tuple[Tensor, ...]:
        return tuple(_randn(rng, torch.float32, batch, seq, heads * dim) for _ in range(3))

    return Workload(
        name,
        inputs,
        lambda task, q, k, v: task.custom_attention(q, k, v, heads),
        flops=4 * batch * heads * seq * seq * dim,
    )


def _randn(rng: Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=rng, device=rng.device, dtype=dtype)


FLOAT, BFLOAT = torch.float32, torch.bfloat16
# Where a stage's own benchmarks have the same shape, the name is theirs: claimed times are compared by it.
WORKLOADS = {
    "task2": [_naive("attention, B2 S1024 16 heads, head_dim 64", 2, 1024, 16, 64)],
    "task4": [
        _attention("attention alone, B4 S128 causal", 4, 128, 32, 128, FLOAT, causal=True),
        _attention("head_dim 64, B_r 128, B_c 64", 8, 2048, 32, 64, FLOAT, causal=False),
        _attention(
            "B4 S2048 causal, head_dim 128, bfloat16", 4, 2048, 16, 128, BFLOAT, causal=True
        ),
    ],
    "task5": [
        _decode("decode B16, 1,024 keys", 16, 1024, FLOAT),
        _decode("decode B1, 32,768 keys", 1, 32768, FLOAT),
        _decode("decode B16, 1,024 keys, bfloat16", 16, 1024, BFLOAT),
    ],
}


def measured(stage: str, library: Path, seed: int) -> dict[str, dict[str, Any]]:
    """Times of each workload of a stage.

    Args:
        stage: "task4".
        library: our host code with the student's device code.
        seed: of the inputs.

    Returns:
        By workload ``ratio`` (reference by theirs), ``interval`` (95 %, of that), ``ours_ms`` (the submission's),
        ``reference_ms``, ``n``, ``part`` (of the points for speed), and ``problem``: empty, or why it earns nothing.
    """
    module = importlib.import_module(f"{stage}.attention")
    theirs = Exchanged(ROOT / stage / "attention_kernel.cu", library)
    return {
        workload.name: _compare(workload, module, theirs, WORTH[stage].bands, seed + number)
        for number, workload in enumerate(WORKLOADS[stage])
    }


def _compare(
    workload: Workload, module: Any, theirs: Kernels, bands: Sequence[Sequence[float]], seed: int
) -> dict[str, Any]:
    kernels = {"theirs": theirs, "reference": module._kernels}
    turns, order = Turns(), random.Random(seed)
    times: dict[str, list[float]] = {name: [] for name in kernels}
    interval, until = (0.0, 0.0), time.monotonic() + SECONDS
    problem = ""
    while not problem:
        for _ in range(ROUND):
            for name in order.sample(sorted(kernels), 2):
                number = order.randrange(1 << 40)
                with used_by(module, kernels[name]):
                    out, inputs, ms = _timed(workload, module, turns, number, order)
                times[name].append(ms)
                if name == "theirs":
                    problem = problem or _wrong(workload, module, out, inputs, number)
        ratios = [r / t for r, t in zip(times["reference"], times["theirs"], strict=True)]
        interval = median_interval(ratios)
        if decided(interval, bands) or time.monotonic() > until:
            break
    medians = {name: statistics.median(found) for name, found in times.items()}
    problem = problem or _impossible(workload, medians["theirs"])
    return {
        "ratio": medians["reference"] / medians["theirs"],
        "interval": list(interval),
        "ours_ms": medians["theirs"],
        "reference_ms": medians["reference"],
        "n": len(ratios) if not problem else 0,
        "part": 0.0 if problem else part_of(interval, bands),
        "problem": problem,
    }


def _timed(
    workload: Workload, module: Any, turns: Turns, number: int, order: random.Random
) -> tuple[Tensor, tuple[Tensor, ...], float]:
    """One call on new inputs: its output, the inputs, and milliseconds."""
    elsewhere = torch.empty(order.randrange(1, 1 << 22), dtype=torch.uint8, device="cuda")
    inputs = workload.inputs(_generator(number))
    torch.full_like(
        inputs[0], torch.nan
    )  # freed at once: the output, of the same size, gets this memory
    out, ms = turns.take(lambda: workload.call(module, *inputs))
    del elsewhere
    return out, inputs, ms


def _generator(number: int) -> Generator:
    return Generator("cuda").manual_seed(number)


def _wrong(
    workload: Workload, module: Any, out: Tensor, inputs: tuple[Tensor, ...], number: int
) -> str:
    """Why a timed output does not count; empty if it does."""
    again = workload.inputs(_generator(number))
    if not all(map(torch.equal, inputs, again)):
        return "the inputs were changed"
    truth = workload.call(module, *again).float()
    error = (out.float() - truth).abs().max().item()
    allowed = 4 * max(torch.finfo(out.dtype).eps, 1e-5) * max(1.0, truth.abs().max().item())
    return "" if error <= allowed else f"a timed output is wrong, by {error:.3g}"


def _impossible(workload: Workload, ms: float) -> str:
    chip = reference()
    tflops, gb_per_s = workload.flops / ms / 1e9, workload.bytes / ms / 1e6
    if max(tflops / chip.bf16_tflops, gb_per_s / chip.read_gb_per_s) <= IMPOSSIBLE:
        return ""
    return f"{ms:.3g} ms is impossible: {tflops:.0f} TFLOP/s and {gb_per_s:.0f} GB/s"


# ---- bands


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """A 95 % confidence interval of the median, by ranks: nothing is assumed of the distribution."""
    found, n = sorted(values), len(values)
    rank = max(0, int(n / 2 - 0.98 * n**0.5))
    return found[rank], found[n - 1 - rank]


def decided(interval: tuple[float, float], bands: Sequence[Sequence[float]]) -> bool:
    """Whether no boundary lies in the interval."""
    low, high = interval
    return not any(low < ratio <= high for ratio, _ in bands)


def part_of(interval: tuple[float, float], bands: Sequence[Sequence[float]]) -> float:
    """The part of the points for speed: of the higher band, where the interval lies in two."""
    return next((part for ratio, part in bands if interval[1] >= ratio), 0.0)
