"""Calling the launchers of a .cu file on torch tensors.

    _kernels = Kernels(__file__, "attention_kernel.cu")
    _kernels.launch("batched_softmax", inp=x, out=y)

``Kernels.from_text(__file__, _CUDA_SRC)`` takes the source from a string in the Python file instead.

Nothing is built, loaded or asked of a GPU before the first launch. A .cu is read once per process, at its first launch
on a device: to run an edited kernel, start a new process (``python -m taskN.test`` again, or restart the notebook's
kernel).
"""

import ctypes
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from common.build import builder, interrupt, planner, signature, toolchain
from common.build.call import Arguments, caller, caller_target

ORDERS = ("forward", "reverse", "random")


class KernelError(RuntimeError):
    """A launcher returned an error: CUDA's own name and text for it, or what the CPU layer found wrong."""


@dataclass(frozen=True)
class Settings:
    """How launches on the CPU run; see ``using``."""

    check: bool = False
    order: str = "forward"
    seed: int = 0
    eager_copies: bool = False
    threads: int | None = None
    limit: float = 0
    count: bool = False


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
    limit: float | None = None,
    count: bool = False,
) -> Iterator[None]:
    """A context that sets how launches on the CPU run. Launches on a GPU are not affected.

    Args:
        check: use the build that finds races, uninitialised and out-of-bounds accesses (slower).
        order: in which the threads of a block run between two barriers: "forward", "reverse" or "random".
        seed: of the random order.
        eager_copies: the data of cp.async arrives at once; otherwise as late as the kernel's waits allow.
        threads: OS threads that run the blocks; None: one per core.
        limit: seconds for the kernels of one launch, which then fails; 0: none; None: as around this context.
        count: keep what a launch of the build that finds races takes of shared memory, for :func:`counts`.

    Raises:
        ValueError: ``order`` is none of the three, or ``limit`` is negative.
    """
    global _settings
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}; got {order!r}")
    if limit is None:
        limit = _settings.limit
    elif not 0 <= limit < math.inf:
        raise ValueError(f"limit must be 0 (none) or more seconds; got {limit}")
    before, _settings = _settings, Settings(check, order, seed, eager_copies, threads, limit, count)
    try:
        yield
    finally:
        _settings = before


_touched: dict[str, Any] = {}


@contextmanager
def touching(**tensors: Any) -> Iterator[None]:
    """A context in which launches have the addresses of these tensors in memory, beside those that they are given.

    The check build reports accesses outside of all tensors that it knows.
    """
    global _touched
    before, _touched = _touched, {**_touched, **tensors}
    try:
        yield
    finally:
        _touched = before


# Called for a launch: the kernels, the launcher's name, its arguments, and what launches it with these or others.
Observer = Callable[["Kernels", str, Arguments, Callable[[Arguments], None]], None]

_observer: Observer | None = None


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """A context in which ``observer`` is called in place of each launch, on any device. Within it another may begin.

    It is called with the kernels, the name and arguments of the launch, and with what does it:
    ``lambda kernels, name, arguments, launch: launch(arguments)`` changes nothing.
    """
    global _observer
    outer = _observer

    def both(
        kernels: "Kernels", name: str, arguments: Arguments, launch: Callable[[Arguments], None]
    ) -> None:
        inner = partial(observer, kernels, name, launch=launch)
        outer(kernels, name, arguments, inner) if outer else inner(arguments)

    _observer = both
    try:
        yield
    finally:
        _observer = outer


def is_observed() -> bool:
    """Whether launches of this process are observed at present."""
    return _observer is not None


@functools.cache
def dtype_code(dtype) -> int:
    """The number that stands for a dtype in a launcher's arguments: float32 0, float16 1, bfloat16 2.

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
        self._file = Path(file).resolve()
        self._name = source
        self._text: str | None = None
        # (name, torch.device, check build) -> the function that does the call
        self._calls: dict[tuple[str, Any, bool], Callable[[Arguments], int | None]] = {}
        self._queries: dict[tuple[str, Any, bool], Callable[[Arguments, int], int]] = {}

    @classmethod
    def from_text(cls, file: str, text: str, suffix: str = ".cu") -> "Kernels":
        """Those of a source that is a string in a Python file. Errors of the compiler name the line in that file.

        Args:
            file: the calling module's ``__file__``; headers are looked for beside it, and in common/include for a .cu.
            text: the source, a raw string: ``r\"\"\"``.
            suffix: what it is: ``".cu"``, or ``".cpp"`` for the CPU.

        Raises:
            ValueError: another suffix, or no text.
        """
        if suffix not in (".cu", ".cpp"):
            raise ValueError(f"suffix must be '.cu' or '.cpp'; got {suffix!r}")
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"text must be a source; got {type(text).__name__} {text!r}")
        kernels = cls(file, suffix)
        kernels._text = text
        return kernels

    @functools.cached_property
    def source(self) -> Path:
        """The source; a text is written to a file when this is first asked for."""
        if self._text is None:
            return self._file.parent / self._name
        return builder.write_text(self._file, self._text, self._name)

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
        if _observer is None:
            self._launch(name, arguments)
        else:
            _observer(self, name, arguments, partial(self._launch, name))

    def _launch(self, name: str, arguments: Arguments) -> None:
        key = (name, _device_of(name, arguments), _settings.check)
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = self._launcher(*key)
        if status := call(arguments):
            _fail(name, status)

    def parameters(self, name: str) -> tuple[str, ...]:
        """The names of what a launcher or query takes, but for the stream; none if there is no such. Builds nothing."""
        return tuple(self._exports[name].parameters) if name in self._exports else ()

    def address(self, name: str, device: Any) -> int:
        """Where a launcher is in memory as built for this GPU, for code in C that calls it.

        Raises:
            As :meth:`launch`.
        """
        return self._function(name, device, check=False, launcher=True)[0]

    def query(self, name: str, device: Any, /, **arguments: Any) -> int:
        """What a query of the .cu, as built for this device, returns.

        Args:
            name: one of the queries, such as ``extern "C" int64_t workspace_bytes(View q, View k)``.
            device: for which the .cu is built, if it is not yet.
            arguments: as for :meth:`launch`.

        Raises:
            As ``launch``.
        """
        key = (name, device, _settings.check)
        call = self._queries.get(key)
        if call is None:
            call = self._queries[key] = self._caller(*key, launcher=False)
        if device.type == "cpu":
            _runtime().of_arch(self._arch)
        return call(arguments, 0)

    def has_query(self, name: str) -> bool:
        """Whether the .cu exports such a query. Builds nothing."""
        return name in self._exports and not self._exports[name].is_launcher

    @functools.cached_property
    def _arch(self) -> str | None:
        """The first GPU that the source is for; None: any."""
        return next(iter(planner.architectures(self.source)), None)

    @functools.cached_property
    def _exports(self) -> dict[str, signature.Export]:
        return signature.exports(self.source)

    def _function(
        self, name: str, device: Any, check: bool, launcher: bool
    ) -> tuple[int, signature.Export]:
        """Where a function is in the library for this device, and what it takes."""
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"{name}: kernels run on cpu and cuda tensors; got one on {device}")
        known = {n: e for n, e in self._exports.items() if e.is_launcher == launcher}
        if name not in known:
            what = "launcher" if launcher else "query"
            raise TypeError(
                f"{self.source.name} has no {what} {name!r}; it has {', '.join(known) or 'none'}"
            )
        path = self._library(device, check)
        return ctypes.cast(getattr(_load(path), name), ctypes.c_void_p).value, known[name]

    def _library(self, device: Any, check: bool) -> Path:
        """The library for this device, built."""
        # Built with the kernels, and so at the same time.
        callers = tuple(caller_target(export) for export in self._exports.values())
        if device.type == "cuda":
            return _library_for_gpu(self.source, device, callers)
        kernels = planner.plan(self.source, "cpu", check=check)
        builder.make([kernels, *callers])
        return kernels.path

    def _caller(
        self, name: str, device: Any, check: bool, launcher: bool
    ) -> Callable[[Arguments, int], int]:
        address, export = self._function(name, device, check, launcher)
        return caller(name, export, address, device)

    def _launcher(self, name: str, device: Any, check: bool) -> Callable[[Arguments], int | None]:
        call = self._caller(name, device, check, launcher=True)
        if device.type == "cuda":
            return _run_on_gpu(call, device.index)
        call = _run_on_cpu(name, call, self._arch)
        return _registering(call) if check else call


def _device_of(name: str, arguments: Arguments) -> Any:
    """The device of the first tensor."""
    for value in arguments.values():
        try:
            return value.device
        except AttributeError:  # None or a number
            continue
    raise TypeError(
        f"{name}: none of the arguments is a tensor; got {', '.join(arguments) or 'none'}"
    )


def target_for(source: Path, device: Any) -> planner.Target:
    """The target that a first launch on a torch.device would build; ``builder.make`` builds several at once."""
    if device.type != "cuda":
        return planner.plan(source, device.type, check=_settings.check)
    import torch

    arch = toolchain.arch_of(torch.cuda.get_device_capability(device))
    return planner.plan(source, "cuda", arch=arch, here=True)


# ---- on a GPU


def _run_on_gpu(call: Callable[[Arguments, int], int], index: int) -> Callable[[Arguments], int]:
    """What calls a launcher with a GPU as the current one, on torch's current stream for it."""
    import torch

    current = torch._C._cuda_getDevice
    current_stream = torch._C._cuda_getCurrentRawStream  # torch.cuda.current_stream() takes 3 us

    def run(arguments: Arguments) -> int:
        if current() != index:
            with torch.cuda.device(index):
                return call(arguments, current_stream(index))
        return call(arguments, current_stream(index))

    return run


def _fail(name: str, status: int) -> NoReturn:
    """KernelError, such as ``softmax: cudaErrorInvalidValue (1): invalid argument``."""
    import torch

    text = torch.cuda.cudart().cudaGetErrorString(torch.cuda.cudart().cudaError(status))
    try:  # the name is not among what torch exposes; the library that it has loaded knows it
        cudart = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")
        cudart.cudaGetErrorName.restype = ctypes.c_char_p
        error = f"{cudart.cudaGetErrorName(status).decode()} ({status})"
    except (OSError, AttributeError):
        error = f"CUDA error {status}"
    raise KernelError(f"{name}: {error}: {text}")


@functools.cache
def _library_for_gpu(source: Path, device: Any, callers: tuple[planner.Target, ...]) -> Path:
    kernels = target_for(source, device)
    builder.make([kernels, *callers])
    return kernels.path


# ---- on the CPU


def _run_on_cpu(
    name: str, call: Callable[[Arguments, int], int], arch: str | None
) -> Callable[[Arguments], None]:
    """What calls a launcher, with the limits of ``arch``, and asks the CPU layer what went wrong."""
    runtime = _runtime()

    def run(arguments: Arguments) -> None:
        _configure(runtime, _settings)
        interrupt.begin(name)
        try:
            runtime.of_arch(arch)
            status = call(arguments, runtime.begin())
        finally:
            runtime.end()
            interrupt.end()
        # Asked even after a 0: a launcher that forgets cudaGetLastError() does not hide what went wrong.
        message = runtime.take_error()
        if message or status:
            raise KernelError(message or f"{name} returned cudaError_t {status}")

    return run


def launched() -> list[str]:
    """The kernels that this thread's last launch on the CPU launched, as named before ``<<<``; takes them."""
    return _runtime().take_launched() if _configured else []


def allocated() -> int:
    """The bytes that this thread's last launch on the CPU asked for with cudaMalloc and its like; takes them."""
    return _runtime().take_allocated() if _configured else 0


def counts() -> list[str]:
    """What was counted in this thread's last launch on the CPU; takes it. See ``Runtime.take_counts``."""
    return _runtime().take_counts() if _configured else []


def _registering(call: Callable[[Arguments], None]) -> Callable[[Arguments], None]:
    """The same, with the CPU layer knowing where the tensors are."""
    runtime = _runtime()

    def registered(arguments: Arguments) -> None:
        runtime.clear_registered()
        try:
            for keyword, value in {**_touched, **arguments}.items():
                if hasattr(value, "data_ptr"):
                    runtime.register(keyword, value.data_ptr(), _extent(value))
            call(arguments)
        finally:
            runtime.clear_registered()

    return registered


@functools.cache
def _runtime():
    from common.cuda_on_cpu import Runtime

    target = planner.cpu_runtime()
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
            threads=settings.threads or 0,  # 0: one per core; None would change nothing
            limit=settings.limit,
            count=settings.count,
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
