"""Known decode calls of GPT-2 in C++: which these are, and what task 5's launcher gets of them."""

import ctypes
import math
import sys

import pytest
import torch

from common.tests.fakes import (
    DTYPES,
    UNKNOWN,
    Decodes,
    expect_views,
    qkv,
    strided,
    with_other_strides,
)


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    return Decodes(tmp_path, monkeypatch)


def test_the_launcher_gets_what_python_would_give_it(fakes):
    tensors = qkv(2, 4, 5, 64)
    fakes.add(*tensors, dtype=2)
    status, out = fakes.launch(*tensors, scale=0.7)
    assert status == 0 and fakes.launches.value == 1
    expect_views(fakes.seen, *tensors, out)
    seen = fakes.seen
    assert (seen.num_splits, seen.scale, seen.dtype) == (1, ctypes.c_float(0.7).value, 2)
    assert seen.partial_out is seen.partial_lse is seen.seqlens_k is seen.leftpad_k is None
    assert seen.stream is None


def test_a_call_is_known_with_other_strides(fakes):
    tensors = qkv(2, 4, 5, 64)
    fakes.add(*tensors)
    others = with_other_strides(*tensors)
    assert not any(t.is_contiguous() for t in others)
    status, out = fakes.launch(*others)
    assert status == 0
    expect_views(fakes.seen, *others, out)
    q, k, v = tensors
    status, out = fakes.launch(q, k, others[2])  # v has others than k
    assert status == 0
    expect_views(fakes.seen, q, k, others[2], out)


def test_a_call_is_added_with_any_strides(fakes):
    tensors = qkv(2, 4, 5, 64)
    fakes.add(*with_other_strides(*tensors))
    assert fakes.launch(*tensors)[0] == 0


def test_a_dimension_of_one_has_stride_0(fakes):
    tensors = qkv(1, 1, 1, 64)
    fakes.add(*tensors)
    status, out = fakes.launch(*tensors)
    assert status == 0
    expect_views(fakes.seen, *tensors, out)
    assert list(fakes.seen.tensors[1].strides) == [0, 0, 0, 1]


def test_a_head_of_one_number_needs_no_stride(fakes):
    q, k, v = qkv(2, 4, 5, 1)
    fakes.add(q, k, v)
    k = torch.randn(2, 4, 5, 3).bfloat16()[..., ::3]
    assert k.stride(3) == 3
    status, out = fakes.launch(q, k, v)
    assert status == 0
    expect_views(fakes.seen, q, k, v, out)


def test_heads_share_keys(fakes):
    tensors = qkv(2, 8, 5, 64, kv_heads=2)
    fakes.add(*tensors)
    assert fakes.launch(*qkv(2, 8, 5, 64))[0] == fakes.launch(*qkv(2, 8, 5, 64, 4))[0] == UNKNOWN
    assert fakes.launch(*qkv(2, 2, 5, 64))[0] == UNKNOWN
    status, out = fakes.launch(*tensors)
    assert status == 0 and fakes.launches.value == 1
    expect_views(fakes.seen, *tensors, out)


def test_calls_of_other_sizes_and_dtypes_stay_apart(fakes):
    calls = [
        qkv(*sizes, dtype=dtype)
        for sizes in ((2, 4, 300, 64), (2, 4, 301, 64), (4, 2, 300, 64), (2, 4, 64, 300))
        for dtype in DTYPES
    ]
    for number, tensors in enumerate(calls):
        fakes.add(*tensors, num_splits=2 + number, dtype=100 + number)
    for number, tensors in enumerate(calls):
        assert fakes.launch(*tensors, scratch=99)[0] == 0
        assert (fakes.seen.num_splits, fakes.seen.dtype) == (2 + number, 100 + number)
    fakes.add(*calls[0], num_splits=1, dtype=7)  # again: the last one counts
    assert fakes.launch(*calls[0])[0] == 0 and fakes.seen.dtype == 7


def test_each_call_has_its_own_scale(fakes):
    tensors = qkv(2, 4, 3, 64)
    fakes.add(*tensors)
    for scale in (0.125, 3, -1.0, 0.0, math.inf):
        assert fakes.launch(*tensors, scale=scale)[0] == 0 and fakes.seen.scale == scale
    for wrong in (None, "1", [], 1j):
        assert fakes.launch(*tensors, scale=wrong)[0] == UNKNOWN
    assert fakes.launches.value == 5


# Calls that could be known, but are others.
OTHERS = {
    "batch": lambda q, k, v: (q[:1], k[:1], v[:1]),
    "heads": lambda q, k, v: (q[:, :3], k[:, :3], v[:, :3]),
    "heads of q": lambda q, k, v: (q[:, :2], k, v),
    "heads of k and v": lambda q, k, v: (q, k[:, :2], v[:, :2]),
    "kv_len": lambda q, k, v: (q, k[:, :, :2], v[:, :, :2]),
    "head_dim": lambda q, k, v: (q[..., :32], k[..., :32], v[..., :32]),
    "dtype": lambda q, k, v: (q.half(), k.half(), v.half()),
    "dtype of as many bits": lambda *qkv: (t.view(torch.int16) for t in qkv),
}
MISFITS = {
    "batch of q": lambda q, k, v: (q[:1], k, v),
    "batch of v": lambda q, k, v: (q, k, v[:1]),
    "heads of v": lambda q, k, v: (q, k, v[:, :2]),
    "kv_len of k": lambda q, k, v: (q, k[:, :, :2], v),
    "kv_len of v": lambda q, k, v: (q, k, v[:, :, :2]),
    "no keys": lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]),
    "no sequences": lambda q, k, v: (q[:0], k[:0], v[:0]),
    "q_len": lambda q, k, v: (q.repeat(1, 1, 2, 1), k, v),
    "no query": lambda q, k, v: (q[:, :, :0], k, v),
    "head_dim of q": lambda q, k, v: (q[..., :32], k, v),
    "head_dim of v": lambda q, k, v: (q, k, v[..., :32]),
    "dtype of q": lambda q, k, v: (q.half(), k, v),
    "dtype of k": lambda q, k, v: (q, k.half(), v),
    "dtype of v": lambda q, k, v: (q, k, v.half()),
    "last dimension of q": lambda q, k, v: (strided(q), k, v),
    "last dimension of k": lambda q, k, v: (q, strided(k), v),
    "last dimension of v": lambda q, k, v: (q, k, v.mT.contiguous().mT),
    "rank of k": lambda q, k, v: (q, k[0], v),
    "rank of v": lambda q, k, v: (q, k, v[None]),
    "device": lambda *qkv: (t.to("meta") for t in qkv),
    "device of v": lambda q, k, v: (q, k, v.to("meta")),
    "sparse": lambda q, k, v: (q, k.to_sparse(), v),
}


def test_other_tensors_are_not_known(fakes):
    q, k, v = qkv(2, 4, 3, 64)
    fakes.add(q, k, v)
    every = OTHERS | MISFITS
    assert not [name for name in every if fakes.launch(*every[name](q, k, v))[0] != UNKNOWN]
    assert fakes.launches.value == 0
    assert fakes.launch(q, k, v)[0] == 0


def test_what_does_not_fit_is_not_added(fakes):
    for name, misfit in MISFITS.items():
        tensors = [*misfit(*qkv(2, 4, 3, 64))]
        fakes.add(*tensors)
        assert fakes.launch(*tensors)[0] == UNKNOWN, name
    assert fakes.launches.value == 0


def test_the_rank_of_q(fakes):
    q, k, v = qkv(2, 4, 3, 64)
    fakes.add(q, k, v)
    out = torch.empty(2, 1, 4, 64, dtype=q.dtype)
    for wrong in (q[0], q[None], q[0, 0, 0, 0]):
        assert fakes.call(wrong, k, v, out, 0.5, 0) == UNKNOWN
    assert fakes.call(q, k, v, out.to_sparse(), 0.5, 0) == UNKNOWN
    assert fakes.launches.value == 0
    assert fakes.call(q, k, v, out, 0.5, 0) == 0


def test_the_gpu_has_to_be_the_current_one(fakes):
    tensors = qkv(2, 4, 3, 64)
    fakes.add(*tensors)
    fakes.current.value = 1
    assert fakes.launch(*tensors)[0] == UNKNOWN
    fakes.current.value = 0
    fakes.library.init(ctypes.cast(fakes.fakes.no_device, ctypes.c_void_p))
    assert fakes.launch(*tensors)[0] == UNKNOWN
    assert fakes.launches.value == 0


def test_scratch_is_asked_for(fakes):
    batch, heads, head_dim, splits = 2, 4, 64, 3
    tensors = qkv(batch, heads, 700, head_dim, kv_heads=2)
    fakes.add(*tensors, num_splits=splits)
    floats = batch * heads * splits * (head_dim + 1)
    assert fakes.launch(*tensors)[0] == UNKNOWN - floats and fakes.launches.value == 0
    assert fakes.launch(*tensors, scratch=1 << 40)[0] == 0
    seen = fakes.seen
    assert (seen.num_splits, seen.partial_out) == (splits, 1 << 40)
    # partial_out (batch, heads, splits, head_dim), then partial_lse (batch, heads, splits)
    assert seen.partial_lse == (1 << 40) + 4 * batch * heads * splits * head_dim


def test_the_size_of_scratch_may_exceed_32_bits(fakes):
    tensors = qkv(2, 64, 3, 64)
    fakes.add(*tensors, num_splits=1 << 30)
    assert fakes.launch(*tensors)[0] == UNKNOWN - (128 * 65 << 30)
    assert fakes.launch(*tensors, scratch=4)[0] == 0
    assert fakes.seen.partial_lse == 4 + 4 * (128 * 64 << 30)


def test_the_launchers_status_comes_back(fakes):
    tensors = qkv(2, 4, 3, 64)
    for splits, scratch in ((1, 0), (2, 8)):
        fakes.add(*tensors, num_splits=splits)
        for status in (700, 1, 0):
            fakes.status.value = status
            assert fakes.launch(*tensors, scratch=scratch)[0] == status


def test_references_are_not_lost_or_leaked(fakes):
    q, k, v = qkv(2, 4, 3, 64)
    fakes.add(q, k, v)
    q_2, k_2, v_2 = qkv(2, 4, 300, 64)
    fakes.add(q_2, k_2, v_2, num_splits=2)
    out, scale = torch.empty(2, 1, 4, 64, dtype=q.dtype), float("0.7")
    kept = (q, k, v, q_2, k_2, v_2, out, scale)
    before = [sys.getrefcount(x) for x in kept]
    for _ in range(100):
        assert fakes.call(q, k, v, out, scale, 0) == 0
        assert fakes.call(q_2, k_2, v_2, out, scale, 0) < UNKNOWN
        assert fakes.call(q, k, v.to_sparse(), out, scale, 0) == UNKNOWN
        assert fakes.call(q, k_2, v, out, scale, 0) == UNKNOWN
        assert fakes.call(q, k, v, out, out, 0) == UNKNOWN  # no number
        fakes.add(q, k, v)
    assert [sys.getrefcount(x) for x in kept] == before
