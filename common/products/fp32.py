"""Products of float32 matrices with float32's accuracy, on Hopper's tensor cores: ``fp32.cu``."""

import functools

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from common.build import Kernels
from common.inputs import expect

# Smaller products have too few tiles for the chip (32 of 128 x 256 are the fewest), or too short ones. Chosen from the
# sizes alone, so that a product takes the same path on each call.
FEWEST_ROWS, FEWEST_OUTPUTS, SHORTEST = 128, 2**20, 512

DEPTH = 64  # the parts' rows are multiples of it, filled up with zeros
TILE = 128  # rows of x
SCRATCH = 2**28  # bytes that the parts of x take at most; with more rows, x is multiplied in slabs

_kernels = Kernels(__file__, "fp32.cu")


class TensorCoreLinear:
    """``torch.nn.functional.linear`` in float32, at three and more times its speed, as accurate.

    Each float32 is split into two float16, and three products of these are summed in float32: fp32.cu has the method,
    its errors and its source (Ootomo and Yokota, arXiv:2203.03341).

    PyTorch's own product is taken for other dtypes, on a CPU or a GPU that is not a Hopper, for small products
    (:func:`is_large`), for tensors whose last dimension is not contiguous, where gradients are wanted, under autocast,
    and where ``torch.backends.cuda.matmul`` allows TF32.

    An object is for one weight, of which it keeps the parts from call to call: as many bytes as the weight itself, and
    four per row. They are made at the first call, and again after the weight was replaced or changed in place (but a
    change through ``.data``, or of an inference tensor, goes unseen). A CUDA graph has to be captured after that first
    call. x's parts are scratch of up to 256 MiB, from PyTorch's allocator.
    """

    def __init__(self) -> None:
        self._made_of: tuple | None = None
        self._parts: tuple[Tensor, Tensor] | None = None

    def __call__(self, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x @ w.T + bias``.

        Args:
            x: ``(..., K)``. Rows of any stride are read in place.
            w: ``(N, K)``, dtype and device of x.
            bias: ``(N,)`` likewise, or None.

        Returns:
            ``(..., N)``, contiguous. Of zeros, infinities and NaN it has what PyTorch's product has, but that infinity
            times a value of less than 2^-39 of its row's largest is NaN.

        Raises:
            ValueError: arguments that do not fit, named.
        """
        expect("w", w, shape=("N", "K"))
        N, K = w.shape
        like_w = {"dtype": w.dtype, "device": w.device}
        expect("x", x, shape=(*["any"] * (x.dim() - 1), K), **like_w)
        if bias is not None:
            expect("bias", bias, shape=(N,), **like_w)
        if not _is_taken(x, w, bias):
            return F.linear(x, w, bias)
        rows = x.detach().reshape(-1, K)
        w_parts, w_units = self._parts_of(w.detach())
        out = torch.empty(len(rows), N, **like_w)
        x_parts, x_units = _room_for_parts(_slab(*rows.shape), K, w.device)
        _kernels.launch(
            "product", x=rows, w_parts=w_parts, w_units=w_units, bias=bias, x_parts=x_parts, x_units=x_units, out=out
        )  # fmt: skip
        return out.view(*x.shape[:-1], N)

    def _parts_of(self, w: Tensor) -> tuple[Tensor, Tensor]:
        # A weak reference: the weight may go, and no other one can be taken for it, as by its address.
        version = 0 if w.is_inference() else w._version
        made_of = (
            StorageWeakRef(w.untyped_storage()),
            w.storage_offset(),
            w.shape,
            w.stride(),
            version,
        )
        if made_of != self._made_of:
            self._parts = None  # its memory is used again
            self._parts = split(w)
            self._made_of = made_of
        return self._parts

    def __reduce__(self):  # a copy has a weight of its own
        return type(self), ()


def is_large(M: int, N: int, K: int) -> bool:
    """Whether a product of ``(M, K)`` and ``(N, K)`` is computed on tensor cores, where the tensors allow it."""
    return M >= FEWEST_ROWS and M * N >= FEWEST_OUTPUTS and K >= SHORTEST


def can_split(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products of this dtype are computed on this device's tensor cores, if they are large."""
    return dtype == torch.float32 and device.type == "cuda" and _is_hopper(device)


def split(w: Tensor) -> tuple[Tensor, Tensor]:
    """The two parts of ``w (N, K)``, float32 with a contiguous last dimension.

    Returns:
        ``(2, N, K)`` float16 with K rounded up to 64, and a power of two for each row, ``(N,)`` float32: row n of w
        is ``units[n] * (parts[0, n] + parts[1, n])``, to 22 bits of its largest value and of those that are up to
        2^17 times smaller.
    """
    N, K = w.shape
    parts, units = _room_for_parts(N, K, w.device)
    _kernels.launch("split", w=w, w_parts=parts, w_units=units)
    return parts, units


def _is_taken(x: Tensor, w: Tensor, bias: Tensor | None) -> bool:
    tensors = [t for t in (x, w, bias) if t is not None]
    N, K = w.shape
    return (
        can_split(w.dtype, w.device)
        and is_large(x.numel() // max(K, 1), N, K)
        and all(t.stride(-1) == 1 for t in tensors)
        and torch.backends.cuda.matmul.fp32_precision in ("none", "ieee")
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
        and not torch.is_autocast_enabled("cuda")
    )


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


def _slab(M: int, K: int) -> int:
    """So many of M rows are multiplied at a time: as few slabs as SCRATCH allows, of about the same size."""
    most = max(TILE, SCRATCH // (4 * _padded(K)) // TILE * TILE)
    slabs = -(-M // most)
    return -(-M // (slabs * TILE)) * TILE if slabs > 1 else M


def _padded(K: int) -> int:
    return -(-K // DEPTH) * DEPTH


def _room_for_parts(rows: int, K: int, device: torch.device) -> tuple[Tensor, Tensor]:
    parts = torch.empty(2, rows, _padded(K), dtype=torch.float16, device=device)
    return parts, torch.empty(rows, dtype=torch.float32, device=device)
