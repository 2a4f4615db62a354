"""The picture: the parts of a step, and how much of each is the time of a pure read. It needs matplotlib."""

from pathlib import Path
from typing import Any

from task6.generation.benchmark import Found
from task6.generation.breakdown import Part
from task6.generation.record import FOLDER, Times
from task6.generation.table import PICTURE, megabytes

MISSING = "no picture: matplotlib is not installed (pip install matplotlib)"
SMALL = 1 / 200  # of a step; smaller parts are drawn as one
_READ, _REST, _UNKNOWN, _INK = "#1f4e79", "#a6c8e0", "#c9c9c9", "#1a1a1a"


def draw(times: Times) -> Path | None:
    """Draw what was measured, a panel for each case; the file, or None if there is nothing.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    panels = [panel for found in times.found for panel in _panels(found, times.read_gb_per_s)]
    if not panels:
        return None
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    heights = [len(parts) + 2 for _, parts in panels]
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(12, 0.34 * sum(heights) + 0.8), dpi=110, layout="constrained",
        height_ratios=heights, squeeze=False,
    )  # fmt: skip
    for axis, (title, parts) in zip(axes[:, 0], panels, strict=True):
        _draw(axis, parts, times.read_gb_per_s)
        axis.set_title(title, fontsize=11, loc="left")
    axes[-1, 0].set_xlabel("microseconds per step")
    marks = [
        Patch(color=_READ, label="time of a pure read of its bytes"),
        Patch(color=_REST, label="beyond that"),
        Patch(color=_UNKNOWN, label="bytes not counted"),
    ]
    axes[0, 0].legend(handles=marks, loc="lower right", frameon=False, fontsize=9)
    gpu = times.run["machine"].get("gpu", "")
    figure.suptitle(f"Where the time of a step goes, {gpu}", fontsize=13)
    figure.savefig(FOLDER / PICTURE)
    plt.close(figure)
    return FOLDER / PICTURE


def _panels(found: Found, read_gb_per_s: float) -> list[tuple[str, list[Part]]]:
    """A title and the parts, of a step kernel by kernel and of one in one launch."""
    floor = 1e3 * found.floor(read_gb_per_s)

    def title(what: str, us: float) -> str:
        return f"{found.case}, {what}: {us:,.0f} us per step, {us / floor:.2f} x the floor of {floor:,.0f}"

    panels = []
    if found.parts:
        profiled = sum(part.us for part in found.parts)
        launches = title("a graph of launches", 1e3 * found.ours.between.median_ms)
        panels.append((f"{launches}; {profiled:,.0f} in the profiler", _drawn(found.parts)))
    if found.one_launch:
        us = sum(part.us for part in found.one_launch)
        panels.append((title("one launch", us), _drawn(found.one_launch)))
    return panels


def _drawn(parts: list[Part]) -> list[Part]:
    """The parts, those that are too short to be seen as one; the longest first."""
    least = SMALL * sum(part.us for part in parts)
    large = [part for part in parts if part.us >= least]
    if rest := [part for part in parts if part.us < least]:
        large.append(Part(f"{len(rest)} others", "", 0, sum(part.us for part in rest)))
    return large


def _draw(axis: Any, parts: list[Part], read_gb_per_s: float) -> None:
    longest, total = max(part.us for part in parts), sum(part.us for part in parts)
    for y, part in enumerate(parts):
        floor = part.floor(read_gb_per_s)
        read = min(floor or 0.0, part.us)
        axis.barh(y, read, color=_READ)
        axis.barh(y, part.us - read, left=read, color=_UNKNOWN if floor is None else _REST)
        text = f"{part.us:,.1f} us, {part.us / total:.1%}"
        if part.calls > 1:
            text += f"; {part.calls:g} x {part.us / part.calls:.2f}"
        if floor:
            text += f"; {megabytes(part)} MB, {floor / part.us:.0%} of a pure read"
        place = dict(xytext=(5, 0), textcoords="offset points", va="center", fontsize=9)
        axis.annotate(text, (part.us, y), color=_INK, **place)
    axis.set_yticks(range(len(parts)), [part.name for part in parts])
    axis.invert_yaxis()
    axis.set_xlim(0, longest * 1.65)
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="x", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
