"""What the launchers in a .cu file take, read from the file itself.

ctypes passes what it is told to, so one wrong type is silent memory corruption in C. The one place where the types
stand is therefore the launcher: ``extern "C" cudaError_t name(const float* x, int n, cudaStream_t stream) {``.
"""

import ctypes
import re
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


POINTER = ctypes.c_void_p  # a tensor's data_ptr(), or a null pointer for None
_TYPES = {
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    "Strides": Strides,
}
WANTED = {
    POINTER: "a tensor or None",
    ctypes.c_int: "an int",
    ctypes.c_int64: "an int",
    ctypes.c_float: "a number",
    Strides: "Strides.of(a view)",
}
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_LAUNCHER = re.compile(r'\bextern\s+"C"\s+cudaError_t\s+(\w+)\s*\(([^()]*)\)\s*\{')


def launchers(source: Path) -> dict[str, dict[str, type]]:
    """For each launcher of a .cu its parameters in order, without the stream: name and ctypes type.

    Raises:
        TypeError: a launcher takes something that Python cannot pass, or no stream at the end.
    """
    text = _COMMENT.sub(" ", source.read_text(encoding="utf-8"))
    return {name: _parameters(source, name, given) for name, given in _LAUNCHER.findall(text)}


def _parameters(source: Path, launcher: str, given: str) -> dict[str, type]:
    found: dict[str, type] = {}
    *parameters, stream = given.split(",")
    if not re.match(r"\s*cudaStream_t\b", stream):
        raise TypeError(f"{source.name}: the last parameter of {launcher} must be a cudaStream_t")
    for parameter in parameters:
        *words, name = re.findall(r"\w+|\*", parameter)
        kind = " ".join(word for word in words if word != "const")
        if "*" not in words and kind not in _TYPES:
            known = ", ".join(_TYPES)
            raise TypeError(
                f"{source.name}: {name} of {launcher} is {kind}, which Python cannot pass; pointers, {known} it can"
            )
        found[name] = POINTER if "*" in words else _TYPES[kind]
    return found
