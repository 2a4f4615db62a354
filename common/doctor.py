"""What this machine has and what it lacks: ``python -m common.doctor``, also before anything is installed.

Each line is ``fine``, or ``to do`` with what to do, or ``missing`` if nothing works without it. The exit status is 1 if
something is missing. Every part is examined by itself, so that one that is broken does not hide the others.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.build.toolchain import Gpu

ROOT = Path(__file__).resolve().parents[1]
FINE, TO_DO, MISSING = "fine", "to do", "missing"

GIB = 2**30
MEMORY = 3 * GIB  # free, for the checks of one task beside torch
DISK = GIB  # free, for what is built; an installation of torch needs more
INSTALLED = 3 * GIB
BUILT = 5 * GIB  # from here on .build/ is worth a word
KILLED = 3600  # seconds after which a build's working folder is one that was killed

PARAMETERS = Path("/proc/driver/nvidia/params")  # of the driver
CGROUP = Path("/sys/fs/cgroup")  # with the limits of a container

PROGRAM = """
#include <cstdio>
#include <optional>
#include <tuple>
int main() {
  auto [a, b] = std::tuple(1, 2);
  if constexpr (sizeof(void*) == 8) std::printf("%d", a + std::optional(b).value_or(0));
}
"""
TORCH = """
import json, torch
gpu = torch.cuda.is_available()
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda, "available": gpu,
    "architectures": torch.cuda.get_arch_list() if gpu else [],
    "capability": torch.cuda.get_device_capability() if gpu else None,
}))
"""


@dataclass(frozen=True)
class Finding:
    """One line of the report: the state is ``FINE``, ``TO_DO`` or ``MISSING``."""

    state: str
    text: str


Findings = Iterator[Finding]


def main(argv: Sequence[str] | None = None) -> int:
    """Print what was found; returns 1 if something prevents working, otherwise 0."""
    argparse.ArgumentParser(prog="python -m common.doctor", description=__doc__).parse_args(argv)
    counts = {FINE: 0, TO_DO: 0, MISSING: 0}
    for name, examine in EXAMINATIONS.items():
        for finding in examined(examine):
            counts[finding.state] += 1
            print(f"{finding.state:<8} {name:<10} {finding.text}", flush=True)
    if counts[MISSING]:
        print(f"\n{counts[MISSING]} missing: without it nothing, or not all, works here.")
        return 1
    print("\nReady." + (f" {counts[TO_DO]} to do, if you need it." if counts[TO_DO] else ""))
    return 0


def examined(examine: Callable[[], Findings]) -> list[Finding]:
    """What an examination finds; one that fails is something to do, and never ends the others."""
    found: list[Finding] = []
    try:
        found += examine()
    except Exception as error:
        said = str(error).strip().splitlines() or [""]
        found.append(
            Finding(TO_DO, f"could not be examined ({type(error).__name__}: {said[0][:200]})")
        )
    return found


# Python and its packages ------------------------------------------------------------------------------


def python() -> Findings:
    """The running Python against the declared range."""
    version = platform.python_version()
    declared = _requires_python()
    if _inside(version, declared):
        yield Finding(FINE, f"{version} ({sys.executable})")
    else:
        yield Finding(
            MISSING,
            f"{version} is not {declared}. Install one that is, remove .venv, and name it:"
            " make grade PYTHON=python3.12",
        )


def packages() -> Findings:
    """The installed versions against the declared ranges, and .venv against pyproject.toml."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    good, absent = [], []
    for requirement in project["dependencies"]:
        name, declared = re.fullmatch(r"([\w.-]+)\s*(.*)", requirement).groups()  # type: ignore[union-attr]
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            absent.append(name)
            continue
        if _inside(version, declared):
            good.append(f"{name} {version}")
        else:
            yield Finding(MISSING, f"{name} {version} is not {declared}. {_install()}")
    if absent:
        yield Finding(MISSING, f"not installed in this Python: {', '.join(absent)}. {_install()}")
    if good:
        yield Finding(FINE, ", ".join(good))
    stamp = ROOT / ".venv/installed"
    if stamp.exists() and stamp.stat().st_mtime < (ROOT / "pyproject.toml").stat().st_mtime:
        yield Finding(
            TO_DO, "pyproject.toml is newer than .venv: make grade installs what has changed"
        )


def torch() -> Findings:
    """Whether torch can be imported, in a process of its own, and its CUDA against the GPU."""
    done = subprocess.run(
        [sys.executable, "-c", TORCH], capture_output=True, text=True, timeout=180, cwd=ROOT
    )
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        yield Finding(MISSING, f"cannot be imported ({said[:200]}). {_install()}")
        return
    found = json.loads(done.stdout.strip().splitlines()[-1])
    cuda = f"for CUDA {found['cuda']}" if found["cuda"] else "for the CPU"
    gpu = _gpu()
    if gpu is None:
        yield Finding(FINE, f"{found['version']}, {cuda}")
    elif not found["cuda"]:
        yield Finding(
            TO_DO,
            f"{found['version']} is for the CPU, and there is a GPU: remove .venv, and run make grade"
            " without PIP_FLAGS",
        )
    elif not found["available"]:
        yield Finding(
            TO_DO,
            f"{found['version']}, {cuda}, does not see the GPU. Its driver runs programs up to CUDA"
            f" {gpu.driver_cuda[0]}.{gpu.driver_cuda[1]}: update the driver if that is older",
        )
    elif not _compiled_for(found["architectures"], tuple(found["capability"])):
        yield Finding(
            TO_DO,
            f"{found['version']} has no code for sm_{''.join(map(str, found['capability']))}, only for"
            f" {', '.join(found['architectures'])}: another torch is needed for this GPU",
        )
    else:
        yield Finding(FINE, f"{found['version']}, {cuda}, sees the GPU")


def _compiled_for(architectures: Sequence[str], capability: tuple[int, int]) -> bool:
    """Code of the same major version runs from its minor version on; PTX (compute_) on anything newer."""
    for name in architectures:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", name)
        if found is None:
            continue
        major, minor = int(found[2]), int(found[3])
        if found[1] == "compute" and (major, minor) <= capability:
            return True
        if major == capability[0] and minor <= capability[1]:
            return True
    return False


def _requires_python() -> str:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")  # tomllib came with Python 3.11
    found = re.search(r'^requires-python\s*=\s*"([^"]+)"', text, re.MULTILINE)
    return found[1] if found else ""


def _inside(version: str, declared: str) -> bool:
    """Whether ``2.13.0+cpu`` is within ``>=2.11,<2.16``."""
    have = _numbers(version)
    for part in filter(None, (part.strip() for part in declared.split(","))):
        found = re.fullmatch(r"(>=|<=|==|!=|>|<)\s*([\w.]+)", part)
        if found is None:
            raise ValueError(f"unknown range {part!r}")
        want = _numbers(found[2])
        width = max(len(have), len(want))
        a, b = (n + (0,) * (width - len(n)) for n in (have, want))
        if not {
            ">=": a >= b, "<=": a <= b, "==": a == b, "!=": a != b, ">": a > b, "<": a < b,
        }[found[1]]:  # fmt: skip
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _install() -> str:
    own = ROOT / ".venv"
    if (own / "installed").exists() and own.resolve() != Path(sys.prefix).resolve():
        return "Use the Python that has it: .venv/bin/python -m common.doctor"
    return "make grade installs it into .venv; common/README.md says how to do it without make"


# Compilers --------------------------------------------------------------------------------------------


def compiler() -> Findings:
    """The C++ compiler, by compiling and running a C++17 program."""
    from common.build import toolchain

    try:
        found = toolchain.cpp_compiler()
    except toolchain.BuildError as error:
        yield Finding(MISSING, str(error))
        return
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / "program.cpp", Path(folder) / "program"
        source.write_text(PROGRAM)
        command = [found.path, "-std=c++17", "-pthread", str(source), "-o", str(program)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode:
            said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[0]
            yield Finding(
                MISSING,
                f"{found} ({found.path}) does not compile C++17: {said[:200]}. Install a newer one with its"
                " standard library (sudo apt install g++), or name another: CXX=clang++",
            )
            return
        ran = subprocess.run([str(program)], capture_output=True, text=True, timeout=60)
    if ran.stdout == "3":
        yield Finding(FINE, f"{found} ({found.path}), C++17 compiles and runs")
    else:
        yield Finding(
            MISSING,
            f"{found} builds programs that do not run here (exit status {ran.returncode}). Is it for another"
            " machine? CXX names another compiler",
        )


def ninja() -> Findings:
    """The program that runs the compilers."""
    from common.build import toolchain

    try:
        path = toolchain.find_ninja()
    except toolchain.BuildError as error:
        yield Finding(MISSING, f"{error} {_install()}")
        return
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
    if done.returncode:
        yield Finding(MISSING, f"{path} does not run: install it again with `pip install ninja`")
    else:
        yield Finding(FINE, f"{done.stdout.strip()} ({path})")


def nvcc() -> Findings:
    """The CUDA compiler, where there is a GPU to compile for."""
    from common.build import toolchain

    gpu = _gpu()
    if gpu is None:
        yield Finding(FINE, "not needed without a GPU")
        return
    try:
        found = toolchain.nvcc_for(gpu.arch, gpu.driver_cuda)
    except toolchain.BuildError as error:
        yield Finding(TO_DO, f"{' '.join(str(error).split())} Or: make cuda-compiler")
        return
    yield Finding(FINE, f"{found}, builds for {gpu.arch}")


# The GPU ----------------------------------------------------------------------------------------------


def gpu() -> Findings:
    """The GPU with its architecture, and its driver."""
    found = _gpu()
    if found is not None:
        yield Finding(
            FINE,
            f"{found.name}, {found.arch}, its driver runs programs up to CUDA"
            f" {found.driver_cuda[0]}.{found.driver_cuda[1]}",
        )
    elif os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        yield Finding(FINE, "hidden by CUDA_VISIBLE_DEVICES: everything runs on the CPU")
    elif Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidia0").exists():
        yield Finding(
            TO_DO,
            "there is an NVIDIA driver, but no GPU that programs can use. Does nvidia-smi see one? In a"
            " container, start it with the GPU; on a cluster, request one. Until then the CPU does it",
        )
    else:
        yield Finding(FINE, "none: everything runs on the CPU, and nothing is timed")


def profiler() -> Findings:
    """ncu and its permission to read the GPU's counters. No task needs it."""
    if _gpu() is None:
        yield Finding(FINE, "not needed without a GPU")
        return
    if shutil.which("ncu") is None:
        yield Finding(
            TO_DO, "ncu (Nsight Compute) is not on PATH. It comes with the CUDA toolkit; no task needs it"
        )  # fmt: skip
    text = PARAMETERS.read_text(errors="replace") if PARAMETERS.exists() else ""
    if re.search(r"RmProfilingAdminOnly:\s*1", text) and not _may_profile():
        yield Finding(
            TO_DO,
            "the GPU's counters are for the administrator alone, who can allow them with the driver option"
            " NVreg_RestrictProfilingToAdminUsers=0; in a container it takes --cap-add SYS_ADMIN. No task"
            " needs them",
        )
    elif shutil.which("ncu"):
        yield Finding(FINE, f"{shutil.which('ncu')} may read the GPU's counters")


def _may_profile() -> bool:
    """Whether this process has CAP_SYS_ADMIN (bit 21) or CAP_PERFMON (bit 38)."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    return found is not None and bool(int(found[1], 16) & (1 << 21 | 1 << 38))


def _gpu() -> Gpu | None:
    from common.build import toolchain

    return toolchain.find_gpu()


# The machine and the checkout -------------------------------------------------------------------------


def memory() -> Findings:
    """Free memory."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        known = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        free = min(known["MemAvailable"], _left_to_container())
    except (OSError, KeyError):
        yield Finding(FINE, "unknown on this system")
        return
    if free < MEMORY:
        yield Finding(
            TO_DO,
            f"{_gib(free)} free, and some checks need {_gib(MEMORY)}: close other programs if one is killed",
        )
    else:
        yield Finding(FINE, f"{_gib(free)} free")


def _left_to_container() -> float:
    """Bytes up to the limit of this container or job; infinite where there is none."""
    try:
        limit, used = (
            int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current")
        )
    except (OSError, ValueError):  # no such files, or "max"
        return math.inf
    return max(limit - used, 0)


def disk() -> Findings:
    """Free disk space for what is built, and for torch if it is not installed yet."""
    free = shutil.disk_usage(ROOT).free
    wanted = DISK if (ROOT / ".venv/installed").exists() else DISK + INSTALLED
    if free < wanted:
        yield Finding(
            TO_DO,
            f"{_gib(free)} free, {_gib(wanted)} are needed. make clean removes what was built, and"
            " `python -m pip cache purge` what pip keeps",
        )
    else:
        yield Finding(FINE, f"{_gib(free)} free")


def checkout() -> Findings:
    """Whether this folder can be written to: kernels, records and Results.md go there."""
    wrong = []
    for path in (ROOT, ROOT / ".build", ROOT / "common/records"):
        try:
            if path.exists() or path == ROOT:
                with tempfile.TemporaryFile(dir=path):
                    pass
        except OSError as error:
            wrong.append(f"{path} ({error.strerror})")
    try:
        tempfile.gettempdir()
    except OSError as error:
        wrong.append(f"any folder for temporary files ({error.strerror}; TMPDIR names one)")
    results = ROOT / "Results.md"
    if not results.exists():
        wrong.append(f"{results} (missing: take it from the course)")
    elif not os.access(results, os.W_OK):
        wrong.append(f"{results} (read-only)")
    if wrong:
        yield Finding(
            MISSING,
            f"cannot write: {'; '.join(wrong)}. Kernels are built in .build/ and results written to Results.md:"
            " copy the course to a folder of your own",
        )
    else:
        yield Finding(FINE, f"{ROOT} can be written to")


def builds() -> Findings:
    """What earlier builds have left, and which kernels have changed since they were built for the CPU."""
    folder = ROOT / ".build"
    if not folder.is_dir():
        yield Finding(FINE, "nothing was built yet")
        return
    files = [f for f in folder.rglob("*") if f.is_file()]
    libraries = [f for f in files if f.suffix in (".so", ".dylib")]
    size = sum(map(_size, files))
    killed = [f for f in folder.glob("work-*") if time.time() - f.stat().st_mtime > KILLED]
    wrong = []
    if empty := [f for f in libraries if _size(f) == 0]:
        wrong.append(f"{len(empty)} builds are empty files (was the disk full?)")
    if killed:
        wrong.append(f"{len(killed)} builds were killed and left a folder")
    if size > BUILT:
        wrong.append(f"{_gib(size)} are used")
    if wrong:
        yield Finding(TO_DO, f"in .build/ {', '.join(wrong)}: make clean removes all of it")
        return
    changed = [f.parent.name for f in sorted(ROOT.glob("task*/*.cu")) if _is_stale(f)]
    yield Finding(
        FINE,
        f"{len(libraries)} in .build/, {_gib(size)}"
        + (f"; {', '.join(changed)} will be built by the next test" if changed else ""),
    )


def _is_stale(source: Path) -> bool:
    """Whether the library for the CPU that belongs to this source as it is now is not there."""
    from common.build import planner

    return not planner.plan(source, "cpu").path.exists()


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # another process has just removed it
        return 0


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.0f} MiB"


EXAMINATIONS: dict[str, Callable[[], Findings]] = {
    "Python": python,
    "packages": packages,
    "torch": torch,
    "compiler": compiler,
    "ninja": ninja,
    "GPU": gpu,
    "nvcc": nvcc,
    "profiler": profiler,
    "memory": memory,
    "disk": disk,
    "checkout": checkout,
    "builds": builds,
}

if __name__ == "__main__":
    sys.exit(main())
