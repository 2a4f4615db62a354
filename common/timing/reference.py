"""What PyTorch reaches on this GPU, to judge a rate by: a pure read, and large matrix products."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache

import torch
from torch import Tensor

from common.memory import free_memory
from common.timing.measure import measure

PURE_READ = "a pure read"


@dataclass(frozen=True)
class Reference:
    """Rates measured on this GPU: a pure read, and matrix products of 8192 cubed."""

    read_gb_per_s: float
    fp32_tflops: float
    bf16_tflops: float
    split_tflops: float

    def matmul(self, dtype: torch.dtype, *, split: bool = False) -> tuple[float, str]:
        """TFLOP/s of a matrix product of this dtype, and its name; float16 shares bfloat16's.

        ``split``: float32 as tensor cores multiply it, see :func:`split_matmul_tflops`.
        """
        if split:
            return self.split_tflops, "a float32 matrix product split into three of 16 bits"
        if dtype in (torch.float32, torch.float64):
            return self.fp32_tflops, "a float32 matrix product"
        return self.bf16_tflops, "a 16-bit matrix product"

    def fastest_matmul(self, dtype: torch.dtype) -> float:
        """TFLOP/s that no kernel exceeds on inputs of this dtype: float32 may go through the tensor cores too."""
        return max(self.matmul(dtype)[0], self.bf16_tflops)

    def as_record(self) -> dict[str, float]:
        return asdict(self)


@cache
def reference() -> Reference:
    """Measured once per process, in about two seconds."""
    free, _ = free_memory("cuda")
    n = 8192 if free > 2 << 30 else 4096
    return Reference(
        read_gb_per_s=_read_gb_per_s(min(2 << 30, free // 4)),  # 2 GiB where there is room
        fp32_tflops=matmul_tflops(torch.float32, n),
        bf16_tflops=matmul_tflops(torch.bfloat16, n),
        split_tflops=split_matmul_tflops(n),
    )


def _read_gb_per_s(size: int) -> float:
    x = torch.ones(size // 4, dtype=torch.float32, device="cuda")
    timing = measure({"read": lambda: x.sum()}, seconds=0.3)["read"]
    return x.numel() * 4 / timing.median_ms / 1e6


def matmul_tflops(dtype: torch.dtype, n: int = 8192, *, tf32: bool = False) -> float:
    """What PyTorch's matrix product of n cubed reaches; float32 in float32, or rounded to tf32."""
    a, b = (torch.randn(n, n, device="cuda").to(dtype) for _ in range(2))
    with float32_products(tf32=tf32):
        return _tflops(lambda: a @ b, n)


@contextmanager
def float32_products(*, tf32: bool) -> Iterator[None]:
    """Inside, PyTorch multiplies float32 matrices rounded to tf32, or in float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def split_matmul_tflops(n: int = 8192) -> float:
    """What three products of float16 parts, which stand for one of float32, reach together.

    A float32 number is the sum of two float16 ones, hi + lo, and of the four products of parts lo lo' is below what
    is kept. The first matrix holds weights, as attention multiplies them: their many small numbers take less power
    than normal ones do, and so the clocks are what they are in a kernel.
    """
    a = 2**15 * torch.randn(n, n, device="cuda").softmax(-1)
    a_hi, a_lo = _parts(a)
    b_hi, b_lo = _parts(torch.randn(n, n, device="cuda"))
    return _tflops(lambda: (a_lo @ b_hi, a_hi @ b_lo, a_hi @ b_hi), n)


def _parts(x: Tensor) -> tuple[Tensor, Tensor]:
    hi = x.half()
    return hi, (x - hi).half()


def _tflops(multiply: Callable[[], object], n: int) -> float:
    return 2 * n**3 / measure({"matmul": multiply}, seconds=0.5)["matmul"].median_ms / 1e9
