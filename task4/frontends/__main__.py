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
from common.marked import MarkerError, replace, sections, write_atomically
from common.record import describe_run, provenance
from common.record.grid import Grid
from task4.frontends import test
from task4.frontends.benchmark import (
    HEAD_DIM,
    HEADS,
    LADDER,
    SEQS,
    first_result,
    library_for,
    time_on_cpu,
    time_on_gpu,
)
from task4.frontends.frontends import FRONT_ENDS, OURS, FrontEnd
from task4.ladder.benchmark import HIDDEN, PRECISIONS, TOKENS, Cell

RESULTS = Path(__file__).resolve().parent / "RESULTS.md"
SOURCES = ("task4/frontends/*.py", "task4/frontends/*.cpp", "task4/frontends/*.h")
ON_GPU = ("bfloat16", 128), ("float32", 64)  # what is timed there, and its head_dim
GPU_SEQS = (1024, 4096)
SECTIONS = ("cuda", "cpu")  # of RESULTS.md, in its order
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
    except MarkerError as error:
        console.print(f"error: {error}")
        return 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m task4.frontends",
        description="Check task 4's attention through other front ends, and time those that are right. What a run of"
        " all of them (no name) finds is written to RESULTS.md.",
    )
    names = [front_end.name for front_end in FRONT_ENDS]
    add = parser.add_argument
    add("name", nargs="*", metavar="NAME", help=f"only these: {', '.join(names)}; default: all")
    add("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    add("--check-only", "--no-timing", action="store_true", help="time nothing")
    add("--seed", type=int, help="repeat the random inputs of an earlier run")
    options = parser.parse_args(argv)
    if unknown := [name for name in options.name if name not in names]:
        parser.error(f"there is no front end {unknown[0]!r}; there are {', '.join(names)}")
    options.seed = new_seed() if options.seed is None else options.seed
    has_gpu = torch.cuda.is_available()
    options.device = options.device or ("cuda" if has_gpu else "cpu")
    if options.device == "cuda" and not has_gpu:
        parser.error("--device cuda: PyTorch sees no GPU here")
    options.wanted = [f for f in FRONT_ENDS if f.name in (options.name or names)]
    return options


def _run(options: argparse.Namespace) -> int:
    reasons = {front_end: front_end.why_not(options.device) for front_end in options.wanted}
    missing = [reason for reason in reasons.values() if reason]
    for reason in missing:
        console.print(reason)
    here = [front_end for front_end, reason in reasons.items() if not reason]
    if not here:
        return 0
    _filled(options.device, [])  # before the minutes of measuring
    console.print(
        f"front ends on {options.device}, checked by task 4's cases (--seed {options.seed})"
    )
    items = list(test.suite.items([options.device]))
    groups = {f.name: [i for i in items if i.check.group == f.name] for f in here}
    checked = {result.name: result for result in run_groups(groups, options.seed)}
    right = [f for f in here if checked[f.name].status == "passed"]
    if options.check_only or not right:
        return 0 if right == here else 1
    passed = {name: f"{result.passed} of {result.total}" for name, result in checked.items()}
    grids = [_overview(here, right, passed, options.device)]
    names = [front_end.name for front_end in right]
    if options.device == "cuda":
        first, *others = _on_gpu(right)
        grids = [_joined(grids[0], first), *others]
        grids += _registers() if "nvrtc" in names else []
    elif "cpp" in names:
        grids += _on_cpu(options.seed)
    for grid in grids:
        grid.print(console)
    if not options.name:
        _write(grids, missing, options)
    return 0 if right == here and all(all(grid.bars) for grid in grids) else 1


def _overview(
    here: Sequence[FrontEnd], right: Sequence[FrontEnd], checks: dict[str, str], device: str
) -> Grid:
    """What each takes and passes. The rest of a run is for those that are right."""
    columns = ["front end", "what it is", "lines", "edit to first result", "checks", "versions"]
    grid = Grid("", columns)
    for front_end in (*here, *([OURS] if device == "cuda" else [])):
        if device not in front_end.devices or front_end not in (*right, OURS):
            seconds = "-"  # simulated, or wrong
        else:
            with console.status(f"{front_end.name}, from an edit to a first result"):
                seconds = f"{first_result(front_end, device):.1f} s"
        row = [front_end.name, front_end.title, f"{front_end.lines}", seconds]
        grid.rows.append([*row, checks.get(front_end.name, "-"), front_end.versions])
    return grid


def _on_gpu(here: Sequence[FrontEnd]) -> list[Grid]:
    """A table for each precision: TFLOP/s at two lengths, and ratios at the longer one."""
    grids = []
    for name, head_dim in ON_GPU:
        precision = PRECISIONS[name]
        library = library_for(precision).label
        baselines = (OURS.name, LADDER, library)
        cells = [Cell(head_dim, seq, causal=False) for seq in GPU_SEQS]
        with console.status(f"timing {name}"):
            found = [time_on_gpu(here, cell, precision) for cell in cells]
        title = f"{name}, head_dim {head_dim}, batch x seq {TOKENS:,}, {HIDDEN // head_dim} heads, not causal."
        title += f" TFLOP/s, and how many times as fast at {GPU_SEQS[-1]:,} keys."
        columns = ["", *(f"{seq:,} keys" for seq in GPU_SEQS), *(f"x {b}" for b in baselines)]
        grid = Grid(title, columns)
        for method in (*(f.name for f in here), *baselines):
            if reason := found[-1].left_out.get(method):
                grid.rows.append([method, reason, *["-"] * (len(columns) - 2)])
                continue
            times = [f.times.get(method) for f in found]
            rates = [f"{c.tflops(t):.3g}" if t else "-" for c, t in zip(cells, times, strict=True)]
            own = found[-1].times[method].median_ms
            against = (found[-1].times.get(baseline) for baseline in baselines)
            ratios = [f"{t.median_ms / own:.3g}" if t else "-" for t in against]
            grid.rows.append([method, *rates, *ratios])
        grids.append(grid)
    return grids


def _joined(overview: Grid, speed: Grid) -> Grid:
    """One table of the two. The library's kernels are in the second alone, what is wrong is in the first."""
    taken = {row[0]: row[1:] for row in overview.rows}
    timed = {row[0]: row[1:] for row in speed.rows}
    *columns, versions = overview.columns
    grid = Grid(speed.title, [*columns, *speed.columns[1:], versions])
    for name in dict.fromkeys([*taken, *timed]):
        *row, last = taken.get(name, ["-"] * (len(columns)))
        grid.rows.append([name, *row, *timed.get(name, ["-"] * (len(speed.columns) - 1)), last])
    return grid


def _registers() -> list[Grid]:
    """What compiling takes, and what tiles take of an SM."""
    from task4.frontends import registers  # needs nvrtc's packages

    with console.status("NVRTC beside nvcc"):
        times = registers.compile_times()
        taken = registers.register_report()
    nvcc = (
        "there is no nvcc" if times.nvcc is None else f"nvcc {times.nvcc:.1f} s for all of the .cu"
    )
    batch, seq, heads, head_dim = registers.SHAPE
    title = f"Tiles of task 4's kernel by NVRTC: {times.nvrtc:.2f} s for the instantiation that a call needs; {nvcc}."
    title += f" float32, B{batch}, {heads} heads, head_dim {head_dim}, {seq:,} keys; times relative to the first."
    columns = (
        "B_r x B_c",
        "registers",
        "shared memory",
        "spilled, stores / loads",
        "blocks per SM",
        "ms",
        "time",
    )
    grid = Grid(title, columns)
    for row in taken:
        compiled, variant = row.compiled, row.compiled.variant
        bound = f", for {variant.blocks} blocks per SM" if variant.blocks > 1 else ""
        ran = row.ms is not None
        grid.rows.append([
            f"{variant.B_r} x {variant.B_c}{bound}", f"{compiled.registers}", f"{variant.shared_bytes:,} B",
            f"{compiled.spill_stores} / {compiled.spill_loads} B", f"{row.blocks_per_sm}" if ran else "-",
            f"{row.ms:.3g}" if ran else "-", f"{row.ratio:.2f} x" if ran else "-",
        ])  # fmt: skip
    return [grid]


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


def _filled(device: str, lines: Sequence[str]) -> str:
    """RESULTS.md with these lines for the device, and what it has for the other one.

    Raises:
        MarkerError: its markers are not as they should be.
    """
    text = RESULTS.read_text(encoding="utf-8")
    kept = [section.strip("\n").split("\n") for section in sections(text, "frontends")]
    found = dict(zip(SECTIONS, kept, strict=False)) | {device: lines}
    return replace(text, "frontends", found, file=RESULTS.name)


def _write(grids: Sequence[Grid], missing: Sequence[str], options: argparse.Namespace) -> None:
    run = describe_run(provenance(SOURCES, device=options.device, seed=options.seed))
    lines = [line for grid in grids for line in grid.markdown()]
    lines += [f"- {reason}" for reason in missing] + [""] * bool(missing)
    write_atomically(RESULTS, _filled(options.device, [*lines, run]))
    console.print(f"written: {RESULTS.name}")


if __name__ == "__main__":
    sys.exit(main())
