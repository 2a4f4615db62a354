"""Is a result right? And if not: where, by how much, and what does that usually mean?

The truth is float64. How far a result may be from it is taken from PyTorch: what the same operation, done
by PyTorch in the same dtype, loses against that truth, times a small factor. So the budget follows the
size and the magnitudes of the case by itself, and no tolerance is ever picked by hand.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.check.poison import is_poison
from common.dtypes import dtype_name
from common.inputs import describe

# How much more than PyTorch an answer may lose. Right programs that add in another order differ:
# over 300 seeds an online softmax lost at most 1.6 times what PyTorch's attention did, but a sum
# over K = 1000 taken one by one in fp32, as a first kernel does it, up to 6.3 times what PyTorch's
# blocked GEMM did (median 3.2; the ratio grows with K: keep K below 1500). Real mistakes start
# beyond: a softmax in float16 is over 500 budgets off (both repeated with fresh seeds in
# common/tests/test_check_compare.py).
FACTOR = 8.0

Suspect = Tensor | Callable[[], Tensor]


class CheckFailed(AssertionError):
    """A result is not what it should be; the text explains it.

    Attributes:
        not_written: the output is as it was allocated, which is how a stub looks; or a sentence that says what is
            not written yet.
        fingerprint: hash of the wrong result, to see whether a second run gives the same one.
    """

    def __init__(
        self, text: str, *, not_written: bool | str = False, fingerprint: str | None = None
    ) -> None:
        super().__init__(text)
        self.not_written = not_written
        self.fingerprint = fingerprint


def assert_close(
    got: object,
    truth: Tensor,
    pytorch: Tensor,
    *,
    axes: Sequence[str],
    tile: Mapping[str, int] | None = None,
    suspects: Mapping[str, Suspect] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Raise CheckFailed unless ``got`` is as near to ``truth`` as PyTorch comes, times FACTOR.

    The budget is ``FACTOR * max|pytorch - truth| + eps(dtype) * max|truth|``, one number for the tensor.
    NaN and infinities pass only where the truth has the same.

    Args:
        got: the result; a tensor of the shape of ``truth``, the dtype and device of ``pytorch``.
        truth: the same in float64.
        pytorch: the same by PyTorch, in the dtype of the case.
        axes: a name for each dimension: ``("batch", "head", "row", "column")``.
        tile: sizes of the tiles that the kernel works in, by axis: ``{"row": 64}``.
        suspects: results of well-known mistakes by name ("the maximum is not subtracted"), or functions that
            compute them; when ``got`` equals one, the text says so.
        dtype: the dtype of ``got`` if it is not that of ``pytorch``. For float64, where no truth is more
            precise, pass PyTorch's float32 result: its loss is scaled by the ratio of the two epsilons.

    Raises:
        CheckFailed: with the explanation.
        ValueError: the comparison itself makes no sense.
    """
    dtype = dtype or pytorch.dtype
    _check_comparison(truth, pytorch, axes, dtype)
    _check_kind(got, pytorch, dtype)
    assert isinstance(got, Tensor)
    got, truth, pytorch = got.detach(), truth.to(got.device), pytorch.to(got.device)
    if truth.numel() == 0:
        return
    error = _error(got.double(), truth)
    loss = _error(pytorch.double(), truth).max().item() * _eps(dtype) / _eps(pytorch.dtype)
    finite = truth[truth.isfinite()]
    magnitude = finite.abs().max().item() if finite.numel() else 0.0
    budget = FACTOR * loss + _eps(dtype) * magnitude
    bad = ~(error <= budget)
    if not bool(bad.any()):
        return
    found = _Difference(got, got.double(), truth, error, bad, budget, tuple(axes), dict(tile or {}))
    not_written = bool(is_poison(got).all())
    text = [
        f"largest error {error.max().item():.3g}, allowed {budget:.3g}"
        f" ({FACTOR:g} x PyTorch's own {loss:.3g}, + {dtype_name(dtype)} epsilon x {magnitude:.3g})",
        *_describe_worst(found),
        f"{int(bad.sum()):,} of {bad.numel():,} elements are off: {_where(found)}",
        *(f"usually: {line}" for line in diagnose(found, suspects or {})),
    ]
    raise CheckFailed("\n".join(text), not_written=not_written, fingerprint=_fingerprint(got))


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def _check_comparison(
    truth: Tensor, pytorch: Tensor, axes: Sequence[str], dtype: torch.dtype
) -> None:
    if truth.dtype != torch.float64:
        raise ValueError(f"truth must be float64; got {describe(truth)}")
    if truth.shape != pytorch.shape:
        raise ValueError(f"truth is {describe(truth)}, but PyTorch's own is {describe(pytorch)}")
    if not (pytorch.is_floating_point() and dtype.is_floating_point):
        raise ValueError(f"only floating-point results have a budget; got {describe(pytorch)}")
    if len(axes) != truth.dim():
        raise ValueError(f"axes must name {truth.dim()} dimensions; got {tuple(axes)}")
    if pytorch.dtype == torch.float64:
        raise ValueError(
            "PyTorch's float64 result cannot say what float64 loses; pass its float32 result"
            " and dtype=torch.float64"
        )
    if bool((truth.to(pytorch.device).isfinite() & ~pytorch.isfinite()).any()):
        raise ValueError(
            f"PyTorch itself has inf or NaN in {dtype_name(dtype)} where the truth is finite:"
            " this case has no budget; make its magnitudes smaller"
        )


def _check_kind(got: object, pytorch: Tensor, dtype: torch.dtype) -> None:
    wanted = f"{tuple(pytorch.shape)} {dtype_name(dtype)} on {pytorch.device}"
    if type(got) not in (
        Tensor,
        torch.nn.Parameter,
    ):  # a subclass could compute later, or elsewhere
        raise CheckFailed(f"the result should be a plain tensor {wanted}; got {describe(got)}")
    fits = got.shape == pytorch.shape and got.dtype == dtype and got.device == pytorch.device
    if not fits:
        raise CheckFailed(f"the result should be {wanted}; got {describe(got)}")


def _error(a: Tensor, truth: Tensor) -> Tensor:
    """|a - truth|; 0 where both are the same infinity or both NaN, inf where only one is."""
    same = (a == truth) | (a.isnan() & truth.isnan())
    return torch.where(same, 0.0, (a - truth).abs().nan_to_num(nan=math.inf))


def _fingerprint(t: Tensor) -> str:
    raw = t.detach().flatten().cpu().view(torch.uint8).numpy()
    return hashlib.sha256(raw.tobytes()).hexdigest()


# What a difference looks like
# ---------------------------------------------------------------------------


@dataclass
class _Difference:
    raw: Tensor  # the result as it came
    got: Tensor  # float64
    truth: Tensor
    error: Tensor
    bad: Tensor  # where the error is over the budget
    budget: float
    axes: tuple[str, ...]
    tile: dict[str, int]

    def wrong_along(self, axis: int) -> Tensor:
        """Bool (n,): does index i of this axis hold any wrong element?"""
        others = [d for d in range(self.bad.dim()) if d != axis]
        return self.bad.amax(dim=others) if others else self.bad

    def matches(self, other: Tensor, slack: float = 1.0) -> bool:
        """Is the result the same as ``other``, within the budget?"""
        return bool((_error(self.got, other) <= self.budget * slack).all())


def _describe_worst(found: _Difference) -> list[str]:
    # NaN where a number should be is reported first: its error counts as infinite.
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


def _where(found: _Difference) -> str:
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


# What it usually means
# ----------------------------------------------------------------------------------


def diagnose(found: _Difference, suspects: Mapping[str, Suspect]) -> list[str]:
    """What such a difference usually comes from: only patterns that are hard to mistake.

    One that explains every element (the result *is* something else) stands alone; otherwise what the
    wrong elements hold and where they lie are told apart.
    """
    for explain in (_nothing_written, _suspect(suspects), _factor, _reordered, _row_factor):
        if line := explain(found):
            return [line]
    lines = [line for line in (_values(found), _region(found)) if line]
    return lines or [line for line in (_precision(found), _scattered(found)) if line][:1]


def _nothing_written(found: _Difference) -> str | None:
    if not bool(found.got.isnan().all()):
        return None
    if bool(is_poison(found.raw).all()):
        return (
            "every element is NaN, as the output was allocated: nothing was written, or all of it was"
            " computed from memory that nobody wrote"
        )
    return "every element was computed, and is NaN: inf - inf, 0 / 0, or a NaN that spread to all"


def _suspect(suspects: Mapping[str, Suspect]) -> Callable[[_Difference], str | None]:
    def explain(found: _Difference) -> str | None:
        for name, wrong in suspects.items():
            value = (wrong if isinstance(wrong, Tensor) else wrong()).to(found.got.device).double()
            if value.shape == found.got.shape and found.matches(value):
                return f"{name}: with that mistake exactly these numbers come out"
        return None

    return explain


def _factor(found: _Difference) -> str | None:
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


def _row_factor(found: _Difference) -> str | None:
    """Each row right up to a factor of its own: attention without its last division."""
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


def _reordered(found: _Difference) -> str | None:
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
                f"every {name} is right but in another's place ({name} {i} holds what belongs to"
                f" {name} {int(source[i])}): an index or a stride of that dimension"
            )
    return None


def _values(found: _Difference) -> str | None:
    wrong = found.got[found.bad]
    if _unwritten(found):
        return "the wrong elements are NaN, as they were allocated: they were never written"
    if bool(wrong.isnan().all()):
        return (
            "the wrong elements were computed, and are NaN: inf - inf or 0 / 0, or unwritten"
            " memory was read"
        )
    if bool((wrong == 0).all()):
        return "the wrong elements are all 0"
    if bool(wrong.isinf().all()):
        return "the wrong elements are infinite: exp without the maximum, or a division by 0"
    return None


def _unwritten(found: _Difference) -> bool:
    return bool(is_poison(found.raw)[found.bad].all())


def _region(found: _Difference) -> str | None:
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


def _triangle(found: _Difference) -> str | None:
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


def _precision(found: _Difference) -> str | None:
    scale = found.truth[found.truth.isfinite()].abs().max().item()
    relative = found.error.max().item() / scale if scale else math.inf
    share = found.bad.double().mean().item()
    just_above = found.error.max().item() < 20 * found.budget
    if relative > 0.02 or (share < 0.05 and not just_above):
        return None
    digits = max(1, int(-math.log10(relative)))
    digits = f"{digits} digit" + ("s" if digits > 1 else "")
    return (
        f"the numbers are right to about {digits}: precision is lost on the way, such as a"
        " sum or a product kept in a shorter type"
    )


def _scattered(found: _Difference) -> str | None:
    share = found.bad.double().mean().item()
    if share > 0.5 or int(found.bad.sum()) < 2:
        return None
    return (
        "wrong elements scattered over the result: a race or a missing barrier if another run gives others"
        " (--check on the CPU names the line), otherwise an index that is right only for some"
    )
