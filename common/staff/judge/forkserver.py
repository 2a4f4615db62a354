"""The first process in a sandbox: ``python -m common.staff.judge.forkserver FD``, in the folder with a student's code.

It has imported PyTorch and nothing that a student wrote, and forks a worker for each request: that takes milliseconds.
"""

import json
import os
import signal
import socket
import sys
import time
from contextlib import suppress

import torch._dynamo
import torch._subclasses.functional_tensor  # noqa: F401

from common.staff.judge import transfer, worker

START, END = b"start", b"end"
GRACE = 1.0  # seconds in which a worker may end by itself


def main(fd: int) -> None:
    """Answer requests until the connection closes: to start a worker for a socket, and to end it."""
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
                os.setsid()
                worker.main(fds[0])
                os._exit(0)
            os.close(fds[0])
        else:
            answer = {"status": _end(child) if child else None}
            child = 0
            transfer.send(connection, json.dumps(answer).encode(), [])


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
    main(int(sys.argv[1]))
