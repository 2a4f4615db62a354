"""What the tests of known calls share: fakes of the driver and of launchers, and tensors of decode calls."""

import ctypes
import shutil

import torch

from common.build import View, builder, host, planner
from task7 import known_calls

UNKNOWN = -1
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

DRIVER = """\
#include <cstdint>
struct View { void* data; int64_t sizes[4], strides[4]; };
extern "C" {
int current = 0, status = 0, launches = 0;
int current_device(int* device) { *device = current; return 0; }
}
"""
DECODE = """\
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
Seen seen;
int no_device(int*) { return 201; }
int launcher(View q, View k, View v, View out, float* partial_out, float* partial_lse, const int* seqlens_k,
             const int* leftpad_k, int num_splits, float scale, int dtype, void* stream) {
  seen = {{q, k, v, out}, partial_out, partial_lse, seqlens_k, leftpad_k, num_splits, scale, dtype, stream};
  ++launches;
  return status;
}
}
"""


class Fakes:
    """A library of known calls with functions in place of the driver's and a launcher that runs nothing.

    The numbers of the fakes, as ``launches``, are its attributes.
    """

    def __init__(self, folder, monkeypatch, module, source, seen, driver=("current_device",)):
        """Build it.

        Args:
            folder: an empty one, for what is built.
            monkeypatch: pytest's.
            module: the known_calls that loads the library.
            source: C++ code after ``DRIVER`` with ``launcher``, and ``seen``, what it was called with last.
            seen: the type of that.
            driver: what the library is given in place of the driver's functions.
        """
        # A library of its own: it knows no calls of other tests, and on a GPU the usual one stays as it is.
        shutil.copy(module.FOLDER / "known_calls.cpp", folder)
        monkeypatch.setattr(module, "FOLDER", folder)
        (folder / "fakes.cpp").write_text(DRIVER + source)
        target = planner.plan_host(folder / "fakes.cpp")
        builder.make([target])
        self.fakes = ctypes.CDLL(str(target.path))
        self.library = module.load(*(getattr(self.fakes, name) for name in driver))
        self.call = host.function(self.library)
        self.launcher = ctypes.cast(self.fakes.launcher, ctypes.c_void_p).value
        self._seen = seen

    def __getattr__(self, name):
        return ctypes.c_int.in_dll(self.fakes, name)

    @property
    def seen(self):
        return self._seen.in_dll(self.fakes, "seen")


class Seen(ctypes.Structure):
    """What the launcher of task 5 was called with last."""

    _fields_ = (
        ("tensors", View * 4), ("partial_out", ctypes.c_void_p), ("partial_lse", ctypes.c_void_p),
        ("seqlens_k", ctypes.c_void_p), ("leftpad_k", ctypes.c_void_p), ("num_splits", ctypes.c_int),
        ("scale", ctypes.c_float), ("dtype", ctypes.c_int), ("stream", ctypes.c_void_p),
    )  # fmt: skip


class Decodes(Fakes):
    """Task 7's library of known decode calls with fakes."""

    def __init__(self, folder, monkeypatch):
        super().__init__(folder, monkeypatch, known_calls, DECODE, Seen)

    def add(self, *qkv, num_splits=1, dtype=2):
        self.library.add(*qkv, self.launcher, num_splits, dtype)

    def launch(self, *qkv, scale=0.5, scratch=0):
        batch, heads, _, head_dim = qkv[0].shape
        out = torch.empty(batch, 1, heads, head_dim, dtype=qkv[0].dtype)
        return self.call(*qkv, out, scale, scratch), out


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


def strided(tensor):
    """A copy whose last dimension has stride 2."""
    return torch.stack((tensor, tensor), dim=-1)[..., 0]


def expect_views(seen, q, k, v, out):
    """The launcher got these tensors."""
    for name, got, tensor in zip("qkv", seen.tensors[:3], (q, k, v), strict=True):
        assert bytes(got) == bytes(View.of(tensor.transpose(1, 2))), f"the view of {name}"
    assert bytes(seen.tensors[3]) == bytes(View.of(out)), "the view of out"
