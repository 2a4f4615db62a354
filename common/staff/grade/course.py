"""The student edition without answers, and a submission's answers put into it."""

import hashlib
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from common import child, regions
from common.check.hints import answers
from common.paths import ROOT
from common.record import POINTS
from common.staff import student_edition
from common.staff.grade import source
from common.staff.judge import STAGE_SECONDS


@dataclass(frozen=True)
class Course:
    """What every submission is graded with.

    Attributes:
        edition: a student edition without answers, with the judge and the viva in it, and built.
        files: the files with something to write, by stage.
        version: a hash of the edition.
    """

    edition: Path
    files: dict[str, list[str]]
    version: str


@contextmanager
def course(console: Console, within: Path | None = None) -> Iterator[Course]:
    """A fresh edition in a scratch folder, which is made ``within`` a folder or with the system's temporary ones."""
    with tempfile.TemporaryDirectory(prefix="grade-", dir=within) as scratch:
        edition = Path(scratch).resolve() / "edition"
        student_edition.make(edition)
        judge = Path("common/staff/judge")
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / judge, edition / judge, ignore=ignore)
        tree = sorted(path for path in edition.rglob("*") if path.is_file())
        version = hashlib.sha256()
        for path in tree:
            version.update(f"{path.relative_to(edition)}\0".encode() + path.read_bytes())
        shutil.copytree(ROOT / "common/staff/viva", edition / "common/staff/viva", ignore=ignore)
        files = {stage: answers(stage) for stage in POINTS}
        for stage in (s for s, f in files.items() if any(name.endswith(".cu") for name in f)):
            console.print(f"building {stage} of the edition")
            # What all submissions share is then built once. Nothing is written in it, so the checks fail.
            command = [sys.executable, "-m", f"{stage}.test", "--device", "cpu", "--both"]
            child.run([*command, "--case", "one"], STAGE_SECONDS, lambda line: None, cwd=edition)
        yield Course(edition, files, version.hexdigest())


def fill_in(
    student: Path, files: Mapping[str, bytes], course: Course
) -> tuple[dict[str, str], set[str]]:
    """Put the marked regions of these files into an edition.

    Returns:
        By stage why a file of it cannot be taken; and the stages in which nothing was written.
    """
    reasons: dict[str, str] = {}
    untouched: set[str] = set()
    for stage, names in course.files.items():
        touched = not names
        for name in names:
            given = regions.regions((student / name).read_text(encoding="utf-8"), name)
            try:
                if name not in files:
                    raise regions.MarkError(f"{name} is missing")
                text = regions.decode(files[name], name).replace("\r\n", "\n")
                theirs = regions.regions(text, name)
                own = {r.function: r.lines for r in theirs}
            except regions.MarkError as error:
                reasons[stage] = str(error)
                continue
            filled = [region._replace(lines=own[region.function]) for region in given]
            touched = touched or filled != given
            if why := source.refused(name, regions.join(filled), theirs):
                reasons[stage] = why
                continue
            (student / name).write_text(regions.join(filled), encoding="utf-8")
        if not touched and stage not in reasons:
            untouched.add(stage)
    return reasons, untouched
