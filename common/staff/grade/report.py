"""The report for the class, OUT/report.md: how the points are distributed, what went wrong, and the leaderboard.

It names no submission: grades.csv does. What students wrote, such as the text of an error, stands in code spans.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from common.staff.grade import leaderboard

Results = Sequence[
    Mapping[str, Any]
]  # what common.staff.grade.one.graded() gives, for each submission

SHOWN = 5  # failures of a stage
WIDTH = 160  # characters of a failure


class Cluster(NamedTuple):
    """The same mistake in several submissions: what it is, in how many, and the words of one of them."""

    stage: str
    mistake: str
    submissions: int
    example: str


def report(results: Results, *, picture: str = "") -> str:
    """The page, in Markdown.

    Args:
        results: of all submissions.
        picture: the file with the chart, where there is one.
    """
    counted = graded(results)
    lines = [f"# {_count(len(results), 'submission')}", ""]
    if picture:
        lines += [f"![distribution of the points, and common failures]({picture})", ""]
    lines += [*_points(counted), "", *_failures(counted)]
    lines += ["", *_not_graded(results), "", *_leaderboard(counted)]
    return "\n".join(lines) + "\n"


def graded(results: Results) -> Results:
    """Without those that could not be read or graded."""
    return [result for result in results if "key" in result]


def stages(counted: Results) -> dict[str, float]:
    """The points of each stage."""
    return {name: stage["points"] for r in counted[:1] for name, stage in r["stages"].items()}


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


# Points -----------------------------------------------------------------------------------------------


def _points(counted: Results) -> list[str]:
    lines = ["## Points", ""]
    if not counted:
        return [*lines, "No submission was graded."]
    lines.append(f"Of the {_count(len(counted), 'submission')} that could be graded.")
    lines += [
        "",
        "| | points | lower quartile | median | upper quartile | full points | 0 points |",
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for stage, points in stages(counted).items():
        lines.append(_row(stage, points, [r["stages"][stage]["earned"] for r in counted]))
    points = sum(stages(counted).values())
    lines.append(_row("total", points, [result["total"] for result in counted]))
    return lines


def _row(name: str, points: float, earned: Sequence[float]) -> str:
    lower, median, upper = np.quantile(earned, (0.25, 0.5, 0.75))
    full, none = sum(e >= points for e in earned), sum(e == 0 for e in earned)
    return f"| {name} | {points:g} | {lower:.3g} | {median:.3g} | {upper:.3g} | {full} | {none} |"


# Failures ---------------------------------------------------------------------------------------------


def clusters(counted: Results) -> list[Cluster]:
    """The failures, in each stage the most common first. A stage that is not written has none."""
    seen: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for result in counted:
        for stage, found in result["stages"].items():
            texts = [text for group in found["groups"] for text in group["failures"]]
            if found["reason"] and not found["reason"].endswith("is not written"):
                texts.append(found["reason"])
            texts = [text for text in texts if "\n    not run: " not in text]  # another one is why
            own = {mistake(text): text for text in reversed(texts)}
            for what, text in own.items():
                seen[stage, what].append(_shortened(text))
    found = [Cluster(stage, what, len(texts), texts[0]) for (stage, what), texts in seen.items()]
    order = list(stages(counted))
    return sorted(found, key=lambda c: (order.index(c.stage), -c.submissions, c.mistake))


def mistake(text: str) -> str:
    """What went wrong in the text of a failure, in one line, without the numbers and places that differ."""
    head, *rest = text.splitlines() or [""]
    said = [line.strip() for line in rest]
    if usual := next((line for line in said if line.startswith("usually: ")), ""):
        return usual.removeprefix("usually: ").removesuffix(
            ": that mistake gives exactly these numbers"
        )
    if "Traceback (most recent call last):" in said:
        begin = said.index("Traceback (most recent call last):")
        indent = len(rest[begin]) - len(said[begin])
        ends = (line.strip() for line in rest[begin + 1 :] if not line[indent:].startswith(" "))
        line = next(ends, head)
    elif re.search(r", case '.*' on \w+", head):
        line = next(iter(said[1:]), head)  # after why there is this case
    else:
        line = next((line for line in (head, *said) if "error:" in line), head)
    return _general(line)


def _general(line: str) -> str:
    line = re.sub(r"[\w./-]*/([\w.-]+\.\w+)(:\d+)*", r"\1", line)  # a path, and its line
    line = re.sub(r"0x[0-9a-fA-F]+", "#", line)
    line = re.sub(r"(?<![\w#])[-+]?\d[\d,]*\.?\d*(e[-+]?\d+)?(?![\w.])", "#", line)
    return _cut(line)


def _shortened(text: str) -> str:
    """A failure's first lines as one line, without why there is this case."""
    lines = [line.strip() for line in text.splitlines()]
    if len(lines) > 2 and ", case '" in lines[0]:
        del lines[1]
    said = [line for line in lines if not line.startswith(("usually: ", "again: "))]
    return _cut("; ".join(said[:3]), 2 * WIDTH)


def _cut(text: str, width: int = WIDTH) -> str:
    text = "".join(c if c.isprintable() else " " for c in text).strip()
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _code(text: str) -> str:
    return "`" + text.replace("`", "'") + "`"


def _failures(counted: Results) -> list[str]:
    lines = ["## Common failures", ""]
    found = clusters(counted)
    if not found:
        return [*lines, "None."]
    for stage in dict.fromkeys(cluster.stage for cluster in found):
        own = [cluster for cluster in found if cluster.stage == stage]
        lines += [f"### {stage}", ""]
        for cluster in own[:SHOWN]:
            lines.append(
                f"- {_count(cluster.submissions, 'submission')}: {_code(cluster.mistake)}  "
            )
            lines.append(f"  for example {_code(cluster.example)}")
        if more := len(own) - SHOWN:
            lines += [f"- and {more} more"] if more > 0 else []
        lines.append("")
    return lines[:-1]


# What could not be graded -----------------------------------------------------------------------------


def _not_graded(results: Results) -> list[str]:
    lines = ["## Not read or not graded", ""]
    without = [result for result in results if "key" not in result]
    if not without:
        return [*lines, "Every submission was read and graded."]
    reasons = Counter(_general(result["remarks"][0]) for result in without)
    lines += [
        f"- {_count(n, 'submission')}: {_code(reason)}" for reason, n in reasons.most_common()
    ]
    return [*lines, "", "grades.csv says which."]


# The leaderboard --------------------------------------------------------------------------------------


def _leaderboard(counted: Results) -> list[str]:
    lines = ["## Leaderboard", ""]
    if not any(found.get("speed") for r in counted for found in r["stages"].values()):
        return [*lines, "None: no speed was measured. That needs a GPU."]
    taking_part = sum(bool(result["leaderboard"]) for result in counted)
    lines.append(
        f"{_count(taking_part, 'submission')} of {len(counted)} take part, by a name in"
        f" {leaderboard.FILE}. A stage ranks those whose checks all passed, by the time of the"
        " course's kernel divided by theirs (geometric mean)."
    )
    for stage in stages(counted):
        if rows := leaderboard.ranking(counted, stage):
            names = list(rows[0].milliseconds)
            lines += ["", f"### {stage}", ""]
            lines.append(f"| | name | speed | {' | '.join(f'{name}, ms' for name in names)} |")
            lines.append("|---|---|---|" + "---|" * len(names))
            for row in rows:
                times = " | ".join(f"{row.milliseconds[name]:.4g}" for name in names)
                lines.append(f"| {row.place} | {_code(row.name)} | {row.ratio:.2f}x | {times} |")
    return lines
