"""What a student writes: the lines between ``BEGIN SOLUTION`` and ``END SOLUTION``.

A mark is a comment on a line of its own. Each function that a stage's ``hints.toml`` names has one pair of marks. All
other lines are given; graders take their own copy of those.
"""

import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from common.check.hints import function_around, pieces_of


class MarkError(ValueError):
    """A file whose answers cannot be told from what is given; the text says where and why."""


class Block(NamedTuple):
    """Lines between two marks.

    ``word`` is SOLUTION. ``instead`` is the line that the mark names, such as ``return 1`` in ``BEGIN SOLUTION, until
    then: return 1``.
    """

    word: str
    function: str  # that it is in; empty outside of one
    indent: str
    instead: str
    begin: int  # line numbers of the marks, from 1
    end: int


class Region(NamedTuple):
    """What is written in one function.

    ``before`` is the given text from the previous region to this one, with the marks; ``after`` that to the next.
    """

    function: str
    begin: int  # line numbers of the marks, from 1
    end: int
    before: str
    lines: str
    after: str


def read(path: Path, file: str) -> str:
    """The text of a file, which errors call ``file``.

    Raises:
        MarkError: there is no such file, it cannot be read, or it is not UTF-8.
    """
    try:
        return decode(path.read_bytes(), file)
    except OSError as error:
        raise MarkError(f"{file}: {error.strerror}") from None


def decode(data: bytes, file: str) -> str:
    """The text of a file's bytes.

    Raises:
        MarkError: they are not UTF-8.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        wrong = f"byte {error.start}, 0x{data[error.start]:02x}, is not UTF-8"
        raise MarkError(f"{file}:{line}: {wrong}") from None


def regions(text: str, file: str) -> list[Region]:
    """What a student wrote in each function of a file, in the file's order; :func:`join` is the inverse.

    Args:
        text: of the file; its line ends are kept.
        file: its path in a checkout, ``task2/attention_kernel.cu``. The stage's hints name the functions; where they
            name none in this file, there are no regions.

    Raises:
        MarkError: the marks do not pair up, or they are not one pair for each of these functions.
    """
    lines = split(text)
    found = blocks(lines, file)
    hints = f"{file.split('/')[0]}/hints.toml"
    missing = [piece.name for piece in pieces_of(file)]
    for block in found:
        where = f"{file}:{block.begin}: BEGIN SOLUTION"
        if block.function in missing:
            missing.remove(block.function)
        elif block.function in (piece.name for piece in pieces_of(file)):
            raise MarkError(f"{where} for the second time in {block.function}")
        elif block.function:
            raise MarkError(f"{where} in {block.function}, which {hints} does not have")
        else:
            raise MarkError(f"{where} outside of a function")
    if missing:
        raise MarkError(f"{file}: {missing[0]} has no BEGIN SOLUTION and END SOLUTION")
    # Where given text begins and ends: at the file's ends and at the marks, which belong to it.
    edges = [0, *(n for block in found for n in (block.begin, block.end - 1)), len(lines)]
    texts = ["".join(lines[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    return [
        Region(block.function, block.begin, block.end, *texts[2 * i : 2 * i + 3])
        for i, block in enumerate(found)
    ]


def join(found: Sequence[Region]) -> str:
    """The file that these regions are from; with other ``lines`` in them, the file with those."""
    return "".join(r.before + r.lines for r in found) + "".join(r.after for r in found[-1:])


def split(text: str) -> list[str]:
    """The lines, with their ends. Only a line feed ends a line, as for compilers, editors and git."""
    return list(io.StringIO(text))


def blocks(lines: Iterable[str], file: str, words: Sequence[str] = ("SOLUTION",)) -> list[Block]:
    """What stands between marks with these words, in the file's order.

    Raises:
        MarkError: a mark without its partner, inside of others, or not alone on its line.
    """
    given: list[str] = []  # the lines outside
    found: list[Block] = []
    begun: Block | None = None
    mention = re.compile(rf"\b(BEGIN|END) ({'|'.join(words)})\b")
    for number, line in enumerate(lines, start=1):
        words_at = mention.search(line)
        if words_at is None or not _SIGN.search(line, 0, words_at.start()):
            if begun is None:
                given.append(line)
            continue
        # What Markdown's comments end with is taken away first: the pattern needs no backtracking then.
        mark = _MARK.fullmatch(line.rstrip().removesuffix("-->").rstrip())
        if mark is None:
            got = line.strip() if len(line) < 120 else f"{line.strip()[:100]} ..."
            raise MarkError(f"{file}:{number}: a mark stands alone on its line; got {got!r}")
        this = f"{mark['edge']} {mark['word']}"
        if mark["edge"] == "BEGIN":
            if begun is not None:
                outer = (
                    f"BEGIN {begun.word} (line {begun.begin}), which has no END {begun.word} yet"
                )
                raise MarkError(f"{file}:{number}: {this} inside {outer}")
            function = function_around(file, given, mark["indent"])
            begun = Block(mark["word"], function, mark["indent"], mark["instead"] or "", number, 0)
        elif begun is None or begun.word != mark["word"]:
            raise MarkError(f"{file}:{number}: {this} without BEGIN {mark['word']}")
        else:
            found.append(begun._replace(end=number))
            begun = None
    if begun is not None:
        raise MarkError(f"{file}:{begun.begin}: BEGIN {begun.word} without END {begun.word}")
    return found


_SIGN = re.compile(r"#|//|/\*|<!--")
_MARK = re.compile(
    r"(?P<indent>\s*)(#|//|<!--)\s*(?P<edge>BEGIN|END) (?P<word>[A-Z]+)"
    r"(, (until then|for [a-z]+): (?P<instead>.+))?"
)
