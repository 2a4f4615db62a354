"""Which loops of a C++ file the compiler turned into vector instructions, as it says itself."""

import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from common.build import BuildError, planner, toolchain
from common.paths import ROOT

FLAGS = {
    "gcc": ("-fopt-info-vec-all",),
    "clang": tuple(f"-Rpass{kind}=loop-vectorize" for kind in ("", "-missed", "-analysis")),
}
SECONDS = 120
UNSEEN = "not mentioned: unrolled or removed before the vectoriser saw it"
_LOOP = re.compile(r"\s*(for|while) ?\(")
_SAID = re.compile(r"(?P<file>[^:\s]+):(?P<line>\d+):\d+: (?P<kind>\w+): (?P<text>.*)")


@dataclass(frozen=True)
class Loop:
    """A loop of a source: ``file:line``, its text, and what the compiler did."""

    place: str
    source: str
    verdict: str


def loops(source: Path) -> list[Loop]:
    """The loops of a .cpp, built as common.build builds it.

    Raises:
        BuildError: there is no compiler, or it refuses.
    """
    family = toolchain.cpp_compiler().family
    verdicts = read(family, _compile(source, FLAGS[family]), planner.display(source))
    lines = source.read_text(encoding="utf-8").splitlines()
    return [
        Loop(f"{source.name}:{number}", line.strip(), verdicts.get(number, UNSEEN))
        for number, line in enumerate(lines, start=1)
        if _LOOP.match(line)
    ]


def _compile(source: Path, flags: Iterable[str]) -> str:
    (command,) = planner.plan(source, "cpu").commands
    shared = [word for word in command if word not in ("-shared", "-o", planner.OUT)]
    done = subprocess.run(
        [*shared, *flags, "-S", "-o", "/dev/null"],
        cwd=ROOT, capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    if done.returncode:
        raise BuildError(done.stderr.strip())
    return done.stderr


def read(family: str, said: str, file: str) -> dict[int, str]:
    """What happened to the loop in each line of a file.

    A loop may be compiled several times: inlined, for other types, for strides of 1. ``some copies`` says that not all
    of them became vectors; the reason is that of the first which did not.

    Args:
        family: "gcc" or "clang".
        said: the compiler's output with ``FLAGS``.
        file: as the compiler names it.
    """
    outcomes: dict[int, list[tuple[bool, str]]] = {}
    for line, done, text in (_gcc if family == "gcc" else _clang)(said.splitlines(), file):
        outcomes.setdefault(line, []).append((done, text))
    return {line: _verdict(found) for line, found in outcomes.items()}


def _verdict(outcomes: list[tuple[bool, str]]) -> str:
    done = [text for vectorised, text in outcomes if vectorised]
    missed = [text for vectorised, text in outcomes if not vectorised]
    if not done:
        return f"no: `{missed[0]}`"
    return f"{done[0]}; not in some copies: `{missed[0]}`" if missed else done[0]


def _gcc(lines: list[str], file: str) -> Iterator[tuple[int, bool, str]]:
    waiting: int | None = None  # the line of the loop whose reason comes next
    for i, text in enumerate(lines):
        if not (said := _SAID.match(text)):
            continue
        here = int(said["line"]) if said["file"] == file else None
        if done := re.match(r"loop vectorized using (\d+) byte vectors", said["text"]):
            if here:  # the first is the loop, smaller ones are what it leaves
                yield here, True, f"yes, {done[1]} bytes"
        elif said["text"].startswith("couldn't vectorize loop"):
            waiting = here
        elif waiting and (reason := re.match(r"not vectorized: (.*?)\.?$", said["text"])):
            following = lines[i + 1] if i + 1 < len(lines) else ""
            vectors = re.search(r"scalar_type: (Vector|Integers|(struct )?Row)\b", following)
            yield waiting, False, "its numbers are vectors already" if vectors else reason[1]
            waiting = None


def _clang(lines: list[str], file: str) -> Iterator[tuple[int, bool, str]]:
    reason = ""
    for said in filter(None, map(_SAID.match, lines)):
        text = re.sub(r" \[-Rpass[\w=-]*\]$", "", said["text"])
        if why := re.match(r"loop not vectorized: (.*)", text):
            reason = why[1].partition(";")[0]  # it may name a line inside of the loop
        elif said["file"] != file:
            continue
        elif done := re.match(r"vectorized loop \(vectorization width: (\d+)", text):
            yield int(said["line"]), True, f"yes, {done[1]} numbers"
        elif text == "loop not vectorized":
            yield int(said["line"]), False, reason or "no reason given"
            reason = ""
