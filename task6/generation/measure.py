"""How fast a generator is: the time to the first token, and between tokens."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from common.timing import Timing
from task6.generation.decoder import Decoder

ROUNDS = 3  # in each of them every side has a prompt and the tokens after it


class Generator(Protocol):
    """What generates a token after the other: the decoder, and what it is compared with."""

    def prefill(self, prompt: Tensor) -> Tensor:
        """Begin anew with ``(batch, seq)``; the first new tokens, int64 ``(batch, 1)``."""

    def step(self) -> Tensor:
        """The next tokens, int64 ``(batch, 1)``."""


@dataclass(frozen=True)
class Speed:
    """What was measured, for the whole batch: the time to the first token, and between tokens."""

    first: Timing
    between: Timing
    p99_ms: float  # of the time between tokens

    @classmethod
    def of(cls, first: list[float], between: list[float]) -> "Speed":
        """From single times in milliseconds."""
        times = torch.tensor(between, dtype=torch.float64)
        return cls(Timing.of(first), Timing.of(between), torch.quantile(times, 0.99).item())


def generate(side: Generator, prompt: Tensor, new_tokens: int) -> Tensor:
    """The new tokens, int64 ``(batch, new_tokens)``."""
    tokens = [side.prefill(prompt).clone()]  # a step may overwrite what the one before returned
    tokens += [side.step().clone() for _ in range(new_tokens - 1)]
    return torch.cat(tokens, dim=1)


def same_tokens(ours: Tensor, theirs: Tensor) -> int:
    """How many tokens of all sequences are equal, of ``(batch, new_tokens)``, before one differs."""
    return int((ours == theirs).all(0).int().cumprod(0).sum())


def turns(names: Iterable[str], rounds: int) -> Iterator[str]:
    """Each name once per round; every second round begins with the last."""
    order = list(names)
    for turn in range(rounds):
        yield from order if turn % 2 == 0 else reversed(order)


def measure(
    sides: Mapping[str, Generator], prompt: Tensor, new_tokens: int, *, rounds: int = ROUNDS
) -> dict[str, Speed]:
    """Time each side on the same prompt, interleaved. Each must have generated before: what it compiles is not timed.

    The time to the first token is what a user waits for, by the wall clock. Between tokens it is the time between CUDA
    events behind each step: the host's work counts where the GPU waits for it.

    Args:
        sides: by name.
        prompt: token ids, int64 ``(batch, seq)``.
        new_tokens: how many, at least 2.
        rounds: how often.

    Raises:
        ValueError: fewer new tokens; or as the side's ``prefill``.
    """
    if new_tokens < 2:
        raise ValueError(
            f"two tokens or more have a time between them; got new_tokens {new_tokens}"
        )
    samples = {name: ([], []) for name in sides}
    for name in turns(sides, rounds):
        first, between = samples[name]
        first.append(timed(lambda side=sides[name]: side.prefill(prompt), prompt.is_cuda))
        between += _steps(sides[name], new_tokens - 1, prompt.is_cuda)
    return {name: Speed.of(*times) for name, times in samples.items()}


def step_bytes(decoder: Decoder, length: float) -> float:
    """What a step has to read: the weights once, but of the embedding only some rows, and the keys and values."""
    c, w = decoder.config, decoder.weights
    every = [w.norm, w.lm_head, *(t for layer in w.layers for t in vars(layer).values())]
    read = sum(t.numel() for t in every) + c.cache(decoder.batch, 1) * length
    return read * w.embedding.element_size()


def _steps(side: Generator, number: int, cuda: bool) -> list[float]:
    """Milliseconds of each."""
    if not cuda:
        return [timed(side.step, cuda) for _ in range(number)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(number + 1)]
    events[0].record()
    for event in events[1:]:
        side.step()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in zip(events[:-1], events[1:], strict=True)]


def timed(run: Callable[[], object], cuda: bool) -> float:
    """Milliseconds by the wall clock, until a GPU is done."""
    if cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    if cuda:
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin)
