"""The pictures: TFLOP/s and time over the sequence length, one PNG for each precision and head_dim.

They need matplotlib, which the course does not: ``pip install matplotlib``, in the version that pyproject.toml names
under ``plot``.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

from task4.ladder.benchmark import HEAD_DIMS, HIDDEN, SEQS, TOKENS, Cell, Precision
from task4.ladder.methods import CUDNN, EFFICIENT, FA3, FLASH, MATH, Method, Peer
from task4.ladder.record import Times
from task4.ladder.rungs import FOLDER
from task4.ladder.table import picture

MISSING = "no pictures: matplotlib is not installed (make ladder installs it; so does pip install matplotlib)"
_MARKERS = {MATH: "v", EFFICIENT: "^", FLASH: "s", CUDNN: "D", FA3: "P"}
_INK, _GREY, _GRID = "#1a1a1a", "#777777", "#dddddd"
LABEL = 13 / 72  # height of a label in inches
MASKS = (False, True)

Point = tuple[float, float]


def draw(precision: Precision, times: Times) -> list[Path]:
    """Draw what was measured in a precision; the files.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    measured = [
        d for d in HEAD_DIMS
        if all(any(_series(times, m, d, causal) for m in precision.methods) for causal in MASKS)
    ]  # fmt: skip
    return [_draw(precision, times, head_dim) for head_dim in measured]


def _series(
    times: Times, method: Method, head_dim: int, causal: bool
) -> list[tuple[int, float, float]]:
    """Lengths at which it was measured, with TFLOP/s and milliseconds."""
    found = ((cell, times.find(cell, method)) for cell in (Cell(head_dim, s, causal) for s in SEQS))
    return [(cell.seq, cell.tflops(timing), timing.median_ms) for cell, timing in found if timing]


def _draw(precision: Precision, times: Times, head_dim: int) -> Path:
    import matplotlib.pyplot as plt

    best = precision.default(head_dim)
    name = precision.reference(best or MATH)
    reference = times.references.get(name)
    styles = _styles(precision, times, head_dim)
    figure, axes = plt.subplots(2, 2, figsize=(15, 14), dpi=110, sharex=True, layout="constrained")
    to_label = []
    for (rate, time), causal in zip(axes.T, MASKS, strict=True):
        ends: dict[Any, dict[Method, Point]] = {rate: {}, time: {}}
        for method, style in styles.items():
            if points := _series(times, method, head_dim, causal):
                seqs, *curves = zip(*points, strict=True)
                for axis, curve in zip((rate, time), curves, strict=True):
                    axis.plot(seqs, curve, **style)
                    ends[axis][method] = (seqs[-1], curve[-1])
        for axis, unit in ((rate, "TFLOP/s"), (time, "milliseconds")):
            _prepare(axis, unit)
        rate.set_title("causal (half of the operations are counted)" if causal else "not causal")
        if reference:
            rate.axhline(reference, color=_GREY, linewidth=1, linestyle=(0, (1, 2)))
            place = dict(xytext=(0, 3), textcoords="offset points", color=_GREY, fontsize=9)
            rate.annotate(f"{name}, {reference:.0f}", (SEQS[0], reference), **place)
        rate.set_ylim(0, 1.07 * max([reference or 0, *(y for _, y in ends[rate].values())]))
        time.set_yscale("log")
        time.set_xlabel("sequence length")
        # A line that ends early is near 0 in the upper panel, among others that do; the lower one names it.
        longest = max(x for x, _ in ends[rate].values())
        ends[rate] = {method: end for method, end in ends[rate].items() if end[0] == longest}
        to_label += ends.items()
    figure.suptitle(
        f"Attention, {precision.name}, head_dim {head_dim}: batch x sequence {TOKENS:,}, hidden {HIDDEN:,},"
        f" {times.run['machine'].get('gpu', '')}",
        fontsize=14,
    )
    figure.draw_without_rendering()  # now everything is in its final place: labels are placed in pixels
    figure.set_layout_engine("none")
    for axis, ends in to_label:
        _label(axis, ends, styles, best)
    path = FOLDER / picture(precision, head_dim)
    figure.savefig(path)
    plt.close(figure)
    return path


def _styles(precision: Precision, times: Times, head_dim: int) -> dict[Method, dict[str, Any]]:
    """Rungs from light to dark on a scale that the colour-blind can read; libraries grey, dashed, with marks."""
    import matplotlib

    shown = [m for m in precision.methods if any(_series(times, m, head_dim, c) for c in MASKS)]
    rungs = [method for method in shown if not isinstance(method, Peer)]
    styles: dict[Method, dict[str, Any]] = {}
    for i, rung in enumerate(rungs):
        colour = matplotlib.colormaps["viridis_r"](0.12 + 0.88 * i / max(1, len(rungs) - 1))
        width, size = (3.2, 5) if rung == precision.default(head_dim) else (1.8, 3.5)
        styles[rung] = dict(color=colour, linewidth=width, marker="o", markersize=size)
    for peer in shown[len(rungs) :]:
        marks = dict(marker=_MARKERS[peer], markersize=5, markerfacecolor="white")
        styles[peer] = dict(color=_GREY, linewidth=1.2, linestyle="--", **marks)
    return styles


def _prepare(axis: Any, unit: str) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(FixedLocator(SEQS))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axis.set_xlim(SEQS[0] / 1.15, SEQS[-1] * 4.2)  # room for the labels
    axis.set_ylabel(unit)
    axis.grid(color=_GRID, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _label(
    axis: Any, ends: dict[Method, Point], styles: dict[Method, dict[str, Any]], best: Method | None
) -> None:
    """Each line's name at the right edge, with a thin line to its end; labels make room for each other."""
    height = LABEL * axis.figure.dpi  # in pixels
    edge = max(x for x, _ in ends.values())
    early = [method for method, end in ends.items() if end[0] < edge]  # named where they end
    heights = {m: axis.transData.transform(end)[1] for m, end in ends.items() if m not in early}
    order = sorted(heights, key=heights.__getitem__)
    for below, above in pairwise(order):
        heights[above] = max(heights[above], heights[below] + height)
    limit = axis.bbox.y1  # those that were pushed over the top make room downwards
    for method in reversed(order):
        heights[method] = limit = min(heights[method], limit)
        limit -= height
    right = axis.transData.transform((edge * 1.3, 1))[0]
    for method, end in ends.items():
        place: dict[str, Any] = dict(xytext=(7, 4), textcoords="offset points")
        if method in heights:
            line = dict(arrowstyle="-", color=styles[method]["color"], linewidth=0.7)
            line |= dict(shrinkA=0, shrinkB=3, relpos=(0, 0.5))
            place = dict(
                xytext=(right, heights[method]), textcoords="figure pixels", arrowprops=line
            )
        peer = isinstance(method, Peer)
        axis.annotate(
            method.label, xy=end, va="center", fontsize=9, color=_GREY if peer else _INK, annotation_clip=False,
            fontweight="bold" if method == best else "normal", fontstyle="italic" if peer else "normal", **place,
        )  # fmt: skip
