"""Tensor parallelism: each process has some heads and some columns of the MLP. [Megatron] arXiv:1909.08053, section 3.

A layer then has two sums over the processes, one behind attention and one behind the MLP. The processes are PyTorch's:
``torchrun --nproc-per-node 2 -m task6.generation``, with NCCL on GPUs and gloo on CPUs.
"""

import math
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

TIMEOUT = timedelta(seconds=40)  # after which a process that waits for another one gives up
MEETING = 50.0  # seconds that the processes have to find each other: PyTorch's own limit does not hold for all waits
LONGEST_SUM = timedelta(minutes=10)  # with NCCL, where a heartbeat finds lost processes
SMALL = 1 << 20  # bytes of a sum that each GPU reads from the others' memory itself
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
        self._shared: Tensor | None = None  # bytes that the other GPUs can read
        self._handles: list[object] = []  # of memory that the other GPUs can write to

    @property
    def shares_memory(self) -> bool:
        """Whether each GPU reaches the others' memory, as :meth:`share_memory` found."""
        return self._shared is not None

    def share_memory(self) -> None:
        """Small sums without NCCL from now on, where GPUs read each other's memory: a launch of some microseconds."""
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # is of no use for small sums
        for step in (self._allocate, self._try_out):
            try:
                done = step()
            except RuntimeError:
                done = False
            if not self._all(done):  # NCCL has other ways
                self._shared = None
                return

    def _allocate(self) -> bool:
        import torch.distributed._symmetric_memory as symmetric_memory  # of GPUs alone

        memory = symmetric_memory.empty(SMALL, dtype=torch.uint8, device="cuda")
        symmetric_memory.rendezvous(memory, dist.group.WORLD.group_name)
        self._shared = memory
        return True

    def _try_out(self) -> bool:
        """Whether a sum comes out right, by itself and in a CUDA graph."""
        x, graph = torch.ones(4, 16, device="cuda"), torch.cuda.CUDAGraph()
        self.sum(x)
        with torch.cuda.graph(graph):
            self.sum(x)
        graph.replay()
        return bool((x == self.world**2).all())

    def inboxes(self, words: int, device: torch.device) -> list[Tensor]:
        """Of each process, by rank, memory that all can write to: int64 ``(words,)``, 0. None for one process.

        Args:
            words: how many, the same in all processes.
            device: a GPU that the others reach, or the CPU of one host.

        Raises:
            ValueError: the GPUs have no way to each other's memory.
            LostProcess: another process has ended.
        """
        if self.world == 1:
            return []
        with _lost(self):
            if device.type == "cpu":
                return self._in_files(words)
            import torch.distributed._symmetric_memory as symmetric_memory  # of GPUs alone

            inboxes = []
            with suppress(RuntimeError):
                own = symmetric_memory.empty(words, dtype=torch.int64, device=device).zero_()
                handle = symmetric_memory.rendezvous(own, dist.group.WORLD.group_name)
                self._handles.append(handle)
                inboxes = [
                    own if rank == self.rank else handle.get_buffer(rank, (words,), torch.int64)
                    for rank in range(self.world)
                ]
            if not self._all(bool(inboxes)):  # and all are 0
                raise ValueError("the GPUs cannot write to each other's memory")
            return inboxes

    def _in_files(self, words: int) -> list[Tensor]:
        folder = [tempfile.mkdtemp(prefix="inboxes-") if self.rank == 0 else None]
        dist.broadcast_object_list(folder)
        paths = [os.path.join(folder[0], str(rank)) for rank in range(self.world)]
        inboxes = [torch.from_file(p, shared=True, size=words, dtype=torch.int64) for p in paths]
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(folder[0])  # the memory stays as long as a process has it mapped
        return inboxes

    @staticmethod
    def _all(done: bool) -> bool:
        """Whether all processes have done it."""
        number = torch.tensor(int(done), device="cuda")
        dist.all_reduce(number, op=dist.ReduceOp.MIN)
        return bool(number)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all processes' x, in x: of any shape, of one dtype in all of them.

        Raises:
            LostProcess: another one has ended.
        """
        if self.world == 1:
            return x
        if self._shared is not None and self._is_small(x):
            part, flat = self._shared[: x.nbytes].view(x.dtype), x.view(-1)
            name = dist.group.WORLD.group_name
            torch.ops.symm_mem.one_shot_all_reduce_copy_out(part, flat, "sum", name, flat)
            return x
        with _lost(self):
            dist.all_reduce(x)
        return x

    @staticmethod
    def _is_small(x: Tensor) -> bool:
        fits = x.nbytes <= SMALL and x.nbytes % 16 == 0 and x.data_ptr() % 16 == 0
        return fits and x.is_contiguous() and x.dtype in (torch.float32, torch.bfloat16)

    def best(self, logits: Tensor, out: Tensor) -> None:
        """The index of each row's largest logit, of equals the first, where each process has a part of the columns.

        Args:
            logits: ``(batch, vocab / world)``.
            out: int64 ``(batch, 1)``.

        Raises:
            LostProcess: another process has ended.
        """
        if self.world == 1:
            _argmax(logits, out)
            return
        value, index = logits.float().max(-1)
        index += self.rank * logits.shape[1]
        values, indices = (t.new_empty(self.world, *t.shape) for t in (value, index))
        with _lost(self):
            dist.all_gather(list(values), value)
            dist.all_gather(list(indices), index)
        first = values.argmax(0, keepdim=True)
        out.copy_(indices.gather(0, first).T)


def _argmax(x: Tensor, out: Tensor) -> None:
    """torch.argmax of rows; a long one in parts first, as PyTorch has one block for each row."""
    parts = math.gcd(x.shape[-1], 256)
    if parts < 16:
        torch.argmax(x, dim=-1, keepdim=True, out=out)
        return
    in_parts = x.unflatten(-1, (parts, -1))  # (batch, parts, of a part)
    part = in_parts.amax(-1).argmax(-1, keepdim=True)  # of equals the first
    best = in_parts.take_along_dim(part[..., None], dim=1).squeeze(1).argmax(-1, keepdim=True)
    torch.add(best, part, alpha=in_parts.shape[-1], out=out)


class Heartbeat(threading.Thread):
    """Ends this process where another one has ended or no longer answers.

    A sum over NCCL, and one in a CUDA graph at any rate, waits for a lost process without an error.

    Args:
        group: this process's.
        store: of the group.
        end: gets the sentence that says what has happened; by default prints it and ends the process with status 1.
        period, patience: seconds from beat to beat, and without one until a process counts as lost.
    """

    def __init__(
        self,
        group: Group,
        store: dist.Store,
        end: Callable[[str], None] | None = None,
        *,
        period: float = 2.0,
        patience: float = TIMEOUT.seconds,
    ) -> None:
        super().__init__(daemon=True)
        self.group, self.store, self.end = group, dist.PrefixStore("beats", store), end or _end
        self.period, self.patience, self.done = period, patience, threading.Event()

    def run(self) -> None:
        """Beat and listen until :meth:`stop`, or until another process is lost."""
        others = [rank for rank in range(self.group.world) if rank != self.group.rank]
        heard = {rank: (b"", time.monotonic()) for rank in others}
        beat = 0
        while not self.done.wait(self.period):
            beat += 1
            try:
                self.store.set(str(self.group.rank), str(beat))
                for rank, (before, since) in heard.items():
                    now = self.store.get(str(rank)) if self.store.check([str(rank)]) else b""
                    if now != before:
                        heard[rank] = now, time.monotonic()
                    elif now != b"done" and time.monotonic() - since > self.patience:
                        raise LostProcess(f"process {rank}")
            except RuntimeError as error:
                self.end(_sentence(self.group, error))
                return

    def stop(self) -> None:
        """Before this process goes: it is not lost."""
        self.done.set()
        self.join()
        with suppress(RuntimeError):  # the one that has the store may have gone before
            self.store.set(str(self.group.rank), "done")


def world_size() -> int:
    """How many processes torchrun has started; 1 without it.

    Raises:
        ValueError: the environment has what torchrun does not set.
    """
    names = ("WORLD_SIZE", "RANK", "LOCAL_RANK")
    given = {name: os.environ[name] for name in names if name in os.environ}
    if not all(text.isdecimal() for text in given.values()) or given.get("WORLD_SIZE") == "0":
        raise ValueError(f"torchrun sets whole numbers, WORLD_SIZE from 1 on; got {given}")
    world = int(given.get("WORLD_SIZE", "1"))
    if world > 1 and (len(given) < len(names) or int(given["RANK"]) >= world):
        raise ValueError(
            f"of {world} processes each has its RANK, from 0 to {world - 1}, and LOCAL_RANK from torchrun; got {given}"
        )
    return world


def processes_here() -> int:
    """How many of them torchrun has started on this host."""
    last = int(os.environ.get("LOCAL_RANK", "0"))
    return max(last + 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


@contextmanager
def processes(device: torch.device, options: str = "") -> Iterator[Group]:
    """The group that torchrun has started, or this process alone.

    Args:
        device: the CPU, or any GPU.
        options: what this process does; all have to do the same.

    Raises:
        ValueError: as :func:`world_size`.
        LostProcess: the others do not come, or cannot be found, or the first of them has other options.
    """
    world = world_size()
    if world == 1:
        yield Group()
        return
    group, nccl = Group(int(os.environ["RANK"]), world), device.type == "cuda"
    if nccl:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with _lost(group), _meeting(group):
        store, *_ = next(rendezvous("env://", timeout=TIMEOUT))
        limit = LONGEST_SUM if nccl else TIMEOUT
        backend = "nccl" if nccl else "gloo"
        dist.init_process_group(
            backend, store=store, rank=group.rank, world_size=world, timeout=limit
        )
        if group.rank == 0:
            store.set("options", options)
        elif (first := store.get("options").decode()) != options:
            raise LostProcess(
                f"process {group.rank} of {world} has other options than the first: {options}; {first}"
            )
    heartbeat = Heartbeat(group, store) if nccl else None  # gloo says itself what it has lost
    if heartbeat:
        heartbeat.start()
        group.share_memory()
    try:
        yield group
    finally:
        if heartbeat:
            heartbeat.stop()
        dist.destroy_process_group()


@contextmanager
def _lost(group: Group) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # gloo has no type of its own for a lost connection
        if not isinstance(error, dist.DistError) and not _LOST.search(str(error)):
            raise
        raise LostProcess(_sentence(group, error)) from error


@contextmanager
def _meeting(group: Group) -> Iterator[None]:
    """The processes find each other, at the port that torchrun names; or this one ends."""
    who, where = f"process {group.rank} of {group.world}", os.environ.get("MASTER_PORT")
    late = threading.Timer(MEETING, _end, [f"{who} has found no others in {MEETING:.0f} s"])
    late.daemon = True
    late.start()
    try:
        yield
    except ValueError as error:  # of this process's environment alone
        raise LostProcess(f"{who} cannot find the others: {error}") from error
    except RuntimeError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise LostProcess(f"{who}: port {where} is in use by another program") from error
    finally:
        late.cancel()


def _sentence(group: Group, error: Exception) -> str:
    reason = str(error).strip().splitlines()[0][:160]
    return (
        f"process {group.rank} of {group.world} has lost another one, which has ended or did not answer within"
        f" {TIMEOUT.seconds} s ({reason})"
    )


def _end(sentence: str) -> None:
    print(f"task6.generation: {sentence}", flush=True)
    sys.stderr.flush()
    os._exit(1)  # the main thread may wait for ever
