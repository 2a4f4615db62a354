"""From .cu files to shared libraries in ``.build/``, built once and shared by every process of this checkout.

Each build works in a folder of its own, and a library gets its name by an atomic rename: a build that is killed leaves
only an unused folder, and two builds at the same time make the same file twice. There is no lock. ninja runs as many
compilers at once as there are cores.
"""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.build import planner, toolchain
from common.build.planner import OBJECT, OUT, TREE, Target, display
from common.build.toolchain import BuildError
from common.paths import ROOT

# What .build/ keeps of one source for one device: the last builds, so that going back costs nothing, and all that were
# used in the last minutes, because a process may be about to load one.
KEEP = 12
YOUNG = 600
STALE = 24 * 3600  # seconds after which the working folder of a killed build is removed
UNUSED = 30 * STALE  # seconds after which a written text is removed
ROOM = 16 << 20  # bytes that a build may take: mostly the compiler's temporary files


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
    targets = [planner.plan(source, device, check=check, arch=arch) for source in sources]
    make(targets, verbose=verbose)
    return [target.path for target in targets]


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
        raise BuildError(f"cannot build in {planner.BUILD}: {error.strerror}") from None
    return [Built(t, seconds.get(t), t.log.read_text() if t.log.exists() else "") for t in wanted]


def _run(missing: Sequence[Target], verbose: bool) -> dict[Target, float]:
    ninja = toolchain.find_ninja()
    planner.BUILD.mkdir(exist_ok=True)
    _tidy()
    with tempfile.TemporaryDirectory(prefix="work-", dir=planner.BUILD) as folder:
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
    ours = planner.BUILD if planner.BUILD.exists() else ROOT
    for folder in (ours, Path(os.environ.get("TMPDIR") or "/tmp")):
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
        copy = tree / (planner.mirror(file) + (".cpp" if file == target.source else ""))
        copy.parent.mkdir(parents=True, exist_ok=True)
        named, line = planner.stands_in(file)
        text = planner.read(file)
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
        copy = f"{tree}/{planner.mirror(file)}"
        said = said.replace(f"{copy}.cpp", display(file)).replace(copy, display(file))
    for product in (OUT, OBJECT):
        said = said.replace(product.format(work=place), planner.shown(target.source))
    return said.replace(display(target.source), planner.shown(target.source))


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
    builds = sorted((p for p in planner.BUILD.iterdir() if same.fullmatch(p.name)), key=_age)
    for path in builds[KEEP:]:
        if _age(path) > YOUNG:
            path.unlink(missing_ok=True)
            path.with_suffix(".log").unlink(missing_ok=True)


def _tidy() -> None:
    """Remove the working folders of builds that were killed, and old texts."""
    for pattern, seconds in (("work-*", STALE), ("texts/*", UNUSED)):
        for path in planner.BUILD.glob(pattern):
            if _age(path) > seconds:
                shutil.rmtree(path, ignore_errors=True)


def _age(path: Path) -> float:
    """Seconds since the last use; 0 if another process has just removed it."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


# ---- sources that are strings


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
    begins = planner.read(file).find(text) if file.is_file() else -1
    if begins < 0:
        first = f'#line 1 "{display(file)} (text)"\n'
    else:
        line = planner.read(file).count("\n", 0, begins) + 1
        first = f'#line {line} "{display(file)}"\n'
    # Named by its contents: another process never finds a text that it did not write.
    folder = planner.BUILD / "texts" / planner.digest_of((), (first, text))
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
