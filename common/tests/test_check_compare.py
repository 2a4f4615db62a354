"""The checker is checked: right answers pass with any seed, planted mistakes are named."""

import math
import warnings

import pytest
import torch
from torch import Tensor

from common.check import (
    FACTOR,
    CheckFailed,
    Rng,
    assert_close,
    poisoned,
)
from common.check.poison import is_poison
from common.tests.answers import HEADS, good

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
    l, o = torch.zeros(q.shape[0], 1), torch.zeros(q.shape[0], v.shape[1])
    for j in range(0, k.shape[0], 8):
        s = q @ k[j : j + 8].T
        new = torch.maximum(m, s.amax(1, keepdim=True))
        p, rescale = torch.exp(s - new), torch.exp(m - new)
        l, o, m = rescale * l + p.sum(1, keepdim=True), rescale * o + p @ v[j : j + 8], new
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


def explanation(got: object, truth: Tensor, pytorch: Tensor, **options: object) -> str:
    options.setdefault("axes", HEADS)
    with pytest.raises(CheckFailed) as caught:
        assert_close(got, truth, pytorch, **options)
    return str(caught.value)


def test_the_place_is_named() -> None:
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
    assert "usually: over the wrong dimension: that mistake gives exactly these numbers" in said


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
