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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from contextlib import ExitStack, closing
from pathlib import Path
from types import FrameType

import torch
from rich.console import Console

from common import child
from common.build import toolchain
from common.check.progress import progress
from common.check.rng import new_seed
from common.marked import write_atomically
from common.record import POINTS
from common.staff.grade import chart, one, report, slurm, submission
from common.staff.grade.course import Course, course
from common.staff.grade.one import Options
from common.staff.grade.pages import Result, table
from common.staff.grade.submission import Submission
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
    results: dict[str, Result] = {}
    csv_file = options.csv or options.out / "grades.csv"
    with ExitStack() as stack:
        within = stack.enter_context(slurm.scratch(options.out, console)) if options.slurm else None
        fresh = stack.enter_context(course(console, within))
        bar = stack.enter_context(progress(console))
        task = bar.add_task("submissions", total=len(found.submissions))
        way = slurm.grade if options.slurm else _grade
        coming = way(found.submissions, fresh, how, options.jobs)
        for result in stack.enter_context(closing(coming)):  # ends all that runs before the rest
            results[result["name"]] = result
            write_atomically(csv_file, table(list(results.values())))
            bar.advance(task)
            console.print(_line(result))
            if "viva" in result:
                console.print(result["viva"])
    _write_report(list(results.values()), options.out, console)
    console.print(f"\n{len(results)} graded: {csv_file}")
    return 1 if any(r["failed"] for r in results.values()) else 0


def _grade(
    submissions: Sequence[Submission], fresh: Course, how: Options, jobs: int | None
) -> Iterator[Result]:
    """The results as they come, on this machine."""
    with ThreadPoolExecutor(jobs or 1) as pool:
        futures = [pool.submit(one.graded, entry, fresh, how) for entry in submissions]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            while wait(futures, timeout=0.2).not_done:
                child.end_all()
            raise


def _line(result: Result) -> str:
    """What is printed of a submission."""
    notes = f"; {result['remarks'][0]}" if result["remarks"] else ""
    if wrong := result.get("claims", {}).get("lines"):
        notes += f"; {len(wrong)} of its claims do not fit"
    return f"{result['name']}: {result['total']:g} of {sum(POINTS.values())}{notes}"


def _terminated(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _write_report(results: Sequence[Result], out: Path, console: Console) -> None:
    """OUT/report.md, and OUT/report.png where matplotlib is installed and something was graded."""
    picture = out / "report.png"
    picture.unlink(missing_ok=True)
    if report.graded(results):
        try:
            chart.draw(results, picture)
        except ModuleNotFoundError as error:
            console.print(chart.MISSING if error.name == "matplotlib" else str(error))
    name = picture.name if picture.exists() else ""
    write_atomically(out / "report.md", report.report(results, picture=name))


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
    no_gpu = toolchain.find_gpu() is None or not torch.cuda.is_available()
    if options.gpu and not options.slurm and no_gpu:
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
