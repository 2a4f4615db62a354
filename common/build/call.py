"""From keywords to a call of C: tensors and numbers become what it takes, and what does not fit is refused."""

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.build import host, planner
from common.build.signature import POINTER, WANTED, Export, View

CALL = Path(__file__).resolve().parent / "call.cpp"

Arguments = dict[str, Any]  # by the names that they have in the .cu

_DEVICE_TYPES = {"cpu": 1, "cuda": 2}  # DLPack's numbers
_IN_C = {
    View: "View",
    POINTER: "void*",
    ctypes.c_int: "int",
    ctypes.c_int64: "int64_t",
    ctypes.c_float: "float",
}


def caller(name: str, export: Export, address: int, device: Any) -> Callable[[Arguments, int], int]:
    """A function that calls one of C and returns what that returns.

    It takes the arguments by name, and the stream's handle, which a query does not get.

    Args:
        name: of the function of C, for messages.
        export: what it takes and returns.
        address: where it is in memory.
        device: where all tensors must be.

    What is returned raises:
        TypeError: an argument is missing, not known, or not of its type.
        ValueError: a tensor on another device or too large for a View, or an int that needs more than 32 bits.
    """
    import torch

    types = export.parameters

    def misfit(arguments: Arguments) -> None:
        raise _misfit(name, types, device, arguments)

    bind = host.function(host.load(CALL, _function_type(export)))
    names = tuple(map(sys.intern, types))
    device_type = _DEVICE_TYPES[device.type]
    return bind(address, device_type, device.index or 0, torch.Tensor, names, misfit)


def caller_target(export: Export) -> planner.Target:
    """The library that calls functions of this type."""
    return planner.plan_host(CALL, _function_type(export))


def _function_type(export: Export) -> str:
    """Its type in C++: ``int(View,float,CUstream_st*)``."""
    parameters = [_IN_C[wanted] for wanted in export.parameters.values()]
    if export.is_launcher:
        parameters.append("CUstream_st*")
    return f"{_IN_C[export.returns]}({','.join(parameters)})"


_LIMITS = {ctypes.c_int: 2**31, ctypes.c_int64: 2**63, ctypes.c_float: 2**1023}
_RANGES = {ctypes.c_int: "32 bits", ctypes.c_int64: "64 bits", ctypes.c_float: "a float"}


def _misfit(name: str, types: dict[str, type], device: Any, arguments: Arguments) -> Exception:
    """The error that says what is wrong with the arguments."""
    missing = [n for n in types if n not in arguments]
    unknown = [n for n in arguments if n not in types]
    if missing or unknown:
        problems = [f"missing {', '.join(missing)}"] * bool(missing)
        problems += [f"not known {', '.join(unknown)}"] * bool(unknown)
        return TypeError(f"{name}: {'; '.join(problems)}. It takes {', '.join(types)}")
    for keyword, wanted in types.items():
        value = arguments[keyword]
        fits = {
            POINTER: value is None or hasattr(value, "data_ptr"),
            View: hasattr(value, "data_ptr"),
            ctypes.c_int: isinstance(value, int),
            ctypes.c_int64: isinstance(value, int),
            ctypes.c_float: isinstance(value, (int, float)),
        }
        if not fits[wanted]:
            got = f"{type(value).__name__} {value!r}"
            return TypeError(f"{name}: {keyword} must be {WANTED[wanted]}; got {got}")
        if isinstance(value, int) and not -_LIMITS[wanted] <= value < _LIMITS[wanted]:
            return ValueError(f"{name}: {keyword} must fit {_RANGES[wanted]}; got {value}")
    tensors = {n: value for n, value in arguments.items() if hasattr(value, "device")}
    if any(tensor.device != device for tensor in tensors.values()):
        devices = ", ".join(f"{n} on {tensor.device}" for n, tensor in tensors.items())
        return ValueError(f"{name}: all tensors must be on one device; got {devices}")
    for keyword, wanted in types.items():
        if wanted is View:
            try:
                View.of(arguments[keyword])
            except ValueError as error:
                return ValueError(f"{name}: {keyword} {error}")
            except RuntimeError as error:
                return ValueError(f"{name}: {keyword} must have strides and memory: {error}")
    return ValueError(f"{name}: a tensor has no memory, as in torch.compile")
