"""Calls of the ladder that go from torch's tensors to the launcher without Python code."""

import ctypes
import math
import sys
import threading

import pytest
import torch

from common.build import View
from common.tests.devices import needs_hopper
from common.tests.fakes import UNKNOWN, Fakes
from task4.ladder import known_calls
from task4.ladder.call import _check_and_launch, ladder_attention

ATTENTION = """\
struct Seen { View tensors[4]; void* workspace; float scale; int causal, dtype; void* stream; };
extern "C" {
int capturing = 0;
Seen seen;
int is_capturing(void*, int* on) { *on = capturing; return 0; }
int launcher(View q, View k, View v, View out, void* workspace, float scale, int causal, int dtype, void* stream) {
  seen = {{q, k, v, out}, workspace, scale, causal, dtype, stream}, ++launches;
  return status;
}
}
"""


class Seen(ctypes.Structure):
    _fields_ = (
        ("tensors", View * 4), ("workspace", ctypes.c_void_p), ("scale", ctypes.c_float), ("causal", ctypes.c_int),
        ("dtype", ctypes.c_int), ("stream", ctypes.c_void_p),
    )  # fmt: skip


class Calls(Fakes):
    """The ladder's library of known calls with fakes."""

    def __init__(self, folder, monkeypatch):
        driver = ("current_device", "is_capturing")
        super().__init__(folder, monkeypatch, known_calls, ATTENTION, Seen, driver)
        self.number = 7

    def add(self, *qkv, number=0, counted=0, workspace_bytes=0):
        self.library.add(*qkv, number, self.launcher, 0.5, 1, 2, counted, workspace_bytes)

    def launch(self, *qkv, number=0, workspace=0):
        out = torch.empty_like(qkv[0])
        return self.call(*qkv, out, workspace, number), out


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    return Calls(tmp_path, monkeypatch)


def qkv(*shape, dtype=torch.bfloat16, device="cpu"):
    return [torch.randn(*shape, device=device).to(dtype) for _ in "qkv"]


def test_the_launcher_gets_what_python_would_give_it(fakes):
    q = torch.randn(2, 3, 30, 64)[:, :, ::2]
    k, v = torch.randn(3, 2, 5, 64).transpose(0, 1), torch.randn(2, 3, 5, 128)[..., 64:]
    fakes.add(q, k, v, number=fakes.number)
    q, k, v = (t.clone(memory_format=torch.preserve_format).copy_(t) for t in (q, k, v))
    assert fakes.launch(q, k, v, number=fakes.number)[0] == UNKNOWN  # other strides
    q = torch.randn(2, 3, 30, 64)[:, :, ::2]
    k, v = torch.randn(3, 2, 5, 64).transpose(0, 1), torch.randn(2, 3, 5, 128)[..., 64:]
    status, out = fakes.launch(q, k, v, number=fakes.number)
    assert status == 0 and fakes.launches.value == 1
    seen = fakes.seen
    for got, tensor in zip(seen.tensors, (q, k, v, out), strict=True):
        assert bytes(got) == bytes(View.of(tensor))
    assert (seen.workspace, seen.scale, seen.causal, seen.dtype) == (None, 0.5, 1, 2)
    assert seen.stream is None


def test_a_dimension_of_one_has_stride_0(fakes):
    q, k, v = qkv(1, 4, 1, 64)
    fakes.add(q, k, v, number=fakes.number)
    assert fakes.launch(q, k, v, number=fakes.number)[0] == 0
    assert bytes(fakes.seen.tensors[0]) == bytes(View.of(q))
    assert fakes.seen.tensors[0].strides[0] == fakes.seen.tensors[0].strides[2] == 0


def odd(tensor):
    """A copy whose address is not a multiple of 16."""
    return torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape).copy_(tensor)


OTHERS = {
    "shape of q": lambda q, k, v: (q[:, :3], k, v),
    "shape of k and v": lambda q, k, v: (q, k[:, :3], v[:, :3]),
    "shape of v": lambda q, k, v: (q, k, v[:, :3]),
    "strides of v": lambda q, k, v: (q, k, v.transpose(1, 2).contiguous().transpose(1, 2)),
    "dtype": lambda q, k, v: (q.half(), k.half(), v.half()),
    "dtype of k": lambda q, k, v: (q, k.half(), v),
    "alignment of q": lambda q, k, v: (odd(q), k, v),
    "alignment of v": lambda q, k, v: (q, k, odd(v)),
    "rank of q": lambda q, k, v: (q[0], k, v),
    "rank of v": lambda q, k, v: (q, k, v[None]),
    "device of v": lambda q, k, v: (q, k, v.to("meta")),
    "sparse": lambda q, k, v: (q, k.to_sparse(), v),
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_tensors_are_not_known(fakes, other):
    q, k, v = qkv(2, 4, 3, 64)
    fakes.add(q, k, v, number=fakes.number)
    assert fakes.launch(*OTHERS[other](q, k, v), number=fakes.number)[0] == UNKNOWN
    assert fakes.launch(q, k, v, number=-1)[0] == UNKNOWN
    assert fakes.launches.value == 0
    assert fakes.launch(q, k, v, number=fakes.number)[0] == 0


def test_what_only_python_can_do(fakes):
    q, k, v = qkv(2, 4, 3, 64)
    number = fakes.number
    fakes.add(q, k, v, number=number, counted=1)
    fakes.library.add_counter(1, None, 77)  # of another GPU
    assert fakes.launch(q, k, v, number=number)[0] == UNKNOWN
    fakes.library.add_counter(0, None, 88)
    assert fakes.launch(q, k, v, number=number)[0] == 0 and fakes.seen.workspace == 88
    fakes.capturing.value = 1
    assert fakes.launch(q, k, v, number=number)[0] == UNKNOWN
    fakes.capturing.value, fakes.current.value = 0, 1
    assert fakes.launch(q, k, v, number=number)[0] == UNKNOWN
    assert fakes.launches.value == 1


def test_a_workspace_is_asked_for(fakes):
    q, k, v = qkv(2, 4, 3, 64)
    number = fakes.number
    assert fakes.library.workspace_bytes(q, k, v, number) == UNKNOWN
    fakes.add(q, k, v, number=number, workspace_bytes=2**33)
    assert fakes.launch(q, k, v, number=number)[0] == known_calls._WANTS_WORKSPACE
    assert fakes.library.workspace_bytes(q, k, v, number) == 2**33
    assert fakes.launch(q, k, v, number=number, workspace=99)[0] == 0
    assert fakes.seen.workspace == 99


def test_the_launchers_status_comes_back(fakes):
    q, k, v = qkv(2, 4, 3, 64)
    fakes.add(q, k, v, number=fakes.number)
    fakes.status.value = 700
    assert fakes.launch(q, k, v, number=fakes.number)[0] == 700


def test_references_are_not_lost_or_leaked(fakes):
    q, k, v = qkv(2, 4, 3, 64)
    fakes.add(q, k, v, number=fakes.number)
    before = [sys.getrefcount(t) for t in (q, k, v)]
    for _ in range(100):
        fakes.launch(q, k, v, number=fakes.number)
        fakes.launch(q, k, v.to_sparse(), number=fakes.number)
    assert [sys.getrefcount(t) for t in (q, k, v)] == before


def test_nothing_is_known_of_arguments_that_do_not_fit():
    q, k, v = qkv(1, 4, 1, 64)
    for scale in ([], torch.ones(1), math.nan, 0.0):
        assert known_calls.launch(q, k, v, True, scale, None) is None
    for wrong in (None, 3, "q", object()):
        assert known_calls.launch(wrong, k, v, False, None, None) is None


# ---- on a GPU


def by_python(q, k, v, causal=False, scale=None, rung=None):
    return _check_and_launch(q, k, v, causal, scale, rung)


@needs_hopper
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_known_call_gives_the_same(dtype, causal):
    for shape, scale in (((2, 700, 4, 128), None), ((3, 2100, 40, 64), 0.07)):
        ladder_attention(*qkv(*shape, dtype=dtype, device="cuda"), causal=causal, scale=scale)
        for layout in ("contiguous", "heads first"):
            q, k, v = qkv(*shape, dtype=dtype, device="cuda")
            if layout == "heads first":
                q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
                ladder_attention(q, k, v, causal=causal, scale=scale)
            got = known_calls.launch(q, k, v, causal, scale, None)
            assert got is not None and got.is_contiguous()
            assert torch.equal(got, by_python(q, k, v, causal, scale))


@needs_hopper
def test_streams_threads_and_graphs():
    q, k, v = qkv(4, 2500, 32, 64, device="cuda")
    expected, wrong = by_python(q, k, v, True), []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            for _ in range(50):
                if not torch.equal(ladder_attention(q, k, v, causal=True), expected):
                    wrong.append(1)
            if known_calls.launch(q, k, v, True, None, None) is None:
                wrong.append(2)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert known_calls.launch(q, k, v, True, None, None) is None
        out = ladder_attention(q, k, v, causal=True)
    graph.replay()
    assert torch.equal(out, expected)


@needs_hopper
def test_arguments_that_do_not_fit_are_named_as_before():
    q, k, v = qkv(1, 300, 2, 128, device="cuda")
    for _ in range(2):
        ladder_attention(q, k, v)
        with pytest.raises(ValueError, match="scale must be above 0"):
            ladder_attention(q, k, v, scale=0.0)
        with pytest.raises(ValueError, match="k must be"):
            ladder_attention(q, k.half(), v)
        with pytest.raises(ValueError, match="there is no rung 0"):
            ladder_attention(q, k, v, rung=0)
