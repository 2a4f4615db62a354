"""Calls of C as common.build.call makes them: used again from call to call, and by several threads at once."""

import contextlib
import ctypes
import sys
import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from common.build import Kernels, call
from common.build.call import Gpu
from common.build.signature import POINTER, View

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


class Current:
    """The GPU that is the current one: 0, unless a context changes it."""

    index = 0

    def __call__(self):
        return self.index

    @contextlib.contextmanager
    def made(self, index):
        before, self.index = self.index, index
        yield
        self.index = before


def test_a_call_makes_its_gpu_the_current_one_and_passes_its_stream():
    x, current, calls = torch.randn(3, 4), Current(), []

    def run(view, pointer, n, stream):
        calls.append((current(), view.data, list(view.sizes), pointer.value, n, stream))
        return 7

    gpu = Gpu(1, current, lambda index: 100 + index, current.made)
    types = {"x": View, "y": POINTER, "n": ctypes.c_int}
    show = call.caller("show", types, x.device, run, gpu)
    assert show({"n": 5, "y": None, "x": x}) == 7
    current.index = 1
    assert show({"x": x, "y": x, "n": 5}) == 7
    address = x.data_ptr()
    assert calls == [(1, address, [3, 4, 1, 1], pointer, 5, 101) for pointer in (None, address)]
    with pytest.raises(ValueError, match="n must fit 32 bits"):
        show({"x": x, "y": x, "n": 2**31})


def test_tensors_that_cannot_be_passed():
    x = torch.randn(3, 4)
    types = {"x": View, "y": POINTER}
    show = call.caller("show", types, x.device, lambda view, pointer: view.data)
    assert show({"x": x[1:], "y": torch.zeros(1, 1, 1, 1, 1)}) == x[1:].data_ptr()
    huge = torch.empty(1).expand(2**31)
    assert show({"x": x, "y": huge}) == x.data_ptr()
    for wrong, error, message in (
        (None, TypeError, "x must be a tensor; got NoneType"),
        (3, TypeError, "x must be a tensor; got int 3"),
        (huge, ValueError, "x must have at most 4 dimensions, of at most 2147483647 elements"),
        (x[None, None, None], ValueError, "x must have at most 4 dimensions"),
        (x.to("meta"), ValueError, "must be on one device; got x on meta, y on cpu"),
        (x.to_sparse(), ValueError, "show: x must have strides and memory: .*data pointer"),
    ):
        with pytest.raises(error, match=message):
            show({"x": wrong, "y": x})
    with pytest.raises(TypeError, match="y must be a tensor or None; got int 3"):
        show({"x": x, "y": 3})
    with pytest.raises(ValueError, match="must be on one device"):
        show({"x": x, "y": x.to("meta")})
    assert show({"x": x, "y": None}) == x.data_ptr()
    assert show({"x": torch.empty(0, 3), "y": torch.empty(0)}) is None
    with FakeTensorMode() as mode, pytest.raises(ValueError, match="has no memory"):
        show({"x": mode.from_tensor(x), "y": None})


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
