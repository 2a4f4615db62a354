"""Memory that must not count, filled with NaN: outputs before they are written, inputs that nobody may read.

Each kind has a NaN of its own, which float32 arithmetic on the CPU passes on: so a message can tell where it is from.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

GUARD = 0x7FC1  # around a launch's tensors (guards.py), in 16-bit words: NaN in every dtype
_GUARD = {2: GUARD, 4: 0x7FC17FC1, 8: 0x7FC17FC17FC17FC1}
# What no query may see. The number is the same in every dtype.
_HIDDEN = {
    torch.float16: 0x7E10,
    torch.bfloat16: 0x7FC2,
    torch.float32: 0x7FC20000,
    torch.float64: 0x7FF8400000000000,
}


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


def hide_(t: Tensor, where: Tensor | None = None) -> Tensor:
    """Fill ``t`` with the NaN for inputs that must not be read, where the mask says or throughout; bit by bit."""
    bits = t.view(_BITS[t.element_size()])
    bits.fill_(_HIDDEN[t.dtype]) if where is None else bits.masked_fill_(where, _HIDDEN[t.dtype])
    return t


def is_hidden(t: Tensor) -> Tensor:
    """Where ``t`` holds that NaN: it, or something computed from it, was read."""
    return t.contiguous().view(_BITS[t.element_size()]) == _HIDDEN.get(t.dtype, 0)


def is_guard(t: Tensor) -> Tensor:
    """Where ``t`` holds the NaN of a guard zone: something outside of a tensor was read."""
    return t.contiguous().view(_BITS[t.element_size()]) == _GUARD.get(t.element_size(), 0)
