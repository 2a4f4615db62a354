"""Ctrl-C while a kernel runs on the CPU.

Python reacts to it when the kernel has returned, which one with an endless loop never does. So a thread waits for the
signal, gives the kernel a moment, and then ends the process: threads in the middle of a kernel cannot be stopped alone.
"""

import functools
import os
import signal
import sys
import threading
import time
from typing import NamedTuple

SECONDS = 0.7
_SHOW_CURSOR = "\x1b[?25h"  # a progress bar has hidden it


class Launch(NamedTuple):
    """A launch on the CPU that has not returned yet."""

    name: str
    began: float  # time.monotonic()


running: Launch | None = None  # the main thread's


def begin(name: str) -> None:
    """The main thread launches a kernel on the CPU. Other threads need not say so: Ctrl-C is not theirs."""
    global running
    if threading.current_thread() is threading.main_thread():
        running = Launch(name, time.monotonic())
        _watch()


def end() -> None:
    """It has returned."""
    global running
    if threading.current_thread() is threading.main_thread():
        running = None


@functools.cache
def _watch() -> None:
    """Start the thread, unless somebody else waits for signals already: an event loop does, in a notebook."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
        os.close(reader), os.close(writer)
        return
    threading.Thread(target=_wait, args=(reader,), daemon=True, name="Ctrl-C").start()


def _wait(reader: int) -> None:
    while number := os.read(reader, 1):
        launch = running
        if number[0] != signal.SIGINT or launch is None:
            continue
        until = time.monotonic() + SECONDS
        while running is launch and time.monotonic() < until:
            time.sleep(0.02)
        if running is launch:
            shown = _SHOW_CURSOR if sys.stderr.isatty() else ""
            took = time.monotonic() - launch.began
            text = f"\n{shown}interrupted: {launch.name} had not returned after {took:.0f} s\n"
            os.write(2, text.encode())
            os._exit(130)
