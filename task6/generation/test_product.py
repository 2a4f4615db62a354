"""Products of few rows against float64."""

import random

import pytest
import torch
from torch.nn import functional as F

from common.build import using
from common.check.rng import new_seed
from common.tests.devices import DEVICE, HOPPER
from task6.generation import product as product_module
from task6.generation.product import product


def expected(x, w, norm, eps, layer_norm, bias, residual, activation):
    """What is computed, in float64, and by how much rounding may change it.

    In 16 bits each of K terms is rounded, by up to half an eps to either side: the error of their sum is about half an
    eps by the root of the sum of their squares. In float32 it is the partial sums that are rounded, each with a
    variance of 0.045 eps^2 by its square. A lane has up to n = K / 32 terms, and a partial sum of j terms is about the
    root of j in size: 0.022 n in all, and at most 0.45 where lanes and warps are added. Eight standard deviations are
    allowed, which chance does not reach. A term that is missing is more than that.
    """
    unit = torch.finfo(x.dtype).eps
    factor = 8 * (0.45 + 0.022 * x.shape[1] / 32) ** 0.5 if x.dtype == torch.float32 else 2
    x, w, norm, bias, residual = (
        t.double() if t is not None else None for t in (x, w, norm, bias, residual)
    )
    terms = x
    if layer_norm:
        terms = (
            x * norm / (x.var(1, correction=0, keepdim=True) + eps).sqrt()
        )  # before the mean is taken off
        x = F.layer_norm(x, norm.shape, norm, None, eps)
    elif norm is not None:
        terms = x = F.rms_norm(x, norm.shape, norm, eps)
    y = x @ w.T
    loss = unit * (factor * (terms**2 @ (w**2).T).sqrt() + 4 * y.abs())
    if layer_norm:  # row_sums is rounded as well
        loss += unit * terms.mean(1, keepdim=True).abs() * (w @ norm / norm.mean()).abs()
    if bias is not None:
        loss += unit * bias.abs()
        y = y + bias
    if activation == "gelu":  # its slope is at most 1.13
        y, loss = F.gelu(y, approximate="tanh"), 1.2 * loss + 1e-6
    if activation == "swiglu":
        (gate, up), (gate_loss, up_loss) = y.chunk(2, 1), loss.chunk(2, 1)
        y = F.silu(gate) * up
        loss = 1.1 * up.abs() * gate_loss + gate.abs() * up_loss + unit * y.abs()
    if residual is not None:
        loss = loss + unit * (y.abs() + (residual + y).abs())
        y = residual + y
    return y, loss


@pytest.fixture(params=[False, True], ids=["", "streamed"])
def streamed(request, monkeypatch):
    """With Hopper's kernel or the other one. The CPU runs both."""
    if DEVICE == "cuda" and request.param and not HOPPER:
        pytest.skip("of GPUs, needs a Hopper")
    monkeypatch.setattr(product_module, "is_hopper", lambda device: request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_it_matches_float64(dtype, streamed):
    for _ in range(25 if DEVICE == "cpu" else 100):
        seed = new_seed()
        r = random.Random(seed)
        torch.manual_seed(seed)
        rows, K = r.randint(1, 16), 8 * r.choice((1, 3, 8, 16, 17, 24, 50, 128, 200))
        activation = r.choice((None, "swiglu", "gelu"))
        swiglu = activation == "swiglu"
        N = 16 * r.randint(1, 9) if swiglu else r.choice((1, 16, 17, 64, 100))
        wide = torch.randn(rows, K + 16, device=DEVICE).to(dtype)
        x, w = wide[:, 8:-8], torch.randn(N, K + 16, device=DEVICE).mul_(K**-0.5).to(dtype)
        w = w[:, 8:-8] if r.random() < 0.5 else w[:, 8:-8].contiguous()
        norm = torch.rand(K, device=DEVICE).to(dtype) + 0.5 if r.random() < 0.5 else None
        shape = (rows, N // 2 if swiglu else N)
        residual = torch.randn(shape, device=DEVICE).to(dtype) if r.random() < 0.5 else None
        layer_norm = norm is not None and not swiglu and r.random() < 0.5
        bias = None
        if not swiglu and r.random() < 0.5:
            bias = torch.randn(N, device=DEVICE).to(dtype)
        truth, loss = expected(x, w, norm, 1e-5, layer_norm, bias, residual, activation)
        out = torch.full(shape, torch.nan, device=DEVICE, dtype=dtype)
        if residual is not None and r.random() < 0.5:
            out.copy_(residual)
            residual = out
        row_sums = (w.float() @ norm.float()).to(dtype) if layer_norm else None
        got = product(
            x, w, norm=norm, eps=1e-5, row_sums=row_sums, bias=bias, activation=activation, residual=residual, out=out
        )  # fmt: skip
        assert got is out
        error = (got.double() - truth).abs()
        assert (error <= loss).all(), (
            f"seed {seed}: {(error / loss).max():.3g} of what rounding explains"
        )


@pytest.mark.skipif(DEVICE == "cuda", reason="the check build is the CPU's")
@pytest.mark.parametrize("order", ["forward", "random"])
def test_the_check_build_finds_nothing(order, streamed):
    for dtype, rows, K, N in ((torch.float32, 3, 600, 33), (torch.bfloat16, 9, 1600, 20)):
        x, w = torch.randn(rows, K).to(dtype), torch.randn(N, K).to(dtype)
        with using(check=True, order=order, seed=1, limit=120):
            product(x, w, norm=torch.ones(K, dtype=dtype))


@pytest.mark.parametrize(
    ("x", "w", "options", "message"),
    [
        ((17, 16), (16, 16), {}, "x must have from 1 to 16 rows; got 17"),
        ((1, 12), (16, 12), {}, "K must be a positive multiple of 8; got 12"),
        ((1, 16), (24, 16), {"activation": "swiglu"}, "a multiple of 16 with swiglu; got 24"),
        ((1, 16), (16, 24), {}, r"w must be \(N, 16\)"),
        ((1, 16), (16, 16), {"norm": torch.ones(8)}, r"norm must be \(16\)|norm must be \(16,\)"),
        ((1, 16), (16, 16), {"residual": torch.ones(1, 8)}, r"residual must be \(1, 16\)"),
    ],
)
def test_bad_input(x, w, options, message):
    with pytest.raises(ValueError, match=message):
        product(torch.zeros(x), torch.zeros(w), **options)
