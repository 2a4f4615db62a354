"""A stage's checks as data: cases, the checks that take them, and the items of a run."""

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from common.build import using
from common.check.guards import guarded
from common.check.poison import poisoned
from common.check.rng import Rng
from common.check.time_limit import time_limit
from common.record import Stage

# How the check build runs a case: the order of a block's threads, and whether async copies land at once. Late copies
# show a missing wait, eager ones a buffer that is overwritten while it is still read; the orders show what works only
# because thread 0 happens to run first.
CHECK_SETTINGS = (("forward", False), ("reverse", True), ("random", False), ("random", True))

LIMIT = 30.0  # seconds for a case on the CPU

CheckFunction = Callable[["Case", torch.device, Rng], None]


class Case:
    """One input of a check, as data. Every keyword becomes an attribute.

    Args:
        name: a few words, unique in its list.
        why: the reason that this case exists.
        small: fast enough for the check build, which is hundreds of times slower.
        devices: where it runs; ``("cuda",)`` for sizes that only a GPU can do.
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
        return f"{type(self).__name__}({self.name!r}, {values})"


@dataclass(frozen=True)
class Check:
    """A check function with its cases; ``group`` is its flag on the command line."""

    group: str
    function: CheckFunction
    cases: tuple[Case, ...]
    kernels: bool
    optional: bool
    given: bool

    @property
    def name(self) -> str:
        return self.function.__name__


@dataclass(frozen=True)
class Item:
    """One case of one check on one target: "cpu", "cpu-check" (the check build) or "cuda"."""

    stage: Stage
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

    def run(self, seed: int, limit: float = LIMIT) -> None:
        """Run it; raises whatever is wrong, with a note that names the setting of the check build.

        Args:
            seed: of the random inputs.
            limit: seconds, on the CPU, after which it has failed; in the check build for each setting.
        """
        if self.target == "cuda":
            self._run_once(seed)
            return
        if (
            self.check.kernels
        ):  # PyTorch imports it at their first launch, for seconds: not within the limit
            import torch._dynamo  # noqa: F401
        if self.target == "cpu":
            with using(limit=limit), time_limit(limit):
                self._run_once(seed)
            return
        for number, (order, eager) in enumerate(CHECK_SETTINGS):
            setting = dict(check=True, order=order, seed=seed + number, eager_copies=eager)
            with using(**setting, limit=limit):
                try:
                    with time_limit(limit):
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
            elif self.target == "cpu" and self.check.kernels:
                stack.enter_context(guarded())
            rng = Rng(seed, self.device, self.stage.name, self.check.name, self.case.name)
            self.check.function(self.case, self.device, rng)
            if self.target == "cuda":
                torch.cuda.synchronize()  # an error of an asynchronous kernel belongs to this case


def device_of(name: str) -> torch.device:
    """The device of that name; cuda with its index, so that it equals the device of a tensor allocated there."""
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def default_targets() -> list[str]:
    """What pytest runs here."""
    return ["cpu", "cpu-check"] + (["cuda"] if torch.cuda.is_available() else [])
