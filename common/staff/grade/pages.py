"""What grading gives: a page for the student, Gradescope's file, a table of the course."""

import csv
import io
import re
from collections.abc import Sequence
from typing import Any

from common.record import POINTS, checks_passed

Result = dict[str, Any]  # what common.staff.grade.one.grade() gives


def feedback(result: Result) -> str:
    """A page for the student, in Markdown."""
    lines = [f"# {result['name']}: {result['total']:g} of {sum(POINTS.values())} points", ""]
    lines += ["| task | checks | points | |", "|---|---|---|---|"]
    for stage, found in result["stages"].items():
        said = found["reason"] or found["status"]
        points = f"{found['earned']:g} of {found['points']:g}"
        lines.append(f"| {stage} | {_checks(found)} | {points} | {said} |")
    lines += _speed(result)
    if result["remarks"]:
        lines += ["", *(f"- {remark}" for remark in result["remarks"])]
    if claims := result.get("claims"):
        lines += ["", "## What Results.md and the records say", ""]
        lines += [f"- {line}" for line in claims["lines"] or ["It fits what was found."]]
        lines += ["", claims["times"]] if claims["times"] else []
    for stage, found in result["stages"].items():
        if found["status"] not in ("passed", "not run"):
            lines += ["", f"## {stage}", "", *_fenced(found["output"])]
    again = f"`python -m taskN.test --device cpu --both --seed {result['seed']}`"
    lines += ["", f"The same inputs again: {again}."]
    if result["ignored"]:
        lines += ["", "Files that are not part of the course, and were not looked at:", ""]
        lines += [f"- {name}" for name in result["ignored"][:20]]
        lines += [f"- and {len(result['ignored']) - 20} more"] if result["ignored"][20:] else []
    return "\n".join(lines) + "\n"


def _speed(result: Result) -> list[str]:
    """The table of what was timed on a GPU."""
    rows = []
    for stage, found in result["stages"].items():
        for name, times in found.get("speed", {}).items():
            low, high = times["interval"]
            ratio = f"{times['ratio']:.2f} ({low:.2f} to {high:.2f}, n {times['n']})"
            part = times["problem"] or f"{times['part']:.0%}"
            both = f"{times['ours_ms']:.4g} | {times['reference_ms']:.4g}"
            rows.append(f"| {stage}, {name} | {both} | {ratio} | {part} |")
    head = "| timed on a GPU | ms | the course's kernel, ms | times as fast | of the points for speed |"
    return ["", head, "|---|---|---|---|---|", *rows] if rows else []


def _fenced(lines: Sequence[str]) -> list[str]:
    """Lines as they are, whatever the code that was graded has written into them."""
    lines = ["".join(c if c.isprintable() else ascii(c)[1:-1] for c in line) for line in lines]
    longest = max((len(run) for line in lines for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}text", *lines, fence]


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
        remarks = "; ".join([*result["remarks"], *result.get("claims", {}).get("lines", [])])
        writer.writerow([_cell(result["name"]), *earned, f"{result['total']:g}", _cell(remarks)])
    return stream.getvalue()


def _cell(text: str) -> str:
    """A spreadsheet takes a text that begins like this for a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text
