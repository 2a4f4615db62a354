"""Timing operations against each other on a GPU."""

import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

_MAX_RUNS = 500
_MIN_RUNS = 5
_MAX_HEAD_START_MS = 10.0
KEPT = 51  # samples of a timing at most: every 2 %, so that 10, 50 and 90 % are among them


@dataclass(frozen=True)
class Timing:
    """The times of one operation in milliseconds: median, 10th and 90th percentile, and how many runs.

    ``samples_ms`` are the times of the single runs in rising order, to six digits; of more than ``KEPT`` runs these are
    the quantiles 0, 2, ..., 100 %. The median and the percentiles follow from them.
    """

    median_ms: float
    p10_ms: float
    p90_ms: float
    n: int
    samples_ms: tuple[float, ...] = ()

    @classmethod
    def of(cls, samples_ms: Sequence[float]) -> "Timing":
        """From the times of single runs."""
        times = torch.tensor(samples_ms, dtype=torch.float64)
        p10, median, p90 = torch.quantile(times, torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64))
        steps = torch.linspace(0, 1, min(len(samples_ms), KEPT), dtype=torch.float64)
        kept = tuple(_six_digits(time) for time in torch.quantile(times, steps).tolist())
        return cls(median.item(), p10.item(), p90.item(), len(samples_ms), kept)

    def per(self, parts: int) -> "Timing":
        """The time of one of ``parts`` equal steps: a token of a loop over 100."""
        kept = tuple(_six_digits(time / parts) for time in self.samples_ms)
        return Timing(
            self.median_ms / parts, self.p10_ms / parts, self.p90_ms / parts, self.n, kept
        )

    def as_record(self) -> dict[str, Any]:
        return asdict(self) | {"samples_ms": list(self.samples_ms)}


def _six_digits(time: float) -> float:
    return float(f"{time:.6g}")


def measure(
    functions: Mapping[str, Callable[[], Any]],
    *,
    seconds: float = 2.0,
    each: float | None = None,
    check: Callable[[dict[str, Any]], None] | None = None,
    include_host: bool = False,
) -> dict[str, Timing]:
    """Time several functions against each other on the current GPU.

    Each call is timed by two CUDA events of its own. The functions are interleaved, so that clocks and temperature
    are the same for all. The L2 cache is flushed before each call, outside of the events.

    Args:
        functions: what to time, by name; each launches its work on the current stream and returns its output.
        seconds: how long the whole measurement may take, without the warm-up; each function runs at least five times.
        each: a limit for each function instead, where some are much slower than others: a function that has used its
            seconds is not run again. Each runs at least twice.
        check: receives the last outputs by name and raises if one is wrong; no times are returned then.
        include_host: time what a user waits for, the calls from Python included (a generation loop). Without
            it the GPU is kept busy until the host has queued the work, so that the work alone is timed.

    Returns:
        The times of each function, by name.

    Raises:
        RuntimeError: no GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("timing needs a GPU")
    head_start = {name: _warm_up(function) for name, function in functions.items()}
    turns = Turns()
    samples: dict[str, list[float]] = {name: [] for name in functions}
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
            outputs.pop(name, None)  # free its memory before the next output is allocated
            ahead = None if include_host else head_start[name]
            outputs[name], milliseconds = turns.take(functions[name], ahead)
            samples[name].append(milliseconds)
            spent[name] += time.perf_counter() - began
        runs += 1
    if check is not None:
        check(outputs)
    return {name: Timing.of(times) for name, times in samples.items()}


class Turns:
    """Times single calls on the current GPU, by two CUDA events, with a flushed L2 cache."""

    def __init__(self) -> None:
        self._flush = _Flush()

    def take(
        self, function: Callable[[], Any], head_start_ms: float | None = 0.5
    ) -> tuple[Any, float]:
        """The output of a call, and its milliseconds.

        ``head_start_ms``: for how long the GPU is kept busy while the host queues the work; None: the host's time
        counts too.
        """
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush()
        if head_start_ms is None:
            torch.cuda.synchronize()
        else:
            _sleep(head_start_ms)
        start.record()
        out = function()
        end.record()
        torch.cuda.synchronize()  # this call is complete before the next one starts
        return out, start.elapsed_time(end)


def all_alike(outputs: Mapping[str, Tensor]) -> None:
    """A check for :func:`measure`: AssertionError unless all outputs equal the first one, roughly.

    It finds gross mistakes of the measurement; the checks decide what is precise enough. In bfloat16 two correct
    results may be rounded to neighbours, which differ by more than 1e-3.
    """
    ours, *others = outputs.values()
    rtol = max(1e-3, torch.finfo(ours.dtype).eps)
    for other in others:
        torch.testing.assert_close(ours, other, rtol=rtol, atol=1e-3)


def _warm_up(function: Callable[[], Any]) -> float:
    """Build, autotune and fill the allocator; returns the milliseconds that the host needs to queue one call."""
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
    """Flushes the L2 cache: twice its size is written, which evicts the inputs, then read, which evicts the written
    lines: otherwise the timed kernel would pay for writing them back.
    """

    def __init__(self) -> None:
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        size = getattr(device, "L2_cache_size", 0) or 128 << 20
        self._buffer = torch.empty(2 * size // 4, dtype=torch.float32, device="cuda")
        self._sum = torch.empty((), dtype=torch.float32, device="cuda")

    def __call__(self) -> None:
        self._buffer.zero_()
        torch.sum(self._buffer, dim=0, out=self._sum)


def microseconds(call: Callable[[], object], number: int = 300) -> float:
    """What one call costs the host: the fastest of several samples of ``number`` calls.

    Before each sample the GPU's queue is emptied, so that no call waits for room in it.
    """
    empty_queue = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    call()
    return min(timeit.repeat(call, empty_queue, number=number, repeat=9)) / number * 1e6
