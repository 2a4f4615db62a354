"""What submissions claim in Results.md and in their records, beside what grading found."""

import copy
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.check.hints import answers
from common.record import POINTS, edited, render
from common.record.provenance import content_hash, hashes
from common.staff import student_edition
from common.staff.grade import claims
from common.staff.grade.claims import NOT_MEASURED, compare_times
from common.staff.grade.course import Course
from common.staff.grade.pages import feedback, table
from common.staff.grade.submission import Submission
from common.tests.test_verify import a_record, put, seal

CPU, CUDA = "common/records/cpu.json", "common/records/cuda.json"


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Course:
    edition = tmp_path_factory.mktemp("course") / "edition"
    student_edition.make(edition)
    return Course(edition, {stage: answers(stage) for stage in POINTS}, "")


@pytest.fixture(scope="module")
def graded(course: Course, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An edition whose first task is solved, after ``python -m common.grade --stage 1 2``."""
    folder = tmp_path_factory.mktemp("graded") / "submission"
    shutil.copytree(course.edition, folder)
    student_edition.restore(folder, stages=[1])
    command = [sys.executable, "-m", "common.grade", "--device", "cpu", "--stage", "1"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture
def handed_in(graded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(graded, tmp_path / "one"))


def result_of(folder: Path, **changed: Any) -> dict[str, Any]:
    """What grading would find if the student's own records on the CPU were right."""
    stages = {s: {"earned": 0, "points": p, "groups": [], "status": "not run", "reason": "", "output": []} for s, p in POINTS.items()}  # fmt: skip
    entry = json.loads((folder / CPU).read_text())["stages"]["task1"]
    stages["task1"] |= {key: entry[key] for key in ("earned", "groups", "status")} | changed
    return {"name": "one", "seed": 1, "total": 2, "stages": stages, "remarks": [], "ignored": []}


def lines_of(folder: Path, course: Course, result: dict[str, Any] | None = None) -> list[str]:
    found = claims.verify(Submission("one", folder), result or result_of(folder), course)
    assert all(line.isprintable() and len(line) <= 203 for line in found["lines"])
    return found["lines"]


def edit(folder: Path, change: Any, stage: str = "task1") -> None:
    """Change a stage's record as a determined student would, with Results.md to match."""
    content = json.loads((folder / CPU).read_text())
    change(content["stages"][stage])
    content["stages"][stage] = seal(content["stages"][stage])
    (folder / CPU).write_text(json.dumps(content))
    form = folder / "Results.md"
    form.write_text(render(form.read_text(), {"cpu": content}, folder))


def test_an_honest_submission_fits(handed_in: Path, course: Course) -> None:
    assert lines_of(handed_in, course) == []
    result = result_of(handed_in) | {"claims": {"lines": [], "times": ""}}
    assert "- It fits what was found." in feedback(result)
    kernel = handed_in / "task2/attention_kernel.cu"
    kernel.write_text(kernel.read_text() + "// later\n")  # of a task that was not graded
    assert lines_of(handed_in, course) == []


def test_without_records_the_form_alone_is_looked_at(handed_in: Path, course: Course) -> None:
    result = result_of(handed_in)
    shutil.rmtree(handed_in / "common/records")
    assert lines_of(handed_in, course, result) == []
    result["stages"]["task1"]["earned"] = 1
    assert lines_of(handed_in, course, result) == ["task1: 2 points in Results.md, 1 here"]
    (handed_in / "Results.md").unlink()
    assert lines_of(handed_in, course, result) == ["Results.md is missing"]


def test_claimed_points_stand_beside_those_found(handed_in: Path, course: Course) -> None:
    found = lines_of(handed_in, course, result_of(handed_in, earned=1))
    assert found == ["task1: 2 points in Results.md, 2 points by its records, 1 here"]
    groups = copy.deepcopy(result_of(handed_in)["stages"]["task1"]["groups"])
    groups[0]["passed"] = 3
    total = sum(group["total"] for group in groups)
    passed = sum(group["passed"] for group in groups)
    said = f"task1: {total} of {total} checks by its record on the CPU, {passed} of {total} here"
    assert lines_of(handed_in, course, result_of(handed_in, groups=groups)) == [said]


def test_a_form_that_was_edited(handed_in: Path, course: Course) -> None:
    form = handed_in / "Results.md"
    form.write_text(
        form.read_text().replace("2 of 2 |", "1027 of 53 |").replace("**2 of 20**", "**47 of 20**")
    )
    found = lines_of(handed_in, course)
    assert "Results.md was edited between its markers" in found
    assert "Results.md, task1: 1027 of 53 points" in found
    assert "Results.md, task1: '1027 of 53' points; it is worth 2" in found
    assert "Results.md, total: 47 of 20 points" in found
    assert "task1: 1027 points in Results.md, 2 points by its records, 2 here" in found
    assert any(
        "'| task1 | 40 of 40 | not run | 1027 of 53 |'; its records do not" in s for s in found
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("| not run |", "| 5 of 3 |"),
        ("2 of 2 |", "many of 2 |"),
        ("2 of 2 |", "-2 of 2 |"),
        ("2 of 2 |", "1e308 of 2 |"),
        ("2 of 2 |", "\u0663 of 2 |"),
        ("2 of 2 |", f"{'9' * 5000} of 2 |"),
        ("| task3 |", "| task33 |"),
        ("<!-- grade: stages -->", "<!-- grade: stage -->"),
        ("<!-- end: stages -->", ""),
        ("<!-- grade: stages -->", "<!-- grade:" * 20_000),  # markers are looked for in linear time
        ("<!-- grade: stages -->", "<!-- grade:" + " " * 200_000),
        ("Not run yet.", "\x1b[2J \x00 \u202e"),
        ("# Results", "\ufeff# Results"),
    ],
    ids=range(13),
)
def test_absurd_forms_have_a_line_and_no_error(
    handed_in: Path, course: Course, old: str, new: str
) -> None:
    form = handed_in / "Results.md"
    assert old in form.read_text()
    form.write_text(form.read_text().replace(old, new), encoding="utf-8")
    assert bool(lines_of(handed_in, course)) == (old != "# Results")  # that is the student's text


def test_a_form_of_any_bytes_is_read(handed_in: Path, course: Course) -> None:
    for data in (b"", b"\xff\xfe\x00", b"|" * 200_000, bytes(claims.LARGEST + 1)):
        (handed_in / "Results.md").write_bytes(data)
        assert lines_of(handed_in, course)


def test_records_that_no_run_has_written(handed_in: Path, course: Course) -> None:
    file = handed_in / CPU
    whole, result = file.read_text(), result_of(handed_in)
    file.write_text(whole.replace('"seconds": ', '"seconds": 1', 1))
    assert lines_of(handed_in, course)[0] == f"{CPU}, task1: it was edited after it was written"
    for text in ("{", "[" * 50_000, "[]", '{"stages": {"task1": 3}, "device": "cpu"}', "NaN"):
        file.write_text(text)
        found = lines_of(handed_in, course, result)
        assert found and found[0].startswith(CPU), text


def test_an_edit_with_a_new_digest_shows_where_it_does_not_follow(
    handed_in: Path, course: Course
) -> None:
    edit(handed_in, put("groups.0.passed", 1027))
    found = lines_of(handed_in, course)
    assert any("1027 of" in line and line.startswith(CPU) for line in found)
    assert not any("its records do not" in line for line in found)


def test_an_edit_that_follows_is_found_by_the_run(handed_in: Path, course: Course) -> None:
    result = result_of(handed_in, earned=0, status="failed")
    assert "task1: 2 points in Results.md, 2 points by its records, 0 here" in lines_of(
        handed_in, course, result
    )


def test_edited_tests_and_common_are_known_by_their_hash(handed_in: Path, course: Course) -> None:
    """What was graded with them says so, even where they are as they were when it is handed in."""
    content = json.loads((handed_in / CPU).read_text())
    run = content["stages"]["task1"]["run"]
    assert run["hashes"] == hashes("task1", answers("task1"), handed_in)
    test = handed_in / "task1/test.py"
    before = test.read_text()
    test.write_text(before + "# passes")
    edited_tests = hashes("task1", answers("task1"), handed_in)
    test.write_text(before)
    (handed_in / "common/check/compare.py").write_text("tolerance = 1e9")
    edited_common = hashes("task1", answers("task1"), handed_in)
    where = "task1 on the CPU: its record was made"
    for made, said in ((edited_tests, "task1/test.py"), (edited_common, "common/")):
        edit(handed_in, put("run.hashes", made))
        assert f"{where} with another {said} than the course's" in lines_of(handed_in, course)
    edit(handed_in, put("run.hashes", run["hashes"] | {"answers": content_hash({})}))
    assert f"{where} from other answers than those handed in" in lines_of(handed_in, course)

    content["stages"]["task1"]["run"].pop("hashes")
    content["stages"]["task1"].pop("digest")  # as if it were of before there were any
    (handed_in / CPU).write_text(json.dumps(content))
    said = "task1 on the CPU: its record has no hashes: it does not say what it was made with"
    assert said in lines_of(handed_in, course)


# Times -------------------------------------------------------------------------------------------


def test_a_time_that_is_off_stands_beside_the_measured_one() -> None:
    claimed = {"same": 2.0, "near": 2.19, "fast": 1.0, "slow": 2.3, "absent": 1.0, "nan": float("nan"), "inf": float("inf")}  # fmt: skip
    measured = {name: 2.0 for name in claimed if name != "absent"} | {"more": 1.0}
    assert compare_times(claimed, measured) == [
        "fast: 1 ms claimed, 2 ms measured here",
        "slow: 2.3 ms claimed, 2 ms measured here",
        "nan: nan ms claimed, 2 ms measured here",
        "inf: inf ms claimed, 2 ms measured here",
        "claimed, and not measured here: absent",
    ]
    assert compare_times({}, measured) == [] and compare_times({"a": 1.0}, {"a": 1.1}) == []


@pytest.fixture
def timed(handed_in: Path) -> Iterator[Path]:
    """With a record from a GPU, and Results.md to match."""
    entry = a_record(handed_in, "task4")
    entry["run"]["hashes"] = hashes("task4", answers("task4"), handed_in)
    for found in entry["benchmarks"].values():
        found["run"] = entry["run"]
    entry["texts"]["generated text"]["run"] = entry["run"]
    cuda = {"device": "cuda", "stages": {"task4": seal(entry)}}
    (handed_in / CUDA).write_text(json.dumps(cuda))
    form = handed_in / "Results.md"
    records = {"cpu": json.loads((handed_in / CPU).read_text()), "cuda": cuda}
    form.write_text(render(form.read_text(), records, handed_in))
    yield handed_in


def test_claimed_times_are_compared_where_there_are_measured_ones(
    timed: Path, course: Course
) -> None:
    result = result_of(timed)
    result["stages"]["task4"]["earned"] = 4
    found = claims.verify(Submission("one", timed), result, course)
    assert found == {"lines": [], "times": NOT_MEASURED}
    assert NOT_MEASURED in feedback(result | {"claims": found})
    speed = {"ours_ms": 2.5, "reference_ms": 7.0, "ratio": 2.8, "interval": [2.7, 2.9], "n": 20}
    speed |= {"part": 1.0, "problem": ""}
    result["stages"]["task4"]["speed"] = {"layer": speed, "short": speed | {"ours_ms": 4.0}}
    found = claims.verify(Submission("one", timed), result, course)
    line = "task4, on NVIDIA H200: short: 2.37 ms claimed, 4 ms measured here"
    assert found == {"lines": [line], "times": ""}
    assert f"- {line}\n" in feedback(result | {"claims": found})
    assert line in table([result | {"claims": found}])


def test_a_time_that_was_edited_in_the_form_alone(timed: Path, course: Course) -> None:
    form = timed / "Results.md"
    assert not edited(form.read_text()) and "2.495 ms" in form.read_text()
    form.write_text(form.read_text().replace("2.495 ms", "0.249 ms"))
    result = result_of(timed)
    result["stages"]["task4"]["earned"] = 4
    found = claims.verify(Submission("one", timed), result, course)["lines"]
    assert "Results.md was edited between its markers" in found
    assert any("0.249 ms" in line and line.endswith("its records do not") for line in found)
