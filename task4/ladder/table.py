"""What was measured, as people read it: README.md and RESULTS.md between their markers, and the terminal's tables."""

from collections.abc import Iterable, Mapping, Sequence

from common.marked import replace, write_atomically
from common.record import describe_run, sources_hash
from common.record.grid import Grid
from common.timing.peers import CUDNN, EFFICIENT, FA3, FLASH, PEERS, Peer
from task4.ladder.benchmark import PRECISIONS, SEQS, Cell, Method, Precision
from task4.ladder.evidence.bars import MASKS, ratio_grid
from task4.ladder.record import Record, Run, Times
from task4.ladder.rungs import FOLDER, RUNGS

BF16, FP32 = PRECISIONS["bfloat16"], PRECISIONS["float32"]
# The columns of the short tables: a length that the slowest rungs still reach, and the longest.
SHORT = [Cell(d, s, c) for d, s in ((64, 2048), (128, 2048), (128, 16384)) for c in (False, True)]
SHORTEST = [Cell(128, 2048, True), Cell(128, 16384, True)]
STALE = "The kernels have changed since."
README_ROWS = [(rung, BF16 if BF16.has(rung) else FP32) for rung in RUNGS]
README_ROWS += [(FLASH, BF16), (CUDNN, BF16), (FA3, BF16), (EFFICIENT, FP32)]


def rendered(records: Mapping[str, Record]) -> dict[str, str]:
    """The text of each file, by its name.

    Raises:
        MarkerError: a marker is missing.
    """
    timed = {name: record.times for name, record in records.items() if record.times}
    shown = [timed[precision.name] for precision in (BF16, FP32) if precision.name in timed]
    table = overview(README_ROWS, SHORTEST, timed).markdown() + _references(shown)
    for times in shown:
        table += _run(times.run)
    results = {name: _section(p, records.get(name, Record())) for name, p in PRECISIONS.items()}
    return {
        name: replace((FOLDER / name).read_text("utf-8"), "ladder", parts, file=f"task4/ladder/{name}")
        for name, parts in {"README.md": {"table": table}, "RESULTS.md": results}.items()
    }  # fmt: skip


def write(records: Mapping[str, Record]) -> None:
    """Fill in both files."""
    for name, text in rendered(records).items():
        write_atomically(FOLDER / name, text)


def overview(
    rows: Iterable[tuple[Method, Precision]], cells: Sequence[Cell], timed: Mapping[str, Times]
) -> Grid:
    """A line per method: TFLOP/s, share of the reference, and ratio to the best library."""
    titles = (f"d {c.head_dim}, S {c.seq:,}{', causal' if c.causal else ''}" for c in cells)
    grid = Grid("", ["rung", "what changes", *titles])
    for method, precision in rows:
        figures = [_figure(method, precision, cell, timed.get(precision.name)) for cell in cells]
        if isinstance(method, Peer):
            grid.rows.append([f"*{method.label}*", "", *figures])
        else:
            grid.rows.append([f"[{method.label}]({method.file})", method.change, *figures])
    return grid


def _figure(method: Method, precision: Precision, cell: Cell, times: Times | None) -> str:
    """``640 (88 %, 1.06 x)``."""
    if not times or not (own := times.find(cell, method)):
        return "-"
    rate, brackets = cell.tflops(own), []
    if reference := times.references.get(precision.reference(method)):
        share = 100 * rate / reference
        brackets.append(f"{share:.0f} %" if share >= 1 else f"{share:.1f} %")
    libraries = [found.median_ms for peer in PEERS if (found := times.find(cell, peer))]
    if libraries and not isinstance(method, Peer):
        ratio = min(libraries) / own.median_ms
        brackets.append(f"{ratio:.2f} x" if ratio >= 0.1 else f"{ratio:.2g} x")
    return f"{_number(rate)} ({', '.join(brackets)})"


def _number(tflops: float) -> str:
    return f"{tflops:.0f}" if tflops >= 100 else f"{tflops:.3g}"


def length_grid(precision: Precision, times: Times, head_dim: int, causal: bool) -> Grid:
    """TFLOP/s of all methods over the sequence length."""
    mask = "causal" if causal else "not causal"
    title = f"{precision.name}, head_dim {head_dim}, {mask}: TFLOP/s"
    grid = Grid(title, ["S", *(f"{seq:,}" for seq in SEQS)])
    cells = [Cell(head_dim, seq, causal) for seq in SEQS]
    for method in precision.methods:
        found = [(cell, times.find(cell, method)) for cell in cells]
        texts = [_number(cell.tflops(timing)) if timing else "-" for cell, timing in found]
        if set(texts) != {"-"}:
            grid.rows.append([method.label, *texts])
    return grid


def reasons(times: Times) -> list[str]:
    """Why methods are missing in some cells."""
    left_out = [cell.left_out.items() for cell in times.cells.values()]
    return sorted({f"{label}: {reason}" for cell in left_out for label, reason in cell})


def picture(precision: Precision, head_dim: int) -> str:
    """The file name of a picture."""
    return f"{precision.name}-d{head_dim}.png"


def _section(precision: Precision, record: Record) -> list[str]:
    """All that is known of a precision."""
    lines: list[str] = []
    if times := record.times:
        rows = [(m, precision) for m in precision.methods if any(times.find(c, m) for c in SHORT)]
        lines += overview(rows, SHORT, {precision.name: times}).markdown() + _references([times])
        for name in (picture(precision, d) for d in precision.head_dims):
            if (FOLDER / name).exists():
                lines += [f"![TFLOP/s and time over the sequence length]({name})", ""]
        masks = [mask for mask in MASKS.values() if mask[0] in precision.head_dims]
        grids = [length_grid(precision, times, *mask) for mask in masks]
        lines += _joined([*grids, ratio_grid(precision, times.cell)])
        lines += [*(f"- {reason}" for reason in reasons(times)), "", *_run(times.run)]
    for tables in filter(None, (record.bars, record.profile)):
        lines += _joined(tables.grids) + _run(tables.run)
    return lines or ["Not measured yet: `python -m task4.ladder` on a GPU.", ""]


def _joined(grids: Iterable[Grid]) -> list[str]:
    return [line for grid in grids if grid.rows for line in grid.markdown()]


def _references(timed: Iterable[Times]) -> list[str]:
    """What the shares are of."""
    products = [product for times in timed for product in times.references.items()]
    return [f"Reference: {', '.join(f'{name} {rate:.0f} TFLOP/s' for name, rate in products)}.", ""]


def _run(run: Run) -> list[str]:
    """Which run figures are from."""
    lines = [f"Run of {describe_run(run)}", "", f"FlashAttention-3: {run['fa3']}", ""]
    sources = run["sources"]
    return lines + ([STALE, ""] if sources_hash(sources["patterns"]) != sources["sha256"] else [])
