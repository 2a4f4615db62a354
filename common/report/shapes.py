"""FLOPs, bytes and arithmetic intensity of each kernel, as formulas in S, D, H and, where keys are split, n.

    H  heads                    8
    S  sequence length          128, 512, 1,024; the batch is 1
    D  head_dim                 64
    n  splits of the keys       task 5's decode kernel

A multiplication, an addition, a maximum, an exponential and a division are one FLOP each. Bytes are what a kernel has
to move at least: it reads each of its inputs once and writes each of its outputs once, 4 bytes per element.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from math import gcd, prod

HEADS, HEAD_DIM = 8, 64
LENGTHS = (128, 1024)  # for which intensities are given
BYTES = 4  # of a float32

Formula = Mapping[str, int]  # {"HSSD": 2, "HS": 1} is 2 H S² D + H S
Tensors = tuple[tuple[str, str], ...]  # names with their numbers of elements: (("q", "HSD"), ...)
Sizes = Mapping[str, int]  # of the letters


@dataclass(frozen=True)
class Work:
    """What a kernel computes and moves.

    Attributes:
        name: of the kernel, as tables show it.
        flops: floating-point operations.
        reads, writes: the tensors, each once.
    """

    name: str
    flops: Formula
    reads: Tensors
    writes: Tensors

    @property
    def bytes(self) -> Formula:
        """Bytes read and written."""
        elements = Counter(letters for _, letters in (*self.reads, *self.writes))
        return {letters: BYTES * number for letters, number in sorted(elements.items())}

    @property
    def traffic(self) -> str:
        """The bytes by tensor: ``8 H S D (read q, k) + 4 H S² (write scores)``."""
        parts = (*_traffic("read", self.reads), *_traffic("write", self.writes))
        return " + ".join(parts)

    def intensity(self, sizes: Sizes) -> float:
        """FLOPs per byte."""
        return value(self.flops, sizes) / value(self.bytes, sizes)


def sizes(seq: int, splits: int = 1) -> Sizes:
    """The letters for a sequence length."""
    return {"H": HEADS, "n": splits, "S": seq, "D": HEAD_DIM}


def together(name: str, works: Iterable[Work]) -> Work:
    """Kernels one after the other: each reads from memory what the one before it wrote there."""
    works = list(works)
    flops: Counter[str] = Counter()
    for work in works:
        flops.update(work.flops)
    reads, writes = (sum((getattr(w, what) for w in works), ()) for what in ("reads", "writes"))
    return Work(name, dict(flops), reads, writes)


def value(formula: Formula, sizes: Sizes) -> int:
    """A formula's number for these sizes."""
    return sum(
        factor * prod(sizes[letter] for letter in letters) for letters, factor in formula.items()
    )


def text(formula: Formula) -> str:
    """``2 H S² D + H S``."""
    return " + ".join(_term(letters, factor) for letters, factor in formula.items())


def ratio(work: Work) -> str:
    """Its arithmetic intensity as a formula, without the factors that cancel: ``S D / (4 D + 2 S)``."""
    terms = [*work.flops, *work.bytes]
    common = reduce(lambda a, b: a & b, map(Counter, terms))
    divisor = gcd(*work.flops.values(), *work.bytes.values())
    above, below = (
        {"".join((Counter(letters) - common).elements()): n // divisor for letters, n in f.items()}
        for f in (work.flops, work.bytes)
    )
    top, bottom = text(above), text(below)
    top = f"({top})" if len(above) > 1 else top
    return f"{top} / ({bottom})" if " " in bottom else f"{top} / {bottom}"


def _term(letters: str, factor: int) -> str:
    powers = {letter: letters.count(letter) for letter in "HnSD" if letter in letters}
    words = [f"{letter}{'²' if power == 2 else ''}" for letter, power in powers.items()]
    return " ".join([f"{factor}"] * (factor != 1 or not words) + words)


def _traffic(verb: str, tensors: Tensors) -> Iterator[str]:
    by_size: dict[str, list[str]] = {}
    for name, letters in tensors:
        by_size.setdefault(letters, []).append(name)
    for letters, names in by_size.items():
        yield f"{_term(letters, BYTES * len(names))} ({verb} {', '.join(names)})"


# Tasks 2, 4 and 5 ----------------------------------------------------------------------------------------

_QKV = (("q", "HSD"), ("k", "HSD"), ("v", "HSD"))
_SCORES, _WEIGHTS, _OUT = ("scores", "HSS"), ("weights", "HSS"), ("out", "HSD")
_PARTS = (("partial_out", "HnD"), ("partial_lse", "Hn"))

# A score is D multiplications and D additions, and so is what a key adds to a row of out. The softmax takes a maximum,
# a difference, an exponential, a sum and a division per score.
SCORES = Work("task 2: scores", {"HSSD": 2}, _QKV[:2], (_SCORES,))
SCALE = Work("task 2: scale and mask", {"HSS": 1}, (_SCORES,), (_SCORES,))
SOFTMAX = Work("task 2: softmax", {"HSS": 5}, (_SCORES,), (_WEIGHTS,))
PRODUCT = Work("task 2: product", {"HSSD": 2}, (_WEIGHTS, _QKV[2]), (_OUT,))
NAIVE = together("task 2: all four", (SCORES, SCALE, SOFTMAX, PRODUCT))
# The same arithmetic. That it divides rows of out and not weights, and rescales them when a tile has a new maximum,
# changes it by less than 1 in 100.
FUSED = Work("task 4: fused", NAIVE.flops, _QKV, (_OUT,))
# One query against S keys.
_ONE = (("q", "HD"), *_QKV[1:])
_STEP = {letters.replace("SS", "S"): number for letters, number in NAIVE.flops.items()}
DECODE = Work("task 5: decode", _STEP, _ONE, (("out", "HD"),))
# With the keys of a head split over n blocks: each writes a part, which the second kernel adds up.
SPLIT = Work("task 5: decode, n splits", _STEP, _ONE, _PARTS)
COMBINE = Work("task 5: combine", {"HnD": 2, "Hn": 4, "HD": 1}, _PARTS, (("out", "HD"),))

ON_GPU = (SCORES, SCALE, SOFTMAX, PRODUCT, NAIVE, FUSED, DECODE, SPLIT, COMBINE)


def decode(splits: int) -> Work:
    """What one decode step launches."""
    return DECODE if splits == 1 else together(DECODE.name, (SPLIT, COMBINE))
