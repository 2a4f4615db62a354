"""What stands between a layer's matrix products, one launch each."""

from torch import Tensor

from common.build import Kernels, dtype_code
from common.inputs import KERNEL_DTYPES, check_device, expect
from task5.ladder.gpu import is_hopper

_KERNELS = Kernels(__file__, "elementwise.cu")
_DEPENDENT = Kernels(__file__, "rms_norm_dependent.cu")  # of GPUs, for Hopper


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> None:
    """``x += delta``, then ``out = x / sqrt(mean(x^2) + eps) * weight``, in float32. [RMSNorm] arXiv:1910.07467, eq. 4.

    Args:
        x: ``(rows, n)``, float32, float16 or bfloat16, extended in place; the last dimension contiguous.
        delta: what is added, as x; None: nothing.
        weight: ``(n,)``.
        out: as x.

    Raises:
        ValueError: arguments that do not fit, named.
    """
    like_x = _check(x)
    for name, tensor in (("delta", delta), ("out", out)):
        if tensor is not None:
            expect(name, tensor, shape=x.shape, **like_x)
            _check_rows(name, tensor)
    expect("weight", weight, shape=(x.shape[1],), **like_x)
    _check_rows("weight", weight)
    if x.numel():
        (_DEPENDENT if is_hopper(x.device) else _KERNELS).launch(
            "add_rms_norm", x=x, delta=x if delta is None else delta, has_delta=int(delta is not None), weight=weight,
            out=out, eps=eps, dtype=dtype_code(x.dtype),
        )  # fmt: skip


def swiglu(x: Tensor, out: Tensor) -> None:
    """``out = silu(gate) * up`` with gate and up side by side in x. [Shazeer] arXiv:2002.05202, equation 6.

    Args:
        x: ``(rows, 2 n)``, float32, float16 or bfloat16; the last dimension contiguous.
        out: ``(rows, n)``, x's dtype and device.

    Raises:
        ValueError: arguments that do not fit, named.
    """
    like_x = _check(x)
    if x.shape[1] % 2:
        raise ValueError(f"x must have gate and up side by side; got {x.shape[1]} columns")
    expect("out", out, shape=(x.shape[0], x.shape[1] // 2), **like_x)
    _check_rows("out", out)
    if out.numel():
        _KERNELS.launch("swiglu", x=x, out=out, dtype=dtype_code(x.dtype))


def _check(x: Tensor) -> dict:
    expect("x", x, shape=("rows", "n"), dtype=KERNEL_DTYPES)
    check_device(x)
    _check_rows("x", x)
    return {"dtype": x.dtype, "device": x.device}


def _check_rows(name: str, tensor: Tensor) -> None:
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(
            f"{name} must have a contiguous last dimension; got strides {tensor.stride()}"
        )
