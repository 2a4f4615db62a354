"""A stage's checks as data: a suite of checks, each over cases, each on the machines that are there."""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from common.check.poison import poisoned
from common.check.rng import Rng

ROOT = Path(__file__).resolve().parents[2]

# How the check build runs a case: order of a block's threads, and whether async copies land at
# once. Late copies show a missing wait, eager ones a buffer that is overwritten while it is still
# read; the orders show what only worked because thread 0 happens to run first.
CHECK_SETTINGS = (("forward", False), ("reverse", True), ("random", False), ("random", True))

CheckFunction = Callable[["Case", torch.device, Rng], None]


class Case:
    """One input of a check, as data. Every keyword becomes an attribute.

    Args:
        name: a few words, unique in its list.
        why: the reason that this case exists.
        small: quick enough for the check build, which is hundreds of times slower.
        devices: where it runs; sizes for a GPU alone say ``("cuda",)``.
    """

    def __init__(
        self,
        name: str,
        *,
        why: str,
        small: bool = False,
        devices: Sequence[str] = ("cpu", "cuda"),
        **values: Any,
    ) -> None:
        self.name, self.why, self.small, self.devices = name, why, small, tuple(devices)
        self.values = values

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["values"][name]
        except KeyError:
            raise AttributeError(f"case {self.__dict__.get('name')!r} has no {name!r}") from None

    def __repr__(self) -> str:
        values = ", ".join(f"{k}={v}" for k, v in self.values.items())
        return f"Case({self.name!r}, {values})"


@dataclass(frozen=True)
class Check:
    """A check function with its cases; ``group`` is its flag on the command line."""

    group: str
    function: CheckFunction
    cases: tuple[Case, ...]
    kernels: bool
    optional: bool

    @property
    def name(self) -> str:
        return self.function.__name__


@dataclass(frozen=True)
class Measurement:
    """What is timed or generated after the checks; ``fields`` are the names that it promises to report."""

    name: str
    function: Callable[[torch.device, Any], None]
    devices: tuple[str, ...]
    fields: tuple[str, ...]


@dataclass(frozen=True)
class Item:
    """One case of one check on one target: "cpu", "cpu-check" (the check build) or "cuda"."""

    suite: "Suite"
    check: Check
    case: Case
    target: str

    @property
    def id(self) -> str:
        """The name that pytest shows."""
        case = re.sub(r"[^\w.=+-]+", "_", self.case.name)
        return f"{self.check.name}-{case}-{self.target}"

    @property
    def device(self) -> torch.device:
        return device_of(self.target.removesuffix("-check"))

    def run(self, seed: int) -> None:
        """Run it; whatever is wrong comes out as an exception, with a note that says under what setting."""
        if self.target != "cpu-check":
            self._run_once(seed)
            return
        from common.build import using

        for number, (order, eager) in enumerate(CHECK_SETTINGS):
            with using(check=True, order=order, seed=seed + number, eager_copies=eager):
                try:
                    self._run_once(seed)
                except Exception as error:
                    error.add_note(
                        f"in the check build: threads of a block in {order} order, async copies"
                        f" {'landing at once' if eager else 'landing at the wait'}"
                    )
                    raise

    def _run_once(self, seed: int) -> None:
        with ExitStack() as stack:
            stack.enter_context(poisoned())
            if self.target == "cuda":
                stack.enter_context(torch.cuda.device(self.device))
            rng = Rng(seed, self.device, self.suite.name, self.check.name, self.case.name)
            self.check.function(self.case, self.device, rng)
            if self.target == "cuda":
                torch.cuda.synchronize()  # an error of an asynchronous kernel belongs to this case


class Suite:
    """The checks and measurements of one stage.

    Args:
        name: the stage's folder, "task2".
        title: what it is, for people.
        points: what the stage is worth.
        sources: files that decide its result (glob patterns from the repository's root); the first ``.cu`` and
            the first ``.py`` are named when something is not written yet. A figure in Results.md is marked
            stale when one of these, or a header in common/include, has changed since it was measured.
    """

    def __init__(
        self, name: str, *, title: str, points: float, sources: Sequence[str] = ()
    ) -> None:
        self.name, self.title, self.points, self.sources = name, title, points, tuple(sources)
        self.checks: list[Check] = []
        self.measurements: list[Measurement] = []

    def check(
        self, group: str, cases: Sequence[Case], *, kernels: bool = True, optional: bool = False
    ) -> Callable[[CheckFunction], CheckFunction]:
        """Register ``f(case, device, rng)``, which raises if something is wrong.

        ``group`` gives the flag ``--group``; several checks may share one. ``kernels=False`` is for checks that
        run no kernel of ours: the check build is not asked for. An ``optional`` group does not count while it is
        not written; once it is, it has to be right.
        """
        names = [case.name for case in cases]
        if len(set(names)) != len(names):
            raise ValueError(f"two cases of {group} have the same name: {names}")

        def register(function: CheckFunction) -> CheckFunction:
            if any(check.name == function.__name__ for check in self.checks):
                raise ValueError(f"{self.name} has two checks named {function.__name__}")
            self.checks.append(Check(group, function, tuple(cases), kernels, optional))
            return function

        return register

    def measurement(
        self, name: str, *, devices: Sequence[str] = ("cuda",), fields: Sequence[str] = ()
    ) -> Callable[[Callable[[torch.device, Any], None]], Callable[[torch.device, Any], None]]:
        """Register ``f(device, report)``: run by the script, and only after all checks have passed.

        ``fields`` are the names of the Speeds that it will add, so that Results.md can show what is to be
        measured before it was. Texts need no field.
        """

        def register(function: Callable[[torch.device, Any], None]) -> Any:
            self.measurements.append(Measurement(name, function, tuple(devices), tuple(fields)))
            return function

        return register

    @property
    def groups(self) -> list[str]:
        """In the order of their first check."""
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
                        yield Item(self, check, case, target)

    def pytest(self) -> FunctionType:
        """A test function, one test for each item; common/check/pytest_plugin.py hands it its items."""

        def test(item: Item, check_seed: int) -> None:
            from common.check.pytest_plugin import run_item

            run_item(item, check_seed)

        test.suite = self  # type: ignore[attr-defined]
        return test  # type: ignore[return-value]

    def main(self, argv: Sequence[str] | None = None) -> None:
        """The script side, ``python -m taskN.test``; ends the process with its status."""
        from common.check.script import main

        sys.exit(main(self, argv))


def device_of(kind: str) -> torch.device:
    """The device of a kind; cuda with its index, so that it equals the device of a tensor made there."""
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def default_targets() -> list[str]:
    """What pytest runs here."""
    return ["cpu", "cpu-check"] + (["cuda"] if torch.cuda.is_available() else [])
