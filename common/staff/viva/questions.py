"""What the checks report of a student's code without one of its lines."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from common.check.case import CHECK_SETTINGS
from common.staff.viva.changes import Change
from common.staff.viva.lab import FOUND, Lab, Written


@dataclass(frozen=True)
class Question:
    """A question about a line, and its answer in Markdown.

    ``fact`` is what the answer rests on: of two questions with the same fact one is enough.
    """

    kind: str
    stage: str
    file: str
    line: int
    question: str
    answer: str
    fact: str


@dataclass(frozen=True)
class Candidate:
    """Something that may be asked of a function; ``compute`` gives the question, or None if there is nothing to ask."""

    kind: str
    stage: str
    function: str
    compute: Callable[[], Question | None]


_ASK = {
    "barrier": "Why is this there? What goes wrong without it?",
    "guard": "What is this condition for? Which input shows it, and how?",
    "maximum": "What is this maximum for? Which check fails first without the line, and why?",
    "statement": "What does this line do? Which check fails first without it, and why?",
}


def about_change(lab: Lab, code: Written, change: Change, folder: str) -> Question | None:
    """What the checks of the function report with this change; None if it does not compile, or goes unnoticed.

    A barrier that can go unnoticed is worth a question, too.
    """
    with lab.changed(folder, code.file):
        category, text = lab.failure(code)
    if category in FOUND:
        answer = f"{change.how[0].upper()}{change.how[1:]} this fails:\n\n{_quoted(text)}"
        lines = _named_lines(code, text, change.line)
        fact = _fact(text)
        return _question(change.kind, code, change.line, _ASK[change.kind], answer + lines, fact)
    if category or change.kind != "barrier":
        return None
    count = f"{len(lab.items(code))} small cases, each in {len(CHECK_SETTINGS)} orders of threads"
    answer = f"Nothing is reported without it by the check build ({count}). Is it needed?"
    return _question(
        change.kind, code, change.line, _ASK[change.kind], answer, f"{code.line_text(change.line)}"
    )


def about_failure(lab: Lab, code: Written) -> Question | None:
    """What the checks report of the code as it is, if that names a line of the region."""
    category, text = lab.unchanged(code)
    if category not in (*FOUND, "build"):
        return None
    named = (int(n) for n in re.findall(rf"{re.escape(code.file)}:(\d+)", text))
    line = next((n for n in named if code.region.begin < n < code.region.end), None)
    if line is None:
        return None
    what = "The compiler refuses this" if category == "build" else "This fails"
    ask = f"{what}. What is wrong, and how do you repair it?"
    return _question(
        "failure", code, line, ask, _quoted(text) + _named_lines(code, text, line), _fact(text)
    )


def _question(kind: str, code: Written, line: int, ask: str, answer: str, fact: str) -> Question:
    return Question(kind, code.stage, code.file, line, ask, answer, fact)


def _quoted(text: str) -> str:
    """A text as a block of code, at most 25 lines of it."""
    lines = [line[:300] for line in text.splitlines()]
    lines[25:] = ["..."] if lines[25:] else []
    return "\n".join(f"    {line}" for line in lines)


def _named_lines(code: Written, text: str, but: int) -> str:
    """The lines of the file that a text names, where something happens in them."""
    happens = re.sub(r"launched at \S+", "", text)
    named = {int(n) for n in re.findall(rf"{re.escape(code.file)}:(\d+)", happens)} - {but}
    shown = [f"    {n:4}  {code.line_text(n)}" for n in sorted(named)[:6] if code.line_text(n)]
    return "\n\nThe lines that it names:\n\n" + "\n".join(shown) if shown else ""


def _fact(text: str) -> str:
    """What is the same for two failures that teach the same: their words without numbers."""
    return re.sub(r"\d+", "", text.partition("\n")[0] + "".join(text.splitlines()[2:3]))
