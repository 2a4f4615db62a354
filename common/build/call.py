"""From keywords to a call of C: tensors and numbers become what ctypes passes, and what does not fit is refused.

A launch costs the host a few microseconds. So views.cpp reads the tensors, and the function that collects a launcher's
arguments is compiled from source made for that launcher: loops over whatever a launcher may take cost another
microsecond.

ctypes reads the arguments after it has released the interpreter's lock, so no two calls may share their Views: each
takes a set that is free, or creates one.
"""

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from common.build import host
from common.build.signature import INT_MAX, INT_MIN, POINTER, WANTED, View

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
    import torch

    tensors = [wanted for wanted in types.values() if wanted in (View, POINTER)]
    free: list[tuple[Any, ...]] = []

    def take() -> tuple[Any, ...]:
        try:
            return free.pop()
        except IndexError:
            return _slots(tensors, device)

    scope = {
        "Tensor": torch.Tensor,
        "fill": host.fill(),
        "take": take,
        "give_back": free.append,
        "run": run,
        "misfits": (KeyError, AttributeError, TypeError, ValueError, ctypes.ArgumentError),
        "misfit": lambda arguments: _misfit(name, types, device, arguments),
        **(gpu._asdict() if gpu else {}),
    }
    exec(compile(_source(types, gpu is not None), f"<call of {name}>", "exec"), scope)
    return scope["call"]


class _Slot(ctypes.Structure):
    _fields_ = (("view", View), ("takes_none", ctypes.c_int64))


def _slots(tensors: Sequence[type], device: Any) -> tuple[Any, ...]:
    """The address of what ``fill`` takes for so many tensors, and the arguments for ctypes in it."""

    class Slots(ctypes.Structure):
        _fields_ = (
            ("device_type", ctypes.c_int64),
            ("device_id", ctypes.c_int64),
            ("slots", _Slot * len(tensors)),
        )

    slots = Slots(_DEVICE_TYPES.get(device.type, 0), device.index or 0)
    for slot, wanted in zip(slots.slots, tensors, strict=True):
        slot.takes_none = wanted is POINTER
    # A pointer is its View's first field, data.
    arguments = (
        slot.view if wanted is View else POINTER.from_buffer(slot)
        for slot, wanted in zip(slots.slots, tensors, strict=True)
    )
    return (ctypes.addressof(slots), slots, *arguments)


_DEVICE_TYPES = {"cpu": 1, "cuda": 2}  # DLPack's numbers


_MAKE_CURRENT = """
    if current() != index:
        with made_current(index):
            return call(arguments)
"""


def _source(types: dict[str, type], on_gpu: bool) -> str:
    """The source of what ``caller`` returns: a{i} is argument i, s{i} what ctypes gets for it if it is a tensor."""
    tensors = [i for i, wanted in enumerate(types.values()) if wanted in (View, POINTER)]
    values = [f"{'s' if i in tensors else 'a'}{i}" for i in range(len(types))]
    if on_gpu:
        values.append("current_stream(index)")
    return f"""
def call(arguments):
    {_MAKE_CURRENT if on_gpu else ""}
    try:
        if len(arguments) != {len(types)}: raise TypeError
        {_lines(f"a{i} = arguments[{name!r}]" for i, name in enumerate(types))}
        {_lines(_check(i, wanted) for i, wanted in enumerate(types.values()))}
        mine = take()
        {", ".join(["address", "_", *(f"s{i}" for i in tensors)])} = mine
        if fill({", ".join(["address", *(f"a{i}" for i in tensors)])}):
            raise ValueError("a tensor has no memory, as in torch.compile")
        result = run({", ".join(values)})
    except misfits as error:
        raise (misfit(arguments) or error) from None
    give_back(mine)
    return result
"""


def _check(i: int, wanted: type) -> str:
    if wanted is View:  # fill() relies on it
        return f"if not isinstance(a{i}, Tensor): raise TypeError"
    if wanted is POINTER:
        return f"if a{i} is not None and not isinstance(a{i}, Tensor): raise TypeError"
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
            except RuntimeError as error:
                return ValueError(f"{name}: {keyword} must have strides and memory: {error}")
    return None
