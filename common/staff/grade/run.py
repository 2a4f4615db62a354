"""Grading all submissions: in threads of this machine, and what is printed and written while results come."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from pathlib import Path

from rich.console import Console

from common import child
from common.check.progress import progress
from common.marked import write_atomically
from common.record import POINTS
from common.staff.grade import chart, one, report
from common.staff.grade.course import Course
from common.staff.grade.one import Options
from common.staff.grade.pages import Result, table
from common.staff.grade.submission import Submission


def grade(
    submissions: Sequence[Submission], course: Course, options: Options, jobs: int | None
) -> Iterator[Result]:
    """The results as they come, on this machine."""
    with ThreadPoolExecutor(jobs or 1) as pool:
        futures = [pool.submit(one.graded, entry, course, options) for entry in submissions]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            while wait(futures, timeout=0.2).not_done:
                child.end_all()
            raise


def collect(
    coming: Iterator[Result], number: int, out: Path, csv_file: Path, console: Console
) -> list[Result]:
    """Print each result and keep the table up to date; at the end write the report for the class.

    Args:
        coming: results, as they come.
        number: how many there will be.
        out: the folder of the results.
        csv_file: the table.
        console: where they are printed.
    """
    results: list[Result] = []
    with progress(console) as bar:
        task = bar.add_task("submissions", total=number)
        for result in coming:
            results.append(result)
            write_atomically(csv_file, table(results))
            bar.advance(task)
            console.print(_line(result))
            if "viva" in result:
                console.print(result["viva"])
    _write_report(results, out, console)
    return results


def _line(result: Result) -> str:
    """What is printed of a submission."""
    notes = f"; {result['remarks'][0]}" if result["remarks"] else ""
    if wrong := result.get("claims", {}).get("lines"):
        notes += f"; {len(wrong)} of its claims do not fit"
    return f"{result['name']}: {result['total']:g} of {sum(POINTS.values())}{notes}"


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
