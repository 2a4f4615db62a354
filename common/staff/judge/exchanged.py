"""Launchers of ours with the device code of another file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from common.build import Kernels, builder
from common.build.call import caller_target


class Exchanged(Kernels):
    """The launchers and queries of one .cu of ours, from a library that is built already.

    Args:
        source: the .cu.
        library: what :func:`common.staff.judge.device_code.plan` has built.
    """

    def __init__(self, source: Path, library: Path) -> None:
        super().__init__(str(source), source.name)
        self._path = library

    def _library(self, device: Any, check: bool) -> Path:
        builder.make([caller_target(export) for export in self._exports.values()])
        return self._path


@contextmanager
def used_by(module: Any, kernels: Kernels) -> Iterator[None]:
    """A context in which the functions of a task's module launch these kernels."""
    with mock.patch.object(module, "_kernels", kernels):
        yield
