"""Endurance: thousands of tokens, twice. The tokens are the same, and no memory is held that was not held before."""

import os
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from common.record.grid import Grid
from task6.generation.decoder import Decoder
from task6.generation.measure import generate
from task6.generation.weights import expect_room

GROWTH = 16e6  # bytes of the process, at most; of the GPU's memory none


def run(
    decoder: Decoder, prompt: int, each: int, total: int, seed: int, say: Callable[[str], None]
) -> Grid:
    """Generate ``total`` tokens for each sequence, text after text on the same decoder; then all of them again.

    Args:
        decoder: with room for a prompt and a text's tokens.
        prompt: tokens of each prompt, which are random.
        each: new tokens of a text, at most.
        total: of all texts.
        seed: of the prompts.
        say: receives a line of progress now and then.

    Returns:
        The bars: tokens that differ, and growth of memory from the second text on, if more than two follow.

    Raises:
        ValueError: a text does not fit the decoder's cache.
        NotEnoughMemory: all tokens do not fit in the host's memory; nothing was generated.
    """
    if prompt + each > decoder.max_seq_len:
        raise ValueError(
            f"a prompt of {prompt} and {each} new tokens need as many positions; the cache has {decoder.max_seq_len}"
        )
    expect_room(
        "the tokens of both runs", 2 * decoder.batch * total, torch.int64, torch.device("cpu")
    )
    begin = time.perf_counter()
    kept = torch.full((2, decoder.batch, total), -1)  # filled before memory is looked at
    before: tuple[int, ...] = ()
    texts = 0
    for again in range(2):
        done, tenths = 0, 0
        for tokens in _texts(decoder, prompt, each, total, seed):
            kept[again, :, done : done + tokens.shape[1]] = tokens.cpu()
            done, texts = done + tokens.shape[1], texts + 1
            # In the first text all is compiled and captured, and a capture gives back what PyTorch had kept.
            if texts == 2:
                before = memory(decoder.tokens.device)
            if done * 10 // total > tenths:
                tenths = done * 10 // total
                run_of = f"{done:,} of {total:,} tokens{', again' if again else ''}"
                say(f"{run_of}: {time.perf_counter() - begin:.0f} s")
    after = memory(decoder.tokens.device)
    seconds = time.perf_counter() - begin
    grid = Grid(
        f"{total:,} tokens for each of {decoder.batch} sequences, in {texts // 2} texts, twice, in {seconds:.0f} s",
        ["", "found", "at most"],
    )
    different = int((kept[0] != kept[1]).sum())
    judged: list[tuple[str, float, float]] = [("tokens that differ the second time", different, 0)]
    if texts > 2:  # else none came behind the first look
        growth = [(b - a) / 1e6 for a, b in zip(before, after, strict=True)]
        if decoder.tokens.is_cuda:
            judged.append(("growth of allocated GPU memory, MB", growth[0], 0))
            judged.append(("growth of reserved GPU memory, MB", growth[1], 0))
        judged.append(("growth of the process's memory, MB", growth[2], GROWTH / 1e6))
    for name, value, at_most in judged:
        grid.rows.append([name, grid.judged(value, at_most, at_most=True), f"{at_most:g}"])
    return grid


def memory(device: torch.device) -> tuple[int, int, int]:
    """Bytes allocated and reserved on the GPU, and resident of this process (0 where there is no /proc)."""
    cuda = device.type == "cuda"
    allocated = torch.cuda.memory_allocated(device) if cuda else 0
    reserved = torch.cuda.memory_reserved(device) if cuda else 0
    try:
        with open("/proc/self/statm") as statistics:
            resident = int(statistics.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        resident = 0
    return allocated, reserved, resident


def _texts(decoder: Decoder, prompt: int, each: int, total: int, seed: int) -> Iterator[Tensor]:
    """The new tokens of one text after the other, ``(batch, each)``; the last one may be shorter."""
    torch.manual_seed(seed)
    for done in range(0, total, each):
        shape = (decoder.batch, prompt)
        ids = torch.randint(decoder.config.vocab, shape, device=decoder.tokens.device)
        yield generate(decoder, ids, min(each, total - done))
