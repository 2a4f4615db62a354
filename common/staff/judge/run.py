"""A stage's checks in a process of their own, so that a crash or a hang does not end the others."""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from common.record import write_json
from common.staff.judge import STAGE_SECONDS

PR_SET_PDEATHSIG = 1


def in_a_process(function: Callable[[], int], file: Path) -> int:
    """Call a function in a forked process; its status.

    What it prints comes to ``file``.txt. After too long a time it is ended, and ``file``.json says so.
    """
    process = multiprocessing.get_context("fork").Process(target=_call, args=(function, file))
    process.start()
    process.join(STAGE_SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
        why = f"stopped after {STAGE_SECONDS} s"
        write_json(file.with_suffix(".json"), {"status": "crashed", "why": why})
    return 1 if process.exitcode else 0


def _call(function: Callable[[], int], file: Path) -> None:
    # It ends with the process that waits for it, even by SIGKILL. A fork does not inherit that.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with open(file.with_suffix(".txt"), "w") as said:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(said.fileno(), stream.fileno())
    sys.exit(function())
