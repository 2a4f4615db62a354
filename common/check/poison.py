"""Outputs that start as NaN: what a kernel does not write cannot look right."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@contextmanager
def poisoned() -> Iterator[None]:
    """Within it ``torch.empty`` and its relatives are filled with NaN (integers: with the largest one).

    This is PyTorch's own switch, made for deterministic runs; it applies to every allocation of uninitialised memory,
    on the CPU and on the GPU.
    """
    mode = torch.get_deterministic_debug_mode()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    with warnings.catch_warnings():
        # The switch also warns about operations without a deterministic form, which are not wanted here.
        warnings.filterwarnings("ignore", message=".*deterministic.*")
        warnings.filterwarnings("ignore", message=".*CuBLAS.*")
        try:
            torch.set_deterministic_debug_mode("warn")
            torch.utils.deterministic.fill_uninitialized_memory = True
            yield
        finally:
            torch.set_deterministic_debug_mode(mode)
            torch.utils.deterministic.fill_uninitialized_memory = fill


def is_poison(t: Tensor) -> Tensor:
    """Where ``t`` holds exactly the NaN that allocation left there.

    A NaN that arithmetic makes has other bits on x86 (sign set) and on NVIDIA GPUs (all ones), so a
    False inside a NaN means "computed"; a True means "not written, or copied from what was not".
    """
    bits = _BITS[t.element_size()]
    pattern = torch.full((1,), float("nan"), dtype=t.dtype, device=t.device).view(bits)
    return t.contiguous().view(bits) == pattern
