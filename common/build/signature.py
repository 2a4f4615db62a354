"""What the functions that a .cu exports take and return, read from the file itself.

ctypes converts to the types that it is given, and a wrong one silently corrupts memory in C. The types are therefore
written in one place, the function itself: ``extern "C" cudaError_t name(View x, int n, cudaStream_t stream) {``.
"""

import ctypes
import re
from pathlib import Path
from typing import NamedTuple

INT_MAX = 2**31 - 1


class View(ctypes.Structure):
    """A tensor of up to four dimensions as a launcher takes it, by value: ``struct View`` of common/include/tensor.cuh.

    ``sizes`` and ``strides`` count elements. A dimension that the tensor does not have has size 1, and a dimension of
    size 1 has stride 0: that stride is never used, and so is a multiple of whatever a kernel asks for.
    """

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("sizes", ctypes.c_int64 * 4),
        ("strides", ctypes.c_int64 * 4),
    ]

    @classmethod
    def of(cls, tensor) -> "View":
        """The view of a tensor, whose memory has to outlive it.

        Raises:
            ValueError: more than four dimensions, or a size that does not fit 32 bits.
        """
        shape = tensor.shape
        if len(shape) > 4 or max(shape, default=0) > INT_MAX:
            raise ValueError(
                f"must have at most 4 dimensions, of at most {INT_MAX} elements; got {tuple(shape)}"
            )
        missing = 4 - len(shape)
        used = [n if size != 1 else 0 for size, n in zip(shape, tensor.stride(), strict=True)]
        return cls(tensor.data_ptr(), (*shape, *[1] * missing), (*used, *[0] * missing))


POINTER = ctypes.c_void_p  # a tensor's data_ptr(), or a null pointer for None
_TYPES = {
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    "View": View,
}
WANTED = {
    POINTER: "a tensor or None",
    View: "a tensor",
    ctypes.c_int: "an int",
    ctypes.c_int64: "an int",
    ctypes.c_float: "a number",
}
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_EXPORT = re.compile(r'\bextern\s+"C"\s+(cudaError_t|int64_t|int)\s+(\w+)\s*\(([^()]*)\)\s*\{')


class Export(NamedTuple):
    """A function of a .cu that Python can call.

    A launcher returns a ``cudaError_t`` and takes a stream as its last parameter; a query returns an ``int`` or
    ``int64_t`` and launches nothing.
    """

    is_launcher: bool
    returns: type
    parameters: dict[str, type]  # in order, without the stream


def exports(source: Path) -> dict[str, Export]:
    """The launchers and queries of a .cu, by name.

    Raises:
        TypeError: one takes something that Python cannot pass, or a launcher has no stream at the end.
    """
    text = _COMMENT.sub(" ", source.read_text(encoding="utf-8", errors="replace"))
    found = {}
    for returned, name, parameters in _EXPORT.findall(text):
        given = [p for p in parameters.split(",") if p.strip()]
        is_launcher = returned == "cudaError_t"
        if is_launcher and not (given and re.match(r"\s*cudaStream_t\b", given.pop())):
            raise TypeError(f"{source.name}: the last parameter of {name} must be a cudaStream_t")
        types = dict(_parameter(source, name, parameter) for parameter in given)
        found[name] = Export(is_launcher, _TYPES["int" if is_launcher else returned], types)
    return found


def _parameter(source: Path, function: str, parameter: str) -> tuple[str, type]:
    *words, name = re.findall(r"\w+|\*", parameter)
    type_name = " ".join(word for word in words if word != "const")
    if "*" not in words and type_name not in _TYPES:
        raise TypeError(
            f"{source.name}: {name} of {function} is {type_name}, which Python cannot pass; "
            f"it can pass pointers, {', '.join(_TYPES)}"
        )
    return name, POINTER if "*" in words else _TYPES[type_name]
