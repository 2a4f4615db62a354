"""``python -m common.staff.judge.gpu STUDENT OUT taskN...``: a student's kernels on this machine's GPU.

The stage's checks run as on a CPU, in the whole course with its answers; only the kernels are the student's, and they
run in another process, which has their device code and none of their host code. Then they are timed beside the course's
own. OUT/taskN-gpu.json and OUT/taskN-gpu.txt are as check.py writes them, with ``speed`` of what is timed.
"""

import argparse
import fcntl
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401  PyTorch imports it at a first launch
from torch import Tensor

from common.build import BuildError, KernelError, builder, toolchain
from common.check import CheckFailed, Suite, script
from common.paths import ROOT
from common.record import WORTH, write_json
from common.staff.judge import device_code, sandbox
from common.staff.judge.remote import ForkServer, Worker, standing_in
from common.staff.judge.run import in_a_process

STAGES = [stage for stage, worth in WORTH.items() if worth.bands]
KERNELS = "attention_kernel.cu"
SPEED = 300.0  # seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Check and time these stages; 0 if all have passed."""
    parser = argparse.ArgumentParser(
        prog="python -m common.staff.judge.gpu", description=__doc__.splitlines()[0]
    )
    parser.add_argument("student", type=Path, help="a student edition with what the student wrote")
    parser.add_argument("out", type=Path, help="a folder for what is found")
    parser.add_argument("stages", nargs="+", choices=STAGES, metavar="taskN")
    parser.add_argument("--hide", type=Path, nargs="*", default=[])
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args(argv)
    gpu = toolchain.find_gpu()
    if gpu is None:
        parser.error("there is no GPU")
    command = sandbox.command(options.student.resolve(), [path.resolve() for path in options.hide])
    suites = {stage: importlib.import_module(f"{stage}.test").suite for stage in options.stages}
    status, libraries = 0, {}
    for stage in suites:
        try:
            library = _library(options.student, command, stage, options.out, gpu.arch)
            libraries[f"{stage}/{KERNELS}"] = str(library)
        except (BuildError, CheckFailed) as error:
            record = {"status": "crashed", "why": f"found no kernels: {error}"}
            write_json(options.out / f"{stage}-gpu.json", record)
            status = 1
    with alone_on_the_gpu(), closing(ForkServer(ROOT, module="gpu_worker")) as server:
        for stage, suite in suites.items():
            if f"{stage}/{KERNELS}" not in libraries:
                continue
            server.ready()
            file = options.out / f"{stage}-gpu"
            worker = _GpuWorker(server, libraries)
            run = partial(_stage, suite, worker, file.with_suffix(".json"), options.seed)
            status |= in_a_process(run, file)
    return status


@contextmanager
def alone_on_the_gpu() -> Iterator[None]:
    """A context that one process of this machine has at a time: others would disturb what is timed."""
    with open(Path(tempfile.gettempdir()) / f"gpu-{os.getuid()}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class _GpuWorker(Worker):
    """Asks a GPU worker; each request names the library that has the student's kernels.

    Args:
        server: what starts it.
        libraries: by source. Others are the course's own, such as task 4's kernel in task 5 where it does not compile.
    """

    def __init__(self, server: ForkServer, libraries: Mapping[str, str]) -> None:
        super().__init__(server)
        self._libraries = libraries

    def ask(self, seconds: float, kind: str, source: str, *rest: Any) -> tuple[Any, dict[str, Any]]:
        return super().ask(seconds, kind, source, self._libraries.get(source, ""), *rest)


def _library(student: Path, command: Sequence[str], stage: str, out: Path, arch: str) -> Path:
    """Our host code with the device code that nvcc makes, in the sandbox, of the student's file."""
    source = f"{stage}/{KERNELS}"
    with closing(ForkServer(student, command)) as server, closing(Worker(server)) as worker:
        code, _ = worker.ask(device_code.SECONDS, "device code", source, arch)
    if not isinstance(code, Tensor):
        raise CheckFailed("the compiler's process sent no device code")
    file = out / f"{stage}.fatbin"
    file.write_bytes(code.numpy().tobytes())
    target = device_code.plan(ROOT / source, arch, file)
    builder.make([target])
    return target.path


def _stage(suite: Suite, worker: _GpuWorker, record: Path, seed: int) -> int:
    wanted = ["--device", "cpu", "--no-timing", "--seed", str(seed), "--record", str(record)]
    with closing(worker), standing_in(worker, []):
        if status := script.main(suite, wanted):
            return status
        found = json.loads(record.read_text())
        try:
            _, answer = worker.ask(SPEED, "speed", f"{suite.stage.name}/{KERNELS}", seed)
            found["speed"] = answer["speed"]
        except (CheckFailed, KernelError) as error:
            found |= {"status": "failed", "problems": [f"while being timed: {error}"]}
            print(f"  while being timed: {error}")
        write_json(record, found)
        for name, times in found.get("speed", {}).items():
            print(f"  {name}: {shown(times)}")
    return int(found["status"] != "passed")


def shown(times: Mapping[str, Any]) -> str:
    """A workload's times in a line."""
    low, high = times["interval"]
    said = (
        f"{times['ours_ms']:.4g} ms, {times['ratio']:.2f} ({low:.2f} to {high:.2f}, n {times['n']}) times as fast as"
        f" the course's kernel, {times['reference_ms']:.4g} ms: {times['part']:.0%} of the points for speed"
    )
    return f"{said}; {times['problem']}" if times["problem"] else said


if __name__ == "__main__":
    sys.exit(main())
