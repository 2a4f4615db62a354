"""``python -m common.staff.viva.probe STUDENT ORDER QUESTIONS``: questions about a student's code, and their answers.

It runs in a student edition without answers, as the judge does, and the student's code runs in the judge's sandbox.
ORDER is a file of JSON: ``number``, ``seed``, ``name``, ``records`` and ``hide``. QUESTIONS gets each
question as a line of JSON, as soon as it is computed.
"""

import argparse
import hashlib
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from common.paths import ROOT
from common.staff.judge.check import marked_functions
from common.staff.judge.remote import standing_in
from common.staff.viva import changes, figures, lab, launches, questions
from common.staff.viva.lab import Lab, Written
from common.staff.viva.questions import Candidate, Question

Compute = Callable[[], Question | None]

LINES = 3  # with bank conflicts, of a kernel
DECODES = (
    ("an H100", 1, 32_768),
    ("an A100", 1, 8_192),
    ("an RTX 4090", 2, 16_384),
    ("an H100", 8, 4_096),
)


def candidates(bench: Lab, written: Sequence[Written], records: Any) -> Iterator[Candidate]:
    """All that may be asked. Every changed file is made here, before the student's process starts."""
    for code in written:
        for kind, compute in _of_function(bench, code):
            yield Candidate(kind, code.stage, code.function, partial(_ask, bench, code, compute))
        if code.function in ("flashattention_kernel", "flash_attention_decode_kernel"):
            for name in figures.measured(records, code.stage):
                ask = partial(figures.about_measurement, records, code, name)
                yield Candidate("measured", code.stage, code.function, ask)
        if code.function == "_fewest_splits":
            for decode in DECODES:
                ask = partial(figures.about_splits, bench, code, *decode)
                yield Candidate("splits", code.stage, code.function, ask)


def _ask(bench: Lab, code: Written, compute: Compute) -> Question | None:
    """What fails without any change is asked first."""
    return questions.about_failure(bench, code) if bench.unchanged(code)[0] else compute()


def _of_function(bench: Lab, code: Written) -> Iterator[tuple[str, Compute]]:
    """Kinds of questions about code that is right, and what computes them."""
    is_cuda = code.file.endswith(".cu")
    if is_cuda or not (ROOT / code.stage / "attention_kernel.cu").exists():
        find = changes.cuda_changes if is_cuda else changes.python_changes
        for change in find(code.text, code.region):
            folder = bench.add(code.file, change.text)
            yield change.kind, partial(questions.about_change, bench, code, change, folder)
    if is_cuda and code.function in launches.CALLS:
        folder = bench.add_counted(code.file, code.text)
        for nth in range(LINES):
            yield "conflicts", partial(launches.about_conflicts, bench, code, folder, nth)
        yield "occupancy", partial(launches.about_occupancy, bench, code, folder)
        if code.function == "flashattention_kernel":
            yield "tiles", partial(launches.about_tiles, bench, code, folder)


def choose(found: Sequence[Candidate], number: int, seed: str) -> Iterator[Question]:
    """Up to ``number`` questions: of each kind and stage as few as possible, in an order that the seed decides.

    At most three times as many candidates are tried, and ten more, which bounds what a submission costs.
    """
    left = list(found)
    random.Random(hashlib.sha256(seed.encode()).digest()).shuffle(left)
    kinds: Counter[str] = Counter()
    stages: Counter[str] = Counter()
    asked: set[tuple[str, object]] = set()
    tries = 3 * number + 10
    while left and tries and kinds.total() < number:
        candidate = min(left, key=lambda c: (kinds[c.kind], stages[c.stage]))
        left.remove(candidate)
        tries -= 1
        question = candidate.compute()
        if question is None:
            continue
        if question.kind == "failure":
            left = [
                c for c in left if (c.stage, c.function) != (candidate.stage, candidate.function)
            ]
        keys = {("fact", question.fact), ("line", (question.file, question.line, question.kind))}
        if keys & asked:
            continue
        asked |= keys
        kinds[question.kind] += 1
        stages[candidate.stage] += 1
        yield question


def main(argv: Sequence[str] | None = None) -> int:
    """Write the questions."""
    parser = argparse.ArgumentParser(prog="python -m common.staff.viva.probe")
    parser.add_argument("student", type=Path, help="a student edition with what the student wrote")
    parser.add_argument("order", type=Path, help="JSON: number, seed, name, records, hide")
    parser.add_argument("questions", type=Path, help="the file that they are written to")
    options = parser.parse_args(argv)
    order = json.loads(options.order.read_text(encoding="utf-8"))
    student = options.student.resolve()
    hide = [Path(path).resolve() for path in order["hide"]]
    with closing(Lab(student, hide, order["seed"])) as bench:
        found = list(candidates(bench, lab.written(student), order["records"]))
        with standing_in(bench, marked_functions()):
            for question in choose(found, order["number"], f"{order['name']} {order['seed']}"):
                with options.questions.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(question)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
