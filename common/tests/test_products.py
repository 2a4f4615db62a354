"""Float32 products on tensor cores: which are taken, and their errors against float64. The kernel needs a Hopper."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from common.build import library, using
from common.check import Rng
from common.check.hard_inputs import FACTORS, make_factors
from common.products import TensorCoreLinear, fp32, linear_of
from common.products.fp32 import is_large
from common.tests.devices import HOPPER, needs_hopper
from task6.generation import Decoder, Weights
from task6.model import customModel


@pytest.fixture
def rng(request):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Rng(request.config.getoption("--seed"), device, request.node.name)


# Which product is taken --------------------------------------------------------------------------------


def test_the_names_of_products():
    assert linear_of("torch") is F.linear
    assert isinstance(linear_of("tensor cores"), TensorCoreLinear)
    with pytest.raises(
        ValueError, match="products must be 'torch' or 'tensor cores'; got 'tensor core'"
    ):
        linear_of("tensor core")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_on_a_cpu_it_is_pytorchs_product(dtype, biased):
    x, w = torch.randn(2, 600, 512).to(dtype), torch.randn(1024, 512).to(dtype)
    bias = torch.randn(1024).to(dtype) if biased else None
    assert torch.equal(TensorCoreLinear()(x, w, bias), F.linear(x, w, bias))


@pytest.mark.parametrize(
    ("M", "N", "K", "large"),
    [
        (4096, 4096, 4096, True),
        (512, 4096, 4096, True),
        (128, 8192, 512, True),
        (127, 2**20, 4096, False),
        (128, 8191, 4096, False),
        (4096, 4096, 511, False),
        (4, 128256, 4096, False),
        (0, 4096, 4096, False),
    ],
)
def test_the_sizes_alone_decide(M, N, K, large):
    assert is_large(M, N, K) is large


@pytest.mark.parametrize(
    ("x", "w", "bias", "message"),
    [
        (torch.zeros(2, 8), torch.zeros(4, 6), None, r"x must be \(any, 6\) float32 on cpu; got \(2, 8\)"),
        (torch.zeros(3, 2, 8), torch.zeros(4, 8).double(), None, r"x must be \(any, any, 8\) float64"),
        (torch.zeros(2, 8), torch.zeros(8), None, r"w must be \(N, K\); got \(8,\)"),
        (torch.zeros(2, 8), torch.zeros(4, 8), torch.zeros(8), r"bias must be \(4,\) float32"),
    ],
)  # fmt: skip
def test_bad_input(x, w, bias, message):
    with pytest.raises(ValueError, match=message):
        TensorCoreLinear()(x, w, bias)


@pytest.mark.parametrize(
    ("M", "K"), [(1, 512), (262144, 4096), (16385, 4096), (10**6, 100), (300, 2**20)]
)
def test_slabs_are_few_and_equal_and_fit_in_the_scratch(M, K):
    rows = fp32._slab(M, K)
    slabs = -(-M // rows)
    assert rows == M or (rows % 128 == 0 and M - (slabs - 1) * rows > 0)
    assert rows <= 128 or 4 * rows * K <= fp32.SCRATCH
    assert slabs == 1 or 0.9 * fp32.SCRATCH * (slabs - 1) < 4 * K * M


def test_copies_have_parts_of_their_own():
    linear = TensorCoreLinear()
    linear._parts = (torch.zeros(1),) * 2
    for other in (copy.deepcopy(linear), copy.copy(linear), pickle.loads(pickle.dumps(linear))):
        assert isinstance(other, TensorCoreLinear) and other._parts is None


# The method, without a GPU: fp32.cu's header has these figures ------------------------------------------


def split(x):
    """hi, lo and the units of a matrix's rows, as split.cuh computes them."""
    exponent = np.frexp(np.abs(x).max(1))[1] - 1
    factor = np.exp2(np.minimum(14 - exponent, 127))[:, None].astype(np.float32)
    hi = (x * factor).astype(np.float16)
    return hi, (x * factor - hi.astype(np.float32)).astype(np.float16), 1 / factor


def toward_zero(x, exponent):
    """x without what is below 2^exponent."""
    return np.ldexp(np.trunc(np.ldexp(x, -exponent)), exponent)


def wgmma(d, a, b, kept):
    """d + a @ b.T over 16 k: the addends lose what is ``kept`` bits below the largest one's first, the sum what is 24."""
    products = a.astype(np.float64)[:, None] * b.astype(np.float64)
    addends = np.concatenate([products, d[..., None]], -1)
    exponent = np.frexp(np.abs(addends).max(-1))[1]
    total = toward_zero(addends, exponent[..., None] - kept).sum(-1)
    return toward_zero(total, np.frexp(total)[1] - 24)


def emulated(x, w, kept, depth=64):
    (x_hi, x_lo, x_unit), (w_hi, w_lo, w_unit) = split(x), split(w)
    total = np.zeros((len(x), len(w)), np.float32)
    for k in range(0, x.shape[1], depth):
        d = np.zeros(total.shape)
        for a, b in ((x_lo, w_hi), (x_hi, w_lo), (x_hi, w_hi)):
            for i in range(k, k + depth, 16):
                d = wgmma(d, a[:, i : i + 16], b[:, i : i + 16], kept)
        total += d.astype(np.float32)
    return total * x_unit * w_unit.T


def sequential(x, w):
    """One fp32 FMA after the other."""
    total = np.zeros((len(x), len(w)), np.float32)
    for a, b in zip(x.T.astype(np.float64), w.T.astype(np.float64), strict=True):
        total = (total + a[:, None] * b).astype(np.float32)
    return total


def errors(*results, truth):
    """Root mean squares, in units of 2^-24 of a typical element."""
    unit = 2.0**-24 * np.sqrt((truth**2).mean())
    return [np.sqrt(((result - truth) ** 2).mean()) / unit for result in results]


@pytest.mark.parametrize(
    "kept", [24, 26], ids=["as V100", "as Hopper"]
)  # known bits of their adders
def test_the_errors_that_the_kernels_header_gives(kept):
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal((32, 4096)).astype(np.float32) for _ in range(2))
    truth = x.astype(np.float64) @ w.T.astype(np.float64)
    (x_hi, x_lo, x_unit), (w_hi, w_lo, w_unit) = split(x), split(w)
    whole_x, whole_w = ((hi.astype(np.float64) + lo) for hi, lo in ((x_hi, x_lo), (w_hi, w_lo)))
    lost = x_lo.astype(np.float64) @ w_lo.T.astype(np.float64) * x_unit * w_unit.T
    exact = whole_x @ whole_w.T * x_unit * w_unit.T
    found = errors(
        exact, truth + lost, emulated(x, w, kept), emulated(x, w, kept, depth=4096), sequential(x, w), truth=truth
    )  # fmt: skip
    expected = [(0.8, 1.2), (0.6, 0.9), (3, 4.5), (30, 90), (17, 22)]
    assert all(low <= e <= high for e, (low, high) in zip(found, expected, strict=True)), found


@pytest.mark.parametrize("name", FACTORS)
def test_the_method_loses_less_than_fp32_rounded_at_every_step(name, request):
    rng = Rng(request.config.getoption("--seed"), "cpu", name)
    x, w = (t.numpy() for t in make_factors(name, rng, 16, 24, 1024))
    truth = x.astype(np.float64) @ w.T.astype(np.float64)
    size = np.abs(x).astype(np.float64) @ np.abs(w).T.astype(
        np.float64
    )  # of the elements one by one
    ours, theirs = (
        np.sqrt((((y - truth) / size) ** 2).mean()) for y in (emulated(x, w, 26), sequential(x, w))
    )
    assert ours <= theirs, f"{ours / theirs:.3g} x"


# In a decoder ------------------------------------------------------------------------------------------


def test_a_decoder_may_multiply_prompts_like_this(rng):
    hidden, seq = (1024, 300) if HOPPER else (64, 5)
    torch.manual_seed(0)
    weights = Weights.of(customModel(hidden, hidden // 64, 1, 30, seq + 4, device=rng.device))
    prompt = rng.integers(0, 30, 4, seq)
    plain, split = (
        Decoder(weights, 4, seq + 4, fused=False, products=products)
        for products in ("torch", "tensor cores")
    )
    launched = []

    def observe(kernels, name, arguments, launch):
        launched.append(name)
        launch(arguments)

    tokens = plain.prefill(prompt)
    with library.observing(observe):
        assert torch.equal(split.prefill(prompt), tokens)
    torch.testing.assert_close(split.logits, plain.logits, atol=1e-4, rtol=0)
    assert launched.count("product") == (4 if HOPPER else 0)
    with pytest.raises(ValueError, match="products must be"):
        Decoder(weights, 4, seq + 4, products="precise")


# On a GPU ----------------------------------------------------------------------------------------------


def multiply(x, w, bias=None, linear=None):
    """On tensor cores, which is made sure of."""
    torch.full(
        (x.numel() // x.shape[-1], len(w)), torch.nan, device=x.device
    )  # the output's memory, next
    launched = []

    def observe(kernels, name, arguments, launch):
        launched.append(name)
        launch(arguments)

    with library.observing(observe):
        got = (linear or TensorCoreLinear())(x, w, bias)
    assert "product" in launched, "PyTorch's product was taken"
    return got


def expect_accuracy(x, w, bias=None, **options):
    """No larger errors than PyTorch's fp32 product, of which none is in units of another element's size."""
    got, theirs = multiply(x, w, bias, **options), F.linear(x, w, bias)
    truth = F.linear(x.double(), w.double(), None if bias is None else bias.double())
    size = F.linear(x.double().abs(), w.double().abs()).clamp_min(1e-300)
    ours, their = (((t.double() - truth) / size).nan_to_num(nan=torch.inf) for t in (got, theirs))
    assert got.shape == truth.shape and got.is_contiguous()
    rms, largest = (
        f(ours) / f(their) for f in (lambda e: e.square().mean().sqrt(), lambda e: e.abs().max())
    )
    assert rms <= 1 and largest <= 1.5, f"rms {rms:.3g} x, largest {largest:.3g} x PyTorch's"
    return got


@needs_hopper
@pytest.mark.parametrize("name", FACTORS)
def test_its_errors_are_no_larger_than_pytorchs(rng, name):
    expect_accuracy(*make_factors(name, rng, 1024, 2048, 2048))


@needs_hopper
@pytest.mark.parametrize(
    ("M", "N", "K"),
    [
        (1024, 1024, 512),  # whole tiles
        (1025, 1025, 513),  # one past a tile, odd strides
        (128, 8200, 520),
        (2000, 530, 1000),
        (999, 1500, 777),
        (3000, 383, 576),  # the last tile has its left half and a part of its right one
        (70000, 65, 515),  # more tiles than blocks, and each half empty
        (4096, 4096, 4096),
        (300, 4096, 16384),
    ],
)
@pytest.mark.parametrize("biased", [False, True])
def test_sizes(rng, M, N, K, biased):
    x, w = make_factors("normal", rng, M, N, K)
    expect_accuracy(x, w, rng.randn(N) if biased else None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="sizes for the CPU")
@pytest.mark.parametrize("check", [False, True], ids=["fast", "check"])
@pytest.mark.parametrize(("M", "N", "K"), [(128, 256, 64), (130, 300, 200), (1, 1, 700)])
def test_the_cpu_runs_the_kernel_too(rng, monkeypatch, M, N, K, check):
    monkeypatch.setattr(fp32, "can_split", lambda dtype, device: True)
    monkeypatch.setattr(fp32, "is_large", lambda M, N, K: True)
    x, w = make_factors("rows 1e4 apart", rng, M, N, K)
    bias = rng.randn(N)
    with using(check=check, order="random", seed=1, limit=120):
        got = multiply(x, w, bias)
    truth = F.linear(x.double(), w.double(), bias.double())
    size = F.linear(x.double().abs(), w.double().abs()) + bias.double().abs()
    assert ((got.double() - truth).abs() <= 2**-20 * size).all()


@needs_hopper
def test_strided_rows_are_read_in_place(rng):
    whole = rng.randn(4, 300, 3 * 640)
    whole[..., :640] = whole[..., 1280:] = torch.nan
    wide = rng.randn(1024, 700)
    wide[:, :30] = wide[:, 670:] = torch.nan
    x, w = whole[..., 640:1280], wide[:, 30:670]
    got = expect_accuracy(x, w)
    assert torch.equal(got, multiply(x.contiguous(), w.contiguous()))


@needs_hopper
def test_slabs_change_nothing(rng, monkeypatch):
    x, w = make_factors("rows 1e4 apart", rng, 3333, 1000, 600)
    whole = multiply(x, w)
    monkeypatch.setattr(fp32, "SCRATCH", 2**21)
    assert fp32._slab(3333, 600) < 1000
    assert torch.equal(multiply(x, w), whole)


@needs_hopper
def test_always_the_same_bits(rng):
    x, w = make_factors("normal", rng, 5000, 5000, 1024)
    linear = TensorCoreLinear()
    first = multiply(x, w, linear=linear)
    assert all(torch.equal(multiply(x, w, linear=linear), first) for _ in range(20))


@needs_hopper
def test_zeros_infinities_and_nan(rng):
    x, w = make_factors("normal", rng, 1024, 1024, 1024)
    x[3], w[5] = 0, 0
    x[7, 20], x[8, 1], w[9, 30] = torch.inf, -torch.inf, torch.inf
    x[10, 40], w[11, 50] = torch.nan, torch.nan
    x[12, 60], x[12, 61] = torch.inf, torch.inf
    got, theirs = multiply(x, w), x @ w.T
    assert torch.equal(got.isnan(), theirs.isnan())
    infinite = theirs.isinf()
    assert torch.equal(got[infinite], theirs[infinite]) and torch.equal(got.isinf(), infinite)
    finite = theirs.isfinite()
    assert (got[finite] - theirs[finite]).abs().max() < 1e-4
    assert (got[3].nan_to_num(0, 0, 0) == 0).all()


def change_in_place(layer):
    with torch.no_grad():
        layer.weight.mul_(2)


def replace(layer):
    layer.weight = torch.nn.Parameter(layer.weight * 2, requires_grad=False)


def assign_data(layer):
    layer.weight.data = layer.weight.data * 2


def load(layer):
    layer.load_state_dict({"weight": layer.weight * 2})


def there_and_back(layer):
    layer.to(torch.bfloat16).to(torch.float32)


@needs_hopper
@pytest.mark.parametrize("change", [change_in_place, replace, assign_data, load, there_and_back])
def test_a_changed_weight_is_split_again(rng, change):
    x, w = make_factors("normal", rng, 1024, 1024, 1024)
    layer, linear = torch.nn.Linear(1024, 1024, bias=False, device="cuda"), TensorCoreLinear()
    layer.requires_grad_(False).weight.copy_(w)
    del w
    multiply(x, layer.weight, linear=linear)
    for _ in range(3):
        change(layer)
        assert torch.equal(multiply(x, layer.weight, linear=linear), multiply(x, layer.weight))


@needs_hopper
def test_a_weight_is_split_once(rng):
    x, w = make_factors("normal", rng, 1024, 1024, 1024)
    linear, launched = TensorCoreLinear(), []
    with library.observing(
        lambda kernels, name, arguments, launch: (launched.append(name), launch(arguments))
    ):
        for _ in range(3):
            linear(x, w)
    assert launched == ["split", "product", "product", "product"]


@needs_hopper
@pytest.mark.parametrize(
    "why", ["TF32", "gradients", "autocast", "another dtype", "transposed", "few rows"]
)
def test_pytorchs_product_is_taken(rng, why, monkeypatch):
    x, w = make_factors("normal", rng, 1024, 1024, 1024)
    if why == "TF32":
        monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32")
    elif why == "gradients":
        w.requires_grad_()
    elif why == "another dtype":
        x, w = x.half(), w.half()
    elif why == "transposed":
        w = w.T
    elif why == "few rows":
        x = x[:100]
    launched = []
    with (
        library.observing(lambda kernels, name, arguments, launch: launched.append(name)),
        torch.autocast("cuda", enabled=why == "autocast"),
    ):
        assert torch.equal(TensorCoreLinear()(x, w), F.linear(x, w))
    assert not launched


@needs_hopper
def test_in_a_cuda_graph(rng):
    x, w = make_factors("normal", rng, 1024, 1024, 1024)
    linear = TensorCoreLinear()
    linear(x, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = linear(x, w)
    x.copy_(rng.randn(*x.shape))
    graph.replay()
    assert torch.equal(out, linear(x, w))
