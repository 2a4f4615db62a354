"""Commands in processes of their own, which are killed with everything that they have started."""

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_running: set[subprocess.Popen] = set()
_interrupted: set[subprocess.Popen] = set()


def run(
    command: Sequence[str],
    seconds: float,
    hear: Callable[[str], None],
    *,
    cwd: Path,
    env: Mapping[str, str] | None = None,
) -> int | None:
    """Run a command; at its end, or when ``hear`` raises, everything that it has started is killed.

    Args:
        command: a program and its arguments.
        seconds: after which it is killed.
        hear: receives each line that it writes to stdout or stderr.
        cwd: the folder it runs in.
        env: its environment; None: this process's. Python in it does not buffer its lines.

    Returns:
        Its exit status, negative for a signal; None if its time ran out.

    Raises:
        OSError: there is no such program or folder.
        KeyboardInterrupt: :func:`end_all` has killed it.
    """
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env={**(os.environ if env is None else env), "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # one process group: it can be killed with all that it starts
    )
    _running.add(process)
    late = threading.Event()

    def too_long() -> None:
        late.set()
        _end(process)

    timer = threading.Timer(seconds, too_long)
    timer.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            hear(line.rstrip("\n"))
        process.wait()
    finally:
        timer.cancel()
        _end(process)
        _running.discard(process)
    if process in _interrupted:
        _interrupted.remove(process)
        raise KeyboardInterrupt
    return None if late.is_set() else process.returncode


def end_all() -> None:
    """Kill what other threads still run: Ctrl-C reaches neither those threads nor the commands."""
    for process in list(_running):
        _interrupted.add(process)
        _end(process)


def _end(process: subprocess.Popen) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
