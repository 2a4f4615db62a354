"""The report's picture, OUT/report.png. It needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

from common.staff.grade.report import Cluster, Results, clusters, graded, stages

# Okabe and Ito's colours, which the colour-blind can tell apart.
_BAR, _MEDIAN, _FAILURE = "#0072B2", "#D55E00", "#999999"
_GRID, _INK = "#dddddd", "#1a1a1a"
FAILURES = 8  # that are shown, the most common ones of all stages
STEPS = 8  # bars of a stage: its points in eighths
MISSING = "no report.png: matplotlib is not installed (pip install matplotlib, in the version of pyproject.toml's plot)"


def draw(results: Results, path: Path) -> None:
    """Draw the distribution of the totals and of each stage's points, and the most common failures.

    Args:
        results: of all submissions, of which at least one was graded.
        path: of the PNG.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    counted = graded(results)
    points = {stage: worth for stage, worth in stages(counted).items() if worth}
    found = sorted(clusters(counted), key=lambda c: -c.submissions)[:FAILURES]
    rows = 1 + -(-(len(points) - 1) // 3)
    below = 0.5 * len(found) + 0.6
    figure = plt.figure(figsize=(12, 2.6 * rows + below), dpi=110, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.1)
    upper, lower = figure.subfigures(2, 1, height_ratios=[2.6 * rows, below])
    grid = upper.add_gridspec(rows, 3)
    everything = sum(points.values())
    total = upper.add_subplot(grid[0, :2])
    _histogram(total, [r["total"] for r in counted], everything, round(everything))
    total.set_title(f"total, {len(counted)} graded", loc="left")
    for index, (stage, worth) in enumerate(points.items(), 2):
        axis = upper.add_subplot(grid[divmod(index, 3)])
        _histogram(axis, [r["stages"][stage]["earned"] for r in counted], worth, STEPS)
        axis.set_title(stage, loc="left")
    if found:
        _bars(lower.subplots(), found, len(counted))
    figure.savefig(path)
    plt.close(figure)


def _histogram(axis: Any, earned: Sequence[float], points: float, steps: int) -> None:
    """How many submissions earned about 0, 1 / steps ... of the points; full and 0 points have a bar of their own."""
    import numpy as np
    from matplotlib.ticker import MaxNLocator

    share = np.asarray(earned) / points
    near = np.clip(np.round(share * steps), 1, steps - 1)
    place = np.where(share >= 1, steps, np.where(share <= 0, 0, near)).astype(int)
    heights = np.bincount(place, minlength=steps + 1)
    axis.bar(np.arange(steps + 1) * points / steps, heights, 0.85 * points / steps, color=_BAR)
    median = float(np.median(earned))
    axis.axvline(median, color=_MEDIAN, linestyle="--", linewidth=1.5)
    axis.set_title(f"median {median:.3g}", loc="right", color=_MEDIAN, fontsize=10)
    axis.set_xlim(-0.6 * points / steps, points + 0.6 * points / steps)
    axis.set_ylim(0, 1.08 * heights.max())
    axis.set_xlabel("points")
    axis.set_ylabel("submissions")
    axis.set_xticks(np.arange(0, points + 0.1, 0.5 if points <= 1 else 1 if points <= 5 else 2))
    axis.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axis.grid(axis="y", color=_GRID, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _bars(axis: Any, found: Sequence[Cluster], counted: int) -> None:
    """A bar for each failure, with its text above it and its number at its end."""
    heights = range(len(found))
    bars = axis.barh(heights, [c.submissions for c in found], 0.3, color=_FAILURE)
    axis.bar_label(bars, padding=3, fontsize=9, color=_INK)
    for height, cluster in zip(heights, found, strict=True):
        text = "".join(c if c.isascii() else "?" for c in cluster.mistake)  # the font has no others
        text = f"{cluster.stage}: {shorten(text, 120, placeholder=' ...')}"
        place = dict(xytext=(0, 3), textcoords="offset points", va="bottom", fontsize=9, color=_INK)
        axis.annotate(text, (0, height - 0.15), parse_math=False, **place)
    axis.set_ylim(len(found) - 0.7, -0.85)
    axis.set_title(f"the most common failures, and in how many of the {counted}", loc="left")
    axis.set_axis_off()
