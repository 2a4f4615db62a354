"""The checker is checked: right answers pass with any seed, planted mistakes are named."""

import json
import math
import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.check import (
    FACTOR,
    Case,
    CheckFailed,
    NotEnoughMemory,
    Rng,
    Speed,
    Suite,
    Timing,
    assert_close,
    fit_batch,
    poisoned,
    require_memory,
)
from common.check.failure import failure_of
from common.check.poison import is_poison
from common.check.record import Report, earned, sources_hash
from common.check.suite import ROOT
from common.check.timing import Ceilings, measure

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


# Poison ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_way_to_allocate_gives_nan(dtype: torch.dtype) -> None:
    like = torch.zeros(3, 4, dtype=dtype)
    with poisoned():
        made = [
            torch.empty(3, 4, dtype=dtype),
            torch.empty_like(like),
            torch.empty_like(like.T),
            like.new_empty(3, 4),
            torch.empty_strided((3, 4), (1, 3), dtype=dtype),
        ]
    for tensor in made:
        assert bool(tensor.isnan().all())
        assert bool(is_poison(tensor).all())


def test_poison_leaves_nothing_behind() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        before = torch.get_deterministic_debug_mode()
        with pytest.raises(ZeroDivisionError), poisoned():
            # this one warns under the deterministic switch
            torch.zeros(4).put_(torch.tensor([0]), torch.tensor([1.0]), accumulate=False)
            raise ZeroDivisionError
        assert torch.get_deterministic_debug_mode() == before
        assert torch.are_deterministic_algorithms_enabled() is False
    assert seen == []


# Random inputs -----------------------------------------------------------------------------------


def test_rng_follows_from_seed_and_names() -> None:
    first = Rng(7, "cpu", "task2", "softmax", "ragged").randn(4, 5)
    assert torch.equal(first, Rng(7, "cpu", "task2", "softmax", "ragged").randn(4, 5))
    assert not torch.equal(first, Rng(8, "cpu", "task2", "softmax", "ragged").randn(4, 5))
    assert not torch.equal(first, Rng(7, "cpu", "task2", "softmax", "other").randn(4, 5))


def test_rng_fills_as_asked() -> None:
    rng = Rng(1, "cpu", "a")
    x = rng.randn(200, 200, dtype=torch.float16, scale=3.0, shift=10.0)
    assert x.dtype == torch.float16
    assert abs(x.float().mean().item() - 10) < 0.2 and abs(x.float().std().item() - 3) < 0.2
    n = rng.integers(2, 5, 1000, dtype=torch.int32)
    assert n.dtype == torch.int32 and set(n.tolist()) == {2, 3, 4}
    assert sorted(rng.permutation(9).tolist()) == list(range(9))
    u = rng.uniform(-1, 1, 1000)
    assert u.min() >= -1 and u.max() < 1


# Right answers pass, whatever the seed -----------------------------------------------------------


def fresh_seeds(n: int) -> list[int]:
    return torch.randint(0, 1 << 30, (n,)).tolist()


def test_a_sum_taken_one_by_one_passes() -> None:
    for seed in fresh_seeds(4):
        rng = Rng(seed, "cpu", "gemm")
        a, b = rng.randn(40, 1000), rng.randn(1000, 40)
        got = torch.zeros(40, 40)
        for k in range(1000):
            got += a[:, k, None] * b[None, k]
        assert_close(got, a.double() @ b.double(), a @ b, axes=("row", "column"))


def online_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    m = torch.full((q.shape[0], 1), -math.inf)
    l, o = torch.zeros(q.shape[0], 1), torch.zeros(q.shape[0], v.shape[1])  # noqa: E741
    for j in range(0, k.shape[0], 8):
        s = q @ k[j : j + 8].T
        new = torch.maximum(m, s.amax(1, keepdim=True))
        p, rescale = torch.exp(s - new), torch.exp(m - new)
        l, o, m = rescale * l + p.sum(1, keepdim=True), rescale * o + p @ v[j : j + 8], new  # noqa: E741
    return o / l


@pytest.mark.parametrize("scale", [1.0, 6.0])
def test_an_online_softmax_passes(scale: float) -> None:
    for seed in fresh_seeds(6):
        rng = Rng(seed, "cpu", "attention")
        q, k, v = rng.randn(50, 64, scale=scale / 8), rng.randn(300, 64), rng.randn(300, 64)
        truth = torch.softmax(q.double() @ k.double().T, -1) @ v.double()
        pytorch = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=1.0)
        assert_close(online_softmax(q, k, v), truth, pytorch, axes=("row", "column"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_pytorch_itself_passes(dtype: torch.dtype) -> None:
    x = Rng(fresh_seeds(1)[0], "cpu").randn(30, 40, dtype=dtype)
    narrow = torch.float32 if dtype == torch.float64 else dtype
    assert_close(
        torch.softmax(x, 1),
        torch.softmax(x.double(), 1),
        torch.softmax(x.to(narrow), 1),
        axes=("row", "column"),
        dtype=dtype,
    )


def test_infinities_and_nan_pass_only_where_the_truth_has_them() -> None:
    truth = torch.tensor([1.0, -math.inf, math.inf, math.nan], dtype=torch.float64)
    assert_close(truth.float(), truth, truth.float(), axes=("column",))
    for wrong in ([1, -math.inf, math.inf, 0], [1, math.inf, math.inf, math.nan], [1, 0, 0, 0]):
        with pytest.raises(CheckFailed):
            assert_close(torch.tensor(wrong).float(), truth, truth.float(), axes=("column",))


def test_nothing_to_compare() -> None:
    empty = torch.zeros(0, 4)
    assert_close(empty, empty.double(), empty, axes=("row", "column"))


def test_a_comparison_that_makes_no_sense_is_refused() -> None:
    x = torch.ones(3)
    with pytest.raises(ValueError, match="float64"):
        assert_close(x, x, x, axes=("row",))
    with pytest.raises(ValueError, match="PyTorch's own"):
        assert_close(x, torch.ones(4).double(), x, axes=("row",))
    with pytest.raises(ValueError, match="axes"):
        assert_close(x, x.double(), x, axes=("row", "column"))
    with pytest.raises(ValueError, match="no budget"):
        assert_close(x, x.double(), x * math.inf, axes=("row",))
    with pytest.raises(ValueError, match="float64 loses"):
        assert_close(x.double(), x.double(), x.double(), axes=("row",))


# Mistakes are named ------------------------------------------------------------------------------

HEADS = ("batch", "head", "row", "column")


def good(seed: int = 3, shape: tuple[int, ...] = (2, 3, 70, 16)) -> tuple[Tensor, Tensor, Tensor]:
    """A right answer, the truth, PyTorch's own."""
    x = Rng(seed, "cpu", "good").randn(*shape)
    truth = torch.softmax(x.double(), -1)
    return torch.softmax(x, -1), truth, torch.softmax(x, -1)


def explanation(got: object, truth: Tensor, pytorch: Tensor, **options: object) -> str:
    options.setdefault("axes", HEADS)
    with pytest.raises(CheckFailed) as caught:
        assert_close(got, truth, pytorch, **options)
    return str(caught.value)


def test_the_place_is_told() -> None:
    got, truth, pytorch = good()
    got[1, 2, 66, 5] += 1
    said = explanation(got, truth, pytorch, tile={"row": 64, "column": 8})
    assert "at batch 1, head 2, row 66, column 5: expected" in said
    assert "row 2 of row tile 1 (tiles of 64), column 5 of column tile 0" in said
    assert "1 of 6,720 elements are off: batch 1 of 0-1; head 2 of 0-2; row 66 of 0-69" in said
    assert f"{FACTOR:g} x PyTorch's own" in said


def test_ranges_are_short() -> None:
    got, truth, pytorch = good()
    got[:, :, 0:60:6] = 7
    said = explanation(got, truth, pytorch)
    assert "row 0, 6, 12, 18, and 6 more places of 0-69; column all 16" in said


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda t: None, "got NoneType None"),
        (lambda t: t.double(), "got (2, 3, 70, 16) float64 on cpu"),
        (lambda t: t[:, :, 1:], "got (2, 3, 69, 16) float32 on cpu"),
        (lambda t: t.to("meta"), "on meta"),
    ],
)
def test_another_kind_of_result(wrong: object, words: str) -> None:
    got, truth, pytorch = good()
    said = explanation(wrong(got), truth, pytorch)
    assert said.startswith("the result should be") and words in said


def test_a_subclass_is_refused() -> None:
    class Lazy(Tensor):
        pass

    got, truth, pytorch = good()
    assert "plain tensor" in explanation(got.as_subclass(Lazy), truth, pytorch)


def test_nothing_written() -> None:
    got, truth, pytorch = good()
    with poisoned():
        got = torch.empty_like(got)
    with pytest.raises(CheckFailed, match="as the output was allocated") as caught:
        assert_close(got, truth, pytorch, axes=HEADS)
    assert caught.value.not_written


def test_everything_computed_as_nan() -> None:
    got, truth, pytorch = good()
    computed = torch.full_like(got, math.inf) - math.inf
    if bool(is_poison(computed).any()):
        pytest.skip("this processor makes the same NaN as PyTorch's fill")
    with pytest.raises(CheckFailed, match="was computed, and is NaN") as caught:
        assert_close(computed, truth, pytorch, axes=HEADS)
    assert not caught.value.not_written


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_ragged_tail_was_never_written(dtype: torch.dtype) -> None:
    got, truth, pytorch = good()
    got, pytorch = got.to(dtype), pytorch.to(dtype)
    with poisoned():
        got[:, :, 64:] = torch.empty(6, 16, dtype=dtype)
    said = explanation(got, truth, pytorch, tile={"row": 64})
    assert "they were never written" in said
    assert "only the last, partial tile is wrong (row 64 and after, tiles of 64)" in said
    assert "ceil(n / tile) blocks" in said


def test_the_ragged_tail_is_wrong() -> None:
    got, truth, pytorch = good()
    got[:, :, 64:] += Rng(1, "cpu").randn(2, 3, 6, 16)
    said = explanation(got, truth, pytorch, tile={"row": 64})
    assert "only the last, partial tile is wrong" in said and "ragged end is not masked" in said


def test_from_the_second_tile_on() -> None:
    got, truth, pytorch = good()
    got[:, :, 32:] *= Rng(1, "cpu").uniform(1.1, 2, 2, 3, 38, 16)
    said = explanation(got, truth, pytorch, tile={"row": 32})
    assert "the first tile of rows is right and it is wrong from the second on" in said
    assert "exp(m_old - m_new)" in said


@pytest.mark.parametrize(("axis", "name"), [(0, "batch"), (1, "head")])
def test_only_the_first_is_right(axis: int, name: str) -> None:
    got, truth, pytorch = good()
    got.movedim(axis, 0)[1:] += Rng(1, "cpu").randn(*got.movedim(axis, 0)[1:].shape)
    assert f"{name} 0 is right and every other {name} is wrong" in explanation(got, truth, pytorch)


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (8.0, "8 = sqrt(64) times"),
        (0.125, "0.125 = 1 / sqrt(64) times"),
        (80**0.5, "sqrt(80) times"),
        (-1.0, "-1 times"),
        (1.5, "1.5 times"),
    ],
)
def test_a_constant_factor(factor: float, words: str) -> None:
    got, truth, pytorch = good()
    assert words in explanation(got * factor, truth, pytorch)


def test_all_zero() -> None:
    got, truth, pytorch = good()
    assert "every element is 0" in explanation(got * 0, truth, pytorch)


def test_a_factor_for_each_row() -> None:
    got, truth, pytorch = good()
    sums = Rng(1, "cpu").uniform(2, 9, 2, 3, 70, 1)
    said = explanation(got * sums, truth, pytorch)
    assert "every row is right up to a factor of its own" in said and "l_i" in said


def test_transposed() -> None:
    got, truth, pytorch = good(shape=(2, 3, 16, 16))
    assert "transposed" in explanation(got.mT.contiguous(), truth, pytorch)
    got, truth, pytorch = good()
    assert "transposed" in explanation(got.mT.reshape(got.shape), truth, pytorch)


@pytest.mark.parametrize(("axis", "name"), [(0, "batch"), (1, "head"), (2, "row"), (3, "column")])
def test_in_anothers_place(axis: int, name: str) -> None:
    got, truth, pytorch = good()
    said = explanation(got.roll(1, axis), truth, pytorch)
    last = truth.shape[axis] - 1
    assert f"({name} 0 holds what belongs to {name} {last})" in said


def test_above_the_diagonal() -> None:
    x = Rng(1, "cpu").randn(2, 30, 30)
    truth = x.double().tril()
    said = explanation(x, truth, x.tril(), axes=("batch", "row", "column"))
    assert "only elements above the diagonal are wrong" in said


def test_zero_and_infinite_elements() -> None:
    got, truth, pytorch = good()
    got[0, 1, 5:9, ::2] = 0
    assert "the wrong elements are all 0" in explanation(got, truth, pytorch)
    got[0, 1, 5:9, ::2] = math.inf
    assert "the wrong elements are infinite" in explanation(got, truth, pytorch)


def test_lost_precision() -> None:
    rng = Rng(1, "cpu", "precision")
    a, b = rng.randn(30, 200), rng.randn(200, 30)
    got = (a.half() @ b.half()).float()
    said = explanation(got, a.double() @ b.double(), a @ b, axes=("row", "column"))
    assert "precision is lost" in said


def test_scattered() -> None:
    got, truth, pytorch = good()
    hit = Rng(1, "cpu").uniform(0, 1, *got.shape) < 0.03
    got[hit] = Rng(2, "cpu").randn(int(hit.sum()))
    said = explanation(got, truth, pytorch)
    assert "scattered" in said and "race" in said


def test_suspects() -> None:
    x = Rng(1, "cpu").randn(20, 30, scale=3)
    truth, pytorch = torch.softmax(x.double(), -1), torch.softmax(x, -1)
    suspects = {
        "over the wrong dimension": lambda: torch.softmax(x.double(), 0),
        "not normalised": torch.exp(x.double()),
    }
    got = torch.softmax(x, 0)
    said = explanation(got, truth, pytorch, axes=("row", "column"), suspects=suspects)
    assert "usually: over the wrong dimension: with that mistake exactly these numbers" in said


def test_a_suspect_that_is_right_is_not_named() -> None:
    got, truth, pytorch = good()
    got[0, 0, 0, 0] += 1
    said = explanation(got, truth, pytorch, suspects={"nothing at all": truth})
    assert "nothing at all" not in said


@pytest.mark.parametrize(
    "mistake",
    [
        lambda x: torch.softmax(x[:, :-1], -1),
        lambda x: torch.softmax(x + torch.tensor([0.0] * 99 + [1e-3]), -1),
        lambda x: torch.softmax(x.half(), -1).float(),
        lambda x: torch.exp(x) / torch.exp(x).half().float().sum(-1, keepdim=True),
        lambda x: torch.softmax(x, -1) + 1e-6,
        lambda x: torch.softmax(x, -1).nan_to_num(0) * (1 + 1e-4),
    ],
    ids=["one key lost", "one key changed", "in half", "sum in half", "offset", "factor"],
)
def test_mild_mistakes_fail(mistake: object) -> None:
    for seed in fresh_seeds(5):
        x = Rng(seed, "cpu").randn(20, 100)
        got = mistake(x)
        got = torch.nn.functional.pad(got, (0, 100 - got.shape[1]))
        with pytest.raises(CheckFailed):
            assert_close(
                got, torch.softmax(x.double(), -1), torch.softmax(x, -1), axes=("row", "column")
            )


# The suite ---------------------------------------------------------------------------------------


def make_suite(**options: object) -> Suite:
    sources = ("task9/attention.py", "task9/attention_kernel.cu")
    return Suite("task9", title="a stage", points=3, sources=sources, **options)


def run(suite: Suite, *arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        suite.main(["--device", "cpu", *arguments])
    return end.value.code


def test_items_by_target() -> None:
    suite = make_suite()
    cases = [
        Case("a", why="", small=True),
        Case("b", why=""),
        Case("c", why="", devices=("cuda",)),
    ]
    suite.check("softmax", cases)(lambda case, device, rng: None)

    @suite.check("gemm", cases, kernels=False)
    def other(case: Case, device: torch.device, rng: Rng) -> None: ...

    targets = ["cpu", "cpu-check", "cuda"]
    found = [(item.check.group, item.case.name, item.target) for item in suite.items(targets)]
    assert found == [
        ("softmax", "a", "cpu"),
        ("softmax", "b", "cpu"),
        ("softmax", "a", "cpu-check"),
        ("softmax", "a", "cuda"),
        ("softmax", "b", "cuda"),
        ("softmax", "c", "cuda"),
        ("gemm", "a", "cpu"),
        ("gemm", "b", "cpu"),
        ("gemm", "a", "cuda"),
        ("gemm", "b", "cuda"),
        ("gemm", "c", "cuda"),
    ]
    assert [item.case.name for item in suite.items(["cuda"], small=True)] == ["a", "a"]
    assert suite.groups == ["softmax", "gemm"]


def test_names_must_be_unique() -> None:
    suite = make_suite()
    with pytest.raises(ValueError, match="same name"):
        suite.check("softmax", [Case("a", why=""), Case("a", why="")])
    suite.check("softmax", [])(test_names_must_be_unique)
    with pytest.raises(ValueError, match="two checks"):
        suite.check("softmax", [])(test_names_must_be_unique)


def test_a_case_has_no_other_attributes() -> None:
    with pytest.raises(AttributeError, match="case 'a' has no 'rows'"):
        Case("a", why="").rows  # noqa: B018


def test_outputs_are_poisoned_and_inputs_repeat(capsys: pytest.CaptureFixture[str]) -> None:
    suite, seen = make_suite(), []

    @suite.check("softmax", [Case("a", why=""), Case("b", why="")], kernels=False)
    def look(case: Case, device: torch.device, rng: Rng) -> None:
        assert bool(torch.empty(3).isnan().all())
        seen.append(rng.randn(3))

    assert run(suite, "--seed", "5") == 0 and run(suite, "--seed", "5") == 0
    assert torch.equal(seen[0], seen[2]) and torch.equal(seen[1], seen[3])
    assert not torch.equal(seen[0], seen[1])
    out = capsys.readouterr().out
    assert "task9: a stage (cpu, --seed 5)" in out and "  softmax    2 of 2 " in out
    assert run(suite) == 0 and run(suite) == 0
    assert not torch.equal(seen[4], seen[6]), "a new seed each run"


def test_failures_are_told_three_times_at_most(capsys: pytest.CaptureFixture[str]) -> None:
    suite = make_suite()

    @suite.check("softmax", [Case(f"n{i}", why=f"reason {i}", rows=i) for i in range(5)])
    def wrong(case: Case, device: torch.device, rng: Rng) -> None:
        got, truth, pytorch = good()
        assert_close(got + 1, truth, pytorch, axes=HEADS)

    @suite.check("gemm", [Case("a", why="")])
    def right(case: Case, device: torch.device, rng: Rng) -> None: ...

    assert run(suite, "--seed", "11") == 1
    out = capsys.readouterr().out
    assert "softmax    0 of 5" in out and "gemm       1 of 1" in out
    assert "wrong, case 'n0' on cpu\n        reason 0 (rows=0)" in out
    assert "case 'n2'" in out and "case 'n3'" not in out and "and 2 more" in out
    assert "again: python -m task9.test --softmax --device cpu --seed 11" in out
    assert run(suite, "--gemm") == 0
    assert "softmax" not in capsys.readouterr().out


def test_a_changing_result_is_called_a_race(capsys: pytest.CaptureFixture[str]) -> None:
    suite, calls = make_suite(), []

    @suite.check("softmax", [Case("a", why="")])
    def racy(case: Case, device: torch.device, rng: Rng) -> None:
        calls.append(1)
        got, truth, pytorch = good()
        got[0, 0, len(calls), 3] = 9
        assert_close(got, truth, pytorch, axes=HEADS)

    assert run(suite) == 1
    assert "a second run on the same inputs gave another result: a race" in capsys.readouterr().out


def test_stubs_give_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    suite = make_suite()
    cases = [Case("a", why=""), Case("b", why="")]

    @suite.check("softmax", cases)
    def empty(case: Case, device: torch.device, rng: Rng) -> None:
        got, truth, pytorch = good()
        assert_close(torch.empty_like(got), truth, pytorch, axes=HEADS)

    @suite.check("gemm", cases)
    def stub(case: Case, device: torch.device, rng: Rng) -> None:
        def gemm() -> None:
            raise NotImplementedError

        gemm()

    assert run(suite) == 1
    out = capsys.readouterr().out
    assert out.count("task9/attention_kernel.cu: softmax is not written yet") == 1
    assert out.count("common/tests/test_check.py: ") == 1
    assert "stub.<locals>.gemm is not written yet" in out
    assert out.count("  not written\n") == 2 and "Traceback" not in out


def test_a_bug_shows_a_short_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    suite = make_suite()

    @suite.check("softmax", [Case("a", why="")])
    def buggy(case: Case, device: torch.device, rng: Rng) -> None:
        raise KeyError("lost")

    @suite.check("softmax", [Case("a", why="")])
    def pytorch_lacks_it(case: Case, device: torch.device, rng: Rng) -> None:
        torch.empty(3, device="meta").item()

    @suite.check("softmax", [Case("a", why="")])
    def plain(case: Case, device: torch.device, rng: Rng) -> None:
        raise AssertionError("tokens differ")

    assert run(suite) == 1
    out = capsys.readouterr().out
    assert "KeyError: 'lost'" in out and "common/check/suite.py" not in out
    assert "not written yet" not in out
    assert "tokens differ\n        at common/tests/test_check.py:" in out


def test_a_failed_build_shows_the_compilers_words_and_ends(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from common.build import BuildError

    suite, calls = make_suite(), []

    @suite.check("softmax", [Case("a", why=""), Case("b", why="")])
    def unbuilt(case: Case, device: torch.device, rng: Rng) -> None:
        calls.append(1)
        raise BuildError("task9/attention_kernel.cu:3:5: error: expected ';'")

    @suite.check("gemm", [Case("a", why="")])
    def after(case: Case, device: torch.device, rng: Rng) -> None: ...

    assert run(suite) == 1
    out = capsys.readouterr().out
    assert "    task9/attention_kernel.cu:3:5: error: expected ';'\n" in out
    assert calls == [1] and "Traceback" not in out
    assert "  did not build\n" in out and "  gemm     not run\n" in out


def test_a_cuda_error_says_how_to_find_it() -> None:
    suite = make_suite()

    @suite.check("softmax", [Case("a", why="b")])
    def crash(case: Case, device: torch.device, rng: Rng) -> None: ...

    error = RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")
    failure = failure_of(error, next(suite.items(["cpu"])), 3)
    assert failure.kind == "kernel" and "Compile with" not in failure.text
    assert "    CUDA error: an illegal memory access was encountered\n" in failure.text
    assert "compute-sanitizer python -m task9.test --check --device cuda" in failure.text


def test_ctrl_c_ends_cleanly(capsys: pytest.CaptureFixture[str]) -> None:
    suite = make_suite()

    @suite.check("softmax", [Case("a", why="")])
    def interrupted(case: Case, device: torch.device, rng: Rng) -> None:
        raise KeyboardInterrupt

    assert run(suite) == 130
    assert capsys.readouterr().err.strip() == "interrupted"


def test_the_check_build_runs_every_setting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import contextlib

    import common.build

    settings = []

    @contextlib.contextmanager
    def using(**options: object):  # noqa: ANN202
        settings.append((options["check"], options["order"], options["eager_copies"]))
        yield

    monkeypatch.setattr(common.build, "using", using)
    suite = make_suite()

    @suite.check("softmax", [Case("a", why="", small=True), Case("b", why="")])
    def look(case: Case, device: torch.device, rng: Rng) -> None:
        if settings[-1][1] == "random":
            raise CheckFailed("no")

    assert run(suite, "--check") == 1
    assert settings == [
        (True, "forward", False),
        (True, "reverse", True),
        (True, "random", False),
    ]
    out = capsys.readouterr().out
    assert "check build, small cases, each in 4 orders of threads" in out
    assert "in the check build: threads of a block in random order" in out
    assert "0 of 1" in out


# Memory ------------------------------------------------------------------------------------------


def test_memory_is_told_before_it_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    require_memory(3 << 20, "cpu", "the weights")
    assert "the weights: needs 3 MiB, " in capsys.readouterr().out
    with pytest.raises(NotEnoughMemory, match="the weights needs 1048576.0 GiB; .* are free"):
        require_memory(1 << 50, "cpu", "the weights")


def test_the_batch_is_halved_until_it_fits() -> None:
    assert fit_batch(64, lambda batch: batch << 10, "cpu", "attention") == (64, "")
    batch, note = fit_batch(64, lambda batch: float(batch == 64) * 2**60, "cpu", "attention")
    assert batch == 32 and note.startswith("scaled down: batch 64 needs 1073741824.0 GiB")
    with pytest.raises(NotEnoughMemory, match="for a single sequence"):
        fit_batch(64, lambda batch: 2**60, "cpu", "attention")


def test_out_of_memory_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    suite = make_suite()

    @suite.check("softmax", [Case("a", why="")])
    def hungry(case: Case, device: torch.device, rng: Rng) -> None:
        raise torch.cuda.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 1 GiB"
        )

    assert run(suite) == 1
    out = capsys.readouterr().out
    assert "Tried to allocate 20.00 GiB; now" in out and "are free" in out


# Times and records -------------------------------------------------------------------------------


def timing(ms: float) -> Timing:
    return Timing(ms, ms * 0.9, ms * 1.2, 20)


def test_timing_statistics() -> None:
    found = Timing.of([float(i) for i in range(101)])
    assert (found.median_ms, found.p10_ms, found.p90_ms, found.n) == (50, 10, 90, 101)
    assert found.per(10).median_ms == 5


def test_speed_knows_its_shares() -> None:
    speed = Speed(
        "attention alone",
        shape="B1",
        dtype=torch.float32,
        ours=timing(2.0),
        baselines={"math": timing(5.0)},
        flops=4e10,
        bytes=2e9,
    )
    assert speed.tflops == pytest.approx(20) and speed.gb_per_s == pytest.approx(1000)
    assert speed.speedup("math") == 2.5
    record = speed.as_record(Ceilings(4000.0, 50.0, 800.0))
    assert record["tflops_share"] == pytest.approx(0.4)
    assert record["gb_per_s_share"] == pytest.approx(0.25)
    with pytest.raises(CheckFailed, match="cannot be"):
        speed.as_record(Ceilings(500.0, 50.0, 800.0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nothing_is_timed_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="needs a GPU"):
        measure({"ours": lambda: None})
    suite, ran = make_suite(), []

    @suite.check("softmax", [Case("a", why="")])
    def right(case: Case, device: torch.device, rng: Rng) -> None: ...

    @suite.measurement("speed", fields=("attention alone",))
    def speed(device: torch.device, report: Report) -> None:
        ran.append("speed")

    @suite.measurement("text", devices=("cpu", "cuda"))
    def text(device: torch.device, report: Report) -> None:
        report.text("generated text", "Once upon a time")

    assert run(suite) == 0 and ran == []
    out = capsys.readouterr().out
    assert "speed: needs a GPU" in out and "generated text: Once upon a time" in out


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_measure_times_the_work() -> None:
    x = torch.randn(4096, 4096, device="cuda")
    outputs = {}
    times = measure(
        {"one": lambda: x @ x, "four": lambda: [x @ x for _ in range(4)]},
        seconds=0.5,
        check=outputs.update,
    )
    assert set(outputs) == {"one", "four"}
    assert 3 < times["four"].median_ms / times["one"].median_ms < 5
    with pytest.raises(CheckFailed):
        measure({"one": lambda: x}, seconds=0.1, check=lambda outputs: fail())


def fail() -> None:
    raise CheckFailed("wrong")


def test_a_measurement_keeps_its_promises() -> None:
    report = Report(make_suite(), device="cpu", seed=1, complete=True)
    report.allowed = ("attention alone",)
    speed = Speed("another", "B1", torch.float32, timing(1), {})
    with pytest.raises(ValueError, match="not among the fields"):
        report.add(speed)


def test_the_report(tmp_path: Path) -> None:
    suite = make_suite()

    @suite.check("softmax", [Case("a", why="")])
    def right(case: Case, device: torch.device, rng: Rng) -> None: ...

    @suite.check("gemm", [Case("a", why="")])
    def wrong(case: Case, device: torch.device, rng: Rng) -> None:
        raise AssertionError("no")

    @suite.check("attention", [Case("a", why="")])
    def crash(case: Case, device: torch.device, rng: Rng) -> None:
        assert json.loads(file.read_text())["status"] == "crashed"

    file = tmp_path / "report.json"
    assert run(suite, "--report", str(file), "--seed", "4") == 1
    report = json.loads(file.read_text())
    assert (report["stage"], report["device"], report["status"]) == ("task9", "cpu", "failed")
    assert [(g["name"], g["passed"], g["total"]) for g in report["groups"]] == [
        ("softmax", 1, 1),
        ("gemm", 0, 1),
        ("attention", 1, 1),
    ]
    assert (report["points"], report["earned"]) == (3, 2) and report["complete"]
    run_of = report["run"]
    assert run_of["seed"] == 4 and len(run_of["sources"]["sha256"]) == 64
    assert {"torch", "python", "cpu", "cores", "transformers"} <= set(run_of["machine"])
    assert run(suite, "--softmax", "--report", str(file)) == 0
    assert not json.loads(file.read_text())["complete"]


def test_points() -> None:
    assert earned(4, 2, 3) == 2.67 and earned(3, 3, 3) == 3 and earned(1, 0, 0) == 0


def test_the_sources_hash_follows_content_and_headers(tmp_path: Path) -> None:
    (tmp_path / "task9").mkdir()
    (tmp_path / "common/include").mkdir(parents=True)
    kernel, header = tmp_path / "task9/a.cu", tmp_path / "common/include/ptx.cuh"
    kernel.write_text("int a;")
    header.write_text("int b;")
    first = sources_hash(["task9/a.cu"], tmp_path)
    assert first == sources_hash(["task9/*.cu"], tmp_path)
    header.write_text("int c;")
    second = sources_hash(["task9/a.cu"], tmp_path)
    kernel.write_text("int d;")
    assert len({first, second, sources_hash(["task9/a.cu"], tmp_path)}) == 3


# pytest ------------------------------------------------------------------------------------------


def test_a_suite_under_pytest(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["common.check.pytest_plugin"]\n')
    (tmp_path / "answer.py").write_text("def test_batched_softmax(inp, dim): ...\n")
    (tmp_path / "test_stage.py").write_text(
        textwrap.dedent("""
            import torch
            from answer import test_batched_softmax
            from common.check import Case, Suite, assert_close

            suite = Suite("task9", title="", points=1)

            @suite.check("a", [Case("it works", why="x"), Case("seed", why="y")], kernels=False)
            def adds(case, device, rng):
                x = rng.randn(3)
                print("numbers", case.name, x.tolist())
                off = 0.5 if case.name == "seed" else 0
                assert_close(x + off, x.double(), x, axes=("row",))

            test_task9 = suite.pytest()
        """)
    )

    arguments = ["-v", "-rP", "-p", "no:cacheprovider", "--seed", "77"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=tmp_path,
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
    )
    out = done.stdout
    assert "test_task9[adds-it_works-cpu] PASSED" in out
    assert "test_task9[adds-seed-cpu] FAILED" in out and "1 failed, 1 passed" in out
    assert "largest error 0.5" in out and "Traceback" not in out and "run_item" not in out
    assert "--seed 77" in out
    numbers = Rng(77, "cpu", "task9", "adds", "it works").randn(3)
    assert f"numbers it works {numbers.tolist()}" in out


def test_failures_name_the_case_and_the_reason() -> None:
    suite = make_suite()

    @suite.check("softmax", [Case("ragged tail", why="one past a tile", rows=65)], kernels=False)
    def wrong(case: Case, device: torch.device, rng: Rng) -> None: ...

    item = next(suite.items(["cpu"]))
    failure = failure_of(CheckFailed("off"), item, 3)
    assert failure.kind == "wrong"
    assert failure.text.startswith(
        "wrong, case 'ragged tail' on cpu\n    one past a tile (rows=65)"
    )
