"""Builds, checks and times decode: ``python -m task5.ladder``. See RESULTS.md beside this file."""

import argparse
import logging
import sys
from collections.abc import Sequence

import pytest
import torch
from rich.console import Console

from common.build import BuildError, builder, library
from common.build.cli import report
from common.check.case import device_of
from common.check.rng import new_seed, seed_of
from common.record import provenance
from common.record.grid import Grid
from common.record.typed import BrokenRecord
from common.timing import reference
from task5.ladder import bars, plot, prefill, steps, table, uneven
from task5.ladder.benchmark import CURVES, OURS, SHAPES, our_sides, time_shape
from task5.ladder.peers import peer_sides, versions
from task5.ladder.record import Record, Run, Tables, Times, load, save
from task5.ladder.rungs import FOLDER, RUNGS, Rung

SOURCES = (
    "task5/ladder/*.cu",
    "task5/ladder/*.cuh",
    "task5/ladder/call.py",
    "task5/ladder/by_length.py",
    "task5/ladder/choice.py",
    "task5/ladder/kernels.py",
    "task5/ladder/plan.py",
    "task5/ladder/trees.py",
    "task5/ladder/chunk.py",
    "task5/ladder/gpu.py",
)
# Of a chunk of a prompt: its kernel, task 4's ladder, and what chooses between them.
PREFILL_SOURCES = (
    "task5/ladder/chunk.cu",
    "task5/ladder/chunk*.cuh",
    "task5/ladder/chunk.py",
    *(
        f"task5/ladder/{name}.cuh"
        for name in ("cluster_memory", "count", "dependent_launch", "lazy_maximum", "tensor_map")
    ),
    "task4/prefill.py",
    "task4/ladder/*.cu",
    "task4/ladder/*.cuh",
    "task4/ladder/rungs.py",
)
TESTS = tuple(
    FOLDER / f"test{part}.py"
    for part in ("", "_pages", "_batch_invariant", "_by_length", "_launches", "_bad_input", "_choice", "_plan",
                 "_append", "_chunk", "_chunk_plan")
)  # fmt: skip
ROOM_ON_CPU = 96  # keys, for --steps

console = Console(
    width=None if sys.stdout.isatty() else 200, highlight=False, emoji=False, markup=False
)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 0 if all that was asked for compiles, is right and meets its bars."""
    options = _parse(argv)
    level = logging.INFO if options.verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(name)s: %(message)s")
    try:
        return _run(options)
    except (BuildError, BrokenRecord) as error:
        console.print(str(error))
        return 1
    except KeyboardInterrupt:
        console.print("\ninterrupted")
        return 130


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m task5.ladder",
        description="Build, check and time decode beside the libraries, and judge its bars. What a complete run on a"
        " GPU finds (no shape named, all checks passed) is written to table.json, README.md, RESULTS.md and"
        " decode.png.",
    )
    add, one_of = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    # fmt: off
    add("--shape", nargs="+", metavar="WORDS", help="only shapes whose names have the words of one of these:"
        " float32 'B1 32/8 kv8192'")
    add("--no-check", action="store_true", help="do not check before timing; nothing is written")
    one_of("--check-only", "--no-timing", action="store_true", help="build and check")
    one_of("--bars", action="store_true", help="time only what the bars need: not each rung, and no curves; nothing is"
           " written")
    one_of("--uneven", action="store_true", help="instead, time sequences of different lengths beside the libraries;"
           " written on a GPU")
    one_of("--prefill", action="store_true", help="instead of decode, time chunks of prompts beside the libraries;"
           " written on a GPU")
    one_of("--steps", type=int, metavar="N", help="instead of timing, decode N steps and compare each; on a GPU from"
           " CUDA graphs, and written")
    one_of("--render", action="store_true", help="only write README.md, RESULTS.md and the picture from"
           " table.json")
    add("--seed", type=seed_of, metavar="N", help="repeat the random inputs of an earlier run")
    add("--verbose", action="store_true", help="show the compiler's commands and each kernel's resources")
    # fmt: on
    options = parser.parse_args(argv)
    if options.steps is not None and options.steps < 1:
        parser.error(f"--steps must be at least 1; got {options.steps}")
    alone = options.uneven or options.prefill
    other = options.check_only or alone or options.steps or options.render
    if other and (options.shape or options.no_check):
        parser.error("--shape and --no-check are for the timing of decode, all of it or --bars")
    asked = [set(words.split()) for words in options.shape or [""]]
    options.shapes = [s for s in table.TIMED if any(words <= {*s.key.split()} for words in asked)]
    if not options.shapes:
        names = "\n  ".join(shape.key for shape in table.TIMED)
        parser.error(f"no shape is named {' or '.join(options.shape)}; there are\n  {names}")
    options.device = device_of("cuda" if torch.cuda.is_available() else "cpu")
    if options.device.type == "cpu" and (options.bars or alone):
        name = "bars" if options.bars else "uneven" if options.uneven else "prefill"
        parser.error(f"--{name} needs a GPU")
    options.seed = new_seed() if options.seed is None else options.seed
    return options


def _run(options: argparse.Namespace) -> int:
    record = load()  # a broken one is found before anything is timed
    if options.render:
        return _render(record)
    on_gpu = options.device.type == "cuda"
    gpu = torch.cuda.get_device_name() if on_gpu else "the CPU"
    console.print(f"decode on {gpu} (--seed {options.seed})")
    if not (here := _build(options)):
        return 1
    if options.steps:
        return _steps(options)
    if options.uneven or options.prefill:
        return _beside(options)
    if not (options.no_check or _check(options)):
        return 1
    if options.check_only:
        return 0
    if not on_gpu:
        console.print("timing needs a GPU")
        return 0
    return _time(here, options)


def _build(options: argparse.Namespace) -> list[Rung]:
    """Build all at once; the rungs that compile and run here."""
    targets = {}
    for rung in RUNGS:
        try:
            targets[rung] = library.target_for(rung.source, options.device)
        except BuildError as error:
            console.print(f"left out: {error}")
    try:
        missing = sum(not target.path.exists() for target in targets.values())
        with console.status(f"building {missing} libraries"):
            for built in builder.make(list(targets.values()), verbose=options.verbose):
                if built.seconds is not None:
                    report(built, options.verbose)
    except BuildError as error:
        console.print(str(error))
    return [rung for rung, target in targets.items() if target.path.exists()]


def _check(options: argparse.Namespace) -> bool:
    """Run the tests of decode, append and chunks; whether all of them pass."""
    status = pytest.main(["-q", f"--seed={options.seed}", *map(str, TESTS)])
    if status == pytest.ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    return status == 0


def _time(ladder: Sequence[Rung], options: argparse.Namespace) -> int:
    """Time the shapes beside the libraries; print the tables and the bars, and keep what a complete run found."""
    run = _provenance(options)
    for name, version in run["peers"].items():
        console.print(f"{name}: {version}")
    times = Times(run, reference().read_gb_per_s)
    console.print(table.bandwidth(times))
    shapes = [s for s in options.shapes if s in SHAPES or not options.bars]
    for shape in shapes:
        sides = our_sides([] if options.bars else ladder)
        if shape not in SHAPES:  # a point of the curves
            sides = {OURS: sides[OURS]}
        with console.status(f"timing {shape.key}"):
            times.shapes[shape.key] = time_shape(
                shape, sides | peer_sides(shape.dtype), options.seed
            )
    for grid in [] if options.bars else table.grids(times):
        grid.print(console)
    console.print("\n".join(table.reasons(times)))
    found = Tables(run, [bars.speed_grid(times)])
    if not options.shape:
        with console.status("errors"):
            found.grids.append(bars.accuracy_grid(options.seed))
    met = _print(found.grids)
    if not (options.shape or options.no_check or options.bars):
        _render(save(times=times, bars=found))
    return 0 if met else 1


def _steps(options: argparse.Namespace) -> int:
    """The endurance run; on a GPU it is kept."""
    device = options.device.type
    room = {} if device == "cuda" else {"room": ROOM_ON_CPU}
    with console.status(f"decoding {options.steps:,} steps"):
        found = steps.run(options.steps, options.seed, device, **room)
    tables = Tables(_provenance(options), [found])
    met = _print(tables.grids)
    if device == "cuda":
        _render(save(steps=tables))
    return 0 if met else 1


def _beside(options: argparse.Namespace) -> int:
    """Uneven lengths, or chunks of prompts, beside the libraries; what was found is kept."""
    name, time, sources = (
        ("prefill", prefill.time_chunks, PREFILL_SOURCES)
        if options.prefill
        else ("uneven", uneven.time_lengths, SOURCES)
    )
    with console.status("timing") as status:
        found = time(options.seed, lambda key: status.update(f"timing {key}"))
    tables = Tables(_provenance(options, sources), [found])
    met = _print(tables.grids)
    _render(save(**{name: tables}))
    return 0 if met else 1


def _print(grids: Sequence[Grid]) -> bool:
    """Show these tables; whether all of their bars are met."""
    for grid in grids:
        grid.print(console)
    return all(met for grid in grids for met in grid.bars)


def _provenance(options: argparse.Namespace, sources: Sequence[str] = SOURCES) -> Run:
    facts = provenance(sources, device=options.device.type, seed=options.seed)
    return facts | {"peers": versions()}


def _render(record: Record) -> int:
    """README.md, RESULTS.md and the picture, from the record."""
    try:
        if record.times and any(shapes[0].key in record.times.shapes for shapes in CURVES.values()):
            plot.draw(record.times)
    except ModuleNotFoundError as error:
        console.print(plot.MISSING if error.name == "matplotlib" else str(error))
    table.write(record)
    console.print("written: README.md and RESULTS.md of task5/ladder")
    return 0


if __name__ == "__main__":
    sys.exit(main())
