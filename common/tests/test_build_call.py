"""Calls of C as common.build.call makes them: used again from call to call, and by several threads at once."""

import contextlib
import ctypes
import sys
import threading
import time

import pytest
import torch

from common.build import Kernels, builder, call
from common.build.call import Gpu
from common.build.signature import View, exports

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


@pytest.fixture
def prepared(source):
    """What a GPU gets from ``Kernels.prepare``, around a launcher for the CPU."""
    (library,) = builder.build([source])

    def prepare(
        x, y, out, fail=0, by=2.0, failed=lambda status: None, current=lambda: 1, made_current=None
    ):
        function = ctypes.CDLL(str(library))["sum"]
        types = exports(source)["sum"].parameters.values()
        addresses = [None if t is None else t.data_ptr() for t in (x, out)]
        values = call.converted(types, (addresses[0], View.of(y), addresses[1], fail, by))
        # Asked once the addresses are there: another thread gets its turn.
        stream = lambda index: time.sleep(0)  # noqa: E731
        gpu = Gpu(1, current, stream, made_current)
        return call.prepared(function, values, gpu, failed)

    return prepare


def test_a_prepared_call_changes_the_addresses_alone(prepared):
    x, y, out = torch.randn(9), torch.randn(18)[::2], torch.empty(9)
    add = prepared(x, y, out)
    add(x, y, out)
    assert torch.equal(out, x + 2 * y)
    x, y, out = torch.randn(9), torch.randn(18)[::2], torch.empty(9)
    add(None, y, out)
    assert torch.equal(out, 2 * y)
    add(x, y, out)
    assert torch.equal(out, x + 2 * y)


def test_a_prepared_call_says_what_failed(prepared):
    x, failures = torch.zeros(3), []
    prepared(x, x, x, fail=1, failed=failures.append)(x, x, x)
    assert failures == [1]
    with pytest.raises(TypeError):
        prepared(x, x, x, by="2")


def test_a_prepared_call_makes_its_gpu_the_current_one(prepared):
    current = [0]

    @contextlib.contextmanager
    def made_current(index):
        before, current[0] = current[0], index
        yield
        current[0] = before

    x, out = torch.randn(3), torch.empty(3)
    prepared(x, x, out, current=lambda: current[0], made_current=made_current)(x, x, out)
    assert torch.equal(out, 3 * x) and current == [0]


@pytest.mark.parametrize("how", ["launch", "prepared"])
def test_threads_share_a_call(source, prepared, how):
    kernels, zeros = Kernels(str(source), "sum.cu"), torch.zeros(12)[::2]
    by_name = lambda x, y, out: kernels.launch("sum", x=x, y=y, out=out, fail=0, by=2.0)  # noqa: E731
    add = by_name if how == "launch" else prepared(zeros, zeros, zeros)
    wrong = []

    def work(value: float) -> None:
        x, y = torch.full((6,), value), torch.full((12,), value)[::2]
        for _ in range(1000):
            out = torch.zeros(6)
            add(x, y, out)
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
