"""The products of a decode step: few rows of x, and each weight read once."""

import functools

import torch
from torch import Tensor

from common.build import Kernels, dtype_code
from common.inputs import KERNEL_DTYPES, check_device, describe, expect

MAX_ROWS = 16
TILE = 16  # rows of w
ON_CPU = 3  # blocks where there is no GPU
BLOCKS_PER_SM = 2
_KERNELS = Kernels(__file__, "product.cu")


def product(
    x: Tensor,
    w: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    swiglu: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """``x @ w.T``, with what stands before and behind it in a decoder layer.

    Args:
        x: ``(rows, K)``, up to 16 rows, float32, float16 or bfloat16; K a multiple of 8.
        w: ``(N, K)``; with ``swiglu`` the rows of gate, then those of up.
        norm: ``(K,)``: x is first normed, ``x / sqrt(mean(x^2) + eps) * norm``.
        residual: as out: is added. It may be out itself.
        swiglu: ``silu(gate) * up`` of the product's halves.
        out: ``(rows, N)``, with ``swiglu`` ``(rows, N / 2)``; a new one if None.

    Returns:
        out. Sums are float32; what is rounded is what the plain model rounds, but for x / sqrt(mean(x^2) + eps).

    Raises:
        ValueError: arguments that do not fit, named.
    """
    expect("x", x, shape=("rows", "K"), dtype=KERNEL_DTYPES)
    check_device(x)
    like_x, (rows, K) = {"dtype": x.dtype, "device": x.device}, x.shape
    expect("w", w, shape=("N", K), **like_x)
    N = w.shape[0]
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"x must have from 1 to {MAX_ROWS} rows; got {rows}")
    if K % 8 or not K:
        raise ValueError(f"K must be a positive multiple of 8; got {K}")
    if not N or (swiglu and N % 16):
        raise ValueError(f"N must be positive, and a multiple of 16 with swiglu; got {N}")
    shape = (rows, N // 2 if swiglu else N)
    if out is None:
        out = torch.empty(shape, **like_x)
    for name, tensor, wanted in (
        ("norm", norm, (K,)),
        ("residual", residual, shape),
        ("out", out, shape),
    ):
        if tensor is not None:
            expect(name, tensor, shape=wanted, **like_x)
            if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
                raise ValueError(
                    f"{name} must have a contiguous last dimension; got {describe(tensor)} with"
                    f" strides {tensor.stride()}"
                )
    for name, tensor in (("x", x), ("w", w), ("norm", norm)):
        if tensor is not None and (
            tensor.stride(-1) != 1
            or (tensor.dim() > 1 and tensor.stride(0) * tensor.element_size() % 16)
            or tensor.data_ptr() % 16
        ):
            raise ValueError(
                f"{name} must have rows that begin at multiples of 16 bytes, and a contiguous last dimension; got"
                f" {describe(tensor)} with strides {tensor.stride()}"
            )
    tiles = -(-N // TILE)
    _KERNELS.launch(
        "product", x=x, w=w, norm=x if norm is None else norm, has_norm=int(norm is not None),
        residual=x if residual is None else residual, has_residual=int(residual is not None), out=out,
        swiglu=int(swiglu), eps=eps, blocks=min(tiles, _blocks(x.device)), dtype=dtype_code(x.dtype),
    )  # fmt: skip
    return out


@functools.cache
def _blocks(device: torch.device) -> int:
    if device.type == "cpu":
        return ON_CPU
    return BLOCKS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
