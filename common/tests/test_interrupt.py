"""Ctrl-C while a kernel runs on the CPU."""

import os
import pty
import re
import signal
import subprocess
import sys
import time

import pytest

from common.paths import ROOT

KERNEL = """\
#include <cuda_runtime.h>
__global__ void spin(volatile int* go, int rounds) {
  for (int i = 0; i < rounds || rounds < 0; ++i)
    if (*go) return;
}
extern "C" cudaError_t spin(int* go, int rounds, cudaStream_t stream) {
  spin<<<2, 3, 0, stream>>>(go, rounds);
  return cudaGetLastError();
}
"""
SCRIPT = """\
import sys, torch
from common.build import Kernels, using
go, rounds = torch.zeros(1, dtype=torch.int32), int(sys.argv[2])
kernels = Kernels(sys.argv[1], "spin.cu")
with using(check=sys.argv[3] == "check"):
    kernels.launch("spin", go=go, rounds=1)
    print("launched", flush=True)
    try:
        while True:
            kernels.launch("spin", go=go, rounds=rounds)
    except KeyboardInterrupt:
        print("KeyboardInterrupt", flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("spin")
    (path / "spin.cu").write_text(KERNEL)
    return path


def interrupted(folder, rounds, build, **options):
    """The script, after Ctrl-C: its status, what it said, and the seconds that it took to end."""
    command = [sys.executable, "-c", SCRIPT, str(folder / "spin.py"), str(rounds), build]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, **{"stderr": subprocess.PIPE} | options
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "launched\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        said, errors = process.communicate(timeout=20)
        return process.returncode, said, errors, time.monotonic() - began
    finally:
        process.kill()


@pytest.mark.parametrize("build", ["fast", "check"])
def test_an_endless_kernel_is_ended(folder, build):
    status, said, errors, seconds = interrupted(folder, -1, build)
    assert status == 130 and seconds < 5 and not said
    assert re.fullmatch(r"\ninterrupted: spin had not returned after \d s\n", errors), errors


def test_a_kernel_that_returns_leaves_it_to_python(folder):
    status, said, errors, seconds = interrupted(folder, 1000, "fast")
    assert (status, said, errors) == (0, "KeyboardInterrupt\n", "") and seconds < 5


def test_the_cursor_of_a_terminal_comes_back(folder):
    ours, theirs = pty.openpty()
    status, *_ = interrupted(folder, -1, "fast", stderr=theirs)
    os.close(theirs)
    assert status == 130 and b"\x1b[?25h" in os.read(ours, 1000)
