"""Grading one submission."""

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from common import child
from common.marked import write_atomically
from common.paths import ROOT
from common.record import POINTS, WORTH, earned, write_json
from common.staff.grade import claims, leaderboard, submission
from common.staff.grade.course import Course, fill_in
from common.staff.grade.pages import Result, feedback, gradescope
from common.staff.grade.submission import Contents, Submission, SubmissionError
from common.staff.judge import STAGE_SECONDS, sandbox
from common.staff.viva.page import viva

SECONDS = STAGE_SECONDS * (len(POINTS) + 1)  # for the checks of a submission on the CPU
GPU_SECONDS = 12 * 3600
RECORD = "record.json"  # in OUT/NAME: what was found
LINES = 400  # of a stage's output that are kept
NEEDS = {"task7": ("task4", "task5")}  # it has nothing of its own to write


@dataclass(frozen=True)
class Options:
    """How submissions are graded.

    Attributes:
        out: where the files go, in a folder for each submission.
        seed: of the random inputs.
        gpu: kernels are also checked and timed on this machine's GPU.
        verify: what a submission claims is compared with what was found.
        viva: how many questions about its code there are to be.
    """

    out: Path
    seed: int
    gpu: bool = False
    verify: bool = False
    viva: int = 0


def graded(one: Submission, course: Course, options: Options) -> Result:
    """Grade a submission and write its files in OUT/NAME; whatever happens costs this submission and no other.

    Returns:
        What :func:`grade` does; ``claims`` of ``options.verify``, and ``viva``, the page with the questions.
    """
    try:
        result = grade(one, course, options)
        result.pop("claims", None)
        if options.verify:
            result["claims"] = claims.verify(one, result, course)
            write_json(options.out / one.name / RECORD, result)
        _write_pages(one, result, options.out)
        if options.viva:
            result["viva"] = viva(one, course, options.out, options.viva, result["seed"])
        return result
    except Exception as error:
        return not_graded(one, options, f"{type(error).__name__}: {error}")


def not_graded(one: Submission, options: Options, why: str) -> Result:
    """The result, with its files, of a submission that could not be graded; it has no record, so it can be again."""
    empty = {stage: _nothing(stage, "not graded") for stage in POINTS}
    result = _result(one, options.seed, empty, [f"NOT GRADED: {why}"], []) | {"failed": True}
    _write_pages(one, result, options.out)
    return result


def _write_pages(one: Submission, result: Result, out: Path) -> None:
    write_atomically(out / one.name / "feedback.md", feedback(result))
    write_json(out / one.name / "results.json", gradescope(result))


def grade(one: Submission, course: Course, options: Options) -> Result:
    """Grade a submission, or take what an earlier run has made of the same files.

    Returns:
        ``name``, ``seed``, ``total``, ``remarks``, ``ignored``, ``failed`` and ``stages``: of each ``points``,
        ``earned``, ``status``, ``groups``, ``reason`` and ``output``, on a GPU ``speed`` as well. Where it was graded,
        ``key``, a hash of what was graded, and ``leaderboard``, the name to be shown there, or "".
    """
    if ready := known(one, course, options):
        return ready
    contents, key, shown = _read_submission(one, course, options)
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
        # Others' code may be in these; a home may be /.
        hidden = [ROOT, options.out, Path.home(), course.edition.parent, one.path.parent]
        arguments = ["--seed", str(options.seed), "--hide"]
        arguments += [str(f.resolve()) for f in hidden if f.is_dir() and f.resolve() != Path("/")]
        written = [stage for stage in POINTS if stage not in stages]
        if written:
            stages |= _check(written, student, course, arguments)
        if options.gpu:
            timed = {s: stages[s] for s in written if WORTH[s].bands and stages[s]["groups"]}
            stages |= _check_on_gpu(timed, student, arguments) if timed else {}
        stages = {stage: stages[stage] for stage in POINTS}
    problems = [text for text in contents.problems if text != f"{leaderboard.FILE} is missing"]
    remarks = [*problems, *reasons.values()]
    own = [name for name in contents.ignored if not (course.edition / name).is_file()]
    result = _result(one, options.seed, stages, list(dict.fromkeys(remarks)), own)
    result |= {"key": key, "leaderboard": shown}
    write_json(options.out / one.name / RECORD, result)
    return result


def known(one: Submission, course: Course, options: Options) -> Result | None:
    """The result of a submission where nothing is to be run: it has a record, or it cannot be read."""
    try:
        _, key, shown = _read_submission(one, course, options)
    except SubmissionError as error:
        empty = {stage: _nothing(stage, "cannot be read") for stage in POINTS}
        return _result(one, options.seed, empty, [f"{error}"], [])
    before = _read(options.out / one.name / RECORD)
    return before | {"leaderboard": shown} if before.get("key") == key else None


def _read_submission(
    one: Submission, course: Course, options: Options
) -> tuple[Contents, str, str]:
    """What is in it, a hash of what is graded, and its name on the leaderboard."""
    wanted = [name for names in course.files.values() for name in names]
    contents = submission.read(one, [*wanted, leaderboard.FILE])
    shown = leaderboard.chosen_name(contents.files.pop(leaderboard.FILE, b""))
    key = hashlib.sha256(f"{course.version} {options.gpu}".encode())
    for name, data in sorted(contents.files.items()):
        key.update(name.encode() + b"\0" + hashlib.sha256(data).digest())
    return contents, key.hexdigest(), shown


def _check(
    stages: Sequence[str], student: Path, course: Course, arguments: Sequence[str]
) -> dict[str, Result]:
    """The checks of these stages on what stands in the folder ``student``."""
    said: list[str] = []
    found = student.parent / "found"
    found.mkdir()
    command = [*sandbox.tied(), sys.executable, "-m", "common.staff.judge.check", str(student)]
    command += [str(found), *stages, "--device", "cpu", "--both", "--no-timing", *arguments]
    status = child.run(command, SECONDS, said.append, cwd=course.edition)
    end = said[-1] if said else f"status {status}"
    return {stage: _found(stage, found, end) for stage in stages}


def _check_on_gpu(
    before: Mapping[str, Result], student: Path, arguments: Sequence[str]
) -> dict[str, Result]:
    """The results of these stages on the CPU, after their kernels have been checked and timed on the GPU."""
    said: list[str] = []
    found = student.parent / "found"
    command = [*sandbox.tied(), sys.executable, "-m", "common.staff.judge.gpu", str(student)]
    command += [str(found), *before, *arguments]
    # It has limits of its own; before them it may wait for the GPU.
    status = child.run(command, GPU_SECONDS, said.append, cwd=ROOT)
    end = said[-1] if said else f"status {status}"
    if status == 2:
        raise RuntimeError(end)
    return {s: with_gpu(s, on_cpu, *_read_gpu(s, found, end)) for s, on_cpu in before.items()}


def _read_gpu(stage: str, found: Path, end: str) -> tuple[Result, Result]:
    record = _read(found / f"{stage}-gpu.json")
    return _found(f"{stage}-gpu", found, end), record.get("speed", {})


def with_gpu(stage: str, cpu: Result, gpu: Result, speed: Mapping[str, Any]) -> Result:
    """A stage's result on both devices: a group counts if it has passed on both; all are worth less if it is slow.

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
    points = earned(worth, groups) * (1 - worth.speed * (1 - part))
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
