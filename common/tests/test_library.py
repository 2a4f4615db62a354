"""Launching: a kernel's library from Python, its arguments, and what goes wrong."""

import re

import pytest
import torch

from common.build import BuildError, KernelError, Kernels, dtype_code, using
from common.tests.folders import KERNEL, write_kernel

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> Kernels:
    source = write_kernel(tmp_path_factory.mktemp("launched"))
    return Kernels(str(source), "kernel.cu")


@pytest.mark.parametrize("device", DEVICES)
def test_launch(kernels, device):
    inp = torch.randn(1000, device=device)
    out = torch.empty_like(inp)
    kernels.launch("scale", inp=inp, out=out, rows=1, n=1000, by=2.0)
    assert torch.equal(out, 2 * inp)
    kernels.launch("scale", by=-1, n=1000, rows=1, out=out, inp=inp)  # keywords: any order
    assert torch.equal(out, -inp)


def test_launch_in_the_check_build(kernels):
    inp = torch.randn(1000)
    out = torch.empty_like(inp)
    with using(check=True, order="reverse", eager_copies=True):
        kernels.launch("scale", inp=inp, out=out, rows=1, n=1000, by=2.0)
        assert torch.equal(out, 2 * inp)
        with pytest.raises(KernelError, match="out"):
            kernels.launch("scale", inp=inp, out=out[:999], rows=1, n=1000, by=2.0)
    kernels.launch("scale", inp=inp, out=out, rows=1, n=1000, by=3.0)  # the next launch is clean
    assert torch.equal(out, 3 * inp)


@pytest.mark.parametrize("device", DEVICES)
def test_an_error_of_the_launch_is_raised(kernels, device):
    inp = torch.randn(8, device=device)
    with pytest.raises(KernelError, match="(?i)invalid"):
        kernels.launch(
            "scale", inp=inp, out=torch.empty_like(inp), rows=1, n=0, by=2.0
        )  # a grid of 0 blocks
    kernels.launch("scale", inp=inp, out=inp, rows=1, n=8, by=1.0)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"by": None}, TypeError, "by must be a number; got NoneType"),
        ({"n": 2.5}, TypeError, "n must be an int; got float 2.5"),
        ({"rows": "3"}, TypeError, "rows must be an int; got str '3'"),
        ({"rows": 2**31}, ValueError, "rows must fit 32 bits"),
        ({"out": 7}, TypeError, "out must be a tensor or None; got int 7"),
        ({"more": 1}, TypeError, "not known more. It takes inp, out, rows, n, by"),
        ({"by": ...}, TypeError, "missing by"),
        ({"out": torch.empty(4, device="meta")}, ValueError, "inp on cpu, out on meta"),
        ({"inp": torch.empty(4, device="meta")}, ValueError, "run on cpu and cuda tensors"),
        ({"inp": ..., "out": ...}, TypeError, "none of the arguments is a tensor"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit(kernels, change, error, words):
    arguments = {
        "inp": torch.zeros(4),
        "out": torch.full((4,), 5.0),
        "rows": 1,
        "n": 4,
        "by": 1.0,
    } | change
    out = arguments["out"]
    with pytest.raises(error, match=re.escape(words)):
        kernels.launch("scale", **{k: v for k, v in arguments.items() if v is not ...})
    if isinstance(out, torch.Tensor) and out.device.type == "cpu":
        assert (out == 5).all()  # nothing ran


def test_a_launcher_that_is_not_there(kernels):
    with pytest.raises(TypeError, match="no launcher 'shrink'; it has scale"):
        kernels.launch("shrink", inp=torch.zeros(1))


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        (
            "unsigned n, cudaStream_t stream",
            "n of go is unsigned, which Python cannot pass; it can pass pointers, int, ",
        ),
        ("float* x, int n", "the last parameter of go must be a cudaStream_t"),
    ],
)
def test_a_launcher_that_python_cannot_call(tmp_path, parameters, words):
    text = f'extern "C" cudaError_t go({parameters}) {{ return cudaSuccess; }}\n'
    (tmp_path / "kernel.cu").write_text(text)
    with pytest.raises(TypeError, match=re.escape(f"kernel.cu: {words}")):
        Kernels(str(tmp_path / "x.py"), "kernel.cu").launch("go", n=1, x=torch.zeros(1))


VIEWS = """\
#include "tensor.cuh"
__global__ void write(int64_t* out, View x) {
  for (int i = 0; i < 4; ++i) out[i] = x.sizes[i], out[4 + i] = x.strides[i];
  out[8] = x.as<float>()[x.strides[0] + x.strides[1]];
}
extern "C" cudaError_t show(View x, int64_t* out, const void* none, cudaStream_t stream) {
  if (none != nullptr) return cudaErrorInvalidValue;
  write<<<1, 1, 0, stream>>>(out, x);
  return cudaGetLastError();
}
extern "C" int64_t bytes(View x, int each) { return x.sizes[0] * x.sizes[1] * each; }
extern "C" int answer() { return 42; }
"""


@pytest.fixture(scope="module")
def views(tmp_path_factory) -> Kernels:
    folder = tmp_path_factory.mktemp("views")
    (folder / "views.cu").write_text(VIEWS)
    return Kernels(str(folder / "x.py"), "views.cu")


@pytest.mark.parametrize("device", DEVICES)
def test_a_tensor_reaches_its_launcher_as_a_view(views, device):
    def shown(x):
        out = torch.zeros(9, dtype=torch.int64, device=device)
        views.launch("show", x=x, out=out, none=None)
        return out.tolist()

    x = torch.arange(120.0, device=device).view(2, 3, 4, 5).transpose(1, 2)
    assert shown(x) == [2, 4, 3, 5, 60, 5, 20, 1, 65]
    # A missing dimension, and one of size 1, has stride 0.
    assert shown(x[1:, 2]) == [1, 3, 5, 1, 0, 20, 1, 0, 90]
    assert shown(x[0, 0, 0, 0].expand(3, 2)) == [3, 2, 1, 1, 0, 0, 0, 0, 0]
    with pytest.raises(TypeError, match=r"x must be a tensor; got tuple \(60, 5, 20\)"):
        views.launch("show", x=(60, 5, 20), out=x, none=None)
    with pytest.raises(TypeError, match="x must be a tensor; got NoneType"):
        views.launch("show", x=None, out=x, none=None)
    for shape in ((1, 1, 1, 1, 1), (2, 2**31)):
        with pytest.raises(
            ValueError, match=r"show: x must have at most 4 .*got \(.*1\)|2147483648"
        ):
            views.launch("show", x=x[:1, :1, :1, :1].reshape(()).expand(shape), out=x, none=None)


@pytest.mark.parametrize("device", DEVICES)
def test_a_query_is_answered_by_the_cu(views, device):
    device = torch.empty(0, device=device).device
    x = torch.empty(2, 3, device=device)
    assert views.query("bytes", device, x=x, each=2**20) == 6 * 2**20
    assert views.query("answer", device) == 42
    assert views.has_query("answer") and not views.has_query("show") and not views.has_query("no")
    with pytest.raises(TypeError, match="bytes: missing each. It takes x, each"):
        views.query("bytes", device, x=x)
    with pytest.raises(TypeError, match="each must be an int; got float 2.5"):
        views.query("bytes", device, x=x, each=2.5)
    with pytest.raises(TypeError, match="has no query 'show'; it has bytes, answer"):
        views.query("show", device)
    with pytest.raises(TypeError, match="has no launcher 'answer'; it has show"):
        views.launch("answer", x=x)


def test_a_launch_whose_kernel_does_not_compile(tmp_path):
    source = write_kernel(tmp_path / "broken", KERNEL + "oops\n")
    with pytest.raises(BuildError, match=r"kernel\.cu:15:1: error"):
        Kernels(str(source), "kernel.cu").launch("scale", inp=torch.zeros(1))


def test_using_refuses_an_unknown_order():
    with pytest.raises(ValueError, match="forward, reverse, random"), using(order="sideways"):
        pass


def test_dtype_codes():
    assert [dtype_code(d) for d in (torch.float32, torch.float16, torch.bfloat16)] == [0, 1, 2]
    with pytest.raises(ValueError, match=r"torch\.int32"):
        dtype_code(torch.int32)
