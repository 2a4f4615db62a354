"""What a launch gets in place of its tensors: copies between guard zones, and outputs with other strides.

A kernel on the CPU that writes beyond a tensor would end the process, or damage a result that is read much later.
Between guard zones it is found at once. Copies keep the strides and the alignment of their originals, and tensors that
share memory share it in the copy. What a kernel has changed is copied back.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from common.build import Arguments, Kernels, observing
from common.check.compare import CheckFailed
from common.check.poison import GUARD, hide_
from common.paths import ROOT

ZONE = 16 << 10  # bytes before and after
LARGEST = 64 << 20  # bytes of a storage; a larger one is used as it is
_LINE = 256  # a copy begins where its original does within so many bytes


@contextmanager
def guarded() -> Iterator[None]:
    """A context in which launches on the CPU get tensors between guard zones.

    A launch then raises CheckFailed if its kernels have written into one.
    """
    with observing(_launch):
        yield


def _launch(kernels: Kernels, name: str, arguments: Arguments, launch: Any) -> None:
    tensors = {n: t for n, t in arguments.items() if isinstance(t, Tensor)}
    if any(t.device.type != "cpu" for t in tensors.values()):
        return launch(arguments)
    with _disable_current_modes():
        copies: dict[int, _Copy] = {}
        changed = dict(arguments)
        for n, t in tensors.items():
            storage = t.untyped_storage()
            if not 0 < storage.nbytes() <= LARGEST:
                continue
            if storage._cdata not in copies:
                copies[storage._cdata] = _Copy(storage)
            copies[storage._cdata].names.append(n)
            changed[n] = copies[storage._cdata].of(t)
        launch(changed)
        problems = [problem for copy in copies.values() if (problem := copy.finish())]
    if problems:
        source = kernels.source
        path = source.relative_to(ROOT) if source.is_relative_to(ROOT) else source
        raise CheckFailed(
            f"{path}: {name} wrote outside of its tensors: {'; '.join(problems)}."
            " --check on the CPU names the line"
        )


class _Copy:
    """A storage's bytes between two zones."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.names: list[str] = []
        self._original = torch.empty(0, dtype=torch.uint8).set_(storage)
        size = storage.nbytes()
        words = torch.full(((2 * ZONE + size) // 2 + _LINE,), GUARD, dtype=torch.int16)
        buffer = words.view(torch.uint8)
        # where the copy begins, so that its alignment is the original's
        self._begin = ZONE + (storage.data_ptr() - buffer.data_ptr() - ZONE) % _LINE
        self._buffer = buffer
        self._inside = buffer[self._begin : self._begin + size]
        self._inside.copy_(self._original)
        end = self._begin + size
        self._zones = buffer[: self._begin], buffer[end : end + ZONE]
        self._clean = [zone.clone() for zone in self._zones]

    def of(self, t: Tensor) -> Tensor:
        """The same tensor in the copy."""
        offset = self._begin // t.element_size() + t.storage_offset()
        flat = torch.empty(0, dtype=t.dtype)
        return flat.set_(self._buffer.untyped_storage(), offset, t.shape, t.stride())

    def finish(self) -> str | None:
        """Copy back; what is wrong with the zones."""
        self._original.copy_(self._inside)
        before, after = (
            (zone != clean).nonzero() for zone, clean in zip(self._zones, self._clean, strict=True)
        )
        names = " and ".join(f"'{name}'" for name in self.names)
        if len(after):
            return f"{len(after)} bytes after the end of {names}, the first {int(after[0])} bytes behind it"
        if len(before):
            gap = self._begin - int(before[0])
            return f"{len(before)} bytes before the start of {names}, the first {gap} bytes ahead of it"
        return None


@contextmanager
def strided_output(name: str) -> Iterator[None]:
    """A context in which launches get the tensor of this name with gaps between its rows, heads and sequences.

    The functions of the tasks allocate contiguous outputs, but their launchers take any strides.
    """

    def launch_strided(kernels: Kernels, launcher: str, arguments: Arguments, launch: Any) -> None:
        out = arguments[name]
        with _disable_current_modes():
            order = sorted(range(out.dim()), key=out.stride, reverse=True)  # as they are in memory
            sizes = [out.shape[d] + i + 1 for i, d in enumerate(order)]
            wide = hide_(torch.empty(sizes, dtype=out.dtype, device=out.device))
            for i, d in enumerate(order):
                wide = wide.narrow(i, 0, out.shape[d])
            view = wide.permute([order.index(d) for d in range(out.dim())])
            view.copy_(out)
            launch(arguments | {name: view})
            out.copy_(view)

    with observing(launch_strided):
        yield
