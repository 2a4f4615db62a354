"""Results.md from the records: only what stands between its markers is ever replaced.

<!-- grade: stages -->
written by the program
<!-- end: stages -->
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.check.record import describe_machine, show_timing, sources_hash
from common.check.suite import ROOT

POINTS = {
    "task1": 2,
    "task2": 3,
    "task3": 3,
    "task4": 4,
    "task5": 4,
    "task6": 3,
    "task7": 1,
}
SECTIONS = ("stages", "task4", "task5", "task6", "task7", "machines")
DEVICES = ("cpu", "cuda")

# A record: {"device": "cuda", "stages": {"task4": what merge() made of its reports}}
Records = Mapping[str, Mapping[str, Any]]
Run = Mapping[str, Any]

_MARKER = re.compile(r"<!--\s*(grade|end):\s*(\S*)\s*-->")


class ResultsError(Exception):
    """Results.md cannot be filled in; the text says where and why."""


def merge(old: Mapping[str, Any] | None, report: Mapping[str, Any]) -> dict[str, Any]:
    """A stage's record after another run: what the run measured replaces what was there, the rest stays.

    Every figure carries the run that it comes from: machine, date, commit and sources.
    """
    run = report["run"]
    old = old or {}
    # A stage that could not even be imported says nothing about what it measures.
    fields = report["fields"] or old.get("fields", [])
    speeds = {
        name: speed
        for name, speed in old.get("speeds", {}).items()
        if name in fields  # what the stage no longer measures goes
    }
    texts = dict(old.get("texts", {}))
    speeds |= {name: dict(speed, run=run) for name, speed in report["speeds"].items()}
    texts |= {name: {"text": text, "run": run} for name, text in report["texts"].items()}
    return {**report, "fields": fields, "speeds": speeds, "texts": texts}


def render(text: str, records: Records, root: Path = ROOT) -> str:
    """The text of Results.md with every section written anew from the records ``{"cpu": ...}``.

    Raises:
        ResultsError: a marker is missing, doubled or out of place.
    """
    pieces = _split(text)
    newline = "\r\n" if "\r\n" in text else "\n"
    stale = _Stale(root)
    for index, (name, _) in enumerate(pieces):
        if name is None:
            continue
        if name == "stages":
            lines = _stages(records, stale)
        elif name == "machines":
            lines = _machines(records)
        else:
            lines = _figures(name, records, stale)
        pieces[index] = (name, newline + newline.join(lines) + newline)
    return "".join(content for _, content in pieces)


def _split(text: str) -> list[tuple[str | None, str]]:
    """Pieces of the text in order: (section, content between its markers) or (None, all else)."""
    pieces: list[tuple[str | None, str]] = []
    inside: str | None = None
    at, seen = 0, []
    for found in _MARKER.finditer(text):
        kind, name = found.groups()
        line = text.count("\n", 0, found.start()) + 1
        if name not in SECTIONS:
            known = ", ".join(SECTIONS)
            raise ResultsError(
                f"Results.md, line {line}: {found.group()} names no section; there are {known}"
            )
        if kind == "grade":
            if inside is not None:
                raise ResultsError(
                    f"Results.md, line {line}: {found.group()} comes before the end of {inside}"
                )
            if name in seen:
                raise ResultsError(f"Results.md, line {line}: {found.group()} is there twice")
            pieces.append((None, text[at : found.end()]))
            at, inside = found.end(), name
            seen.append(name)
        else:
            if inside != name:
                raise ResultsError(
                    f"Results.md, line {line}: {found.group()} ends what was not begun"
                )
            pieces.append((name, text[at : found.start()]))
            at, inside = found.start(), None
    if inside is not None:
        raise ResultsError(f"Results.md: <!-- end: {inside} --> is missing")
    if missing := [name for name in SECTIONS if name not in seen]:
        raise ResultsError(f"Results.md: the marker <!-- grade: {missing[0]} --> is missing")
    pieces.append((None, text[at:]))
    return pieces


class _Stale:
    """Have the sources of a run changed since? Hashes each set of sources once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._hashes: dict[tuple[str, ...], str] = {}

    def __call__(self, run: Run) -> bool:
        patterns = tuple(run["sources"]["patterns"])
        if patterns not in self._hashes:
            self._hashes[patterns] = sources_hash(patterns, self._root)
        return self._hashes[patterns] != run["sources"]["sha256"]


def _stage(records: Records, device: str, name: str) -> Mapping[str, Any] | None:
    return records.get(device, {}).get("stages", {}).get(name)


def _stages(records: Records, stale: _Stale) -> list[str]:
    lines = [
        "| task | checks on the CPU | checks on a GPU | points |",
        "|---|---|---|---|",
    ]
    total = 0.0
    for name, points in POINTS.items():
        entries = [_stage(records, device, name) for device in DEVICES]
        # The lower of the two machines counts, and only results of the sources as they are now.
        current = [e["earned"] for e in entries if e is not None and not stale(e["run"])]
        total += min(current, default=0)
        cells = [_checks(entry, stale) for entry in entries]
        score = f"{min(current):g} of {points}" if current else f"- of {points}"
        lines.append(f"| {name} | {' | '.join(cells)} | {score} |")
    lines.append(f"| total | | | **{total:g} of {sum(POINTS.values())}** |")
    return lines


def _checks(entry: Mapping[str, Any] | None, stale: _Stale) -> str:
    if entry is None:
        return "not run"
    text = checks_passed(entry)
    failed = [group["name"] for group in entry["groups"] if group["status"] != "passed"]
    if failed:
        text += f" ({', '.join(failed)}: {entry['status']})"
    return text + (", **stale**: sources changed since" if stale(entry["run"]) else "")


def checks_passed(entry: Mapping[str, Any]) -> str:
    """``33 of 33``, or the stage's status if no check was reached."""
    total = sum(group["total"] for group in entry["groups"])
    passed = sum(group["passed"] for group in entry["groups"])
    return f"{passed} of {total}" if total else entry["status"]


def _figures(name: str, records: Records, stale: _Stale) -> list[str]:
    cpu, cuda = (_stage(records, device, name) for device in DEVICES)
    notes = _Footnotes(stale)
    speeds = (cuda or {}).get("speeds", {})
    fields = list(dict.fromkeys([*(cuda or {}).get("fields", []), *(cpu or {}).get("fields", [])]))
    lines = []
    if fields:
        lines += ["| | ours | rate | against | run |", "|---|---|---|---|---|"]
        lines += [_speed_row(field, speeds.get(field), notes) for field in fields]
    texts = {**(cpu or {}).get("texts", {}), **_fresh((cuda or {}).get("texts", {}), cpu, stale)}
    for title, text in texts.items():
        lines += ["", f"{title} [{notes.number(text['run'])}]:", ""]
        lines += [f"> {line}".rstrip() for line in _as_quote(text["text"])]
    if not lines:
        return ["Not run yet."]
    return [*lines, "", *notes.lines()] if notes.runs else lines


def _fresh(texts: Mapping[str, Any], other: object, stale: _Stale) -> dict[str, Any]:
    """A text from a GPU comes first, unless its sources changed and the CPU has a newer one."""
    return {k: v for k, v in texts.items() if not (other and stale(v["run"]))}


def _speed_row(field: str, speed: Mapping[str, Any] | None, notes: "_Footnotes") -> str:
    if speed is None:
        return f"| {_cell(field)} | needs a GPU | | | |"
    rate = []
    if "tflops" in speed:
        rate.append(f"{speed['tflops']:.3g} TFLOP/s{_share(speed, 'tflops_share')}")
    if "gb_per_s" in speed:
        rate.append(f"{speed['gb_per_s']:.4g} GB/s{_share(speed, 'gb_per_s_share')}")
    against = [
        f"**{speed['speedups'][baseline]:.2f}x** {_cell(baseline)}, {show_timing(timing)}"
        for baseline, timing in speed["baselines"].items()
    ]
    what = f"{_cell(field)}<br>{_cell(speed['shape'])}, {speed['dtype']}"
    if speed["note"]:
        what += f"<br>{_cell(speed['note'])}"
    number = notes.number(speed["run"])
    ours = show_timing(speed["ours"])
    return f"| {what} | {ours} | {'<br>'.join(rate)} | {'<br>'.join(against)} | [{number}] |"


def _share(speed: Mapping[str, Any], key: str) -> str:
    return f", {speed[key]:.0%} of the ceiling" if key in speed else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _as_quote(text: str) -> list[str]:
    """Lines of a text that a model wrote; nothing in it may look like a marker of ours."""
    return text.replace("<!--", "<\\!--").splitlines() or [""]


class _Footnotes:
    """The runs that a section's figures come from."""

    def __init__(self, stale: _Stale) -> None:
        self._stale = stale
        self.runs: list[Run] = []

    def number(self, run: Run) -> str:
        if run not in self.runs:
            self.runs.append(run)
        mark = ", **stale**" if self._stale(run) else ""
        return f"{self.runs.index(run) + 1}{mark}"

    def lines(self) -> list[str]:
        lines = []
        for number, run in enumerate(self.runs, 1):
            lines.append(f"[{number}] {describe_run(run)}" + ("  " if run != self.runs[-1] else ""))
        if any(self._stale(run) for run in self.runs):
            lines += ["", "Stale: the sources have changed since this was measured."]
        return lines


def describe_run(run: Run) -> str:
    """Date, commit and machine in one line."""
    commit = f"commit {run['commit']}" if run["commit"] else "outside of git"
    changed = " with uncommitted changes" if run["dirty"] else ""
    return f"{run['date']}, {commit}{changed}, {describe_machine(run['machine'])}"


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


def summary(entry: Mapping[str, Any], only_measured: bool = True) -> Sequence[str]:
    """What a stage measured, in a line or a few, for the table that grading prints."""
    lines = []
    for name, speed in entry["speeds"].items():
        if only_measured and speed["run"] != entry["run"]:
            continue
        best = ", ".join(f"{x:.2f}x {baseline}" for baseline, x in speed["speedups"].items())
        lines.append(f"{name}: {speed['ours']['median_ms']:.4g} ms" + (f", {best}" if best else ""))
    lines += [f"{name}: {' '.join(t['text'].split())[:70]}" for name, t in entry["texts"].items()]
    if entry["device"] == "cpu" and entry["fields"]:
        lines.append("speed: needs a GPU")
    return lines + list(entry["problems"])
