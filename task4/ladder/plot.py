"""The picture: time and TFLOP/s over the sequence length, one PNG for each kind and head_dim.

Needs matplotlib, which the course does not: ``pip install matplotlib``, in the version that pyproject.toml names
under ``plot``.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from task4.ladder.rungs import FOLDER, by_number
from task4.ladder.speed import (
    CUDNN,
    EFFICIENT,
    FA3,
    FLASH,
    HEAD_DIMS,
    HIDDEN,
    MATH,
    PEERS,
    SEQS,
    TOKENS,
    Cell,
)
from task4.ladder.table import default_rung, names, picture_name

MISSING = "no picture: matplotlib is not installed (make ladder installs it; so does pip install matplotlib)"
_MARKERS = {MATH: "v", EFFICIENT: "^", FLASH: "s", CUDNN: "D", FA3: "P"}
_INK, _GREY, _GRID = "#1a1a1a", "#777777", "#dddddd"


def draw(kind: str, record: Mapping[str, Any]) -> list[Path]:
    """Draw what was measured of a kind; the files.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    written = []
    for head_dim in HEAD_DIMS:
        cells = [Cell(head_dim, seq, causal) for seq in SEQS for causal in (False, True)]
        if any(_tflops(record, cell, name) for cell in cells for name in names(kind)):
            path = FOLDER / picture_name(kind, head_dim)
            _draw(kind, record, head_dim, path)
            written.append(path)
    return written


def _tflops(record: Mapping[str, Any], cell: Cell, name: str) -> float | None:
    return record["cells"].get(cell.name, {}).get(name, {}).get("tflops")


def _draw(kind: str, record: Mapping[str, Any], head_dim: int, path: Path) -> None:
    import matplotlib.pyplot as plt

    shown = [
        n for n in names(kind) if any(_series(record, n, head_dim, c)[0] for c in (False, True))
    ]
    styles = _styles(kind, shown, head_dim)
    figure, axes = plt.subplots(2, 2, figsize=(15, 14), dpi=110, sharex=True, layout="constrained")
    ceiling = record["ceiling"]["tflops"]
    to_label = []
    for column, causal in enumerate((False, True)):
        rate, time = axes[0][column], axes[1][column]
        for axis in (rate, time):
            _prepare(axis)
        rates, times = {}, {}  # where each line ends
        for name in shown:
            seqs, tflops = _series(record, name, head_dim, causal)
            if not seqs:
                continue
            milliseconds = [
                Cell(head_dim, s, causal).flops / t / 1e9 for s, t in zip(seqs, tflops, strict=True)
            ]
            rate.plot(seqs, tflops, **styles[name])
            time.plot(seqs, milliseconds, **styles[name])
            rates[name], times[name] = (seqs[-1], tflops[-1]), (seqs[-1], milliseconds[-1])
        rate.axhline(ceiling, color=_GREY, linewidth=1, linestyle=(0, (1, 2)))
        rate.annotate(
            f"matrix product, {ceiling:.0f}", (SEQS[0], ceiling), xytext=(0, 3), textcoords="offset points",
            color=_GREY, fontsize=9,
        )  # fmt: skip
        rate.set_ylim(0, 1.07 * max([ceiling, *(y for _, y in rates.values())]))
        time.set_yscale("log")
        rate.set_title(
            "causal (half of the operations are counted)" if causal else "not causal", color=_INK
        )
        rate.set_ylabel("TFLOP/s")
        time.set_ylabel("milliseconds")
        time.set_xlabel("sequence length")
        # A line that ends early is near 0 in the upper panel, among others that do; the lower one names it.
        longest = max((x for x, _ in rates.values()), default=0)
        to_label += [
            (rate, {n: end for n, end in rates.items() if end[0] == longest}),
            (time, times),
        ]
    machine = next(iter(record["runs"].values()))["machine"].get("gpu", "")
    figure.suptitle(
        f"Attention, {kind}, head_dim {head_dim}: batch x sequence {TOKENS:,}, hidden {HIDDEN:,}, {machine}",
        color=_INK, fontsize=14,
    )  # fmt: skip
    figure.draw_without_rendering()  # now everything is where it stays: labels are placed in pixels
    figure.set_layout_engine("none")
    for axis, ends in to_label:
        _label(axis, ends, styles)
    figure.savefig(path)
    plt.close(figure)


def _series(
    record: Mapping[str, Any], name: str, head_dim: int, causal: bool
) -> tuple[list[int], list[float]]:
    """Lengths at which it was measured, and TFLOP/s there."""
    pairs = [(s, t) for s in SEQS if (t := _tflops(record, Cell(head_dim, s, causal), name))]
    return [s for s, _ in pairs], [t for _, t in pairs]


def _styles(kind: str, shown: list[str], head_dim: int) -> dict[str, dict[str, Any]]:
    """Rungs from light to dark along a scale that the colour-blind can read; peers grey, dashed, with marks."""
    import matplotlib

    rungs = [name for name in shown if name not in PEERS]
    scale = matplotlib.colormaps["viridis_r"]
    styles: dict[str, dict[str, Any]] = {}
    for i, name in enumerate(rungs):
        best = name == default_rung(kind, head_dim)
        colour = scale(0.12 + 0.88 * i / max(1, len(rungs) - 1))
        styles[name] = dict(
            color=colour, linewidth=3.2 if best else 1.8, marker="o", markersize=5 if best else 3.5
        )
    for name in shown:
        if name in PEERS:
            styles[name] = dict(
                color=_GREY,
                linewidth=1.2,
                linestyle="--",
                marker=_MARKERS[name],
                markersize=5,
                markerfacecolor="white",
            )
    return styles


def _prepare(axis: Any) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(FixedLocator(SEQS))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{int(x):,}"))
    axis.set_xlim(SEQS[0] / 1.15, SEQS[-1] * 4.2)  # room for the labels
    axis.grid(color=_GRID, linewidth=0.6)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _label(
    axis: Any, ends: dict[str, tuple[float, float]], styles: dict[str, dict[str, Any]]
) -> None:
    """Each line's name at the right edge, with a thin line to its end; labels make room for each other."""
    height = 13.0 / 72 * axis.figure.dpi  # of a label, in pixels
    edge = max((x for x, _ in ends.values()), default=0)
    for name in [n for n, (x, _) in ends.items() if x < edge]:  # an early end is named where it is
        _name(axis, name, ends[name], styles[name], xytext=(7, 4), textcoords="offset points")
    points = {n: axis.transData.transform(end) for n, end in ends.items() if end[0] == edge}
    order = sorted(points, key=lambda name: points[name][1])
    at: dict[str, float] = {}
    last = axis.bbox.y0 - height / 2
    for name in order:  # upwards, each at least a label's height above the one before
        last = at[name] = max(points[name][1], last + height)
    last = axis.bbox.y1 + height
    for name in reversed(order):  # and down again where they ran over the top
        last = at[name] = min(at[name], last - height)
    for name in order:
        x = axis.transData.transform((edge * 1.3, 1))[0]
        arrow = dict(
            arrowstyle="-",
            color=styles[name]["color"],
            linewidth=0.7,
            shrinkA=0,
            shrinkB=3,
            relpos=(0, 0.5),
        )
        place = dict(xytext=(x, at[name]), textcoords="figure pixels", arrowprops=arrow)
        _name(axis, name, ends[name], styles[name], **place)


def _name(
    axis: Any, name: str, end: tuple[float, float], style: Mapping[str, Any], **place: Any
) -> None:
    bold = style["linewidth"] > 3
    axis.annotate(
        _text(name), xy=end, va="center", fontsize=9, color=_GREY if name in PEERS else _INK,
        fontweight="bold" if bold else "normal", fontstyle="italic" if name in PEERS else "normal",
        annotation_clip=False, **place,
    )  # fmt: skip


def _text(name: str) -> str:
    if name in PEERS:
        return name
    rung = by_number(int(name.split()[1]))
    return f"{rung.number} {rung.name}"
