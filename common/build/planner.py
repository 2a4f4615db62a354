"""What a library is made from: its sources, the commands that make it, and its name in ``.build/``.

A library's file name contains the hash of everything that it is made from: its sources with all the headers of this
repository that they include, the flags, the compilers. So a library is up to date if its file exists.
"""

import hashlib
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from common.build import toolchain
from common.build.toolchain import BuildError
from common.paths import ROOT

BUILD = ROOT / ".build"
INCLUDE = ROOT / "common/include"
HERE = ROOT / "common/build"

# In a command: the library, the object file, and the folder of rewritten sources, in this build's own folder.
OUT, OBJECT, TREE = "{work}.out", "{work}.o", "{work}.tree"

CPP_FLAGS = ("-std=c++17", "-fPIC", "-pthread")
# For C++ that computes. Without the flags for errors of arithmetic, comparisons become selections in vectors.
COMPUTE_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math")
NVCC_FLAGS = (
    "-shared", "-O3", "-std=c++17", "-lineinfo",  # lineinfo: profilers and compute-sanitizer show the line
    "-Xcompiler", "-fPIC",
    "-Xlinker", "-Bsymbolic",  # a launcher finds this library's kernels and runtime, not a namesake of torch's
    "-Xptxas", "-v",  # registers, shared memory and spills, shown by --verbose
)  # fmt: skip

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"\n]+)[>"]', re.MULTILINE)
_ARCHITECTURES = re.compile(r"^//[ \t]*architectures:[ \t]*(.+)$", re.MULTILINE)
_FIRST_OF_TEXT = re.compile(r'#line (\d+) "(.+)"\n')
_HEAD = 30  # lines of a source that may contain that line


@dataclass(frozen=True)
class Target:
    """One library to build: from which files, by which commands, under which name."""

    source: Path
    device: str  # "cpu" or "cuda"
    built_for: str  # "the CPU", "the CPU, checked", "sm_90a"
    compiler: str
    commands: tuple[
        tuple[str, ...], ...
    ]  # one after the other, with {work} for this build's folder
    path: Path
    files: tuple[Path, ...]  # the source and its headers
    needs: tuple["Target", ...] = ()

    @property
    def log(self) -> Path:
        """The compiler's output."""
        return self.path.with_suffix(".log")


def plan(
    source: Path, device: str, *, check: bool = False, arch: str | None = None, here: bool = False
) -> Target:
    """The target for one source. Runs no compiler, except to ask its version.

    ``here``: the library is going to run on this machine, so the driver has to fit too.
    """
    source = Path(source).resolve()
    if not source.is_file():
        raise BuildError(f"there is no {display(source)}")
    if source.suffix == ".cpp":
        if device != "cpu":
            raise BuildError(f"{shown(source)} is C++ for the CPU, and not for {device}")
        return _plan_cpp(source)
    if device == "cuda":
        return _plan_cuda(source, arch, here)
    if device == "cpu":
        if (named := architectures(source)) and not is_for_cpu(source):
            raise BuildError(f"{_made_for(source, named)}, and not for the CPU")
        return _plan_cpu(source, check)
    raise ValueError(f"device must be 'cpu' or 'cuda'; got {device!r}")


def architectures(source: Path) -> tuple[str, ...]:
    """The GPU architectures that a source is for: those in a line ``// architectures: sm_90a cpu`` near its top.

    Empty for a source without such a line, which is for every GPU and for the CPU. The word ``cpu`` there says that it
    is for the CPU too, which then has the limits of the first one.

    Raises:
        BuildError: the line names something that is not an architecture.
    """
    return tuple(toolchain.normal_arch(name) for name in _named(source) if name != "cpu")


def is_for_cpu(source: Path) -> bool:
    """Whether a source is for the CPU: see :func:`architectures`."""
    named = _named(source)
    return not named or "cpu" in named


def _named(source: Path) -> list[str]:
    head = "\n".join(read(source).splitlines()[:_HEAD])
    found = _ARCHITECTURES.search(head)
    return found[1].split() if found else []


def _made_for(source: Path, named: Sequence[str]) -> str:
    return f"{shown(source)} is for {' and '.join(named)} alone"


def _plan_cuda(source: Path, arch: str | None, here: bool) -> Target:
    gpu = toolchain.find_gpu() if arch is None or here else None
    if arch is None:
        if gpu is None:
            raise BuildError(
                "no NVIDIA GPU found to build for. Name one with --arch (such as sm_90a), or use --device cpu."
            )
        arch = gpu.arch
    arch = toolchain.normal_arch(arch)
    if (named := architectures(source)) and arch not in named:
        this = (
            f"this machine's GPU, {gpu.name}, which is {arch}" if gpu and gpu.arch == arch else arch
        )
        raise BuildError(f"{_made_for(source, named)}, and not for {this}")
    host = toolchain.cpp_compiler()
    nvcc = toolchain.nvcc_for(arch, gpu.driver_cuda if gpu else None)
    number = arch.removeprefix("sm_")
    flags = (
        *NVCC_FLAGS, *nvcc.flags, "-ccbin", host.path,
        "-gencode", f"arch=compute_{number},code=sm_{number}", *_include_flags(source),
    )  # fmt: skip
    commands = ((nvcc.path, *flags, display(source), "-o", OUT),)
    files = closure(source, (INCLUDE,))
    digest = digest_of(files, [*sum(commands, ()), nvcc.release, str(host), toolchain.machine()])
    return Target(source, "cuda", arch, str(nvcc), commands, _library(source, arch, digest), files)


def _plan_cpu(source: Path, check: bool) -> Target:
    from common import cuda_on_cpu

    compiler = toolchain.cpp_compiler()
    runtime = cpu_runtime()
    flags = _for_family(
        cuda_on_cpu.CHECK_FLAGS if check else cuda_on_cpu.FAST_FLAGS, compiler.family
    )
    files = closure(source, (INCLUDE,))
    layer = display(Path(cuda_on_cpu.INCLUDE))
    # Headers are rewritten like the source, so the compiler gets copies; messages still name the originals.
    includes = [f"-I{TREE}/{mirror(folder)}" for folder in (_folder(source), INCLUDE)]
    commands = (
        (
            compiler.path, *CPP_FLAGS, *flags, *_own_symbols(compiler.family), *includes, f"-I{layer}",
            "-c", f"{TREE}/{mirror(source)}.cpp", "-o", OBJECT,
        ),
        # Linked separately: with -fsanitize=thread the compiler would link the sanitizer's own library.
        (compiler.path, "-shared", OBJECT, display(runtime.path), *_link_flags(), "-o", OUT),
    )  # fmt: skip
    digest = digest_of(files, [*sum(commands, ()), str(compiler), _layer_digest()])
    built_for, tag = ("the CPU, checked", "cpu-check") if check else ("the CPU", "cpu")
    path = _library(source, tag, digest)
    return Target(source, "cpu", built_for, str(compiler), commands, path, files, needs=(runtime,))


def _plan_cpp(source: Path) -> Target:
    """C++ without kernels, for this machine's own instructions. It has no check build."""
    compiler = toolchain.cpp_compiler()
    flags = (*CPP_FLAGS, *COMPUTE_FLAGS, "-shared", *_own_symbols(compiler.family))
    include = f"-I{display(_folder(source))}"
    command = (compiler.path, *flags, include, display(source), "-o", OUT)
    files = closure(source, ())
    words = [*command, str(compiler), toolchain.machine(), toolchain.instructions()]
    path = _library(source, "cpu", digest_of(files, words))
    return Target(source, "cpu", "the CPU", str(compiler), (command,), path, files)


def plan_host(source: Path, function_type: str | None = None) -> Target:
    """The target for a C++ source without kernels, which Python calls. Python's own functions are found at load.

    ``function_type``: what the macro ``FUNCTION`` stands for.
    """
    compiler = toolchain.cpp_compiler()
    defined = (f"-DFUNCTION={function_type}",) if function_type else ()
    undefined = ("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()
    command = (
        compiler.path, *CPP_FLAGS, "-O2", "-shared", *defined, *undefined, f"-I{display(HERE)}",
        display(source), "-o", OUT,
    )  # fmt: skip
    files = closure(source, (HERE,))
    digest = digest_of(files, [*command, str(compiler)])
    # The builds of one type are kept, however many other types there are.
    tag = f"host-{digest_of((), defined)}" if defined else "host"
    path = _library(source, tag, digest)
    return Target(source, "cpu", "Python", str(compiler), (command,), path, files)


@cache
def cpu_runtime() -> Target:
    """The library that runs the blocks and threads of every CPU kernel."""
    from common import cuda_on_cpu

    compiler = toolchain.cpp_compiler()
    sources = tuple(map(Path, cuda_on_cpu.RUNTIME_SOURCES))
    flags = _for_family(cuda_on_cpu.RUNTIME_FLAGS, compiler.family)
    # All sources as one: their common headers are read once, which takes a third of the time.
    includes = [word for source in sources for word in ("-include", display(source))]
    command = (
        compiler.path, *CPP_FLAGS, "-shared", *flags, f"-I{display(Path(cuda_on_cpu.INCLUDE))}",
        *includes, "-x", "c++", os.devnull, "-o", OUT,
    )  # fmt: skip
    digest = digest_of(sources, [*command, str(compiler), _layer_digest()])
    path = BUILD / f"libcuda_on_cpu.{digest}{_suffix()}"
    # The name under which the kernels' libraries look for it; _link_flags says where.
    if sys.platform == "darwin":
        command += ("-install_name", f"@rpath/{path.name}")
    else:
        command += (f"-Wl,-soname,{path.name}",)
    folder = sources[0].parent
    return Target(folder, "cpu", "the CPU", str(compiler), (command,), path, sources)


def closure(source: Path, folders: Iterable[Path]) -> tuple[Path, ...]:
    """``source`` and every header that it includes, directly or not, from its own folder or ``folders``."""
    found: dict[Path, None] = {}
    todo = [source]
    while todo:
        file = todo.pop()
        if file in found:
            continue
        found[file] = None
        for name in _INCLUDE.findall(read(file)):
            headers = (
                (folder / name).resolve() for folder in (file.parent, _folder(source), *folders)
            )
            todo += list(filter(Path.is_file, headers))[:1]
    return tuple(found)


def stands_in(source: Path) -> tuple[Path, int]:
    """The Python file that has the source as a string, and its line there; for other sources the source and 1."""
    written = source.is_relative_to(BUILD / "texts")
    found = _FIRST_OF_TEXT.match(read(source)) if written else None
    return (ROOT / found[2], int(found[1])) if found else (source, 1)


def _folder(source: Path) -> Path:
    """Where a source's own headers are."""
    return stands_in(source)[0].parent


def shown(source: Path) -> str:
    """What messages call a source."""
    return display(stands_in(source)[0])


def display(path: Path) -> str:
    """The path as a student types it: relative to the checkout's root, where the compilers run."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def _include_flags(source: Path) -> tuple[str, ...]:
    return (f"-I{display(_folder(source))}", f"-I{display(INCLUDE)}")


def mirror(path: Path) -> str:
    """The path of a file's rewritten copy below the tree."""
    return display(path).lstrip("/") or "."


def _library(source: Path, tag: str, digest: str) -> Path:
    source, _ = stands_in(source)
    inside = source.is_relative_to(ROOT)  # others belong to tests and experiments
    stem = display(source.with_suffix("")).replace("/", "-") if inside else f"outside-{source.stem}"
    return BUILD / f"{stem}.{tag}.{digest}{_suffix()}"


def _suffix() -> str:
    return ".dylib" if sys.platform == "darwin" else ".so"


def _link_flags() -> tuple[str, ...]:
    if sys.platform == "darwin":
        return ("-Wl,-rpath,@loader_path",)
    # $ORIGIN: the runtime is beside the library that needs it, wherever the checkout is moved.
    return ("-Wl,-rpath,$ORIGIN", "-Wl,-Bsymbolic")


def _own_symbols(family: str) -> tuple[str, ...]:
    """Without it g++ makes the statics of templates unique in the process, even between two builds of one kernel."""
    return ("-fno-gnu-unique",) if family == "gcc" and sys.platform != "darwin" else ()


def _for_family(flags: Sequence[str] | dict[str, Sequence[str]], family: str) -> Sequence[str]:
    return flags[family] if isinstance(flags, dict) else flags


def digest_of(files: Iterable[Path], words: Iterable[str]) -> str:
    """The hash of files, with their paths, and of words."""
    state = hashlib.sha256()
    for file in files:
        state.update(f"{display(file)}\0{read(file)}\0".encode())
    for word in words:
        state.update(f"{word}\0".encode())
    return state.hexdigest()[:16]


@cache
def _layer_digest() -> str:
    """The CPU layer itself: its headers, its runtime, and the program that rewrites sources for it."""
    folder = ROOT / "common/cuda_on_cpu"
    files = {p for p in folder.rglob("*") if p.suffix in (".py", ".h", ".cuh", ".hpp", ".cpp")}
    return digest_of(sorted(files), [toolchain.machine()])


def read(file: Path) -> str:
    """A source's text, whatever its bytes."""
    return file.read_text(encoding="utf-8", errors="surrogateescape")
