"""A case that does not end: Python code and kernels, told with where they are."""

import time

import pytest
import torch

from common.build import KernelError, Kernels, using
from common.check import Case, CheckFailed, Suite
from common.check.time_limit import time_limit

SPIN = """\
#include "tensor.cuh"
__global__ void spin(View x, int rounds) {
  for (int i = 0; rounds == 0 || i < rounds; ++i) x.as<float>()[threadIdx.x] += 1;
}
extern "C" cudaError_t spin_for(View x, int rounds, cudaStream_t stream) {
  spin<<<1, 4, 0, stream>>>(x, rounds);
  return cudaGetLastError();
}
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    path = tmp_path_factory.mktemp("spin") / "spin.cu"
    path.write_text(SPIN)
    kernels = Kernels(str(path), "spin.cu")
    kernels.launch("spin_for", x=torch.zeros(4), rounds=1)
    return kernels


def test_python_code_that_does_not_end(monkeypatch):
    monkeypatch.setattr("common.check.time_limit.MORE", 0.1)
    began = time.monotonic()
    with (
        pytest.raises(
            CheckFailed, match=r"did not end within 0.2 s: it is at .*test_time_limit.py:\d+"
        ),
        time_limit(0.2),
    ):
        while True:
            pass
    assert time.monotonic() - began < 5
    with time_limit(0.2):
        pass
    time.sleep(0.4)  # the alarm is off


def test_a_kernel_that_does_not_end(kernels):
    x = torch.zeros(4)
    with (
        using(limit=0.3),
        time_limit(0.3),
        pytest.raises(KernelError, match="did not end within 0.3 s"),
    ):
        kernels.launch("spin_for", x=x, rounds=0)
    kernels.launch("spin_for", x=torch.zeros(4), rounds=3)


def test_a_case_ends_and_the_next_one_runs(kernels, capsys):
    suite = Suite("task9", title="a stage")

    @suite.check("loop", [Case("endless", why="", rounds=0), Case("short", why="", rounds=2)])
    def run(case, device, rng):
        kernels.launch("spin_for", x=torch.zeros(4), rounds=case.rounds)

    with pytest.raises(SystemExit):
        suite.main(["--device", "cpu", "--limit", "0.5"])
    out = capsys.readouterr().out
    assert "loop    1 of 2" in out and "did not end within 0.5 s" in out and "spin.cu:3" in out
    with pytest.raises(SystemExit):
        suite.main(["--limit", "0"])
    assert "--limit must be a positive number of seconds; got 0" in capsys.readouterr().err
