"""A limit for Python code that does not end. Kernels on the CPU have one of their own, which says where they are."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType

from common.build import builder, library, planner
from common.check.compare import CheckFailed
from common.check.frames import own_line

MORE = 2.0  # seconds by which it comes later than the kernels' own limit


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """A context that raises CheckFailed if it takes longer. Waiting for a compiler does not count.

    In another thread than the main one, where there are no signals, it changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def too_long(number: int, frame: FrameType | None) -> None:
        if _is_inside(frame, builder, planner):
            signal.setitimer(signal.ITIMER_REAL, seconds + MORE)
        elif _is_inside(frame, library):  # its own limit ends the kernel
            signal.setitimer(signal.ITIMER_REAL, MORE)
        else:
            raise CheckFailed(f"did not end within {seconds:g} s: it is at {own_line(frame)}")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, seconds + MORE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _is_inside(frame: FrameType | None, *modules: ModuleType) -> bool:
    files = {module.__file__ for module in modules}
    while frame is not None:
        if frame.f_code.co_filename in files:
            return True
        frame = frame.f_back
    return False
