"""Grade what students handed in: ``python -m common.staff.grade SUBMISSION...``

A submission is a folder, a zip or a git bundle, or a folder of them. Of its files only what stands between the marks
counts: it is put into a fresh student edition, and everything else is listed and ignored. The checks run in one
process and the student's code in another one, in a sandbox where the system has one: it never sees the expected
results, the seeds or the verdict.

OUT/NAME/feedback.md is for the student, OUT/NAME/results.json for Gradescope, OUT/grades.csv for the course. A run
that was interrupted goes on where it stopped.
"""

import argparse
import csv
import hashlib
import io
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from common import child, regions
from common.check.hints import load
from common.check.progress import progress
from common.check.rng import new_seed
from common.marked import write_atomically
from common.paths import ROOT
from common.record import POINTS, checks_passed, write_json
from common.staff import student_edition, submission
from common.staff.judge import sandbox
from common.staff.submission import Submission, SubmissionError

STAGE_SECONDS = 900  # then a stage counts as hung
LINES = 400  # of a stage's output that are kept
NEEDS = {"task7": ("task4", "task5")}  # it has nothing of its own to write

Result = dict[str, Any]


@dataclass(frozen=True)
class Course:
    """What every submission is graded with.

    Attributes:
        edition: a student edition without answers, with the judge in it, and built.
        files: the files with something to write, by stage.
        version: a hash of the edition.
    """

    edition: Path
    files: dict[str, list[str]]
    version: str


@contextmanager
def course(console: Console) -> Iterator[Course]:
    """A fresh edition in a scratch folder."""
    with tempfile.TemporaryDirectory(prefix="grade-") as scratch:
        edition = Path(scratch).resolve() / "edition"
        student_edition.make(edition)
        judge = Path("common/staff/judge")
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / judge, edition / judge, ignore=ignore)
        tree = sorted(path for path in edition.rglob("*") if path.is_file())
        version = hashlib.sha256()
        for path in tree:
            version.update(f"{path.relative_to(edition)}\0".encode() + path.read_bytes())
        files: dict[str, list[str]] = {}
        for stage in POINTS:
            files[stage] = list(dict.fromkeys(piece.file for piece in load(stage)))
        for stage in (s for s, f in files.items() if any(name.endswith(".cu") for name in f)):
            console.print(f"building {stage} of the edition")
            # What all submissions share is then built once. Nothing is written in it, so the checks fail.
            command = [sys.executable, "-m", f"{stage}.test", "--device", "cpu", "--both"]
            child.run([*command, "--case", "one"], STAGE_SECONDS, lambda line: None, cwd=edition)
        yield Course(edition, files, version.hexdigest())


def grade(one: Submission, course: Course, out: Path, seed: int) -> Result:
    """Grade a submission, or take what an earlier run has made of the same files.

    Returns:
        ``name``, ``seed``, ``total``, ``remarks``, ``ignored`` and ``stages``: of each ``points``, ``earned``,
        ``status``, ``groups``, ``reason`` and ``output``.
    """
    try:
        contents = submission.read(one, [name for names in course.files.values() for name in names])
    except SubmissionError as error:
        empty = {stage: _nothing(stage, "cannot be read") for stage in POINTS}
        return _result(one, seed, empty, [f"{error}"], [])
    key = hashlib.sha256(course.version.encode())
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
            else:
                stages[stage] = _run(stage, student, course, out, seed)
    remarks = [*contents.problems, *reasons.values()]
    own = [name for name in contents.ignored if not (course.edition / name).is_file()]
    result = _result(one, seed, stages, list(dict.fromkeys(remarks)), own)
    result["key"] = key.hexdigest()
    write_json(record, result)
    return result


def fill_in(
    student: Path, files: Mapping[str, bytes], course: Course
) -> tuple[dict[str, str], set[str]]:
    """Put the marked regions of these files into an edition.

    Returns:
        By stage why a file of it cannot be taken; and the stages in which nothing was written.
    """
    reasons: dict[str, str] = {}
    untouched: set[str] = set()
    for stage, names in course.files.items():
        touched = not names
        for name in names:
            given = regions.regions((student / name).read_text(encoding="utf-8"), name)
            try:
                if name not in files:
                    raise regions.MarkError(f"{name} is missing")
                text = regions.decode(files[name], name).replace("\r\n", "\n")
                own = {r.function: r.lines for r in regions.regions(text, name)}
            except regions.MarkError as error:
                reasons[stage] = str(error)
                continue
            filled = [region._replace(lines=own[region.function]) for region in given]
            touched = touched or filled != given
            (student / name).write_text(regions.join(filled), encoding="utf-8")
        if not touched and stage not in reasons:
            untouched.add(stage)
    return reasons, untouched


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
    }


def _read(path: Path) -> Result:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


# ---- what comes out


def feedback(result: Result) -> str:
    """A page for the student, in Markdown."""
    lines = [f"# {result['name']}: {result['total']:g} of {sum(POINTS.values())} points", ""]
    lines += ["| task | checks | points | |", "|---|---|---|---|"]
    for stage, found in result["stages"].items():
        said = found["reason"] or found["status"]
        points = f"{found['earned']:g} of {found['points']:g}"
        lines.append(f"| {stage} | {_checks(found)} | {points} | {said} |")
    if result["remarks"]:
        lines += ["", *(f"- {remark}" for remark in result["remarks"])]
    for stage, found in result["stages"].items():
        if found["status"] not in ("passed", "not run"):
            lines += ["", f"## {stage}", "", "```text", *found["output"], "```"]
    again = f"`python -m taskN.test --device cpu --both --seed {result['seed']}`"
    lines += ["", f"The same inputs again: {again}."]
    if result["ignored"]:
        lines += ["", "Files that are not part of the course, and were not looked at:", ""]
        lines += [f"- {name}" for name in result["ignored"][:20]]
        lines += [f"- and {len(result['ignored']) - 20} more"] if result["ignored"][20:] else []
    return "\n".join(lines) + "\n"


def _checks(found: Result) -> str:
    return checks_passed(found) if found["groups"] else "-"


def gradescope(result: Result) -> Result:
    """Gradescope's results.json: https://gradescope-autograders.readthedocs.io/en/latest/specs/"""
    tests = [
        {
            "name": stage,
            "score": found["earned"],
            "max_score": found["points"],
            "status": "passed" if found["status"] == "passed" else "failed",
            "output": found["reason"] or "\n".join(found["output"]),
            "visibility": "visible",
        }
        for stage, found in result["stages"].items()
    ]
    return {
        "score": result["total"],
        "output": "\n".join(result["remarks"]),
        "visibility": "visible",
        "stdout_visibility": "hidden",
        "tests": tests,
    }


def table(results: Sequence[Result]) -> str:
    """All results as CSV."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["submission", *POINTS, "total", "remarks"])
    for result in sorted(results, key=lambda r: r["name"]):
        earned = [f"{found['earned']:g}" for found in result["stages"].values()]
        remarks = "; ".join(result["remarks"])
        writer.writerow([_cell(result["name"]), *earned, f"{result['total']:g}", _cell(remarks)])
    return stream.getvalue()


def _cell(text: str) -> str:
    """A spreadsheet takes a text that begins like this for a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text


# ---- the command


def main(argv: Sequence[str] | None = None) -> int:
    """Grade all; 0 if every submission could be graded, 1 if not, 2 if nothing was graded."""
    options = _parse(argv)
    if sys.platform != "linux":
        print(f"error: grading needs Linux; this is {sys.platform}", file=sys.stderr)
        return 2
    console = Console(highlight=False, markup=False, soft_wrap=True)
    found = submission.find(options.submissions)
    for sentence in found.others:
        console.print(f"not a submission: {sentence}")
    if not found.submissions:
        print("error: there is no submission to grade", file=sys.stderr)
        return 2
    for sentence in sandbox.missing():
        console.print(f"warning: {sentence}")
    results: dict[str, Result] = {}
    csv_file = options.csv or options.out / "grades.csv"
    with course(console) as fresh, progress(console) as bar:
        task = bar.add_task("submissions", total=len(found.submissions))

        def one(entry: Submission) -> None:
            try:
                result = grade(entry, fresh, options.out, options.seed)
            except Exception as error:  # costs its row, and no other
                empty = {stage: _nothing(stage, "not graded") for stage in POINTS}
                remark = f"NOT GRADED: {type(error).__name__}: {error}"
                result = _result(entry, options.seed, empty, [remark], [])
            results[entry.name] = result
            write_atomically(options.out / entry.name / "feedback.md", feedback(result))
            write_json(options.out / entry.name / "results.json", gradescope(result))
            write_atomically(csv_file, table(list(results.values())))
            bar.advance(task)
            notes = f"; {result['remarks'][0]}" if result["remarks"] else ""
            console.print(f"{entry.name}: {result['total']:g} of {sum(POINTS.values())}{notes}")

        with ThreadPoolExecutor(options.jobs) as pool:
            try:
                list(pool.map(one, found.submissions))
            except KeyboardInterrupt:
                pool.shutdown(wait=False, cancel_futures=True)
                child.end_all()
                raise
    failed = [r["name"] for r in results.values() if any("NOT GRADED" in s for s in r["remarks"])]
    console.print(f"\n{len(results)} graded: {csv_file}")
    return 1 if failed else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m common.staff.grade", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "submissions", nargs="+", type=Path, metavar="SUBMISSION",
        help="a folder, a .zip or a git .bundle, or a folder of them",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=Path("grades"), help="where the results go; default: grades"
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="default: OUT/grades.csv")
    parser.add_argument("--jobs", type=int, default=1, help="submissions at a time; default: 1")
    parser.add_argument("--seed", type=int, help="of the random inputs, the same for all")
    options = parser.parse_args(argv)
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1; got {options.jobs}")
    options.seed = new_seed() if options.seed is None else options.seed
    options.out = options.out.resolve()
    return options


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\ninterrupted; run it again to go on", file=sys.stderr)
        sys.exit(130)
