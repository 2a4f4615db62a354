"""Memory: say what is needed before it is taken, and stop or shrink where it is not there."""

import os
from collections.abc import Callable

import torch


class NotEnoughMemory(RuntimeError):
    """What was needed, and what is free."""


def gib(n: float) -> str:
    """``1.5 GiB``, or ``300 MiB`` below one."""
    return f"{n / 2**30:.1f} GiB" if n >= 2**30 else f"{n / 2**20:.0f} MiB"


def free_memory(device: torch.device | str) -> tuple[int, int]:
    """Bytes free and in all; what PyTorch holds but does not use counts as free."""
    device = torch.device(device)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + held, total
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/proc/meminfo") as lines:
            known = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        return known["MemAvailable"], total
    except (OSError, KeyError):  # macOS keeps no such file; half is a cautious guess
        return total // 2, total


def require_memory(bytes_needed: float, device: torch.device | str, what: str) -> None:
    """Print what ``what`` needs and what is free; NotEnoughMemory if that is too little."""
    free, _ = free_memory(device)
    print(f"{what}: needs {gib(bytes_needed)}, {gib(free)} free on {device}", flush=True)
    if bytes_needed > free:
        raise NotEnoughMemory(f"{what} needs {gib(bytes_needed)}; {gib(free)} are free on {device}")


def fit_batch(
    batch: int, bytes_needed: Callable[[int], float], device: torch.device | str, what: str
) -> tuple[int, str]:
    """The largest of batch, batch/2, batch/4 ... for which ``bytes_needed(batch)`` is free.

    Returns:
        The batch, and a note to print and to record: empty if it is the one that was asked for.

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
