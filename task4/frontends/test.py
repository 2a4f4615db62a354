"""Task 4's own cases, for each front end."""

import contextlib
from dataclasses import replace

import pytest
import torch

from common.check import Case, Suite, assert_close
from common.check.attention import hide_invisible, mistakes, references
from common.check.watch import Watch
from task4.frontends import __main__ as command
from task4.frontends import cpp
from task4.frontends.benchmark import Times
from task4.frontends.frontends import FrontEnd
from task4.test import ATTENTION

suite = Suite("task4.frontends", title="FlashAttention-2 through other front ends")
AXES = ("batch", "row", "head", "column")

# Those that are about the output's memory or the tile of our kernel are not of interest here.
HOST = [
    replace(case, devices=("cpu",))
    for case in ATTENTION
    if "cpu" in case.devices and not (case.gaps or case.large_tile)
]
# The configurations of the assignment that asks for a kernel in C++: 8 heads of 64, at most 1e-3 off.
ASSIGNMENT = [
    Case(f"S {seq}", why="the assignment's largest error is 1e-3", devices=("cpu",), seq=seq)
    for seq in (128, 512, 1024)
]


@suite.check("cpp", HOST, kernels=False)
def host_matches_float64(case, device, rng):
    q, k, v = case.qkv(rng)
    visible = case.visible(device)
    truth, pytorch = references(q, k, v, large_scores=case.magnitude > 1, **visible)
    inputs = q, k.clone(), v.clone()
    hide_invisible(k, v, **visible)
    with Watch() as did:
        got = cpp.flash_attention(q, k, v, **visible)
    assert_close(got, truth, pytorch, axes=AXES, suspects=mistakes(*inputs, **visible))
    did.expect({}, memory=got.nbytes)


@suite.check("cpp", ASSIGNMENT, kernels=False)
def cpp_solves_the_assignment(case, device, rng):
    q, k, v = (rng.randn(1, case.seq, 8, 64) for _ in range(3))
    for causal in (False, True):
        truth, pytorch = references(q, k, v, causal=causal)
        for attend in (cpp.flash_attention, cpp.naive_attention):
            got = attend(q, k, v, causal=causal)
            assert (got - truth).abs().max() < 1e-3
            assert_close(got, truth, pytorch, axes=AXES)


test_frontends = suite.pytest()


def test_more_keys_than_a_head_dim_of_128():
    q, k, v = (torch.randn(2, n, 4, 200) for n in (30, 50, 50))
    truth, pytorch = references(q, k, v, causal=True)
    assert_close(cpp.flash_attention(q, k, v, causal=True), truth, pytorch, axes=AXES)


@pytest.mark.parametrize("threads", [1, 3])
def test_any_number_of_threads_gives_the_same(threads):
    q, k, v = (torch.randn(2, 200, 2, 64) for _ in range(3))
    before = torch.get_num_threads()
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, before)
        expected = cpp.flash_attention(q, k, v)
        torch.set_num_threads(threads)
        assert torch.equal(cpp.flash_attention(q, k, v), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(1, 4, 2, 300), "k": torch.zeros(1, 4, 2, 300), "v": torch.zeros(1, 4, 2, 300)}, "head_dim must be from 1 to 256"),
        ({"q": torch.zeros(1, 4, 2, 8, device="meta")}, "runs on the CPU alone"),
        ({"v": torch.zeros(1, 5, 2, 8)}, "v must be"),
        ({"k": torch.zeros(1, 4, 2, 8, dtype=torch.float64)}, "k must be"),
        ({"seqlens_k": torch.zeros(3, dtype=torch.int32)}, "seqlens_k must be"),
    ],
)  # fmt: skip
def test_bad_input(change, message):
    given = {name: torch.zeros(1, 4, 2, 8) for name in "qkv"} | change
    with pytest.raises(ValueError, match=message):
        cpp.flash_attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)


def test_naive_takes_float32_only():
    with pytest.raises(ValueError, match="q must be .* float32"):
        cpp.naive_attention(*(torch.zeros(1, 4, 2, 8, dtype=torch.half) for _ in range(3)))


def test_the_command(capsys):
    with pytest.raises(SystemExit):
        command.main(["rust"])
    assert "there is no front end 'rust'; there are cpp" in capsys.readouterr().err
    assert command.main(["cpp", "--check-only"]) == 0
    said = capsys.readouterr().out
    assert f"cpp   {len(HOST) + len(ASSIGNMENT)} of {len(HOST) + len(ASSIGNMENT)}" in said


def test_the_table_has_bars_and_says_which_are_not_met(monkeypatch):
    slow = {"host.cpp": Times(1.0, 0.5, 9), "PyTorch": Times(0.5, 1.0, 9)}
    monkeypatch.setattr(command, "time_on_cpu", lambda *_: slow)
    grids = command._on_cpu(seed=1)
    assert [grid.bars for grid in grids] == [[False] * 3] * 2
    assert grids[0].rows[0][-1] == "0.50 (n 9)" and grids[0].rows[1][-1] == "0.50 ! (n 9)"


def test_what_is_not_installed_is_said():
    other = FrontEnd("other", "", (), ("cpu",), packages=("no_such_package",))
    assert other.why_not("cpu") == "other needs no_such_package: pip install '.[other]'"
    assert other.why_not("cuda") == "other runs on cpu tensors; here they are on cuda"


if __name__ == "__main__":
    suite.main()
