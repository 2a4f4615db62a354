"""C++ code of this repository that Python calls with torch's tensors. It is built when first used."""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.build import builder, planner


@functools.cache
def load(source: Path, function_type: str | None = None) -> ctypes.PyDLL:
    """The library of a .cpp that includes dlpack.h, with ``FUNCTION`` defined as that type if it is given.

    Raises:
        BuildError: it does not compile, or there is no C++ compiler.
        RuntimeError: this torch has another version of DLPack.
    """
    import torch

    target = planner.plan_host(source, function_type)
    builder.make([target])
    library = ctypes.PyDLL(str(target.path))
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    api = capsule and ctypes.c_void_p(pointer(capsule, b"dlpack_exchange_api"))
    if api is None or not library.use_exchange_api(api):
        raise RuntimeError(
            f"the kernels are called through version 1 of DLPack's C exchange API, which torch has from 2.11 on;"
            f" torch {torch.__version__} has {'another' if api else 'none'}"
        )
    return library


def function(library: ctypes.PyDLL) -> Callable[..., Any]:
    """What the library's ``function()`` returns: a function of Python, called without ctypes."""
    library.function.restype = ctypes.py_object
    return library.function()
