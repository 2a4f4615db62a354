"""What a launcher in a .cu file takes, read from the file itself.

ctypes passes what it is told to, so one wrong type in Python is silent memory corruption in C. The
declaration in Python is therefore compared with the launcher's own, once, when its library is loaded.
"""

import ctypes
import re
from collections.abc import Sequence
from pathlib import Path


class Strides(ctypes.Structure):
    """Strides of a (batch, row, head, head_dim) view in elements; the last dimension is contiguous.

    The same three int64 as ``struct Strides`` in common/include/tensor.cuh, passed by value.
    """

    _fields_ = [("batch", ctypes.c_int64), ("row", ctypes.c_int64), ("head", ctypes.c_int64)]

    @classmethod
    def of(cls, view) -> "Strides":
        """The strides of a 4-D tensor (batch, row, head, head_dim)."""
        return cls(*view.stride()[:3])


TENSOR = ctypes.c_void_p  # a tensor's data_ptr(), or a null pointer for None
INT = ctypes.c_int
LONG = ctypes.c_int64
FLOAT = ctypes.c_float
STRIDES = Strides

NAMES = {TENSOR: "TENSOR", INT: "INT", LONG: "LONG", FLOAT: "FLOAT", STRIDES: "STRIDES"}
_C_TYPES = {"int": INT, "int32_t": INT, "int64_t": LONG, "float": FLOAT, "Strides": STRIDES}


def parameters(source: Path, name: str) -> list[tuple[str, type | None]] | None:
    """Names and types of a launcher's parameters, without the stream; None where there is none to read.

    A type is None if it is not one of the five that launchers take.
    """
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", source.read_text(encoding="utf-8"), flags=re.DOTALL)
    match = re.search(rf"\bcudaError_t\s+{re.escape(name)}\s*\(([^()]*)\)\s*\{{", text)
    if match is None:
        return None
    found = []
    for parameter in match[1].split(","):
        words = re.findall(r"\w+|\*", parameter)
        if not words:
            continue
        c_type = (
            TENSOR
            if "*" in words
            else _C_TYPES.get(" ".join(w for w in words[:-1] if w != "const"))
        )
        found.append((words[-1], c_type))
    return found[:-1]


def check(source: Path, name: str, types: Sequence[type]) -> tuple[str, ...] | None:
    """Parameter names of the launcher, or None where they cannot be read.

    Raises:
        TypeError: the file declares another number of parameters, or another type, than ``types``.
    """
    declared = parameters(source, name)
    if declared is None:
        return None
    names = tuple(parameter for parameter, _ in declared)
    if len(declared) != len(types):
        raise TypeError(
            f"{name} takes {len(declared)} arguments and a stream in {source.name} ({', '.join(names)}), "
            f"but Python declares {len(types)}"
        )
    for (parameter, c_type), python_type in zip(declared, types, strict=True):
        if c_type is not None and c_type is not python_type:
            raise TypeError(
                f"{name}: {parameter} is {NAMES[c_type]} in {source.name}, but {NAMES[python_type]} in Python"
            )
    return names
