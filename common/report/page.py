"""The report's Markdown: what a program writes, between markers, and the places for a student's answers."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from common.marked import replace
from common.record.grid import Grid
from common.report.roof import Dot, Roof
from common.report.shapes import BYTES, LENGTHS, Sizes, Work, ratio, sizes, text, value

WORD = "report"
NEEDS_GPU = "needs a GPU"
MEASURED = "Ceilings, measured in the same run"
NO_HOST = "This checkout has no attention in C++ for the CPU."
ANSWER = "_Your answer:_"
MORE_LENGTHS = (128, 512, 1024, 4096)  # for what follows from the shapes alone

# Heading, what is asked, and the sections of measured facts.
_QUESTIONS = (
    (
        "Memory-bound or compute-bound?",
        "For each of your kernels: which of the two is it? Justify it by the profiler's numbers and by your derivation"
        " of AI.",
        ("bound-gpu", "bound-host"),
    ),
    (
        "Performance gap",
        "How much slower than `F.scaled_dot_product_attention` is your attention, for each sequence length? Which"
        " optimisations does PyTorch apply that yours does not?",
        ("gap-gpu", "gap-host"),
    ),
    (
        "Effect of sequence length",
        "How does the AI of the naive attention change as S grows? What does that say about the bottleneck, and why"
        " does it matter for language models with a long context?",
        ("length",),
    ),
    (
        "Impact of kernel fusion",
        "Compare the profiler's numbers before and after the kernels were merged. Does the share of DRAM fall? Does"
        " your dot move to the right? By how much did the time change?",
        ("fusion-gpu", "fusion-host"),
    ),
)
SECTIONS = ("shapes", "gpu", "host", *(name for _, _, names in _QUESTIONS for name in names))


@dataclass
class Side:
    """What is known of the kernels of one device.

    Attributes:
        where: "the GPU" or "the CPU".
        dots: the kernels at ``LENGTHS``.
        naive, fused: names of the attention before and after fusion.
        roof: None where nothing could be measured.
        seconds: by sequence length and name, also of those that are not among the dots.
        peers: PyTorch's operation, by the names of the attentions that are compared with it.
        picture: the file's name, or why there is none.
        notes: what else a reader has to know of the table.
        more: further tables.
        run: date, commit and machine.
    """

    where: str
    dots: Sequence[Dot]
    naive: str
    fused: str
    roof: Roof | None = None
    seconds: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    peers: Mapping[str, str] = field(default_factory=dict)
    picture: str = ""
    notes: Sequence[str] = ()
    more: Sequence[Grid | str] = ()
    run: str = ""


# Tables -----------------------------------------------------------------------------------------------------


def derivation(works: Sequence[Work]) -> Grid:
    """FLOPs, bytes and intensity as formulas."""
    grid = Grid("As formulas:", ["kernel", "FLOPs", "bytes", "AI = FLOPs / bytes"])
    for work in works:
        grid.rows.append([work.name, text(work.flops), work.traffic, ratio(work)])
    return grid


def numbers(works: Sequence[Work], splits: Mapping[int, int]) -> Grid:
    """The same for ``LENGTHS``."""
    columns = [f"{what}, S {seq:,}" for seq in LENGTHS for what in ("MFLOP", "MB", "AI")]
    grid = Grid("As numbers; AI in FLOP/byte:", ["kernel", *columns])
    for work in works:
        cells: list[str] = []
        for seq in LENGTHS:
            letters = sizes(seq, splits.get(seq, 1))
            if "n" in "".join(work.bytes) and letters["n"] == 1:
                cells += ["-"] * 3  # it is not launched
            else:
                moved = value(work.bytes, letters)
                done = value(work.flops, letters)
                cells += [_digits(done / 1e6), _digits(moved / 1e6), _digits(done / moved)]
        grid.rows.append([work.name, *cells])
    return grid


def measured(side: Side) -> Grid:
    """Each kernel's time and rate beside its roof."""
    columns = ["kernel", "S", "AI", "limit by shape", "time"]
    columns += ["GFLOP/s", "GB/s", "roof, GFLOP/s", "of the roof"]
    grid = Grid(f"Kernels on {side.where}:", columns)
    for dot in side.dots:
        row = [dot.work.name, f"{dot.seq:,}", _digits(dot.intensity)]
        if side.roof is None or dot.rate is None:
            limit = side.roof.limit(dot.intensity) if side.roof else "-"
            grid.rows.append([*row, limit, dot.why, *["-"] * 4])
            continue
        roof = side.roof.at(dot.intensity)
        grid.rows.append(
            [
                *row, side.roof.limit(dot.intensity), _time(dot.seconds), _digits(dot.rate / 1e9),
                _digits(dot.bytes / dot.seconds / 1e9), _digits(roof / 1e9), _share(dot, side.roof),
            ]
        )  # fmt: skip
    return grid


def gap(side: Side) -> Grid:
    """Times relative to PyTorch's."""
    columns = [c for name in side.peers for c in (name, "PyTorch", "ours / PyTorch")]
    grid = Grid(f"Times on {side.where}, and how many times PyTorch's:", ["S", *columns])
    for seq, found in side.seconds.items():
        cells: list[str] = []
        for name, peer in side.peers.items():
            ours, theirs = found.get(name), found[peer]
            relative = [_time(ours), _time(theirs), f"{ours / theirs:.2f}"] if ours else None
            cells += relative or ["-", _time(theirs), "-"]
        grid.rows.append([f"{seq:,}", *cells])
    return grid


def bound(side: Side) -> Grid:
    """Intensities beside the ridge."""
    columns = ["kernel", *(f"AI, S {seq:,}" for seq in LENGTHS), "ridge point"]
    ridge = f"{side.roof.ridge:.3g}" if side.roof else NEEDS_GPU
    grid = Grid(f"FLOP/byte on {side.where}:", columns)
    for name in dict.fromkeys(dot.work.name for dot in side.dots):
        found = {dot.seq: _digits(dot.intensity) for dot in side.dots if dot.work.name == name}
        grid.rows.append([name, *(found[seq] for seq in LENGTHS), ridge])
    return grid


def lengths(works: Sequence[Work]) -> Grid:
    """How intensities and the matrix of scores grow."""
    columns = [f"S {seq:,}" for seq in MORE_LENGTHS]
    grid = Grid("AI in FLOP/byte, from the shapes:", ["", *columns])
    for work in works:
        found = (_digits(work.intensity(sizes(seq))) for seq in MORE_LENGTHS)
        grid.rows.append([work.name, *found])
    scores = (value({"HSS": BYTES}, sizes(seq)) / 1e6 for seq in MORE_LENGTHS)
    grid.rows.append(["the matrix of scores, MB", *map(_digits, scores)])
    return grid


def fusion(side: Side) -> Grid:
    """Before and after."""
    columns = ["S", "", "MB", "AI", "time", "of the roof"]
    grid = Grid(f"On {side.where}:", columns)
    for seq in LENGTHS:
        for name, when in ((side.naive, "before"), (side.fused, "after")):
            dot = next(d for d in side.dots if d.work.name == name and d.seq == seq)
            share = _share(dot, side.roof) if side.roof and dot.rate else "-"
            time = _time(dot.seconds) if dot.seconds else dot.why
            cells = [_digits(dot.bytes / 1e6), _digits(dot.intensity), time, share]
            grid.rows.append([f"{seq:,}", f"{when}: {name}", *cells])
    return grid


def _time(seconds: float) -> str:
    return f"{_digits(seconds * 1e3)} ms" if seconds >= 1e-3 else f"{_digits(seconds * 1e6)} us"


def _share(dot: Dot, roof: Roof) -> str:
    share = dot.rate / roof.at(dot.intensity)
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"


def _digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


# The page ---------------------------------------------------------------------------------------------------


def sections(
    works: Sequence[Work],
    growing: Sequence[Work],
    splits: Mapping[int, int],
    gpu: Side,
    host: Side | None,
) -> dict[str, list[str]]:
    """What a run writes, by section.

    Args:
        works: the kernels whose formulas are shown.
        growing: those whose intensity is shown for more lengths.
        splits: n in task 5's, by sequence length.
        gpu: the kernels of tasks 2, 4 and 5.
        host: those in C++, where the checkout has them.
    """
    found = {name: [] for name in SECTIONS}
    found["shapes"] = [
        *_letters(sizes(LENGTHS[0]), splits),
        *derivation(works).markdown(),
        *numbers(works, splits).markdown(),
    ]
    found["host"] = [NO_HOST]
    for name, side in (("gpu", gpu), ("host", host)):
        if side:
            found[name] = _side(side)
            found[f"bound-{name}"] = bound(side).markdown()
            found[f"fusion-{name}"] = fusion(side).markdown()
            if side.seconds:
                found[f"gap-{name}"] = gap(side).markdown()
            else:
                found[f"gap-{name}"] = [f"On {side.where}: {NEEDS_GPU}.", ""]
    found["length"] = lengths(growing).markdown()
    return found


def _letters(letters: Sizes, splits: Mapping[int, int]) -> list[str]:
    blocks = " and ".join(f"{n} at S {seq:,}" for seq, n in splits.items())
    return [
        f"S is the sequence length, D = {letters['D']} the head_dim, H = {letters['H']} the number of heads. The batch"
        f" is 1, and a number has {BYTES} bytes. n is the number of blocks that share the keys of a head in a decode"
        f" step: here {blocks}. With 1, no parts are written and combine is not launched.",
        "",
        "A multiplication, an addition, a maximum, an exponential and a division are one FLOP each. Bytes are what a"
        " kernel has to move at least: each input read once, each output written once.",
        "",
    ]


def _side(side: Side) -> list[str]:
    lines: list[str] = []
    if side.roof:
        lines += [
            f"{MEASURED} ({side.roof.of}): {side.roof.bandwidth / 1e9:,.0f} GB/s and"
            f" {side.roof.flops / 1e9:,.0f} GFLOP/s. They meet at the ridge point, {side.roof.ridge:.3g} FLOP/byte: a"
            " kernel with less AI is limited by memory, one with more by compute.",
            "",
        ]
    lines += measured(side).markdown()
    for note in side.notes:
        lines += [note, ""]
    if side.picture:
        drawn = side.picture.endswith(".png")
        title = f"Roofline of {side.where}, with the kernels at S {' and '.join(f'{s:,}' for s in LENGTHS)}"
        lines += [f"![{title}]({side.picture})" if drawn else f"{side.picture}.", ""]
    for part in side.more:
        lines += part.markdown() if isinstance(part, Grid) else [part, ""]
    return [*lines, *([side.run] if side.run else [])]


def empty() -> str:
    """A page without results and answers."""
    lines = [
        "# Report: the kernels against the roofline",
        "",
        "`python -m common.report` writes what is between the comments, and nothing else. Run it again when a kernel"
        " has changed: your answers stay.",
        "",
        "## 1. Arithmetic intensity",
        "",
        *_section("shapes"),
        "## 2. Measured times and the roofline",
        "",
        "### On the GPU",
        "",
        *_section("gpu"),
        "### On the CPU",
        "",
        *_section("host"),
        "## 3. Analysis",
        "",
    ]
    for heading, question, names in _QUESTIONS:
        parts = [line for name in names for line in _section(name)]
        lines += [f"### {heading}", "", question, "", *parts, ANSWER, "", ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _section(name: str) -> list[str]:
    return [f"<!-- {WORD}: {name} -->", f"<!-- end: {name} -->", ""]


def check(page: str, file: str) -> None:
    """See that a page has every section.

    Raises:
        MarkerError: it does not.
    """
    replace(page, WORD, dict.fromkeys(SECTIONS, ()), file=file)


def fill(page: str, found: Mapping[str, Sequence[str]], file: str) -> str:
    """The page with these sections. What was measured on a GPU stays if this run had none.

    Raises:
        MarkerError: it lacks a section.
    """
    check(page, file)
    before = dict(re.findall(rf"<!--\s*{WORD}:\s*(\S+)\s*-->(.*?)<!--\s*end:", page, re.DOTALL))
    if MEASURED in before["gpu"] and MEASURED not in "\n".join(found["gpu"]):
        kept = [name for name in SECTIONS if name == "gpu" or name.endswith("-gpu")]
        found = {**found, **{name: before[name].splitlines() for name in kept}}
    lines = {name: _stripped(found[name]) for name in SECTIONS}
    return replace(page, WORD, lines, file=file)


def _stripped(lines: Sequence[str]) -> list[str]:
    """One empty line after the marker, and one before the end."""
    inside = "\n".join(lines).strip("\n").split("\n")
    return ["", *inside, ""] if any(inside) else []
