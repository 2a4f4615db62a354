"""A suite: the checks of one stage, each over cases, and what is timed after them."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from common.check import script
from common.check.case import Case, Check, CheckFunction, Item
from common.record import WORTH, Record, Stage, Worth


@dataclass(frozen=True)
class BenchmarkFunction:
    """What is timed or generated after the checks, and the names of the benchmarks that it adds."""

    name: str
    function: Callable[[torch.device, Record], None]
    devices: tuple[str, ...]
    fields: tuple[str, ...]


class Suite:
    """The checks and benchmarks of one stage.

    Args:
        name, title: see :class:`common.record.Stage`. What it is worth stands in ``common/record/points.toml``.
        sources: see there; a message about what is not written yet names the first ``.cu`` or the first ``.py``.
    """

    def __init__(self, name: str, *, title: str, sources: Sequence[str] = ()) -> None:
        self.stage = Stage(name, title, WORTH.get(name, Worth(0)), tuple(sources))
        self.checks: list[Check] = []
        self.benchmarks: list[BenchmarkFunction] = []

    def check(
        self,
        group: str,
        cases: Sequence[Case],
        *,
        kernels: bool = True,
        optional: bool = False,
        given: bool = False,
    ) -> Callable[[CheckFunction], CheckFunction]:
        """Register ``f(case, device, rng)``, which raises if something is wrong.

        ``group`` is also its flag, ``--group``; several checks may share one. ``kernels=False`` is for checks that
        run no kernel of ours: they are not run in the check build. An ``optional`` group does not count while it is
        not written; once it is, it has to be right. A group of ``given`` checks, which pass before anything is written,
        earns nothing.
        """
        names = [case.name for case in cases]
        if len(set(names)) != len(names):
            raise ValueError(f"two cases of {group} have the same name: {names}")

        def register(function: CheckFunction) -> CheckFunction:
            if any(check.name == function.__name__ for check in self.checks):
                raise ValueError(f"{self.stage.name} has two checks named {function.__name__}")
            self.checks.append(Check(group, function, tuple(cases), kernels, optional, given))
            return function

        return register

    def benchmark(
        self, name: str, *, devices: Sequence[str] = ("cuda",), fields: Sequence[str] = ()
    ) -> Callable[[Callable[[torch.device, Record], None]], Callable[[torch.device, Record], None]]:
        """Register ``f(device, record)``, which the script runs after all checks have passed.

        ``fields`` names the benchmarks that it will add to the record, so that Results.md can list what has not been
        measured yet. Texts need no field.
        """

        def register(function: Callable[[torch.device, Record], None]) -> Any:
            found = BenchmarkFunction(name, function, tuple(devices), tuple(fields))
            self.benchmarks.append(found)
            return function

        return register

    @property
    def groups(self) -> list[str]:
        """The groups of checks, in the order of their first check."""
        return list(dict.fromkeys(check.group for check in self.checks))

    def items(self, targets: Sequence[str], *, small: bool = False) -> Iterator[Item]:
        """Every case of every check on these targets; ``small``: only the small cases."""
        for check in self.checks:
            for target in targets:
                if target == "cpu-check" and not check.kernels:
                    continue
                for case in check.cases:
                    if target.removesuffix("-check") not in case.devices:
                        continue
                    if case.small or not (small or target == "cpu-check"):
                        yield Item(self.stage, check, case, target)

    @property
    def fields(self) -> list[str]:
        """The names of all benchmarks."""
        return [field for benchmark in self.benchmarks for field in benchmark.fields]

    def pytest(self) -> FunctionType:
        """A test function for pytest, one test per item; the items come from common/check/pytest_plugin.py."""

        def test(item: Item, run_item: Callable[[Item], None]) -> None:
            run_item(item)

        test.suite = self  # type: ignore[attr-defined]
        return test  # type: ignore[return-value]

    def main(self, argv: Sequence[str] | None = None) -> None:
        """The command ``python -m taskN.test``; ends the process with its exit status."""
        sys.exit(script.main(self, argv))
