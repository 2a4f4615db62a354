"""16-bit floats, tensor-core and copy instructions of the CUDA-on-CPU layer, against PyTorch."""

import math

import pytest
import torch

from common.build import KernelError, Kernels, using

_kernels = Kernels(__file__, "kernels/numbers.cu")
DTYPES = [torch.float16, torch.bfloat16]
ALL_BITS = torch.arange(65536, dtype=torch.int32).to(torch.int16)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def same(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Equal, or both NaN; -0 is not 0."""
    return (x.isnan() & y.isnan()) | ((x == y) & (x.signbit() == y.signbit()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_16_bit_pattern_as_float(dtype):
    out = torch.empty(65536)
    _kernels.launch("run_widen", bf16=int(dtype is torch.bfloat16), out=out)
    assert same(out, ALL_BITS.view(dtype).float()).all()


def floats(dtype) -> torch.Tensor:
    """Every 16-bit number, every tie between two, the neighbours of the ties, and random bits."""
    numbers = ALL_BITS.view(dtype).double()
    numbers = numbers[numbers.isfinite()].sort().values.unique()
    ties = ((numbers[1:] + numbers[:-1]) / 2).float()
    infinity = torch.tensor(math.inf)
    random = torch.randint(-(2**31), 2**31, (300_000,)).to(torch.int32).view(torch.float32)
    special = torch.tensor(
        [math.inf, -math.inf, math.nan, 65519.996, 65520.0, 3.4e38, -0.0, 2**-25]
    )
    return torch.cat(
        [
            numbers.float(),
            ties,
            ties.nextafter(infinity),
            ties.nextafter(-infinity),
            random,
            special,
        ]
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_of_floats(dtype):
    x = floats(dtype)
    nearest, truncated = torch.empty_like(x, dtype=dtype), torch.empty_like(x, dtype=dtype)
    _kernels.launch(
        "run_narrow", bf16=int(dtype is torch.bfloat16), x=x, nearest=nearest, truncated=truncated,
        n=x.numel(),
    )  # fmt: skip
    assert same(nearest, x.to(dtype)).all()
    assert (nearest[x.isnan()].view(torch.int16) == 0x7FFF).all()  # the hardware's one NaN

    # Toward zero: the nearest, or its neighbour on the side of zero.
    toward = x.to(dtype)
    away = toward.double().abs() > x.double().abs()
    toward.view(torch.int16)[away] -= 1
    assert same(truncated, toward).all()


def exactly(value: torch.Tensor, dtype) -> torch.Tensor:
    """float64 rounded once: through float rounded to odd, so that nothing is rounded twice."""
    near = value.float()
    rest = value - near.double()
    bits = near.view(torch.int32).clone()
    even = (rest != 0) & (bits & 1 == 0) & near.isfinite()
    outward = (rest > 0) == (near > 0)
    bits[even & outward] += 1
    bits[even & ~outward] -= 1
    return bits.view(torch.float32).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_arithmetic(dtype):
    n = 40_000
    x, y, z = (torch.randint(-32768, 32768, (n,)).to(torch.int16).view(dtype) for _ in range(3))
    x[::2], y[::2], z[::2] = (torch.randn(n // 2).to(dtype) for _ in range(3))
    x[::5], y[::5], z[::5] = x[0], y[0], (torch.randn(n // 5) * 1e-5).to(dtype)
    out = torch.empty(n, 12, dtype=dtype)
    _kernels.launch(
        "run_arithmetic", bf16=int(dtype is torch.bfloat16), x=x, y=y, z=z, out=out, n=n
    )
    a, b = x.float(), y.float()
    for column, expected in enumerate([a + b, a - b, a * b, a / b]):
        assert same(out[:, column], expected.to(dtype)).all(), column

    # Fused: the product is exact in float64, and so is the sum unless the exponents are far apart.
    product = x.double() * y.double()
    total = product + z.double()
    exact = (total - product == z.double()) & (total - z.double() == product)
    assert exact.float().mean() > 0.3
    assert same(out[:, 4], exactly(total, dtype))[exact | total.isnan()].all()

    for column, wins in ((5, x > y), (6, x < y)):  # a NaN loses
        expected = torch.where(x.isnan(), y, torch.where(y.isnan() | wins, x, y))
        assert same(out[:, column], expected)[(x != 0) | (y != 0)].all()  # of -0 and 0, either
    assert torch.allclose(out[:, 7].float(), a.exp().to(dtype).float(), rtol=1e-2, equal_nan=True)
    assert same(out[:, 8], exactly(x.double().abs().sqrt(), dtype)).all()
    assert torch.equal(out[:, 9].view(torch.int16), x.view(torch.int16) ^ -32768)
    pair = [(x, z, y), (y, z, x)]
    for column, (p, q, r) in enumerate(pair, 10):
        product, total = p.double() * q.double(), p.double() * q.double() + r.double()
        exact = (total - product == r.double()) & (total - r.double() == product)
        assert same(out[:, column], exactly(total, dtype))[exact].all()


def test_fused_multiply_add_rounds_once():
    # 1 + 2^-11 + tiny in half: the product alone is a tie that would go to even; the tiny part decides.
    x = torch.tensor([1 + 2**-10], dtype=torch.float16)
    y = torch.tensor([1.0], dtype=torch.float16)
    for sign in (1, -1):
        z = torch.tensor([2.0**-11 + sign * 2.0**-20], dtype=torch.float16)
        out = torch.empty(1, 12, dtype=torch.float16)
        _kernels.launch("run_arithmetic", bf16=0, x=x, y=y, z=z, out=out, n=1)
        assert out[0, 4].item() == (1 + 2**-9 if sign > 0 else 1 + 2**-10)


@pytest.mark.parametrize("bf16", [0, 1])
@pytest.mark.parametrize("check", [False, True], ids=["fast", "check"])
def test_names_of_16_bit_intrinsics(bf16, check):
    out = torch.full((12,), math.nan)
    with using(check=check):
        _kernels.launch("run_names", bf16=bf16, out=out)
    assert out.tolist() == [1.5, -2, 1.5, -2, 1, 16, 0, 1, 1, 1, 4, -1]


# ---- tensor cores and copies

MODES = [dict(check=c, eager_copies=e) for c in (False, True) for e in (False, True)]


@pytest.mark.parametrize("settings", MODES[::2], ids=["fast", "check"])
@pytest.mark.parametrize("by_columns", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_mma(dtype, by_columns, settings):
    k = 8 if dtype is torch.float32 else 16
    a, b, c = torch.randn(16, k).to(dtype), torch.randn(k, 8).to(dtype), torch.randn(16, 8)
    d = torch.full((16, 8), math.nan)
    given = b.T.contiguous() if by_columns and k == 16 else b
    number = [torch.float32, torch.float16, torch.bfloat16].index(dtype)
    with using(**settings):
        _kernels.launch("run_mma", type=number, a=a, b=given, c=c, d=d, b_by_columns=by_columns)
    if dtype is torch.float32:  # tf32: 10 bits of mantissa
        bits = [(t.view(torch.int32) + 0x1000) & ~0x1FFF for t in (a, b)]
        a, b = (t.view(torch.float32) for t in bits)
    truth = a.double() @ b.double() + c.double()
    assert (d - truth).abs().max() < 1e-5


@pytest.mark.parametrize("check", [False, True], ids=["fast", "check"])
def test_ldmatrix(check):
    matrices = torch.randint(0, 30000, (4, 8, 8)).to(torch.int16)
    out = torch.zeros(32, 14, dtype=torch.int32)
    with using(check=check):
        _kernels.launch("run_ldmatrix", inp=matrices, out=out, misalign=0, threads=32)
    rows = matrices.reshape(4, 32, 2)  # lane's pair in each matrix
    columns = matrices.transpose(1, 2).reshape(4, 32, 2)
    pairs = [rows[0], columns[0], *rows[:2], *columns[:2], *rows, *columns]
    expected = torch.stack([p[:, 0].int() | p[:, 1].int() << 16 for p in pairs], dim=1)
    assert torch.equal(out, expected)


def test_ldmatrix_checks_alignment_and_the_warp():
    matrices, out = torch.zeros(256, dtype=torch.int16), torch.zeros(32 * 14, dtype=torch.int32)
    with pytest.raises(KernelError, match="ldmatrix: the address of a row is not a multiple of 16"):
        _kernels.launch("run_ldmatrix", inp=matrices, out=out, misalign=1, threads=32)
    with pytest.raises(KernelError, match="ldmatrix needs all 32 lanes of the warp; 16 are there"):
        _kernels.launch("run_ldmatrix", inp=matrices, out=out, misalign=0, threads=16)


@pytest.mark.parametrize(
    "settings", MODES, ids=["fast-late", "fast-eager", "check-late", "check-eager"]
)
@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_async_copies(order, settings):
    x, out = torch.randn(32), torch.full((32,), math.nan)
    with using(order=order, **settings):
        _kernels.launch("run_copies", inp=x, out=out, shift=0)
    expected = x.clone()
    expected[22:24] = expected[30:] = 0
    assert torch.equal(out, expected)


def test_async_copies_land_late_or_eagerly():
    x, out = torch.randn(4), torch.zeros(2)
    _kernels.launch("run_early_read", inp=x, out=out)
    assert out[0].isnan() and out[1] == x[0]
    with using(eager_copies=True):
        _kernels.launch("run_early_read", inp=x, out=out)
    assert out[0] == out[1] == x[0]
    for eager in (False, True):
        with (
            using(check=True, eager_copies=eager),
            pytest.raises(KernelError, match="is in flight"),
        ):
            _kernels.launch("run_early_read", inp=x, out=out)


def test_async_copies_outside_a_tensor():
    x, out = torch.randn(32), torch.zeros(32)
    with (
        using(check=True),
        pytest.raises(KernelError, match="reads 4 bytes of tensor 'inp' at byte 128"),
    ):
        _kernels.launch("run_copies", inp=x, out=out, shift=3)
