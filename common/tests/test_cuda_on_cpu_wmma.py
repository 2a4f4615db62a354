"""nvcuda::wmma of the CUDA-on-CPU layer: products against float64, and mistakes named by file and line."""

import math

import pytest
import torch

from common.build import KernelError, Kernels, dtype_code, using
from common.tests.kernel_file import KernelFile

FILE = KernelFile("wmma.cu")
_kernels = Kernels(__file__, "kernels/wmma.cu")
MISTAKES, line_of = FILE.names("Mistake"), FILE.line_of
ORDERS = ("forward", "reverse", "random")
HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
SHAPES = [(dtype, m, n, 16) for dtype in (HALF, BFLOAT) for m, n in ((16, 16), (32, 8), (8, 32))]
SHAPES += [(FLOAT, 16, 16, 8)]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In float64, what a matrix of this dtype makes of x: tf32 for float32, 10 bits of mantissa."""
    if dtype is FLOAT:
        return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(FLOAT).double()
    return x.to(dtype).double()


@pytest.mark.parametrize("check", [False, True], ids=["fast", "check"])
@pytest.mark.parametrize("columns", range(8))
@pytest.mark.parametrize("dtype, m, n, k", SHAPES)
def test_products(dtype, m, n, k, columns, check):
    a, b, c, d = (
        torch.randn(m, k),
        torch.randn(k, n),
        torch.randn(m, n),
        torch.full((m, n), math.nan),
    )
    for half_sum in range(1 + (dtype is HALF)):
        with using(check=check, order=ORDERS[columns % 3]):
            _kernels.launch(
                "run_product", dtype=dtype_code(dtype), m=m, sum_in_half=half_sum, a=a, b=b, c=c, d=d, factor=-0.5,
                columns=columns,
            )  # fmt: skip
        start = rounded(c, HALF) if half_sum else c.double()
        truth = -0.5 * (rounded(a, dtype) @ rounded(b, dtype) + start)
        # One rounding to half at the end, of numbers below 16.
        assert (d - truth).abs().max() < (2**-7 if half_sum else 1e-5)


def test_fragments_are_spread_like_those_of_no_gpu():
    x, y, held = torch.arange(256.0), torch.full((256,), math.nan), torch.full((32, 8), math.nan)
    for check in (False, True):
        with using(check=check):
            _kernels.launch("run_global_copy", x=x, y=y, held=held, ldm=16)
        assert torch.equal(y.view(16, 16), x.view(16, 16).T)  # loaded by rows, stored by columns
        assert torch.equal(held.flatten().sort().values, x)  # each element is in one place
        rows, columns = held.div(16, rounding_mode="floor"), held % 16
        for lane in range(32):  # no lane has all its elements in one row or column
            assert rows[lane].unique().numel() > 2 and columns[lane].unique().numel() > 2


def test_out_of_range_matrices_are_named():
    x, y, held = torch.randn(256), torch.empty(256), torch.empty(32, 8)
    with using(check=True):
        with pytest.raises(KernelError, match="reads 32 bytes of tensor 'x'") as raised:
            _kernels.launch("run_global_copy", x=x[:240], y=y, held=held, ldm=16)
        assert line_of("global load") in str(raised.value)
        with pytest.raises(KernelError, match="writes 32 bytes of tensor 'y'") as raised:
            _kernels.launch("run_global_copy", x=x, y=y[:255], held=held, ldm=16)
        assert line_of("global store") in str(raised.value)


@pytest.mark.parametrize("check", [False, True], ids=["fast", "check"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "mistake, where, says",
    [
        ("MISALIGNED", "load", "address of the matrix is not a multiple of 32 bytes"),
        ("ODD_LDM", "load", r"ldm must be a multiple of 4 elements \(16 bytes\); it is 18"),
        ("SHORT_LDM", "load", "ldm, the distance of rows, is 12, but they have 16 elements"),
        ("LANES_DIFFER", "load", "all lanes of a warp must give the same address, ldm and layout"),
        ("LANES_LEAVE", "load", "load_matrix_sync needs all 32 lanes of the warp; 31 are there"),
        (
            "NOT_TF32",
            "mma",
            "an element of a is not a tf32 number; convert it with wmma::__float_to_tf32",
        ),
    ],
)
def test_mistakes_are_named(mistake, where, says, order, check):
    out = torch.empty(256)
    with using(check=check, order=order), pytest.raises(KernelError, match=says) as raised:
        _kernels.launch("run_mistakes", out=out, mistake=MISTAKES.index(mistake), threads=32)
    assert line_of(where) in str(raised.value)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "mistake, says",
    [
        ("NO_SYNCWARP", "read after write|which no thread of the block has written"),
        ("UNWRITTEN", r"uninitialised shared memory: reads x\[\d+\]"),
    ],
)
def test_check_build_sees_what_fragments_read(mistake, says, order):
    out = torch.empty(256)
    with using(check=True, order=order), pytest.raises(KernelError, match=says) as raised:
        _kernels.launch("run_mistakes", out=out, mistake=MISTAKES.index(mistake), threads=32)
    assert line_of("load") in str(raised.value)


@pytest.mark.parametrize("order", ORDERS)
def test_check_build_sees_what_fragments_write(order):
    out = torch.full((32,), math.nan)
    for check in (False, True):
        with using(check=check, order=order):
            _kernels.launch("run_read_back", out=out, wait=1)
        assert (out == 2).all()
    with using(check=True, order=order), pytest.raises(KernelError, match="race on x") as raised:
        _kernels.launch("run_read_back", out=out, wait=0)
    assert line_of("store") in str(raised.value) and line_of("read back") in str(raised.value)


def test_part_of_a_warp_is_too_few():
    with pytest.raises(
        KernelError, match="load_matrix_sync needs all 32 lanes of the warp; 16 are"
    ):
        _kernels.launch("run_mistakes", out=torch.empty(256), mistake=0, threads=16)


def test_an_unfilled_fragment_is_nan():
    out = torch.zeros(256)
    _kernels.launch("run_mistakes", out=out, mistake=MISTAKES.index("UNFILLED"), threads=32)
    assert out.isnan().all()
    _kernels.launch("run_mistakes", out=out, mistake=MISTAKES.index("NONE"), threads=32)
    assert (out == 8).all()
