"""Calling the launchers of a .cu file on torch tensors.

    _kernels = Kernels(__file__, "attention_kernel.cu")
    _kernels.launch("batched_softmax", inp=x, out=y, rows=n, columns=m)

Nothing is built, loaded or asked of a GPU before the first launch. What a file says is looked at once a
process, at its first launch on a device: to run an edited kernel, start a new process (a new ``python
-m taskN.test``, or the notebook's kernel again).
"""

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.build import builder, signature, toolchain
from common.build.signature import POINTER, View

ORDERS = ("forward", "reverse", "random")


class KernelError(RuntimeError):
    """A launcher returned an error: CUDA's own name and text for it, or what the CPU layer found wrong."""


@dataclass(frozen=True)
class Settings:
    """How launches on the CPU run. See ``using``."""

    check: bool = False
    order: str = "forward"
    seed: int = 0
    eager_copies: bool = False
    threads: int | None = None


_settings = Settings()


def settings() -> Settings:
    """How launches on the CPU run at present."""
    return _settings


@contextmanager
def using(
    check: bool = False,
    order: str = "forward",
    seed: int = 0,
    eager_copies: bool = False,
    threads: int | None = None,
) -> Iterator[None]:
    """How launches on the CPU inside this context run. Those on a GPU are not affected.

    Args:
        check: use the build that finds races, uninitialised and out-of-bounds accesses (slower).
        order: of the threads of a block between two barriers: "forward", "reverse" or "random".
        seed: of the random order.
        eager_copies: cp.async data lands at once; otherwise as late as the kernel's waits allow.
        threads: OS threads that blocks are spread over; None: one a core.

    Raises:
        ValueError: ``order`` is none of the three.
    """
    global _settings
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}; got {order!r}")
    before, _settings = _settings, Settings(check, order, seed, eager_copies, threads)
    try:
        yield
    finally:
        _settings = before


@functools.cache
def dtype_code(dtype) -> int:
    """The number by which a launcher knows a dtype: float32 0, float16 1, bfloat16 2.

    Raises:
        ValueError: the kernels do not take this dtype.
    """
    codes = {"torch.float32": 0, "torch.float16": 1, "torch.bfloat16": 2}
    try:
        return codes[str(dtype)]
    except KeyError:
        raise ValueError(
            f"kernels take float32, float16 and bfloat16 tensors; got {dtype}"
        ) from None


class Kernels:
    """The launchers and queries of one .cu file.

    Args:
        file: the calling module's ``__file__``; the source is looked for beside it.
        source: file name of the .cu. Its launchers are the functions
            ``extern "C" cudaError_t name(..., cudaStream_t stream)``, its queries those that return an ``int`` or
            ``int64_t``; what they take is read from it.
    """

    def __init__(self, file: str, source: str) -> None:
        self.source = Path(file).resolve().parent / source
        # (name, torch.device, check build) -> the function that does the call
        self._calls: dict[tuple[str, Any, bool], Callable[[dict[str, Any]], None]] = {}

    def launch(self, name: str, /, **arguments: Any) -> None:
        """Run a launcher on the device of its tensors, on torch's current stream.

        Args:
            name: one of the launchers.
            arguments: by the names that they have in the .cu: tensors for ``View``, tensors or None for pointers,
                and numbers; the stream is added.

        Raises:
            TypeError: an argument is missing, not known, or not of its type.
            ValueError: the tensors are not all on one device, or on one that has no kernels, or too large for a
                ``View``.
            BuildError: the .cu does not compile.
            KernelError: the launcher returned an error.
        """
        key = (name, _device_of(name, arguments), _settings.check)
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = self._launcher(*key)
        call(arguments)

    def prepare(self, name: str, /, **arguments: Any) -> Callable[..., None]:
        """:meth:`launch` for callers to whom a microsecond matters: all is checked here, and nothing launched.

        Returns:
            A function of the tensors alone, in the order of the .cu (None where a pointer may be null), which launches
            and raises KernelError. It checks nothing: the tensors must have the shapes, strides and device of the ones
            given here. Threads may share it.

        Raises:
            As :meth:`launch`.
        """
        device = _device_of(name, arguments)
        function, types = self._function(name, device, _settings.check, launcher=True)
        values = _converter(name, types, device)(arguments)
        try:
            for wanted, value in zip(types.values(), values, strict=True):
                wanted.from_param(value)
        except TypeError:
            raise TypeError(_wrong_type(name, arguments, types)) from None
        if device.type == "cuda":
            return _prepared_cuda_call(name, function, values, device.index)
        tensors = [n for n, wanted in types.items() if wanted in (View, POINTER)]
        numbers = {n: value for n, value in arguments.items() if n not in tensors}
        return lambda *given: self.launch(name, **dict(zip(tensors, given, strict=True)), **numbers)

    def query(self, name: str, device: Any, /, **arguments: Any) -> int:
        """What a query of the .cu, as built for this device, returns.

        Args:
            name: one of the queries, such as ``extern "C" int64_t workspace_bytes(View q, View k)``.
            device: for which the .cu is built, if it is not yet.
            arguments: as for :meth:`launch`.

        Raises:
            As ``launch``.
        """
        function, types = self._function(name, device, _settings.check, launcher=False)
        try:
            return function(*_converter(name, types, device)(arguments))
        except ctypes.ArgumentError:
            raise TypeError(_wrong_type(name, arguments, types)) from None

    def has_query(self, name: str) -> bool:
        """Whether the .cu exports such a query. Builds nothing."""
        return name in self._exports and not self._exports[name].is_launcher

    @functools.cached_property
    def _exports(self) -> dict[str, signature.Export]:
        return signature.exports(self.source)

    def _function(
        self, name: str, device: Any, check: bool, launcher: bool
    ) -> tuple[Any, dict[str, type]]:
        """A function of the library for this device, and the types of its parameters without the stream."""
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"{name}: kernels run on cpu and cuda tensors; got one on {device}")
        known = {n: e for n, e in self._exports.items() if e.is_launcher == launcher}
        if name not in known:
            what = "launcher" if launcher else "query"
            raise TypeError(
                f"{self.source.name} has no {what} {name!r}; it has {', '.join(known) or 'none'}"
            )
        if device.type == "cuda":
            path = _library_for_gpu(self.source, device)
        else:
            path = builder.build([self.source], "cpu", check=check)[0]
        function = _load(path)[name]  # an object of its own: its types are set here
        function.restype = known[name].returns
        function.argtypes = [*known[name].parameters.values(), *[ctypes.c_void_p] * launcher]
        return function, known[name].parameters

    def _launcher(self, name: str, device: Any, check: bool) -> Callable[[dict[str, Any]], None]:
        function, types = self._function(name, device, check, launcher=True)
        convert = _converter(name, types, device)
        if device.type == "cuda":
            return _cuda_call(name, function, convert, types, device.index)
        return _cpu_call(name, function, convert, types, check)


def _device_of(name: str, arguments: dict[str, Any]) -> Any:
    """The device of the first tensor."""
    for value in arguments.values():
        try:
            return value.device
        except AttributeError:  # None or a number
            continue
    raise TypeError(
        f"{name}: none of the arguments is a tensor; got {', '.join(arguments) or 'none'}"
    )


def target_for(source: Path, device: Any) -> builder.Target:
    """What the first launch on a torch.device builds here and now: for ``builder.make``, which takes many at once."""
    if device.type != "cuda":
        return builder.plan(source, device.type, check=_settings.check)
    import torch

    arch = toolchain.arch_of(torch.cuda.get_device_capability(device))
    return builder.plan(source, "cuda", arch=arch, here=True)


def _converter(
    name: str, types: dict[str, type], device: Any
) -> Callable[[dict[str, Any]], list[Any]]:
    """What turns keywords into the values that ctypes takes, and refuses what does not fit."""
    names = tuple(types)
    pointers, views, ints = (
        tuple(i for i, t in enumerate(types.values()) if t is wanted)
        for wanted in (POINTER, View, ctypes.c_int)
    )

    def convert(arguments: dict[str, Any]) -> list[Any]:
        if tuple(arguments) != names:
            arguments = _in_order(name, names, arguments)
        values = list(arguments.values())
        try:
            for i in views:
                value = values[i]
                if value.device != device:
                    raise ValueError(_devices_differ(name, arguments))
                try:
                    values[i] = View.of(value)
                except ValueError as error:
                    raise ValueError(f"{name}: {names[i]} {error}") from None
            for i in pointers:
                value = values[i]
                if value is not None:
                    if value.device != device:
                        raise ValueError(_devices_differ(name, arguments))
                    values[i] = value.data_ptr()
            for i in ints:
                if not -0x80000000 <= values[i] < 0x80000000:
                    raise ValueError(f"{name}: {names[i]} must fit 32 bits; got {values[i]}")
        except (AttributeError, TypeError):
            raise TypeError(_wrong_type(name, arguments, types)) from None
        return values

    return convert


def _in_order(name: str, names: tuple[str, ...], arguments: dict[str, Any]) -> dict[str, Any]:
    missing = [n for n in names if n not in arguments]
    unknown = [n for n in arguments if n not in names]
    problems = [f"missing {', '.join(missing)}"] * bool(missing) + [
        f"not known {', '.join(unknown)}"
    ] * bool(unknown)
    if problems:
        raise TypeError(f"{name}: {'; '.join(problems)}. It takes {', '.join(names)}")
    return {n: arguments[n] for n in names}


def _devices_differ(name: str, arguments: dict[str, Any]) -> str:
    devices = ", ".join(f"{n} on {v.device}" for n, v in arguments.items() if hasattr(v, "device"))
    return f"{name}: all tensors must be on one device; got {devices}"


def _wrong_type(name: str, arguments: dict[str, Any], types: dict[str, type]) -> str:
    for keyword, wanted in types.items():
        value = arguments[keyword]
        fits = {
            POINTER: value is None or hasattr(value, "data_ptr"),
            ctypes.c_int: isinstance(value, int),
            ctypes.c_int64: isinstance(value, int),
            ctypes.c_float: isinstance(value, (int, float)),
            View: hasattr(value, "data_ptr"),
        }
        if not fits[wanted]:
            got = f"{type(value).__name__} {value!r}"
            return f"{name}: {keyword} must be {signature.WANTED[wanted]}; got {got}"
    return f"{name}: an argument has a wrong type"


# ---- on a GPU


def _cuda_call(
    name: str, function: Any, convert: Callable, types: dict[str, type], index: int
) -> Callable[[dict[str, Any]], None]:
    import torch

    current_device = torch._C._cuda_getDevice
    # torch.cuda.current_stream() builds an object: 3 us
    current_stream = torch._C._cuda_getCurrentRawStream

    def call(arguments: dict[str, Any]) -> None:
        values = convert(arguments)
        try:
            if current_device() == index:
                status = function(*values, current_stream(index))
            else:
                with torch.cuda.device(index):
                    status = function(*values, current_stream(index))
        except ctypes.ArgumentError:
            raise TypeError(_wrong_type(name, arguments, types)) from None
        if status:
            raise KernelError(f"{name}: {_cuda_error(status)}")

    return call


def _prepared_cuda_call(
    name: str, function: Any, values: list[Any], index: int
) -> Callable[..., None]:
    """:meth:`Kernels.prepare` on a GPU. ``values``: the arguments, of which the tensors' addresses will change."""
    import torch

    current_device = torch._C._cuda_getDevice
    current_stream = torch._C._cuda_getCurrentRawStream
    types, function.argtypes = function.argtypes, None  # given ctypes objects, it converts nothing

    def new_set() -> tuple[list[Any], list[ctypes.c_void_p], ctypes.c_void_p]:
        *arguments, stream = (
            View.from_buffer_copy(value) if wanted is View else wanted(value)
            for value, wanted in zip((*values, None), types, strict=True)
        )
        addresses = [
            ctypes.c_void_p.from_buffer(argument)  # of a View: its first field, data
            for argument in arguments
            if isinstance(argument, (View, ctypes.c_void_p))
        ]
        return [*arguments, stream], addresses, stream

    # ctypes reads the arguments after it has released the interpreter's lock, so a call must not change those of a call
    # in another thread. Each takes a set that is free, or makes one.
    free = [new_set()]

    def call(*tensors: Any) -> None:
        try:
            mine = free.pop()
        except IndexError:
            mine = new_set()
        arguments, addresses, stream = mine
        for address, tensor in zip(addresses, tensors, strict=True):
            address.value = None if tensor is None else tensor.data_ptr()
        if current_device() == index:
            stream.value = current_stream(index)
            status = function(*arguments)
        else:
            with torch.cuda.device(index):
                stream.value = current_stream(index)
                status = function(*arguments)
        free.append(mine)
        if status:
            raise KernelError(f"{name}: {_cuda_error(status)}")

    return call


@functools.cache
def _library_for_gpu(source: Path, device: Any) -> Path:
    return builder.make([target_for(source, device)])[-1].target.path


def _cuda_error(status: int) -> str:
    """``cudaErrorInvalidValue (1): invalid argument``."""
    import torch

    text = torch.cuda.cudart().cudaGetErrorString(torch.cuda.cudart().cudaError(status))
    try:  # the name is not among what torch exposes; the library that it has loaded knows it
        cudart = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")
        cudart.cudaGetErrorName.restype = ctypes.c_char_p
        return f"{cudart.cudaGetErrorName(status).decode()} ({status}): {text}"
    except (OSError, AttributeError):
        return f"CUDA error {status}: {text}"


# ---- on the CPU


def _cpu_call(
    name: str, function: Any, convert: Callable, types: dict[str, type], checked: bool
) -> Callable[[dict[str, Any]], None]:
    runtime = _runtime()

    def call(arguments: dict[str, Any]) -> None:
        values = convert(arguments)
        _configure(runtime, _settings)
        if checked:
            runtime.clear_registered()
            for keyword, value in arguments.items():
                if hasattr(value, "data_ptr"):
                    runtime.register(keyword, value.data_ptr(), _extent(value))
        try:
            status = function(*values, None)
        except ctypes.ArgumentError:
            raise TypeError(_wrong_type(name, arguments, types)) from None
        finally:
            if checked:
                runtime.clear_registered()
        # Asked even after a 0: a launcher that forgets cudaGetLastError() does not hide what went wrong.
        message = runtime.take_error()
        if message or status:
            raise KernelError(message or f"{name} returned cudaError_t {status}")

    return call


@functools.cache
def _runtime():
    from common.cuda_on_cpu import Runtime

    target = builder.cpu_runtime()
    builder.make([target])
    return Runtime(target.path)


_configured: Settings | None = None


def _configure(runtime: Any, settings: Settings) -> None:
    global _configured
    if settings != _configured:
        runtime.configure(
            order=settings.order,
            seed=settings.seed,
            eager_copies=settings.eager_copies,
            threads=settings.threads or 0,  # 0: one a core; None would leave it as it was
        )
        _configured = settings


def _extent(tensor: Any) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if tensor.numel() == 0:
        return 0
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


@functools.cache
def _load(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))
