"""Is a result right?

The truth is float64. The budget for the error is what the same operation, done by PyTorch in the same dtype, loses
against that truth, times a small factor. So it follows the size and the magnitudes of the case, and no tolerance is
chosen by hand.
"""

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from common.check.diagnosis import Suspect, diagnose
from common.check.difference import Difference, describe_extent, describe_largest, error_of
from common.check.poison import is_poison
from common.dtypes import dtype_name
from common.inputs import describe

# How much more than PyTorch an answer may lose. Correct programs that add in another order differ: over 300 seeds an
# online softmax lost at most 1.6 times what PyTorch's attention did, but a sum over K = 1000 that adds one element
# after the other in fp32, as a first kernel does, up to 6.3 times what PyTorch's blocked GEMM did (median 3.2; the
# ratio grows with K: keep K below 1500). Mistakes start beyond that: a softmax in float16 is over 500 budgets off. (The
# comparison's own tests repeat both with fresh seeds.)
FACTOR = 8.0


class CheckFailed(AssertionError):
    """A result is not what it should be; the text explains it.

    Attributes:
        not_written: the output is as it was allocated, as a stub leaves it; or a sentence that says what is not
            written yet.
        fingerprint: hash of the wrong result, which shows whether a second run gives the same one.
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
    """Raise CheckFailed unless ``got`` is as near to ``truth`` as PyTorch is, times FACTOR.

    The budget is ``FACTOR * max|pytorch - truth| + eps(dtype) * max|truth|``, one number for the tensor.
    NaN and infinities pass only where the truth has the same.

    Args:
        got: the result; a tensor of the shape of ``truth``, the dtype and device of ``pytorch``.
        truth: the same in float64.
        pytorch: the same by PyTorch, in the dtype of the case.
        axes: a name for each dimension: ``("batch", "head", "row", "column")``.
        tile: sizes of the kernel's tiles, by axis: ``{"row": 64}``.
        suspects: results of well-known mistakes by name ("the maximum is not subtracted"), or functions that
            compute them; when ``got`` equals one, the text says so.
        dtype: the dtype of ``got`` if it is not that of ``pytorch``. For float64, where no truth is more
            precise, pass PyTorch's float32 result: its loss is scaled by the ratio of the two epsilons.

    Raises:
        CheckFailed: with the explanation.
        ValueError: the comparison itself makes no sense: shapes, dtypes or names that do not fit together.
    """
    dtype = dtype or pytorch.dtype
    _check_comparison(truth, pytorch, axes, dtype)
    _check_form(got, pytorch, dtype)
    assert isinstance(got, Tensor)
    got, truth, pytorch = got.detach(), truth.to(got.device), pytorch.to(got.device)
    if truth.numel() == 0:
        return
    error = error_of(got.double(), truth)
    loss = error_of(pytorch.double(), truth).max().item() * _eps(dtype) / _eps(pytorch.dtype)
    finite = truth[truth.isfinite()]
    magnitude = finite.abs().max().item() if finite.numel() else 0.0
    budget = FACTOR * loss + _eps(dtype) * magnitude
    bad = ~(error <= budget)
    if not bool(bad.any()):
        return
    found = Difference(got, got.double(), truth, error, bad, budget, tuple(axes), dict(tile or {}))
    not_written = bool(is_poison(got).all())
    text = [
        f"largest error {error.max().item():.3g}, allowed {budget:.3g}"
        f" ({FACTOR:g} x PyTorch's own {loss:.3g}, + {dtype_name(dtype)} epsilon x {magnitude:.3g})",
        *describe_largest(found),
        f"{int(bad.sum()):,} of {bad.numel():,} elements are off: {describe_extent(found)}",
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


def _check_form(got: object, pytorch: Tensor, dtype: torch.dtype) -> None:
    wanted = f"{tuple(pytorch.shape)} {dtype_name(dtype)} on {pytorch.device}"
    if type(got) not in (Tensor, torch.nn.Parameter):  # a subclass could compute lazily
        raise CheckFailed(f"the result should be a plain tensor {wanted}; got {describe(got)}")
    fits = got.shape == pytorch.shape and got.dtype == dtype and got.device == pytorch.device
    if not fits:
        raise CheckFailed(f"the result should be {wanted}; got {describe(got)}")


def _fingerprint(t: Tensor) -> str:
    raw = t.detach().flatten().cpu().view(torch.uint8).numpy()
    return hashlib.sha256(raw.tobytes()).hexdigest()
