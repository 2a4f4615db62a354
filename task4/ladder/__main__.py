"""Builds, checks and times the ladder: ``python -m task4.ladder``. See README.md beside this file."""

import argparse
import logging
import sys
import threading
import time
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table

from common.build import BuildError, builder, library
from common.check import Case, Rng
from common.check.failure import failure_of
from common.check.rng import new_seed
from common.record import provenance
from task4.ladder import accuracy, rungs, speed, table
from task4.ladder.rungs import RUNGS, Rung
from task4.ladder.speed import HEAD_DIMS, KINDS, SEQS, Cell, Stopwatch, rung_name, takes

SHOWN = 2  # failures of a rung that are told in full
console = Console(
    width=None if sys.stdout.isatty() else 120, highlight=False, emoji=False, markup=False
)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 0 if all that was asked for compiles and is right."""
    options = _parse(argv)
    logging.basicConfig(
        level=logging.INFO if options.verbose else logging.WARNING, format="%(name)s: %(message)s"
    )
    try:
        return _run(options)
    except KeyboardInterrupt:
        _write(options)
        console.print("\ninterrupted; what was measured is kept in task4/ladder/table.json")
        return 130


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m task4.ladder",
        description="Build, check and time the ladder of attention kernels; fill in task4/ladder/README.md.",
    )
    numbers = [rung.number for rung in RUNGS]
    parser.add_argument(
        "--rung", type=int, nargs="+", choices=numbers, metavar="N", help="only these"
    )
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=list(KINDS),
        help="default: bfloat16; tf32: rungs 4 to 6 on float32",
    )
    parser.add_argument("--seq", type=int, nargs="+", choices=SEQS, help="only these lengths")
    parser.add_argument("--head-dim", type=int, nargs="+", choices=HEAD_DIMS, help="only these")
    parser.add_argument(
        "--causal", action=argparse.BooleanOptionalAction, help="only (not) causal; default: both"
    )
    parser.add_argument("--check-only", "--no-timing", action="store_true", help="build and check")
    parser.add_argument(
        "--no-check",
        action="store_true",
        help="time without checking; nothing is written to README.md",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="also what bounds each rung and peer, in the first of --dtype, --head-dim (128) and --seq (2048):"
        " registers, occupancy, counters of ncu",
    )
    parser.add_argument(
        "--render",
        action="store_true",
        help="only write README.md and the pictures again, from table.json",
    )
    parser.add_argument("--seed", type=int, help="random inputs of an earlier run")
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="show commands, resources, and which rung was taken and why",
    )
    options = parser.parse_args(argv)
    options.device = (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    options.seed = new_seed() if options.seed is None else options.seed
    options.ladder = [r for r in RUNGS if r.number in (options.rung or numbers)]
    options.kinds = list(dict.fromkeys(options.dtype or _default_kinds(options)))
    return options


def _default_kinds(options: argparse.Namespace) -> list[str]:
    """bfloat16, or what the wanted rungs are for; where nothing is timed all that there are."""
    if options.device.type == "cpu":
        return list(KINDS)
    return next([kind] for kind in KINDS if any(takes(r, kind) for r in options.ladder))


def _run(options: argparse.Namespace) -> int:
    if options.render:
        _write(options, kinds=list(table.Records().kinds))
        return 0
    gpu = torch.cuda.get_device_name() if options.device.type == "cuda" else "the CPU"
    console.print(f"the ladder on {gpu}: {', '.join(options.kinds)} (--seed {options.seed})")
    here = _here(options)
    if not here:
        return 1
    built = _build(here, options)
    right = built if options.no_check else _check(built, options)
    ok = len(right) == len(here)
    if options.device.type == "cpu":
        console.print("timing and profiling need a GPU")
        return 0 if ok else 1
    if not options.check_only:
        _time(right, options)
    if options.profile:
        _profile(right, options)
    return 0 if ok else 1


def _profile(ladder: Sequence[Rung], options: argparse.Namespace) -> None:
    """What bounds each rung and peer, in one cell."""
    from task4.ladder import counters
    from task4.ladder.test import suite

    kind, head_dim = options.kinds[0], (options.head_dim or [128])[0]
    cell = Cell(head_dim, (options.seq or [counters.SEQ])[0], bool(options.causal))
    run = {
        **provenance(suite.stage.sources, device="cuda", seed=options.seed),
        "fa3": speed.fa3_version(),
    }
    kernels = counters.show(console, ladder, kind, cell)
    if kernels and not options.no_check:
        records = table.Records()
        records.add_profile(kind, run, cell, kernels)
        table.write_readme(records.kinds)
        console.print(f"written: {builder.display(table.README)}")


def _here(options: argparse.Namespace) -> list[Rung]:
    """Those of the wanted rungs that belong to a wanted kind and run here; of the others it is said why not."""
    found = []
    for rung in options.ladder:
        kinds = [kind for kind in options.kinds if takes(rung, kind)]
        if not kinds:
            if options.rung:
                console.print(f"{rung} is not for {' or '.join(options.kinds)}")
            continue
        reason = rungs.why_not(rung, options.device, KINDS[kinds[0]], rung.head_dims[0])
        if reason is None:
            found.append(rung)
        elif options.rung or options.verbose:
            console.print(reason)
    left_out = [r for r in options.ladder if r.hopper and r not in found]
    if left_out and options.device.type == "cpu" and not options.rung:
        console.print(f"{rungs.list_rungs(left_out)} need a Hopper GPU and are left out")
    return found


# ---- building


def _build(ladder: Sequence[Rung], options: argparse.Namespace) -> list[Rung]:
    """Build them at once; those that compile. On the CPU also for the check build."""
    targets = {
        r: [library.target_for(r.source, options.device)] for r in ladder if r.source.exists()
    }
    if options.device.type == "cpu" and not options.no_check:
        with library.using(check=True):
            for rung in targets:
                targets[rung].append(library.target_for(rung.source, options.device))
    everything = [t for several in targets.values() for t in several]
    missing = [t for t in everything if not t.path.exists()]
    began = time.perf_counter()
    with console.status("") as status:
        watching = threading.Event()
        watch = threading.Thread(target=_watch, args=(missing, status, watching), daemon=True)
        watch.start()
        try:
            seconds = {b.target: b for b in builder.make(everything, verbose=options.verbose)}
        except BuildError as error:
            seconds = {}
            console.print(str(error))
        finally:
            watching.set()
            watch.join()
    built = [r for r, several in targets.items() if all(t.path.exists() for t in several)]
    console.print(
        f"built {len(missing)} of {len(everything)} libraries in {time.perf_counter() - began:.1f} s"
    )
    if gone := [r for r in ladder if r not in targets]:
        console.print(f"not there: {', '.join(r.file for r in gone)}")
    for target in everything:
        if target in seconds and (words := builder.readable(seconds[target].said)):
            console.print(words)
        if target in seconds and options.verbose and target.device == "cuda":
            from common.build.cli import resources

            console.print(
                "\n".join(
                    [
                        builder.display(target.source),
                        *(f"  {s}" for s in resources(seconds[target].said)),
                    ]
                )
            )
    return built


def _watch(targets: Sequence[builder.Target], status: object, stop: threading.Event) -> None:
    began = time.perf_counter()
    while not stop.wait(0.2):
        done = sum(t.path.exists() for t in targets)
        status.update(f"building: {done} of {len(targets)}, {time.perf_counter() - began:.0f} s")


# ---- checking


def _check(ladder: Sequence[Rung], options: argparse.Namespace) -> list[Rung]:
    """Run each rung's checks in task4/ladder/test.py; those that pass them all."""
    from task4.ladder import test

    test.wanted[:] = ladder
    targets = ["cuda"] if options.device.type == "cuda" else ["cpu", "cpu-check"]
    items = [item for item in test.suite.items(targets) if _wanted(item.case, options)]
    shown = Table("rung", "", "checks", "seconds", box=None, pad_edge=False)
    right, failures = [], []
    with console.status("") as status:
        for rung in ladder:
            mine = [item for item in items if item.case.rung == rung.number]
            began, failed = time.perf_counter(), 0
            for number, item in enumerate(mine):
                status.update(f"checking {rung}: {item.case.name} ({number} of {len(mine)})")
                try:
                    item.run(options.seed)
                except Exception as error:
                    failed += 1
                    if failed <= SHOWN:
                        failures.append(failure_of(error, item, options.seed).text)
                    if options.device.type == "cuda" and _gpu_is_lost():
                        console.print("\n".join(failures))
                        console.print(
                            "the GPU refuses further work in this process after that error"
                        )
                        raise SystemExit(1) from None
            shown.add_row(
                f"{rung.number}", rung.name, f"{len(mine) - failed} of {len(mine)}",
                f"{time.perf_counter() - began:.1f}{'' if not failed else '  FAILED'}",
            )  # fmt: skip
            if not failed:
                right.append(rung)
    console.print(shown)
    for text in failures:
        console.print(text)
    return right


def _wanted(case: Case, options: argparse.Namespace) -> bool:
    """Not those of a kind or a head_dim that was not asked for."""
    kind = next(
        k for k, d in KINDS.items() if d == case.dtype and takes(rungs.by_number(case.rung), k)
    )
    return kind in options.kinds and (not options.head_dim or case.head_dim in options.head_dim)


def _gpu_is_lost() -> bool:
    """After an illegal access every further call of the process fails."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


# ---- timing


def _time(ladder: Sequence[Rung], options: argparse.Namespace) -> None:
    from task4.ladder.test import suite

    records = table.Records()
    for kind in options.kinds:
        run = {
            **provenance(suite.stage.sources, device="cuda", seed=options.seed),
            "fa3": speed.fa3_version(),
        }
        with console.status(f"{kind}: the ceiling"):
            ceiling = speed.matmul_tflops(kind)
        records.begin(kind, run, ceiling)
        console.print(f"\n{kind}: a matrix product of 8192 cubed reaches {ceiling:.0f} TFLOP/s")
        mine = [r for r in ladder if takes(r, kind)]
        _dispatch(kind, mine, records)
        if not options.no_check:
            _accuracy(mine, kind, records, options)
        stopwatch = Stopwatch(kind, mine)
        for reason in stopwatch.absent.values():
            console.print(reason)
        for head_dim in options.head_dim or HEAD_DIMS:
            if not any(head_dim in r.head_dims for r in mine):
                continue
            for causal in (False, True):
                if options.causal in (None, causal):
                    cells = [Cell(head_dim, seq, causal) for seq in sorted(options.seq or SEQS)]
                    _time_row(stopwatch, cells, records)
    _write(options)


def _time_row(stopwatch: Stopwatch, cells: Sequence[Cell], records: table.Records) -> None:
    """One head_dim and mask, over the lengths."""
    began = time.perf_counter()
    with console.status("") as status:
        for cell in cells:
            status.update(f"timing {stopwatch.kind} {cell.name}")
            records.add(stopwatch.kind, cell, stopwatch(cell))
    record = records.kinds[stopwatch.kind]
    mask = "causal" if cells[0].causal else "not causal"
    seconds = time.perf_counter() - began
    console.print(
        f"\n{stopwatch.kind}, head_dim {cells[0].head_dim}, {mask}: TFLOP/s ({seconds:.0f} s)"
    )
    shown = Table("S", box=None, pad_edge=False)
    for cell in cells:
        shown.add_column(f"{cell.seq:,}", justify="right")
    for row in table.printed(stopwatch.kind, record, [cell.name for cell in cells], records.run):
        shown.add_row(*row)
    standing = [table.standing(stopwatch.kind, record, cell) for cell in cells]
    if any(standing):
        shown.add_row(
            "best / rival",
            *(
                f"{s[0]:.3f}{'' if s[2] is None or s[0] >= s[2] else ' <'}" if s else "-"
                for s in standing
            ),
        )
    console.print(shown)
    reasons = {
        f"  {name}: {entry['left_out']}"
        for cell in cells
        for name, entry in record["cells"][cell.name].items()
        if "left_out" in entry and entry["run"] == records.run and name not in stopwatch.absent
    }
    for reason in sorted(reasons):
        console.print(reason)


def _dispatch(kind: str, ladder: Sequence[Rung], records: table.Records) -> None:
    """What a call without a name costs the host."""
    q, k, v = (torch.randn(1, 128, 4, 128, device="cuda").to(KINDS[kind]) for _ in range(3))
    if kind == "tf32" or rungs.fastest(q.device, q.dtype, 128) not in ladder:
        return
    cost = speed.host_cost(q, k, v)
    records.add_dispatch(kind, cost)
    console.print(
        f"a call costs the host {cost.dispatch_us:.1f} us to dispatch and {cost.allocate_us:.1f} us to allocate (10"
        f" allowed), {cost.launch_us:.1f} us to launch"
    )


def _accuracy(
    ladder: Sequence[Rung], kind: str, records: table.Records, options: argparse.Namespace
) -> None:
    """The loss of each rung beside that of PyTorch's kernel, the worst over inputs and masks."""
    dtype = KINDS[kind]
    if kind == "tf32":
        return
    inputs = accuracy.INPUTS if kind == "float32" else accuracy.INPUTS[:3]
    shown = Table("loss / PyTorch's", "root mean square", "largest", box=None, pad_edge=False)
    with console.status(f"{kind}: precision") as status:
        for rung in ladder:
            for head_dim in rung.head_dims:
                if options.head_dim and head_dim not in options.head_dim:
                    continue
                status.update(f"{kind}: precision of {rung}")
                worst: dict[str, float] = {}
                for what in inputs:
                    for causal in (False, True):
                        rng = Rng(options.seed, "cuda", "precision", what)
                        try:
                            shape = accuracy.shape_for(rung, head_dim, causal)
                            ratios = accuracy.compare(rung, what, rng, shape, dtype, causal)
                        except RuntimeError as error:
                            console.print(f"{rung}, {what}: {str(error).splitlines()[0]}")
                            continue
                        worst = {
                            name: max(ratio, worst.get(name, 0.0)) for name, ratio in ratios.items()
                        }
                if worst:
                    records.add_accuracy(kind, rung, head_dim, worst, accuracy.yardstick(dtype))
                    shown.add_row(
                        f"{rung_name(rung)}, d {head_dim}",
                        f"{worst['rms']:.2f}",
                        f"{worst['largest']:.2f}",
                    )
    console.print(shown)


def _write(options: argparse.Namespace, kinds: Sequence[str] = ()) -> None:
    """README.md and the pictures, from table.json."""
    records = table.Records().kinds
    if options.no_check or not records:
        return
    try:
        from task4.ladder import plot

        for kind in kinds or options.kinds:
            if kind in records:
                for path in plot.draw(kind, records[kind]):
                    console.print(f"drawn: {builder.display(path)}")
    except ModuleNotFoundError as error:
        console.print(plot.MISSING if error.name == "matplotlib" else str(error))
    table.write_readme(records)
    console.print(f"written: {builder.display(table.README)}")


if __name__ == "__main__":
    sys.exit(main())
