"""``python -m common.staff.judge.check STUDENT OUT taskN...``: checks of a student's code in another process.

It runs in a student edition without answers, so that nothing of it can pass in place of the student's code. What a
stage's checks find comes to OUT/taskN.json, what they print to OUT/taskN.txt.
"""

import argparse
import importlib
import multiprocessing
import os
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

import torch._dynamo  # noqa: F401  before the forks: PyTorch imports it at a first launch

from common.build import BuildError, using
from common.check import CheckFailed, Suite, script
from common.check.hints import load
from common.record import POINTS, write_json
from common.staff.judge import STAGE_SECONDS, sandbox
from common.staff.judge.remote import BUILD, ForkServer, Worker, standing_in


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
    record = file.with_suffix(".json")
    process = multiprocessing.get_context("fork").Process(
        target=_stage,
        args=(suite, worker, file.with_suffix(".txt"), [*arguments, "--record", str(record)]),
    )
    process.start()
    process.join(STAGE_SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
        write_json(record, {"status": "crashed", "why": f"stopped after {STAGE_SECONDS} s"})
    return process.exitcode or 0


def _stage(suite: Suite, worker: Worker, said: Path, arguments: Sequence[str]) -> None:
    with open(said, "w") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
    with closing(worker):
        for source in (s for s in suite.stage.sources if s.endswith(".cu")):
            for check in (False, True):  # before the checks: a build takes longer than a case may
                with using(check=check), suppress(BuildError, CheckFailed):  # told by the checks
                    worker.ask(BUILD, "build", source)
        sys.exit(script.main(suite, arguments))


if __name__ == "__main__":
    sys.exit(main())
