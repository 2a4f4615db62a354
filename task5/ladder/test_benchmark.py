"""What is timed, on the CPU: shapes, inputs, and what is left out."""

import contextlib
import re
from functools import partial

import pytest
import torch

from common.check.attention import attention_float64
from common.timing import Backend
from common.timing.peers import FA3
from task5.ladder import benchmark, peers, prefill, table, uneven
from task5.ladder.benchmark import (
    BF16,
    FP32,
    INVARIANT,
    NO_PROMISE,
    OURS,
    SHAPES,
    Inputs,
    Shape,
    our_sides,
    paged,
)
from task5.ladder.fakes import LARGE, ON_CPU, SMALL, XQA
from task5.ladder.rungs import RUNGS


def test_the_shapes():
    assert len({shape.key for shape in table.TIMED}) == len(table.TIMED) == len(SHAPES) + 11
    assert LARGE.bytes == 2 * 16 * 8192 * 8 * 128 * 2 and LARGE.caches == 2
    assert Shape(1, 32, 8, 1024).caches == 72 and Shape(1, 12, 12, 1024, 64).caches == 96
    assert all(shape.caches * shape.bytes > 250e6 for shape in table.TIMED)


def test_the_rungs_are_the_numbered_sources():
    assert [rung.number for rung in RUNGS] == list(range(1, len(RUNGS) + 1))
    assert all(rung.source.exists() for rung in RUNGS)
    assert str(RUNGS[0]) == f"rung 1 ({RUNGS[0].name})" and RUNGS[0].label == f"1 {RUNGS[0].name}"
    assert all(not re.match(r"Rung|//", rung.title) and rung.title for rung in RUNGS)


@pytest.mark.parametrize("size", [64, 16])
def test_pages_hold_the_same_keys(size):
    torch.manual_seed(1)
    inputs = Inputs(SMALL, "cpu", caches=2)
    order, caches = inputs.pages(size)
    assert inputs.pages(size) is inputs.pages(size)
    for (k, v), (k_pages, v_pages) in zip(inputs.caches, caches, strict=True):
        for t, pages in ((k, k_pages), (v, v_pages)):
            assert torch.equal(pages[order.long()].flatten(1, 2)[:, : SMALL.kv_len], t)


def test_every_side_gives_the_same():
    torch.manual_seed(2)
    inputs = Inputs(SMALL, "cpu", caches=2)
    truth = inputs.truth()
    math = peers._on_caches(partial(peers._grouped, backend=Backend.MATH))
    for name, prepare in {**our_sides(ON_CPU), "SDPA math": math}.items():
        calls = prepare(inputs)
        assert len(calls) == 2, name
        error = (calls[-1]().reshape(truth.shape) - truth).abs().max()
        assert error <= 2**-7 * truth.abs().max(), name


class Eager:
    """A graph where there is no GPU."""

    def __init__(self, calls):
        self.calls, self.outs = calls, [call() for call in calls]

    def replay(self):
        for out, call in zip(self.outs, self.calls, strict=True):
            out.copy_(call())


class Turns:
    def take(self, replay):
        return replay(), 6.0


@pytest.fixture
def on_cpu(monkeypatch):
    """time_shape without a GPU: two caches in a graph that takes 6 ms."""
    monkeypatch.setattr(benchmark, "Inputs", partial(Inputs, device="cpu", caches=2))
    monkeypatch.setattr(benchmark, "Graph", Eager)
    monkeypatch.setattr(benchmark, "Turns", Turns)
    monkeypatch.setattr(benchmark, "ROUNDS", 2)
    monkeypatch.setattr(benchmark, "_stream", lambda: None)
    monkeypatch.setattr(benchmark, "seconds_of", lambda call: call() is None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def test_what_is_timed_and_what_is_left_out(on_cpu, monkeypatch):
    def fails(inputs):
        raise TypeError("a long story\nno such | shape")

    def wrong(inputs):
        return [lambda: inputs.q + 1] * 2

    sides = our_sides(ON_CPU) | {"fails": fails, "wrong": wrong}
    found = benchmark.time_shape(SMALL, sides, seed=1)
    expected = [OURS, ON_CPU[0].label, NO_PROMISE, INVARIANT, "pages of 64", "pages of 16"]
    assert list(found.times) == expected
    assert all(timing.median_ms == 3 and timing.n == 2 for timing in found.times.values())
    assert found.left_out.keys() == {"fails", "wrong"}
    assert found.left_out["fails"] == "no such / shape"
    assert re.fullmatch(r"wrong result: [\d.]+ away from float64", found.left_out["wrong"])

    def no_memory(*_):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(benchmark, "Inputs", no_memory)
    assert benchmark.time_shape(SMALL, {OURS: None}, 1).left_out == {OURS: "out of memory"}


def test_a_library_that_is_not_here_says_so(monkeypatch):
    for name in ("flash_attn_interface", "flashinfer"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    inputs = Inputs(SMALL, "cpu", caches=1)
    for label in (FA3.label, "FlashInfer", XQA):
        with pytest.raises(ImportError, match="cannot be imported .ModuleNotFoundError"):
            peers.peer_sides(BF16)[label](inputs)[0]()
    assert all("cannot be imported" in version for version in peers.versions().values())
    assert set(peers.peer_sides(FP32)) == {"SDPA math", "SDPA memory-efficient"}


def test_lengths_differ_in_a_call():
    even = uneven.Uneven(4, 4, 2, 64, 64, FP32)
    long = uneven.Uneven(3, 4, 2, 64, 64, FP32, spread=uneven.ONE_LONG)
    assert sorted(even.lengths) == [16, 32, 48, 64] and long.lengths == (2, 2, 64)
    assert even.key.endswith("float32, 1 to all") and long.key.endswith("float32, one long")
    assert long.bytes == 2 * 68 * 2 * 64 * 4
    several = uneven.Uneven(3, 4, 2, 320, 64, FP32, 5, spread=uneven.ONE_LONG)
    for shape in (even, long, several):
        inputs = Inputs(shape, "cpu", caches=1)
        for prepare in (uneven.SIDES[OURS], uneven.SIDES[paged(uneven.PAGE)]):
            (call,) = prepare(inputs)
            torch.testing.assert_close(call().double(), inputs.truth(), atol=1e-5, rtol=1e-4)
    inputs = Inputs(several, "cpu", caches=1)
    for label in ("FlashInfer", XQA):
        with pytest.raises(ValueError, match="one query"):
            peers.LENGTH_PEERS[label](inputs)


@pytest.mark.parametrize("q_len", [5, 50])
def test_a_chunk_is_checked_at_its_ends(q_len):
    torch.manual_seed(4)
    inputs = Inputs(Shape(2, 4, 2, 70, 64, FP32, q_len), "cpu", caches=1)
    ((k, v),) = inputs.caches
    whole = attention_float64(inputs.q, k, v, causal=True)
    rows = range(5) if q_len == 5 else (*range(16), *range(34, 50))
    torch.testing.assert_close(inputs.truth(), whole[:, list(rows)])
    assert torch.equal(inputs.checked(whole), whole[:, list(rows)])
    (call,) = prefill.SIDES[OURS](inputs)
    torch.testing.assert_close(
        inputs.checked(call()).double(), inputs.truth(), atol=1e-5, rtol=1e-4
    )
