"""Results.md from the records: only the text between its markers is replaced.

<!-- grade: stages -->
written by the program
<!-- end: stages -->
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from common.marked import replace, sections
from common.paths import ROOT
from common.record.points import POINTS
from common.record.provenance import describe_machine, describe_run
from common.record.verify import Stale
from common.timing import show_rates, show_timing

FIGURES = ("task4", "task5", "task6", "task7")  # tasks that are timed, or write a text
DEVICES = ("cpu", "cuda")

# By device: {"device": "cuda", "stages": {"task4": what merge() made of its runs}}
Records = Mapping[str, Mapping[str, Any]]
Run = Mapping[str, Any]
Changed = Callable[[Run], str]  # what has changed since a run of one stage

_SEAL = (
    "<!-- written by make grade: {} -->"  # the last line that it writes, with a hash of all others
)


def render(text: str, records: Records, root: Path = ROOT) -> str:
    """The text of Results.md with every section written anew from the records ``{"cpu": ...}``.

    Raises:
        MarkerError: a marker is missing, doubled or out of place.
    """
    return rendered(text, records, Stale(root))


def rendered(text: str, records: Records, stale: Callable[[str, Run], str]) -> str:
    """The same; ``stale`` says what has changed since a stage's run, see :class:`common.record.verify.Stale`."""
    written = {
        "stages": _stages(records, stale),
        **{task: _figures(task, records, partial(stale, task)) for task in FIGURES},
        "machines": _machines(records),
    }
    text = replace(text, "grade", written, file="Results.md")
    written["machines"].append(_seal(text))
    return replace(text, "grade", written, file="Results.md")


def edited(text: str) -> bool:
    """Whether what stands between the markers of Results.md is something else than :func:`render` wrote there."""
    return _seal(text) not in text


def _seal(text: str) -> str:
    """Spaces at the end of a line do not count, which editors remove."""
    pattern = re.escape(_SEAL).replace(r"\{\}", "[0-9a-f]*")
    lines = [line.rstrip() for part in sections(text, "grade") for line in part.splitlines()]
    kept = "\n".join(line for line in lines if not re.fullmatch(pattern, line))
    return _SEAL.format(hashlib.sha256(kept.encode()).hexdigest())


def _stage(records: Records, device: str, name: str) -> Mapping[str, Any] | None:
    return records.get(device, {}).get("stages", {}).get(name)


def _stages(records: Records, stale: Callable[[str, Run], str]) -> list[str]:
    lines = [
        "| task | checks on the CPU | checks on a GPU | points |",
        "|---|---|---|---|",
    ]
    total = 0.0
    for name, points in POINTS.items():
        entries = [_stage(records, device, name) for device in DEVICES]
        # The lower of the two machines counts, and only results of the sources as they are now.
        changed = partial(stale, name)
        current = [e["earned"] for e in entries if e is not None and not changed(e["run"])]
        total += min(current, default=0)
        cells = [_checks(entry, changed) for entry in entries]
        score = f"{min(current):g} of {points}" if current else f"- of {points}"
        lines.append(f"| {name} | {' | '.join(cells)} | {score} |")
    lines.append(f"| total | | | **{total:g} of {sum(POINTS.values())}** |")
    return lines


def _checks(entry: Mapping[str, Any] | None, changed: Changed) -> str:
    if entry is None:
        return "not run"
    text = checks_passed(entry)
    failed = [group["name"] for group in entry["groups"] if group["status"] != "passed"]
    if failed:
        text += f" ({', '.join(failed)}: {entry['status']})"
    what = changed(entry["run"])
    return text + (f", **stale**: {what} changed since" if what else "")


def checks_passed(entry: Mapping[str, Any]) -> str:
    """``33 of 33``, or the stage's status if no check was reached."""
    total = sum(group["total"] for group in entry["groups"])
    passed = sum(group["passed"] for group in entry["groups"])
    return f"{passed} of {total}" if total else entry["status"]


def _figures(name: str, records: Records, changed: Changed) -> list[str]:
    cpu, cuda = (_stage(records, device, name) for device in DEVICES)
    notes = _Footnotes(changed)
    benchmarks = (cuda or {}).get("benchmarks", {})
    fields = list(dict.fromkeys([*(cuda or {}).get("fields", []), *(cpu or {}).get("fields", [])]))
    lines = []
    if fields:
        lines += ["| | ours | rate | against | run |", "|---|---|---|---|---|"]
        lines += [_benchmark_row(field, benchmarks.get(field), notes) for field in fields]
    texts = {**(cpu or {}).get("texts", {}), **_fresh((cuda or {}).get("texts", {}), cpu, changed)}
    for title, text in texts.items():
        lines += ["", f"{title} [{notes.number(text['run'])}]:", ""]
        lines += [f"> {line}".rstrip() for line in _as_quote(text["text"])]
    if not lines:
        return ["Not run yet."]
    return [*lines, "", *notes.lines()] if notes.runs else lines


def _fresh(texts: Mapping[str, Any], other: object, changed: Changed) -> dict[str, Any]:
    """A text from a GPU comes first, unless it is stale and the CPU has a newer one."""
    return {k: v for k, v in texts.items() if not (other and changed(v["run"]))}


def _benchmark_row(field: str, found: Mapping[str, Any] | None, notes: "_Footnotes") -> str:
    if found is None:
        return f"| {_cell(field)} | needs a GPU | | | |"
    against = [
        f"**{found['speedups'][baseline]:.2f}x** {_cell(baseline)}, {show_timing(timing)}"
        for baseline, timing in found["baselines"].items()
    ]
    what = f"{_cell(field)}<br>{_cell(found['shape'])}, {found['dtype']}"
    if found["note"]:
        what += f"<br>{_cell(found['note'])}"
    number = notes.number(found["run"])
    ours, rates = show_timing(found["ours"]), "<br>".join(show_rates(found))
    return f"| {what} | {ours} | {rates} | {'<br>'.join(against)} | [{number}] |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _as_quote(text: str) -> list[str]:
    """Lines of a text that a model wrote; nothing in it may look like a marker of ours."""
    return text.replace("<!--", "<\\!--").splitlines() or [""]


class _Footnotes:
    """The runs that a section's figures come from."""

    def __init__(self, changed: Changed) -> None:
        self._changed = changed
        self.runs: list[Run] = []

    def number(self, run: Run) -> str:
        if run not in self.runs:
            self.runs.append(run)
        mark = ", **stale**" if self._changed(run) else ""
        return f"{self.runs.index(run) + 1}{mark}"

    def lines(self) -> list[str]:
        lines = []
        for number, run in enumerate(self.runs, 1):
            lines.append(f"[{number}] {describe_run(run)}" + ("  " if run != self.runs[-1] else ""))
        if changed := {self._changed(run) for run in self.runs} - {""}:
            what = " and ".join(sorted(changed))
            lines += ["", f"Stale: {what} changed since this was measured."]
        return lines


def _machines(records: Records) -> list[str]:
    lines = []
    for device, title in zip(DEVICES, ("CPU", "GPU"), strict=True):
        runs: dict[str, list[str]] = {}
        for name in POINTS:
            if (entry := _stage(records, device, name)) is not None:
                run = entry["run"]
                commit = run["commit"] or "outside of git"
                where = f"{describe_machine(run['machine'])}, commit {commit}"
                where += " with uncommitted changes" if run["dirty"] else ""
                runs.setdefault(f"{run['date'][:10]}, {where}", []).append(name)
        for where, names in runs.items():
            lines.append(f"- {title}, {', '.join(names)}: {where}")
        if not runs:
            lines.append(f"- {title}: not run")
    return lines


def summary(entry: Mapping[str, Any]) -> list[str]:
    """What this run of a stage measured, in a few lines, for the table that grading prints."""
    lines = []
    for name, found in entry["benchmarks"].items():
        if found["run"] != entry["run"]:
            continue
        best = ", ".join(f"{x:.2f}x {baseline}" for baseline, x in found["speedups"].items())
        lines.append(f"{name}: {found['ours']['median_ms']:.4g} ms" + (f", {best}" if best else ""))
    lines += [f"{name}: {' '.join(t['text'].split())[:70]}" for name, t in entry["texts"].items()]
    if entry["device"] == "cpu" and entry["fields"]:
        lines.append("speed: needs a GPU")
    return lines + list(entry["problems"])
