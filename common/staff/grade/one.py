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
from common.staff.grade.submission import Submission, SubmissionError

LINES = 400  # of a stage's output that are kept
NEEDS = {"task7": ("task4", "task5")}  # it has nothing of its own to write


def graded(one: Submission, course: Course, out: Path, seed: int) -> Result:
    """Grade a submission and write its files in OUT/NAME; whatever happens costs this submission and no other."""
    try:
        result = grade(one, course, out, seed)
    except Exception as error:
        empty = {stage: _nothing(stage, "not graded") for stage in POINTS}
        remark = f"NOT GRADED: {type(error).__name__}: {error}"
        result = _result(one, seed, empty, [remark], []) | {"failed": True}
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
    try:
        wanted = [name for names in course.files.values() for name in names]
        contents = submission.read(one, [*wanted, leaderboard.FILE])
    except SubmissionError as error:
        empty = {stage: _nothing(stage, "cannot be read") for stage in POINTS}
        return _result(one, seed, empty, [f"{error}"], [])
    shown = leaderboard.chosen_name(contents.files.pop(leaderboard.FILE, b""))
    key = hashlib.sha256(course.version.encode())
    for name, data in sorted(contents.files.items()):
        key.update(name.encode() + b"\0" + hashlib.sha256(data).digest())
    record = out / one.name / "record.json"
    if (before := _read(record)).get("key") == key.hexdigest():
        return before | {"leaderboard": shown}
    with tempfile.TemporaryDirectory(prefix="student-", dir=course.edition.parent) as folder:
        student = Path(folder) / "edition"
        shutil.copytree(course.edition, student)
        reasons, untouched = fill_in(student, contents.files, course)
        stages = {}
        for stage in POINTS:
            lacks = [n for n in (stage, *NEEDS.get(stage, ())) if n in reasons or n in untouched]
            if lacks:
                why = reasons.get(lacks[0]) or f"{lacks[0]} is not written"
                stages[stage] = _nothing(stage, why)
            else:
                stages[stage] = _run(stage, student, course, out, seed)
    problems = [text for text in contents.problems if text != f"{leaderboard.FILE} is missing"]
    remarks = [*problems, *reasons.values()]
    own = [name for name in contents.ignored if not (course.edition / name).is_file()]
    result = _result(one, seed, stages, list(dict.fromkeys(remarks)), own)
    result |= {"key": key.hexdigest(), "leaderboard": shown}
    write_json(record, result)
    return result


def _run(stage: str, student: Path, course: Course, out: Path, seed: int) -> Result:
    lines: list[str] = []

    def hear(line: str) -> None:
        if len(lines) < LINES:
            lines.append(line[:1000])

    record = student.parent / f"{stage}.json"
    hidden = [ROOT, out.resolve(), Path.home(), course.edition.parent]
    command = [sys.executable, "-m", "common.staff.judge.check", str(student), stage]
    hidden = [path for path in hidden if path.is_dir() and path != Path("/")]  # as a home may be
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
