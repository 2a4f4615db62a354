"""Builds, checks and times the ladder: ``python -m task4.ladder``. See README.md beside this file."""

import argparse
import logging
import sys
from collections.abc import Iterable, Sequence

import torch
from rich.console import Console

from common.build import BuildError, builder, library
from common.build.cli import report
from common.check.case import device_of
from common.check.rng import new_seed
from common.check.run import run_groups
from common.record import provenance
from common.record.grid import Grid
from common.record.typed import BrokenRecord
from common.timing.counters import NoCounters
from common.timing.peers import fa3_version
from task4.ladder import plot, table, test
from task4.ladder.benchmark import HEAD_DIMS, PRECISIONS, SEQS, Cell, Precision, time_cell
from task4.ladder.evidence import bars, counters
from task4.ladder.record import Run, Tables, Times, load, save
from task4.ladder.rungs import RUNGS, Rung, list_rungs

console = Console(
    width=None if sys.stdout.isatty() else 120, highlight=False, emoji=False, markup=False
)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 0 if all that was asked for compiles, is right and meets its bars."""
    options = _parse(argv)
    level = logging.INFO if options.verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(name)s: %(message)s")
    try:
        return _run(options)
    except BrokenRecord as error:
        console.print(str(error))
        return 1
    except KeyboardInterrupt:
        console.print("\ninterrupted")
        return 130


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m task4.ladder",
        description="Build, check and time the ladder of attention kernels. What a complete run measures (no rung,"
        " length, head_dim or mask named, all checks passed) is written to table.json, README.md and RESULTS.md.",
    )
    add, numbers = parser.add_argument, [rung.number for rung in RUNGS]
    # fmt: off
    add("--rung", type=int, nargs="+", choices=numbers, metavar="N", help="only these")
    add("--dtype", nargs="+", choices=list(PRECISIONS), help="default: bfloat16; tf32: rungs 4 to 6 on float32")
    add("--seq", type=int, nargs="+", choices=SEQS, help="only these lengths")
    add("--head-dim", type=int, nargs="+", choices=HEAD_DIMS, help="only these")
    add("--causal", action=argparse.BooleanOptionalAction, help="only (not) causal; default: both")
    add("--check-only", "--no-timing", action="store_true", help="build and check")
    add("--no-check", action="store_true", help="do not check first; nothing is written")
    add("--profile", action="store_true", help="instead of timing, what limits each rung and library in one cell"
        " (the first --head-dim and --seq; 128 and 2048): registers, occupancy, ncu's counters")
    add("--bars", action="store_true", help="instead of timing, whether the bars are met, on hard inputs too")
    add("--render", action="store_true", help="only write README.md, RESULTS.md and the pictures from table.json")
    add("--seed", type=int, help="repeat the random inputs of an earlier run")
    add("--verbose", action="store_true", help="show commands, resources, and which rung was taken and why")
    # fmt: on
    options = parser.parse_args(argv)
    options.device = device_of("cuda" if torch.cuda.is_available() else "cpu")
    options.seed = new_seed() if options.seed is None else options.seed
    options.ladder = [r for r in RUNGS if r.number in (options.rung or numbers)]
    options.precisions = [PRECISIONS[name] for name in options.dtype or _default(options)]
    parts = (options.rung, options.seq, options.head_dim, options.causal)
    options.complete = not options.no_check and parts == (None,) * 4
    return options


def _default(options: argparse.Namespace) -> list[str]:
    """bfloat16, or what the wanted rungs are for; all where nothing is timed."""
    if options.device.type == "cpu":
        return list(PRECISIONS)
    if options.bars and not options.rung:
        return ["bfloat16", "float32"]
    return next([p.name] for p in PRECISIONS.values() if any(map(p.has, options.ladder)))


def _run(options: argparse.Namespace) -> int:
    if options.render:
        return _render(PRECISIONS.values())
    names = ", ".join(precision.name for precision in options.precisions)
    gpu = torch.cuda.get_device_name() if options.device.type == "cuda" else "the CPU"
    console.print(f"the ladder on {gpu}: {names} (--seed {options.seed})")
    if not (here := _here(options)):
        return 1
    built = _build(here, options)
    right = built if options.no_check else _check(built, options)
    ok = len(right) == len(here)
    if options.device.type == "cpu":
        console.print("timing and profiling need a GPU")
    elif not options.check_only:
        options.complete = options.complete and ok
        measure = _bars if options.bars else _profile if options.profile else _time
        for precision in options.precisions:
            if mine := [rung for rung in right if precision.has(rung)]:
                ok = measure(precision, mine, options) and ok
        if options.complete:
            _render(options.precisions)
    return 0 if ok else 1


def _here(options: argparse.Namespace) -> list[Rung]:
    """Those of the wanted rungs that compute in a wanted precision and run here; for the others, why not."""
    names = " or ".join(precision.name for precision in options.precisions)
    reasons = {}
    for rung in options.ladder:
        reasons[rung] = f"{rung} is not for {names}"
        if dtypes := [p.dtype for p in options.precisions if p.has(rung)]:
            reasons[rung] = rung.why_not(options.device, dtypes[0], rung.head_dims[0])
    if options.rung or options.verbose:
        for reason in filter(None, reasons.values()):
            console.print(reason)
    elif left_out := [rung for rung, reason in reasons.items() if reason]:
        console.print(f"left out: {list_rungs(left_out)} (--verbose says why)")
    return [rung for rung, reason in reasons.items() if not reason]


def _build(ladder: Sequence[Rung], options: argparse.Namespace) -> list[Rung]:
    """Build them at once, on the CPU also for the check build; those that compile."""
    targets = []
    for check in (False, True) if options.device.type == "cpu" else (False,):
        with library.using(check=check):
            targets += [library.target_for(rung.source, options.device) for rung in ladder]
    try:
        with console.status(f"building {sum(not t.path.exists() for t in targets)} libraries"):
            for built in builder.make(targets, verbose=options.verbose):
                if built.seconds is not None:
                    report(built, options.verbose)
    except BuildError as error:
        console.print(str(error))
    broken = {target.source for target in targets if not target.path.exists()}
    return [rung for rung in ladder if rung.source not in broken]


def _check(ladder: Sequence[Rung], options: argparse.Namespace) -> list[Rung]:
    """Run their checks (test.py) in the wanted precisions and head_dims; those that pass them all."""
    test.wanted[:] = ladder
    targets = ["cuda"] if options.device.type == "cuda" else ["cpu", "cpu-check"]
    head_dims = options.head_dim or HEAD_DIMS
    items = [item for item in test.suite.items(targets) if item.case.head_dim in head_dims]
    groups = {}
    for rung in ladder:
        dtypes = [precision.dtype for precision in options.precisions if precision.has(rung)]
        mine = [item for item in items if item.case.rung == rung.number]
        groups[str(rung)] = [item for item in mine if item.case.dtype in dtypes]
    status = {result.name: result.status for result in run_groups(groups, options.seed)}
    if "not run" in status.values():  # the GPU is lost
        raise SystemExit(1)
    return [rung for rung in ladder if status[str(rung)] == "passed"]


def _time(precision: Precision, ladder: Sequence[Rung], options: argparse.Namespace) -> bool:
    """Time all cells; print a table for each head_dim and mask."""
    times = Times(_provenance(options), precision.references())
    for name, rate in times.references.items():
        console.print(f"{name}: {rate:.0f} TFLOP/s")
    for head_dim in options.head_dim or precision.head_dims:
        for causal in (False, True) if options.causal is None else (options.causal,):
            for cell in (Cell(head_dim, seq, causal) for seq in sorted(options.seq or SEQS)):
                with console.status(f"timing {precision.name} {cell.key}"):
                    times.cells[cell.key] = time_cell(cell, ladder, precision)
            table.length_grid(precision, times, head_dim, causal).print(console)
    bars.ratio_grid(precision, times.cell).print(console)
    console.print("\n".join(table.reasons(times)))
    if options.complete:
        save(precision.name, "times", times)
    return True


def _profile(precision: Precision, ladder: Sequence[Rung], options: argparse.Namespace) -> bool:
    """Find what limits each rung and library, in one cell."""
    head_dim, seq = (options.head_dim or [128])[0], (options.seq or [2048])[0]
    cell = Cell(head_dim, seq, bool(options.causal))
    try:
        return _tables("profile", counters.profile(ladder, precision, cell), precision, options)
    except NoCounters as reason:
        console.print(str(reason))
        return True


def _bars(precision: Precision, ladder: Sequence[Rung], options: argparse.Namespace) -> bool:
    """Measure the bars; whether all are met."""
    if precision.tf32:
        console.print("tf32 has no bars: no rung is its default")
        return True
    console.print(f"FlashAttention-3: {fa3_version()}")
    grids = bars.Trial(precision, ladder, options.seed).grids()
    return _tables("bars", grids, precision, options)


def _tables(
    part: str, grids: Iterable[Grid], precision: Precision, options: argparse.Namespace
) -> bool:
    """Print these tables, keep them if the run is complete, and say whether all bars are met."""
    tables = Tables(_provenance(options), [])
    for grid in grids:
        grid.print(console)
        tables.grids.append(grid)
    if options.complete:
        save(precision.name, part, tables)
    return all(met for grid in tables.grids for met in grid.bars)


def _provenance(options: argparse.Namespace) -> Run:
    return provenance(test.SOURCES, device="cuda", seed=options.seed) | {"fa3": fa3_version()}


def _render(precisions: Iterable[Precision]) -> int:
    """README.md, RESULTS.md and the pictures, from table.json."""
    records = load()
    try:
        for precision in precisions:
            if (record := records.get(precision.name)) and record.times:
                plot.draw(precision, record.times)
    except ModuleNotFoundError as error:
        console.print(plot.MISSING if error.name == "matplotlib" else str(error))
    table.write(records)
    console.print("written: task4/ladder/README.md and RESULTS.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
