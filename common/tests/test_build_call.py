"""Calls of C as common.build.call makes them: used again from call to call, and by several threads at once."""

import contextlib
import ctypes
import sys
import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from common.build import Kernels, builder, call, planner
from common.build import library as library_module
from common.build.signature import POINTER, Export, View

CPU = torch.device("cpu")

SUM = """\
#include "tensor.cuh"
__global__ void add(const float* x, View y, float* out, float by) {
  for (int i = threadIdx.x; i < y.sizes[0]; i += blockDim.x) out[i] = (x ? x[i] : 0) + by * y.as<float>()[i * y.strides[0]];
}
extern "C" cudaError_t sum(const float* x, View y, float* out, int fail, float by, cudaStream_t stream) {
  if (fail) return cudaErrorInvalidValue;
  add<<<1, 4, 0, stream>>>(x, y, out, by);
  return cudaGetLastError();
}
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("call") / "sum.cu"
    path.write_text(SUM)
    return path


SHOW = """\
#include <cstdint>
struct View { void* data; int64_t sizes[4], strides[4]; };
struct Shown { View x; void* y; int n; int64_t wide; float by; void* stream; } shown;
extern "C" int show(View x, void* y, int n, int64_t wide, float by, void* stream) {
  shown = {x, y, n, wide, by, stream};
  return 7;
}
extern "C" int64_t count(View x, void* y) { return x.sizes[0] << 40; }
extern "C" Shown* last() { return &shown; }
"""


class Shown(ctypes.Structure):
    _fields_ = (
        ("x", View), ("y", POINTER), ("n", ctypes.c_int), ("wide", ctypes.c_int64), ("by", ctypes.c_float),
        ("stream", POINTER),
    )  # fmt: skip


TYPES = dict(x=View, y=POINTER, n=ctypes.c_int, wide=ctypes.c_int64, by=ctypes.c_float)


class Library:
    """A function that keeps what it was called with, and a query."""

    def __init__(self, folder):
        (folder / "show.cpp").write_text(SHOW)
        target = planner.plan_host(folder / "show.cpp")
        builder.make([target])
        self.c = ctypes.CDLL(str(target.path))
        self.c.last.restype = ctypes.POINTER(Shown)

    def caller(self, name, types, device=CPU):
        launches = name == "show"
        export = Export(launches, ctypes.c_int if launches else ctypes.c_int64, types)
        address = ctypes.cast(self.c[name], ctypes.c_void_p).value
        return call.caller(name, export, address, device)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return Library(tmp_path_factory.mktemp("library"))


def test_every_kind_of_argument_arrives(library):
    show, x = library.caller("show", TYPES), torch.randn(3, 8)[:, ::2]
    assert show({"by": 2, "wide": -(2**40), "n": -(2**31), "y": None, "x": x}, 2**64 - 1) == 7
    last = library.c.last().contents
    assert bytes(last.x) == bytes(View.of(x)) and list(last.x.strides) == [8, 2, 0, 0]
    assert (last.y, last.n, last.wide, last.by) == (None, -(2**31), -(2**40), 2.0)
    assert last.stream == 2**64 - 1
    assert show({"x": x, "y": x[1:], "n": -1, "wide": -1, "by": -1.0}, 0) == 7
    last = library.c.last().contents
    assert (last.y, last.n, last.wide, last.by) == (x[1:].data_ptr(), -1, -1, -1.0)
    assert library.caller("count", {"x": View, "y": POINTER})({"x": x, "y": None}, 0) == 3 << 40


def test_numbers_that_cannot_be_passed(library):
    show, x = library.caller("show", TYPES), torch.randn(3, 4)
    fits = {"x": x, "y": None, "n": 1, "wide": 1, "by": 1.0}
    for wrong, error, message in (
        ({"n": 2**31}, ValueError, "n must fit 32 bits; got 2147483648"),
        ({"n": 2**70}, ValueError, "n must fit 32 bits"),
        ({"wide": 2**63}, ValueError, "wide must fit 64 bits; got 9223372036854775808"),
        ({"by": 10**400}, ValueError, "by must fit a float"),
        ({"n": 1.0}, TypeError, "n must be an int; got float 1.0"),
        ({"n": torch.tensor(1)}, TypeError, "n must be an int; got Tensor"),
        ({"by": torch.tensor(1.0)}, TypeError, "by must be a number; got Tensor"),
        ({"by": None}, TypeError, "by must be a number; got NoneType None"),
        ({"more": 1}, TypeError, "show: not known more. It takes x, y, n, wide, by"),
    ):
        with pytest.raises(error, match=message):
            show(fits | wrong, 0)
    del fits["n"]
    with pytest.raises(TypeError, match="show: missing n; not known m. It takes"):
        show(fits | {"m": 1}, 0)


def test_tensors_that_cannot_be_passed(library):
    x = torch.randn(3, 4)
    count = library.caller("count", {"x": View, "y": POINTER})
    result = 3 << 40
    assert count({"x": x, "y": torch.zeros(1, 1, 1, 1, 1)}, 0) == result
    huge = torch.empty(1).expand(2**31)
    assert count({"x": x, "y": huge}, 0) == result
    for wrong, error, message in (
        (None, TypeError, "x must be a tensor; got NoneType"),
        (3, TypeError, "x must be a tensor; got int 3"),
        (huge, ValueError, "x must have at most 4 dimensions, of at most 2147483647 elements"),
        (x[None, None, None], ValueError, "x must have at most 4 dimensions"),
        (x.to("meta"), ValueError, "must be on one device; got x on meta, y on cpu"),
        (x.to_sparse(), ValueError, "count: x must have strides and memory: .*data pointer"),
    ):
        with pytest.raises(error, match=message):
            count({"x": wrong, "y": x}, 0)
    with pytest.raises(TypeError, match="y must be a tensor or None; got int 3"):
        count({"x": x, "y": 3}, 0)
    with pytest.raises(ValueError, match="must be on one device"):
        count({"x": x, "y": x.to("meta")}, 0)
    assert count({"x": torch.empty(0, 3), "y": torch.empty(0)}, 0) == 0
    assert count({"x": torch.nn.Parameter(x), "y": None}, 0) == result
    with FakeTensorMode() as mode, pytest.raises(ValueError, match="has no memory"):
        count({"x": mode.from_tensor(x), "y": None}, 0)


def test_a_launch_makes_its_gpu_the_current_one(monkeypatch):
    current, calls = [0], []

    @contextlib.contextmanager
    def made_current(index):
        before, current[0] = current[0], index
        yield
        current[0] = before

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda i: 100 + i, raising=False)
    monkeypatch.setattr(torch.cuda, "device", made_current)
    run = library_module._run_on_gpu(lambda *given: calls.append((current[0], *given)), index=1)
    arguments = {"n": 5}
    run(arguments)
    current[0] = 1
    run(arguments)
    assert calls == [(1, arguments, 101)] * 2


def test_threads_share_a_call(source):
    kernels = Kernels(str(source), "sum.cu")
    wrong = []

    def work(value: float) -> None:
        x, y = torch.full((6,), value), torch.full((12,), value)[::2]
        for _ in range(1000):
            out = torch.zeros(6)
            kernels.launch("sum", x=x, y=y, out=out, fail=0, by=2.0)
            if not torch.equal(out, 3 * x):
                wrong.append(value)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(value,)) for value in (1.0, 2.0, 3.0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
