"""Times generation: ``python -m task6.generation``, or ``python -m task6.test --config NAME``. See README.md."""

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial

import torch
from rich.console import Console

from common.build import BuildError
from common.check.case import device_of
from common.check.rng import seed_of
from common.memory import NotEnoughMemory
from common.products import PRODUCTS
from common.products.fp32 import can_split
from common.timing import IMPOSSIBLE, ImpossibleRate, reference
from task6.generation import bars, endurance, graded, plot, table
from task6.generation.benchmark import DTYPES, Case, Found, prepare, run
from task6.generation.config import CONFIGS, find_config
from task6.generation.parallel import Group, LostProcess, processes, processes_here, world_size
from task6.generation.peers import COMPILED, ONE_LAUNCH, PEERS, Make, compiled, one_launch
from task6.generation.record import GRADED_SOURCES, Record, Tables, Times, load, origin, save

# Any of these on the command line of task6.test means this command.
OPTIONS = (
    "--config",
    "--batch",
    "--prompt",
    "--new-tokens",
    "--dtype",
    "--products",
    "--profile",
    "--compiled",
)
TEXT = 1000  # new tokens of a text, for --tokens on a GPU

console = Console(
    width=None if sys.stdout.isatty() else 200, highlight=False, emoji=False, markup=False
)


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m task6.generation") -> int:
    """The command; 0 if it ran and all bars that were asked for are met."""
    options = _parse(argv, prog)
    try:
        return _run(options)
    except (ValueError, NotEnoughMemory, BuildError, LostProcess, ImpossibleRate) as error:
        if not isinstance(error, ValueError) or _rank() == 0:  # all processes have the same input
            console.print(f"task6.generation: {error}")
        return 1
    except KeyboardInterrupt:
        console.print("\ninterrupted")
        return 130


def asked_for(words: Sequence[str]) -> bool:
    """Whether a command line of ``task6.test`` is one for this command."""
    return any(word.split("=")[0] in OPTIONS for word in words)


def _parse(argv: Sequence[str] | None, prog: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Time a model with random weights, the decoder beside task 6's model and Hugging Face's: the time"
        " to the first token, and between tokens. torchrun -m task6.generation shares the model among processes.",
    )
    add, names = parser.add_argument, ", ".join(CONFIGS)
    cuda = torch.cuda.is_available()
    # fmt: off
    add("--config", default="course" if cuda else "tiny", metavar="NAME", help=f"{names}; default: %(default)s")
    add("--batch", type=int, default=4, metavar="N", help="sequences; default: %(default)s")
    add("--prompt", type=int, default=1024 if cuda else 64, metavar="N",
        help="tokens of each prompt; default: %(default)s")
    add("--new-tokens", type=int, metavar="N",
        help=f"of each sequence; default: {100 if cuda else 20}, with --tokens {TEXT if cuda else 20} at a time")
    add("--dtype", default="bfloat16" if cuda else "float32", choices=DTYPES,
        help="of weights and cache; default: %(default)s")
    add("--products", default="torch", choices=PRODUCTS, help="of a prompt in float32; default: %(default)s")
    add("--device", default="cuda" if cuda else "cpu", choices=("cpu", "cuda"), help="default: %(default)s")
    add("--profile", action="store_true", help="also where the time of a step goes, kernel by kernel")
    add("--compiled", action="store_true",
        help=f"also {COMPILED}, which compiles for a minute; with --bars for llama-3.2-1b")
    add("--seed", type=seed_of, default=0, metavar="N", help="of the weights and the prompt; default: %(default)s")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--bars", action="store_true",
        help="time the cases that have bars, then float32 products, whatever the options above, say which are met,"
        " and write GRAPHS.md, RESULTS.md and the picture; needs a GPU. With torchrun: the bar for several GPUs")
    group.add_argument("--tokens", type=int, metavar="N",
        help="generate so many tokens for each sequence, twice, and look for growth in memory")
    group.add_argument("--render", action="store_true", help="only write GRAPHS.md, RESULTS.md and the picture from"
        " table.json")
    # fmt: on
    options = parser.parse_args(argv)
    if options.tokens is not None and options.tokens < 1:
        parser.error(f"--tokens must be at least 1; got {options.tokens}")
    if options.tokens and (options.profile or options.compiled):
        parser.error("--profile and --compiled are for the times of a case, not for --tokens")
    if options.device == "cuda" and not cuda:
        parser.error("--device cuda: PyTorch sees no GPU here")
    if options.bars and options.device == "cpu":
        parser.error("--bars needs a GPU")
    if options.products != "torch" and not can_split(
        DTYPES[options.dtype], device_of(options.device)
    ):
        parser.error(
            f"--products {options.products!r} is for float32 on a Hopper GPU; got {options.dtype} on {options.device}"
        )
    try:
        world_size()
    except ValueError as error:
        parser.error(str(error))
    if options.new_tokens is None:
        text = min(TEXT, max(2, options.tokens)) if options.tokens else 100
        options.new_tokens = text if cuda else 20
    return options


def _run(options: argparse.Namespace) -> int:
    if options.render:
        return _render(load())
    case = Case(
        options.config, options.batch, options.prompt, options.new_tokens, options.dtype, options.products
    )  # fmt: skip
    load()  # a broken one is found before anything is timed
    world = world_size()
    if options.device == "cuda" and (here := processes_here()) > torch.cuda.device_count():
        raise ValueError(
            f"each process needs a GPU of its own: there are {torch.cuda.device_count()}; got {here} processes"
        )
    find_config(bars.COURSE.config if options.bars else case.config).share(world)
    asked = " ".join(f"{name}={value}" for name, value in vars(options).items())
    with processes(device_of(options.device), asked) as group:
        options.device = device_of(options.device)  # each process has its own GPU now
        if options.tokens:
            return _endurance(case, options, group)
        if options.bars:
            return _bars(options, group)
        return _time(case, options, group)


def _time(case: Case, options: argparse.Namespace, group: Group) -> int:
    """Time one case, and print it."""
    asked = dict(profile=options.profile, seed=options.seed, peers=_peers(options, group))
    with console.status(f"timing {case}"):
        found = run(case, device=options.device, group=group, **asked)
    if group.rank > 0:
        return 0
    _describe(found)
    read = reference().read_gb_per_s if options.device.type == "cuda" else None
    _print(found, read)
    if options.profile and read is None:
        table.operators(found).print(console)
        console.print("Our own kernels, which the CPU layer runs, are not among them.")
    return 0


def _bars(options: argparse.Namespace, group: Group) -> int:
    """Time all cases that have bars, and float32 products; print the bars, and keep what was found."""
    if group.world > 1:
        return _shared_bars(options, group)
    times = Times(origin("cuda", options.seed), reference().read_gb_per_s)
    for case in bars.CASES:
        with console.status(f"timing {case}"):
            peers = _peers(options, group)
            if case != bars.LLAMA:
                peers.pop(COMPILED, None)  # a minute for each of the larger models
            profile = case.products == "torch"  # the steps are the same
            found = run(case, peers=peers, profile=profile, seed=options.seed)
        _describe(found)
        _print(found, times.read_gb_per_s)
        times.found.append(found)
    missed = _judge(times, "bars")
    return _graded(options.seed) or missed


def _graded(seed: int) -> int:
    """Float32 products and the graded layer, beside PyTorch's."""
    found = Tables(origin("cuda", seed, GRADED_SOURCES), [])
    for grid in graded.grids(seed):
        grid.print(console)
        found.grids.append(grid)
    record = load()
    record.graded = found
    save(record)
    _render(record)
    return 0 if all(met for grid in found.grids for met in grid.bars) else 1


def _shared_bars(options: argparse.Namespace, group: Group) -> int:
    """The course's model on all GPUs, then on the first alone, in one run."""
    asked = dict(device=options.device, seed=options.seed)
    together = run(bars.COURSE, group=group, peers=_peers(options, group), **asked)
    peers = {ONE_LAUNCH: one_launch}
    alone = run(bars.COURSE, peers=peers, **asked) if group.rank == 0 else None
    group.sum(torch.zeros(1, device=options.device)).item()  # the others wait for the first
    if alone is None:
        return 0
    times = Times(origin("cuda", options.seed), reference().read_gb_per_s, [alone, together])
    for found in times.found:
        _print(found, times.read_gb_per_s)
    return _judge(times, str(group.world))


def _judge(times: Times, name: str) -> int:
    """Print the bars, and keep the run: under the name of the record's field, or the number of GPUs."""
    grid = bars.grid(times)
    console.print()
    console.print(table.bandwidth(times))
    grid.print(console)
    record = load()
    if name == "bars":
        record.bars = times
    else:
        record.shared[name] = times
    save(record)
    _render(record)
    return 0 if all(grid.bars) else 1


def _endurance(case: Case, options: argparse.Namespace, group: Group) -> int:
    """Many tokens, by the way that a decoder takes by itself; on a GPU what was found is kept."""
    decoder, _ = prepare(case, options.device, options.seed, group, persistent=None)
    way = ", a step in one launch" if decoder.one_launch else ""
    say = console.print if group.rank == 0 else lambda line: None
    say(f"{case}{way}, {case.new_tokens} new tokens at a time")
    found = endurance.run(decoder, case.prompt, case.new_tokens, options.tokens, options.seed, say)
    if group.rank > 0:
        return 0
    found.title = f"{case}{way}: {found.title}"
    found.print(console)
    if options.device.type == "cuda" and group.world == 1:
        record = load()
        record.tokens = Tables(origin("cuda", options.seed), [found])
        save(record)
        _render(record)
    return 0 if all(found.bars) else 1


def _peers(options: argparse.Namespace, group: Group) -> dict[str, Make]:
    """What the decoder is compared with; where several processes share the model, its other way alone."""
    if group.world > 1:
        return {ONE_LAUNCH: partial(one_launch, group=group)}
    return PEERS | ({COMPILED: compiled} if options.compiled else {})


def _describe(found: Found) -> None:
    c = find_config(found.case.config)
    console.print(
        f"\n{found.case.config}: {c.layers} layers, hidden {c.hidden}, {c.heads}/{c.kv_heads} heads of {c.head_dim},"
        f" vocabulary {c.vocab:,}; {c.weights:,} weights in {found.case.dtype}, random."
        + f" Shared by {found.world} processes."
        * (found.world > 1)
    )
    console.print(f"It begins with {' '.join(map(str, found.begins))}.")


def _print(found: Found, read_gb_per_s: float | None) -> None:
    """The times, what is missing, the memory, and the parts of a step.

    Raises:
        ImpossibleRate: a step was faster than its bytes can be read.
    """
    table.side_by_side(found, read_gb_per_s).print(console)
    console.print("\n".join(table.left_out(found)))
    if read_gb_per_s is None:
        return
    step, floor = found.ours.between.median_ms, found.floor(read_gb_per_s)
    if floor > IMPOSSIBLE * step:
        raise ImpossibleRate(
            f"{found.case}: {step:.4g} ms for a step is impossible: its bytes take {floor:.4g} ms"
        )
    for parts in (table.step_parts(found, read_gb_per_s), table.phases(found, read_gb_per_s)):
        if parts.rows:
            parts.print(console)


def _render(record: Record) -> int:
    """GRAPHS.md, RESULTS.md and the picture, from the record."""
    try:
        if record.bars:
            plot.draw(record.bars)
    except ModuleNotFoundError as error:
        console.print(plot.MISSING if error.name == "matplotlib" else str(error))
    table.write(record)
    console.print("written: GRAPHS.md and RESULTS.md of task6/generation")
    return 0


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


if __name__ == "__main__":
    sys.exit(main())
