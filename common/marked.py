"""Text between markers, written by a program into a file that people write.

<!-- grade: stages -->
only these lines are replaced
<!-- end: stages -->
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path


class MarkerError(ValueError):
    """A marker is missing, doubled, unknown or out of place; the text says which and where."""


def replace(text: str, word: str, sections: Mapping[str, Sequence[str]], *, file: str) -> str:
    """The text with the lines between ``<!-- word: NAME -->`` and ``<!-- end: NAME -->`` replaced.

    Args:
        text: of a file; its line ends are kept.
        word: that this program's markers begin with.
        sections: the new lines by NAME; the text must have each of these sections once, and no other.
        file: its name, for the error.

    Raises:
        MarkerError: a marker is missing, doubled, unknown or out of place.
    """
    newline = "\r\n" if "\r\n" in text else "\n"
    pieces: list[str] = []
    inside: str | None = None
    seen: list[str] = []
    at = 0
    for found in _markers(text, word):
        begins, name = found[1] == word, found[2]

        def wrong(what: str, found: re.Match[str] = found) -> MarkerError:
            line = text.count("\n", 0, found.start()) + 1
            return MarkerError(f"{file}, line {line}: {found.group()} {what}")

        if name not in sections:
            raise wrong(f"names no section; there are {', '.join(sections)}")
        if begins:
            if inside is not None:
                raise wrong(f"comes before the end of {inside}")
            if name in seen:
                raise wrong("occurs twice")
            pieces += [text[at : found.end()], newline, newline.join(sections[name]), newline]
            seen.append(name)
            inside = name
        else:
            if inside != name:
                raise wrong("ends a section that was not begun")
            at, inside = found.start(), None
    if inside is not None:
        raise MarkerError(f"{file}: <!-- end: {inside} --> is missing")
    if missing := [name for name in sections if name not in seen]:
        raise MarkerError(f"{file}: the marker <!-- {word}: {missing[0]} --> is missing")
    return "".join([*pieces, text[at:]])


def sections(text: str, word: str) -> list[str]:
    """What stands between the markers of this word, in the file's order; nothing is checked."""
    found = list(_markers(text, word))
    return [text[a.end() : b.start()] for a, b in pairwise(found) if a[1] == word]


def _markers(text: str, word: str) -> Iterator[re.Match[str]]:
    """Takes time that is proportional to the text's length, whatever is in it."""
    return re.finditer(rf"<!--\s*+({re.escape(word)}|end):\s*+([^\s<>]*)\s*+-->", text)


def write_atomically(path: Path, text: str) -> None:
    """The whole new text, or the old file untouched."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_text(text, encoding="utf-8")
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
