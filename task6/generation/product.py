"""The products of a decode step: few rows of x, and each weight read once."""

import functools

import torch
from torch import Tensor

from common.build import Kernels, dtype_code
from common.inputs import KERNEL_DTYPES, check_device, describe, expect
from task5.ladder.checks import expect_loadable
from task5.ladder.gpu import is_hopper

MAX_ROWS = 16
TILE = 16  # rows of w
ACTIVATIONS = (None, "swiglu", "gelu")
ON_CPU = 3  # blocks where there is no GPU
BLOCKS_PER_SM = 2
LINE = 128  # bytes of memory: TMA loads rows of w that are whole lines
_KERNELS = Kernels(__file__, "product.cu")
_STREAMED = Kernels(__file__, "streamed_product.cu")  # of GPUs, for Hopper


def product(
    x: Tensor,
    w: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    row_sums: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``x @ w.T``, with what stands before and behind it in a decoder layer.

    Args:
        x: ``(rows, K)``, up to 16 rows, float32, float16 or bfloat16; K a multiple of 8.
        w: ``(N, K)``; with "swiglu" the rows of gate, then those of up.
        norm: ``(K,)``: x is first normed, ``x / sqrt(mean(x^2) + eps) * norm``.
        row_sums: ``(N,)``, ``w @ norm``: makes it a layer norm, ``(x - mean(x)) / sqrt(var(x) + eps) * norm``. What
            such a norm adds belongs to the bias, ``w @ b``.
        bias: ``(N,)``: is added.
        activation: "gelu", approximated by tanh, of the product; "swiglu": ``silu(gate) * up`` of its halves.
        residual: as out: is added. It may be out itself.
        out: ``(rows, N)``, with "swiglu" ``(rows, N / 2)``; a new one if None.

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
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}; got {activation!r}")
    swiglu = activation == "swiglu"
    if not N or (swiglu and N % 16):
        raise ValueError(f"N must be positive, and a multiple of 16 with swiglu; got {N}")
    if row_sums is not None and norm is None:
        raise ValueError("row_sums are for a norm; got none")
    if swiglu and (row_sums is not None or bias is not None):
        raise ValueError("swiglu has neither row_sums nor bias")
    shape = (rows, N // 2 if swiglu else N)
    if out is None:
        out = torch.empty(shape, **like_x)
    for name, tensor, wanted in (
        ("norm", norm, (K,)),
        ("row_sums", row_sums, (N,)),
        ("bias", bias, (N,)),
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
    expect_loadable(x=x, w=w, norm=norm)
    tiles = -(-N // TILE)
    whole_lines = K * x.element_size() % LINE == 0
    (_STREAMED if is_hopper(x.device) and whole_lines else _KERNELS).launch(
        "product", x=x, w=w, norm=norm, row_sums=row_sums, bias=bias, residual=x if residual is None else residual,
        has_residual=int(residual is not None), out=out, activation=ACTIVATIONS.index(activation), eps=eps,
        blocks=min(tiles, _blocks(x.device)), dtype=dtype_code(x.dtype),
    )  # fmt: skip
    return out


@functools.cache
def _blocks(device: torch.device) -> int:
    if device.type == "cpu":
        return ON_CPU
    return BLOCKS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
