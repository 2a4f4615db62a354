"""The process that runs a student's code; it is forked in the folder with that code.

It is sent functions to call and launchers to run, and answers with what they gave. Whether a result is right is found
out elsewhere. What it says of its launches and its memory is believed: code that forges that still has to compute the
right result.
"""

import importlib
import json
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from common.build import Kernels, builder, library, observing, planner, using
from common.check.poison import poisoned
from common.check.watch import Watch, attention_calls
from common.paths import ROOT
from common.staff.judge import device_code, transfer

OBJECTS = 64  # more than the layers of any model that is checked
# What methods are called on: it keeps what the student's code has put there.
_objects: dict[int, Any] = {}
_kernels: dict[str, Kernels] = {}


Kind = Callable[
    ..., Any
]  # what answers one kind of request: it gets the answer to add to, and the arguments


def main(fd: int) -> None:
    """Answer requests until the connection closes."""
    serve(
        fd,
        {
            "call": _call,
            "launch": _launch,
            "query": _query,
            "build": _build,
            "device code": _device_code,
        },
    )


def serve(fd: int, kinds: Mapping[str, Kind]) -> None:
    """Answer requests of these kinds until the connection closes."""
    connection = socket.socket(fileno=fd)
    transfer.send(connection, b"{}", [])
    while True:
        try:
            payload, fds = transfer.receive(connection)
        except EOFError:
            return
        request_fd, answer_fd = fds
        numbers: dict[int, int] = {}
        tensors: list[Tensor] = []  # keeps them alive: ids are not used again

        def numbered(t: Tensor, numbers: dict = numbers, tensors: list = tensors) -> None:
            numbers[id(t)] = len(tensors)
            tensors.append(t)

        answer: dict[str, Any] = {}
        try:
            kind, settings, *rest = transfer.received(payload, request_fd, numbered)
            with using(**settings):
                value = kinds[kind](answer, *rest)
            with open(answer_fd, "wb", closefd=False) as data:
                answer["value"] = transfer.pack_answer(value, numbers, data)
        except Exception as error:
            text = str(error) if isinstance(error, (ValueError, RuntimeError)) else repr(error)
            answer["error"] = [_kind(error), text[:20_000], _place(error)]
        transfer.send(connection, json.dumps(answer).encode(), [])
        for given in fds:
            os.close(given)


def _kind(error: Exception) -> str:
    """The first of its classes that the other process has, too."""
    known = ("KernelError", "BuildError", "NotImplementedError", "ValueError", "TypeError")
    return next((c.__name__ for c in type(error).__mro__ if c.__name__ in known), "")


def _place(error: BaseException) -> str:
    """The line of the student's folder where it was raised."""
    place, tb = "", error.__traceback__
    while tb is not None:
        file = tb.tb_frame.f_code.co_filename
        if file.startswith(f"{ROOT}/task"):
            place = f"{os.path.relpath(file, ROOT)}:{tb.tb_lineno}"
        tb = tb.tb_next
    return place


def _call(answer: dict, module: str, name: str, key: int | None, args: tuple, kwargs: dict) -> Any:
    function: Any = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    if key is not None:
        args = (_same_object(key, args[0]), *args[1:])
    launches: list[list] = []

    def seen(kernels: Kernels, launcher: str, arguments: Any, launch: Any) -> None:
        launch(arguments)
        source = kernels.source.relative_to(ROOT).as_posix()
        launches.append([source, launcher, library.launched()])

    calls = attention_calls([])
    with torch.no_grad(), poisoned(), calls, Watch() as did, observing(seen):
        value = function(*args, **kwargs)
    answer.update(launches=launches, attention=calls.found, computed=did.computed)
    answer.update(memory=did.memory, largest=list(did.largest))
    return value


def _same_object(key: int, sent: Any) -> Any:
    if key not in _objects:
        if len(_objects) >= OBJECTS:
            _objects.clear()
        _objects[key] = sent
    here = _objects[key]
    if isinstance(here, nn.Module):
        here.__dict__.update(sent.__dict__)
    return here


def _of(source: str) -> Kernels:
    return _kernels.setdefault(source, Kernels(str(ROOT / source), os.path.basename(source)))


def _launch(answer: dict, source: str, name: str, arguments: dict) -> None:
    _of(source).launch(name, **arguments)
    answer.update(launched=library.launched(), allocated=library.allocated())
    if library.settings().count:
        answer["counts"] = library.counts()


def _query(answer: dict, source: str, name: str, arguments: dict) -> int:
    return _of(source).query(name, torch.device("cpu"), **arguments)


def _build(answer: dict, source: str) -> None:
    builder.make([planner.plan(ROOT / source, "cpu", check=library.settings().check)])


def _device_code(answer: dict, source: str, arch: str) -> Tensor:
    code = device_code.compiled(ROOT / source, arch)
    return torch.frombuffer(bytearray(code), dtype=torch.uint8)
