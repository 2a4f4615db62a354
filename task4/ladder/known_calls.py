"""Calls like earlier ones, from torch's tensors to the launcher in C++: known_calls.cpp, built when first used.

What a call needs is checked, chosen and allocated by Python code once (:mod:`task4.ladder.call`), which then adds it
here. Only rungs for Hopper are worth it: the others run for longer than the Python code.
"""

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from common.build import builder
from task4.ladder.rungs import FOLDER

_QKV = (ctypes.py_object,) * 3
_ARGUMENTS = {
    "known_calls_init": (ctypes.c_void_p,) * 3,
    "known_calls_add": (
        *_QKV,
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_float,
        *[ctypes.c_int] * 3,
        ctypes.c_int64,
    ),
    "known_calls_add_counter": (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p),
    "known_calls_workspace_bytes": (*_QKV, ctypes.c_int64),
    "known_calls_launch": (*_QKV, ctypes.py_object, ctypes.c_void_p, ctypes.c_int64),
}

_WANTS_WORKSPACE = -2
_MOST = 4096  # different arguments that are no tensors

_numbers: dict[tuple[Any, ...], int] = {}  # by the arguments that are no tensors


def launch(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, rung: int | None
) -> Tensor | None:
    """The output of a known call, which is launched; None if there is no such call.

    Arguments are :func:`task4.ladder.ladder_attention`'s, and nothing is checked but whether they are known.
    """
    try:
        number = _numbers.get((causal, scale, rung))
    except TypeError:  # one that cannot be hashed
        return None
    if number is None or not (type(q) is type(k) is type(v) is Tensor and q.is_cuda):
        return None
    # Naming the format costs 0.4 us.
    like = {} if q.is_contiguous() else {"memory_format": torch.contiguous_format}
    out = torch.empty_like(q, **like)
    status = _library().known_calls_launch(q, k, v, out, None, number)
    if status == _WANTS_WORKSPACE:
        size = _library().known_calls_workspace_bytes(q, k, v, number)
        if size < 0:  # forgotten in between, by another thread
            return None
        workspace = torch.empty(size, dtype=torch.uint8, device=q.device)
        status = _library().known_calls_launch(q, k, v, out, workspace.data_ptr(), number)
    return None if status else out


def add(
    tensors: tuple[Tensor, Tensor, Tensor],
    given: tuple[bool, float | None, int | None],
    launcher: int,
    scale: float,
    causal: bool,
    dtype: int,
    workspace: Tensor | None,
    counted: bool,
) -> None:
    """From now on, such a call is known.

    Args:
        tensors: q, k and v.
        given: causal, scale and rung as the caller gave them.
        launcher: where it is in memory.
        scale, causal, dtype: what it gets.
        workspace: as it was for the launch on the current stream.
        counted: the workspace is a counter, and stays with the stream.
    """
    plain = all(x is None or isinstance(x, (int, float)) for x in given)
    plain = plain and all(type(x) is Tensor for x in tensors) and len(_numbers) < _MOST
    if not plain or (library := _library()) is None:
        return
    number = _numbers.setdefault(given, len(_numbers))
    size = 0 if workspace is None or counted else workspace.nbytes
    library.known_calls_add(*tensors, number, launcher, scale, causal, dtype, counted, size)
    if counted:
        index = workspace.device.index
        stream = torch._C._cuda_getCurrentRawStream(index)
        library.known_calls_add_counter(index, stream, workspace.data_ptr())


@functools.cache
def _library() -> ctypes.PyDLL | None:
    """The C++ code; None if this torch has another version of DLPack than it."""
    driver = ctypes.CDLL("libcuda.so.1")
    return load(driver.cuCtxGetDevice, driver.cuStreamIsCapturing)


def load(current_device: Any, is_capturing: Any) -> ctypes.PyDLL | None:
    """The same with these functions in C in place of the CUDA driver's."""
    capsule = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return None
    target = builder.plan_host(FOLDER / "known_calls.cpp")
    builder.make([target])
    library = ctypes.PyDLL(str(target.path))
    library.known_calls_workspace_bytes.restype = ctypes.c_int64
    for name, types in _ARGUMENTS.items():
        getattr(library, name).argtypes = types
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    api = pointer(capsule, b"dlpack_exchange_api")
    functions = (ctypes.cast(f, ctypes.c_void_p) for f in (current_device, is_capturing))
    return library if library.known_calls_init(api, *functions) else None
