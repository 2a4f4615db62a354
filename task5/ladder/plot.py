"""The picture: microseconds over the number of keys, beside the libraries and the floor, for two batches.

It needs matplotlib, which the course does not: ``pip install matplotlib``, in the version that pyproject.toml names
under ``plot``.
"""

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
    figure, axes = plt.subplots(1, 2, figsize=(15, 7), dpi=110, layout="constrained")
    labelled = dict(zip(axes, lines.values(), strict=True))
    for axis, batch in zip(axes, CURVES, strict=True):
        draw_lines(axis, labelled[axis], LENGTHS, "microseconds per call")
        axis.set_xlim(right=LENGTHS[-1] * 7)  # room for the names
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        marks = [
            Line2D([], [], label=line.label, **line.style) for line in reversed(labelled[axis])
        ]
        axis.legend(handles=marks, loc="upper left", frameon=False)  # the lines meet at their names
        axis.set_xlabel("keys of each sequence")
        axis.set_title(f"batch {batch}")
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
