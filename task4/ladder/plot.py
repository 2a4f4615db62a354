"""The pictures: TFLOP/s and time over the sequence length, one PNG for each precision and head_dim.

They need matplotlib, which the course does not: ``pip install matplotlib``, in the version that pyproject.toml names
under ``plot``.
"""

from pathlib import Path

from common.record.chart import Line, Point, draw_limit, draw_lines, save
from common.timing.peers import CUDNN, EFFICIENT, FA3, FLASH, MATH, Peer
from task4.ladder.benchmark import HIDDEN, SEQS, TOKENS, Cell, Method, Precision
from task4.ladder.record import Times
from task4.ladder.rungs import FOLDER
from task4.ladder.table import picture

MISSING = "no pictures: matplotlib is not installed (make ladder installs it; so does pip install matplotlib)"
_MARKERS = {MATH: "v", EFFICIENT: "^", FLASH: "s", CUDNN: "D", FA3: "P"}
UNITS = {"TFLOP/s": Cell.tflops, "milliseconds": lambda _, timing: timing.median_ms}
MASKS = {False: "not causal", True: "causal (half of the operations are counted)"}


def draw(precision: Precision, times: Times) -> list[Path]:
    """Draw what was measured in a precision; the files.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    measured = (
        d for d in precision.head_dims if all(_lines(precision, times, d, c) for c in MASKS)
    )
    return [_draw(precision, times, head_dim) for head_dim in measured]


def _lines(
    precision: Precision, times: Times, head_dim: int, causal: bool, unit: str = "TFLOP/s"
) -> list[Line]:
    """One for each method that was measured; rungs get darker from the first to the last that either mask has."""
    shown = [m for m in precision.methods if any(_points(times, m, head_dim, c) for c in MASKS)]
    rungs = [method for method in shown if not isinstance(method, Peer)]
    shades = {rung: i / max(1, len(rungs) - 1) for i, rung in enumerate(rungs)}
    best = precision.default(head_dim)
    return [
        Line(m.label, points, shades.get(m), _MARKERS.get(m, "o"), bold=m == best)
        for m in shown
        if (points := _points(times, m, head_dim, causal, unit))
    ]


def _points(
    times: Times, method: Method, head_dim: int, causal: bool, unit: str = "TFLOP/s"
) -> tuple[Point, ...]:
    found = ((cell, times.find(cell, method)) for cell in (Cell(head_dim, s, causal) for s in SEQS))
    return tuple((cell.seq, UNITS[unit](cell, timing)) for cell, timing in found if timing)


def _draw(precision: Precision, times: Times, head_dim: int) -> Path:
    import matplotlib.pyplot as plt

    name = precision.reference(precision.default(head_dim) or MATH)
    reference = times.references.get(name, 0)
    figure, axes = plt.subplots(2, 2, figsize=(15, 14), dpi=110, sharex=True, layout="constrained")
    labelled = {}
    for (rate, time), causal in zip(axes.T, MASKS, strict=True):
        for axis, unit in zip((rate, time), UNITS, strict=True):
            labelled[axis] = _lines(precision, times, head_dim, causal, unit)
            draw_lines(axis, labelled[axis], SEQS, unit)
        rate.set_title(MASKS[causal])
        if reference:
            draw_limit(rate, f"{name}, {reference:.0f}", SEQS[0], reference)
        rate.set_ylim(0, 1.07 * max([reference, *(line.end[1] for line in labelled[rate])]))
        time.set_yscale("log")
        time.set_xlabel("sequence length")
        # A line that ends early is near 0 in the upper panel, among others that do; the lower one names it.
        longest = max(line.end[0] for line in labelled[rate])
        labelled[rate] = [line for line in labelled[rate] if line.end[0] == longest]
    figure.suptitle(
        f"Attention, {precision.name}, head_dim {head_dim}: batch x sequence {TOKENS:,}, hidden {HIDDEN:,},"
        f" {times.run['machine'].get('gpu', '')}",
        fontsize=14,
    )
    path = FOLDER / picture(precision, head_dim)
    save(figure, labelled, path)
    return path
