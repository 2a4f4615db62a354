"""``python -m taskN.test``: the script side of a Suite."""

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from common.check.compare import CheckFailed
from common.check.failure import (
    Failure,
    describe_out_of_memory,
    failure_of,
    indent,
    short_traceback,
)
from common.check.record import Report
from common.check.rng import new_seed
from common.check.suite import CHECK_SETTINGS, Item, Suite, device_of
from common.memory import NotEnoughMemory

SHOWN = 3  # failures of a group that are told in full
INTERRUPTED = 130


@dataclass
class GroupResult:
    """How one group of checks went."""

    name: str
    passed: int = 0
    total: int = 0
    seconds: float = 0.0
    failures: list[Failure] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.passed == self.total

    @property
    def status(self) -> str:
        """One of: passed, not written, did not build, not run, failed."""
        if self.ok:
            return "passed"
        if not self.failures:
            return "not run"
        kinds = {failure.kind for failure in self.failures}
        words = {"not written": "not written", "build": "did not build"}
        return words.get(kinds.pop(), "failed") if len(kinds) == 1 else "failed"


def main(suite: Suite, argv: Sequence[str] | None = None) -> int:
    """Run the suite as the command line says; the exit status."""
    options = _parse(suite, argv)
    try:
        return _run(suite, options)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED


def _parse(suite: Suite, argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {suite.name}.test", description=suite.title)
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
    parser.add_argument("--seed", type=int, help="random inputs of an earlier run")
    parser.add_argument("--no-timing", action="store_true", help="checks only")
    parser.add_argument("--report", type=Path, metavar="FILE.json", help="write the results there")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no GPU here")
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options.seed = new_seed() if options.seed is None else options.seed
    options.complete = options.groups is None and not options.check
    options.groups = options.groups or suite.groups
    return options


def _run(suite: Suite, options: argparse.Namespace) -> int:
    report = Report(suite, device=options.device, seed=options.seed, complete=options.complete)
    if options.report:
        report.write(options.report)  # says "crashed" until the end replaces it
    print(f"{suite.name}: {suite.title} ({options.device}, --seed {options.seed})", flush=True)
    target = "cpu-check" if options.check and options.device == "cpu" else options.device
    if target == "cpu-check":
        ways = ", ".join(
            f"{o}{' with eager copies' if eager else ''}" for o, eager in CHECK_SETTINGS
        )
        print(f"check build, small cases, each in {len(CHECK_SETTINGS)} orders of threads: {ways}")
    elif options.check:
        print("small cases only")
    items = list(suite.items([target], small=options.check))
    if options.check and not items:
        print("no kernels here: nothing for the check build to do")
    results = _run_groups(suite, options, items)
    report.groups = results
    if all(result.ok for result in results):
        _measure(suite, options, report)
    if options.report:
        report.finish()
        report.write(options.report)
    return 0 if report.ok else 1


def _run_groups(suite: Suite, options: argparse.Namespace, items: list[Item]) -> list[GroupResult]:
    results: list[GroupResult] = []
    stopped = False  # nothing after a failed build or a lost GPU can tell us more
    width = max((len(group) for group in options.groups), default=0)
    for group in options.groups:
        result = GroupResult(group)
        mine = [item for item in items if item.check.group == group]
        if not mine and options.check:
            continue
        result.total = len(mine)
        results.append(result)
        if stopped:
            print(f"  {group:<{width}}  not run")
            continue
        start = time.perf_counter()
        with progress(group) as show:
            for number, item in enumerate(mine):
                show(f"{group}: {item.case.name} ({number} of {len(mine)})")
                failure = _attempt(item, options.seed, rerun=len(result.failures) < SHOWN)
                if failure is None:
                    result.passed += 1
                    continue
                result.failures.append(failure)
                if failure.kind == "build" or _gpu_is_lost(item):
                    stopped = True
                    break
        result.seconds = time.perf_counter() - start
        _print_group(result, width)
        if result.status == "not written" and all(item.check.optional for item in mine):
            print("    this part is optional: it counts once it is written")
            results.remove(result)
    return results


def _attempt(item: Item, seed: int, rerun: bool) -> Failure | None:
    try:
        item.run(seed)
    except Exception as error:
        return failure_of(error, item, seed, rerun=rerun)
    return None


def _gpu_is_lost(item: Item) -> bool:
    """After an illegal access every call of the process fails; synchronise says so."""
    if item.target != "cuda":
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        print(
            "  the GPU refuses further work in this process after that error; the rest is not run"
        )
        return True
    return False


def _print_group(result: GroupResult, width: int) -> None:
    mark = "" if result.ok else f"  {result.status}"
    print(
        f"  {result.name:<{width}}  {result.passed:3} of {result.total:<3} {result.seconds:6.1f} s{mark}",
        flush=True,
    )
    told = list(dict.fromkeys(failure.text for failure in result.failures))
    for text in told[:SHOWN]:
        print(indent(text))
    if len(told) > SHOWN:
        print(f"    and {len(told) - SHOWN} more")


def _measure(suite: Suite, options: argparse.Namespace, report: Report) -> None:
    if not suite.measurements or options.no_timing or not options.complete:
        return
    device = device_of(options.device)
    if device.type == "cuda" and any(measurement.fields for measurement in suite.measurements):
        report.note_ceilings()  # first, while there is memory for it
    for measurement in suite.measurements:
        if options.device not in measurement.devices:
            print(f"  {measurement.name}: needs a GPU")
            continue
        print(f"  {measurement.name}", flush=True)
        try:
            report.allowed = measurement.fields
            measurement.function(device, report)
        except (torch.cuda.OutOfMemoryError, NotEnoughMemory) as error:
            text = describe_out_of_memory(error, device)
            report.problems.append(f"{measurement.name}: {text}")
            print(indent(text))
        except CheckFailed as error:
            report.problems.append(f"{measurement.name}: {error}")
            report.wrong_measurement = True
            print(indent(str(error)))
        except Exception as error:
            report.problems.append(f"{measurement.name}: {type(error).__name__}: {error}")
            report.wrong_measurement = True
            print(indent(short_traceback(error)))


def progress(what: str) -> AbstractContextManager[Any]:
    """A line that says what runs now, on a terminal; nothing where the output goes to a file."""
    if not sys.stdout.isatty():
        return nullcontext(lambda text: None)
    from rich.console import Console

    return _Spinner(Console(), what)


class _Spinner:
    def __init__(self, console: Any, what: str) -> None:
        self._status = console.status(what)

    def __enter__(self) -> Any:
        self._status.start()
        return lambda text: self._status.update(text)

    def __exit__(self, *error: object) -> None:
        self._status.stop()
