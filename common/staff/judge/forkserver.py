"""The first process in a sandbox: ``python -m common.staff.judge.forkserver FD MODULE``, in the worker's folder.

It has imported PyTorch and nothing that a student wrote, and forks a worker for each request: that takes milliseconds.
"""

import ctypes
import importlib
import json
import os
import signal
import socket
import sys
import time
from contextlib import suppress

import torch._dynamo
import torch._subclasses.functional_tensor  # noqa: F401

from common.staff.judge import transfer

START, END = b"start", b"end"
GRACE = 1.0  # seconds in which a worker may end by itself
PR_SET_DUMPABLE = 4  # of Linux's prctl


def main(fd: int, module: str) -> None:
    """Answer requests until the connection closes: to start a worker for a socket, and to end it.

    Args:
        fd: of the connection.
        module: what runs in a worker: its ``main(fd)``.
    """
    worker = importlib.import_module(module)
    _let_others_read_memory(False)  # a worker is this user's process, too
    connection = socket.socket(fileno=fd)
    transfer.send(connection, b"{}", [])
    child = 0
    while True:
        try:
            request, fds = transfer.receive(connection)
        except EOFError:
            return
        if request == START:
            child = os.fork()
            if child == 0:
                connection.close()
                _let_others_read_memory(True)  # what reads /proc/self in it needs that
                os.setsid()
                worker.main(fds[0])
                os._exit(0)
            os.close(fds[0])
        else:
            answer = {"status": _end(child) if child else None}
            child = 0
            transfer.send(connection, json.dumps(answer).encode(), [])


def _let_others_read_memory(allowed: bool) -> None:
    """Whether processes of this user, but for root's, may read this one's memory and write it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, int(allowed), 0, 0, 0)


def _end(child: int) -> int | None:
    """End the worker with all that it has started; its status if it had ended by itself."""
    status = None
    until = time.monotonic() + GRACE
    while status is None and time.monotonic() < until:
        pid, waited = os.waitpid(child, os.WNOHANG)
        if pid:
            status = os.waitstatus_to_exitcode(waited)
        else:
            time.sleep(0.005)
    with suppress(ProcessLookupError):
        if os.getpid() == 1:  # in a namespace of its own: all other processes are its descendants
            os.kill(-1, signal.SIGKILL)
        else:
            os.killpg(child, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    return status


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
