"""The course without its answers: ``python -m common.staff.student_edition DIRECTORY``.

What stands between ``BEGIN SOLUTION`` and ``END SOLUTION`` is cut out of every .py and .cu file of this checkout, and
what is only for instructors is left behind. There is no second copy of a task: the student edition is made from the
answers' own files, and is what they are outside of the marks.
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
    "common/staff/",
    "common/tests/",
    "common/records/",
    ".ci/",
    "task4/ladder/",  # answers to task 4, and more; without it custom_flash_attention runs the student's kernel
)
BEGIN, END = "BEGIN SOLUTION", "END SOLUTION"
_MARK = re.compile(
    rf"^(?P<indent>\s*)(#|//)\s*(?P<word>{BEGIN}|{END})(, until then: (?P<until>.+?))?\s*$"
)


class MarkError(ValueError):
    """A solution mark without its partner, with file and line."""


def cut(source: str, path: str) -> tuple[str, int]:
    """A file without its answers.

    In Python an answer becomes ``raise NotImplementedError("... is not written yet")``, in CUDA a comment, and what
    stands behind ``BEGIN SOLUTION, until then:`` where the optional part of a task must not stop the others. The rest
    of the file is unchanged.

    Returns:
        The text, and how many answers were cut out of it.

    Raises:
        MarkError: marks that do not pair up.
    """
    kept: list[str] = []
    begun, answers = 0, 0
    for number, line in enumerate(source.splitlines(keepends=True), start=1):
        mark = _MARK.match(line)
        if mark is None:
            if (BEGIN in line or END in line) and line.lstrip().startswith(("# ", "// ")):
                raise MarkError(
                    f"{path}:{number}: a solution mark stands alone on its line; got {line.strip()!r}"
                )
            if not begun:
                kept.append(line)
        elif (mark["word"] == BEGIN) == bool(begun):
            raise MarkError(
                f"{path}:{number}: {mark['word']} inside or without a solution"
                + f" (line {begun})" * bool(begun)
            )
        elif mark["word"] == BEGIN:
            begun = number
            answers += 1
            kept.append(
                f"{mark['indent']}{mark['until'] or _placeholder(path, kept, mark['indent'])}\n"
            )
        else:
            begun = 0
    if begun:
        raise MarkError(f"{path}:{begun}: {BEGIN} without {END}")
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
    files = [f for f in _files() if not f.startswith(LEFT_OUT)]
    for file in files:
        if file.endswith((".py", ".cu")):
            texts[file], count = cut((ROOT / file).read_text(encoding="utf-8"), file)
            if count:
                answers[file] = count
    for file in files:
        target = destination / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, target)
        if file in texts:
            target.write_text(texts[file], encoding="utf-8")
        elif file == "Results.md":
            target.write_text(
                render(target.read_text(encoding="utf-8"), {}, root=ROOT), encoding="utf-8"
            )  # empty
    return answers


def _files() -> list[str]:
    """What git tracks or would track; without git, all but what was built."""
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
