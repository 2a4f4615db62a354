"""What a call does besides its result, and the memory around a launch's tensors."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from common.build import Kernels
from common.check import CheckFailed, Watch, strided_output, written_out
from common.check.guards import guarded
from common.check.poison import hide_, is_guard, is_hidden, is_poison, poisoned

# Writes y[i] for begin <= i < end, whatever the size of y; reads x there.
COPY = """\
#include "tensor.cuh"
__global__ void copy(View x, View y, int begin, int end) {
  for (int i = begin; i < end; ++i) y.as<float>()[i * y.strides[0]] = x.as<float>()[i * x.strides[0]];
}
extern "C" cudaError_t copy_range(View x, View y, int begin, int end, cudaStream_t stream) {
  copy<<<1, 1, 0, stream>>>(x, y, begin, end);
  return cudaGetLastError();
}
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    path = tmp_path_factory.mktemp("watched") / "copy.cu"
    path.write_text(COPY)
    return Kernels(str(path), "copy.cu")


def copy(kernels, x, y=None, begin=0, end=None):
    y = torch.empty_like(x) if y is None else y
    end = x.shape[0] if end is None else end
    kernels.launch("copy_range", x=x, y=y, begin=begin, end=end)
    return y


def name(kernels):
    return f"{kernels.source.parent.name} copy_range"


def test_a_launch_alone_is_as_expected(kernels):
    x = torch.randn(10)
    with Watch() as did:
        y = copy(kernels, x)
    assert torch.equal(x, y)
    did.expect({name(kernels): 1}, memory=y.nbytes)
    assert did.memory == y.nbytes and not did.computed


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda k, x: x.clone(), "but not by these kernels: expected .* copy_range 1 x; launched nothing"),
        (lambda k, x: (copy(k, x), copy(k, x)), "launched .* copy_range 2 x"),
        (lambda k, x: copy(k, x).clone(), r"PyTorch copied tensors: clone \(.*test_watch.py:\d+\)"),
        (lambda k, x: copy(k, x.contiguous()), "PyTorch copied tensors: clone"),
        (lambda k, x: copy(k, x.double().float()), "PyTorch copied tensors: _to_copy"),
        (lambda k, x: copy(k, x).mul_(1), "PyTorch computed: mul_ .*; here the kernels compute everything"),
        (lambda k, x: copy(k, x).softmax(0), "PyTorch computed: _softmax"),
        (lambda k, x: (copy(k, x), torch.empty(4000)), "tensors of .* bytes in all were made, and .*; the largest: empty made"),
    ],
)  # fmt: skip
def test_what_is_told(kernels, call, message):
    x = torch.randn(600)[::2]
    with Watch() as did:
        call(kernels, x)
    with pytest.raises(CheckFailed, match=message):
        did.expect({name(kernels): 1}, memory=4 * 300)


def test_views_and_constants_are_no_computation(kernels):
    x = torch.randn(3, 8)
    with Watch() as did:
        y = torch.zeros(8)
        copy(kernels, x.unsqueeze(0).transpose(1, 2)[0].unflatten(0, (2, 4)).flatten(0, 1)[:, 1], y)
        y[:0].fill_(3)
    assert torch.equal(y, x[1])
    did.expect({name(kernels): 1}, memory=y.nbytes)


def test_attention_is_written_out():
    q = torch.randn(1, 2, 5, 8)
    with (
        pytest.raises(CheckFailed, match=r"scaled_dot_product_attention \(.*test_watch.py:\d+\)"),
        written_out(),
    ):
        scaled_dot_product_attention(q, q, q)
    with written_out():
        torch.softmax(q @ q.mT, -1) @ q


# ---- guard zones


@pytest.mark.parametrize(
    ("begin", "end", "message"),
    [
        (0, 11, "copy_range wrote outside of its tensors: 4 bytes after the end of 'y', the first 0 bytes behind it"),
        (0, 14, r"16 bytes after the end of 'y'.*--check on the CPU names the line"),
        (-3, 10, "12 bytes before the start of 'y', the first 12 bytes ahead of it"),
    ],
)  # fmt: skip
def test_a_store_out_of_bounds_is_found(kernels, begin, end, message):
    x, y = torch.arange(100.0)[50:], torch.zeros(10)  # no byte of x is one of the guard zone's
    with guarded(), pytest.raises(CheckFailed, match=message):
        copy(kernels, x, y, begin, end)
    copy(kernels, x, y, 0, 10)  # the process goes on
    assert torch.equal(y, x[:10])


def test_guarded_launches_change_nothing_else(kernels):
    store = torch.arange(40.0)
    x, y = store[1:20:2], store[22:32]  # of one storage, and at odd addresses
    with guarded(), Watch() as did:
        copy(kernels, x, y)
    assert torch.equal(
        store, torch.cat([torch.arange(22.0), torch.arange(1.0, 21, 2), torch.arange(32.0, 40)])
    )
    did.expect({name(kernels): 1}, memory=0)
    z = torch.zeros(10)
    with guarded():
        copy(kernels, torch.randn(1)[:0], z, 0, 0)
        copy(kernels, torch.ones(1).expand(10), z)
    assert torch.equal(z, torch.ones(10))


def test_what_is_read_out_of_bounds_is_a_nan_of_its_own(kernels):
    with guarded():
        y = copy(kernels, torch.randn(8), torch.zeros(10), 0, 10)
    assert is_guard(y).tolist() == 8 * [False] + 2 * [True]
    assert bool(y[8:].isnan().all()) and not is_poison(y).any() and not is_hidden(y).any()


# ---- outputs with gaps


def test_an_output_with_gaps(kernels):
    seen = []

    class Recorder:
        source = kernels.source

    def launch(arguments):
        seen.append(arguments["out"])
        arguments["out"].copy_(torch.arange(60.0).view(3, 5, 4))

    from common.build import library

    out = torch.zeros(5, 3, 4).transpose(0, 1)
    with strided_output("out"):
        library._observer(Recorder, "any", {"out": out}, launch)
    assert torch.equal(out, torch.arange(60.0).view(3, 5, 4))
    assert seen[0].shape == out.shape and seen[0].stride() == (7, 35, 1)
    assert not seen[0].is_contiguous() and seen[0].untyped_storage().nbytes() > out.nbytes


# ---- which NaN


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_hidden_inputs_are_not_unwritten_outputs(dtype):
    with poisoned():
        empty = torch.empty(4, dtype=dtype)
    hidden = hide_(torch.zeros(4, dtype=dtype))
    assert bool(hidden.isnan().all() and is_hidden(hidden).all() and is_poison(empty).all())
    assert not is_poison(hidden).any() and not is_hidden(empty).any()
    partly = hide_(torch.zeros(4, dtype=dtype), torch.tensor([True, False, False, True]))
    assert partly.isnan().tolist() == [True, False, False, True]
    assert bool(is_hidden(0.0 * hide_(torch.zeros(4)) + 1.0).all())


def test_what_a_launch_has_left_as_it_was_allocated(kernels):
    x = torch.arange(4.0)
    with poisoned(), Watch() as did:
        copy(kernels, x, end=0)
    with pytest.raises(CheckFailed) as caught:
        did.expect_written()
    assert caught.value.not_written
    with poisoned(), Watch() as did:
        copy(kernels, x, end=1)
    did.expect_written()
    assert not did.computed
