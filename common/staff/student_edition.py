"""The course without its answers: ``python -m common.staff.student_edition DIRECTORY``.

The edition is made from this checkout's own files; there is no second copy of a task.

- ``LEFT_OUT`` names the files and folders that it does not get.
- Lines between ``BEGIN SOLUTION`` and ``END SOLUTION`` become a placeholder: they are the answers.
- Lines between ``BEGIN STAFF`` and ``END STAFF`` are dropped: they point at something in ``LEFT_OUT``.

A mark is a comment on a line of its own: ``# BEGIN STAFF``, ``// BEGIN SOLUTION``, ``<!-- END STAFF -->``.
"""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

from common.paths import ROOT
from common.record import render

LEFT_OUT = (
    ".ci/",
    ".clang-format",
    "CONTRIBUTING.md",
    # What only the ladder needs of these packages.
    "common/check/hard_inputs.py",
    "common/check/launches.py",
    "common/check/loss.py",
    "common/record/chart.py",
    "common/record/grid.py",
    "common/record/typed.py",
    "common/timing/compare.py",
    "common/timing/counters.py",
    "common/timing/peers.py",
    "common/records/",  # the edition writes its own
    "common/staff/",
    "common/tests/",
    "task4/ladder/",  # faster kernels for task 4; without it custom_flash_attention runs the student's
    "task7/tiny_gpt2/corpus.py",
    "task7/tiny_gpt2/train.py",
    "task7/tiny_gpt2/training.json",
)
MARKED = (".py", ".cu", ".md", ".toml", "Makefile")  # how the names of files with marks end
_MARK = re.compile(
    r"^(?P<indent>\s*)(#|//|<!--)\s*(?P<edge>BEGIN|END) (?P<what>SOLUTION|STAFF)"
    r"(, (until then|for students): (?P<instead>.+?))?\s*(-->)?\s*$"
)
_ALMOST = re.compile(r"^\s*(#|//|<!--) .*(BEGIN|END) (SOLUTION|STAFF)")


class MarkError(ValueError):
    """A mark without its partner, with file and line."""


def cut(source: str, path: str) -> tuple[str, int]:
    """A file without its answers and without what is for staff.

    In Python an answer becomes ``raise NotImplementedError("... is not written yet")``, in CUDA a comment. Where an
    optional part must not stop the others, ``BEGIN SOLUTION, until then: return 1`` names the line instead. Lines for
    staff are dropped, or replaced where ``BEGIN STAFF, for students: return 1`` names a line. The rest of the file is
    unchanged.

    Returns:
        The text, and how many answers were cut out of it.

    Raises:
        MarkError: marks that do not pair up.
    """
    kept: list[str] = []
    begun: tuple[str, int] | None = None  # what is being cut, and the line on which it begins
    answers = 0
    for number, line in enumerate(source.splitlines(keepends=True), start=1):
        mark = _MARK.match(line)
        if mark is None:
            if _ALMOST.match(line):
                raise MarkError(
                    f"{path}:{number}: a mark stands alone on its line; got {line.strip()!r}"
                )
            if begun is None:
                kept.append(line)
        elif mark["edge"] == "BEGIN":
            if begun is not None:
                raise MarkError(
                    f"{path}:{number}: BEGIN {mark['what']} inside BEGIN {begun[0]} (line {begun[1]})"
                )
            begun = (mark["what"], number)
            instead = mark["instead"]
            if mark["what"] == "SOLUTION":
                answers += 1
                instead = instead or _placeholder(path, kept, mark["indent"])
            if instead:
                kept.append(f"{mark['indent']}{instead}\n")
        elif begun is None or begun[0] != mark["what"]:
            raise MarkError(f"{path}:{number}: END {mark['what']} without BEGIN {mark['what']}")
        else:
            begun = None
    if begun is not None:
        raise MarkError(f"{path}:{begun[1]}: BEGIN {begun[0]} without END {begun[0]}")
    return "".join(kept), answers


def _placeholder(path: str, before: list[str], indent: str) -> str:
    if not path.endswith(".py"):
        return "// YOUR CODE HERE"
    name, width = [], len(indent)
    for line in reversed(before):
        found = re.match(r"(\s*)(?:def|class)\s+(\w+)", line)
        if found and len(found[1]) < width:
            name.insert(0, found[2])
            width = len(found[1])
    return f'raise NotImplementedError("{".".join(name)} is not written yet")'


def make(destination: Path) -> dict[str, int]:
    """Write the student edition into a new or empty directory.

    Returns:
        How many answers were cut out of each file that had any.

    Raises:
        FileExistsError: the directory has something in it.
        MarkError: marks that do not pair up; nothing is written.
    """
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise FileExistsError(f"{destination} must be a new or an empty directory")
    texts: dict[str, str] = {}
    answers: dict[str, int] = {}
    files = [f for f in tracked_files() if not f.startswith(LEFT_OUT)]
    for file in files:
        if file.endswith(MARKED):
            texts[file], count = cut((ROOT / file).read_text(encoding="utf-8"), file)
            if count:
                answers[file] = count
    texts["Results.md"] = render(texts["Results.md"], {}, root=ROOT)  # no results yet
    for file in files:
        target = destination / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, target)
        if file in texts:
            target.write_text(texts[file], encoding="utf-8")
    return answers


def tracked_files() -> list[str]:
    """Paths of the files that git tracks or would track; without git, all but what was built."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode == 0:
        return sorted(f for f in listed.stdout.split("\0") if f and (ROOT / f).is_file())
    hidden = (".venv", ".build", ".git", "__pycache__")
    found = (p.relative_to(ROOT) for p in ROOT.rglob("*") if p.is_file())
    return sorted(p.as_posix() for p in found if not set(p.parts) & set(hidden))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m common.staff.student_edition", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "directory", type=Path, help="where to write it: a new or an empty directory"
    )
    destination = parser.parse_args().directory
    try:
        answers = make(destination)
    except (MarkError, FileExistsError) as error:
        sys.exit(f"error: {error}")
    for file, count in answers.items():
        print(f"{file}: {count} to write")
    print(f"{sum(answers.values())} answers cut; the student edition is in {destination}")


if __name__ == "__main__":
    main()
