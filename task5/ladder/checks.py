"""What calls of decode, of chunks and of the new rows of a cache refuse."""

import math

import torch
from torch import Tensor

from common.inputs import describe

MAX_BATCH = 65535
# Of scores: kernels multiply by it, and by log2(e), in float32.
SCALES = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max * math.log(2)


def loadable(x: Tensor) -> bool:
    """Whether 16 bytes at a time can be loaded of its rows: each contiguous, from a multiple of 16 bytes on."""
    used = (s for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n > 1)
    pitches = (s * x.element_size() for s in used)
    return x.stride(-1) == 1 and not any(pitch % 16 for pitch in (*pitches, x.data_ptr()))


def expect_loadable(**tensors: Tensor | None) -> None:
    """ValueError that names the first of these that is not :func:`loadable`."""
    for name, tensor in tensors.items():
        if tensor is not None and not loadable(tensor):
            raise ValueError(
                f"{name} must have a contiguous last dimension, and rows that begin at multiples of 16 bytes; got"
                f" {describe(tensor)} with strides {tensor.stride()}"
            )


def expect_scale(scale: float | None) -> None:
    """ValueError for one that is no number, not above 0, or too small or large for float32."""
    if scale is None:
        return
    least, most = SCALES
    if not (isinstance(scale, (int, float)) and least <= scale <= most):
        raise ValueError(
            f"scale must be above 0 and finite, from {least:.3g} to {most:.3g}; got {scale!r}"
        )
