"""How fast a decoder is: time to first token, time between tokens, and where a step's time goes."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from task6.generation.decoder import Decoder

PROMPTS = 3  # how often the prompt is timed
PROFILED = 10  # steps


@dataclass(frozen=True)
class Speed:
    """What was measured: milliseconds, for the whole batch."""

    first: list[float]  # time to the first token, of each prompt
    between: list[float]  # time between tokens, of each step
    bytes: float  # a step reads at least: the weights, and the cache of half of the new tokens
    peak: int  # bytes that were allocated at most, or 0 where it is not known
    tokens: Tensor  # int64 (batch, new tokens)

    @property
    def ttft(self) -> float:
        """Median time to the first token."""
        return statistics.median(self.first)

    @property
    def tbt(self) -> float:
        """Median time between tokens."""
        return statistics.median(self.between)

    def percentile(self, percent: int) -> float:
        """Of the time between tokens."""
        ordered = sorted(self.between)
        return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]

    @property
    def gb_per_s(self) -> float:
        """Of weights and cache."""
        return self.bytes / self.tbt / 1e6


def measure(decoder: Decoder, prompt: Tensor, new_tokens: int) -> Speed:
    """Generate from a prompt, and time it: first without a clock, so that all is compiled and captured.

    Args:
        decoder: for ``prompt``'s batch.
        prompt: token ids, int64 ``(batch, seq)``.
        new_tokens: how many, at least 2.

    Raises:
        ValueError: as :meth:`Decoder.generate`.
    """
    if new_tokens < 2:
        raise ValueError(
            f"two tokens or more have a time between them; got new_tokens {new_tokens}"
        )
    tokens = decoder.generate(prompt, new_tokens)
    cuda = prompt.is_cuda
    first = [_timed(lambda: decoder.prefill(prompt), cuda) for _ in range(PROMPTS)]
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(new_tokens)]
        events[0].record()
        for event in events[1:]:
            decoder.step()
            event.record()
        torch.cuda.synchronize()
        between = [a.elapsed_time(b) for a, b in zip(events[:-1], events[1:], strict=True)]
    else:
        between = [_timed(decoder.step, cuda) for _ in range(new_tokens - 1)]
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    return Speed(
        first, between, step_bytes(decoder, prompt.shape[1] + new_tokens / 2), peak, tokens
    )


def step_bytes(decoder: Decoder, length: float) -> float:
    """What a step has to read: the weights once, but of the embedding only some rows, and the keys and values."""
    c, w = decoder.config, decoder.weights
    every = [w.norm, w.lm_head, *(t for layer in w.layers for t in vars(layer).values())]
    read = sum(t.numel() for t in every) + c.cache(decoder.batch, 1) * length
    return read * w.embedding.element_size()


def profile_steps(decoder: Decoder, prompt: Tensor) -> list[tuple[str, float, float]]:
    """Where the time of a step goes: ``(kernel or operator, calls per step, milliseconds per step)``, longest first.

    On a GPU these are kernels, on a CPU PyTorch's operators, each without those that it calls.
    """
    decoder.generate(prompt, 2)
    cuda = prompt.is_cuda
    activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        for _ in range(PROFILED):
            decoder.step()
        if cuda:
            torch.cuda.synchronize()
    rows = []
    for event in profiler.key_averages():
        took = event.self_device_time_total if cuda else event.self_cpu_time_total
        if took > 0:
            rows.append((event.key, event.count / PROFILED, took / PROFILED / 1e3))
    return sorted(rows, key=lambda row: -row[2])


def _timed(run: Callable[[], object], cuda: bool) -> float:
    """Milliseconds, by the wall clock: what a user waits for."""
    if cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    if cuda:
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin)
