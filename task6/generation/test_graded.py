"""Float32 products and the graded layer: how they are measured and judged."""

import math

import pytest
import torch

from task6.generation import graded
from task6.generation.fakes import beside


def test_float32_products_are_judged():
    fine = {"normal": (0.25, 0.5), "subnormal": (1.0, 1.2)}
    lost, nan = {"normal": (1.01, 1.0)}, {"normal": (0.2, 0.3), "tiny": (math.nan, 0.1)}
    rows = [beside(900.0, fine), beside(899.0, lost), beside(900.0, nan), beside(math.nan, fine)]
    grid = graded.product_grid([*rows, beside(900.0)])
    judged = [row[-4:] for row in grid.rows]
    assert judged[0] == ["3.00", "1.00", "subnormal", "1.20"] and grid.rows[0][-5] == "7"
    assert judged[1] == ["3.00 !", "1.01 !", "normal", "1.00"]
    assert judged[2] == ["3.00", "nan !", "tiny", "0.30"] and judged[3][:2] == ["nan !", "1.00"]
    assert judged[4] == ["3.00", "nan !", "-", "nan"]
    assert grid.bars == [True, True, False, False, True, False, False, True, True, False]
    scaled = beside(600.0, note="scaled down: batch 32")
    grid = graded.layer_grid([beside(900.0), scaled, beside(900.0, ours=math.nan)])
    assert [row[-1] for row in grid.rows] == ["3.00", "2.00 !", "nan !"]
    assert grid.bars == [True, False, False] and grid.rows[1][0] == f"made up; {scaled.note}"


def test_errors_are_multiples_of_pytorchs(monkeypatch):
    torch.manual_seed(0)
    x, w = torch.randn(64, 30), torch.randn(20, 30)
    truth = x.double() @ w.double().T
    off = 1e-3 * torch.randn(64, 20) * (x.abs() @ w.abs().T)
    ours, theirs = ((truth + scale * off).float() for scale in (2, 1))
    rms, largest = graded.relative_errors(ours, theirs, x, w)
    assert rms == pytest.approx(2, rel=1e-3) and largest == pytest.approx(2, rel=1e-3)
    ours[3, 4] = torch.nan
    assert graded.relative_errors(ours, theirs, x, w) == (math.inf, math.inf)
    theirs[3, 4] = torch.nan
    assert all(map(math.isnan, graded.relative_errors(ours, theirs, x, w)))
    monkeypatch.setattr(graded, "CHECKED", 16)  # rows 0, 4, 8 ...
    assert graded.relative_errors(ours, theirs, x, w)[0] == pytest.approx(2, rel=1e-3)
    zero = torch.zeros(2, 20)
    assert graded.relative_errors(zero, zero, torch.zeros(2, 30), w) == (0, 0)


def test_float32_products_are_measured(monkeypatch):
    """All but the times, with PyTorch's own product in place of ours on a CPU."""

    def measured(sides, *, check, seconds):
        check({name: side() for name, side in sides.items()})
        return dict(zip(sides, (beside(900.0).ours, beside(900.0).theirs), strict=True))

    monkeypatch.setattr(graded, "measure", measured)
    monkeypatch.setattr(graded, "SIZES", ((40, 30, 20), (90, 30, 20)))
    for name, size in dict(CHECKED=16, BATCH=2, SEQ=12, HIDDEN=128, HEADS=2).items():
        monkeypatch.setattr(graded, name, size)
    products, layer = graded.grids(1, "cpu")
    assert [row[0] for row in products.rows] == ["40 x 30 x 20", "90 x 30 x 20"]
    assert all(row[-4:-2] == ["3.00", "1.00"] for row in products.rows)
    names = [f"B2 S12 hidden 128, 2 heads, {mask}" for mask in ("non-causal", "causal")]
    assert [row[0] for row in layer.rows] == names and layer.bars == [True, True]
