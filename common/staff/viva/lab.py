"""A student's code in the judge's sandbox, with changes, or counted by the check build."""

import importlib
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from common import child, regions
from common.build import BuildError, KernelError, Kernels, observing, toolchain, using
from common.build.cli import resources
from common.check import CheckFailed
from common.check.case import Item
from common.check.failure import failure_of
from common.check.hints import load, pieces_of
from common.paths import ROOT
from common.regions import Region
from common.staff.judge import sandbox
from common.staff.judge.remote import BUILD, ForkServer, Worker

LIMIT = 10.0  # seconds for a case
FOUND = ("wrong", "kernel")  # categories of a failure that says something
COPIES = "viva"  # the folder with the changed files, in the student's edition
_WHOLE = '#pragma GCC optimize("no-tree-sra")'  # g++ then accesses a float4 as a whole, and not as four floats


@dataclass(frozen=True)
class Written:
    """A region that the student wrote in, and the text of its file."""

    stage: str
    file: str
    region: Region
    text: str = field(repr=False)

    @property
    def function(self) -> str:
        return self.region.function

    def line_text(self, number: int) -> str:
        """A line of the file; empty if there is none."""
        lines = regions.split(self.text)
        return lines[number - 1].rstrip("\n") if 0 < number <= len(lines) else ""

    def lines(self) -> Iterator[tuple[int, str]]:
        """The number and text of each line of the region."""
        return enumerate(regions.split(self.region.lines), self.region.begin + 1)

    def first(self, *patterns: str) -> int:
        """The first line with the first of these patterns that is found anywhere; else the first line with code."""
        for pattern in (*patterns, r"\w"):
            for number, line in self.lines():
                if re.search(pattern, line.partition("//")[0].partition("#")[0]):
                    return number
        return self.region.begin + 1


def written(student: Path) -> list[Written]:
    """What is written in an edition; this process runs in one in which nothing is."""
    found = []
    for stage in (f"task{n}" for n in range(1, 6)):
        for file in dict.fromkeys(piece.file for piece in load(stage)):
            text = (student / file).read_text(encoding="utf-8")
            empty = regions.regions((ROOT / file).read_text(encoding="utf-8"), file)
            for own, given in zip(regions.regions(text, file), empty, strict=True):
                if own.lines != given.lines:
                    found.append(Written(stage, file, own, text))
    return found


class Access(NamedTuple):
    """What a line does in shared memory, summed over the warps of one block.

    ``helper`` is the line of the function that it calls for it, if that is in the same file.
    """

    line: int
    helper: int | None
    verb: str  # "reads" or "writes"
    bytes: int  # of a thread
    instructions: int
    passes: int
    least: int  # passes if there were no conflicts


class Launch(NamedTuple):
    """One kernel as counted by the check build; ``barriers`` by block index."""

    kernel: str
    threads: int
    static: int  # bytes of shared memory of a block
    dynamic: int
    barriers: dict[tuple[int, ...], int]
    accesses: list[Access]


class Lab:
    """Runs a student's code. The files of all changes are there before the sandbox takes its copy of the folder.

    Args:
        student: an edition with what the student wrote; changed files are added to it.
        hide: folders that the student's code must not see.
        seed: of the random inputs.
    """

    def __init__(self, student: Path, hide: Sequence[Path], seed: int) -> None:
        self.student, self.seed = student, seed
        self._sandbox = sandbox.command(student, hide)
        self._server = ForkServer(student, self._sandbox)
        self._worker = Worker(self._server)
        self._folder, self._file = "", ""
        self._copies = 0
        self._known: dict[tuple[str, ...], Any] = {}

    def close(self) -> None:
        """End the student's process."""
        self._worker.close()
        self._server.close()

    def ask(self, seconds: float, kind: str, first: str, *rest: Any) -> Any:
        """:meth:`Worker.ask`, of the changed file while there is one."""
        if self._folder:
            module = self._file.removesuffix(".py").replace("/", ".")
            if kind == "call" and first == module:
                first = f"{self._folder.replace('/', '.')}.{first}"
            elif first == self._file:
                first = f"{self._folder}/{first}"
        return self._worker.ask(seconds, kind, first, *rest)

    def add(self, file: str, text: str) -> str:
        """Keep a changed file; the folder that :meth:`changed` takes."""
        folder = f"{COPIES}/c{self._copies}"
        self._copies += 1
        path = self.student / folder / file
        path.parent.mkdir(parents=True)
        path.write_text(text, encoding="utf-8")
        return folder

    def add_counted(self, file: str, text: str) -> str:
        """The same for a file whose accesses are to be counted."""
        first, _, rest = text.partition("\n")
        return self.add(file, f"{_WHOLE}\n{rest}" if first.startswith("//") else text)

    @contextmanager
    def changed(self, folder: str, file: str) -> Iterator[None]:
        """A context in which this file is the one in that folder."""
        self._folder, self._file = folder, file
        try:
            yield
        finally:
            self._folder = self._file = ""

    def once(self, key: tuple[str, ...], compute: Callable[[], Any]) -> Any:
        """What this computes, computed once for each key."""
        if key not in self._known:
            self._known[key] = compute()
        return self._known[key]

    # ---- checks

    def failure(self, code: Written) -> tuple[str, str]:
        """The category and text of the first failure among the checks of a function; empty if all pass."""
        items = self.items(code)
        try:
            if code.file.endswith(".cu"):
                with using(check=True):
                    self.ask(BUILD, "build", code.file)
        except BuildError as error:
            return "build", self.plain(str(error))
        except CheckFailed as error:
            return "bug", self.plain(str(error))
        for item in items:
            try:
                item.run(self.seed, LIMIT)
            except Exception as error:
                failure = failure_of(error, item, self.seed, rerun=False)
                return failure.category, self.plain(failure.text)
        return "", ""

    def items(self, code: Written) -> list[Item]:
        """The cases that say whether a function is right: of a kernel, the small ones in the check build."""
        suite = importlib.import_module(f"{code.stage}.test").suite
        groups = next(p.groups for p in pieces_of(code.file) if p.name == code.function)
        target = "cpu-check" if code.file.endswith(".cu") else "cpu"
        return [item for item in suite.items([target]) if item.check.group in groups]

    def unchanged(self, code: Written) -> tuple[str, str]:
        """:meth:`failure` of what the student wrote, as it is."""
        return self.once(("unchanged", code.file, code.function), lambda: self.failure(code))

    def plain(self, text: str) -> str:
        """Without the folders of changed files, and without the command that a student would repeat."""
        text = re.sub(rf"{COPIES}/c\d+/", "", text)
        return re.sub(r"\n\s*again: [^\n]*", "", text).strip()

    # ---- counted launches

    def count(self, folder: str, file: str, call: Callable[[], object]) -> Launch | None:
        """The one launch of a call, counted; None if it fails."""
        found: list[Launch | None] = []

        def seen(kernels: Kernels, name: str, arguments: Any, launch: Any) -> None:
            source = kernels.source.relative_to(ROOT).as_posix()
            _, answer = self.ask(BUILD, "launch", source, name, dict(arguments))
            found.append(_launch(answer.get("counts"), file, self.plain))

        counting = using(check=True, count=True, limit=LIMIT)
        try:
            with self.changed(folder, file), counting, observing(seen):
                self.ask(BUILD, "build", file)
                call()
        except (BuildError, KernelError, CheckFailed, ValueError, TypeError):
            return None
        return found[0] if len(found) == 1 else None

    # ---- registers

    def registers(self, file: str) -> dict[str, int]:
        """Registers per thread of each kernel of a file, for sm_80, by its name as C++ has it; empty without nvcc."""
        return self.once(("registers", file), lambda: self._compiled(file))

    def _compiled(self, file: str) -> dict[str, int]:
        try:
            nvcc = toolchain.nvcc_for("sm_80")
        except BuildError:
            return {}
        command = [nvcc.path, *nvcc.flags, "-cubin", "-arch=sm_80", "-O3", "-std=c++17"]
        command += ["-Xptxas", "-v", "-I", "common/include", file, "-o", "/dev/null"]
        lines: list[str] = []
        quiet = ["sh", "-c", f"exec {shlex.join(command)} 2>&1"]
        child.run([*self._sandbox, *quiet], BUILD, lines.append, cwd=self.student)
        found = (
            re.match(r"(?:void )?(.+?)\(.*: (\d+) registers", line)
            for line in resources("\n".join(lines))
        )
        return {match[1]: int(match[2]) for match in found if match and len(match[1]) < 200}


def _launch(counts: Any, file: str, plain: Callable[[str], str]) -> Launch | None:
    """What the student's process says of a launch of one kernel; what is not of the right form is left out."""
    barriers: dict[tuple[int, ...], int] = {}
    accesses: list[Access] = []
    kernels: list[list[str]] = []
    place = re.compile(rf"{re.escape(file)}:(\d{{1,6}})(?: \(in [^()]*line (\d{{1,6}})\))?")
    for line in counts if type(counts) is list else ():
        word, *fields = plain(line).split("|") if type(line) is str else [""]
        if word == "kernel" and _numbers(fields[1:], 3):
            kernels.append(fields)
        elif word == "block" and len(fields) == 2 and _numbers([*fields[0].split(), fields[1]], 4):
            barriers[tuple(map(int, fields[0].split()))] = int(fields[1])
        elif word == "shared" and len(fields) == 6 and _numbers(fields[2:], 4):
            at, verb = place.fullmatch(fields[0]), fields[1]
            if at and verb in ("reads", "writes"):
                helper = int(at[2]) if at[2] else None
                accesses.append(Access(int(at[1]), helper, verb, *map(int, fields[2:])))
    if len(kernels) != 1:
        return None
    name, *numbers = kernels[0]
    return Launch(name[:100], *map(int, numbers), barriers, accesses)


def _numbers(fields: Sequence[str], count: int) -> bool:
    return len(fields) == count and all(re.fullmatch(r"\d{1,15}", text) for text in fields)


def by_line(accesses: Sequence[Access]) -> dict[int, list[Access]]:
    """The accesses of each line; those that are alike are added up."""
    found: dict[int, dict[tuple, Access]] = defaultdict(dict)
    for access in accesses:
        key = access[:4]
        old = found[access.line].get(key)
        sums = [a + b for a, b in zip(old[4:], access[4:], strict=True)] if old else access[4:]
        found[access.line][key] = Access(*key, *sums)
    return {line: list(same.values()) for line, same in found.items()}
