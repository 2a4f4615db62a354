"""Checks and times task 4's attention through other front ends: ``python -m task4.frontends``. See README.md."""

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from common.check.rng import new_seed
from common.check.run import run_groups
from common.marked import replace, write_atomically
from common.record import describe_run, provenance
from common.record.grid import Grid
from task4.frontends import test
from task4.frontends.benchmark import HEAD_DIM, HEADS, SEQS, first_result, time_on_cpu
from task4.frontends.frontends import FRONT_ENDS, FrontEnd

RESULTS = Path(__file__).resolve().parent / "RESULTS.md"
SOURCES = ("task4/frontends/*.py", "task4/frontends/*.cpp", "task4/frontends/*.h")
BAR, FROM = 0.9, 512  # of PyTorch's speed, at this many keys and more

console = Console(
    width=None if sys.stdout.isatty() else 120, highlight=False, emoji=False, markup=False
)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 0 if all that runs here is right and as fast as it should be."""
    options = _parse(argv)
    try:
        return _run(options)
    except KeyboardInterrupt:
        console.print("\ninterrupted")
        return 130


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m task4.frontends",
        description="Check and time task 4's attention through other front ends. What a complete run measures (no name,"
        " all checks passed) is written to RESULTS.md.",
    )
    names = [front_end.name for front_end in FRONT_ENDS]
    add = parser.add_argument
    add("name", nargs="*", metavar="NAME", help=f"only these: {', '.join(names)}; default: all")
    add("--check-only", "--no-timing", action="store_true", help="time nothing")
    add("--seed", type=int, help="repeat the random inputs of an earlier run")
    options = parser.parse_args(argv)
    if unknown := [name for name in options.name if name not in names]:
        parser.error(f"there is no front end {unknown[0]!r}; there are {', '.join(names)}")
    options.seed = new_seed() if options.seed is None else options.seed
    options.wanted = [f for f in FRONT_ENDS if f.name in (options.name or names)]
    return options


def _run(options: argparse.Namespace) -> int:
    device = "cpu"
    reasons = {front_end: front_end.why_not(device) for front_end in options.wanted}
    for reason in filter(None, reasons.values()):
        console.print(reason)
    here = [front_end for front_end, reason in reasons.items() if not reason]
    if not here:
        return 0
    console.print(f"front ends, checked by task 4's cases (--seed {options.seed})")
    items = list(test.suite.items([device]))
    groups = {f.name: [i for i in items if i.check.group == f.name] for f in here}
    checked = {result.name: result for result in run_groups(groups, options.seed)}
    ok = all(result.status == "passed" for result in checked.values())
    if options.check_only or not ok:
        return 0 if ok else 1
    with console.status("from an edit to a first result"):
        grids = [
            _overview(here, {n: f"{r.passed} of {r.total}" for n, r in checked.items()}, device)
        ]
    if any(front_end.name == "cpp" for front_end in here):
        grids += _on_cpu(options.seed)
    for grid in grids:
        grid.print(console)
    if not options.name:
        _write(grids, options.seed)
    return 0 if all(all(grid.bars) for grid in grids) else 1


def _overview(here: Sequence[FrontEnd], checks: dict[str, str], device: str) -> Grid:
    columns = ["front end", "what it is", "lines", "edit to first result", "checks"]
    grid = Grid("", columns)
    for front_end in here:
        seconds = f"{first_result(front_end, device):.1f} s"
        row = [front_end.name, front_end.title, f"{front_end.lines}", seconds]
        grid.rows.append([*row, checks[front_end.name]])
    return grid


def _on_cpu(seed: int) -> list[Grid]:
    """C++ beside PyTorch: a table for each mask."""
    rng, grids = random.Random(seed), []
    threads = torch.get_num_threads()
    for causal in (False, True):
        title = f"On the CPU: B1, {HEADS} heads, head_dim {HEAD_DIM}, float32, {threads} threads,"
        title += f" {'causal' if causal else 'not causal'}. GFLOP/s, and how many times as fast as PyTorch's."
        grid = Grid(title, ["keys", "naive.cpp", "host.cpp", "PyTorch", "naive.cpp", "host.cpp"])
        for seq in SEQS:
            with console.status(f"timing {seq} keys"):
                times = time_on_cpu(seq, causal, rng)
            flops = 4 * HEADS * seq * seq * HEAD_DIM / (2 if causal else 1)
            names = ("naive.cpp", "host.cpp", "PyTorch")
            rates = [f"{flops / times[n].seconds / 1e9:.3g}" if n in times else "-" for n in names]
            naive = f"{times['naive.cpp'].ratio:.3f}" if "naive.cpp" in times else "-"
            bar = BAR if seq >= FROM else None
            fused = f"{grid.judged(times['host.cpp'].ratio, bar)} (n {times['host.cpp'].n})"
            grid.rows.append([f"{seq:,}", *rates, naive, fused])
        grids.append(grid)
    return grids


def _write(grids: Sequence[Grid], seed: int) -> None:
    run = describe_run(provenance(SOURCES, device="cpu", seed=seed))
    lines = [*(line for grid in grids for line in grid.markdown()), run]
    text = replace(
        RESULTS.read_text(encoding="utf-8"), "frontends", {"cpu": lines}, file=RESULTS.name
    )
    write_atomically(RESULTS, text)
    console.print(f"written: {RESULTS.name}")


if __name__ == "__main__":
    sys.exit(main())
