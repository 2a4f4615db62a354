"""What was measured, as people read it: GRAPHS.md and RESULTS.md between their markers, and the terminal's tables."""

from collections.abc import Iterable, Sequence

from common.marked import replace, write_atomically
from common.memory import gib
from common.record import describe_run, sources_hash
from common.record.grid import Grid
from common.timing import Timing
from task6.generation import bars
from task6.generation.benchmark import OURS, Found
from task6.generation.breakdown import Part
from task6.generation.peers import COMPILED, LLAMA, ONE_LAUNCH, READABLE
from task6.generation.record import FOLDER, Record, Run, Times

PICTURE = "step.png"
STALE = "The decoder has changed since."
STALE_PRODUCTS = "The products or the layer have changed since."
NOT_YET = "Not measured yet: `{}`."
BARS, TOKENS = "python -m task6.generation --bars", "python -m task6.generation --tokens 10000"
SHARED = "torchrun --nproc-per-node 2 -m task6.generation --bars"


def rendered(record: Record) -> dict[str, str]:
    """The text of each file, by its name.

    Raises:
        MarkerError: a marker is missing.
    """
    parts = {"bars": [NOT_YET.format(BARS), ""], "times": [NOT_YET.format(BARS), ""]}
    parts["steps"] = [NOT_YET.format(BARS), ""]
    parts["shared"] = [NOT_YET.format(SHARED), ""]
    parts["tokens"] = [NOT_YET.format(TOKENS), ""]
    parts["graded"] = [NOT_YET.format(BARS), ""]
    graphs = {"ways": [NOT_YET.format(BARS), ""], "parts": [NOT_YET.format(BARS), ""]}
    if times := record.bars:
        parts["bars"] = [bandwidth(times), "", *bars.grid(times).markdown(), *origin(times.run)]
        parts["times"] = joined(side_by_side(found, times.read_gb_per_s) for found in times.found)
        parts["times"] += [line for found in times.found for line in left_out(found)]
        picture = [f"![The parts of a step]({PICTURE})", ""] * (FOLDER / PICTURE).exists()
        grids = [make(f, times.read_gb_per_s) for f in times.found for make in (step_parts, phases)]
        parts["steps"] = picture + joined(grids)
        graphs["ways"] = [*_ways(times), *origin(times.run)]
        graphs["parts"] = joined(_both_ways(f, times.read_gb_per_s) for f in times.found)
    if record.shared:
        parts["shared"] = []
        for _, times in sorted(record.shared.items()):
            grids = [bars.grid(times)]
            grids += [side_by_side(found, times.read_gb_per_s) for found in times.found]
            parts["shared"] += [*joined(grids), *origin(times.run)]
    if record.tokens:
        parts["tokens"] = joined(record.tokens.grids) + origin(record.tokens.run)
    if record.graded:
        parts["graded"] = joined(record.graded.grids) + origin(record.graded.run, STALE_PRODUCTS)
    return {
        name: replace((FOLDER / name).read_text("utf-8"), "ladder", own, file=f"task6/generation/{name}")
        for name, own in {"GRAPHS.md": graphs, "RESULTS.md": parts}.items()
    }  # fmt: skip


def write(record: Record) -> None:
    """Fill in both files."""
    for name, text in rendered(record).items():
        write_atomically(FOLDER / name, text)


def _ways(times: Times) -> list[str]:
    """A line per case: milliseconds between tokens of a step in many launches, in a graph, and in one launch."""
    ways = {OURS: "a graph of launches", ONE_LAUNCH: "one launch"}
    sides = [
        side
        for side in (LLAMA, COMPILED, READABLE, OURS, ONE_LAUNCH)
        if any(side in found.speeds for found in times.found)
    ]
    grid = Grid("", ["", *(ways.get(side, side) for side in sides), "floor"])
    for found in times.found:
        floor = found.floor(times.read_gb_per_s)
        timed = ((s := found.speeds.get(side)) and s.between.median_ms for side in sides)
        cells = (f"{ms:.4g} ({floor / ms:.0%})" if ms else "-" for ms in timed)
        grid.rows.append([str(found.case), *cells, f"{floor:.4g}"])
    return grid.markdown()


def _both_ways(found: Found, read_gb_per_s: float) -> Grid:
    """The parts of a step in a graph and in one launch, where both were looked at; in the order of the first."""
    grid = Grid(
        str(found.case),
        [
            "",
            "calls",
            "MB",
            "a graph: us each",
            "of a pure read",
            "one launch: us each",
            "of a pure read",
        ],
    )
    phases = {part.name: part for part in found.one_launch}
    for part in found.parts:
        if part.name not in phases or not part.bytes or part.bytes < 1e6:
            continue
        row = [part.name, f"{part.calls:g}", megabytes(part)]
        for p in (part, phases[part.name]):
            row += [f"{p.us / part.calls:.2f}", f"{p.floor(read_gb_per_s) / p.us:.0%}"]
        grid.rows.append(row)
    return grid


def side_by_side(found: Found, read_gb_per_s: float | None) -> Grid:
    """The times of each side, the fastest first; the bandwidth of a pure read is known on a GPU."""
    batch, shared = found.case.batch, f", {found.world} processes" * (found.world > 1)
    clock = f", SMs at {found.clock:,} MHz" if found.clock else ""
    title = f"{found.case}, {found.case.new_tokens} new tokens{shared}{clock}; times in ms"
    columns = [
        "",
        "first token",
        "between tokens",
        "10 to 90 %",
        "99 %",
        "x ours",
        "tokens/s",
        "GB/s",
    ]
    share = ["of a pure read"] if read_gb_per_s else []
    grid = Grid(title, [*columns, *share, "the decoder's tokens"])
    for name, speed in sorted(found.speeds.items(), key=lambda side: side[1].between.median_ms):
        tbt = speed.between
        rate = found.read / tbt.median_ms / 1e6
        row = [name, f"{speed.first.median_ms:.4g}", f"{tbt.median_ms:.4g}", spread(tbt)]
        row += [f"{speed.p99_ms:.4g}", f"{tbt.median_ms / found.ours.between.median_ms:.2f}"]
        row += [f"{1e3 * batch / tbt.median_ms:,.0f}", f"{rate:,.4g}"]
        row += [f"{rate / read_gb_per_s:.0%}"] if read_gb_per_s else []
        same = found.same.get(name)
        row.append("-" if same is None else f"{same} of {found.case.new_tokens}")
        grid.rows.append(row)
    if read_gb_per_s:
        floor = found.floor(read_gb_per_s)
        relative = f"{floor / found.ours.between.median_ms:.2f}"
        row = ["floor", "", f"{floor:.4g}", "", "", relative, f"{1e3 * batch / floor:,.0f}"]
        grid.rows.append([*row, f"{read_gb_per_s:,.4g}", "100%", "-"])
    return grid


def memory(found: Found) -> str:
    """What the decoder took, beside what it has to."""
    text = f"Weights and cache are {gib(found.held)}"
    if not found.allocated:
        return text + "."
    peaks = [
        f"{what} {gib(peak)} ({peak / found.held:.3f} x)"
        for what, peak in (("allocated", found.allocated), ("reserved", found.reserved))
    ]
    return f"{text}; PyTorch's peak with the prompt: {', '.join(peaks)}."


def left_out(found: Found) -> list[str]:
    """What was not measured, and why; and the memory."""
    lines = [f"- {found.case}: {name}: {reason}" for name, reason in found.left_out.items()]
    return [*lines, f"- {found.case}: {memory(found)}", ""]


def step_parts(found: Found, read_gb_per_s: float) -> Grid:
    """The parts of a step, the longest first."""
    total = sum(part.us for part in found.parts)
    title = f"{found.case}: a step of {total:,.0f} us in the profiler, {_us(found)} without it"
    return _parts(title, found.parts, read_gb_per_s)


def phases(found: Found, read_gb_per_s: float) -> Grid:
    """The parts of a step in one launch, the longest first."""
    total = sum(part.us for part in found.one_launch)
    title = (
        f"{found.case}: a step in one launch of {total:,.0f} us, by the clock of one of its blocks"
    )
    return _parts(title, found.one_launch, read_gb_per_s)


def _parts(title: str, parts: Sequence[Part], read_gb_per_s: float) -> Grid:
    total = sum(part.us for part in parts)
    columns = ["", "kernel", "calls", "us each", "us", "of the step", "MB", "of a pure read"]
    grid = Grid(title, columns)
    for part in parts:
        floor = part.floor(read_gb_per_s)
        grid.rows.append([
            part.name, part.kernel if part.kernel != part.name else "",
            f"{part.calls:g}" if part.calls else "", f"{part.us / part.calls:.2f}" if part.calls else "",
            f"{part.us:,.1f}", f"{part.us / total:.1%}", megabytes(part) if floor else "",
            f"{floor / part.us:.0%}" if floor and part.us else "",
        ])  # fmt: skip
    return grid


def operators(found: Found, rows: int = 15) -> Grid:
    """The parts of a step on a CPU: PyTorch's operators."""
    total = sum(part.us for part in found.parts)
    grid = Grid("", ["operator", "calls", "us", "of the step"])
    shown = [(part.name, f"{part.calls:g}", part.us) for part in found.parts[:rows]]
    if rest := found.parts[rows:]:
        shown.append((f"{len(rest)} others", "", sum(part.us for part in rest)))
    grid.rows = [[name, calls, f"{us:.1f}", f"{us / total:.1%}"] for name, calls, us in shown]
    return grid


def bandwidth(times: Times) -> str:
    """What the floor follows from."""
    return f"A pure read in the same run: {times.read_gb_per_s:,.0f} GB/s."


def megabytes(part: Part) -> str:
    """Of a part whose bytes are counted."""
    return f"{part.bytes / 1e6:,.0f}" if part.bytes >= 1e7 else f"{part.bytes / 1e6:.2g}"


def _us(found: Found) -> str:
    return f"{1e3 * found.ours.between.median_ms:,.0f}"


def spread(timing: Timing) -> str:
    """From the 10th to the 90th percentile, in milliseconds."""
    return f"{timing.p10_ms:.4g} to {timing.p90_ms:.4g}"


def joined(grids: Iterable[Grid]) -> list[str]:
    """The lines of these tables, but for those without rows."""
    return [line for grid in grids if grid.rows for line in grid.markdown()]


def origin(run: Run, stale: str = STALE) -> list[str]:
    """Which run figures are from, and ``stale`` where its sources have changed."""
    sources = run["sources"]
    changed = sources_hash(sources["patterns"]) != sources["sha256"]
    return [f"Run of {describe_run(run)}", "", *([stale, ""] if changed else [])]
