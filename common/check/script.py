"""The command ``python -m taskN.test``: a suite's checks, then its benchmarks."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from common.check.case import CHECK_SETTINGS, LIMIT, Item, device_of
from common.check.compare import CheckFailed
from common.check.failure import describe_out_of_memory, indent, short_traceback
from common.check.hints import HintError, answers, show
from common.check.rng import new_seed
from common.check.run import SHOWN, run_groups
from common.memory import NotEnoughMemory
from common.record import Record
from common.timing import ImpossibleRate

if TYPE_CHECKING:
    from common.check.suite import Suite

INTERRUPTED = 130


def main(suite: "Suite", argv: Sequence[str] | None = None) -> int:
    """Run the suite as the command line asks; returns the exit status."""
    options = _parse(suite, argv)
    try:
        if options.hint is not None:
            print(show(suite.stage.name, options.hint, options.only))
            return 0
        return _run(suite, options)
    except HintError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED


def _parse(suite: "Suite", argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m {suite.stage.name}.test", description=suite.stage.title
    )
    for group in suite.groups:
        flag = "--" + group.replace(" ", "-")
        parser.add_argument(
            flag,
            dest="groups",
            action="append_const",
            const=group,
            help=f"only the checks of {group}",
        )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument(
        "--check",
        action="store_true",
        help="the small cases in the check build, which names races and bad accesses (on cuda: only the"
        " small cases, for compute-sanitizer)",
    )
    parser.add_argument(
        "--both",
        action="store_true",
        help="all cases, and the small ones in the check build too, as for a grade",
    )
    parser.add_argument(
        "--case",
        metavar="NAME",
        help="only the cases whose names contain this; all failures are shown",
    )
    parser.add_argument(
        "--all", action="store_true", help=f"show all failures, not {SHOWN} of each group"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=LIMIT,
        metavar="SECONDS",
        help=f"for a case on the CPU; default: {LIMIT:g}",
    )
    parser.add_argument("--seed", type=int, help="repeat the random inputs of an earlier run")
    parser.add_argument("--no-timing", action="store_true", help="checks only")
    parser.add_argument(
        "--hint",
        nargs="?",
        const="",
        metavar="PIECE",
        help="run nothing and print the next hint for what is to be written: of this function or group of checks,"
        " otherwise of the first that has one left",
    )
    parser.add_argument(
        "--record", type=Path, metavar="FILE.json", help="also write what was found there"
    )
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no GPU here")
    if not 0 < options.limit < float("inf"):
        parser.error(f"--limit must be a positive number of seconds; got {options.limit:g}")
    if options.both and options.check:
        parser.error("--both is --check and all other cases: give one of the two")
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options.seed = new_seed() if options.seed is None else options.seed
    options.complete = options.groups is None and options.case is None and not options.check
    options.only = options.groups or []
    options.groups = options.groups or suite.groups
    options.targets = ["cpu-check" if options.check and options.device == "cpu" else options.device]
    options.targets += ["cpu-check"] * options.both
    if options.case is not None and not _items(suite, options):
        names = dict.fromkeys(c.name for check in suite.checks for c in check.cases)
        parser.error(
            f"no such case has {options.case!r} in its name; the cases are: {', '.join(names)}"
        )
    return options


def _items(suite: "Suite", options: argparse.Namespace) -> list[Item]:
    """What is to be run."""
    wanted = (options.case or "").lower()
    return [
        item
        for item in suite.items(options.targets, small=options.check)
        if item.check.group in options.groups and wanted in item.case.name.lower()
    ]


def _run(suite: "Suite", options: argparse.Namespace) -> int:
    record = Record(
        suite.stage,
        device=options.device,
        seed=options.seed,
        complete=options.complete,
        answers=answers(suite.stage.name),
        fields=suite.fields,
    )
    if options.record:
        record.write(options.record)  # says "crashed" until the end replaces it
    print(
        f"{suite.stage.name}: {suite.stage.title} ({options.device}, --seed {options.seed})",
        flush=True,
    )
    items = _items(suite, options)
    if any(item.target == "cpu-check" for item in items):
        ways = ", ".join(
            f"{o}{' with eager copies' if eager else ''}" for o, eager in CHECK_SETTINGS
        )
        also = "and in the " if options.both else ""
        print(
            f"{also}check build, small cases, each in {len(CHECK_SETTINGS)} orders of threads: {ways}"
        )
    elif options.check:
        some = "small cases only" if items else "no kernels here: nothing for the check build to do"
        print(some)
    groups = {name: [i for i in items if i.check.group == name] for name in options.groups}
    if options.check or options.case:
        groups = {name: found for name, found in groups.items() if found}
    shown = sys.maxsize if options.all or options.case else SHOWN
    results = run_groups(groups, options.seed, shown=shown, limit=options.limit)
    record.groups = [found.as_record() for found in results]
    if record.ok:
        _benchmark(suite, options, record)
    if options.record:
        record.finish()
        record.write(options.record)
    return 0 if record.ok else 1


def _benchmark(suite: "Suite", options: argparse.Namespace, record: Record) -> None:
    if not suite.benchmarks or options.no_timing or not options.complete:
        return
    device = device_of(options.device)
    if device.type == "cuda" and suite.fields:
        record.measure_reference()  # first, while there is memory for it
    for benchmark in suite.benchmarks:
        if options.device not in benchmark.devices:
            print(f"  {benchmark.name}: needs a GPU")
            continue
        print(f"  {benchmark.name}", flush=True)
        try:
            record.allowed = benchmark.fields
            benchmark.function(device, record)
        except (torch.cuda.OutOfMemoryError, NotEnoughMemory) as error:
            text = describe_out_of_memory(error, device)
            record.problems.append(f"{benchmark.name}: {text}")
            print(indent(text))
        except (CheckFailed, ImpossibleRate) as error:
            record.problems.append(f"{benchmark.name}: {error}")
            record.wrong = True
            print(indent(str(error)))
        except Exception as error:
            record.problems.append(f"{benchmark.name}: {type(error).__name__}: {error}")
            record.wrong = True
            print(indent(short_traceback(error)))
