"""What a submission claims, beside what grading found: ``--verify``.

Its Results.md and its records are read as data; nothing in them is executed, and nothing in them earns points. Each
thing that does not fit is a sentence.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common.marked import MarkerError, sections
from common.record import DEVICES, POINTS, checks_passed, edited
from common.record.provenance import content_hash
from common.record.results import rendered
from common.record.verify import Stale, checked
from common.staff.grade import submission
from common.staff.grade.archives import shown
from common.staff.grade.course import Course
from common.staff.grade.pages import Result
from common.staff.grade.submission import Submission, SubmissionError

FORM = "Results.md"
RECORDS = {device: f"common/records/{device}.json" for device in DEVICES}
ON = {"cpu": "on the CPU", "cuda": "on a GPU"}
OFF = 0.1  # a claimed time may differ by this part of the measured one
LARGEST = 1 << 20  # bytes of a file that is looked at
LINES = 5  # of Results.md that are shown
NOT_MEASURED = "Times were not measured here: those in Results.md are claims."

Records = Mapping[str, Mapping[str, Any]]  # by device and stage


def verify(one: Submission, result: Result, course: Course) -> Result:
    """What does not fit in a submission's Results.md and records.

    Args:
        one: what was handed in.
        result: what grading it gave; where a stage has ``speed``, by name of benchmark ``{"ours_ms": ...}``, claimed
            times are compared with it.
        course: what it was graded with.

    Returns:
        ``lines``, a sentence each, and ``times``, a sentence if times are claimed and were not measured.
    """
    answers = [file for files in course.files.values() for file in files]
    try:
        found = submission.read(one, [*answers, FORM, *RECORDS.values()])
    except SubmissionError:
        return {"lines": [], "times": ""}  # grading has said so
    stale = Stale(course.edition)
    records, lines = _records(found.files, stale)
    text = _small(found.files, FORM).decode("utf-8", errors="replace")
    compared = text and records and not lines  # what is broken is not compared with the rest
    for name in (FORM, *RECORDS.values()):
        absent = f"{name} is missing"  # of the records: a machine that was not used
        lines += [p for p in found.problems if p.startswith(name) and (p != absent or name == FORM)]
        if len(found.files.get(name, b"")) > LARGEST:
            lines.append(f"{name} is larger than {LARGEST:,} bytes, and was not looked at")
    for stage, files in course.files.items():
        own = content_hash({name: found.files[name] for name in files if name in found.files})
        lines += _made_with(stage, own, records, stale)
    rows = _rows(text)
    lines += _absurd(text, rows) if FORM in found.files else []
    lines += [line for stage in result["stages"] for line in _points(stage, rows, records, result)]
    if compared:
        lines += _compared(text, records, found.files, answers, course)
    times = [_times(stage, records, result) for stage in result["stages"]]
    lines += [line for found in times for line in found or ()]
    return {
        "lines": list(dict.fromkeys(shown(line) for line in lines)),
        "times": NOT_MEASURED if None in times else "",
    }


def _small(files: Mapping[str, bytes], name: str) -> bytes:
    """What is looked at of a file: nothing if it is not there or too large."""
    data = files.get(name, b"")
    return data if len(data) <= LARGEST else b""


# Records ----------------------------------------------------------------------------------------------


def _records(files: Mapping[str, bytes], stale: Stale) -> tuple[Records, list[str]]:
    """The records that are what a run writes, by device and stage; and what is wrong with the others."""
    records: dict[str, dict[str, Any]] = {}
    lines = []
    for device, file in RECORDS.items():
        if not (data := _small(files, file)):
            continue
        try:
            content = json.loads(data)
        except (ValueError, RecursionError):
            lines.append(f"{file} is not JSON")
            continue
        wrong = checked(content, device, stale)
        for stage, sentences in wrong.items():
            lines += [f"{file}, {stage}: {s}" if stage else f"{file}: {s}" for s in sentences]
        sound = {} if "" in wrong else content["stages"]
        records[device] = {stage: e for stage, e in sound.items() if stage not in wrong}
    return records, lines


def _made_with(stage: str, answers: str, records: Records, stale: Stale) -> Iterator[str]:
    """Whether a stage's records were made with the course's checks and common/, and from what was handed in."""
    for device, entries in records.items():
        if stage not in entries:
            continue
        where = f"{stage} {ON[device]}: its record"
        run = entries[stage]["run"]
        if "hashes" not in run:
            yield f"{where} has no hashes: it does not say what it was made with"
        elif run["hashes"]["answers"] != answers:
            yield f"{where} was made from other answers than those handed in"
        runs = [run, *(found["run"] for found in entries[stage]["benchmarks"].values())]
        for what in sorted({stale.given(stage, run) for run in runs} - {""}):
            theirs = f"{stage}/test.py" if what == "checks" else what
            yield f"{where} was made with another {theirs} than the course's"


def _by_records(stage: str, records: Records) -> float | None:
    """The points that a stage's records give: the lower of the two machines'."""
    return min((e[stage]["earned"] for e in records.values() if stage in e), default=None)


# Results.md -------------------------------------------------------------------------------------------

_SHARE = re.compile(r"(-?\d{1,9}(?:\.\d{1,9})?) of (-?\d{1,9}(?:\.\d{1,9})?)")
_COLUMNS = ("checks on the CPU", "checks on a GPU", "points")


def _rows(text: str) -> dict[str, list[str]]:
    """The cells of each task in the table of points, and of its total."""
    lines = "".join(sections(text, "grade")[:1]).splitlines()
    rows = ([cell.strip(" *") for cell in line.split("|")[1:-1]] for line in lines)
    return {cells[0]: cells[1:] for cells in rows if cells and cells[0] in (*POINTS, "total")}


def _absurd(text: str, rows: Mapping[str, Sequence[str]]) -> Iterator[str]:
    if edited(text):
        yield f"{FORM} was edited between its markers"
    for name, most in {**POINTS, "total": sum(POINTS.values())}.items():
        cells = rows.get(name, [])
        if len(cells) != len(_COLUMNS):
            yield f"{FORM} has no row of {name} with {', '.join(_COLUMNS)}"
            continue
        for column, cell in zip(_COLUMNS, cells, strict=True):
            share = _SHARE.match(cell)
            if share and not 0 <= float(share[1]) <= float(share[2]):
                yield f"{FORM}, {name}: {cell[:100]} {column}"
        share = _SHARE.fullmatch(cells[-1])
        if (share is None or float(share[2]) != most) and cells[-1] != f"- of {most:g}":
            yield f"{FORM}, {name}: {cells[-1][:100]!r} points; it is worth {most:g}"


def _points(
    stage: str, rows: Mapping[str, Sequence[str]], records: Records, result: Result
) -> Iterator[str]:
    """The points and the checks of a stage that are claimed, beside those found here."""
    found = result["stages"][stage]
    share = _SHARE.match(rows[stage][-1]) if rows.get(stage) else None
    claims = {"in Results.md": float(share[1]) if share else None}
    claims["by its records"] = _by_records(stage, records)
    said = [f"{points:g} points {where}" for where, points in claims.items() if points is not None]
    if {points for points in claims.values() if points is not None} - {found["earned"]}:
        yield f"{stage}: {', '.join(said)}, {found['earned']:g} here"
    claimed = records.get("cpu", {}).get(stage)
    if claimed and found["groups"] and checks_passed(claimed) != checks_passed(found):
        yield f"{stage}: {checks_passed(claimed)} checks by its record on the CPU, {checks_passed(found)} here"


def _compared(
    text: str, records: Records, files: Mapping[str, bytes], answers: Sequence[str], course: Course
) -> Iterator[str]:
    """What Results.md has that these records do not give, and the reverse."""
    whole = {device: {"device": device, "stages": entries} for device, entries in records.items()}
    ours = _lines(text)
    try:
        with _as_handed_in(files, answers, course) as root:
            # Marks of what is stale may be missing: what was handed in may be newer than Results.md.
            ways = [_lines(rendered(text, whole, stale)) for stale in (Stale(root), _nothing)]
    except MarkerError as error:
        yield f"{error}"
        return
    theirs = min(ways, key=lambda lines: len(set(ours) ^ set(lines)))
    more = [line for line in ours if line not in set(theirs)]
    yield from (f"{FORM} says {line[:150]!r}; its records do not" for line in more[:LINES])
    if more[LINES:]:
        yield f"{FORM} says {len(more) - LINES} more lines that its records do not"
    if lacking := set(theirs) - set(ours):
        yield f"{FORM} lacks {len(lacking)} lines that its records give"


def _nothing(stage: str, run: Mapping[str, Any]) -> str:
    return ""


def _lines(text: str) -> list[str]:
    """What the program writes, without the hash of it."""
    lines = [line.rstrip() for part in sections(text, "grade") for line in part.splitlines()]
    return [line for line in lines if line and not line.startswith("<!--")]


@contextmanager
def _as_handed_in(
    files: Mapping[str, bytes], answers: Sequence[str], course: Course
) -> Iterator[Path]:
    """The sources of a stage as the student has them, to see which records are stale. They are not run."""
    with tempfile.TemporaryDirectory(prefix="sources-", dir=course.edition.parent) as folder:
        root = Path(folder) / "sources"
        shutil.copytree(course.edition, root, ignore=shutil.ignore_patterns(".*", "tiny_gpt2"))
        for name in set(answers) & files.keys():
            (root / name).write_bytes(files[name])
        yield root


# Times ------------------------------------------------------------------------------------------------


def _times(stage: str, records: Records, result: Result) -> list[str] | None:
    """A stage's claimed times beside the measured ones; None if there are claims and nothing was measured."""
    entry = records.get("cuda", {}).get(stage)
    if not entry or not entry["benchmarks"]:
        return []
    if not (speed := result["stages"][stage].get("speed")):
        return None
    claimed = {name: found["ours"]["median_ms"] for name, found in entry["benchmarks"].items()}
    measured = {name: found["ours_ms"] for name, found in speed.items()}
    gpu = entry["run"]["machine"].get("gpu", "no GPU")
    return [f"{stage}, on {gpu}: {line}" for line in compare_times(claimed, measured)]


def compare_times(claimed: Mapping[str, float], measured: Mapping[str, float]) -> list[str]:
    """A line for each claim that is off by more than 10 %, with the measured value; one for all that was not measured.

    Args:
        claimed, measured: milliseconds by name of benchmark.
    """
    lines = []
    for name, ms in claimed.items():
        here = measured.get(name)
        if here is not None and not abs(ms - here) <= OFF * here:  # NaN is off
            lines.append(f"{name}: {ms:.4g} ms claimed, {here:.4g} ms measured here")
    if others := [name for name in claimed if name not in measured]:
        lines.append(f"claimed, and not measured here: {', '.join(others)}")
    return lines
