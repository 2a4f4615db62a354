"""The kernels of tasks 2, 4 and 5 as calls: whether they are written, their times, and what ncu counts in them.

``python -m common.report.gpu LABEL ...`` is what ncu starts.
"""

import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from common.check import CheckFailed, Watch, poisoned
from common.paths import ROOT
from common.report.roof import Roof
from common.report.shapes import (
    DECODE,
    FUSED,
    HEAD_DIM,
    HEADS,
    LENGTHS,
    NAIVE,
    PRODUCT,
    SCORES,
    SOFTMAX,
)
from common.timing import counters, measure, reference
from common.timing.counters import Subject, resources, run_counted
from task2.attention import (
    custom_attention,
    test_batched_GEMM_NN,
    test_batched_GEMM_NT,
    test_batched_softmax,
)
from task4.attention import flash_attention
from task5.attention import choose_num_splits, flash_attention_decode, sm_count

KERNELS = {
    work.name: ROOT / f"task{task}/attention_kernel.cu"
    for task, works in {2: (SCORES, SOFTMAX, PRODUCT, NAIVE), 4: (FUSED,), 5: (DECODE,)}.items()
    for work in works
}
SECONDS = 2.0  # of measuring, for a sequence length
SMALL = 40  # keys, to see whether a kernel works
PYTORCH, PYTORCH_DECODE = "PyTorch", "PyTorch, one query"
LIGHT = {  # what Nsight Compute's Speed of Light calls it, and its counter, in per cent of the peak
    "Memory Throughput": r"gpu__compute_memory(_access)?_throughput\.avg\.pct_of_peak_sustained_elapsed",
    "DRAM Throughput": counters.UNITS["DRAM"],
    "Compute (SM) Throughput": r"sm__throughput\.avg\.pct_of_peak_sustained_elapsed",
}


@dataclass(frozen=True)
class Call:
    """A kernel with its inputs, and PyTorch's operation with the same result."""

    ours: Callable[[], Tensor]
    pytorch: Callable[[], Tensor]


def calls(seq: int, device: torch.device) -> dict[str, Call]:
    """By the names of ``KERNELS``, on random float32 inputs: batch 1, 8 heads, head_dim 64."""
    q, k, v = (torch.randn(1, seq, HEADS, HEAD_DIM, device=device) for _ in range(3))
    # (batch, heads, seq, head_dim), and (heads, seq, head_dim) for the launchers of a single step: views
    heads = [t.transpose(1, 2) for t in (q, k, v)]
    q_h, k_h, v_h = (t[0] for t in heads)
    scores = q_h @ k_h.mT
    weights = scores.softmax(-1)
    hidden = [t.flatten(2) for t in (q, k, v)]
    last = q[:, -1:]

    def attention(query: Tensor) -> Tensor:
        """(batch, q_len, heads, head_dim)"""
        return scaled_dot_product_attention(query.transpose(1, 2), *heads[1:]).transpose(1, 2)

    return {
        SCORES.name: Call(lambda: test_batched_GEMM_NT(q_h, k_h), lambda: q_h @ k_h.mT),
        SOFTMAX.name: Call(lambda: test_batched_softmax(scores), lambda: scores.softmax(-1)),
        PRODUCT.name: Call(lambda: test_batched_GEMM_NN(weights, v_h), lambda: weights @ v_h),
        NAIVE.name: Call(lambda: custom_attention(*hidden, HEADS), lambda: attention(q).flatten(2)),
        FUSED.name: Call(lambda: flash_attention(q, k, v), lambda: attention(q)),
        DECODE.name: Call(lambda: flash_attention_decode(last, k, v), lambda: attention(last)),
    }


def splits(seq: int, device: torch.device) -> int:
    """How many blocks share the keys of a head in a decode step there."""
    return choose_num_splits(HEADS, seq, sm_count(device))


def problems(device: torch.device) -> dict[str, str]:
    """Why kernels cannot be measured, by name: not written, a wrong result, or the error's first line."""
    found = {name: _problem(name, call) for name, call in calls(SMALL, device).items()}
    return {name: problem for name, problem in found.items() if problem}


def _problem(name: str, call: Call) -> str:
    try:
        with poisoned(), Watch() as did:
            got = call.ours()
        did.expect_written()
        torch.testing.assert_close(got, call.pytorch(), rtol=1e-3, atol=1e-3)
    except (CheckFailed, NotImplementedError):
        return "not written"
    except AssertionError:
        return f"wrong result: see python -m {KERNELS[name].parent.name}.test"
    except Exception as error:  # whatever a student's code or a compiler says
        return str(error).strip().partition("\n")[0] or type(error).__name__
    return ""


def ceilings() -> Roof:
    """What PyTorch reaches on the current GPU."""
    found = reference()
    how = "PyTorch's sum of a large tensor; its large matrix product in float32"
    return Roof(found.fp32_tflops * 1e12, found.read_gb_per_s * 1e9, how)


def seconds(seq: int, device: torch.device, names: Collection[str]) -> dict[str, float]:
    """The median time of a call of each of these, and of PyTorch's attention for all queries and for one."""
    ready = calls(seq, device)
    functions = {name: ready[name].ours for name in names}
    functions |= {PYTORCH: ready[FUSED.name].pytorch, PYTORCH_DECODE: ready[DECODE.name].pytorch}
    timings = measure(functions, seconds=SECONDS)
    return {name: timing.median_ms / 1e3 for name, timing in timings.items()}


# What ncu counts ------------------------------------------------------------------------------------------


def speed_of_light(names: Collection[str]) -> list[list[str]]:
    """Rows for the kernels that these launch: ``name, S 128``, the kernel, and ``LIGHT`` in per cent.

    Raises:
        NoCounters: ncu cannot count here; the text says why.
    """
    launched, _ = resources(_subjects(names))
    labels = dict.fromkeys(row[0] for row in launched)
    command = [sys.executable, "-m", "common.report.gpu", *labels]
    counted = counters.counted(command, len(launched), "run this again on an idle machine")
    return [[*kernel[:2], *_light(row)] for kernel, row in zip(launched, counted, strict=True)]


def _light(row: Mapping[str, float]) -> list[str]:
    found = ([v for name, v in row.items() if re.fullmatch(p, name)] for p in LIGHT.values())
    return [f"{max(values):.0f} %" if values else "-" for values in found]


def _subjects(names: Collection[str]) -> list[Subject]:
    """Each kernel once: those that task 2's attention launches are there one by one."""
    return [
        Subject(f"{name}, S {seq:,}", partial(_prepared, name, seq), KERNELS[name])
        for name in names
        if name != NAIVE.name
        for seq in LENGTHS
    ]


def _prepared(name: str, seq: int) -> Callable[[], Tensor]:
    return calls(seq, torch.device("cuda", torch.cuda.current_device()))[name].ours


def main(labels: Sequence[str]) -> None:
    """What ncu starts: one call of each of these."""
    run_counted(_subjects(KERNELS), labels)


if __name__ == "__main__":
    main(sys.argv[1:])
