"""Dishonest submissions gain nothing, and honest ones lose nothing: common/staff/cheats/*.toml.

Each is tried by the look at its text and by the one check that shows it. ``python -m common.staff.cheat`` grades them
as whole submissions.
"""

import csv
import importlib
import shutil
import sys
import zipfile
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from common import regions
from common.build import BuildError, KernelError, Kernels, builder, planner
from common.build.call import caller_target
from common.check.failure import failure_of
from common.check.hints import answers
from common.paths import ROOT
from common.staff import cheat, mutate, student_edition
from common.staff.grade import __main__ as command
from common.staff.grade import course, one, source
from common.staff.grade.submission import find
from common.staff.judge import sandbox
from common.staff.judge.check import marked_functions
from common.staff.judge.remote import ForkServer, Worker, standing_in

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

CHEATS = {c.name: c for c in cheat.load() if not c.honest and c.device != "gpu"}
RUN = "the checks ended"  # of a stage that would be run
HONEST = {c.name: c for c in cheat.load() if c.honest}


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """What a submission is graded with; the course's own kernels are built."""
    folder = tmp_path_factory.mktemp("cheats") / "edition"
    student_edition.make(folder)
    judge = Path("common/staff/judge")
    shutil.copytree(ROOT / judge, folder / judge, ignore=shutil.ignore_patterns("__pycache__"))
    builds = []
    for stage in ("task2", "task4", "task5"):
        kernels = Kernels(str(ROOT / stage / "attention.py"), "attention_kernel.cu")
        builds += [
            planner.plan(kernels.source, "cpu"),
            *map(caller_target, kernels._exports.values()),
        ]
    builder.make(builds)
    # Not all that is there: a sandbox's disk is small.
    built = folder / planner.BUILD.relative_to(ROOT)
    built.mkdir()
    for target in {*builds, *(need for build in builds for need in build.needs)}:
        for path in filter(Path.exists, (target.path, target.log)):
            shutil.copy(path, built)
    return course.Course(folder, {f"task{n}": answers(f"task{n}") for n in range(1, 8)}, "")


@pytest.fixture
def student(fresh, tmp_path):
    """A function that makes an edition with a submission in it; why its text is refused, by stage."""

    def make(entry, *, look=True):
        handed = tmp_path / "handed in"
        cheat.write(entry, handed, fresh)
        edition = shutil.copytree(fresh.edition, tmp_path / "edition")
        files = {n: (handed / n).read_bytes() for names in fresh.files.values() for n in names}
        with pytest.MonkeyPatch.context() as patch:
            if not look:
                patch.setattr(source, "refused", lambda *_: None)
            return edition, course.fill_in(edition, files, fresh)[0]

    return make


def first_look(edition, entry):
    """The text of the failure of the check that shows it; "" if it passes."""
    with (
        closing(ForkServer(edition, sandbox.command(edition))) as server,
        closing(Worker(server)) as worker,
        standing_in(worker, marked_functions()),
        pytest.MonkeyPatch.context() as patch,
    ):
        # Imported anew: a test that imports a function by its name keeps what stood in for it.
        patch.delitem(sys.modules, f"{entry.stage}.test", raising=False)
        items = importlib.import_module(f"{entry.stage}.test").suite.items(["cpu"])
        item = next(item for item in items if not entry.item or item.id == entry.item)
        patch.delitem(sys.modules, f"{entry.stage}.test")
        try:
            item.run(1)
        except (AssertionError, KernelError, BuildError, ValueError) as error:
            return failure_of(error, item, 1, rerun=False).text
    return ""


@pytest.mark.parametrize("name", [n for n in CHEATS if CHEATS[n].codes])
def test_a_cheat_gains_nothing(student, name):
    entry = CHEATS[name]
    edition, reasons = student(entry)
    if entry.stage in reasons:
        assert entry.reason in reasons[entry.stage]
        assert reasons[entry.stage].startswith(next(iter(entry.codes)).partition(": ")[0])
        if not entry.judge:
            return
        shutil.rmtree(edition)
        edition, _ = student(entry, look=False)
    said = first_look(edition, entry)
    assert (entry.judge or entry.reason) in said, said


@pytest.mark.parametrize("name", [n for n in HONEST if HONEST[n].codes])
def test_an_honest_answer_passes(student, name):
    edition, reasons = student(HONEST[name])
    assert HONEST[name].stage not in reasons
    assert first_look(edition, HONEST[name]) == ""


def test_no_solution_and_no_mutant_is_refused_by_its_text(fresh):
    files = [name for names in fresh.files.values() for name in names]
    texts = [(name, (ROOT / name).read_text()) for name in files]
    texts += [
        (m.file, m.applied((ROOT / m.file).read_text())) for m in mutate.load() if m.file in files
    ]
    for file, text in texts:
        if "__dict__" not in text:  # two mutants keep their mask there
            assert source.refused(file, text, regions.regions(text, file)) is None


@pytest.fixture
def grade(fresh, tmp_path, monkeypatch):
    """A function that grades submissions, whose checks are not run."""

    @contextmanager
    def prepared(*_):
        yield fresh

    def run(*paths):
        monkeypatch.setattr(command, "course", prepared)
        monkeypatch.setattr(one, "child", SimpleNamespace(run=lambda *_, **__: 1))
        status = command.main([*map(str, paths), "--out", str(tmp_path / "out")])
        with open(tmp_path / "out/grades.csv", newline="") as file:
            rows = {row["submission"]: row for row in csv.DictReader(file)}
        pages_ = {name: (tmp_path / "out" / name / "feedback.md").read_text() for name in rows}
        return status, rows, pages_

    return run


@pytest.mark.parametrize("name", [n for n in CHEATS if CHEATS[n].files])
def test_other_files_are_not_taken(fresh, grade, tmp_path, name):
    cheat.write(CHEATS[name], tmp_path / "one", fresh)
    status, rows, page = grade(tmp_path / "one")
    assert status == 0 and rows["one"]["total"] == "0"
    assert CHEATS[name].reason in page["one"] and RUN not in page["one"]


def test_bad_input_has_its_line_and_the_run_goes_on(fresh, grade, tmp_path):
    forward, kernel = "task1/attention.py", "task2/attention_kernel.cu"
    whole = cheat.Cheat("whole", "", solved=range(1, 7))

    def broken(name, file, change):
        cheat.write(whole, tmp_path / "in" / name, fresh)
        path = tmp_path / "in" / name / file
        path.write_bytes(change(path.read_bytes()))
        return path

    line = (ROOT / forward).read_text().splitlines().index(
        "        P = torch.softmax(S, dim=-1)"
    ) + 1
    begin = b"        # BEGIN SOLUTION\n"
    broken("syntax", forward, lambda data: data.replace(b"P = torch", b"P = = torch"))
    broken(
        "moved", forward, lambda data: b"# mine\n" * 9 + data.replace(b"P = torch", b"P = = torch")
    )
    broken(
        "latin",
        forward,
        lambda data: data.replace(b"P = torch", b"P = 1 # \xe9\n        P = torch"),
    )
    broken(
        "large",
        kernel,
        lambda data: data.replace(
            b"  float sum = 0.0f;", b" " * (5 << 20) + b"  float sum = 0.0f;", 1
        ),
    )
    broken("deleted", forward, lambda data: data.replace(begin, b""))
    broken("doubled", forward, lambda data: data.replace(begin, begin * 2))
    broken(
        "nested",
        kernel,
        lambda data: data.replace(b"  float m = -I", b"  // BEGIN SOLUTION\n  float m = -I"),
    )
    broken("open", kernel, lambda data: data.replace(b"  float m = -I", b"  /* float m = -I"))
    broken("nul", forward, lambda data: data.replace(b"P = torch", b"P = \0torch"))
    broken(
        "deep", forward, lambda data: data.replace(b"P = torch", b"P = " + b"(" * 9999 + b"torch")
    )
    broken("gone", forward, lambda data: b"").unlink()
    (tmp_path / "in/text.zip").write_text("not a zip")
    with zipfile.ZipFile(tmp_path / "in/bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(forward, bytes(60 << 20))
    with zipfile.ZipFile(tmp_path / "in/escapes.zip", "w") as archive:
        archive.writestr("../task1/attention.py", "")
        archive.writestr("task1/x.py", "")
    (tmp_path / "in/linked/task1").mkdir(parents=True)
    (tmp_path / "in/linked" / forward).symlink_to("/etc/passwd")
    cheat.write(whole, tmp_path / "in/whole", fresh)
    (tmp_path / "in/whole/Results.md").write_text(
        "<!-- grade: stages -->\n| task1 | nan of -1 | 1e999 |\n" * 3
    )

    status, rows, page = grade(tmp_path / "in")
    assert status == 0 and {row["total"] for row in rows.values()} == {"0"}
    for name, reason in {
        "syntax": f"{forward}:{line}: SyntaxError: invalid syntax",
        "moved": f"{forward}:{line + 9}: SyntaxError: invalid syntax",
        "latin": f"{forward}:{line}: byte",
        "large": f"{kernel}: its answers have 5,",
        "deleted": f"{forward}:{line + 4}: END SOLUTION without BEGIN SOLUTION",
        "doubled": "BEGIN SOLUTION inside BEGIN SOLUTION",
        "nested": "BEGIN SOLUTION inside BEGIN SOLUTION",
        "open": f"{kernel}:",
        "nul": f"{forward}:",
        "deep": f"{forward}:{line}: SyntaxError: too many nested parentheses",
        "gone": f"{forward} is missing",
        "text": "it is damaged or not a zip",
        "bomb": f"{forward} is not taken: 62,914,560 bytes",
        "escapes": "../task1/attention.py is not used: it leads out of the submission",
        "linked": f"{forward} is missing: it is a symbolic link",
    }.items():
        assert reason in rows[name]["remarks"], name
        assert reason in page[name], name
        others = page[name].count(RUN)
        assert others == (6 if name not in ("text", "bomb", "escapes", "linked") else 0), name
    assert rows["whole"]["remarks"] == "" and page["whole"].count(RUN) == 7


def test_the_class_that_is_made_can_be_read(fresh, tmp_path):
    entries = [*CHEATS.values()][:5]
    number = cheat.make(entries, fresh, tmp_path / "class")
    found = find([tmp_path / "class"])
    assert len(found.submissions) == number == len(entries) + 12 and not found.others
    assert {one.path.suffix for one in found.submissions} == {"", ".zip"}


def test_the_table_is_of_these_cheats():
    lines = cheat.TABLE.read_text().splitlines()
    rows = [line.split(" | ")[0].removeprefix("| ") for line in lines if line.startswith("| ")]
    names = [entry.name for entry in cheat.load()]
    assert sorted(row for row in rows if row not in ("submission", "---")) == sorted(names)
    assert len(CHEATS) >= 25 and not any("it may have" in line for line in lines)
