"""A text as it comes: the tokens of each step, the characters in them, how fast they are, and how they are shown."""

import queue
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext

import torch
from rich.console import Console, ConsoleOptions
from rich.live import Live
from rich.text import Text
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import BaseStreamer, GenerationMode

from common.dtypes import dtype_name


def expect_steps(config: GenerationConfig) -> None:
    """ValueError unless a step chooses one token of each sequence: beam search, for example, does not."""
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(
            "one token per step is expected, from greedy decoding or sampling; the model's generation_config.json asks "
            f"for {mode.value.replace('_', ' ')}"
        )


class NotFinite(ValueError):
    """Logits that are NaN or infinite: no token can be chosen from them."""


def expect_finite(logits: Tensor, dtype: torch.dtype, of: str = "the model") -> None:
    """NotFinite for logits that are; ``dtype`` is that of the activations from which they come. Waits for a GPU."""
    if not logits.isfinite().all():
        raise NotFinite(
            f"the logits of {of} must be finite; got NaN or infinity in {dtype_name(dtype)}, whose largest number is "
            f"{torch.finfo(dtype).max:g}"
        )


def steps_of(generate: Callable[[BaseStreamer], object]) -> Generator[Tensor]:
    """The new tokens of each step, int64 (prompts,) on the CPU.

    ``generate`` runs in a thread and calls transformers' ``generate`` with the streamer that it gets. Its exceptions
    are raised here. Closing the generator ends the thread after the step that it is at, and waits for that.
    """
    streamer = _Steps()
    with ThreadPoolExecutor(1, thread_name_prefix="generate") as pool:  # waits for the thread
        try:
            done = pool.submit(generate, streamer)
            done.add_done_callback(lambda _: streamer.queue.put(None))
            while (tokens := streamer.queue.get()) is not None:
                yield tokens
        finally:
            streamer.stopped = True
        done.result()  # raises what the thread raised


class _Steps(BaseStreamer):
    """Puts the tokens of each step into a queue. transformers' own streamers take one sequence only."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[Tensor | None] = queue.SimpleQueue()
        self.stopped = False
        self._is_prompt = True  # the first thing that transformers puts

    def put(self, value: Tensor) -> None:
        if self.stopped:
            raise _Stopped
        if not self._is_prompt:
            self.queue.put(value)
        self._is_prompt = False

    def end(self) -> None:
        pass


class _Stopped(Exception):
    """Leaves transformers' ``generate``; nothing reads its tokens any more."""


def texts_of(
    steps: Generator[Tensor], rows: int, decode: Callable[[list[int]], str]
) -> Generator[list[str]]:
    """The new text of each of ``rows`` sequences after every step; "" while a character has only some of its bytes.

    ``steps`` yields int64 ``(rows,)``; ``decode`` gives the text of tokens, U+FFFD for bytes that are no character.
    """
    held: list[list[int]] = [[] for _ in range(rows)]  # tokens whose text is not out yet

    def text(row: list[int], last: bool = False) -> str:
        decoded = decode(row)
        if decoded.endswith("\N{REPLACEMENT CHARACTER}") and not last:
            return ""
        row.clear()
        return decoded

    with closing(steps):
        for tokens in steps:
            for row, token in zip(held, tokens.tolist(), strict=True):
                row.append(token)
            yield [text(row) for row in held]
    if any(held):
        yield [text(row, last=True) for row in held]


class Meter:
    """Counts the tokens of the steps that it watches, and their time.

    Attributes:
        tokens: of all sequences, with the end token and without the padding after it.
        steps: forward passes.
        first, seconds: from the start to the first token, and to the last.
    """

    def __init__(self, end: int | list[int] | None) -> None:
        self._end = torch.tensor([] if end is None else end).view(-1)
        self.tokens = self.steps = 0
        self.first = self.seconds = 0.0

    def watch(self, steps: Generator[Tensor]) -> Generator[Tensor]:
        """``steps``, unchanged: int64 ``(rows,)`` on the CPU. The device has finished a step when the clock is read."""
        began = time.perf_counter()
        over: Tensor | None = None
        with closing(steps):
            for tokens in steps:
                self.seconds = time.perf_counter() - began
                self.first = self.first or self.seconds
                self.steps += 1
                over = torch.zeros_like(tokens, dtype=torch.bool) if over is None else over
                self.tokens += int((~over).sum())
                over = over | torch.isin(tokens, self._end)
                yield tokens

    def __str__(self) -> str:
        rate = self.tokens / self.seconds
        line = f"{self.tokens} tokens in {self.seconds:.2f} s, {rate:.1f} tokens/s; "
        line += f"the first after {1000 * self.first:.1f} ms"
        if self.steps > 1:
            per_step = (self.seconds - self.first) / (self.steps - 1)
            line += f", then {1000 * per_step:.2f} ms per step"
        return line


def print_texts(prompts: Sequence[str], pieces: Generator[list[str]]) -> None:
    """Print prompts and their new text.

    The text of one prompt is printed as it comes. Several have a block each: on a terminal all blocks grow together,
    as far as they fit, elsewhere they are printed when they are complete.
    """
    with closing(pieces):
        if len(prompts) == 1:
            print(f"\n{prompts[0]}", end="", flush=True)
            for (piece,) in pieces:
                print(piece, end="", flush=True)
            print("\n")
            return
        blocks, console = _Blocks(prompts), Console()
        with Live(blocks, console=console) if console.is_terminal else nullcontext() as live:
            try:
                for new in pieces:
                    blocks.add(new)
            finally:
                blocks.growing = False
        if not live:
            for prompt, text in zip(prompts, blocks.texts, strict=True):
                print(f"\n{prompt}{text}")
        print()


class _Blocks:
    """Prompts and their new texts: while they grow, the last rows of each, so that all fit on the screen."""

    def __init__(self, prompts: Sequence[str]) -> None:
        self.prompts, self.texts = prompts, [""] * len(prompts)
        self.growing = True

    def add(self, pieces: Sequence[str]) -> None:
        self.texts = [text + piece for text, piece in zip(self.texts, pieces, strict=True)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Called by rich."""
        most = max(1, console.height // len(self.prompts) - 1)  # and an empty row above them
        for prompt, text in zip(self.prompts, self.texts, strict=True):
            rows = Text.assemble((prompt, "bold"), text).wrap(console, options.max_width)
            yield Text()
            yield from rows[-most:] if self.growing else rows
