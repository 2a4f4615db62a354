"""What can be taken away from a student's code, one line at a time. Line numbers never change."""

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from common.regions import Region, split


class Change(NamedTuple):
    """One line of a region without what is asked about.

    ``kind``: "barrier", "guard", "maximum" or "statement". ``text`` is the whole file; ``how`` says what was done.
    """

    kind: str
    line: int  # from 1
    text: str
    how: str


_BARRIER = re.compile(r"(__syncthreads\w*|__syncwarp|cp_async_wait\w*|__threadfence\w*)\s*(<|\()")
_NAME = r"\*?[A-Za-z_]\w*(?:\[[^\]=]*\]|\.\w+|->\w+)*"
_ASSIGNMENT = re.compile(rf"{_NAME}\s*(?:[-+*/|&]|<<|>>)?=(?!=)")
_CALL = re.compile(
    r"(?!return\b|sizeof\b|static_assert\b)[A-Za-z_][\w.:]*(?:\s+template\s+\w+|\s*\.\s*template\s+\w+)?"
    r"(?:\.\w+|->\w+| \w+)*\s*(?:<[^;()]*>)?\s*\("
)
_MAXIMUM = re.compile(r"\b(f?max(imum|f)?|amax)\b\s*\(")
_COMPARES = re.compile(r"[<>]|==|!=|&&")
_CHOICE = re.compile(r"(?<![=!<>])=(?!=)\s*([^=?;{}]*[^=?;{}\s])\s*\?")
_LEAVES = re.compile(r"\s*(return|continue|break)\b")


def cuda_changes(text: str, region: Region) -> Iterator[Change]:
    """The changes of a region of a .cu that stand on one line each."""
    lines, plain = split(text), split(_without_comments(text))
    begins, depth = True, 0  # whether the line begins a statement; brackets that are open before it
    for number in range(region.begin, region.end - 1):  # indices of the lines between the marks
        line, code = lines[number], plain[number].strip()
        if not code:
            continue
        if begins and code[0] not in "#{}":
            for kind, new, how in _of_line(line.rstrip("\n"), code):
                yield Change(kind, number + 1, _with(lines, number, new), how)
        depth += _opened(code)
        begins = depth == 0 and (code[0] == "#" or code[-1] in ";{}):")


def _opened(code: str) -> int:
    """How many brackets a line opens and does not close."""
    return sum(code.count(c) for c in "([") - sum(code.count(c) for c in ")]")


def _of_line(line: str, code: str) -> Iterator[tuple[str, str, str]]:
    """Kind, new line and what was done."""
    indent = line[: len(line) - len(line.lstrip())]
    at = len(indent)
    control = re.match(r"(if|for|while)\s*(?:constexpr\s*)?(?=\()", code)
    end = _closing(code, control.end()) if control else 0
    rest = code[end:].strip()
    if control and not end:
        return
    if control and control[1] == "if" and _COMPARES.search(condition := code[control.end() : end]):
        value = "false" if _LEAVES.match(rest) else "true"
        new = f"{line[: at + control.end()]}({value}){line[at + end :]}"
        yield "guard", new, f"with `{value}` in place of `{condition[1:-1].strip()}`"
    elif (choice := _CHOICE.search(code)) and _COMPARES.search(choice[1]):
        new = f"{line[: at + choice.start(1)]}true{line[at + choice.end(1) :]}"
        yield "guard", new, f"with `true` in place of `{choice[1]}`"
    elif _opened(code) == 0 and rest.endswith(";") and not re.search("[{}]", rest):
        if _BARRIER.match(rest):
            yield "barrier", f"{indent};", "without this line"
        elif _ASSIGNMENT.match(rest):
            kind = "maximum" if _MAXIMUM.search(rest) else "statement"
            yield kind, f"{indent};", "without this line"
        elif _CALL.match(rest):
            yield "statement", f"{indent};", "without this line"


def _closing(code: str, begin: int) -> int:
    """Where the bracket that opens at ``begin`` has closed; 0 if it does not on this line."""
    depth = 0
    for i in range(begin, len(code)):
        depth += (code[i] == "(") - (code[i] == ")")
        if depth == 0:
            return i + 1
    return 0


def python_changes(text: str, region: Region) -> Iterator[Change]:
    """The statements of a region of a .py that can go: what they set has been set before, or belongs to an object."""
    lines = split(text)
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    known: set[str] = set()
    for node in sorted(
        (
            n
            for n in ast.walk(tree)
            if isinstance(n, ast.stmt) and region.begin < n.lineno < region.end
        ),
        key=lambda n: n.lineno,
    ):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = {n.id for t in targets if t for n in ast.walk(t) if isinstance(n, ast.Name)}
        again = isinstance(node, ast.Assign) and (
            names <= known or not any(isinstance(t, (ast.Name, ast.Tuple)) for t in targets)
        )
        known |= names
        line = lines[node.lineno - 1]
        alone = node.end_lineno == node.lineno and line[: node.col_offset].strip() == ""
        alone = alone and not line[node.end_col_offset :].partition("#")[0].strip()
        call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        if alone and (again or call or isinstance(node, ast.AugAssign)):
            kind = "maximum" if _MAXIMUM.search(line) else "statement"
            new = f"{line[: node.col_offset]}pass"
            yield Change(kind, node.lineno, _with(lines, node.lineno - 1, new), "without this line")


def _with(lines: list[str], number: int, new: str) -> str:
    return "".join([*lines[:number], new + "\n", *lines[number + 1 :]])


_SKIPPED = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)


def _without_comments(text: str) -> str:
    """The text with comments, strings and characters as spaces."""
    return _SKIPPED.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
