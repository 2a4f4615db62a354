"""Grading one submission."""

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from common import child
from common.marked import write_atomically
from common.paths import ROOT
from common.record import POINTS, WORTH, earned, write_json
from common.staff.grade import claims, submission
from common.staff.grade.course import Course, fill_in
from common.staff.grade.pages import Result, feedback, gradescope
from common.staff.grade.submission import Submission, SubmissionError
from common.staff.judge import STAGE_SECONDS

GPU_SECONDS = 12 * 3600
LINES = 400  # of a stage's output that are kept
NEEDS = {"task7": ("task4", "task5")}  # it has nothing of its own to write


def graded(
    one: Submission, course: Course, out: Path, seed: int, *, gpu: bool, verify: bool
) -> Result:
    """Grade a submission and write its files in OUT/NAME; whatever happens costs this submission and no other.

    Args:
        gpu: see :func:`grade`.
        verify: what it claims is compared with what was found.
    """
    try:
        result = grade(one, course, out, seed, gpu=gpu)
        result.pop("claims", None)
        if verify:
            result["claims"] = claims.verify(one, result, course)
            write_json(out / one.name / "record.json", result)
    except Exception as error:
        empty = {stage: _nothing(stage, "not graded") for stage in POINTS}
        remark = f"NOT GRADED: {type(error).__name__}: {error}"
        result = _result(one, seed, empty, [remark], []) | {"failed": True}
    write_atomically(out / one.name / "feedback.md", feedback(result))
    write_json(out / one.name / "results.json", gradescope(result))
    return result


def grade(one: Submission, course: Course, out: Path, seed: int, *, gpu: bool) -> Result:
    """Grade a submission, or take what an earlier run has made of the same files.

    ``gpu``: also check and time its kernels on this machine's GPU.

    Returns:
        ``name``, ``seed``, ``total``, ``remarks``, ``ignored``, ``failed`` and ``stages``: of each ``points``,
        ``earned``, ``status``, ``groups``, ``reason`` and ``output``.
    """
    try:
        contents = submission.read(one, [name for names in course.files.values() for name in names])
    except SubmissionError as error:
        empty = {stage: _nothing(stage, "cannot be read") for stage in POINTS}
        return _result(one, seed, empty, [f"{error}"], [])
    key = hashlib.sha256(f"{course.version} {gpu}".encode())
    for name, data in sorted(contents.files.items()):
        key.update(name.encode() + b"\0" + hashlib.sha256(data).digest())
    record = out / one.name / "record.json"
    if (before := _read(record)).get("key") == key.hexdigest():
        return before
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
        written = [stage for stage in POINTS if stage not in stages]
        if written:
            stages |= _check(written, student, course, out, seed)
        timed = [s for s in written if WORTH[s].bands and stages[s]["groups"]] if gpu else []
        if timed:
            stages |= _check_on_gpu({s: stages[s] for s in timed}, student, course, out, seed)
        stages = {stage: stages[stage] for stage in POINTS}
    remarks = [*contents.problems, *reasons.values()]
    own = [name for name in contents.ignored if not (course.edition / name).is_file()]
    result = _result(one, seed, stages, list(dict.fromkeys(remarks)), own)
    result["key"] = key.hexdigest()
    write_json(record, result)
    return result


def _check(
    stages: Sequence[str], student: Path, course: Course, out: Path, seed: int
) -> dict[str, Result]:
    """The checks of these stages on what stands in the folder ``student``."""
    said: list[str] = []
    found = student.parent / "found"
    found.mkdir()
    command = [sys.executable, "-m", "common.staff.judge.check", str(student), str(found), *stages]
    command += ["--hide", *_hidden(course, out), "--device", "cpu"]
    command += ["--both", "--no-timing", "--seed", str(seed)]
    limit = STAGE_SECONDS * (len(stages) + 1)
    status = child.run(command, limit, said.append, cwd=course.edition)
    end = said[-1] if said else f"status {status}"
    return {stage: _found(stage, found, end) for stage in stages}


def _hidden(course: Course, out: Path) -> list[str]:
    """The folders that a student's process must not see."""
    folders = [ROOT, out.resolve(), Path.home(), course.edition.parent]
    return [
        str(path) for path in folders if path.is_dir() and path != Path("/")
    ]  # as a home may be


def _check_on_gpu(
    before: Mapping[str, Result], student: Path, course: Course, out: Path, seed: int
) -> dict[str, Result]:
    """The results of these stages on the CPU, after their kernels have been checked and timed on the GPU."""
    said: list[str] = []
    found = student.parent / "found"
    command = [sys.executable, "-m", "common.staff.judge.gpu", str(student), str(found), *before]
    command += ["--seed", str(seed), "--hide", *_hidden(course, out)]
    # It has limits of its own; before them it may wait for the GPU.
    status = child.run(command, GPU_SECONDS, said.append, cwd=ROOT)
    end = said[-1] if said else f"status {status}"
    return {s: with_gpu(s, on_cpu, *_read_gpu(s, found, end)) for s, on_cpu in before.items()}


def _read_gpu(stage: str, found: Path, end: str) -> tuple[Result, Result]:
    record = _read(found / f"{stage}-gpu.json")
    return _found(f"{stage}-gpu", found, end), record.get("speed", {})


def with_gpu(stage: str, cpu: Result, gpu: Result, speed: Mapping[str, Any]) -> Result:
    """A stage's result on both devices: a group counts if it has passed on both, and speed if all have on the GPU.

    Args:
        stage: "task4".
        cpu, gpu: results on the two.
        speed: by workload, what :func:`common.staff.judge.speed.measured` gives.
    """
    worth = WORTH[stage]
    there = {group["name"]: group for group in gpu["groups"]}
    groups = [
        g if there.get(g["name"], {}).get("status") == "passed" else g | {"status": "failed"}
        for g in cpu["groups"]
    ]
    part = fmean(times["part"] for times in speed.values()) if speed else 0.0
    points = (1 - worth.speed) * earned(worth, groups) + worth.speed * worth.points * part
    passed = all(group["status"] == "passed" for group in groups) and gpu["status"] == "passed"
    return cpu | {
        "groups": groups,
        "earned": round(points, 2),
        "status": "passed" if passed else "failed",
        "reason": cpu["reason"] or gpu["reason"],
        "output": [*cpu["output"], "", "on a GPU:", *gpu["output"]],
        "speed": dict(speed),
    }


def _found(stage: str, folder: Path, end: str) -> Result:
    """What the checks of a stage have found; ``end``: how they ended, if they left nothing behind."""
    record = _read(folder / f"{stage}.json")
    try:
        with open(folder / f"{stage}.txt", encoding="utf-8", errors="replace") as file:
            lines = [line.rstrip("\n")[:1000] for line in islice(file, LINES)]
    except OSError:
        lines = []
    if "groups" not in record or record.get("status") == "crashed":
        why = record.get("why") or f"ended early: {lines[-1] if lines else end}"
        return _nothing(stage.partition("-")[0], f"the checks {why}") | {"output": lines}
    keep = ("points", "earned", "status", "groups")
    return {name: record[name] for name in keep} | {"reason": "", "output": lines}


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
