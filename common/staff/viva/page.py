"""The questions for one submission, as a page for the instructor."""

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import child, regions
from common.marked import write_atomically
from common.paths import ROOT
from common.staff.grade import submission
from common.staff.grade.course import Course, fill_in
from common.staff.grade.submission import Submission, SubmissionError, shown

SECONDS = 600  # for all questions of a submission
RECORDS = "common/records/cuda.json"
PROBE = Path("common/staff/viva")


def viva(one: Submission, course: Course, out: Path, number: int, seed: int) -> str:
    """Write OUT/NAME/viva.md, or keep the one that an earlier run has made of the same files and the same seed.

    Args:
        one: the submission.
        course: what all are graded with.
        out: the folder of the results.
        number: of questions, at least 1.
        seed: with the submission's name, it decides which.

    Returns:
        The page.
    """
    try:
        text, mark = _viva(one, course, out, number, seed)
    except Exception as error:  # whatever happens costs this submission and no other
        text, mark = (
            _page(one.name, number, [], f"No questions: {type(error).__name__}: {error}"),
            "",
        )
    write_atomically(out / one.name / "viva.md", text + mark)
    return text


def _viva(one: Submission, course: Course, out: Path, number: int, seed: int) -> tuple[str, str]:
    """The page, and the line at its end that says what it was made of."""
    page = out / one.name / "viva.md"
    files = [name for names in course.files.values() for name in names]
    try:
        found = submission.read(one, [*files, RECORDS]).files
    except SubmissionError as error:
        return _page(one.name, number, [], f"It cannot be read: {error}."), ""
    key = hashlib.sha256(f"{course.version} {number} {seed}".encode())
    for path in sorted((ROOT / PROBE).glob("*.py")):
        key.update(path.read_bytes())
    for name, data in sorted(found.items()):
        key.update(name.encode() + b"\0" + hashlib.sha256(data).digest())
    mark = f"<!-- viva: {key.hexdigest()} -->\n"
    if page.is_file() and (before := page.read_text(encoding="utf-8")).endswith(mark):
        return before.removesuffix(mark), mark
    stages = {stage for stage, names in course.files.items() if names}
    with tempfile.TemporaryDirectory(prefix="viva-", dir=course.edition.parent) as folder:
        student = Path(folder) / "edition"
        shutil.copytree(course.edition, student)
        records = _records(found.pop(RECORDS, b""))
        _, untouched = fill_in(student, found, course)
        order = {"number": number, "seed": seed, "name": one.name, "records": records}
        if stages <= untouched:
            return _page(one.name, number, [], "Nothing is written in it."), mark
        asked, problem = _ask(student, order, course, out)
    return _page(one.name, number, asked, problem), mark


def _records(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _ask(
    student: Path, order: Mapping[str, Any], course: Course, out: Path
) -> tuple[list[dict[str, Any]], str]:
    """The questions with the lines that they are about, and what went wrong."""
    hidden = [ROOT, out.resolve(), Path.home(), course.edition.parent]
    hidden = [path for path in hidden if path.is_dir() and path != Path("/")]
    file = student.parent / "order.json"
    file.write_text(json.dumps({**order, "hide": [str(path) for path in hidden]}))
    questions = student.parent / "questions"
    questions.touch()
    command = [sys.executable, "-m", "common.staff.viva.probe", str(student), str(file)]
    command += [str(questions)]
    lines: list[str] = []
    status = child.run(command, SECONDS, lines.append, cwd=course.edition)
    asked = [json.loads(line) for line in questions.read_text(encoding="utf-8").splitlines()]
    for question in asked:
        text = regions.split((student / question["file"]).read_text(encoding="utf-8"))
        question["code"] = text[question["line"] - 1].rstrip("\n")
    if status is None:
        return asked, f"Stopped after {SECONDS} s."
    return asked, f"The questions ended early: {lines[-1] if lines else status}" if status else ""


def _page(name: str, number: int, asked: Sequence[Mapping[str, Any]], problem: str) -> str:
    lines = [f"# {name}: {len(asked)} of {number} questions", ""]
    if asked:
        lines += [
            "The answers are computed from the code itself; the lines are the submission's.",
            "",
        ]
    if problem:
        lines += [shown(problem), ""]
    elif len(asked) < number:
        lines += [
            "No more could be computed: the other stages are not written, or do not work.",
            "",
        ]
    for count, question in enumerate(asked, start=1):
        lines += [f"## {count}. {question['file']}:{question['line']}", ""]
        lines += [f"    {shown(question['code'])}", ""]
        lines += [f"**{question['question']}**", ""]
        lines += [*(_plain(line) for line in question["answer"].splitlines()), ""]
    return "\n".join(lines)


def _plain(line: str) -> str:
    """A line without control characters, which could be some of the student's: the page is printed in a terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
