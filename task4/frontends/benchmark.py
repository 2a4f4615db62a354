"""Times of front ends beside PyTorch's own attention, in turns."""

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from common import child
from common.paths import ROOT
from task4.frontends import cpp
from task4.frontends.frontends import FrontEnd

SEQS = (128, 512, 1024, 4096)
HEADS, HEAD_DIM = 8, 64
SECONDS = 4.0  # for a length and a mask
ROUNDS = (5, 400)  # at least and at most
LONGEST_NAIVE = 1024  # keys; more take minutes
FIRST_SECONDS = 600.0

Attention = Callable[..., Tensor]


@dataclass(frozen=True)
class Times:
    """Of one attention.

    Attributes:
        seconds: the median of its calls.
        ratio: the median, over the rounds, of PyTorch's time by this one's.
        n: rounds.
    """

    seconds: float
    ratio: float
    n: int


def pytorch(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """``F.scaled_dot_product_attention`` on ``(batch, seq, heads, head_dim)``, whichever kernel it takes."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def time_on_cpu(seq: int, causal: bool, rng: random.Random) -> dict[str, Times]:
    """PyTorch's, the fused C++ and, where that is short, the naive one: B1, 8 heads, head_dim 64, float32."""
    candidates = {"PyTorch": pytorch, "host.cpp": cpp.flash_attention}
    q, k, v = (torch.randn(1, seq, HEADS, HEAD_DIM) for _ in range(3))
    times = _in_turns(candidates, (q, k, v), causal, rng, SECONDS)
    if seq <= LONGEST_NAIVE:
        candidates = {"PyTorch": pytorch, "naive.cpp": cpp.naive_attention}
        times["naive.cpp"] = _in_turns(candidates, (q, k, v), causal, rng, 0)["naive.cpp"]
    return times


def _in_turns(
    candidates: Mapping[str, Attention],
    inputs: tuple[Tensor, ...],
    causal: bool,
    rng: random.Random,
    seconds: float,
) -> dict[str, Times]:
    for attend in candidates.values():
        attend(*inputs, causal=causal)
    found: dict[str, list[float]] = {name: [] for name in candidates}
    least, most = ROUNDS
    until = time.perf_counter() + seconds
    while (n := len(found["PyTorch"])) < most and (n < least or time.perf_counter() < until):
        for name in rng.sample(sorted(candidates), len(candidates)):
            began = time.perf_counter()
            candidates[name](*inputs, causal=causal)
            found[name].append(time.perf_counter() - began)
    return {
        name: Times(
            statistics.median(times),
            statistics.median(p / t for p, t in zip(found["PyTorch"], times, strict=True)),
            len(times),
        )
        for name, times in found.items()
    }


def first_result(front_end: FrontEnd, device: str) -> float:
    """Seconds from an edit to a first result: a new process imports PyTorch, compiles, and computes one tile.

    Raises:
        RuntimeError: it failed; the text is its last line.
    """
    said: list[str] = []
    with tempfile.TemporaryDirectory(prefix="first-") as folder:
        command = [sys.executable, "-m", "task4.frontends.first", front_end.name, device, folder]
        began = time.perf_counter()
        status = child.run(command, FIRST_SECONDS, said.append, cwd=ROOT)
        seconds = time.perf_counter() - began
    if status != 0:
        raise RuntimeError(said[-1] if said else f"status {status}")
    return seconds
