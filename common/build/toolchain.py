"""The compilers of this machine and its GPU: found without torch, and named in every error.

The C++ compiler is $CXX, else g++ or clang++. The CUDA compiler is $NVCC, else the nvcc on PATH if it
suits the GPU and its driver, else the one from PyPI (``pip install`` of the ``cuda`` extra in
pyproject.toml). ``NVCC=pypi`` takes the one from PyPI whatever is on PATH.
"""

import ctypes
import functools
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

Version = tuple[int, int]


class BuildError(RuntimeError):
    """A kernel could not be built.

    The message is complete: the compiler's own output, or one sentence about what is missing. Show it without a
    traceback.
    """


@dataclass(frozen=True)
class CppCompiler:
    """g++ or clang++."""

    path: str
    family: str  # "gcc" or "clang"
    version: str  # "12.2.0"

    def __str__(self) -> str:
        return f"{'clang' if self.family == 'clang' else 'g'}++ {self.version}"


@dataclass(frozen=True)
class Nvcc:
    """A CUDA compiler: nvcc, what it needs on its command line, and what it can build for."""

    path: str
    version: Version
    release: str  # "13.0.88"
    architectures: tuple[int, ...]  # 75, 80, ... 121
    flags: tuple[str, ...]  # where its own headers and libraries are, if nvcc does not know
    from_pypi: bool

    def __str__(self) -> str:
        return f"nvcc {self.release} ({'from PyPI' if self.from_pypi else self.path})"


@dataclass(frozen=True)
class Gpu:
    """The GPU that kernels are built for."""

    name: str
    capability: Version  # (9, 0)
    driver_cuda: Version  # the newest CUDA that its driver runs: (13, 0)

    @property
    def arch(self) -> str:
        return arch_of(self.capability)


def arch_of(capability: Version) -> str:
    """The nvcc target of a compute capability: ``(9, 0)`` is ``sm_90a``, ``(8, 0)`` is ``sm_80``.

    From 9.0 on the suffix ``a`` enables features of one architecture, such as wgmma. Such code runs on that
    architecture only, which is fine for code that is compiled where it runs.
    """
    major, minor = capability
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def normal_arch(text: str) -> str:
    """``90a``, ``sm_90a`` and ``compute_90a`` are ``sm_90a``.

    Raises:
        BuildError: the text is not of this form.
    """
    match = re.fullmatch(r"(?:sm_|compute_)?(\d{2,3}[af]?)", text)
    if match is None:
        raise BuildError(
            f"unknown GPU architecture {text!r}: write it like sm_80, sm_90a or sm_120"
        )
    return "sm_" + match[1]


# ---- the C++ compiler


@functools.cache
def cpp_compiler() -> CppCompiler:
    """The C++ compiler that builds kernels for the CPU and the host side of those for a GPU.

    Raises:
        BuildError: there is none, or $CXX does not work.
    """
    chosen = os.environ.get("CXX")
    if chosen:
        compiler = _try_cpp(chosen)
        if compiler is None:
            raise BuildError(
                f"the environment variable CXX names {chosen!r}, which is not a C++ compiler that runs"
            )
        return compiler
    names = ("clang++", "g++") if sys.platform == "darwin" else ("g++", "clang++", "c++")
    for name in names:
        if compiler := _try_cpp(name):
            return compiler
    package = "xcode-select --install" if sys.platform == "darwin" else "sudo apt install g++"
    raise BuildError(
        f"no C++ compiler found: looked for {', '.join(names)} on PATH. "
        f"Install one ({package}), or set CXX to its path."
    )


def _try_cpp(name: str) -> CppCompiler | None:
    path = shutil.which(name)
    text = _output(path, "--version") if path else None
    if not text:
        return None
    version = re.search(r"\d+\.\d+(\.\d+)?", text.split("\n")[0].rpartition(")")[2] or text)
    family = "clang" if "clang" in text.lower() else "gcc"
    return CppCompiler(path, family, version[0] if version else "?")


# ---- the CUDA compiler


@functools.cache
def nvcc_for(arch: str, driver_cuda: Version | None = None) -> Nvcc:
    """The first nvcc that can build for ``arch`` and whose programs the driver can run.

    ``driver_cuda`` is None when the library is not going to run here.

    Raises:
        BuildError: there is none; the message says why each one that was found does not fit.
    """
    reasons = []
    for nvcc in _nvccs():
        reason = _why_not(nvcc, arch, driver_cuda)
        if reason is None:
            return nvcc
        reasons.append(reason)
    if not reasons:
        raise BuildError(
            "no CUDA compiler found: there is no nvcc on PATH, and none from PyPI in this Python. "
            "`make grade` installs the one from PyPI; so does pip with the packages that "
            "pyproject.toml lists under `cuda`."
        )
    raise BuildError("\n".join(reasons))


def _nvccs() -> Iterator[Nvcc]:
    chosen = os.environ.get("NVCC")
    if chosen and chosen != "pypi":
        nvcc = _try_nvcc(chosen)
        if nvcc is None:
            raise BuildError(
                f"the environment variable NVCC names {chosen!r}, which is not an nvcc that runs"
            )
        yield nvcc
        return
    if not chosen and (nvcc := _try_nvcc("nvcc")):
        yield nvcc
    for path in _pypi_nvccs():
        if nvcc := _try_nvcc(str(path)):
            yield nvcc


def _pypi_nvccs() -> list[Path]:
    """site-packages/nvidia/cu13/bin/nvcc, newest first."""
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations if spec else None
    return sorted((p for f in folders or () for p in Path(f).glob("cu*/bin/nvcc")), reverse=True)


def _try_nvcc(name: str) -> Nvcc | None:
    path = shutil.which(name)
    text = _output(path, "--version") if path else None
    match = re.search(r"release (\d+)\.(\d+), V([\d.]+)", text or "")
    if match is None:
        return None
    known = re.findall(r"compute_(\d+)\b", _output(path, "--list-gpu-arch") or "")
    root = Path(path).resolve().parent.parent
    from_pypi = root.parent.name == "nvidia"
    # PyPI's packages put some headers and the libraries where this nvcc does not look.
    flags = (f"-I{root / 'include/cccl'}", f"-L{root / 'lib'}") if from_pypi else ()
    version = (int(match[1]), int(match[2]))
    return Nvcc(path, version, match[3], tuple(map(int, known)), flags, from_pypi)


def _why_not(nvcc: Nvcc, arch: str, driver_cuda: Version | None) -> str | None:
    number = int(re.sub(r"\D", "", arch))
    oldest, newest = min(nvcc.architectures), max(nvcc.architectures)
    builds_for = f"it builds for sm_{oldest} to sm_{newest}"
    if number > newest:
        return f"{nvcc} is too old for {arch}: {builds_for}. Install a newer CUDA toolkit."
    if number < oldest:
        return f"{nvcc} no longer builds for {arch}: {builds_for}. Install an older CUDA toolkit."
    if number not in nvcc.architectures:
        return f"{nvcc} knows no {arch}; it builds for {', '.join(f'sm_{n}' for n in nvcc.architectures)}."
    if arch[-1].isalpha() and number < 90:
        return f"there is no {arch}: architectures before sm_90 have no variant with a letter."
    # A driver runs what any toolkit of its own major version built, and of earlier ones.
    if driver_cuda is not None and driver_cuda[0] < nvcc.version[0]:
        return (
            f"the NVIDIA driver is too old for {nvcc}: it runs programs up to CUDA "
            f"{driver_cuda[0]}.{driver_cuda[1]}. Update the driver, or put an nvcc of CUDA "
            f"{driver_cuda[0]} on PATH."
        )
    return None


# ---- the GPU


@functools.cache
def find_gpu() -> Gpu | None:
    """The first GPU that CUDA programs see here, or None. Asks the driver, not torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return None
    gpus = _gpus_by_nvml()
    # NVML answers in a few ms, but does not know which GPUs CUDA may use. That matters only if they differ.
    if gpus and len({gpu.capability for gpu in gpus}) == 1:
        return gpus[0]
    return _first_gpu_by_cuda()


def _gpus_by_nvml() -> list[Gpu]:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if nvml.nvmlInit_v2():
        return []
    try:
        count, cuda = ctypes.c_uint(), ctypes.c_int()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return []
        if nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(cuda)):
            return []
        gpus = []
        for i in range(count.value):
            handle, name = ctypes.c_void_p(), ctypes.create_string_buffer(96)
            major, minor = ctypes.c_int(), ctypes.c_int()
            if (
                nvml.nvmlDeviceGetHandleByIndex_v2(i, ctypes.byref(handle))
                or nvml.nvmlDeviceGetName(handle, name, len(name))
                or nvml.nvmlDeviceGetCudaComputeCapability(
                    handle, ctypes.byref(major), ctypes.byref(minor)
                )
            ):
                return []
            gpus.append(Gpu(name.value.decode(), (major.value, minor.value), _version(cuda.value)))
        return gpus
    finally:
        nvml.nvmlShutdown()


def _first_gpu_by_cuda() -> Gpu | None:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count, version, device = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name, numbers = ctypes.create_string_buffer(96), [ctypes.c_int(), ctypes.c_int()]
    major_minor = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
    if (
        cuda.cuInit(0)
        or cuda.cuDeviceGetCount(ctypes.byref(count))
        or count.value == 0
        or cuda.cuDriverGetVersion(ctypes.byref(version))
        or cuda.cuDeviceGet(ctypes.byref(device), 0)
        or cuda.cuDeviceGetName(name, len(name), device)
        or any(
            cuda.cuDeviceGetAttribute(ctypes.byref(n), which, device)
            for n, which in zip(numbers, major_minor, strict=True)
        )
    ):
        return None
    return Gpu(name.value.decode(), (numbers[0].value, numbers[1].value), _version(version.value))


def _version(cuda: int) -> Version:
    return cuda // 1000, cuda % 1000 // 10


# ---- ninja


def find_ninja() -> str:
    """The ninja of the Python package, which also writes the build files, or one on PATH where it has no program.

    Raises:
        BuildError: the package is not installed, or there is no program.
    """
    try:
        import ninja

        path = shutil.which("ninja", path=ninja.BIN_DIR) or shutil.which("ninja")
    except ImportError:
        path = None
    if path is None:
        raise BuildError("ninja not found: install it with `pip install ninja`.")
    return path


def machine() -> str:
    """System and processor family, on which a library depends besides its compiler."""
    return f"{platform.system()} {platform.machine()}"


def instructions() -> str:
    """What this processor can do, on which code for -march=native depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None
