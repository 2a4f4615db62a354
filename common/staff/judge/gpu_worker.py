"""The process that runs a student's kernels on a GPU: their device code, and of host code only ours.

It is forked in the whole course, answers included: nothing in it was written by a student, but for what the GPU runs.
"""

from pathlib import Path

import torch
from torch import Tensor

from common.build import Kernels
from common.paths import ROOT
from common.staff.judge import speed, worker
from common.staff.judge.exchanged import Exchanged

WHOLE = 1 << 30  # bytes up to which all memory around the tensors is taken to the GPU, and back

_kernels: dict[str, Kernels] = {}


def main(fd: int) -> None:
    """Answer requests until the connection closes."""
    worker.serve(fd, {"launch": _launch, "query": _query, "speed": _speed})


def _of(source: str, library: str) -> Kernels:
    own = Kernels(str(ROOT / source), Path(source).name)
    return _kernels.setdefault(source, Exchanged(own.source, Path(library)) if library else own)


def _launch(answer: dict, source: str, library: str, name: str, arguments: dict) -> None:
    kernels = _of(source, library)
    tensors = {n: t for n, t in arguments.items() if isinstance(t, Tensor)}
    here = _Here(list(tensors.values()))
    moved = dict(zip(tensors, here.tensors, strict=True))
    kernels.launch(name, **arguments | moved)
    torch.cuda.synchronize()
    here.take_back()
    answer["launched"] = [name]  # our launcher did it


def _query(answer: dict, source: str, library: str, name: str, arguments: dict) -> int:
    return _of(source, library).query(name, _gpu(), **arguments)


def _speed(answer: dict, source: str, library: str, seed: int) -> None:
    answer["speed"] = speed.measured(source.partition("/")[0], Path(library), seed)


def _gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


class _Here:
    """Tensors on the GPU that lie in its memory as the given ones lie in theirs, which all have one storage."""

    def __init__(self, given: list[Tensor]) -> None:
        storage = given[0].untyped_storage()
        memory = torch.empty(storage.nbytes(), dtype=torch.uint8, device=_gpu()).untyped_storage()
        self.tensors = [
            torch.empty(0, dtype=t.dtype, device=_gpu()).set_(
                memory, t.storage_offset(), t.shape, t.stride()
            )
            for t in given
        ]
        self._pairs = list(zip(given, self.tensors, strict=True))
        if storage.nbytes() <= WHOLE:
            whole = (torch.empty(0, dtype=torch.uint8, device=s.device) for s in (storage, memory))
            self._pairs = [tuple(w.set_(s) for w, s in zip(whole, (storage, memory), strict=True))]
        for theirs, ours in self._pairs:
            ours.copy_(theirs)

    def take_back(self) -> None:
        for theirs, ours in self._pairs:
            theirs.copy_(ours)
