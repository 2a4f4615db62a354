"""``python -m common.staff.judge.check STUDENT OUT taskN...``: checks of a student's code in another process.

It runs in a student edition without answers, so that nothing of it can pass in place of the student's code. What a
stage's checks find comes to OUT/taskN.json, what they print to OUT/taskN.txt.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import torch._dynamo  # noqa: F401  before the forks: PyTorch imports it at a first launch

from common.build import BuildError, using
from common.check import CheckFailed, Suite, script
from common.check.hints import load
from common.record import POINTS
from common.staff.judge import sandbox
from common.staff.judge.remote import BUILD, ForkServer, Worker, standing_in
from common.staff.judge.run import in_a_process


def marked_functions() -> list[tuple[str, str]]:
    """The functions in Python files that a student writes: module and name."""
    pieces = (piece for stage in POINTS for piece in load(stage))
    return [
        (piece.file.removesuffix(".py").replace("/", "."), piece.name)
        for piece in pieces
        if piece.file.endswith(".py")
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks of each stage in a process of its own; 0 if all stages have passed."""
    parser = argparse.ArgumentParser(
        prog="python -m common.staff.judge.check",
        description=__doc__.splitlines()[0],
        epilog="Other options are those of python -m taskN.test.",
    )
    parser.add_argument("student", type=Path, help="a student edition with what the student wrote")
    parser.add_argument("out", type=Path, help="a folder for what is found")
    parser.add_argument("stages", nargs="+", choices=list(POINTS), metavar="taskN")
    parser.add_argument(
        "--hide",
        type=Path,
        nargs="*",
        default=[],
        help="folders that the student's code must not see",
    )
    options, rest = parser.parse_known_args(argv)
    command = sandbox.command(options.student.resolve(), [path.resolve() for path in options.hide])
    server = ForkServer(options.student, command)
    worker = Worker(server)
    with closing(server), standing_in(worker, marked_functions()):
        suites = {s: importlib.import_module(f"{s}.test").suite for s in options.stages}
        return max(_run(suites[s], worker, server, options.out / s, rest) for s in suites)


def _run(
    suite: Suite, worker: Worker, server: ForkServer, file: Path, arguments: Sequence[str]
) -> int:
    with suppress(CheckFailed):  # told by the checks
        server.ready()
    record = ["--record", str(file.with_suffix(".json"))]
    return in_a_process(partial(_stage, suite, worker, [*arguments, *record]), file)


def _stage(suite: Suite, worker: Worker, arguments: Sequence[str]) -> int:
    with closing(worker):
        for source in (s for s in suite.stage.sources if s.endswith(".cu")):
            for check in (False, True):  # before the checks: a build takes longer than a case may
                with using(check=check), suppress(BuildError, CheckFailed):  # told by the checks
                    worker.ask(BUILD, "build", source)
        return script.main(suite, arguments)


if __name__ == "__main__":
    sys.exit(main())
