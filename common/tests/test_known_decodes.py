"""Decode calls of GPT-2 that go from transformers' tensors to task 5's launcher without Python code."""

import ctypes
import math
import re
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch

from common.build import Kernels, View, builder, dtype_code, host, observing
from common.build.library import is_observed
from common.build.signature import exports
from common.paths import ROOT
from common.tests.devices import DEVICE
from task5 import attention
from task5.attention import choose_num_splits, flash_attention_decode
from task7 import known_calls

FAKES = """\
#include <cstdint>
struct View { void* data; int64_t sizes[4], strides[4]; };
struct Seen {
  View tensors[4];
  float *partial_out, *partial_lse;
  const int *seqlens_k, *leftpad_k;
  int num_splits;
  float scale;
  int dtype;
  void* stream;
};
extern "C" {
int current = 0, status = 0, launches = 0;
Seen seen;
int current_device(int* device) { *device = current; return 0; }
int no_device(int*) { return 201; }
int decode(View q, View k, View v, View out, float* partial_out, float* partial_lse, const int* seqlens_k,
           const int* leftpad_k, int num_splits, float scale, int dtype, void* stream) {
  seen = {{q, k, v, out}, partial_out, partial_lse, seqlens_k, leftpad_k, num_splits, scale, dtype, stream}, ++launches;
  return status;
}
}
"""
UNKNOWN = -1
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


class Seen(ctypes.Structure):
    _fields_ = (
        ("tensors", View * 4), ("partial_out", ctypes.c_void_p), ("partial_lse", ctypes.c_void_p),
        ("seqlens_k", ctypes.c_void_p), ("leftpad_k", ctypes.c_void_p), ("num_splits", ctypes.c_int),
        ("scale", ctypes.c_float), ("dtype", ctypes.c_int), ("stream", ctypes.c_void_p),
    )  # fmt: skip


class Fakes:
    """The library with functions in place of the driver's and a launcher that runs nothing."""

    def __init__(self, folder, monkeypatch):
        # A library of its own: it knows no calls of other tests, and on a GPU the usual one stays as it is.
        shutil.copy(known_calls.FOLDER / "known_calls.cpp", folder)
        monkeypatch.setattr(known_calls, "FOLDER", folder)
        (folder / "fakes.cpp").write_text(FAKES)
        target = builder.plan_host(folder / "fakes.cpp")
        builder.make([target])
        self.fakes = ctypes.CDLL(str(target.path))
        self.library = known_calls.load(self.fakes.current_device)
        self.call = host.function(self.library)
        self.launcher = ctypes.cast(self.fakes.decode, ctypes.c_void_p).value

    def __getattr__(self, name):
        return ctypes.c_int.in_dll(self.fakes, name)

    @property
    def seen(self):
        return Seen.in_dll(self.fakes, "seen")

    def add(self, *qkv, num_splits=1, dtype=2):
        self.library.add(*qkv, self.launcher, num_splits, dtype)

    def launch(self, *qkv, scale=0.5, scratch=0):
        batch, heads, _, head_dim = qkv[0].shape
        out = torch.empty(batch, 1, heads, head_dim, dtype=qkv[0].dtype)
        return self.call(*qkv, out, scale, scratch), out


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    return Fakes(tmp_path, monkeypatch)


def qkv(batch, heads, kv_len, head_dim, kv_heads=None, dtype=torch.bfloat16, device="cpu"):
    """q (batch, heads, 1, head_dim), k and v (batch, kv_heads, kv_len, head_dim), contiguous."""
    q = torch.randn(batch, heads, 1, head_dim, device=device)
    k, v = torch.randn(2, batch, kv_heads or heads, kv_len, head_dim, device=device)
    return [t.to(dtype) for t in (q, k, v)]


def with_other_strides(q, k, v):
    """The same values: q as one third of a projection, k as the part of a static cache, v with its heads behind."""
    batch, heads, _, head_dim = q.shape
    third = q.new_zeros(batch, 1, 3 * heads * head_dim).split(heads * head_dim, dim=2)[1]
    third = third.unflatten(-1, (heads, head_dim)).transpose(1, 2)
    cache = k.new_zeros(*k.shape[:2], k.shape[2] + 5, head_dim)[:, :, 2:-3]
    return third.copy_(q), cache.copy_(k), v.transpose(1, 2).contiguous().transpose(1, 2)


def expect_views(seen, q, k, v, out):
    for got, tensor in zip(seen.tensors[:3], (q, k, v), strict=True):
        assert bytes(got) == bytes(View.of(tensor.transpose(1, 2)))
    assert bytes(seen.tensors[3]) == bytes(View.of(out))


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


def strided(tensor):
    """A copy whose last dimension has stride 2."""
    return torch.stack((tensor, tensor), dim=-1)[..., 0]


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


# ---- the Python side


SMS = 132


@pytest.fixture
def known(fakes, monkeypatch):
    """The fakes behind known_calls' own functions, which take the CPU's tensors for a GPU's."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(known_calls, "_library", lambda: fakes.library)
    monkeypatch.setattr(known_calls, "_launch", lambda: fakes.call)
    monkeypatch.setattr(attention, "sm_count", lambda device: SMS)
    monkeypatch.setattr(attention._kernels, "address", lambda name, device: fakes.launcher)
    known_calls._launcher.cache_clear()
    yield fakes
    known_calls._launcher.cache_clear()


def test_other_kernels_in_the_place_of_task_5s_are_called_by_python(known, monkeypatch):
    tensors = qkv(2, 4, 100, 64)
    known_calls.add(*tensors)
    assert known_calls.launch(*tensors, None) is not None
    monkeypatch.setattr(attention, "_kernels", Kernels(attention.__file__, "attention_kernel.cu"))
    assert known_calls.launch(*tensors, None) is None
    known_calls.add(*tensors)
    assert known_calls.launch(*tensors, None) is None


def test_a_head_dim_of_0_is_left_to_the_checks(known):
    tensors = qkv(2, 4, 100, 0)
    assert known_calls.launch(*tensors, None) is None


@pytest.mark.parametrize("kv_len", [1, 100, 700])
def test_what_was_added_is_launched(known, kv_len):
    for dtype in DTYPES:
        _expect_known(known, kv_len, dtype)


def _expect_known(known, kv_len, dtype):
    tensors = qkv(2, 4, kv_len, 64, kv_heads=2, dtype=dtype)
    assert known_calls.launch(*tensors, None) is None
    known_calls.add(*tensors)
    others, before = with_other_strides(*tensors), known.launches.value
    out = known_calls.launch(*others, 0.7)
    assert known.launches.value == before + 1
    assert (out.shape, out.dtype, out.device) == ((2, 1, 4, 64), dtype, tensors[0].device)
    assert out.is_contiguous()
    expect_views(known.seen, *others, out)
    seen, splits = known.seen, choose_num_splits(2 * 4, kv_len, SMS)
    assert (splits > 1) == (kv_len == 700)
    assert (seen.num_splits, seen.dtype) == (splits, dtype_code(dtype))
    assert seen.scale == ctypes.c_float(0.7).value
    assert seen.seqlens_k is seen.leftpad_k is None
    if splits > 1:
        assert seen.partial_lse - seen.partial_out == 4 * 2 * 4 * splits * 64
    else:
        assert seen.partial_out is seen.partial_lse is None


def test_scratch_is_as_large_as_what_is_written(known, monkeypatch):
    batch, heads, head_dim, splits = 10, 10, 8, choose_num_splits(100, 2100, SMS)
    assert (
        1 < splits < choose_num_splits(10, 2100, SMS)
    )  # fewer than a sequence or head alone would have
    tensors = qkv(batch, heads, 2100, head_dim)
    known_calls.add(*tensors)
    taken, empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **b: taken.append(empty(*a, **b)) or taken[-1])
    assert known_calls.launch(*tensors, None) is not None
    (scratch,), seen, outputs = taken, known.seen, batch * heads * splits
    assert seen.num_splits == splits
    assert (scratch.dtype, scratch.numel()) == (torch.float32, outputs * (head_dim + 1))
    assert seen.partial_out == scratch.data_ptr()
    assert seen.partial_lse + 4 * outputs == scratch.data_ptr() + scratch.nbytes


def test_the_scale_is_task_5s(known):
    for head_dim in range(1, 129):
        tensors = qkv(1, 1, 1, head_dim)
        known_calls.add(*tensors)
        assert known_calls.launch(*tensors, None) is not None
        assert known.seen.scale == ctypes.c_float(1 / math.sqrt(head_dim)).value, head_dim


def test_a_launch_that_fails_is_left_to_python(known):
    for tensors in (qkv(2, 4, 3, 64), qkv(2, 4, 700, 64)):
        known_calls.add(*tensors)
        for status in (700, 1):
            known.status.value = status
            assert known_calls.launch(*tensors, None) is None
        known.status.value = 0
        assert known_calls.launch(*tensors, None) is not None


class Subclass(torch.Tensor):
    pass


def test_tensors_of_other_types_are_left_to_python(known):
    tensors = qkv(2, 4, 3, 64)
    known_calls.add(*tensors)
    for made in (torch.nn.Parameter, lambda t: t.as_subclass(Subclass)):
        for which in range(3):
            others = [*tensors]
            others[which] = made(others[which])
            assert known_calls.launch(*others, None) is None
        assert known_calls.launch(*map(made, tensors), None) is None
    assert known.launches.value == 0
    assert known_calls.launch(*tensors, None) is not None


def test_observed_launches_are_left_to_python(known):
    tensors = qkv(2, 4, 3, 64)
    known_calls.add(*tensors)
    assert not is_observed()
    with observing(lambda kernels, name, arguments, launch: launch(arguments)):
        assert is_observed()
        assert known_calls.launch(*tensors, None) is None
        with observing(lambda kernels, name, arguments, launch: launch(arguments)):
            assert known_calls.launch(*tensors, None) is None
        assert is_observed() and known_calls.launch(*tensors, None) is None
    assert not is_observed() and known.launches.value == 0
    assert known_calls.launch(*tensors, None) is not None


def test_tensors_on_the_cpu_are_left_to_python(known, monkeypatch):
    tensors = qkv(2, 4, 3, 64)
    known_calls.add(*tensors)
    monkeypatch.undo()
    for name in ("_library", "_launch"):  # nor is there a driver to load
        monkeypatch.setattr(known_calls, name, lambda: pytest.fail("not for the CPU"))
    assert known_calls.launch(*tensors, None) is None
    known_calls.add(*tensors)
    assert known.launches.value == 0


def test_another_launcher_is_left_to_python(known, monkeypatch):
    tensors = qkv(2, 4, 3, 64)
    for parameters in ((), known_calls._PARAMETERS[:-1], known_calls._PARAMETERS[::-1]):
        with monkeypatch.context() as patch:
            patch.setattr(
                attention, "_kernels", SimpleNamespace(parameters=lambda _, p=parameters: p)
            )
            known_calls.add(*tensors)
        assert known_calls.launch(*tensors, None) is None
    known_calls.add(*tensors)
    assert known_calls.launch(*tensors, None) is not None


def test_the_launcher_is_the_one_in_task_5(tmp_path):
    source = ROOT / "task5/attention_kernel.cu"
    decode = exports(source)["flash_attention_decode"]
    assert tuple(decode.parameters) == known_calls._PARAMETERS
    text = (ROOT / "task7/known_calls.cpp").read_text()
    (given,) = re.findall(r"using Launcher = int \(\*\)\(([^()]*), void\* stream\);", text)
    other = tmp_path / "launcher.cu"
    other.write_text(f'extern "C" cudaError_t decode({given}, cudaStream_t stream) {{')
    its = exports(other)["decode"]
    assert [*its.parameters.items()] == [*decode.parameters.items()]
    words = re.search(r"flash_attention_decode\(([^()]*),\s*cudaStream_t", source.read_text())
    assert given.split() == words[1].split()  # what pointers point to


def test_the_parameters_of_launchers_and_queries(tmp_path):
    (tmp_path / "some.cu").write_text(
        'extern "C" cudaError_t f(View q, const float* x, int n, cudaStream_t stream) {}\n'
        'extern "C" int64_t size(View q) {}\n'
    )
    kernels = Kernels(tmp_path / "some.py", "some.cu")
    assert kernels.parameters("f") == ("q", "x", "n")
    assert kernels.parameters("size") == ("q",)
    assert kernels.parameters("g") == ()


# ---- on a GPU


@pytest.fixture
def task7():
    from task7 import attention  # imports transformers, which takes seconds

    return attention


def by_python(q, k, v, scale=None):
    return flash_attention_decode(*(t.transpose(1, 2) for t in (q, k, v)), scale=scale)


def without_python(task7, monkeypatch, *qkv, scale=None):
    """course_attention's output where only a known call can give it."""

    def refuse(*args, **options):
        pytest.fail("the call was not known")

    before = task7.kernel_calls["decode"]
    with monkeypatch.context() as patch:
        patch.setattr(task7, "flash_attention_decode", refuse)
        out, weights = task7.course_attention(torch.nn.Module(), *qkv, None, scaling=scale)
    assert weights is None and out.is_contiguous()
    assert task7.kernel_calls["decode"] == before + 1
    return out


@needs_gpu
@pytest.mark.parametrize("kv_len", [1, 100, 700])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_known_call_gives_the_same(task7, monkeypatch, dtype, kv_len):
    sms = attention.sm_count(torch.device("cuda", 0))
    for batch, heads, kv_heads, head_dim in ((1, 12, 12, 64), (3, 8, 2, 128), (2, 3, 3, 33)):
        assert (choose_num_splits(batch * heads, kv_len, sms) > 1) == (kv_len == 700)
        for scale in (None, 0.07):
            for layout in (lambda *qkv: qkv, with_other_strides):
                tensors = layout(*qkv(batch, heads, kv_len, head_dim, kv_heads, dtype, "cuda"))
                expected = by_python(*tensors, scale)
                before = task7.kernel_calls["decode"]
                first, _ = task7.course_attention(torch.nn.Module(), *tensors, None, scaling=scale)
                assert task7.kernel_calls["decode"] == before + 1
                second = without_python(task7, monkeypatch, *tensors, scale=scale)
                assert torch.equal(first, expected) and torch.equal(second, expected)


@needs_gpu
def test_a_call_is_known_after_the_first(task7, monkeypatch):
    tensors = qkv(2, 5, 173, 96, device="cuda")  # sizes that no other test has
    assert known_calls.launch(*tensors, None) is None
    task7.course_attention(torch.nn.Module(), *tensors, None)
    without_python(task7, monkeypatch, *with_other_strides(*tensors))
    with observing(lambda kernels, name, arguments, launch: launch(arguments)):
        assert known_calls.launch(*tensors, None) is None
    q, k, v = tensors
    assert known_calls.launch(q, k[:, :, :-1], v[:, :, :-1], None) is None
    assert known_calls.launch(q, k, v.cpu(), None) is None


@needs_gpu
def test_streams_and_graphs(task7):
    tensors = qkv(2, 4, 700, 64, device="cuda")
    expected = by_python(*tensors)
    task7.course_attention(torch.nn.Module(), *tensors, None)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)  # what is launched elsewhere is not behind it
        tensors[2].mul_(2)
        out = known_calls.launch(*tensors, None)
    torch.cuda.synchronize()
    assert torch.equal(out, 2 * expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = known_calls.launch(*tensors, None)
    out.zero_()
    graph.replay()
    assert torch.equal(out, 2 * expected)


@needs_gpu
def test_arguments_that_do_not_fit_are_named_as_before(task7):
    q, k, v = qkv(1, 4, 20, 64, device="cuda")
    for _ in range(2):
        task7.course_attention(torch.nn.Module(), q, k, v, None)
        with pytest.raises(ValueError, match="k must be"):
            task7.course_attention(torch.nn.Module(), q, k.half(), v, None)
        with pytest.raises(ValueError, match="v must be"):
            task7.course_attention(torch.nn.Module(), q, k, v[:, :, 1:], None)
        with pytest.raises(ValueError, match="contiguous last dimension"):
            task7.course_attention(torch.nn.Module(), q, strided(k), v, None)
