"""Times GPT-2 124M with random weights, on one prompt: ``python -m task7.speed``. RESULTS.md has what a GPU reached.

our loop     at most 0.40 ms between tokens, by the faster of its two ways: one launch, or a graph of launches
generate     transformers' own with our attention at least as fast as with PyTorch's SDPA
tokens       of all sides those of transformers' generate with SDPA
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from common.build import BuildError
from common.check.case import device_of
from common.check.rng import seed_of
from common.marked import replace, write_atomically
from common.memory import NotEnoughMemory
from common.record import provenance
from common.record.grid import Grid
from common.record.typed import Tables, read, write
from common.timing import IMPOSSIBLE, ImpossibleRate, Timing, reference
from task6.generation import bars, measure, table
from task6.generation.measure import Speed, same_tokens, timed, turns
from task7.attention import NAME
from task7.decoder import Gpt2Decoder

LOOP, ONE_LAUNCH = "our loop", "our loop, a step in one launch"
GENERATE, SDPA = "generate, our attention", "generate, Hugging Face's SDPA"
ATTENTION = {GENERATE: NAME, SDPA: "sdpa"}
BETWEEN, BY_SDPA = 0.40, 1.0  # ms between the loop's tokens, at most; generate's speed, at least
PROMPT, NEW_TOKENS = 100, 128
SMALL = dict(n_layer=2, n_head=2, n_embd=128, vocab_size=300, n_positions=128)  # for a CPU
ROUNDS = 40  # of generate, in each both sides: the host, which decides, is slower in some seconds than in others
WEIGHTS_STD = 0.04  # twice that of GPT-2's initial ones, whose greedy tokens repeat themselves
FOLDER = Path(__file__).parent
TABLE = FOLDER / "table.json"
STALE = "The kernels or the loop have changed since."
SOURCES = (
    "task4/attention*", "task4/prefill.py", "task4/ladder/*.cu*", "task4/ladder/rungs.py", "task5/attention*",
    "task5/ladder/*.cu*", "task5/ladder/append.py", "task5/ladder/by_length.py",
    "task5/ladder/call.py", "task5/ladder/choice.py", "task5/ladder/chunk.py", "task5/ladder/gpu.py",
    "task5/ladder/kernels.py", "task5/ladder/plan.py", "task5/ladder/trees.py", "task6/generation/*.cu*",
    "task6/generation/graph.py", "task6/generation/persistent.py", "task6/generation/product.py",
    "task7/attention.py", "task7/decoder.py",
)  # fmt: skip

console = Console(
    width=None if sys.stdout.isatty() else 200, highlight=False, emoji=False, markup=False
)


@dataclass
class Found:
    """What was measured.

    Args:
        new_tokens: how many there were.
        floor: milliseconds in which a step's bytes are read, at the rate of a pure read in the same run; None on a CPU.
        loops: our loop, by its way.
        calls: of ``generate``, the whole call's time per new token.
        beside: speed of ``generate`` with our attention relative to SDPA's, the median over the rounds.
        same: how many tokens are those of SDPA, before one differs.
    """

    new_tokens: int
    floor: float | None
    loops: dict[str, Speed]
    calls: dict[str, Timing]
    beside: float
    same: dict[str, int]


@dataclass
class Record:
    """What a run on a GPU found."""

    speed: Tables | None = None


class Loop:
    """A decoder of one prompt as a :class:`task6.generation.measure.Generator`."""

    def __init__(self, decoder: Gpt2Decoder) -> None:
        self._decoder = decoder

    def prefill(self, prompt: Tensor) -> Tensor:
        """The first new token, int64 ``(1, 1)``, of token ids ``(1, seq)``."""
        return self._decoder.prefill(prompt.tolist())[:, None]

    def step(self) -> Tensor:
        """The next one, int64 ``(1, 1)``."""
        return self._decoder.step()[:, None]


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 0 if it ran and, on a GPU, all bars are met."""
    options = _parse(argv)
    cuda = options.device == "cuda"
    try:
        if options.render:
            return _render(read(Record, TABLE))
        found = run(*made(options.seed, device_of(options.device)), NEW_TOKENS if cuda else 8)
    except (ValueError, NotEnoughMemory, BuildError, ImpossibleRate) as error:
        console.print(f"task7.speed: {error}")
        return 1
    except KeyboardInterrupt:
        console.print("\ninterrupted")
        return 130
    times_grid(found).print(console)
    if not cuda:
        console.print("A small model: the bars are for a GPU, and nothing is written.")
        return 0
    judged, origin = bars_grid(found), provenance(SOURCES, device="cuda", seed=options.seed)
    judged.print(console)
    record = Record(Tables(origin, [judged, times_grid(found)]))
    write(TABLE, record)
    _render(record)
    return 0 if all(judged.bars) else 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m task7.speed",
        description="Time GPT-2 124M with random weights, on one prompt in float32: our own loop, and transformers'"
        " generate with our attention and with its own. On a GPU bars are judged, and RESULTS.md is written.",
    )
    add, cuda = parser.add_argument, torch.cuda.is_available()
    # fmt: off
    add("--device", default="cuda" if cuda else "cpu", choices=("cpu", "cuda"),
        help="the CPU has a small model and a few tokens, to see that all of it runs; default: %(default)s")
    add("--seed", type=seed_of, default=0, metavar="N", help="of the weights and the prompt; default: %(default)s")
    add("--render", action="store_true", help="only write RESULTS.md from table.json")
    # fmt: on
    options = parser.parse_args(argv)
    if options.device == "cuda" and not cuda:
        parser.error("--device cuda: PyTorch sees no GPU here")
    return options


def made(seed: int, device: torch.device) -> tuple[GPT2LMHeadModel, Tensor]:
    """A float32 GPT-2 and a prompt, int64 ``(1, seq)``, random and the same on every GPU. No id ends a text."""
    change = SMALL if device.type == "cpu" else {}
    config = GPT2Config(bos_token_id=None, eos_token_id=None, **change)
    model, generator = GPT2LMHeadModel(config).eval(), torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.normal_(std=WEIGHTS_STD, generator=generator)
    ids = torch.randint(config.vocab_size, (1, PROMPT), generator=generator)
    return model.to(device), ids.to(device)


@torch.inference_mode()
def run(model: GPT2LMHeadModel, prompt: Tensor, new_tokens: int) -> Found:
    """Measure all sides on the same weights and the same prompt; on a CPU all but a step in one launch.

    Args:
        model: on the prompt's device.
        prompt: token ids ``(1, seq)``, int64.
        new_tokens: of each text.

    Raises:
        ValueError: a GPU that is not a Hopper, or more tokens than the model has positions.
        ImpossibleRate: a step was faster than its bytes can be read.
        NotEnoughMemory, BuildError: as the sides.
    """
    cuda, length = prompt.is_cuda, model.config.n_positions
    read = step_bytes(model, prompt.shape[1] + new_tokens / 2)
    floor = read / reference().read_gb_per_s / 1e6 if cuda else None

    def generate() -> Tensor:
        options = dict(max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)

    texts = {}
    for side, attention in ATTENTION.items():
        model.set_attn_implementation(attention)
        texts[side] = generate()[:, prompt.shape[1] :]
    ways = {ONE_LAUNCH: True, LOOP: False} if cuda else {LOOP: False}
    loops = {name: Loop(Gpt2Decoder(model, 1, length, persistent=p)) for name, p in ways.items()}
    texts |= {name: measure.generate(loop, prompt, new_tokens) for name, loop in loops.items()}
    same = {side: same_tokens(text, texts[SDPA]) for side, text in texts.items()}
    speeds = measure.measure(loops, prompt, new_tokens)
    samples: dict[str, list[float]] = {side: [] for side in ATTENTION}
    for side in turns(ATTENTION, ROUNDS if cuda else 2):
        model.set_attn_implementation(ATTENTION[side])
        samples[side].append(timed(generate, cuda))
    calls = {side: Timing.of(times).per(new_tokens) for side, times in samples.items()}
    beside = median(
        sdpa / ours for ours, sdpa in zip(samples[GENERATE], samples[SDPA], strict=True)
    )
    fastest = min(loop.between.median_ms for loop in speeds.values())
    if floor and floor > IMPOSSIBLE * fastest:
        raise ImpossibleRate(f"{fastest:.4g} ms for a step is impossible: the floor is {floor:.4g}")
    return Found(new_tokens, floor, speeds, calls, beside, same)


def step_bytes(model: GPT2LMHeadModel, length: float) -> float:
    """What a step has to read: keys and values, and the weights once, but of the positions one row."""
    c, positions = model.config, model.transformer.wpe.weight
    numbers = sum(p.numel() for p in model.parameters()) - positions.numel() + c.n_embd
    return positions.element_size() * (numbers + 2 * c.n_layer * c.n_embd * length)


def bars_grid(found: Found) -> Grid:
    """Each bar, what was found, and whether it is met."""
    grid = bars.empty()
    way, speed = min(found.loops.items(), key=lambda loop: loop[1].between.median_ms)
    tbt, at_most = speed.between.median_ms, f"at most {BETWEEN:g} ms"
    bars.add(grid, f"{way}: time between tokens", f"{tbt:.4g} ms", at_most, tbt <= BETWEEN)
    ratio = found.beside
    name, at_least = f"{GENERATE}: speed relative to SDPA", f"at least {BY_SDPA:g} x"
    bars.add(grid, name, f"{ratio:.3f} x", at_least, ratio >= BY_SDPA)
    for side in (*found.loops, GENERATE):
        same = found.same[side]
        texts = f"{side}: tokens equal to those of SDPA", f"{same} of {found.new_tokens}", "all"
        bars.add(grid, *texts, same == found.new_tokens)
    return grid


def times_grid(found: Found) -> Grid:
    """The loop's ways, of which a time is between tokens, and ``generate``, of which it is the whole call's."""
    columns = ["first token", "per token", "10 to 90 %", "tokens/s", "x SDPA", "of a pure read"]
    grid = Grid("Times in ms", ["", *columns, "SDPA's tokens"])
    rows = [
        (name, f"{loop.first.median_ms:.4g}", loop.between) for name, loop in found.loops.items()
    ]
    for name, first, time in [*rows, *((name, "", call) for name, call in found.calls.items())]:
        row = [name, first, f"{time.median_ms:.4g}", table.spread(time)]
        ratio = found.beside if name == GENERATE else found.calls[SDPA].median_ms / time.median_ms
        row += [f"{1e3 / time.median_ms:,.0f}", f"{ratio:.3f}"]
        row.append(f"{found.floor / time.median_ms:.0%}" if found.floor else "-")
        grid.rows.append([*row, f"{found.same[name]} of {found.new_tokens}"])
    if found.floor:
        rest = ["", f"{1e3 / found.floor:,.0f}", "", "100%", ""]
        grid.rows.append(["floor", "", f"{found.floor:.4g}", *rest])
    return grid


def rendered(record: Record) -> str:
    """The text of RESULTS.md; MarkerError if a marker is missing."""
    lines = ["Not measured yet: `python -m task7.speed` on a GPU.", ""]
    if record.speed:
        lines = table.joined(record.speed.grids) + table.origin(record.speed.run, STALE)
    text = (FOLDER / "RESULTS.md").read_text("utf-8")
    return replace(text, "ladder", {"speed": lines}, file="task7/RESULTS.md")


def _render(record: Record) -> int:
    write_atomically(FOLDER / "RESULTS.md", rendered(record))
    console.print("written: task7/RESULTS.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
