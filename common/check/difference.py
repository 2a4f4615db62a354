"""A difference from the truth: how large it is, and where."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def error_of(a: Tensor, truth: Tensor) -> Tensor:
    """|a - truth|; 0 where both are the same infinity or both NaN, inf where only one is."""
    same = (a == truth) | (a.isnan() & truth.isnan())
    return torch.where(same, 0.0, (a - truth).abs().nan_to_num(nan=math.inf))


@dataclass
class Difference:
    """A result that is not the truth.

    Args:
        raw: the result as it was returned.
        got, truth: both in float64.
        error: :func:`error_of` them.
        bad: where the error exceeds the budget; at least one element.
        budget: how large an error may be.
        axes: a name for each dimension.
        tile: sizes of the kernel's tiles, by axis.
    """

    raw: Tensor
    got: Tensor
    truth: Tensor
    error: Tensor
    bad: Tensor
    budget: float
    axes: tuple[str, ...]
    tile: dict[str, int]

    def wrong_along(self, axis: int) -> Tensor:
        """Bool ``(n,)``: is any element at index i of this axis wrong?"""
        others = [d for d in range(self.bad.dim()) if d != axis]
        return self.bad.amax(dim=others) if others else self.bad

    def matches(self, other: Tensor) -> bool:
        """Is the result the same as ``other``, within the budget?"""
        return bool((error_of(self.got, other) <= self.budget).all())


def describe_largest(found: Difference) -> list[str]:
    """Where the largest error is, what was expected there and what came."""
    # NaN where a number should be comes first: its error counts as infinite.
    flat = int(found.error.argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat), found.error.shape)]
    place, tiles = [], []
    for name, i in zip(found.axes, index, strict=True):
        place.append(f"{name} {i}")
        if size := found.tile.get(name):
            tiles.append(f"{name} {i % size} of {name} tile {i // size} (tiles of {size})")
    expected, got = found.truth.flatten()[flat].item(), found.got.flatten()[flat].item()
    lines = [f"at {', '.join(place)}: expected {expected:.6g}, got {got:.6g}"]
    if tiles:
        lines.append("that is " + ", ".join(tiles))
    return lines


def describe_extent(found: Difference) -> str:
    """Which indices of each axis have wrong elements."""
    parts = []
    for axis, name in enumerate(found.axes):
        wrong = found.wrong_along(axis)
        n = wrong.numel()
        if n == 1:
            continue
        parts.append(
            f"{name} all {n}" if bool(wrong.all()) else f"{name} {_ranges(wrong)} of 0-{n - 1}"
        )
    return "; ".join(parts) or "the only one"


def _ranges(wrong: Tensor) -> str:
    """``0-3, 8, 12-15``; shortened after four."""
    runs: list[list[int]] = []
    for i in wrong.nonzero().flatten().tolist():
        if runs and i == runs[-1][1] + 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    text = [str(a) if a == b else f"{a}-{b}" for a, b in runs[:4]]
    return ", ".join(text) + (f", and {len(runs) - 4} more places" if len(runs) > 4 else "")
