"""``python -m common.staff.judge.check STUDENT taskN``: a stage's checks on a student's code in another process.

It runs in a student edition without answers, so that nothing of it can pass in place of the student's code.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

from common.build import BuildError, using
from common.check import CheckFailed, script
from common.check.hints import load
from common.record import POINTS
from common.staff.judge import sandbox
from common.staff.judge.remote import BUILD, Worker, standing_in


def marked_functions() -> list[tuple[str, str]]:
    """The functions in Python files that a student writes: module and name."""
    pieces = (piece for stage in POINTS for piece in load(stage))
    return [
        (piece.file.removesuffix(".py").replace("/", "."), piece.name)
        for piece in pieces
        if piece.file.endswith(".py")
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks; the status that ``python -m taskN.test`` would have."""
    parser = argparse.ArgumentParser(
        prog="python -m common.staff.judge.check",
        description=__doc__.splitlines()[0],
        epilog="Other options are those of python -m taskN.test.",
    )
    parser.add_argument("student", type=Path, help="a student edition with what the student wrote")
    parser.add_argument("stage", choices=list(POINTS))
    parser.add_argument(
        "--hide",
        type=Path,
        nargs="*",
        default=[],
        help="folders that the student's code must not see",
    )
    options, rest = parser.parse_known_args(argv)
    command = sandbox.command(options.student.resolve(), [path.resolve() for path in options.hide])
    with (
        closing(Worker(options.student, command)) as worker,
        standing_in(worker, marked_functions()),
    ):
        suite = importlib.import_module(f"{options.stage}.test").suite
        for source in (s for s in suite.stage.sources if s.endswith(".cu")):
            for check in (False, True):  # before the checks: a build takes longer than a case may
                with using(check=check), suppress(BuildError, CheckFailed):  # told by the checks
                    worker.ask(BUILD, "build", source)
        return script.main(suite, rest)


if __name__ == "__main__":
    sys.exit(main())
