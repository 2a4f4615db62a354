"""How long something takes on the GPU, and what the GPU could do at best."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from common.memory import free_memory

_MAX_RUNS = 500
_MIN_RUNS = 5
_MAX_HEAD_START_MS = 10.0


@dataclass(frozen=True)
class Timing:
    """Times of one operation in milliseconds: median, the spread around it, how many."""

    median_ms: float
    p10_ms: float
    p90_ms: float
    n: int

    @classmethod
    def of(cls, samples_ms: Sequence[float]) -> "Timing":
        """From the single times."""
        times = torch.tensor(samples_ms, dtype=torch.float64)
        p10, median, p90 = torch.quantile(times, torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64))
        return cls(median.item(), p10.item(), p90.item(), len(samples_ms))

    def per(self, parts: int) -> "Timing":
        """The time of one of ``parts`` equal steps: a token of a loop over 100."""
        return Timing(self.median_ms / parts, self.p10_ms / parts, self.p90_ms / parts, self.n)

    def as_record(self) -> dict[str, float | int]:
        return {
            "median_ms": self.median_ms,
            "p10_ms": self.p10_ms,
            "p90_ms": self.p90_ms,
            "n": self.n,
        }


def measure(
    functions: Mapping[str, Callable[[], Any]],
    *,
    seconds: float = 2.0,
    each: float | None = None,
    check: Callable[[dict[str, Any]], None] | None = None,
    include_host: bool = False,
) -> dict[str, Timing]:
    """Time several functions against each other on the current GPU.

    Each call stands between two CUDA events of its own. The functions take turns, so that clocks and heat
    are the same for all. Before each call the L2 cache is emptied, outside of the events.

    Args:
        functions: what to time, by name; each launches its work on the current stream and returns its output.
        seconds: how long the whole measurement may take, warm-up apart; at least five runs each are taken.
        each: how long one function may take, instead, where some are very much slower than others: one that has had
            its time sits out the rest. At least two runs each are taken.
        check: gets the last outputs by name and raises if one is wrong; no times are returned then.
        include_host: time what a user waits for, the calls from Python included (a generation loop). Without
            it the GPU is kept busy until the host has queued the work, so that the work alone is timed.

    Raises:
        RuntimeError: no GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("timing needs a GPU")
    head_start = {name: _warm_up(function) for name, function in functions.items()}
    flush = _Flush()
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {
        name: [] for name in functions
    }
    outputs: dict[str, Any] = {}
    names = list(functions)
    spent = dict.fromkeys(names, 0.0)
    until = time.perf_counter() + seconds
    runs = 0
    while runs < _MIN_RUNS or (runs < _MAX_RUNS and (each or time.perf_counter() < until)):
        if each is not None:
            names = [name for name in names if runs < 2 or spent[name] < each]
            if not names:
                break
        for name in names if runs % 2 == 0 else reversed(names):
            began = time.perf_counter()
            outputs.pop(name, None)  # its memory is free again before the next output is made
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush()
            if include_host:
                torch.cuda.synchronize()
            else:
                _sleep(head_start[name])
            start.record()
            outputs[name] = functions[name]()
            end.record()
            torch.cuda.synchronize()  # nothing of this call is left when the next one starts
            events[name].append((start, end))
            spent[name] += time.perf_counter() - began
        runs += 1
    if check is not None:
        check(outputs)
    return {
        name: Timing.of([start.elapsed_time(end) for start, end in pairs])
        for name, pairs in events.items()
    }


def _warm_up(function: Callable[[], Any]) -> float:
    """Build, autotune and fill the allocator; returns how long the host needs to queue one call, in ms."""
    function()
    torch.cuda.synchronize()
    until = time.perf_counter() + 0.1
    queueing = []
    for _ in range(10):
        start = time.perf_counter()
        function()
        queueing.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        if time.perf_counter() > until:
            break
    return min(_MAX_HEAD_START_MS, 1.5e3 * sorted(queueing)[len(queueing) // 2] + 0.05)


def _sleep(milliseconds: float) -> None:
    """Keep the GPU busy without touching memory."""
    torch.cuda._sleep(int(milliseconds * _cycles_per_ms()))


@cache
def _cycles_per_ms() -> float:
    cycles = 10_000_000
    torch.cuda._sleep(cycles)  # the first call loads the kernel
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return cycles / start.elapsed_time(end)


class _Flush:
    """Empties the L2 cache: twice its size is written, which drives out the inputs, then read, which drives
    out the written lines in turn. Otherwise the timed kernel would pay for writing them back.
    """

    def __init__(self) -> None:
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        size = getattr(device, "L2_cache_size", 0) or 128 << 20
        self._buffer = torch.empty(2 * size // 4, dtype=torch.float32, device="cuda")
        self._sum = torch.empty((), dtype=torch.float32, device="cuda")

    def __call__(self) -> None:
        self._buffer.zero_()
        torch.sum(self._buffer, dim=0, out=self._sum)


# What the chip can do
# -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ceilings:
    """The best that PyTorch reaches on this GPU: a pure read, and matrix products of 8192 cubed."""

    read_gb_per_s: float
    fp32_tflops: float
    bf16_tflops: float

    def tflops(self, dtype: torch.dtype) -> float:
        """The one for inputs of this dtype; float16 shares bfloat16's."""
        return self.fp32_tflops if dtype in (torch.float32, torch.float64) else self.bf16_tflops


@cache
def ceilings() -> Ceilings:
    """Measured once a process, about two seconds."""
    free, _ = free_memory("cuda")
    read_gb_per_s = _read_gb_per_s(min(2 << 30, free // 4))  # 2 GiB where there is room
    n = 8192 if free > 2 << 30 else 4096
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # fp32 means fp32 here, not TF32
    try:
        tflops = {dtype: _matmul_tflops(n, dtype) for dtype in (torch.float32, torch.bfloat16)}
    finally:
        torch.set_float32_matmul_precision(precision)
    return Ceilings(read_gb_per_s, tflops[torch.float32], tflops[torch.bfloat16])


def _read_gb_per_s(size: int) -> float:
    x = torch.ones(size // 4, dtype=torch.float32, device="cuda")
    timing = measure({"read": lambda: x.sum()}, seconds=0.3)["read"]
    return x.numel() * 4 / timing.median_ms / 1e6


def _matmul_tflops(n: int, dtype: torch.dtype) -> float:
    a: Tensor = torch.randn(n, n, device="cuda").to(dtype)
    b: Tensor = torch.randn(n, n, device="cuda").to(dtype)
    timing = measure({"matmul": lambda: a @ b}, seconds=0.5)["matmul"]
    return 2 * n**3 / timing.median_ms / 1e9
