"""Grade what students handed in: ``python -m common.staff.grade SUBMISSION...``

A submission is a folder, a zip or a git bundle, or a folder of them. Of its files only what stands between the marks
counts: it is put into a fresh student edition, and everything else is listed and ignored. The checks run in one
process and the student's code in another one, in a sandbox where the system has one: it never sees the expected
results, the seeds or the verdict.

OUT/NAME/feedback.md is for the student, OUT/NAME/results.json for Gradescope, OUT/NAME/viva.md (with --viva) for the
talk with the student, OUT/grades.csv and OUT/report.md for the course. A run that was interrupted goes on where it
stopped.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import FrameType

import torch
from rich.console import Console

from common.check.rng import new_seed
from common.staff.grade import run, slurm, submission
from common.staff.grade.course import course
from common.staff.grade.one import Options
from common.staff.judge import sandbox


def main(argv: Sequence[str] | None = None) -> int:
    """Grade all; 0 if every submission could be graded, 1 if not, 2 if nothing was graded."""
    options = _parse(argv)
    if sys.platform != "linux":
        print(f"error: grading needs Linux; this is {sys.platform}", file=sys.stderr)
        return 2
    console = Console(highlight=False, markup=False, soft_wrap=True)
    found = submission.find(options.submissions)
    for sentence in found.others:
        console.print(f"not a submission: {sentence}")
    if not found.submissions:
        print("error: there is no submission to grade", file=sys.stderr)
        return 2
    if options.slurm and (lacks := slurm.missing()):
        print(f"error: {lacks}", file=sys.stderr)
        return 2
    for sentence in sandbox.missing():
        console.print(f"warning: {sentence}")
    how = Options(options.out, options.seed, options.gpu, options.verify, options.viva)
    csv_file = options.csv or options.out / "grades.csv"
    with ExitStack() as stack:
        within = stack.enter_context(slurm.scratch(options.out, console)) if options.slurm else None
        fresh = stack.enter_context(course(console, within))
        way = slurm.grade if options.slurm else run.grade
        # What runs ends before the scratch folders go.
        coming = stack.enter_context(closing(way(found.submissions, fresh, how, options.jobs)))
        results = run.collect(coming, len(found.submissions), options.out, csv_file, console)
    console.print(f"\n{len(results)} graded: {csv_file}")
    return 1 if any(result["failed"] for result in results) else 0


def _terminated(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m common.staff.grade", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "submissions", nargs="+", type=Path, metavar="SUBMISSION",
        help="a folder, a .zip or a git .bundle, or a folder of them",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=Path("grades"), help="where the results go; default: grades"
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="default: OUT/grades.csv")
    parser.add_argument(
        "--jobs", type=int, help="submissions at a time; default: 1, with --slurm all"
    )
    parser.add_argument("--slurm", action="store_true", help="grade in jobs of a Slurm cluster")
    parser.add_argument(
        "--gpu", action="store_true",
        help="also check and time the kernels on this machine's GPU, with --slurm on a GPU of the node",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, help="of the random inputs, the same for all")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare Results.md and the records of each submission with what is found",
    )
    parser.add_argument(
        "--viva", type=int, default=0, metavar="N",
        help="also write N questions about each submission's own code, with answers: OUT/NAME/viva.md",
    )  # fmt: skip
    options = parser.parse_args(argv)
    if options.gpu and not options.slurm and not torch.cuda.is_available():
        parser.error("--gpu: there is no GPU here that PyTorch can use")
    if options.viva < 0:
        parser.error(f"--viva must be 0 (no questions) or more; got {options.viva}")
    if options.jobs is not None and options.jobs < 1:
        parser.error(f"--jobs must be at least 1; got {options.jobs}")
    options.seed = new_seed() if options.seed is None else options.seed
    options.out = options.out.resolve()
    return options


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminated)
    try:
        sys.exit(main())
    except (OSError, slurm.SlurmError) as error:
        print(f"error: {error}; correct that and run it again", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\ninterrupted; run it again to go on", file=sys.stderr)
        sys.exit(130)
