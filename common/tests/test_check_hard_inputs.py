"""Hard inputs are what their names say, and what is compared on them."""

import pytest
import torch

from common.check import CheckFailed, Rng, launches
from common.check.hard_inputs import ACCURACY, FLOAT32, LAZY, HardCase, make_inputs
from common.check.loss import Loss


@pytest.mark.parametrize("name", [*ACCURACY, *FLOAT32, *LAZY])
def test_hard_inputs(name):
    shape = (1, 512, 4, 64)
    q, k, v = make_inputs(name, Rng(1, "cpu", name), shape, torch.float32)
    assert all(t.shape == shape and t.isfinite().all() for t in (q, k, v))
    scores = (q[0, :, 0].double() @ k[0, :, 0].double().T) / 8
    top = scores.amax(-1)
    if name == "rising scores":
        assert (scores.mean(0).diff() < 0).double().mean() > 0.5 and 50 < scores[:, 0].mean() < 70
    elif name == "jumps of more than 2^126":
        steps = top.new_tensor([scores[:, i:].amax() for i in (449, 448, 256, 8)])
        assert (steps.diff() > 87).all()
    elif name == "local":
        assert (scores.argmax(-1) - torch.arange(512)).abs().double().median() < 40
    elif name == "sink":
        assert (scores.argmax(-1) == 0).double().mean() > 0.9
    elif name == "subnormal v":
        assert 0 < v.abs().max() < torch.finfo(torch.float32).tiny
    elif name == "rows of 1e4 x larger scores":
        assert 1e3 < top[::8].median() / top[1::8].median() < 1e5
    with pytest.raises(ValueError, match="no inputs 'nothing'"):
        make_inputs("nothing", Rng(1, "cpu"), shape, torch.float32)


def test_a_drift_and_a_cliff_move_the_maximum():
    sizes = dict(why="", q_len=100, head_dim=64)

    def scores(**given):
        q, k, _ = HardCase("hard", **sizes, **given).qkv(Rng(1, "cpu", "hard"))
        return (q[0, :, 0].double() @ k[0, :, 0].double().T) / 8

    mean = scores(drift=(60.0, 0.0)).mean(0)
    assert 55 < mean[:5].mean() < 65 and abs(mean[-5:].mean()) < 5
    cliff = scores(cliff=200.0)[:, 40]
    assert abs(cliff[0]) < 8 and 190 < cliff[-1] < 210


def test_a_loss_is_relative_to_anothers():
    truth = torch.randn(2, 8, 3, 16, dtype=torch.float64)
    truth[:, :, 0] *= 1e-4
    error = 1e-6 * torch.randn_like(truth)
    once, twice = Loss.of(truth + error, truth), Loss.of(truth + 2 * error, truth)
    assert twice.ratios(once) == pytest.approx(dict.fromkeys(twice.ratios(once), 2.0))
    error[:, :, 0] *= 3  # one head alone, the one with small values
    ratios = Loss.of(truth + error, truth).ratios(once)
    assert ratios["rms of a head"] == pytest.approx(3)
    assert ratios["largest in units of its head"] == pytest.approx(3)
    assert ratios["largest"] == pytest.approx(3 ** (1 / 3))
    for wrong in (torch.nan, torch.inf):
        got = truth + error
        got[0, 0, 0, 0] = wrong
        assert set(Loss.of(got, truth).ratios(once).values()) == {torch.inf}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_launch_that_differs_is_counted(dtype):
    x, calls = torch.randn(2, 3).to(dtype), iter(range(200))
    launches.assert_repeat(lambda x: x + 0.0 * next(calls), [x], launches=100)
    rare = iter([False] * 8 + [True] * 3 + [False] * 90)
    with pytest.raises(CheckFailed, match="3 of 100 launches gave another result than the first"):
        launches.assert_repeat(lambda x: x + 1.0 * next(rare), [x], launches=100)
