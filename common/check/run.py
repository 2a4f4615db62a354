"""Running a suite's items, group after group, and saying how each group went."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from common.check.case import LIMIT, Item
from common.check.failure import Failure, failure_of, indent
from common.check.progress import progress

SHOWN = 3  # failures of a group that are shown in full, if not all are asked for


@dataclass
class GroupResult:
    """How one group of checks went."""

    name: str
    passed: int = 0
    total: int = 0
    seconds: float = 0.0
    failures: list[Failure] = field(default_factory=list)
    given: bool = False  # its checks pass before anything is written: it earns nothing

    @property
    def status(self) -> str:
        """One of: passed, not written, did not build, not run, failed."""
        if self.passed == self.total:
            return "passed"
        if not self.failures:
            return "not run"
        categories = {failure.category for failure in self.failures}
        words = {"not written": "not written", "build": "did not build"}
        return words.get(categories.pop(), "failed") if len(categories) == 1 else "failed"

    def as_record(self) -> dict[str, Any]:
        """As JSON, with the first failures' texts."""
        return {
            "name": self.name,
            "passed": self.passed,
            "total": self.total,
            "seconds": round(self.seconds, 2),
            "status": self.status,
            "given": self.given,
            # Only there: the ordinary build gives right results, as for most races.
            "only_check_build": bool(self.failures)
            and all(failure.target == "cpu-check" for failure in self.failures),
            "failures": [failure.text for failure in self.failures[:SHOWN]],
        }


def run_groups(
    groups: Mapping[str, Sequence[Item]], seed: int, *, shown: int = SHOWN, limit: float = LIMIT
) -> list[GroupResult]:
    """Run the items of each group and print how it went, with at most ``shown`` failures of each.

    ``limit``: seconds for an item on the CPU.

    After a failed build, or an error that leaves the GPU unusable, nothing more is run. An optional group that is not
    written yet is not among the results.
    """
    results: list[GroupResult] = []
    width = max(map(len, groups), default=0)
    lost = False
    for group, items in groups.items():
        given = bool(items) and all(item.check.given for item in items)
        result = GroupResult(group, total=len(items), given=given)
        if lost:
            print(f"  {group:<{width}}  not run")
        else:
            lost = _run_group(result, items, seed, shown, limit)
            _print_group(result, width, shown)
        if result.status == "not written" and all(item.check.optional for item in items):
            print("    this part is optional: it counts once it is written")
        else:
            results.append(result)
    return results


def _run_group(
    result: GroupResult, items: Sequence[Item], seed: int, shown: int, limit: float
) -> bool:
    """Run a group's items; True if nothing after it can be run."""
    start = time.perf_counter()
    lost = False
    with progress() as bar:
        task = bar.add_task(result.name, total=len(items))
        for item in items:
            bar.update(task, description=f"{result.name}: {item.case.name}")
            failure = _attempt(item, seed, limit, rerun=len(result.failures) < shown)
            bar.advance(task)
            if failure is None:
                result.passed += 1
                continue
            result.failures.append(failure)
            if lost := failure.category == "build" or _gpu_is_lost(item):
                break
    result.seconds = time.perf_counter() - start
    return lost


def _attempt(item: Item, seed: int, limit: float, rerun: bool) -> Failure | None:
    try:
        item.run(seed, limit)
    except Exception as error:
        return replace(failure_of(error, item, seed, rerun=rerun), target=item.target)
    return None


def _gpu_is_lost(item: Item) -> bool:
    """After an illegal access every call of the process fails; synchronise says so."""
    if item.target != "cuda":
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        print(
            "  after that error the GPU accepts no more work from this process; the rest is not run"
        )
        return True
    return False


def _print_group(result: GroupResult, width: int, shown: int) -> None:
    mark = "" if result.status == "passed" else f"  {result.status}"
    print(
        f"  {result.name:<{width}}  {result.passed:3} of {result.total:<3} {result.seconds:6.1f} s{mark}",
        flush=True,
    )
    alike: dict[str, list[str]] = {}
    for failure in result.failures:
        alike.setdefault(failure.mistake or failure.text, []).append(failure.text)
    for texts in list(alike.values())[:shown]:
        print(indent(texts[0]))
        if more := len(set(texts)) - 1:
            print(f"        the same in {more} more")
    if len(alike) > shown:
        print(f"    and {len(alike) - shown} more (--all shows them)")
