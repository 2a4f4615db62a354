"""What was measured, as people read it: README.md and RESULTS.md between their markers, and the terminal's tables."""

import re
from collections.abc import Iterable

import torch

from common.build import dtype_code
from common.marked import replace, write_atomically
from common.record import describe_run, sources_hash
from common.record.grid import Grid
from task5.ladder.bars import best_peer
from task5.ladder.benchmark import (
    BF16,
    CURVES,
    INVARIANT,
    NO_PROMISE,
    OURS,
    PAGES,
    SHAPES,
    Shape,
    paged,
)
from task5.ladder.choice import fastest
from task5.ladder.kernels import Call
from task5.ladder.peers import LABELS
from task5.ladder.record import Record, Run, Tables, Times
from task5.ladder.rungs import FOLDER, RUNGS

PICTURE = "decode.png"
STALE = "The kernels have changed since."
NOT_YET = ["Not measured yet: `python -m task5.ladder` on a GPU.", ""]
NO_UNEVEN = ["Not measured yet: `python -m task5.ladder --uneven` on a GPU.", ""]
NO_PREFILL = ["Not measured yet: `python -m task5.ladder --prefill` on a GPU.", ""]
NO_STEPS = ["Not measured yet: `python -m task5.ladder --steps 10000` on a GPU.", ""]
TIMED = (*SHAPES, *(s for shapes in CURVES.values() for s in shapes if s not in SHAPES))
# The columns of README.md's table: a short call, a medium one, and long ones of one sequence and of many.
README_SHAPES = (
    Shape(1, 32, 8, 1024),
    Shape(8, 32, 8, 2048),
    Shape(1, 32, 8, 131072),
    Shape(16, 32, 8, 8192),
)
# Of its table of choices: kv heads of all sequences, and keys of each.
PAIRS = (1, 2, 8, 16, 32, 64, 128, 256, 512)
KEYS = tuple(2**n for n in (9, 10, 11, 12, 13, 14, 16, 17))
H200 = Call(torch.device("cuda"), dtype_code(BF16), head_dim=128, rows=4, sms=132, hopper=True)


def rendered(record: Record) -> dict[str, str]:
    """The text of each file, by its name.

    Raises:
        MarkerError: a marker is missing.
    """
    parts = {"times": _times(record.times) if record.times else NOT_YET}
    parts["bars"] = _tables(record.bars) if record.bars else NOT_YET
    parts["uneven"] = _tables(record.uneven) if record.uneven else NO_UNEVEN
    parts["prefill"] = _tables(record.prefill) if record.prefill else NO_PREFILL
    parts["steps"] = _tables(record.steps) if record.steps else NO_STEPS
    readme = {"table": _overview(record.times) if record.times else NOT_YET}
    readme["choices"] = _choices()
    return {
        name: replace((FOLDER / name).read_text("utf-8"), "ladder", own, file=f"task5/ladder/{name}")
        for name, own in {"README.md": readme, "RESULTS.md": parts}.items()
    }  # fmt: skip


def write(record: Record) -> None:
    """Fill in both files."""
    for name, text in rendered(record).items():
        write_atomically(FOLDER / name, text)


def _overview(times: Times) -> list[str]:
    """A line per rung, for a call, and per library: microseconds, share of a pure read, ratio to the best library."""

    def row(name: str, what: str, side: str) -> list[str]:
        return [name, what, *(_figure(times, shape, side) for shape in README_SHAPES)]

    titles = (
        f"B {s.batch}, {s.heads}/{s.kv_heads} heads, {s.kv_len:,} keys" for s in README_SHAPES
    )
    grid = Grid("", ["rung", "what it does", *titles])
    grid.rows += [row(f"[{r.label}]({r.file})", r.title, r.label) for r in RUNGS]
    grid.rows.append(
        row("**a call**", "the rung that `choice.py` chooses, with `new_keys=1`", OURS)
    )
    grid.rows += [
        row(f"*{x}*", "", x) for x in LABELS if any(times.find(s, x) for s in README_SHAPES)
    ]
    return [*grid.markdown(), bandwidth(times), "", *_run(times.run)]


def _choices() -> list[str]:
    """Which rung a call takes: ``4``, ``4 +`` if it loads keys ahead of the wait, ``4 ½`` on every other SM."""
    grid = Grid("", ["kv heads", *(f"{keys:,} keys" for keys in KEYS)])
    for pairs in PAIRS:
        found = [fastest(H200, pairs, keys, promised=True) for keys in KEYS]
        marks = (f"{c.rung}{' +' * c.ahead}{' ½' * c.every_other_sm}" for c in found)
        grid.rows.append([str(pairs), *marks])
    return grid.markdown()


def _figure(times: Times, shape: Shape, side: str) -> str:
    """``17.2 (89 %, 1.31 x)``."""
    if not (own := times.microseconds(shape, side)):
        return "-"
    share = f"{100 * times.floor(shape) / own:.0f} %"
    if side in LABELS or not (peer := best_peer(times, shape)):
        return f"{_us(own)} ({share})"
    return f"{_us(own)} ({share}, {times.microseconds(shape, peer) / own:.2f} x)"


def grids(times: Times) -> list[Grid]:
    """The tables of a run's times."""
    labels = [x for x in LABELS if any(times.find(shape, x) for shape in TIMED)]
    columns = ["", "floor", OURS, "10 to 90 %", "GB/s", "of a pure read", *labels, "x best"]
    beside = Grid("Microseconds per call, beside the libraries", columns)
    for shape in TIMED:
        if timing := times.find(shape, OURS):
            own, peer = 1e3 * timing.median_ms, best_peer(times, shape)
            spread = f"{_us(1e3 * timing.p10_ms)} to {_us(1e3 * timing.p90_ms)}"
            rate = f"{shape.bytes / own / 1e3:,.0f}", f"{times.floor(shape) / own:.0%}"
            others = (_us(times.microseconds(shape, label)) for label in labels)
            ratio = f"{times.microseconds(shape, peer) / own:.2f}" if peer else "-"
            floor = _us(times.floor(shape))
            beside.rows.append([shape.key, floor, _us(own), spread, *rate, *others, ratio])
    sides = [OURS, *(rung.label for rung in RUNGS), NO_PROMISE, INVARIANT, *map(paged, PAGES)]
    variants = Grid("Microseconds per call, all rungs and variants", ["", *sides])
    for shape in SHAPES:
        texts = [_us(times.microseconds(shape, side)) for side in sides]
        if set(texts) != {"-"}:
            variants.rows.append([shape.key, *texts])
    return [beside, variants]


def _us(microseconds: float | None) -> str:
    if microseconds is None:
        return "-"
    return f"{microseconds:.2f}" if microseconds < 100 else f"{microseconds:,.0f}"


def reasons(times: Times) -> list[str]:
    """Why sides are missing, and for how many shapes. Of a file that an error names, without its folders."""
    shapes: dict[tuple[str, str], list[str]] = {}
    for key, found in times.shapes.items():
        for side, reason in found.left_out.items():
            shapes.setdefault((side, re.sub(r"/\S*/(?=\S)", "", reason)), []).append(key)
    return [
        f"{side}, {keys[0] if len(keys) == 1 else f'{len(keys)} shapes'}: {reason}"
        for (side, reason), keys in sorted(shapes.items())
    ]


def bandwidth(times: Times) -> str:
    """What the floor follows from."""
    return f"A pure read in the same run: {times.read_gb_per_s:,.0f} GB/s."


def _times(times: Times) -> list[str]:
    lines = [bandwidth(times), "", *_joined(grids(times))]
    lines += [f"- {reason}" for reason in reasons(times)] + [""] * bool(reasons(times))
    if (FOLDER / PICTURE).exists():
        lines += [f"![Microseconds over the number of keys]({PICTURE})", ""]
    rungs = [f"- [{rung.label}]({rung.file}): {rung.title}" for rung in RUNGS]
    return [*lines, *rungs, "", *_run(times.run)]


def _tables(tables: Tables) -> list[str]:
    return _joined(tables.grids) + _run(tables.run)


def _joined(grids: Iterable[Grid]) -> list[str]:
    return [line for grid in grids if grid.rows for line in grid.markdown()]


def _run(run: Run) -> list[str]:
    """Which run figures are from."""
    peers = ", ".join(f"{name}: {version}" for name, version in run["peers"].items())
    lines = [f"Run of {describe_run(run)}", "", peers, ""]
    sources = run["sources"]
    return lines + ([STALE, ""] if sources_hash(sources["patterns"]) != sources["sha256"] else [])
