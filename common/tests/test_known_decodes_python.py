"""Decode calls of GPT-2 that go from transformers' tensors to task 5's launcher without Python code."""

import ctypes
import math
import re
from types import SimpleNamespace

import pytest
import torch

from common.build import Kernels, dtype_code, observing
from common.build.library import is_observed
from common.build.signature import exports
from common.paths import ROOT
from common.tests.devices import DEVICE
from common.tests.fakes import DTYPES, Decodes, expect_views, qkv, strided, with_other_strides
from task5 import attention
from task5.attention import choose_num_splits, flash_attention_decode
from task6.test import count_launches
from task7 import known_calls

SMS = 132

needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    return Decodes(tmp_path, monkeypatch)


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
    with count_launches():  # which checks of tasks 6 and 7 do
        assert known_calls.launch(*tensors, None) is None
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
