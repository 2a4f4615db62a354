"""What a difference from the truth usually comes from: only patterns that are hard to mistake."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from common.check.difference import Difference
from common.check.poison import is_guard, is_hidden, is_poison

Suspect = Tensor | Callable[[], Tensor]


def diagnose(found: Difference, suspects: Mapping[str, Suspect]) -> list[str]:
    """The usual causes of such a difference, in a sentence each.

    A cause that explains every element (the result *is* something else) is the only one. Otherwise there may be two:
    from what the wrong elements are, and from where they are.

    Args:
        found: the difference.
        suspects: results of well-known mistakes by name, or functions that compute them.
    """
    for explain in (
        _nothing_written,
        _suspect(suspects),
        _all_nan,
        _factor,
        _reordered,
        _row_factor,
    ):
        if line := explain(found):
            return [line]
    lines = [line for line in (_values(found), _region(found)) if line]
    return lines or [line for line in (_precision(found), _scattered(found)) if line][:1]


def _nothing_written(found: Difference) -> str | None:
    if not bool(found.got.isnan().all()):
        return None
    if line := _read(found):
        return line
    if bool(is_poison(found.raw).all()):
        return (
            "every element is NaN, as the output was allocated: nothing was written, or all of it was"
            " computed from uninitialised memory"
        )
    return None


def _all_nan(found: Difference) -> str | None:
    if not bool(found.got.isnan().all()):
        return None
    return (
        "every element was computed, and is NaN: inf - inf, 0 / 0, or uninitialised memory was read"
        " (--check on the CPU names the line)"
    )


def _suspect(suspects: Mapping[str, Suspect]) -> Callable[[Difference], str | None]:
    def explain(found: Difference) -> str | None:
        for name, wrong in suspects.items():
            value = (wrong if isinstance(wrong, Tensor) else wrong()).to(found.got.device).double()
            if value.shape == found.got.shape and found.matches(value):
                return f"{name}: that mistake gives exactly these numbers"
        return None

    return explain


def _factor(found: Difference) -> str | None:
    got, truth = found.got, found.truth
    if not bool(got.isfinite().all() & truth.isfinite().all()) or got.numel() < 2:
        return None
    if not bool(got.any()):
        return "every element is 0: the sum was never stored, or the output was cleared afterwards"
    power = (truth * truth).sum()
    if not power > 0:
        return None
    c = ((got * truth).sum() / power).item()
    # The factor must explain the difference itself, not only be small beside it.
    residual = (got - c * truth).abs().max().item()
    if residual > found.budget * max(1.0, abs(c)) or residual > 0.05 * found.error.max().item():
        return None
    return (
        f"everything is {_as_root(c)} times what it should be: a scale forgotten or applied twice"
    )


def _as_root(c: float) -> str:
    """``8 = sqrt(64)`` where the factor is a root of a whole number, as attention's scale is."""
    text = f"{c:.6g}"
    for value, pattern in ((c * c, "sqrt({})"), (1 / (c * c), "1 / sqrt({})")):
        n = round(value)
        if c > 0 and 2 <= n <= 4096 and abs(value - n) < 1e-3 * n:
            return f"{text} = {pattern.format(n)}"
    return text


def _row_factor(found: Difference) -> str | None:
    """Each row is right up to a factor of its own: attention without its last division."""
    got, truth = found.got, found.truth
    if (
        truth.dim() < 2
        or truth.shape[-1] < 4
        or not bool(got.isfinite().all() & truth.isfinite().all())
    ):
        return None
    power = (truth * truth).sum(-1, keepdim=True)
    if bool((power == 0).any()):
        return None
    c = (got * truth).sum(-1, keepdim=True) / power
    allowed = found.budget * c.abs().clamp(min=1.0)
    if bool(((got - c * truth).abs() > allowed).any()) or bool(
        found.error.max() < 20 * found.budget
    ):
        return None
    return (
        f"every {found.axes[-2]} is right up to a factor of its own ({c.min().item():.4g} to"
        f" {c.max().item():.4g}): the division by that row's sum (l_i) is missing or wrong"
    )


def _reordered(found: Difference) -> str | None:
    got, truth = found.got, found.truth
    if truth.dim() >= 2:
        flipped = truth.transpose(-1, -2).reshape(truth.shape)
        if found.matches(flipped):
            a, b = found.axes[-2:]
            return f"the result is transposed: {a} and {b} are exchanged"
    for axis, name in enumerate(found.axes):
        n = truth.shape[axis]
        ours, right = (t.movedim(axis, 0).reshape(n, -1) for t in (got, truth))
        width = ours.shape[1]
        if not (n >= 2 and width >= 4 and n * n * width <= 1 << 26):
            continue
        distance = torch.cdist(ours, right, p=math.inf)
        nearest, source = distance.min(dim=1)
        is_permutation = source.unique().numel() == n
        moved = source != torch.arange(n, device=source.device)
        if bool((nearest <= found.budget).all()) and is_permutation and bool(moved.any()):
            i = int(moved.nonzero()[0])
            return (
                f"every {name} is right but in the wrong place ({name} {i} holds what belongs to"
                f" {name} {int(source[i])}): an index or a stride of that dimension"
            )
    return None


def _values(found: Difference) -> str | None:
    wrong = found.got[found.bad]
    if line := _read(found):
        return line
    if _unwritten(found):
        return "the wrong elements are NaN, as they were allocated: they were never written"
    if bool(wrong.isnan().all()):
        return (
            "the wrong elements were computed, and are NaN: inf - inf or 0 / 0, or uninitialised"
            " memory was read (--check on the CPU names the line)"
        )
    if bool((wrong == 0).all()):
        return "the wrong elements are all 0"
    if bool(wrong.isinf().all()):
        return "the wrong elements are infinite: exp without the maximum, or a division by 0"
    return None


def _read(found: Difference) -> str | None:
    """NaN that stood in an input, or outside of all tensors."""
    wrong = found.bad
    if bool(is_hidden(found.raw)[wrong].all()):
        return (
            "the wrong elements are a NaN that was read where no query may look: a key before leftpad_k, at or past"
            " seqlens_k, above the diagonal, or in a part of the cache that is not filled"
        )
    if bool(is_guard(found.raw)[wrong].all()):
        return (
            "the wrong elements are a NaN that was read outside of all tensors: an index past the end"
            " (--check on the CPU names the line)"
        )
    return None


def _unwritten(found: Difference) -> bool:
    return bool(is_poison(found.raw)[found.bad].all())


def _region(found: Difference) -> str | None:
    if line := _triangle(found):
        return line
    unwritten = _unwritten(found)
    for axis, name in enumerate(found.axes):
        n, size = found.truth.shape[axis], found.tile.get(name)
        if not size or n <= size:
            continue
        first = int(found.wrong_along(axis).nonzero()[0])
        if n % size and first >= n - n % size:
            cause = (
                "the grid needs ceil(n / tile) blocks"
                if unwritten
                else "the ragged end is not masked, or its loads are not guarded"
            )
            return (
                f"only the last, partial tile is wrong ({name} {first} and after, tiles of {size}):"
                f" {cause}"
            )
        if first == size:
            cause = (
                f"the grid has one block along {name}, or a tile's offset is missing"
                if unwritten
                else "the tile's offset; in an online softmax also the rescale by"
                " exp(m_old - m_new), or a barrier between two tiles"
            )
            return f"the first tile of {name}s is right and it is wrong from the second on: {cause}"
    for axis, name in enumerate(found.axes):
        wrong = found.wrong_along(axis)
        if name not in ("batch", "head") or wrong.numel() < 2 or bool(wrong[0]):
            continue
        if bool(wrong[1:].all()):
            return f"{name} 0 is right and every other {name} is wrong: the {name} stride or offset"
    return None


def _triangle(found: Difference) -> str | None:
    if found.axes[-2:] != ("row", "column"):
        return None
    rows, columns = found.truth.shape[-2:]
    above = torch.ones(rows, columns, dtype=torch.bool, device=found.bad.device).triu(
        1 + columns - rows
    )
    right_there = found.truth[..., above]
    if not above.any() or not bool((right_there == 0).all() | right_there.isneginf().all()):
        return None  # not a causal matrix
    if bool((found.bad & ~above).any()):
        return None
    return "only elements above the diagonal are wrong: the causal mask is missing or off by one"


def _precision(found: Difference) -> str | None:
    scale = found.truth[found.truth.isfinite()].abs().max().item()
    relative = found.error.max().item() / scale if scale else math.inf
    share = found.bad.double().mean().item()
    just_above = found.error.max().item() < 20 * found.budget
    # Where the error is largest, rounding leaves the number recognisable.
    worst = found.error.argmax()
    lost = bool(found.error.flatten()[worst] > 0.5 * found.truth.flatten()[worst].abs())
    if relative > 0.02 or lost or (share < 0.05 and not just_above):
        return None
    digits = max(1, int(-math.log10(relative)))
    digits = f"{digits} digit" + ("s" if digits > 1 else "")
    return (
        f"the numbers are right to about {digits}: precision is lost on the way, such as a"
        " sum or a product kept in a shorter type"
    )


def _scattered(found: Difference) -> str | None:
    share = found.bad.double().mean().item()
    if share > 0.5 or int(found.bad.sum()) < 2:
        return None
    return (
        "wrong elements scattered over the result: an index that is right only for some, or a race: a missing"
        " barrier (--check on the CPU names the line)"
    )
