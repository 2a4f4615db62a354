"""Where the checks run: a student's functions and kernels are replaced by calls of the process that has them."""

import functools
import importlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from common.build import BuildError, KernelError, Kernels, library
from common.check.compare import CheckFailed
from common.check.watch import Watch, attention_calls
from common.paths import ROOT
from common.staff.judge import forkserver, transfer

MORE = 20.0  # seconds beyond a case's own limit until the process is ended
BUILD = 120.0  # seconds for a build
ENOUGH = 20  # times that a process may end before it is not started again
LATE = 3  # times that a function or a kernel may take too long before it is not run again
START = 120.0  # seconds until a process answers for the first time: it imports PyTorch
END = 10.0  # seconds for ending what a student's code has started
SOURCES = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("task*/attention_kernel.cu")]
_ERRORS = {
    "KernelError": KernelError,
    "BuildError": BuildError,
    "ValueError": ValueError,
    "TypeError": TypeError,
}


class ForkServer:
    """The process in a sandbox that starts workers; started again when it has ended.

    Args:
        folder: a student edition with what the student wrote.
        command: what is put before the command, such as a sandbox.
        module: of this package, what runs in a worker.
    """

    def __init__(self, folder: Path, command: Sequence[str] = (), module: str = "worker") -> None:
        self._folder, self._command = folder, list(command)
        self._module = f"common.staff.judge.{module}"
        self._process: subprocess.Popen | None = None
        self._connection: socket.socket | None = None

    def ready(self) -> None:
        """Start it, if it does not run or does not answer.

        Raises:
            CheckFailed: it does not start.
        """
        if self._connection is not None:
            try:
                self.end()
                return
            except OSError:
                self.close()
        ours, theirs = socket.socketpair()
        command = [*self._command, sys.executable, "-m", "common.staff.judge.forkserver"]
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), self._module],
                cwd=self._folder,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._connection = ours
        try:
            ours.settimeout(START)
            _receive(ours)
        except (EOFError, OSError, transfer.TransferError):
            self.close()
            raise CheckFailed("the process with this code does not start") from None

    def start(self) -> socket.socket:
        """Start a worker; what connects with it.

        Raises:
            CheckFailed: there is no process that could start one.
            OSError: it has ended just now.
        """
        if self._connection is None:
            self.ready()
        ours, theirs = socket.socketpair()
        with theirs:
            transfer.send(self._connection, forkserver.START, [theirs.fileno()])
        return ours

    def end(self) -> int | None:
        """End the worker; its status if it had ended by itself.

        Raises:
            OSError: the process does not answer, and has been ended with all that it has started.
        """
        if self._connection is None:
            return None
        try:
            self._connection.settimeout(END)
            transfer.send(self._connection, forkserver.END, [])
            status = transfer.parse(_receive(self._connection)).get("status")
        except (EOFError, OSError, transfer.TransferError):
            self.close()
            raise OSError("the process with this code does not answer") from None
        return status if type(status) is int else None

    def close(self) -> None:
        """End it with all that it has started."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if connection is not None:
            connection.close()
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                process.wait()


class Worker:
    """The process with a student's code, started again when it has ended.

    Args:
        server: what starts it.
    """

    def __init__(self, server: ForkServer) -> None:
        self._server = server
        self._connection: socket.socket | None = None
        self.ended = 0  # how often the process has ended by itself, or had to be
        self._late: Counter[tuple[str, ...]] = Counter()  # by what was asked for

    def ask(self, seconds: float, kind: str, *rest: Any) -> tuple[Any, dict[str, Any]]:
        """The value of a request, and what else its answer says.

        Raises:
            CheckFailed: the process has ended, took too long, or answers nonsense.
            KernelError, BuildError, ValueError, TypeError: what was raised there.
        """
        what = tuple(part for part in rest[:3] if isinstance(part, str))
        if self._late[what] >= LATE:
            raise CheckFailed(f"not run: it has taken too long {LATE} times")
        settings = asdict(library.settings()) | {"threads": None}
        with _disable_current_modes():
            sent = transfer.Sent((kind, settings, *rest))
            answer_fd = os.memfd_create("answer", os.MFD_CLOEXEC)
            try:
                answer = self._exchange(sent, answer_fd, seconds)
                sent.take_back()
                if "error" in answer:
                    _raise(answer["error"])
                size = min(os.fstat(answer_fd).st_size, transfer.ANSWER)
                data = os.pread(answer_fd, size, 0)
                value = transfer.unpack_answer(answer.get("value"), sent, data)
            except transfer.TransferError as error:
                self._end()
                raise CheckFailed(f"the process with this code sent {error}") from None
            except (CheckFailed, KernelError) as error:
                self._late[what] += "did not end within" in str(error)
                raise
            finally:
                sent.close()
                os.close(answer_fd)
        return value, answer

    def _exchange(self, sent: transfer.Sent, answer_fd: int, seconds: float) -> dict[str, Any]:
        connection = self._connection or self._start()
        connection.settimeout(seconds)
        try:
            transfer.send(connection, sent.payload, [sent.fd, answer_fd])
            return transfer.parse(_receive(connection))
        except TimeoutError:
            self._end()
            raise CheckFailed(f"did not end within {seconds:g} s, and was ended") from None
        except (EOFError, OSError):
            raise CheckFailed(f"the process with this code has ended {self._end()}") from None
        except BaseException:
            # A case's time limit, or Ctrl-C: the answer would be taken for that of the next request.
            self._end()
            raise

    def _start(self) -> socket.socket:
        if self.ended >= ENOUGH:
            raise CheckFailed(f"not run: the process with this code has ended {ENOUGH} times")
        try:
            self._connection = self._server.start()
            self._connection.settimeout(START)
            _receive(self._connection)
        except (EOFError, OSError):
            raise CheckFailed(f"the process with this code has ended {self._end()}") from None
        return self._connection

    def _end(self) -> str:
        """End the process with all that it has started; how it had ended, if it had."""
        if self._connection is None:
            return "already"
        self.ended += 1
        self._connection.close()
        self._connection = None
        try:
            status = self._server.end()
        except OSError:
            return "with its whole sandbox"
        if status is None:
            return "without an answer"
        if status >= 0:
            return f"with status {status}"
        names = {number.value: number.name for number in signal.Signals}
        return f"by {names.get(-status, f'signal {-status}')}"

    def close(self) -> None:
        """End the process."""
        self._end()


def _receive(connection: socket.socket) -> bytes:
    data, fds = transfer.receive(connection)
    for fd in fds:  # nobody asked for any
        os.close(fd)
    return data


def _raise(error: Any) -> NoReturn:
    if type(error) is not list or len(error) != 3 or any(type(part) is not str for part in error):
        raise transfer.TransferError("an error that is none")
    kind, text, place = error
    if kind == "NotImplementedError":
        raise CheckFailed(text, not_written=f"{place.partition(':')[0]}: {text}")
    if kind in _ERRORS:
        raise _ERRORS[kind](text)
    raise CheckFailed(f"{text} at {place}" if place else text)


@contextmanager
def standing_in(worker: Worker, functions: Sequence[tuple[str, str]]) -> Iterator[None]:
    """A context in which these functions ``(module, name)`` and all kernels are those of the worker's process."""
    launched: list[list[str]] = [[]]
    allocated = [0]
    repeating = [False]
    keys: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
    numbers = itertools.count()

    def limit() -> float:
        return (library.settings().limit or 600) + MORE

    def launch(kernels: Kernels, name: str, arguments: dict[str, Any]) -> None:
        if repeating[0]:
            return
        launched[0], allocated[0] = [], 0
        source = kernels.source.relative_to(ROOT).as_posix()
        _, answer = worker.ask(limit(), "launch", source, name, dict(arguments))
        launched[0] = _strings(answer.get("launched"))
        allocated[0] = _number(answer.get("allocated"))

    def query(kernels: Kernels, name: str, device: torch.device, /, **arguments: Any) -> int:
        source = kernels.source.relative_to(ROOT).as_posix()
        return _number(worker.ask(limit(), "query", source, name, arguments)[0])

    def call(module: str, name: str, *args: Any, **kwargs: Any) -> Any:
        key = None
        if "." in name:
            if args[0] not in keys:
                keys[args[0]] = next(numbers)
            key = keys[args[0]]
        value, answer = worker.ask(limit(), "call", module, name, key, args, kwargs)
        repeat(answer)
        return value

    def repeat(answer: dict[str, Any]) -> None:
        """What the contexts that are open here would have seen."""
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, Watch):
                size, text = answer.get("largest", (0, ""))
                mode.add(
                    _strings(answer.get("computed")),
                    _number(answer.get("memory")),
                    (_number(size), str(text)),
                )
        for mode in _get_current_function_mode_stack():
            if isinstance(mode, attention_calls):
                mode.found += _strings(answer.get("attention"))
        repeating[0] = True
        try:
            for path, name, kernels in _launches(answer.get("launches")):
                launched[0], allocated[0] = kernels, 0
                Kernels(str(path), path.name).launch(name, at=torch.empty(0))
        finally:
            repeating[0] = False

    with ExitStack() as stack:
        for module, name in functions:
            owner: Any = importlib.import_module(module)
            *classes, last = name.split(".")
            for part in classes:
                owner = getattr(owner, part)
            original = getattr(owner, last)
            stand_in = functools.wraps(original)(_bound(call, module, name))
            stack.enter_context(mock.patch.object(owner, last, stand_in))
        stack.enter_context(mock.patch.object(Kernels, "_launch", launch))
        stack.enter_context(mock.patch.object(Kernels, "query", query))
        stack.enter_context(mock.patch.object(library, "launched", lambda: launched[0]))
        stack.enter_context(mock.patch.object(library, "allocated", lambda: allocated[0]))
        yield


def _bound(call: Callable[..., Any], module: str, name: str) -> Callable[..., Any]:
    return lambda *args, **kwargs: call(module, name, *args, **kwargs)


def _launches(value: Any) -> list[tuple[Path, str, list[str]]]:
    """The kernels' file, the launcher and the kernels of each launch that an answer tells of."""
    found = []
    for launch in value if type(value) is list else ():
        if (
            type(launch) is not list
            or len(launch) != 3
            or any(type(t) is not str for t in launch[:2])
        ):
            raise CheckFailed("the process with this code tells of launches that are none")
        source, name, kernels = launch
        if source not in SOURCES:
            raise CheckFailed(
                "the process with this code tells of launches from a file without kernels"
            )
        found.append((ROOT / source, name, _strings(kernels)))
    return found


def _strings(value: Any) -> list[str]:
    return [item[:1000] for item in value if type(item) is str] if type(value) is list else []


def _number(value: Any) -> int:
    return value if type(value) is int and value >= 0 else 0
