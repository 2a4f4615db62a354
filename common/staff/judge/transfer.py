"""Tensors between the process that checks and the one that runs a student's code.

The checks send a pickle, and the memory of its tensors as a file that both processes map. Answers cannot be trusted:
they are JSON, and bytes that are read and checked before they become tensors.
"""

import array
import fcntl
import io
import json
import math
import mmap
import os
import pickle
import socket
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LARGEST = 64 << 20  # bytes of a storage; of a larger one only what its tensors show is sent
MESSAGE = 64 << 20  # bytes of an answer's JSON, or of a request's pickle
ANSWER = 2 << 30  # bytes of the tensors in an answer
_PAGE = mmap.PAGESIZE
_DTYPES = {
    str(dtype): dtype
    for dtype in (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
    )
}


class TransferError(ValueError):
    """An answer that makes no sense."""


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, persistent_id: Callable[[Any], tuple | None]) -> None:
        super().__init__(stream, protocol=5)
        self._id = persistent_id

    def persistent_id(self, value: Any) -> tuple | None:
        return self._id(value)


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, load: Callable[[tuple], Tensor]) -> None:
        super().__init__(stream)
        self._load = load

    def persistent_load(self, spec: tuple) -> Tensor:
        return self._load(spec)


class Sent:
    """A request: what was pickled, and its tensors in a file that the other process maps, too."""

    def __init__(self, value: Any) -> None:
        self._storages: dict[int, int] = {}
        self._tensors: list[tuple[Tensor, tuple]] = []
        self._starts: list[int] = []
        self._size = 0
        stream = io.BytesIO()
        _Pickler(stream, self._persistent_id).dump(value)
        self.payload = stream.getvalue()
        self.fd = os.memfd_create("tensors", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self._size + _PAGE)
        # So that no access of this process can fail, whatever the other one does to the file.
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._memory = mapped(self.fd)
        for t, mine in self._pairs():
            mine.copy_(t)

    def _persistent_id(self, value: Any) -> tuple | None:
        if not isinstance(value, Tensor):
            return None
        storage = value.untyped_storage()
        number = self._storages.setdefault(storage._cdata, len(self._storages))
        if number == len(self._starts):
            # The same place in a page as here: alignment is part of the input.
            start = -(-self._size // _PAGE) * _PAGE + storage.data_ptr() % _PAGE
            self._starts.append(start)
            self._size = start + storage.nbytes()
        kind = "parameter" if isinstance(value, torch.nn.Parameter) else "tensor"
        start = self._starts[number]
        spec = (kind, start, str(value.dtype), *_form(value))
        self._tensors.append((value.detach(), spec))
        return spec

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """What is copied: each storage as bytes or, of a large one, the tensors in it; here and in the file."""
        pairs, seen = [], set()
        for t, (_, start, *form) in self._tensors:
            storage = t.untyped_storage()
            if storage.nbytes() > LARGEST:
                pairs.append((t, tensor_at(self._memory, start, *form)))
            elif storage._cdata not in seen and storage.nbytes():
                seen.add(storage._cdata)
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                pairs.append((whole, self._memory[start : start + storage.nbytes()]))
        return pairs

    def take_back(self) -> None:
        """Copy to the tensors what the other process has made of them."""
        for t, mine in self._pairs():
            t.copy_(mine)

    def tensor(self, number: int) -> Tensor:
        """The tensor with this number, in the order of the pickle."""
        return self._tensors[number][0]

    def close(self) -> None:
        os.close(self.fd)


def received(payload: bytes, fd: int, numbered: Callable[[Tensor], None]) -> Any:
    """The value of a request, in the other process; ``numbered`` gets its tensors in the order of the pickle."""
    memory = mapped(fd)

    def load(spec: tuple) -> Tensor:
        kind, start, *form = spec
        t = tensor_at(memory, start, *form)
        if kind == "parameter":
            t = torch.nn.Parameter(t, requires_grad=False)
        numbered(t)
        return t

    return _Unpickler(io.BytesIO(payload), load).load()


def mapped(fd: int) -> Tensor:
    """A file's bytes, shared."""
    return torch.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), dtype=torch.uint8)


def _form(t: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return tuple(t.shape), tuple(t.stride()), t.storage_offset()


def tensor_at(
    memory: Tensor, start: int, dtype: str, shape: tuple, stride: tuple, offset: int
) -> Tensor:
    """A tensor of a storage that begins at byte ``start``.

    Raises:
        TransferError: it would not be within the memory.
    """
    kind = _DTYPES.get(dtype)
    numbers = [start, offset, *shape, *stride]
    if kind is None or len(shape) != len(stride) or not all(_is_size(n) for n in numbers):
        raise TransferError(f"no tensor has {dtype}, {shape}, {stride}, {offset}, {start}")
    last = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if all(shape) else -1
    if start + (offset + last + 1) * kind.itemsize > memory.numel():
        raise TransferError(f"a tensor {shape} with strides {stride} is not within its memory")
    inside = memory[start:]
    # Its storage is the whole file; its offset has to be a whole number of its elements.
    skip, rest = divmod(inside.data_ptr() - memory.data_ptr(), kind.itemsize)
    if rest:
        raise TransferError(f"{dtype} at byte {start}")
    flat = torch.empty(0, dtype=kind)
    return flat.set_(memory.untyped_storage(), skip + offset, shape, stride)


def _is_size(n: Any) -> bool:
    return type(n) is int and 0 <= n < 1 << 48


# ---- answers: JSON, with tensors as {"given": number} or {"new": form}


def pack_answer(value: Any, given: dict[int, int], data: io.BufferedRandom) -> Any:
    """A value as JSON; new tensors go to the file. ``given``: numbers of the request's tensors, by their id()."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (tuple, list):
        items = [pack_answer(item, given, data) for item in value]
        return {"tuple" if type(value) is tuple else "list": items}
    if type(value) in (Tensor, torch.nn.Parameter):
        if id(value) in given:
            return {"given": given[id(value)]}
        if str(value.dtype) in _DTYPES and value.device.type == "cpu":
            start = data.tell()
            flat = value.detach().contiguous().flatten().view(torch.uint8)
            data.write(flat.numpy().tobytes())
            return {"new": [start, str(value.dtype), list(value.shape)]}
    return {"other": f"{type(value).__module__}.{type(value).__qualname__}"}


class Other:
    """Stands for a result that is neither numbers nor plain tensors, such as a tensor subclass."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"a {self.name}"


def unpack_answer(value: Any, sent: Sent, data: bytes) -> Any:
    """What was packed.

    Raises:
        TransferError: it is not what :func:`pack_answer` makes.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is not dict or len(value) != 1:
        raise TransferError("an answer that is no value")
    ((kind, inside),) = value.items()
    if kind in ("tuple", "list") and type(inside) is list and len(inside) <= 10_000:
        items = [unpack_answer(item, sent, data) for item in inside]
        return tuple(items) if kind == "tuple" else items
    if kind == "given" and type(inside) is int and 0 <= inside < len(sent._tensors):
        return sent.tensor(inside)
    if kind == "other":
        return Other(str(inside)[:200])
    if kind == "new" and type(inside) is list and len(inside) == 3 and type(inside[2]) is list:
        start, dtype, shape = inside
        if _DTYPES.get(dtype) is None or not all(map(_is_size, [start, *shape])):
            raise TransferError(f"a tensor of {dtype}, {shape}")
        size = math.prod(shape) * _DTYPES[dtype].itemsize
        if start + size > len(data):
            raise TransferError(f"a tensor {shape} that was not sent")
        piece = bytearray(data[start : start + size])
        flat = torch.frombuffer(piece, dtype=_DTYPES[dtype]) if size else torch.empty(0)
        return flat.to(_DTYPES[dtype]).reshape(shape)
    raise TransferError(f"an answer that is no value: {kind!r:.40}")


# ---- messages: a length, the bytes, and file descriptors beside the length


def send(connection: socket.socket, data: bytes, fds: list[int]) -> None:
    """Send one message."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    connection.sendmsg([struct.pack("<Q", len(data))], rights)
    connection.sendall(data)


def receive(connection: socket.socket, limit: int = MESSAGE) -> tuple[bytes, list[int]]:
    """One message.

    Raises:
        EOFError: the other process has ended.
        TransferError: it is longer than ``limit``.
        TimeoutError: as the socket's.
    """
    head, fds, _, _ = socket.recv_fds(connection, 8, 4)
    while len(head) < 8:
        head += _more(connection, 8 - len(head))
    (size,) = struct.unpack("<Q", head)
    if size > limit:
        raise TransferError(f"a message of {size} bytes; at most {limit} are taken")
    data = bytearray()
    while len(data) < size:
        data += _more(connection, min(size - len(data), 1 << 20))
    return bytes(data), fds


def _more(connection: socket.socket, size: int) -> bytes:
    if not (data := connection.recv(size)):
        raise EOFError("the process has ended")
    return data


def parse(data: bytes) -> dict[str, Any]:
    """An answer's JSON.

    Raises:
        TransferError: it is none.
    """
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError):
        answer = None
    if type(answer) is not dict:
        raise TransferError("an answer that is no JSON object")
    return answer
