"""The case of an attention check: its defaults, what a failure shows of it, and the layouts of q, k and v."""

import itertools
from dataclasses import dataclass

import pytest
import torch

from common.check import AttentionCase, Rng
from common.check.attention import (
    NOT_ZERO,
    attention_float64,
    equal_splits,
    mistakes,
    online_softmax_float64,
    online_softmax_mistakes,
)

CPU = torch.device("cpu")


def test_a_case_has_defaults_and_shows_what_is_unusual() -> None:
    case = AttentionCase("a", why="b", q_len=5, head_dim=8, heads=4, causal=True)
    assert (case.kv_len, case.kv_heads, case.batch, case.small) == (5, 4, 2, False)
    assert case.values == {"q_len": 5, "head_dim": 8, "heads": 4, "causal": True}
    assert repr(case) == "AttentionCase('a', q_len=5, head_dim=8, heads=4, causal=True)"
    with pytest.raises(TypeError, match="dim_head"):
        AttentionCase("a", why="b", q_len=5, dim_head=8)
    with pytest.raises(AttributeError, match="case 'a' has no 'rows'"):
        case.rows  # noqa: B018


def test_a_suite_can_add_fields() -> None:
    @dataclass(frozen=True, kw_only=True, repr=False)
    class Decode(AttentionCase):
        q_len: int = 1
        num_splits: int | None = None

    case = Decode("a", why="b", kv_len=70, head_dim=8, num_splits=3)
    assert (case.q_len, case.kv_len, case.num_splits) == (1, 70, 3)
    assert case.values == {"head_dim": 8, "kv_len": 70, "num_splits": 3}


def test_what_the_queries_see() -> None:
    case = AttentionCase("a", why="b", q_len=5, head_dim=8, seqlens=(3, 5), causal=True)
    seen = case.visible(CPU)
    assert seen["causal"] and seen["seqlens_k"].tolist() == [3, 5] and "leftpad_k" not in seen
    assert seen["seqlens_k"].dtype == torch.int32


@pytest.mark.parametrize(
    ("layout", "strides"),
    [
        ("contiguous", (5 * 4 * 8, 4 * 8, 8, 1)),
        ("fused", (5 * 3 * 4 * 8, 3 * 4 * 8, 8, 1)),
        ("heads first", (4 * 5 * 8, 8, 5 * 8, 1)),
        ("odd", (5 * 4 * 11, 4 * 11, 11, 1)),
        ("cache", (105 * 4 * 8, 4 * 8, 8, 1)),
        ("expanded", (5 * 4 * 8, 4 * 8, 0, 1)),
    ],
)
def test_layouts(layout: str, strides: tuple[int, ...]) -> None:
    usual = AttentionCase("a", why="b", q_len=5, head_dim=8, heads=4, magnitude=2.0, huge_key=3)
    case = AttentionCase("a", why="b", **usual.values, layout=layout)
    for number, (got, plain) in enumerate(
        zip(case.qkv(Rng(1, CPU)), usual.qkv(Rng(1, CPU)), strict=True)
    ):
        expected = plain[:, :, :1].expand_as(plain) if layout == "expanded" and number else plain
        assert torch.equal(got, expected)
        if number:  # k and v
            assert got.stride() == strides
        if layout == "cache" and number:
            assert got.as_strided((8,), (1,), got.storage_offset() + 5 * 4 * 8).isnan().all()
    with pytest.raises(ValueError, match="no layout 'upside down'"):
        AttentionCase("a", why="b", q_len=1, head_dim=1, layout="upside down").qkv(Rng(1, CPU))


@pytest.mark.parametrize("q_len, kv_len", [(5, 9), (9, 5)])
def test_mistakes_are_other_results(q_len: int, kv_len: int) -> None:
    case = AttentionCase("a", why="b", q_len=q_len, kv_len=kv_len, head_dim=8, heads=4, causal=True)
    q, k, v = case.qkv(Rng(1, CPU))
    k, v = k[:, :, :2], v[:, :, :2]
    for scale in (None, 0.3):
        right = attention_float64(q, k, v, causal=True, scale=scale)
        found = mistakes(q, k, v, causal=True, scale=scale)
        if q_len <= kv_len:  # then every query sees a key
            del found[NOT_ZERO.format("query that sees no key")]
            assert "the causal mask begins at the first key; it should end at the last" in found
        assert len(found) == 9 + (scale is not None)
        results = {name: wrong() for name, wrong in found.items()}
        for name, wrong in results.items():
            assert wrong.shape == right.shape and not torch.allclose(wrong, right), name
        for a, b in itertools.combinations(results, 2):  # each mistake is told from the others
            assert not torch.allclose(results[a], results[b]), (a, b)


def test_online_softmax_and_its_mistakes() -> None:
    case = AttentionCase("a", why="b", q_len=5, kv_len=9, head_dim=8, causal=True, magnitude=2.0)
    q, k, v = case.qkv(Rng(2, CPU))
    right = attention_float64(q, k, v, causal=True)
    for B_c in (1, 4, 9, 16):
        assert torch.allclose(online_softmax_float64(q, k, v, B_c, causal=True), right)
    wrong = online_softmax_mistakes(q, k, v, 4, causal=True)
    assert not any(torch.allclose(f(), right) for f in wrong.values())
    merged = equal_splits(q[:, -1:], k, v, 2)()
    assert merged.shape == (2, 1, 2, 8) and not torch.allclose(merged, right[:, -1:])
    assert torch.allclose(equal_splits(q[:, -1:], k, v, 1)(), right[:, -1:])
