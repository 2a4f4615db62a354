"""Hints for what is to be written, one level at a time: ``python -m taskN.test --hint``.

They are data, in ``taskN/hints.toml``: a table ``[[piece]]`` for each answer, in the order of writing.

    name     the function that is to be written; in Python with its class
    file     where it is
    groups   the groups of checks that test it
    size     how much is to be written; the placeholder says the same
    levels   the hints, from a question to nearly the line

``.build/hints.json`` remembers which level was shown last. Without it, or where it cannot be read, hints start over.
"""

import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.marked import write_atomically
from common.paths import ROOT

STATE = ROOT / ".build/hints.json"
LEVELS = (3, 4)  # how many levels a piece has, at least and at most


class HintError(ValueError):
    """A file of hints that is not as described above, or a piece that does not exist; the text is complete."""


@dataclass(frozen=True)
class Piece:
    """Something to write, and its hints; the fields are those of the file."""

    name: str
    file: str
    groups: tuple[str, ...]
    size: str
    levels: tuple[str, ...]


def load(stage: str, root: Path = ROOT) -> list[Piece]:
    """The pieces of ``task2``, in the order of writing; none where the stage has no file of hints.

    Raises:
        HintError: the file is not TOML, or a piece lacks something.
    """
    path = root / stage / "hints.toml"
    if not path.exists():
        return []
    where = f"{stage}/hints.toml"
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8")).get("piece", [])
        found = [_piece(where, table) for table in tables]
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise HintError(f"{where} is not TOML ({error})") from None
    names = [piece.name for piece in found]
    if len(set(names)) != len(names):
        raise HintError(f"{where}: each piece has a name of its own; got {', '.join(names)}")
    return found


def answers(stage: str, root: Path = ROOT) -> list[str]:
    """The files of ``task2`` with something to write.

    Raises:
        HintError: see :func:`load`.
    """
    return list(dict.fromkeys(piece.file for piece in load(stage, root)))


def pieces_of(file: str) -> list[Piece]:
    """The pieces of ``task2/attention_kernel.cu``, in the order of writing.

    Raises:
        HintError: see :func:`load`.
    """
    return [piece for piece in load(file.split("/")[0]) if piece.file == file]


def _piece(where: str, table: dict) -> Piece:
    name = table.get("name", "a piece without a name")
    for field, kind in (("name", str), ("file", str), ("groups", list), ("size", str), ("levels", list)):  # fmt: skip
        if not isinstance(table.get(field), kind) or not table[field]:
            raise HintError(
                f"{where}: {name}: {field} must be a {kind.__name__} that is not empty; got {table.get(field)!r}"
            )
    if not LEVELS[0] <= len(table["levels"]) <= LEVELS[1]:
        raise HintError(
            f"{where}: {name} must have {LEVELS[0]} to {LEVELS[1]} levels; got {len(table['levels'])}"
        )
    levels = tuple(str(level).strip() for level in table["levels"])
    return Piece(name, table["file"], tuple(table["groups"]), table["size"], levels)


def show(stage: str, wanted: str = "", groups: Sequence[str] = ()) -> str:
    """The next hint of a stage, as text to print, and remember that it was shown.

    Args:
        stage: ``task2``.
        wanted: the name of a piece or of a group, or how a piece's name begins; empty: the whole stage.
        groups: only pieces that these groups check; empty: all.

    Without the name of a piece, this is the next hint of the first piece that still has one.

    Raises:
        HintError: nothing has this name.
    """
    pieces = load(stage)
    if not pieces:
        return f"{stage} has nothing to write, so it has no hints. If a check fails, the task that it names has."
    narrowed = _select(stage, pieces, wanted, groups)
    state = _read()
    given = {piece.name: _given(state, stage, piece) for piece in pieces}
    piece = next((p for p in narrowed if given[p.name] < len(p.levels)), narrowed[-1])
    level = min(given[piece.name] + 1, len(piece.levels))
    again = given[piece.name] == len(piece.levels)
    given[piece.name] = level
    kept = _write(state | {stage: {**_table(state, stage), piece.name: level}})
    lines = [
        f"{piece.name} in {piece.file}",
        piece.size,
        "",
        f"hint {level} of {len(piece.levels)}" + (", the last, once more" if again else ""),
        "",
        *("    " + line if line else "" for line in piece.levels[level - 1].splitlines()),
        "",
        _whats_left(stage, piece, level),
    ]
    others = [p for p in pieces if p is not piece and given[p.name] < len(p.levels)]
    if others:
        left = ", ".join(f"{p.name} ({len(p.levels) - given[p.name]})" for p in others)
        lines.append(f"Hints left for the rest of {stage}: {left}. Put a name after --hint.")
    if not kept:
        lines.append(
            f"(This could not be remembered, because {STATE.relative_to(ROOT)} cannot be written.)"
        )
    return "\n".join(lines)


def _whats_left(stage: str, piece: Piece, level: int) -> str:
    left = len(piece.levels) - level
    if left:
        return f"{left} more for this: python -m {stage}.test --hint {piece.name}"
    flags = " or ".join(f"--{group.replace(' ', '-')}" for group in piece.groups)
    return (
        f"That was the last hint for this. python -m {stage}.test {flags} says whether it is right."
    )


def _select(stage: str, pieces: list[Piece], wanted: str, groups: Sequence[str]) -> list[Piece]:
    if groups:
        pieces = [piece for piece in pieces if set(piece.groups) & set(groups)] or pieces
    if not wanted:
        return pieces
    word = wanted.lower()
    for matches in (
        [p for p in pieces if p.name.lower() == word],
        [p for p in pieces if word in (group.lower() for group in p.groups)],
        [p for p in pieces if p.name.lower().startswith(word)],
    ):
        if matches:
            return matches
    names = ", ".join(piece.name for piece in pieces)
    known = ", ".join(dict.fromkeys(group for piece in pieces for group in piece.groups))
    raise HintError(
        f"--hint: {stage} has a piece {names}, or a group of checks {known}; got {wanted!r}"
    )


# What was shown before --------------------------------------------------------------------------------


def _read() -> dict:
    """What was shown, by stage and piece; nothing where the file is missing or damaged: hints then start over."""
    try:
        state = json.loads(STATE.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def _table(state: dict, stage: str) -> dict:
    table = state.get(stage)
    return table if isinstance(table, dict) else {}


def _given(state: dict, stage: str, piece: Piece) -> int:
    level = _table(state, stage).get(piece.name, 0)
    return min(max(level, 0), len(piece.levels)) if isinstance(level, int) else 0


def _write(state: dict) -> bool:
    try:
        write_atomically(STATE, json.dumps(state, indent=1) + "\n")
    except OSError:
        return False
    return True


# The function that an answer belongs to ---------------------------------------------------------------


def function_around(path: str, before: Sequence[str], indent: str) -> str:
    """The name of the function that the line after ``before`` is in, as a piece is named.

    Args:
        path: of a Python or a CUDA file; the ending decides.
        before: the file's lines up to there.
        indent: the spaces before the next line.

    Returns:
        ``Class.method`` in Python, the name alone in CUDA; empty outside of a function.
    """
    if path.endswith(".py"):
        name, width = [], len(indent)
        for line in reversed(before):
            found = re.match(r"(\s*)(?:def|class)\s+(\w+)", line)
            if found and len(found[1]) < width:
                name.insert(0, found[2])
                width = len(found[1])
        return ".".join(name)
    for line in reversed(before):
        # A function begins in the first column. What stands before its name may have brackets of its own.
        plain = re.sub(r"__launch_bounds__\([^)]*\)", "", line)
        found = re.match(r"(?!//|#)[A-Za-z_][^(]*?(\w+)\(", plain)
        if found:
            return found[1]
    return ""
