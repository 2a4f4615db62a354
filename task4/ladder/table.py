"""What was measured: kept in table.json, and written into README.md between its markers.

table.json    by kind (bfloat16, float16, float32, tf32): the ceiling, and by cell the time of every rung and peer. A
              run replaces what it measured itself. Each figure names the run that it comes from, and a rung's carries
              the peers' of the same run, because ratios between two runs mean little.
README.md     <!-- ladder: table --> ... <!-- end: table -->, and the same for bars and profile; the rest is as it was
              written.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from common.marked import write_atomically
from common.record import describe_run, sources_hash, write_json
from task4.ladder.rungs import FASTEST_FIRST, FOLDER, RUNGS, Rung, by_number
from task4.ladder.speed import (
    CUDNN,
    EFFICIENT,
    FA3,
    HEAD_DIMS,
    KINDS,
    LONGEST,
    PEERS,
    SEQS,
    Cell,
    HostCost,
    Measured,
    rung_name,
    takes,
)

TABLE, README, ANCHORS = FOLDER / "table.json", FOLDER / "README.md", FOLDER / "fa3.json"
# The columns of the short table: d 64 and 128, a length that the slowest rungs still reach, and the longest.
SHORT = [
    Cell(d, s, causal)
    for d, s in ((64, 2048), (128, 2048), (128, 16384))
    for causal in (False, True)
]

Record = dict[str, Any]


class Records:
    """table.json, with what this run adds to it; written after each addition, so that nothing is lost."""

    def __init__(self) -> None:
        self.run = ""  # the date of the run that adds
        self.kinds: Record = json.loads(TABLE.read_text()) if TABLE.exists() else {}

    def begin(self, kind: str, run: Mapping[str, Any], tflops: float) -> None:
        """What is added from now on to this kind comes from ``run``; ``tflops`` is the ceiling in it."""
        record = self.kinds.setdefault(kind, {"runs": {}, "cells": {}, "accuracy": {}})
        self.run = run["date"]
        record["runs"][self.run] = dict(run)
        record["ceiling"] = {"tflops": tflops, "run": self.run}

    def add(self, kind: str, cell: Cell, found: Measured) -> None:
        """A cell that was measured."""
        entries = self.kinds[kind]["cells"].setdefault(cell.name, {})
        tflops = {name: cell.flops / t.median_ms / 1e9 for name, t in found.times.items()}
        against = {name: value for name, value in tflops.items() if name in PEERS}
        for name, timing in found.times.items():
            entry = {**timing.as_record(), "tflops": tflops[name], "run": self.run}
            entries[name] = entry if name in PEERS else entry | {"against": against}
        for name, reason in found.left_out.items():
            entries[name] = {"left_out": reason, "run": self.run}
        self._write(kind)

    def add_accuracy(
        self, kind: str, rung: Rung, head_dim: int, ratios: Mapping[str, float], against: str
    ) -> None:
        """How many times more than PyTorch's kernel a rung loses."""
        entry = {**ratios, "against": against, "run": self.run}
        self.kinds[kind]["accuracy"].setdefault(f"d{head_dim}", {})[rung_name(rung)] = entry
        self._write(kind)

    def add_dispatch(self, kind: str, cost: HostCost) -> None:
        """What a call costs the host."""
        self.kinds[kind]["dispatch"] = {**asdict(cost), "run": self.run}
        self._write(kind)

    def add_profile(
        self, kind: str, run: Mapping[str, Any], cell: Cell, kernels: Mapping[str, list[Record]]
    ) -> None:
        """What ``counters.show`` found in this run."""
        record = self.kinds.setdefault(kind, {"runs": {}, "cells": {}, "accuracy": {}})
        record["runs"][run["date"]] = dict(run)
        entries = record.setdefault("profile", {}).setdefault(cell.name, {})
        entries.update({n: {"kernels": found, "run": run["date"]} for n, found in kernels.items()})
        self._write(kind)

    def _write(self, kind: str) -> None:
        record = self.kinds[kind]
        used = {entry["run"] for entry in [*_entries(record), *_profiled(record)]}
        record["runs"] = {date: run for date, run in record["runs"].items() if date in used}
        write_json(TABLE, self.kinds)


def _entries(record: Record) -> Iterator[Record]:
    """Everything of the tables and the bars that names a run."""
    for group in (record["cells"], record["accuracy"]):
        for entries in group.values():
            yield from entries.values()
    yield from (record[key] for key in ("ceiling", "dispatch") if key in record)


def _profiled(record: Record) -> Iterator[Record]:
    """What bounds the rungs, which names its runs as well."""
    for entries in record.get("profile", {}).values():
        yield from entries.values()


# ---- README.md


def write_readme(kinds: Record) -> None:
    """Fill in README.md.

    Raises:
        ValueError: a marker is missing.
    """
    text = README.read_text(encoding="utf-8")
    for name, lines in (
        ("table", _tables(kinds)),
        ("bars", _all_bars(kinds)),
        ("profile", _profiles(kinds)),
    ):
        begin, end = f"<!-- ladder: {name} -->", f"<!-- end: {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"task4/ladder/README.md: the marker {begin} or its {end} is missing")
        body = "\n".join([begin, *lines, end])
        text = pattern.sub(lambda _, body=body: body, text)
    write_atomically(README, text)


def _tables(kinds: Record) -> list[str]:
    lines: list[str] = []
    for kind in KINDS:
        if kind in kinds and kinds[kind]["cells"]:
            lines += ["", f"### {kind}", "", *_short_table(kind, kinds[kind]), "", *_pictures(kind)]
            lines += [*_long_tables(kind, kinds[kind]), "", *_notes(kinds[kind])]
    return (
        [*lines, ""] if lines else ["", "Not measured yet: `python -m task4.ladder` on a GPU.", ""]
    )


def names(kind: str) -> list[str]:
    """Rungs and peers of a kind in ladder order."""
    return [rung_name(r) for r in RUNGS if takes(r, kind)] + list(PEERS)


def _short_table(kind: str, record: Record) -> list[str]:
    titles = [f"d {c.head_dim}, S {c.seq:,}{', causal' if c.causal else ''}" for c in SHORT]
    lines = [f"| rung | what changes | {' | '.join(titles)} |", "|---|---|" + "---|" * len(SHORT)]
    for name in names(kind):
        entries = [record["cells"].get(cell.name, {}).get(name) for cell in SHORT]
        if name in PEERS and not any(e and "tflops" in e for e in entries):
            continue
        cells = [_figure(entry, record) for entry in entries]
        lines.append(f"| {_label(name)} | {_change(name)} | {' | '.join(cells)} |")
    tflops = record["ceiling"]["tflops"]
    lines += [
        "",
        f"TFLOP/s, the share of a matrix product of 8192 cubed ({tflops:.0f} TFLOP/s), and the ratio to the best of",
    ]
    lines += ["PyTorch's kernels and FlashAttention-3 in the same run. A dash: not measured."]
    return lines


def _figure(entry: Record | None, record: Record) -> str:
    if entry is None or "tflops" not in entry:
        return "-"
    share = entry["tflops"] / record["ceiling"]["tflops"]
    text = (
        f"{_number(entry['tflops'])}<br>{share:.0%}"
        if share >= 0.01
        else f"{_number(entry['tflops'])}<br>{share:.1%}"
    )
    if ratio := best_ratio(entry):
        text += f", {ratio:.2f}x" if ratio >= 0.1 else f", {ratio:.2g}x"
    return text


def _number(tflops: float) -> str:
    return f"{tflops:.0f}" if tflops >= 100 else f"{tflops:.3g}"


def best_ratio(entry: Record) -> float | None:
    """A rung's speed as a multiple of the fastest peer's in the same run."""
    against = entry.get("against")
    return entry["tflops"] / max(against.values()) if against else None


def _label(name: str) -> str:
    if name in PEERS:
        return f"*{name}*"
    rung = by_number(int(name.split()[1]))
    return f"[{rung.number} {rung.name}]({rung.file})"


def _change(name: str) -> str:
    return "" if name in PEERS else by_number(int(name.split()[1])).change


def _pictures(kind: str) -> list[str]:
    lines: list[str] = []
    for head_dim in HEAD_DIMS:
        picture = picture_name(kind, head_dim)
        if (FOLDER / picture).exists():
            lines += [
                f"![TFLOP/s and time over the sequence length, {kind}, head_dim {head_dim}]({picture})",
                "",
            ]
    return lines


def picture_name(kind: str, head_dim: int) -> str:
    return f"{kind}-d{head_dim}.png"


def _long_tables(kind: str, record: Record) -> list[str]:
    lines = ["<details><summary>All lengths</summary>", ""]
    reasons: dict[str, None] = {}
    for head_dim in HEAD_DIMS:
        for causal in (False, True):
            cells = [Cell(head_dim, seq, causal) for seq in SEQS]
            rows = {n: [record["cells"].get(c.name, {}).get(n) for c in cells] for n in names(kind)}
            rows = {n: row for n, row in rows.items() if any(e and "tflops" in e for e in row)}
            if not rows:
                continue
            mask = "causal" if causal else "not causal"
            lines += [f"head_dim {head_dim}, {mask}: TFLOP/s", ""]
            lines += [
                "| S | " + " | ".join(f"{s:,}" for s in SEQS) + " |",
                "|---|" + "---|" * len(SEQS),
            ]
            for name, row in rows.items():
                shown = [_number(e["tflops"]) if e and "tflops" in e else "-" for e in row]
                lines.append(f"| {name} | {' | '.join(shown)} |")
            lines.append("")
    for entries in record["cells"].values():
        for name, entry in entries.items():
            if "left_out" in entry:
                reasons[f"{name}: {_general(entry['left_out'])}"] = None
    lines += [f"- {reason}" for reason in sorted(reasons)]
    return [*lines, "", "</details>"]


def _general(reason: str) -> str:
    """Without the seconds, which differ from length to length."""
    return re.sub(
        r"a run would take about [\d.]+ s",
        f"where a run would take more than {LONGEST:g} s",
        reason,
    )


def _notes(record: Record) -> list[str]:
    lines = []
    if host := record.get("dispatch"):
        lines.append(
            f"A call costs the host {host['dispatch_us']:.1f} us to check its arguments and choose the rung,"
            f" {host['allocate_us']:.1f} us to allocate the output and {host['launch_us']:.1f} us to launch through"
            " ctypes."
        )
        lines.append("")
    return lines + _runs(record, _entries(record))


def _runs(record: Record, entries: Iterator[Record]) -> list[str]:
    """Which runs these figures are from."""
    runs = [record["runs"][date] for date in sorted({entry["run"] for entry in entries})]
    lines = [f"Run of {describe_run(run)}" + ("  " if run is not runs[-1] else "") for run in runs]
    if versions := sorted({run["fa3"] for run in runs if run.get("fa3")}):
        lines += ["", f"FlashAttention-3: {', '.join(versions)}"]
    if any(stale(run) for run in runs):
        lines += ["", "The kernels have changed since."]
    return lines


def stale(run: Mapping[str, Any]) -> bool:
    """Whether a kernel has changed since that run."""
    return sources_hash(run["sources"]["patterns"]) != run["sources"]["sha256"]


# ---- the bars


def default_rung(kind: str, head_dim: int) -> str | None:
    """The rung that a call without a name gets on a Hopper GPU; None for tf32, of which a rung has to be named."""
    if kind == "tf32":
        return None
    for number in FASTEST_FIRST:
        rung = by_number(number)
        if takes(rung, kind) and head_dim in rung.head_dims:
            return rung_name(rung)
    return None


def bar(kind: str, cell: Cell) -> float | None:
    """How many times faster than its rival the best rung has to be; None where nothing is asked."""
    if kind == "float32":
        return 2.5 if cell.seq >= 2048 else None
    if cell.head_dim not in (64, 128):
        return None
    return 1.05 if cell.seq >= 2048 else 1.0


def rivals(kind: str, cell: Cell, against: Mapping[str, float]) -> dict[str, float]:
    """Whom the bar is measured by: TFLOP/s by name."""
    if kind == "float32":
        return {EFFICIENT: against[EFFICIENT]} if EFFICIENT in against else {}
    found = {name: against[name] for name in (CUDNN, FA3) if name in against}
    if FA3 not in found and CUDNN in found and (ratio := _anchor(cell)):
        found[f"{FA3}*"] = found[CUDNN] * ratio
    return found


def _anchor(cell: Cell) -> float | None:
    """FlashAttention-3 as a multiple of cuDNN, where it was measured."""
    for head_dim, seq, causal, fa3, cudnn in json.loads(ANCHORS.read_text())["rows"]:
        if Cell(head_dim, seq, causal) == cell:
            return fa3 / cudnn
    return None


def standing(kind: str, record: Record, cell: Cell) -> tuple[float, str, float | None] | None:
    """The default rung's ratio to its rival in a cell, the rival's name, and the bar; None if it was not measured."""
    entry = record["cells"].get(cell.name, {}).get(default_rung(kind, cell.head_dim) or "", {})
    found = rivals(kind, cell, entry.get("against", {})) if "tflops" in entry else {}
    if not found:
        return None
    rival = max(found, key=found.__getitem__)
    return entry["tflops"] / found[rival], rival, bar(kind, cell)


def _all_bars(kinds: Record) -> list[str]:
    lines: list[str] = []
    for kind in ("bfloat16", "float16", "float32"):
        if kind in kinds:
            lines += ["", *_bars(kind, kinds[kind])]
    if any("\\*" in line for line in lines):
        source = json.loads(ANCHORS.read_text())["source"]
        lines += [
            "",
            "\\* FlashAttention-3 was not installed. Its speed is cuDNN's of this run, times their ratio in",
        ]
        lines += [f"[fa3.json](fa3.json): {source}."]
    return [*lines, ""] if lines else ["", "Not measured yet.", ""]


def _bars(kind: str, record: Record) -> list[str]:
    rival = "the better of cuDNN and FlashAttention-3"
    asked = "1.05 from S 2,048 on, 1.00 before, at head_dim 64 and 128"
    if kind == "float32":
        rival, asked = EFFICIENT, "2.5 from S 2,048 on"
    lines = [
        f"**{kind}**: times as fast as {rival}. Asked for: {asked}.",
        "",
        "| | rung | " + " | ".join(f"S {s:,}" for s in SEQS) + " |",
        "|---|---|" + "---|" * len(SEQS),
    ]
    met = total = 0
    for head_dim in HEAD_DIMS:
        for causal in (False, True):
            found = [standing(kind, record, Cell(head_dim, seq, causal)) for seq in SEQS]
            if not any(found):
                continue
            row = []
            for standing_ in found:
                if standing_ is None:
                    row.append("-")
                    continue
                ratio, rival, least = standing_
                star = "\\*" if rival.endswith("*") else ""
                row.append(
                    f"{ratio:.2f}{star}"
                    if least is None or ratio >= least
                    else f"**{ratio:.2f}**{star}"
                )
                total += least is not None
                met += least is not None and ratio >= least
            rung = (default_rung(kind, head_dim) or "").removeprefix("rung ")
            lines.append(
                f"| d {head_dim}{', causal' if causal else ''} | {rung} | {' | '.join(row)} |"
            )
    lines += ["", f"{met} of {total} met; **bold**: not met." if total else "Nothing measured."]
    return lines + _accuracy_lines(kind, record)


def _accuracy_lines(kind: str, record: Record) -> list[str]:
    if not record["accuracy"]:
        return []
    from task4.ladder.accuracy import ALLOWED

    lines = []
    for width, entries in sorted(record["accuracy"].items(), key=lambda item: int(item[0][1:])):
        rung = default_rung(kind, int(width[1:]))
        if rung in entries:
            entry = entries[rung]
            lines.append(
                f"{rung} at d {width[1:]}: {entry['rms']:.2f} (root mean square),"
                f" {entry['largest']:.2f} (largest, mean of the heads)"
            )
    if not lines:
        return []
    against = next(iter(next(iter(record["accuracy"].values())).values()))["against"]
    allowed = ALLOWED[KINDS[kind]]
    return [
        "",
        f"Loss against float64, as a multiple of {against}'s (allowed: {allowed:g}): {'; '.join(lines)}.",
    ]


# ---- what bounds them


def _profiles(kinds: Record) -> list[str]:
    lines: list[str] = []
    for kind, record in kinds.items():
        for cell, entries in record.get("profile", {}).items():
            lines += ["", f"**{kind}, {cell}**", "", *_profile(kind, entries)]
        lines += ["", *_runs(record, _profiled(record))] if record.get("profile") else []
    return (
        [*lines, ""]
        if lines
        else ["", "Not looked at yet: `python -m task4.ladder --profile` on a GPU.", ""]
    )


def _profile(kind: str, entries: Record) -> list[str]:
    from task4.ladder.counters import UNITS

    lines = [
        f"| | registers | spilled bytes | shared KiB | blocks an SM | warps | {' | '.join(UNITS)} | waits mostly for |",
        "|---|---|---|---|---|---|" + "---|" * len(UNITS) + "---|",
    ]
    for name in names(kind):
        for kernel in entries.get(name, {}).get("kernels", []):
            spilled = "-" if kernel["spilled"] is None else kernel["spilled"]
            units = (f"{kernel['units'][u]:.0f}" if u in kernel["units"] else "-" for u in UNITS)
            wait = max(kernel["stalls"], key=kernel["stalls"].__getitem__, default="-")
            lines.append(
                f"| {_label(name)} | {kernel['registers']} | {spilled} | {kernel['shared'] / 1024:.0f}"
                f" | {kernel['resident']} | {kernel['occupancy']:.0%} | {' | '.join(units)} | {wait} |"
            )
    return lines


def printed(kind: str, record: Record, cells: Sequence[str], run: str) -> Iterator[list[str]]:
    """Rows for the terminal: a name, and TFLOP/s in each of the named cells, as far as they are of this run."""
    for name in names(kind):
        entries = [record["cells"].get(cell, {}).get(name, {}) for cell in cells]
        figures = [
            _number(e["tflops"]) if "tflops" in e and e["run"] == run else "-" for e in entries
        ]
        if set(figures) != {"-"}:
            yield [name, *figures]
