"""Charts over the sequence length, with the name of each line at its end. They need matplotlib."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

_INK, _GREY, _GRID = "#1a1a1a", "#777777", "#dddddd"
_LABEL = 13 / 72  # height of a label in inches

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """A line of a chart.

    Args:
        label: its name.
        points: length and value, the longest last.
        shade: from 0, light, to 1, dark, on a scale that the colour-blind can read. None: grey and dashed, for what the
            others are compared with.
        marker: of its points, as matplotlib names them.
        bold: whether it stands out.
    """

    label: str
    points: tuple[Point, ...]
    shade: float | None = None
    marker: str = "o"
    bold: bool = False

    @property
    def end(self) -> Point:
        return self.points[-1]

    @property
    def style(self) -> dict[str, Any]:
        """Options of matplotlib's ``plot``."""
        import matplotlib

        if self.shade is None:
            marks = dict(marker=self.marker, markersize=5, markerfacecolor="white")
            return dict(color=_GREY, linewidth=1.2, linestyle="--", **marks)
        colour = matplotlib.colormaps["viridis_r"](0.12 + 0.88 * self.shade)
        width, size = (3.2, 5) if self.bold else (1.8, 3.5)
        return dict(color=colour, linewidth=width, marker=self.marker, markersize=size)


def draw_lines(axis: Any, lines: Sequence[Line], lengths: Sequence[int], unit: str) -> None:
    """Draw these lines on matplotlib's ``axis``, over these lengths, with room for the labels."""
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    for line in lines:
        axis.plot(*zip(*line.points, strict=True), **line.style)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(FixedLocator(lengths))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axis.set_xlim(lengths[0] / 1.15, lengths[-1] * 4.2)
    axis.set_ylabel(unit)
    axis.grid(color=_GRID, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def draw_limit(axis: Any, text: str, length: int, value: float) -> None:
    """A dotted line at this value, with its name above it from ``length`` on."""
    axis.axhline(value, color=_GREY, linewidth=1, linestyle=(0, (1, 2)))
    place = dict(xytext=(0, 3), textcoords="offset points", color=_GREY, fontsize=9)
    axis.annotate(text, (length, value), **place)


def save(figure: Any, labelled: Mapping[Any, Sequence[Line]], path: Path) -> None:
    """Name the lines of each axis at their ends, and write the figure, which is closed then."""
    import matplotlib.pyplot as plt

    figure.draw_without_rendering()  # now everything is in its final place: labels are placed in pixels
    figure.set_layout_engine("none")
    for axis, lines in labelled.items():
        _label(axis, lines)
    figure.savefig(path)
    plt.close(figure)


def _label(axis: Any, lines: Sequence[Line]) -> None:
    """Each line's name at the right edge, with a thin line to its end; labels make room for each other."""
    height = _LABEL * axis.figure.dpi  # in pixels
    edge = max(line.end[0] for line in lines)
    late = [line for line in lines if line.end[0] == edge]  # the others are named where they end
    heights = {line: axis.transData.transform(line.end)[1] for line in late}
    order = sorted(late, key=heights.__getitem__)
    for below, above in pairwise(order):
        heights[above] = max(heights[above], heights[below] + height)
    limit = axis.bbox.y1  # those that were pushed over the top make room downwards
    for line in reversed(order):
        heights[line] = limit = min(heights[line], limit)
        limit -= height
    right = axis.transData.transform((edge * 1.3, 1))[0]
    for line in lines:
        place: dict[str, Any] = dict(xytext=(7, 4), textcoords="offset points")
        if line in heights:
            thin = dict(arrowstyle="-", color=line.style["color"], linewidth=0.7)
            thin |= dict(shrinkA=0, shrinkB=3, relpos=(0, 0.5))
            place = dict(xytext=(right, heights[line]), textcoords="figure pixels", arrowprops=thin)
        ours = line.shade is not None
        axis.annotate(
            line.label, xy=line.end, va="center", fontsize=9, color=_INK if ours else _GREY, annotation_clip=False,
            fontweight="bold" if line.bold else "normal", fontstyle="normal" if ours else "italic", **place,
        )  # fmt: skip
