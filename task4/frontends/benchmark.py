"""Times of front ends beside PyTorch's own attention: on the CPU in turns, on a GPU as common.timing takes them."""

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from common import child
from common.paths import ROOT
from common.timing.compare import Measured, compare_times
from common.timing.peers import CUDNN, EFFICIENT, Peer
from task4.frontends import cpp
from task4.frontends.frontends import OURS, FrontEnd
from task4.ladder import ladder_attention
from task4.ladder.benchmark import EACH, Cell, Precision

SEQS = (128, 512, 1024, 4096)
HEADS, HEAD_DIM = 8, 64
SECONDS = 4.0  # for a length and a mask
ROUNDS = (5, 400)  # at least and at most
LONGEST_NAIVE = 1024  # keys; more take minutes
LADDER = "ladder's best"
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
    times = in_turns(candidates, (q, k, v), causal, rng, SECONDS)
    if seq <= LONGEST_NAIVE:
        candidates = {"PyTorch": pytorch, "naive.cpp": cpp.naive_attention}
        times["naive.cpp"] = in_turns(candidates, (q, k, v), causal, rng, 0)["naive.cpp"]
    return times


def in_turns(
    candidates: Mapping[str, Attention],
    inputs: Sequence[Tensor],
    causal: bool,
    rng: random.Random,
    seconds: float,
) -> dict[str, Times]:
    """Time these beside the one named PyTorch, each once per round in a random order.

    Args:
        candidates: ``f(q, k, v, causal=...)`` by name.
        inputs: q, k and v.
        causal: passed on.
        rng: of the orders.
        seconds: after which no other round begins; there are at least ``ROUNDS[0]`` and at most ``ROUNDS[1]``.
    """
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


def library_for(precision: Precision) -> Peer:
    """PyTorch's kernel that front ends are compared with on a GPU: cuDNN's, which has no float32."""
    return EFFICIENT if precision.name == "float32" else CUDNN


def time_on_gpu(front_ends: Sequence[FrontEnd], cell: Cell, precision: Precision) -> Measured:
    """The front ends, task 4's kernel, the ladder's best and a library's, on the current GPU."""
    methods = {f.name: f.attention for f in (*front_ends, OURS)} | {LADDER: ladder_attention}
    library = library_for(precision)
    qkv = cell.inputs(precision)
    return compare_times(
        {
            name: partial(attend, *qkv, causal=cell.causal)
            for name, attend in (methods | {library.label: library.attention}).items()
        },
        references=[library.label],
        tolerance=8 * precision.eps,
        each=EACH,
    )


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
