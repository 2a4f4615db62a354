"""The picture: time over the number of keys, beside the libraries and the floor, for two batches.

It needs matplotlib, which the course does not: ``pip install matplotlib``, in the version that pyproject.toml names
under ``plot``.
"""

from dataclasses import replace
from pathlib import Path

from common.record.chart import Line, draw_lines, save
from task5.ladder.benchmark import CURVES, LENGTHS, OURS
from task5.ladder.peers import LABELS
from task5.ladder.record import Times
from task5.ladder.rungs import FOLDER
from task5.ladder.table import PICTURE

MISSING = "no picture: matplotlib is not installed (pip install matplotlib)"
_MARKERS = dict(zip(LABELS, "v^DPsoX", strict=True))


def draw(times: Times) -> Path | None:
    """Draw what was measured; the file, or None if there is too little.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    lines = {batch: _lines(times, batch) for batch in CURVES}
    if not all(lines.values()):
        return None
    figure, rows = plt.subplots(2, 2, figsize=(15, 13), dpi=100, layout="constrained")
    labelled: dict = {}
    for (above, below), batch in zip(rows.T, CURVES, strict=True):
        labelled |= {above: lines[batch], below: _relative(lines[batch])}
        draw_lines(above, labelled[above], LENGTHS, "microseconds per call")
        above.set_title(f"batch {batch}")
        above.set_yscale("log")
        above.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        above.yaxis.set_minor_locator(NullLocator())
        above.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        # Long caches differ by per cents, which the upper picture does not show.
        draw_lines(below, labelled[below], LENGTHS, "time relative to the floor")
        below.set_ylim(0.95, 2)
        below.set_xlabel("keys of each sequence")
        for axis in (above, below):
            axis.set_xlim(right=LENGTHS[-1] * 7)  # room for the names
        marks = [
            Line2D([], [], label=line.label, **line.style) for line in reversed(labelled[above])
        ]
        above.legend(
            handles=marks, loc="upper left", frameon=False
        )  # the lines meet at their names
    figure.suptitle(
        f"Decode, bfloat16, 32 heads on 8 kv heads of 128, {times.run['machine'].get('gpu', '')};"
        " floor: K and V at the speed of a pure read",
        fontsize=14,
    )
    save(figure, labelled, FOLDER / PICTURE)
    return FOLDER / PICTURE


def _lines(times: Times, batch: int) -> list[Line]:
    """Ours and each library's; and the floor at the lengths of ours. None without ours."""

    def points(side: str) -> tuple[tuple[int, float], ...]:
        found = ((s.kv_len, times.microseconds(s, side)) for s in CURVES[batch])
        return tuple((length, us) for length, us in found if us is not None)

    if not (own := points(OURS)):
        return []
    timed = {s.kv_len for s in CURVES[batch]} & {length for length, _ in own}
    floor = tuple((s.kv_len, times.floor(s)) for s in CURVES[batch] if s.kv_len in timed)
    peers = [Line(x, found, None, _MARKERS[x]) for x in LABELS if (found := points(x))]
    return [Line("floor", floor, None, ""), *peers, Line(OURS, own, 1.0, bold=True)]


def _relative(lines: list[Line]) -> list[Line]:
    """Each line's times by those of the floor, which is the first of them."""
    floor = dict(lines[0].points)
    return [
        replace(line, points=tuple((n, us / floor[n]) for n, us in line.points if n in floor))
        for line in lines
    ]
