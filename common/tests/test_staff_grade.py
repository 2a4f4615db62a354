"""Grading submissions: what is taken of them, and what comes out. What is dishonest: test_cheats.py."""

import csv
import json
import shutil
import sys
import zipfile

import pytest

from common.staff import student_edition
from common.staff.grade import course, one, pages
from common.staff.grade.__main__ import main
from common.staff.student_edition import restore

POINTS = {"task1": 2, "task2": 3}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


def test_elsewhere_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert main(["x"]) == 2
    assert "needs Linux; this is darwin" in capsys.readouterr().err


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """Three submissions, graded, and then verified: the folder of the results."""
    folder = tmp_path_factory.mktemp("grade")
    full = folder / "submissions/full"
    student_edition.make(full)
    restore(full, stages=[1])
    notes = full / "task1/notes.txt"
    notes.write_text("import os")
    form = full / "Results.md"
    form.write_text(form.read_text().replace("| - of 2 |", "| 1027 of 53 |"))
    kernel = full / "task2/attention_kernel.cu"
    kernel.write_text(kernel.read_text().replace("\n", "\r\n"))
    with zipfile.ZipFile(folder / "submissions/=one.zip", "w") as archive:
        archive.write(full / "task1/attention.py", "course/task1/attention.py")
        text = kernel.read_text()
        archive.writestr("course/task2/attention_kernel.cu", text.replace("// END SOLUTION", "", 1))
    (folder / "submissions/broken.zip").write_bytes(b"PK nothing")
    with pytest.MonkeyPatch.context() as patch:
        for module in (course, one, pages):
            patch.setattr(module, "POINTS", POINTS)
        arguments = [str(folder / "submissions"), "--out", str(folder / "out"), "--seed", "5"]
        statuses = [main(arguments)]
        patch.setattr(one, "_check", lambda *_: pytest.fail("graded again"))
        statuses.append(main([*arguments, "--verify"]))
    assert statuses == [0, 0]
    return folder / "out"


def test_a_row_for_each_submission(graded):
    with open(graded / "grades.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    by_name = {row["submission"].lstrip("'="): row for row in rows}
    assert set(by_name) == {"full", "one", "broken"}
    assert [by_name["full"][name] for name in (*POINTS, "total")] == ["2", "0", "2"]
    assert by_name["one"]["total"] == "2"
    assert "task2/attention_kernel.cu:" in by_name["one"]["remarks"]
    assert by_name["broken"]["total"] == "0" and "zip" in by_name["broken"]["remarks"]
    assert not any(row["submission"].startswith("=") for row in rows)  # a formula


def test_a_page_for_the_student(graded):
    text = (graded / "full/feedback.md").read_text()
    assert text.startswith("# full: 2 of 5 points\n")
    assert "| task1 | 40 of 40 | 2 of 2 | passed |" in text
    assert "| task2 | - | 0 of 3 | task2 is not written |" in text
    assert "- task1/notes.txt" in text and "--seed 5" in text


def test_what_a_submission_claims_is_beside_what_was_found(graded):
    said = "task1: 1027 points in Results.md, 2 here"
    assert f"- {said}\n" in (graded / "full/feedback.md").read_text()
    assert said in json.loads((graded / "full/record.json").read_text())["claims"]["lines"]
    with open(graded / "grades.csv", newline="") as file:
        remarks = {row["submission"]: row["remarks"] for row in csv.DictReader(file)}
    assert said in remarks["full"] and "Results.md, task1: 1027 of 53 points" in remarks["full"]
    assert "Results.md is missing" in remarks["'=one"]


def test_gradescope_gets_its_form(graded):
    found = json.loads((graded / "full/results.json").read_text())
    assert found["score"] == 2 == sum(test["score"] for test in found["tests"])
    assert [test["max_score"] for test in found["tests"]] == list(POINTS.values())
    assert {test["status"] for test in found["tests"]} <= {"passed", "failed"}


def test_only_what_stands_between_the_marks_is_taken(graded, tmp_path):
    edition = tmp_path / "edition"
    student_edition.make(edition)
    fresh = course.Course(edition, {"task1": ["task1/attention.py"]}, "")
    other = shutil.copytree(edition, tmp_path / "other")
    restore(other, stages=[1])
    solved = (other / "task1/attention.py").read_text()
    forged = solved.replace("class CustomSelfAttention", "import os\n\n\nclass CustomSelfAttention")
    files = {"task1/attention.py": forged.encode(), "common/check/compare.py": b""}
    assert course.fill_in(edition, files, fresh) == ({}, set())
    assert (edition / "task1/attention.py").read_text() == solved
    assert (edition / "common/check/compare.py").stat().st_size > 0


def test_nothing_to_grade(tmp_path, capsys):
    assert main([str(tmp_path / "gone"), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr()
    assert "does not exist" in said.out and "no submission" in said.err
    assert not (tmp_path / "out").exists()
