"""From keywords to a call of C: tensors and numbers become what ctypes passes, and what does not fit is refused.

A launch costs the host a few microseconds, most of them for reading its tensors. So a View is reused: for a tensor with
the layout of the one before, only the address is new. And the function that fills in a launcher's arguments is
compiled from source made for that launcher, because loops over whatever a launcher may take cost another microsecond.

ctypes reads the arguments after it has released the interpreter's lock, so no two calls may share a View: each takes
a set that is free, or creates one.
"""

import ctypes
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from common.build.signature import INT_MAX, INT_MIN, POINTER, WANTED, View, layout

Arguments = dict[str, Any]  # by the names that they have in the .cu


class Gpu(NamedTuple):
    """A GPU, and torch's functions for it."""

    index: int
    current: Callable[[], int]  # the index of the current GPU
    current_stream: Callable[[int], int]  # the handle of a GPU's current stream
    made_current: Callable[[int], Any]  # a context in which a GPU is the current one


def caller(
    name: str,
    types: dict[str, type],
    device: Any,
    run: Callable[..., Any],
    gpu: Gpu | None = None,
) -> Callable[[Arguments], Any]:
    """A function that takes the arguments by name and returns what ``run`` returns of them.

    Args:
        name: of the C function, for messages.
        types: of its parameters.
        device: where all tensors must be.
        run: takes the values in the order of ``types``, as ctypes does.
        gpu: is made the current one for ``run``, which takes its current stream after the values.

    What is returned raises:
        TypeError: an argument is missing, not known, or not of its type.
        ValueError: a tensor on another device or too large for a View, or an int that needs more than 32 bits.
    """
    views = list(types.values()).count(View)
    free: list[list[_Slot]] = []

    def take() -> list[_Slot]:
        try:
            return free.pop()
        except IndexError:
            return [_Slot(device) for _ in range(views)]

    def address_of(tensor: Any) -> int:
        if tensor.device != device:
            raise ValueError
        return tensor.data_ptr()

    scope = {
        "take": take,
        "give_back": free.append,
        "address_of": address_of,
        "run": run,
        "misfits": (KeyError, AttributeError, TypeError, ValueError, ctypes.ArgumentError),
        "misfit": lambda arguments: _misfit(name, types, device, arguments),
        **(gpu._asdict() if gpu else {}),
    }
    exec(compile(_source(types, gpu is not None), f"<call of {name}>", "exec"), scope)
    return scope["call"]


class _Slot:
    """A View for one parameter, and how the tensor that filled it last is laid out."""

    __slots__ = ("view", "address", "laid_out", "_device")

    def __init__(self, device: Any) -> None:
        self.view = View()
        self.address = ctypes.c_void_p.from_buffer(self.view)  # its first field, data
        self.laid_out: tuple[Any, ...] | None = None  # shape, strides, device
        self._device = device

    def lay_out(self, shape: tuple[int, ...], strides: tuple[int, ...], device: Any) -> None:
        if device != self._device:
            raise ValueError
        ctypes.memmove(ctypes.addressof(self.view), layout(shape, strides), ctypes.sizeof(View))
        self.laid_out = shape, strides, device


_MAKE_CURRENT = """
    if current() != index:
        with made_current(index):
            return call(arguments)
"""


def _source(types: dict[str, type], on_gpu: bool) -> str:
    """The source of what ``caller`` returns: a{i} is argument i, s{i} its slot if it is a View."""
    views = "".join(f"s{i}, " for i, wanted in enumerate(types.values()) if wanted is View)
    values = [f"s{i}.view" if t is View else f"a{i}" for i, t in enumerate(types.values())]
    if on_gpu:
        values.append("current_stream(index)")
    return f"""
def call(arguments):
    {_MAKE_CURRENT if on_gpu else ""}
    try:
        if len(arguments) != {len(types)}: raise TypeError
        {_lines(f"a{i} = arguments[{name!r}]" for i, name in enumerate(types))}
        slots = take()
        [{views}] = slots
        {_lines(_fill(i, wanted) for i, wanted in enumerate(types.values()))}
        result = run({", ".join(values)})
    except misfits as error:
        raise (misfit(arguments) or error) from None
    give_back(slots)
    return result
"""


def _fill(i: int, wanted: type) -> str:
    if wanted is View:
        return f"""
        laid_out = a{i}.shape, a{i}.stride(), a{i}.device
        if laid_out != s{i}.laid_out: s{i}.lay_out(*laid_out)
        s{i}.address.value = a{i}.data_ptr()"""
    if wanted is POINTER:
        return f"if a{i} is not None: a{i} = address_of(a{i})"
    if wanted is ctypes.c_int:  # ctypes would cut it off
        return f"if not {INT_MIN} <= a{i} <= {INT_MAX}: raise ValueError"
    return ""


def _lines(lines: Iterable[str], indent: int = 8) -> str:
    return ("\n" + indent * " ").join(line.strip() for line in lines if line)


def _misfit(
    name: str, types: dict[str, type], device: Any, arguments: Arguments
) -> Exception | None:
    """The error that says what is wrong with the arguments; None if nothing is."""
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
        if wanted is ctypes.c_int and not INT_MIN <= value <= INT_MAX:
            return ValueError(f"{name}: {keyword} must fit 32 bits; got {value}")
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
    return None
