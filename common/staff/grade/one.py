"""Grading one submission."""

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from common import child
from common.marked import write_atomically
from common.paths import ROOT
from common.record import POINTS, write_json
from common.staff.grade import leaderboard, submission
from common.staff.grade.course import STAGE_SECONDS, Course, fill_in
from common.staff.grade.pages import Result, feedback, gradescope
from common.staff.grade.submission import Contents, Submission, SubmissionError
from common.staff.judge import sandbox

RECORD = "record.json"  # in OUT/NAME: what was found
LINES = 400  # of a stage's output that are kept
NEEDS = {"task7": ("task4", "task5")}  # it has nothing of its own to write


def graded(one: Submission, course: Course, out: Path, seed: int) -> Result:
    """Grade a submission and write its files in OUT/NAME; whatever happens costs this submission and no other."""
    try:
        return _written(one, grade(one, course, out, seed), out)
    except Exception as error:
        return not_graded(one, out, seed, f"{type(error).__name__}: {error}")


def not_graded(one: Submission, out: Path, seed: int, why: str) -> Result:
    """The result, with its files, of a submission that could not be graded; it has no record, so it can be again."""
    empty = {stage: _nothing(stage, "not graded") for stage in POINTS}
    result = _result(one, seed, empty, [f"NOT GRADED: {why}"], [])
    return _written(one, result | {"failed": True}, out)


def _written(one: Submission, result: Result, out: Path) -> Result:
    write_atomically(out / one.name / "feedback.md", feedback(result))
    write_json(out / one.name / "results.json", gradescope(result))
    return result


def grade(one: Submission, course: Course, out: Path, seed: int) -> Result:
    """Grade a submission, or take what an earlier run has made of the same files.

    Returns:
        ``name``, ``seed``, ``total``, ``remarks``, ``ignored``, ``failed`` and ``stages``: of each ``points``,
        ``earned``, ``status``, ``groups``, ``reason`` and ``output``. Where it was graded, ``key``, a hash of what
        was graded, and ``leaderboard``, the name to be shown there, or "".
    """
    if ready := known(one, course, out, seed):
        return ready
    contents, key, shown = _read_submission(one, course)
    with tempfile.TemporaryDirectory(prefix="student-", dir=course.edition.parent) as folder:
        student = Path(folder) / "edition"
        shutil.copytree(course.edition, student)
        reasons, untouched = fill_in(student, contents.files, course)
        stages = {}
        hidden = [ROOT, out, course.edition.parent, one.path.parent]  # where others' code may be
        for stage in POINTS:
            lacks = [n for n in (stage, *NEEDS.get(stage, ())) if n in reasons or n in untouched]
            if lacks:
                why = reasons.get(lacks[0]) or f"{lacks[0]} is not written"
                stages[stage] = _nothing(stage, why)
            else:
                stages[stage] = _run(stage, student, course, hidden, seed)
    problems = [text for text in contents.problems if text != f"{leaderboard.FILE} is missing"]
    remarks = [*problems, *reasons.values()]
    own = [name for name in contents.ignored if not (course.edition / name).is_file()]
    result = _result(one, seed, stages, list(dict.fromkeys(remarks)), own)
    result |= {"key": key, "leaderboard": shown}
    write_json(out / one.name / RECORD, result)
    return result


def known(one: Submission, course: Course, out: Path, seed: int) -> Result | None:
    """The result of a submission where nothing is to be run: it has a record, or it cannot be read."""
    try:
        _, key, shown = _read_submission(one, course)
    except SubmissionError as error:
        empty = {stage: _nothing(stage, "cannot be read") for stage in POINTS}
        return _result(one, seed, empty, [f"{error}"], [])
    before = _read(out / one.name / RECORD)
    return before | {"leaderboard": shown} if before.get("key") == key else None


def _read_submission(one: Submission, course: Course) -> tuple[Contents, str, str]:
    """What is in it, a hash of what is graded, and its name on the leaderboard."""
    wanted = [name for names in course.files.values() for name in names]
    contents = submission.read(one, [*wanted, leaderboard.FILE])
    shown = leaderboard.chosen_name(contents.files.pop(leaderboard.FILE, b""))
    key = hashlib.sha256(course.version.encode())
    for name, data in sorted(contents.files.items()):
        key.update(name.encode() + b"\0" + hashlib.sha256(data).digest())
    return contents, key.hexdigest(), shown


def _run(stage: str, student: Path, course: Course, hidden: list[Path], seed: int) -> Result:
    lines: list[str] = []

    def hear(line: str) -> None:
        if len(lines) < LINES:
            lines.append(line[:1000])

    record = student.parent / f"{stage}.json"
    command = [*sandbox.tied(), sys.executable, "-m", "common.staff.judge.check"]
    command += [str(student), stage]
    command += ["--hide", *map(str, hidden), "--device", "cpu"]
    command += ["--both", "--no-timing", "--seed", str(seed), "--record", str(record)]
    status = child.run(command, STAGE_SECONDS, hear, cwd=course.edition)
    found = _read(record)
    if "groups" not in found or found.get("status") == "crashed":
        why = (
            f"stopped after {STAGE_SECONDS} s" if status is None else f"ended with status {status}"
        )
        return _nothing(stage, f"the checks {why}") | {"output": lines}
    keep = ("points", "earned", "status", "groups")
    return {name: found[name] for name in keep} | {"reason": "", "output": lines}


def _nothing(stage: str, reason: str) -> Result:
    nothing = {"points": POINTS[stage], "earned": 0, "status": "not run", "groups": []}
    return nothing | {"reason": reason, "output": []}


def _result(
    one: Submission, seed: int, stages: Mapping[str, Result], remarks: list[str], ignored: list[str]
) -> Result:
    total = round(sum(stage["earned"] for stage in stages.values()), 2)
    return {
        "name": one.name,
        "seed": seed,
        "total": total,
        "stages": dict(stages),
        "remarks": remarks,
        "ignored": ignored,
        "failed": False,
    }


def _read(path: Path) -> Result:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
