"""From .cu files to shared libraries in ``.build/``, built once and shared by every process of this checkout.

A library's file name contains the hash of everything that it is made from: its sources with all the headers of this
repository that they include, the flags, the compilers. So a library is up to date if its file exists. Each build works
in a folder of its own, and a library gets its name by an atomic rename: a build that is killed leaves only an unused
folder, and two builds at the same time make the same file twice. There is no lock. ninja runs as many compilers at once
as there are cores.
"""

import contextlib
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
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

# What .build/ keeps of one source for one device: the last builds, so that going back costs nothing, and all that were
# used in the last minutes, because a process may be about to load one.
KEEP = 12
YOUNG = 600
STALE = 24 * 3600  # seconds after which the working folder of a killed build is removed
UNUSED = 30 * STALE  # seconds after which a written text is removed
ROOM = 16 << 20  # bytes that a build may take: mostly the compiler's temporary files

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


@dataclass(frozen=True)
class Built:
    """A target that is built: ``seconds`` is None if it was up to date, ``said`` is the compiler's output."""

    target: Target
    seconds: float | None
    said: str


def build(
    sources: Sequence[Path],
    device: str = "cpu",
    *,
    check: bool = False,
    arch: str | None = None,
    verbose: bool = False,
) -> list[Path]:
    """Build what is not there yet and return the libraries, one for each source.

    Args:
        sources: .cu files, or .cpp files for the CPU.
        device: ``"cpu"`` (through common.cuda_on_cpu) or ``"cuda"``.
        check: for the CPU: the build that finds races and accesses out of bounds.
        arch: for CUDA: ``"sm_90a"``; default: this machine's GPU.
        verbose: print the commands.

    Raises:
        BuildError: something does not compile (with the compiler's output), or there is no compiler.
    """
    targets = [plan(source, device, check=check, arch=arch) for source in sources]
    make(targets, verbose=verbose)
    return [target.path for target in targets]


# ---- what to build


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
            raise BuildError(f"{_shown(source)} is C++ for the CPU, and not for {device}")
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
    head = "\n".join(_text(source).splitlines()[:_HEAD])
    found = _ARCHITECTURES.search(head)
    return found[1].split() if found else []


def _made_for(source: Path, named: Sequence[str]) -> str:
    return f"{_shown(source)} is for {' and '.join(named)} alone"


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
    digest = _digest(files, [*sum(commands, ()), nvcc.release, str(host), toolchain.machine()])
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
    includes = [f"-I{TREE}/{_mirror(folder)}" for folder in (_folder(source), INCLUDE)]
    commands = (
        (
            compiler.path, *CPP_FLAGS, *flags, *_own_symbols(compiler.family), *includes, f"-I{layer}",
            "-c", f"{TREE}/{_mirror(source)}.cpp", "-o", OBJECT,
        ),
        # Linked separately: with -fsanitize=thread the compiler would link the sanitizer's own library.
        (compiler.path, "-shared", OBJECT, display(runtime.path), *_link_flags(), "-o", OUT),
    )  # fmt: skip
    digest = _digest(files, [*sum(commands, ()), str(compiler), _layer_digest()])
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
    path = _library(source, "cpu", _digest(files, words))
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
    digest = _digest(files, [*command, str(compiler)])
    # The builds of one type are kept, however many other types there are.
    tag = f"host-{_digest((), defined)}" if defined else "host"
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
    digest = _digest(sources, [*command, str(compiler), _layer_digest()])
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
        for name in _INCLUDE.findall(_text(file)):
            headers = (
                (folder / name).resolve() for folder in (file.parent, _folder(source), *folders)
            )
            todo += list(filter(Path.is_file, headers))[:1]
    return tuple(found)


def write_text(file: Path, text: str, suffix: str) -> Path:
    """Write a source that is a string in a Python file, below ``.build/texts/``, and return where.

    Its first line is a ``#line`` that names the Python file and the string's line in it, so that compilers and
    profilers point there. A string that is not in the file as it is (an f-string, an escape) counts its own lines.

    Args:
        file: the Python file. The source includes headers from its folder.
        text: the source.
        suffix: ``".cu"`` or ``".cpp"``.

    Raises:
        BuildError: it cannot be written.
    """
    begins = _text(file).find(text) if file.is_file() else -1
    if begins < 0:
        first = f'#line 1 "{display(file)} (text)"\n'
    else:
        line = _text(file).count("\n", 0, begins) + 1
        first = f'#line {line} "{display(file)}"\n'
    # Named by its contents: another process never finds a text that it did not write.
    folder = BUILD / "texts" / _digest((), (first, text))
    path = folder / file.parent.name / f"{file.stem}{suffix}"
    try:
        if path.exists():
            with contextlib.suppress(OSError):
                os.utime(folder)  # used: not removed by _tidy()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            scratch = path.with_name(f".{path.name}.{os.getpid()}")
            scratch.write_text(first + text, encoding="utf-8")
            os.replace(scratch, path)
    except OSError as error:
        raise BuildError(f"cannot write {display(path)}: {error.strerror}") from None
    return path


def _stands_in(source: Path) -> tuple[Path, int]:
    """The Python file that has the source as a string, and its line there; for other sources the source and 1."""
    written = source.is_relative_to(BUILD / "texts")
    found = _FIRST_OF_TEXT.match(_text(source)) if written else None
    return (ROOT / found[2], int(found[1])) if found else (source, 1)


def _folder(source: Path) -> Path:
    """Where a source's own headers are."""
    return _stands_in(source)[0].parent


def _shown(source: Path) -> str:
    """What messages call a source."""
    return display(_stands_in(source)[0])


def display(path: Path) -> str:
    """The path as a student types it: relative to the checkout's root, where the compilers run."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def _include_flags(source: Path) -> tuple[str, ...]:
    return (f"-I{display(_folder(source))}", f"-I{display(INCLUDE)}")


def _mirror(path: Path) -> str:
    """The path of a file's rewritten copy below the tree."""
    return display(path).lstrip("/") or "."


def _library(source: Path, tag: str, digest: str) -> Path:
    source, _ = _stands_in(source)
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


def _digest(files: Iterable[Path], words: Iterable[str]) -> str:
    state = hashlib.sha256()
    for file in files:
        state.update(f"{display(file)}\0{_text(file)}\0".encode())
    for word in words:
        state.update(f"{word}\0".encode())
    return state.hexdigest()[:16]


@cache
def _layer_digest() -> str:
    """The CPU layer itself: its headers, its runtime, and the program that rewrites sources for it."""
    folder = ROOT / "common/cuda_on_cpu"
    files = {p for p in folder.rglob("*") if p.suffix in (".py", ".h", ".cuh", ".hpp", ".cpp")}
    return _digest(sorted(files), [toolchain.machine()])


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="surrogateescape")


# ---- building it


def make(targets: Sequence[Target], *, verbose: bool = False) -> list[Built]:
    """Build the targets that do not exist yet, with what they need, and report on all.

    Raises:
        BuildError: at least one did not compile, the others are built all the same; or there is no room to build in.
    """
    wanted = list(dict.fromkeys(t for target in targets for t in (*target.needs, target)))
    missing = [target for target in wanted if not target.path.exists()]
    for target in wanted:
        if target not in missing:
            _touch(target)
    try:
        seconds = _run(missing, verbose) if missing else {}
    except OSError as error:
        raise BuildError(f"cannot build in {BUILD}: {error.strerror}") from None
    return [Built(t, seconds.get(t), t.log.read_text() if t.log.exists() else "") for t in wanted]


def _run(missing: Sequence[Target], verbose: bool) -> dict[Target, float]:
    ninja = toolchain.find_ninja()
    BUILD.mkdir(exist_ok=True)
    _tidy()
    with tempfile.TemporaryDirectory(prefix="work-", dir=BUILD) as folder:
        work = Path(folder)
        places = {t: str(work / str(i)) for i, t in enumerate(missing)}
        for target, place in places.items():
            _rewrite(target, place)
        lines = {t: _lines(t, place) for t, place in places.items()}
        _write_ninja_file(work, lines, places)
        if verbose:
            print("\n".join(sum(lines.values(), [])), flush=True)
        # -k 0: a kernel that does not compile does not keep the others from being built.
        done = subprocess.run(
            [ninja, "--quiet", "-k", "0", "-f", str(work / "build.ninja")],
            cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        if done.returncode:
            check_disk()  # compilers do not all say what went wrong
            said = [_words(t, place) for t, place in places.items() if not t.path.exists()]
            said = "\n".join(filter(None, said)) or f"the build stopped:\n{done.stdout.strip()}"
            raise BuildError(said)
        times = _times(work)
    for target, place in places.items():
        _keep_words(target, place)
        _prune(target)
    return {t: times.get(display(t.path), 0.0) for t in missing}


def check_disk() -> None:
    """See that there is room to build in: in this checkout, and where compilers keep their temporary files.

    Raises:
        BuildError: a disk is full, or a folder cannot be written.
    """
    for folder in (BUILD if BUILD.exists() else ROOT, Path(os.environ.get("TMPDIR") or "/tmp")):
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(ROOM))
        except OSError as error:
            reason = f"cannot write {ROOM >> 20} MB into {folder}: {error.strerror}"
            raise BuildError(reason) from None


def _rewrite(target: Target, place: str) -> None:
    """For the CPU: write the rewritten source and headers where the command expects them."""
    tree = Path(TREE.format(work=place))
    if not any(TREE in word for command in target.commands for word in command):
        return
    from common.cuda_on_cpu import rewrite

    for file in target.files:
        copy = tree / (_mirror(file) + (".cpp" if file == target.source else ""))
        copy.parent.mkdir(parents=True, exist_ok=True)
        named, line = _stands_in(file)
        text = _text(file)
        if named != file:  # empty lines in place of #line, so that the rewriter counts right
            text = "\n" * (line - 1) + text.partition("\n")[2]
        try:
            text = rewrite(text, display(named))
        except (ValueError, SyntaxError) as error:
            raise BuildError(str(error)) from None
        copy.write_text(text, encoding="utf-8", errors="surrogateescape")


def _lines(target: Target, place: str) -> list[str]:
    return [
        shlex.join(word.replace("{work}", place) for word in command) for command in target.commands
    ]


def _write_ninja_file(
    work: Path, lines: dict[Target, list[str]], places: dict[Target, str]
) -> None:
    from ninja import Writer, escape

    with (work / "build.ninja").open("w", encoding="utf-8") as file:
        out = Writer(file, width=sys.maxsize)  # a wrapped line loses spaces
        out.variable("builddir", escape(display(work)))
        out.rule("compile", command="$line", description="$out")
        for target, place in places.items():
            log, log_to, built, built_to = (
                shlex.quote(str(p))
                for p in (f"{place}.log", target.log, OUT.format(work=place), target.path)
            )
            compile = f"{{ {' && '.join(lines[target])}; }} > {log} 2>&1"
            line = f"{compile} && mv -f {log} {log_to} && mv -f {built} {built_to}"
            needs = [display(t.path) for t in target.needs if t in places]
            out.build(
                display(target.path), "compile", order_only=needs, variables={"line": escape(line)}
            )


def _times(work: Path) -> dict[str, float]:
    """Seconds that each library took, from ninja's own log: start and end in ms, mtime, output, hash."""
    lines = (work / ".ninja_log").read_text().splitlines()
    rows = [line.split("\t") for line in lines if not line.startswith("#")]
    return {row[3]: (int(row[1]) - int(row[0])) / 1000 for row in rows if len(row) == 5}


def _words(target: Target, place: str) -> str:
    log = Path(f"{place}.log")
    return (
        readable(_of_originals(log.read_text(errors="replace"), target, place))
        if log.exists()
        else ""
    )


def _keep_words(target: Target, place: str) -> None:
    """The log of a library that was built has warnings, and those may name the copies."""
    with contextlib.suppress(OSError):  # another process prunes
        if place in (said := target.log.read_text(errors="replace")):
            target.log.write_text(_of_originals(said, target, place))


def _of_originals(said: str, target: Target, place: str) -> str:
    """A compiler's or linker's output with the names of our files instead of their copies in the working folder."""
    tree = TREE.format(work=place)
    for file in target.files:
        copy = f"{tree}/{_mirror(file)}"
        said = said.replace(f"{copy}.cpp", display(file)).replace(copy, display(file))
    for product in (OUT, OBJECT):
        said = said.replace(product.format(work=place), _shown(target.source))
    return said.replace(display(target.source), _shown(target.source))


def readable(said: str) -> str:
    """A compiler's output without the lines about resources.

    g++ shows the student's line but counts columns in the rewritten one: its marks below the line are left out where
    they would point past the end.
    """
    lines: list[str] = []
    shown = 0  # length of the source line last shown
    for line in said.splitlines():
        if _RESOURCES.match(line):
            continue
        if match := _MARKS.fullmatch(line):
            if len(line.rstrip()) > shown and match["marks"].strip():
                continue
        elif _QUOTED.match(line):
            shown = len(line)
        lines.append(line)
    return "\n".join(lines).strip("\n")


# ptxas also reports performance losses as "info", such as wgmma that it serialises; those have a number, (C7515).
_RESOURCES = re.compile(r"ptxas info(?! *: \(C)|\s+\d+ bytes stack frame")
_QUOTED = re.compile(r"\s*\d+ \| ")
_MARKS = re.compile(r"\s+\| (?P<marks>[ ~^|\w:()<>*&]*)")


# ---- keeping .build/ small


def _touch(target: Target) -> None:
    """Mark as used, so that it is not pruned. Must not fail in a read-only checkout."""
    with contextlib.suppress(OSError):
        os.utime(target.path)


def _prune(target: Target) -> None:
    """Remove all but the last used builds of one source for one device. Libraries in use remain mapped."""
    stem = target.path.name.removesuffix(target.path.suffix).rpartition(".")[0]
    same = re.compile(re.escape(stem) + r"\.[0-9a-f]{16}" + re.escape(target.path.suffix))
    builds = sorted((p for p in BUILD.iterdir() if same.fullmatch(p.name)), key=_age)
    for path in builds[KEEP:]:
        if _age(path) > YOUNG:
            path.unlink(missing_ok=True)
            path.with_suffix(".log").unlink(missing_ok=True)


def _tidy() -> None:
    """Remove the working folders of builds that were killed, and old texts."""
    for pattern, seconds in (("work-*", STALE), ("texts/*", UNUSED)):
        for path in BUILD.glob(pattern):
            if _age(path) > seconds:
                shutil.rmtree(path, ignore_errors=True)


def _age(path: Path) -> float:
    """Seconds since the last use; 0 if another process has just removed it."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0
