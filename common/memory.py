"""Memory: what is needed is compared with what is free before it is allocated."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# A group's files, in version 2 and 1: limit, use, and what of that use is a cache of files.
_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


class NotEnoughMemory(RuntimeError):
    """What was needed, and what is free."""


def gib(n: float) -> str:
    """``1.5 GiB``, or ``300 MiB`` below one."""
    return f"{n / 2**30:.1f} GiB" if n >= 2**30 else f"{n / 2**20:.0f} MiB"


def free_memory(device: torch.device | str) -> tuple[int, int]:
    """Bytes free, and bytes in total; what PyTorch has reserved but does not use counts as free.

    On a CPU a container or a job may have less than the machine: its limit counts.
    """
    device = torch.device(device)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + held, total
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/proc/meminfo") as lines:
            known = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        return min([known["MemAvailable"], *_left_in_groups()]), total
    except (OSError, KeyError):  # macOS has no such file; half is a cautious guess
        return total // 2, total


def _left_in_groups() -> Iterator[int]:
    """Of each control group of this process that has a limit: the bytes that are left."""
    try:
        groups = OWN_CGROUPS.read_text().splitlines()
    except OSError:  # macOS
        return
    for line in groups:
        _, kinds, own = line.split(":", 2)
        if kinds not in _FILES:
            continue
        limit, used, cache = _FILES[kinds]
        root = CGROUPS / kinds
        folder = root / own.lstrip("/")
        for group in (folder, *folder.parents):
            try:
                found = {key: int(n) for key, n in map(str.split, _lines(group / "memory.stat"))}
                yield int(*_lines(group / limit)) - int(*_lines(group / used)) + found[cache]
            except (
                OSError,
                ValueError,
                KeyError,
            ):  # no limit ("max"), or a group of which this one sees nothing
                pass
            if group == root:
                break


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def require_memory(bytes_needed: float, device: torch.device | str, what: str) -> None:
    """Print what ``what`` needs and what is free; NotEnoughMemory if that is too little."""
    free, _ = free_memory(device)
    print(f"{what}: needs {gib(bytes_needed)}, {gib(free)} free on {device}", flush=True)
    if bytes_needed > free:
        raise NotEnoughMemory(f"{what} needs {gib(bytes_needed)}; {gib(free)} are free on {device}")


def fit_batch(
    batch: int, bytes_needed: Callable[[int], float], device: torch.device | str, what: str
) -> tuple[int, str]:
    """The largest of batch, batch / 2, batch / 4 ... for which ``bytes_needed`` bytes are free.

    Returns:
        The batch, and a note to print and to record; empty if nothing had to be scaled down.

    Raises:
        NotEnoughMemory: not even one sequence fits.
    """
    free, _ = free_memory(device)
    fits = batch
    while fits > 1 and bytes_needed(fits) > free:
        fits //= 2
    if bytes_needed(fits) > free:
        raise NotEnoughMemory(
            f"{what} needs {gib(bytes_needed(fits))} for a single sequence; {gib(free)} are free on {device}"
        )
    if fits == batch:
        return batch, ""
    return fits, (
        f"scaled down: batch {batch} needs {gib(bytes_needed(batch))}, {gib(free)} are free; batch {fits}"
    )
