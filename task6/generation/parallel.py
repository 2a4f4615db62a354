"""Tensor parallelism: each process has some heads and some columns of the MLP. [Megatron] arXiv:1909.08053, section 3.

A layer then has two sums over the processes, one behind attention and one behind the MLP. The processes are PyTorch's:
``torchrun --nproc-per-node 2 -m task6.generation``, with NCCL on GPUs and gloo on CPUs.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT = timedelta(seconds=40)  # after which a process that waits for another one gives up
_LOST = re.compile(r"connection|timed? ?out|broken pipe|socket", re.IGNORECASE)


class LostProcess(RuntimeError):
    """Another process of the group has ended, or no longer answers."""


class Group:
    """The processes that share a model; alone if there is one.

    Attributes:
        rank, world: this process's number, and how many there are.
    """

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.rank, self.world = rank, world

    def sum(self, x: Tensor) -> Tensor:
        """x, in place, of all processes.

        Raises:
            LostProcess: another one has ended.
        """
        if self.world > 1:
            with _lost(self):
                dist.all_reduce(x)
        return x

    def best(self, logits: Tensor, out: Tensor) -> None:
        """The index of each row's largest logit, of equals the first, where each process has a part of the columns.

        Args:
            logits: ``(batch, vocab / world)``.
            out: int64 ``(batch, 1)``.

        Raises:
            LostProcess: another process has ended.
        """
        if self.world == 1:
            torch.argmax(logits, dim=-1, keepdim=True, out=out)
            return
        value, index = logits.float().max(-1)
        index += self.rank * logits.shape[1]
        values, indices = (t.new_empty(self.world, *t.shape) for t in (value, index))
        with _lost(self):
            dist.all_gather(list(values), value)
            dist.all_gather(list(indices), index)
        first = values.argmax(0, keepdim=True)
        out.copy_(indices.gather(0, first).T)


@contextmanager
def processes(device: torch.device) -> Iterator[Group]:
    """The group that torchrun has started, or this process alone.

    Raises:
        LostProcess: the others do not come.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Group()
        return
    group = Group(int(os.environ["RANK"]), world)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with _lost(group):
        dist.init_process_group(backend, timeout=TIMEOUT)
    try:
        yield group
    finally:
        dist.destroy_process_group()


@contextmanager
def _lost(group: Group) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # gloo has no type of its own for a lost connection
        if not isinstance(error, dist.DistError) and not _LOST.search(str(error)):
            raise
        reason = str(error).strip().splitlines()[0][:160]
        raise LostProcess(
            f"process {group.rank} of {group.world} has lost another one, which has ended or did not answer within"
            f" {TIMEOUT.seconds} s ({reason})"
        ) from error
