"""Shapes of a kind timed beside the libraries, in a table of their own, and its bar."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from common.record.grid import Grid
from common.timing.compare import Measured
from task5.ladder.benchmark import OURS, Prepare, Shape, time_shape

AT_LEAST = 1.0  # x the best library

Column = Callable[[Shape, Mapping[str, float]], str]  # of a shape and microseconds by side


def time_shapes(
    shapes: Sequence[Shape],
    sides: Mapping[str, Prepare],
    seed: int,
    say: Callable[[str], object] = lambda _: None,
) -> dict[str, Measured]:
    """Time these on the current GPU, each side in turn. ``say`` gets the name of each that begins."""
    found = {}
    for shape in shapes:
        say(shape.key)
        found[shape.key] = time_shape(shape, sides, seed)
    return found


def of_sides(sides: Iterable[str]) -> dict[str, Column]:
    """A column for each of these, of its time."""

    def of(side: str) -> Column:
        return lambda _, us: f"{us[side]:.1f}" if side in us else "-"

    return {side: of(side) for side in sides}


def judge(
    shapes: Sequence[Shape],
    found: Mapping[str, Measured],
    columns: Mapping[str, Column],
    peers: Sequence[str],
) -> Grid:
    """The table of these times, ours beside these libraries' and the bar."""
    names = ["", *columns, *peers, "x best library", "best library"]
    grid = Grid(f"Microseconds per call. Bar: {AT_LEAST:g} x the best library", names)
    texts = list((columns | of_sides(peers)).values())
    for shape in shapes:
        times, left_out = found[shape.key].times, found[shape.key].left_out
        us = {side: 1e3 * timing.median_ms for side, timing in times.items()}
        if OURS not in us:
            grid.bars.append(False)
            grid.rows.append([shape.key, f"{left_out.get(OURS)} !"] + ["-"] * (len(names) - 2))
            continue
        best = min((x for x in peers if x in us), key=us.__getitem__, default=None)
        ratio = grid.judged(us[best] / us[OURS], AT_LEAST) if best else "-"
        grid.rows.append([shape.key, *(text(shape, us) for text in texts), ratio, best or "-"])
    return grid
