"""The roofline as a PNG: FLOP/s over arithmetic intensity, both logarithmic. It needs matplotlib."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from math import atan2, cos, degrees, hypot, pi, sin
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.transforms import Bbox

from common.report.roof import Dot, Roof
from common.report.shapes import LENGTHS

matplotlib.use("Agg")  # draws into files, without a screen

_INK, _GREY, _GRID = "#1a1a1a", "#777777", "#dddddd"
_COLOURS = {  # the naive attention and its steps are warm
    "scores": "#d9741a",
    "softmax": "#c0397b",
    "product": "#a8730f",
    "all": "#8a1c1c",
    "fused": "#0b62a4",
    "decode": "#2a8a43",
}
_UNITS = ((1e12, "TFLOP/s"), (1e9, "GFLOP/s"))


def draw(path: Path, title: str, roof: Roof, dots: Sequence[Dot]) -> None:
    """Draw the kernels that have a time below their roof; the whole new file, or the old one untouched."""
    measured = [dot for dot in dots if dot.rate]
    scale, unit = next((s, u) for s, u in _UNITS if roof.flops >= s or s == _UNITS[-1][0])
    figure, axis = plt.subplots(figsize=(11, 7), dpi=120, layout="constrained")
    axis.set_xscale("log")
    axis.set_yscale("log")
    intensities = [roof.ridge, *(dot.intensity for dot in measured)]
    rates = [roof.flops, *(dot.rate for dot in measured)]
    left, right = min(intensities) / 2.5, max(intensities) * 3
    axis.set_xlim(left, right)
    axis.set_ylim(min(rates) / scale / 3, max(rates) / scale * 2.2)
    axis.set_xlabel("arithmetic intensity from the shapes, FLOP/byte")
    axis.set_ylabel(unit)
    axis.set_title(title, loc="left", fontsize=12)
    axis.grid(color=_GRID, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_major_formatter("{x:g}")

    _draw_roof(axis, roof, left, right, scale)
    for name in dict.fromkeys(dot.work.name for dot in measured):
        same = [dot for dot in measured if dot.work.name == name]
        xs, ys = [d.intensity for d in same], [d.rate / scale for d in same]
        axis.plot(xs, ys, color=_colour(name), linewidth=0.8, alpha=0.5, zorder=2)
        for x, y, dot in zip(xs, ys, same, strict=True):
            face = "white" if dot.seq == LENGTHS[0] else _colour(name)
            style = dict(color=_colour(name), markerfacecolor=face, markersize=8, zorder=3)
            axis.plot([x], [y], marker="o", markeredgewidth=1.6, **style)
    for seq in LENGTHS:
        face = "white" if seq == LENGTHS[0] else _GREY
        axis.plot([], [], "o", color=_GREY, markerfacecolor=face, label=f"S {seq:,}")
    axis.legend(loc="lower right", frameon=False)
    figure.draw_without_rendering()  # now everything is in its place: labels are placed in pixels
    figure.set_layout_engine("none")
    _label(axis, measured, scale)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        figure.savefig(scratch, format="png")
        os.replace(scratch, path)
    finally:
        plt.close(figure)
        scratch.unlink(missing_ok=True)


def _colour(name: str) -> str:
    return _COLOURS[name.partition(": ")[2].split()[0]]  # of "task 2: all four"


def _draw_roof(axis: Any, roof: Roof, left: float, right: float, scale: float) -> None:
    slopes = {"memory": roof.bandwidth} | ({"cache": roof.cache} if roof.cache else {})
    for name, bandwidth in slopes.items():
        ridge = roof.flops / bandwidth
        style = dict(color=_INK, linewidth=1.8) if name == "memory" else dict(color=_GREY, ls="--")
        ends = [left * bandwidth / scale, roof.flops / scale]
        axis.plot([left, ridge], ends, **style, zorder=1)
        text = f"{name}, {bandwidth / 1e9:,.0f} GB/s"
        # a slope has its text above it, near the upper end
        at = ridge * (0.22 if name == "memory" else 0.3)
        axis.annotate(
            text, (at, at * bandwidth / scale), xytext=(-3, 6), textcoords="offset points",
            rotation=_angle(axis, at, bandwidth / scale), rotation_mode="anchor", ha="center",
            color=style["color"], fontsize=9,
        )  # fmt: skip
    top = roof.flops / scale
    axis.plot([min(roof.flops / s for s in slopes.values()), right], [top, top], color=_INK, lw=1.8)
    axis.annotate(
        f"compute, {top:.3g} {dict(_UNITS)[scale]}", (right, top),
        xytext=(-4, 6), textcoords="offset points", ha="right", color=_INK, fontsize=9,
    )  # fmt: skip
    axis.plot([roof.ridge] * 2, [axis.get_ylim()[0], top], color=_GREY, lw=0.9, ls=":")
    axis.plot([roof.ridge], [top], marker="D", color=_INK, markersize=5)
    axis.annotate(
        f"ridge point, {roof.ridge:.3g} FLOP/byte", (roof.ridge, axis.get_ylim()[0]),
        xytext=(5, 6), textcoords="offset points", color=_GREY, fontsize=9,
    )  # fmt: skip


def _angle(axis: Any, x: float, slope: float) -> float:
    """Degrees on the screen of y = slope x."""
    axis.figure.draw_without_rendering()
    (x0, y0), (x1, y1) = axis.transData.transform([(x, slope * x), (2 * x, 2 * slope * x)])
    return degrees(atan2(y1 - y0, x1 - x0))


def _label(axis: Any, dots: Sequence[Dot], scale: float) -> None:
    """Each dot's kernel beside it, where it and the thin line to it cover no line, no dot and no other text."""
    renderer = axis.figure.canvas.get_renderer()
    to_pixels = axis.transData.transform
    centres = to_pixels([(dot.intensity, dot.rate / scale) for dot in dots])
    texts = [text.get_window_extent(renderer) for text in axis.texts]
    texts.append(axis.get_legend().get_window_extent(renderer))
    circles = [Bbox([centre - 8, centre + 8]) for centre in centres]
    lines = np.concatenate([_boxes_along(to_pixels(line.get_xydata())) for line in axis.lines])
    for number, (dot, centre) in enumerate(zip(dots, centres, strict=True)):
        style = dict(fontsize=9, color=_colour(dot.work.name))
        trial = axis.text(0, 0, dot.work.name, **style)
        size = trial.get_window_extent(renderer).size + 4
        trial.remove()
        others = [*texts, *circles[:number], *circles[number + 1 :]]
        taken = [box.get_points() for box in (*texts, *circles)]

        def cost(
            box: Bbox, centre: Any = centre, others: list[Bbox] = others, taken: Any = taken
        ) -> int:
            end = _nearest(box, centre)
            thin = _boxes_along([centre, end])
            outside = not all(axis.bbox.contains(*corner) for corner in (box.min, box.max))
            # text on text is worse than a line on one
            return (
                100 * (outside + box.count_overlaps(taken))
                + 10 * box.count_overlaps(lines)
                + sum(other.count_overlaps(thin) for other in others)
            )

        box = _best(_places(centre, size), cost)
        relative = (_nearest(box, centre) - box.min) / box.size
        axis.annotate(
            dot.work.name, (dot.intensity, dot.rate / scale), xytext=box.min + 2, textcoords="figure pixels",
            arrowprops=dict(arrowstyle="-", color=style["color"], lw=0.6, shrinkA=0, shrinkB=4, relpos=relative),
            annotation_clip=False, va="bottom", **style,
        )  # fmt: skip
        texts.append(box)


def _best(places: Iterable[Bbox], cost: Callable[[Bbox], int]) -> Bbox:
    """The first that costs nothing, or else the one that costs least."""
    seen = []
    for place in places:
        seen.append((cost(place), place))
        if seen[-1][0] == 0:
            return place
    return min(seen, key=lambda pair: pair[0])[1]


def _places(centre: Any, size: Any) -> Iterator[Bbox]:
    """Boxes of this size around a dot, near ones and far ones."""
    for radius in range(14, 150, 8):
        for step in range(24):
            direction = (cos(step * pi / 12), sin(step * pi / 12))
            yield Bbox.from_bounds(*(centre + direction * (radius + size / 2) - size / 2), *size)


def _nearest(box: Bbox, point: Any) -> Any:
    """The point of a box that is nearest to another."""
    return point.clip(box.min, box.max)


def _boxes_along(points: Any) -> Any:
    """The corners (n, 2, 2) of small boxes along a line, for texts to keep off it."""
    found = []
    for begin, end in pairwise(np.asarray(points)):
        along = np.linspace(0, 1, int(hypot(*(end - begin)) // 6) + 2)[:, None]
        found.append(begin + along * (end - begin))
    middle = np.concatenate(found or [np.empty((0, 2))])
    return np.stack([middle - 2, middle + 2], axis=1)
