"""The C++ attentions of task4/frontends on this machine's cores: times, ceilings, and the compiler's vectors."""

import math
import random
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from common.build import Kernels, toolchain
from common.memory import free_memory
from common.record.grid import Grid
from common.report.host.compiler import loops
from common.report.roof import Roof
from common.report.shapes import BYTES, FUSED, HEAD_DIM, HEADS, PRODUCT, SCORES, SOFTMAX, together
from task4.frontends.benchmark import time_on_cpu
from task4.frontends.frontends import FOLDER

_probe = Kernels(__file__, "probe.cpp")
_steps = Kernels(__file__, "steps.cpp")
_CPU = torch.device("cpu")

SOURCES = ("task4/frontends/*.cpp", "task4/frontends/*.h")
FILES = (FOLDER / "naive.cpp", FOLDER / "host.cpp")
PYTORCH = "PyTorch"
ROUNDS = 5
TRIES = 15  # of a ceiling, of which the fastest counts
READ = 1 << 30  # bytes of memory to read, at least
MULTIPLY_ADDS = 10_000_000  # of each sum

# naive.cpp scales each score when it stores it.
_SCORES = replace(SCORES, name="naive.cpp: scores", flops=SCORES.flops | {"HSS": 1})
_SOFTMAX = replace(SOFTMAX, name="naive.cpp: softmax")
_PRODUCT = replace(PRODUCT, name="naive.cpp: product")
NAIVE = together("naive.cpp: all three", (_SCORES, _SOFTMAX, _PRODUCT))
HOST = replace(FUSED, name="host.cpp: fused")
WORKS = (_SCORES, _SOFTMAX, _PRODUCT, NAIVE, HOST)


def seconds(seq: int, rng: random.Random) -> dict[str, float]:
    """The median time of each of ``WORKS`` and of PyTorch's attention, by name."""
    found = time_on_cpu(seq, False, rng)
    names = {PYTORCH: PYTORCH, "host.cpp": HOST.name, "naive.cpp": NAIVE.name}
    return {names[name]: times.seconds for name, times in found.items()} | _step_seconds(seq)


def _step_seconds(seq: int) -> dict[str, float]:
    """The three steps of naive.cpp one by one, interleaved."""
    q, k, v, out = (torch.randn(1, seq, HEADS, HEAD_DIM) for _ in range(4))
    scores_of = torch.empty(1, HEADS, seq, seq)
    scale = 1 / math.sqrt(HEAD_DIM)
    steps: dict[str, Callable[[], int]] = {
        _SCORES.name: lambda: _steps.query(
            "step_scores", _CPU, q=q, k=k, scores_of=scores_of, scale=scale
        ),
        _SOFTMAX.name: lambda: _steps.query("step_softmax", _CPU, scores_of=scores_of),
        _PRODUCT.name: lambda: _steps.query(
            "step_product", _CPU, scores_of=scores_of, v=v, out=out
        ),
    }
    times = [{name: _timed(step)[1] for name, step in steps.items()} for _ in range(ROUNDS + 1)]
    return {name: statistics.median(t[name] for t in times[1:]) for name in steps}


def ceilings() -> Roof:
    """What all threads of PyTorch's number reach together: the best of a few runs of each."""
    threads = torch.get_num_threads()
    sums = torch.empty(threads)
    memory = min(max(READ, 4 * _last_cache()), free_memory("cpu")[0] // 4)
    small = HEADS * 128 * HEAD_DIM * BYTES * 4  # q, k, v and out at S 128

    def reads(size: int, total: int) -> float:
        data = torch.ones(size // BYTES)
        times = max(1, total // size)
        return _best(
            lambda: times * BYTES * _probe.query(
                "read_memory", _CPU, data=data, n=data.numel(), times=times, threads=threads, sums=sums
            )
        )  # fmt: skip

    flops = _best(
        lambda: threads * MULTIPLY_ADDS * _probe.query(
            "multiply_add", _CPU, a=0.5, b=1.0, times=MULTIPLY_ADDS, threads=threads, sums=sums
        )
    )  # fmt: skip
    how = f"a read of {memory / 2**30:.1f} GiB; fused multiply-adds in registers; {threads} threads"
    return Roof(flops, reads(memory, memory), how, cache=reads(small, READ))


def notes(roof: Roof) -> list[str]:
    """What a reader has to know of the table."""
    return [
        "Times are medians of interleaved calls. naive.cpp runs on one thread, host.cpp and the ceilings on"
        f" {torch.get_num_threads()}. At S 128 all tensors fit in a core's cache: there the limit is not memory's"
        f" {roof.bandwidth / 1e9:,.0f} GB/s but the {roof.cache / 1e9:,.0f} GB/s of reading 1 MiB again and again, and"
        " a share of the roof can exceed 100%."
    ]


def vectors() -> list[Grid | str]:
    """The loops of each file, and what the compiler made of them.

    Raises:
        BuildError: it refuses a file.
    """
    columns = ["loop", "source", "vectors"]
    return [
        *(
            Grid(
                f"{file.name}: which loops {toolchain.cpp_compiler()} turned into vector instructions:",
                columns,
                [[loop.place, _code(loop.source), loop.verdict] for loop in loops(file)],
            )
            for file in FILES
        ),
        "host.cpp names its vectors itself (the type `Vector`), so nothing is left to do in its inner loops. A loop may"
        " be compiled several times: inlined in several places, or for rows that are contiguous and rows that are not.",
    ]


def _code(text: str) -> str:
    """For a cell of a Markdown table."""
    return f"`{text}`".replace("|", "\\|")


def _best(work: Callable[[], int]) -> float:
    """Units per second of the fastest of some calls, which return how many they did."""
    work()
    return max(units / took for units, took in (_timed(work) for _ in range(TRIES)))


def _timed(work: Callable[[], int]) -> tuple[int, float]:
    began = time.perf_counter()
    units = work()
    return units, time.perf_counter() - began


def _last_cache() -> int:
    """Bytes of the largest cache; 0 where the system does not say."""
    files = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    found = (re.match(r"(\d+)K", file.read_text()) for file in files)
    return max((int(size[1]) << 10 for size in found if size), default=0)
