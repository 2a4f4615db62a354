"""The runtime library as Python sees it: its sources, the compilers' flags, and its C API."""

import ctypes
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

from common.paths import ROOT

HERE = Path(__file__).resolve().parent
INCLUDE = HERE / "include"
RUNTIME_SOURCES = sorted((HERE / "runtime").glob("*.cpp"))

# Kernels read the same bytes as float and as uint32_t, as CUDA code does. -g1 keeps the lines that
# an error names and costs little; the check build's lines are exact only with -g.
# Without a PLT every instruction of a kernel's library has a line, wherever the time limit meets it.
_KERNEL_FLAGS = ["-fno-strict-aliasing", "-Wno-unknown-pragmas", "-Wno-attributes", "-Wno-psabi"]
_KERNEL_FLAGS += ["-fno-plt"] if sys.platform != "darwin" else []
FAST_FLAGS = ["-O2", "-g1", *_KERNEL_FLAGS]

# Fortified memcpy would bypass the checks. clang does not report the read of x += 1 by default.
# The thread sanitizer sees a float4 as four floats, so another one looks at the alignment.
_SANITIZERS = "-fsanitize=thread,alignment"
_CHECK_FLAGS = ["-O1", "-g", _SANITIZERS, "-U_FORTIFY_SOURCE", *_KERNEL_FLAGS]
CHECK_FLAGS = {
    "gcc": _CHECK_FLAGS,
    "clang": [*_CHECK_FLAGS, "-mllvm", "-tsan-instrument-read-before-write"],
}
RUNTIME_FLAGS = ["-O2", "-g1", "-fno-strict-aliasing", "-fno-math-errno"]

ORDERS = ("forward", "reverse", "random")
ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")

_PLACE = re.compile(r"\{([^{}\n]+)\+(0x[0-9a-f]+(?:,0x[0-9a-f]+)*)\}")

# For some functions g++ names the rewritten copy in spite of its #line.
_COPY = re.compile(r".*\.build/work-[^/]+/\d+\.tree/(.+?)(?:\.cpp)?")

# Functions of CUDA, whose lines are no place for a mistake.
_CUDAS_OWN = (
    "common/cuda_on_cpu/",
    "common/include/ptx.cuh",
    # BEGIN STAFF
    "task4/ladder/hopper_on_cpu.cuh",
    "task5/ladder/cluster_memory.cuh",
    # END STAFF
    "/usr/",
)
_LAUNCH = "common/cuda_on_cpu/include/cuda_on_cpu/launch.h"


class Runtime:
    """The loaded runtime library. Settings are the process's; errors and tensors the thread's."""

    def __init__(self, path: str | Path):
        self._library = library = ctypes.CDLL(str(path))
        library.cuda_on_cpu_configure.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
        library.cuda_on_cpu_register.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t]
        library.cuda_on_cpu_clear_registered.argtypes = []
        library.cuda_on_cpu_take_error.argtypes = []
        library.cuda_on_cpu_take_error.restype = ctypes.c_char_p
        library.cuda_on_cpu_of_arch.argtypes = [ctypes.c_int]
        library.cuda_on_cpu_begin.restype = ctypes.c_void_p
        library.cuda_on_cpu_end.restype = None
        library.cuda_on_cpu_take_launched.restype = ctypes.c_char_p
        library.cuda_on_cpu_take_allocated.restype = ctypes.c_size_t
        library.cuda_on_cpu_take_counts.restype = ctypes.c_char_p
        self._begin, self._end = library.cuda_on_cpu_begin, library.cuda_on_cpu_end

    def configure(
        self,
        order: str | None = None,
        seed: int | None = None,
        eager_copies: bool | None = None,
        threads: int | None = None,
        arch: str | None = None,
        limit: float | None = None,
        count: bool | None = None,
    ) -> None:
        """Change how kernels run from now on; None leaves a setting unchanged.

        order: of the threads of a block: "forward", "reverse" or "random" (by `seed`).
        eager_copies: the data of cp_async arrives at once; otherwise as late as the kernel's waits allow.
        threads: OS threads that run the blocks; 0: one per core.
        arch: the GPU whose limits apply, such as "sm_90" (default: CUDA_ON_CPU_ARCH, or sm_80).
        limit: seconds for all kernels between ``begin`` and ``end``, or for one launched elsewhere; 0: none.
        count: keep what the kernels of check builds took of shared memory, for ``take_counts``.
        """
        if order is not None and order not in ORDERS:
            raise ValueError(f"order must be one of {', '.join(ORDERS)}; got {order!r}")
        number = None if arch is None else _number(arch)
        if threads is not None and threads < 0:
            raise ValueError(f"threads must be 0 (one per core) or more; got {threads}")
        if limit is not None and not 0 <= limit < math.inf:
            raise ValueError(f"limit must be 0 (none) or more seconds; got {limit}")
        settings = {"order": order, "seed": seed, "eager_copies": eager_copies, "threads": threads}
        settings["limit"], settings["count"] = limit, count
        settings["arch"] = number
        for name, value in settings.items():
            if value is not None:
                text = str(int(value)) if isinstance(value, bool) else str(value)
                self._library.cuda_on_cpu_configure(name.encode(), text.encode())

    def register(self, name: str, address: int, bytes: int) -> None:
        """Say where a tensor is, for this thread's next launches.

        Once one is registered, the check build reports every global access outside all of them.
        """
        self._library.cuda_on_cpu_register(name.encode(), address, bytes)

    def clear_registered(self) -> None:
        self._library.cuda_on_cpu_clear_registered()

    def of_arch(self, arch: str | None) -> None:
        """From now on this thread calls functions of a source that is for this GPU, such as "sm_90a"; or for any."""
        self._library.cuda_on_cpu_of_arch(_number(arch) if arch else 0)

    def begin(self) -> int:
        """A stream for the launcher that this thread calls next, up to ``end``.

        Until then, work on any other stream is an error, and the limit of time is that of all kernels together. What
        the thread's earlier launchers did is forgotten.
        """
        return self._begin()

    def end(self) -> None:
        """The launcher has returned, or was not called after all."""
        self._end()

    def take_launched(self) -> list[str]:
        """The kernels that this thread launched since the last call of this, or of ``begin``, whichever is later.

        They are named as they stand before ``<<<``, in order. A launch that was refused is not among them.
        """
        return self._library.cuda_on_cpu_take_launched().decode().splitlines()

    def take_allocated(self) -> int:
        """The bytes that this thread asked for with cudaMalloc and cudaMallocAsync, since as above."""
        return self._library.cuda_on_cpu_take_allocated()

    def take_counts(self) -> list[str]:
        """What was counted in the kernels that this thread launched, since as above; fields are separated by ``|``.

        ``kernel|NAME|threads|static bytes|dynamic bytes`` says what a block takes; ``block|X Y Z|barriers``, for each
        block, how many barriers it passed. For each place where block (0, 0, 0) accesses shared memory there is
        ``shared|PLACE|reads or writes|bytes|instructions|passes|passes without bank conflicts``, of all its warps.
        """
        return _with_lines(self._library.cuda_on_cpu_take_counts().decode()).splitlines()

    def take_error(self) -> str | None:
        """What went wrong in this thread's launches since the last call, or None."""
        text = self._library.cuda_on_cpu_take_error()
        return _with_lines(text.decode(errors="replace")) if text else None


def _number(arch: str) -> int:
    """90 for "sm_90" or "sm_90a"."""
    plain = re.sub(r"[af]$", "", arch)
    if plain not in ARCHITECTURES:
        raise ValueError(f"arch must be one of {', '.join(ARCHITECTURES)}; got {arch!r}")
    return int(plain.removeprefix("sm_"))


def _with_lines(text: str) -> str:
    """Replace each {library+0xoffset,...}, which only debug information can name, by file:line."""
    return _PLACE.sub(lambda match: _line_of(match[1], match[2].split(",")), text)


def _line_of(library: str, offsets: list[str]) -> str:
    """The kernel's line, and in brackets those of the functions that it calls there, down to the offset."""
    frames = [
        (name, shown) for name, place in _frames(library, offsets) if (shown := _shown(place))
    ]
    for i, (_, place) in enumerate(frames):
        if place.startswith(
            _LAUNCH
        ):  # called by this is a lambda with the launch's line, and by that the kernel
            frames = frames[: i - 1]
            break
    own = [frame for frame in frames if not frame[1].startswith(_CUDAS_OWN)] or frames[:1]
    if not own:
        return f"{Path(library).name}+{offsets[0]}"
    *helpers, (kernels_name, kernel) = own
    file = kernel.rpartition(":")[0]
    inside = []
    for name, place in reversed(helpers):
        path, _, line = place.rpartition(":")
        function = (
            "a lambda" if name == kernels_name else _plain(name)
        )  # addr2line names what is around it
        inside.append(f"in {function}, {f'line {line}' if path == file else place}")
    return f"{kernel} ({'; '.join(inside)})" if inside else kernel


def _plain(function: str) -> str:
    """``load4`` for ``float4 load4<8>(float const*)``."""
    if "{lambda" in function:
        return "a lambda"
    while (shorter := re.sub(r"<[^<>]*>", "", function)) != function:
        function = shorter
    called = "operator()" if "operator()" in function else ""
    name = (
        function.partition("operator()")[0] + called if called else function.partition("(")[0]
    ).split()
    return name[-1] if name else "a function"


def _frames(library: str, offsets: list[str]) -> list[tuple[str, str]]:
    """Function and file:line of the first offset, then of the calls inlined around it; then of the next offset."""
    for tool, *options in (
        ("addr2line", "-f", "-C", "-i", "-e", library, *offsets),
        ("llvm-symbolizer", "--inlining", "--output-style=GNU", f"--obj={library}", *offsets),
        ("atos", "-i", "-fullPath", "-o", library, "-l", "0", *offsets),
    ):
        if shutil.which(tool) is None or (tool == "atos") != (sys.platform == "darwin"):
            continue
        done = subprocess.run([tool, *options], capture_output=True, text=True, timeout=60)
        if done.returncode == 0:
            if tool == "atos":
                return re.findall(r"^(.*?) \(in .*\(([^()]+:\d+)\)$", done.stdout, re.MULTILINE)
            lines = [line for line in done.stdout.splitlines() if line]
            return list(zip(lines[::2], lines[1::2], strict=False))
    return []


def _shown(place: str) -> str | None:
    """`/checkout/task2/kernel.cu:7 (discriminator 2)` as `task2/kernel.cu:7`; None if unknown."""
    match = re.match(r"(.+):(\d+)", place)
    if not match or match[1].startswith("??") or match[2] == "0":
        return None
    path = Path(match[1])
    if copy := _COPY.fullmatch(match[1]):
        path = ROOT / copy[1] if (ROOT / copy[1]).exists() else Path("/") / copy[1]
    return f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}:{match[2]}"
