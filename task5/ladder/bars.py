"""The bars: how fast decode has to be beside the libraries and the memory, and how accurate.

    K and V above 100 MB                     1.00 x the best library, and 95 % of the read bandwidth
    below, batch 1 to 8, 1,024 to 8,192 keys 1.25 x the best library
    batch 64, 12 heads, 1,024 keys, d 64     1.05 x the best library
    batch-invariant                          at most 1.03 x the default's time
    pages of 64, of 16                       at most 1.03 x and 1.08 x the contiguous cache's time
    error                                    at most 1.1 x the best library's

A call has the promise of a decode step, ``new_keys=1``; how much faster it is without it stands beside, with no bar.
The error is the distance from float64, root mean square and largest (common.check.loss).
"""

from collections.abc import Mapping, Sequence
from statistics import mean

import torch
from torch import Tensor

from common.check.loss import Loss
from common.record.grid import Grid
from task5.ladder.benchmark import (
    FP16,
    FP32,
    INVARIANT,
    NO_PROMISE,
    OURS,
    PAGES,
    SHAPES,
    Inputs,
    Shape,
    ours,
    paged,
    reason_of,
)
from task5.ladder.peers import LABELS, peer_sides
from task5.ladder.record import Times

LARGE = 100e6  # bytes of K and V
OF_BANDWIDTH = 0.95
SHORT = 1024, 8192
MANY = Shape(64, 12, 12, 1024, 64)
SLOWER = {INVARIANT: 1.03} | dict(zip(map(paged, PAGES), (1.03, 1.08), strict=True))
ALLOWED = 1.1  # x the best library's error
SEEDS = 3
ACCURACY = (
    Shape(8, 32, 8, 2048),
    Shape(8, 32, 8, 2048, dtype=FP16),
    Shape(8, 12, 12, 1024, 64),
    Shape(4, 16, 8, 4096, 256),
    Shape(8, 32, 8, 2048, dtype=FP32),
    Shape(8, 32, 32, 1024, 64, dtype=FP32),
)


def faster(shape: Shape) -> float | None:
    """The factor by which a call has to be faster than the best library; None where there is no bar."""
    if shape == MANY:
        return 1.05
    if shape.bytes > LARGE:
        return 1.0
    least, most = SHORT
    return 1.25 if shape.batch <= 8 and least <= shape.kv_len <= most else None


def best_peer(times: Times, shape: Shape) -> str | None:
    """The fastest library for a shape; None if none was timed."""
    timed = {x: us for x in LABELS if (us := times.microseconds(shape, x)) is not None}
    return min(timed, key=timed.__getitem__, default=None)


def speed_grid(times: Times) -> Grid:
    """Each shape that was timed beside its bars."""
    slower = ", ".join(f"{side} {bar:g}" for side, bar in SLOWER.items())
    title = f"Speed. Bars: x best library as said; above 100 MB at least {OF_BANDWIDTH:g} of a pure read's speed; time"
    title += f" relative to ours at most: {slower}"
    columns = [
        "",
        "MB",
        "x best library",
        "bar",
        "best library",
        NO_PROMISE,
        "of a pure read",
        *SLOWER,
    ]
    grid = Grid(title, columns)
    for shape in filter(lambda shape: shape.key in times.shapes, SHAPES):
        left_out, row = times.shapes[shape.key].left_out, [shape.key, f"{shape.bytes / 1e6:.0f}"]
        if (own := times.microseconds(shape, OURS)) is None:  # it does not run, or is wrong
            grid.bars.append(False)
            row.append(f"{left_out.get(OURS)} !")
            grid.rows.append(row + ["-"] * (len(columns) - len(row)))
            continue
        bar, peer = faster(shape), best_peer(times, shape)
        row.append(grid.judged(times.microseconds(shape, peer) / own, bar) if peer else "-")
        row += [f"{bar:g}" if bar else "-", peer or "-"]
        without = times.microseconds(shape, NO_PROMISE)
        row.append(f"{times.microseconds(shape, peer) / without:.2f}" if peer and without else "-")
        at_least = OF_BANDWIDTH if shape.bytes > LARGE else None
        row.append(grid.judged(times.floor(shape) / own, at_least))
        for side, at_most in SLOWER.items():
            if us := times.microseconds(shape, side):
                row.append(grid.judged(us / own, at_most, at_most=True))
            else:
                grid.bars += [False] * (side in left_out)
                row.append("left out !" if side in left_out else "-")
        grid.rows.append(row)
    return grid


def accuracy_grid(seed: int, shapes: Sequence[Shape] = ACCURACY, device: str = "cuda") -> Grid:
    """Ours beside each library on the same random inputs: the mean over the seeds of the errors' ratios."""
    title = f"Error relative to each library's, mean of {SEEDS} seeds (at most {ALLOWED:g}): rms, largest"
    labels = [x for x in LABELS if any(x in peer_sides(shape.dtype) for shape in shapes)]
    grid = Grid(title, ["", *labels, "relative to the best: rms", "largest"])
    for shape in shapes:
        try:
            found = [_ratios(shape, seed + i, device) for i in range(SEEDS)]
        except (RuntimeError, ValueError) as error:
            grid.bars.append(False)
            grid.rows.append([shape.key, *["-"] * len(labels), f"{reason_of(error)} !", "-"])
            continue
        by_peer = {x: _means([f[x] for f in found]) for x in found[0] if all(x in f for f in found)}
        row = [shape.key]
        for label in labels:
            ratios = by_peer.get(label)
            row.append(f"{ratios['rms']:.2f}, {ratios['largest']:.2f}" if ratios else "-")
        for what in ("rms", "largest"):
            worst = max((ratios[what] for ratios in by_peer.values()), default=None)
            row.append("-" if worst is None else grid.judged(worst, ALLOWED, at_most=True))
        grid.rows.append(row)
    return grid


def _ratios(shape: Shape, seed: int, device: str) -> dict[str, Mapping[str, float]]:
    """Our loss as a multiple of that of each library that runs here."""
    torch.manual_seed(seed)
    inputs = Inputs(shape, device, caches=1)
    truth = inputs.truth()

    def loss(out: Tensor) -> Loss:
        return Loss.of(out.reshape(truth.shape), truth)

    own, found = loss(ours(inputs)[0]()), {}
    for label, prepare in peer_sides(shape.dtype).items():
        try:
            found[label] = own.ratios(loss(prepare(inputs)[0]()))
        except Exception:  # the times' table says why a library does not run
            continue
    return found


def _means(ratios: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {what: mean(r[what] for r in ratios) for what in ("rms", "largest")}
