"""The student edition: cut from the answers, still imports and compiles, and says what is to be written."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from common.staff.student_edition import MarkError, cut, make

STAGES = range(1, 8)


@pytest.fixture(scope="module")
def edition(tmp_path_factory):
    path = tmp_path_factory.mktemp("student") / "edition"
    return path, make(path)


@pytest.fixture(scope="module")
def results(edition):
    """Each stage's test as a student would start it, two at a time."""

    def run(stage):
        command = [sys.executable, "-m", f"task{stage}.test", "--no-timing", "--device", "cpu"]
        return subprocess.run(command, cwd=edition[0], capture_output=True, text=True, timeout=300)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(STAGES, pool.map(run, STAGES), strict=True))


def test_every_stage_but_the_demo_has_something_to_write(edition):
    _, answers = edition
    assert {file.split("/")[0] for file in answers} == {f"task{stage}" for stage in range(1, 7)}


def test_no_answer_and_nothing_for_instructors_is_left(edition):
    path, _ = edition
    for folder in ("common/staff", "common/tests", "task4/ladder"):
        assert not (path / folder).exists()
    for file in [*path.rglob("*.py"), *path.rglob("*.cu")]:
        assert "SOLUTION" not in file.read_text(), file


def test_kernels_still_compile(edition):
    path, _ = edition
    for stage in (2, 4, 5):
        command = [sys.executable, "-m", f"task{stage}.compile", "--device", "cpu"]
        built = subprocess.run(command, cwd=path, capture_output=True, text=True)
        assert built.returncode == 0, built.stderr


@pytest.mark.parametrize("stage", STAGES)
def test_each_stage_fails_with_one_clear_sentence(results, stage):
    result = results[stage]
    text = result.stdout + result.stderr
    assert result.returncode == 1, text
    assert "Traceback" not in text, text
    assert "not written yet" in text, text


def test_python_answers_become_not_implemented():
    source = "class A:\n    def f(self):\n        x = 1\n        # BEGIN SOLUTION\n        return x\n        # END SOLUTION\n"
    text, answers = cut(source, "taskN/attention.py")
    assert answers == 1
    assert text == (
        "class A:\n    def f(self):\n        x = 1\n"
        '        raise NotImplementedError("A.f is not written yet")\n'
    )


@pytest.mark.parametrize(
    "source, words",
    [
        ("# BEGIN SOLUTION\nx = 1\n", "f.py:1: BEGIN SOLUTION without END SOLUTION"),
        ("x = 1\n# END SOLUTION\n", "f.py:2: END SOLUTION inside or without"),
        ("# BEGIN SOLUTION\n# BEGIN SOLUTION\n", "f.py:2: BEGIN SOLUTION inside or without"),
        ("# BEGIN SOLUTION of this\n", "f.py:1: a solution mark stands alone"),
    ],
)
def test_marks_that_do_not_pair_up(source, words):
    with pytest.raises(MarkError, match=words):
        cut(source, "f.py")


def test_a_directory_in_use_is_refused(tmp_path):
    (tmp_path / "something").write_text("")
    with pytest.raises(FileExistsError, match="new or an empty directory"):
        make(tmp_path)
