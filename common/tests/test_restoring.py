"""Student editions with solved stages, and answers restored into one."""

import re

import pytest

from common.regions import regions
from common.staff import student_edition
from common.staff.student_edition import (
    LEFT_OUT,
    ROOT,
    RestoreError,
    cut,
    main,
    make,
    restore,
    tracked_files,
)


def test_solved_stages_keep_their_answers(tmp_path):
    answers = make(tmp_path / "e", solved=[4, 2])
    assert not [file for file in answers if file.startswith(("task2/", "task4/"))]
    for file in ("task2/attention_kernel.cu", "task4/attention_kernel.cu"):
        text = (tmp_path / "e" / file).read_text()
        assert text == (ROOT / file).read_text()
    assert "YOUR CODE HERE" in (tmp_path / "e/task5/attention_kernel.cu").read_text()
    assert "**Tasks 2 and 4 are already written.**" in (tmp_path / "e/README.md").read_text()


WITH_ANSWERS = [
    file
    for file in tracked_files()
    if re.match(r"task\d/", file)
    and file.endswith((".py", ".cu"))
    and not file.startswith(LEFT_OUT)
    and cut((ROOT / file).read_text(), file).answers
]


@pytest.mark.parametrize("solved", [(), (4,), (1, 2, 5), range(1, 7)], ids=str)
def test_restoring_gives_back_the_original_byte_for_byte(tmp_path, solved):
    assert len(WITH_ANSWERS) == 7
    make(tmp_path / "e", solved=solved)
    done = restore(tmp_path / "e")
    assert set(done) == set(WITH_ANSWERS) and not any(own for _, own in done.values())
    for file in WITH_ANSWERS:
        assert (tmp_path / "e" / file).read_bytes() == (ROOT / file).read_bytes(), file
    assert set(restore(tmp_path / "e").values()) == {(0, 0)}  # once more: nothing to do


def test_restoring_keeps_what_a_student_wrote(tmp_path):
    make(tmp_path / "e")
    file = "task2/attention_kernel.cu"
    kernel = tmp_path / "e" / file
    own = kernel.read_text().replace("  // YOUR CODE HERE\n", "  my_own_code();\n", 1)
    kernel.write_text(own + "// a note\n")
    assert restore(tmp_path / "e", stages=[2]) == {file: (3, 1)}
    text = kernel.read_text()
    assert "my_own_code();" in text and text.endswith("// a note\n")
    written, *others = regions(text, file)
    assert "my_own_code();" in written.lines and "YOUR CODE" not in written.lines
    course = regions((ROOT / file).read_text(), file)
    assert [r.lines for r in others] == [r.lines for r in course[1:]]
    assert restore(tmp_path / "e", stages=[2]) == {file: (0, 1)} and kernel.read_text() == text
    assert "is not written yet" in (tmp_path / "e/task1/attention.py").read_text()


def test_restoring_keeps_what_stands_beside_the_marks(tmp_path):
    make(tmp_path / "e", solved=[2])
    file = "task5/attention.py"
    ours = tmp_path / "e" / file
    ours.write_text(ours.read_text().replace("    return 1\n", "    return 7\n") + "# a note\n")
    kernel = tmp_path / "e/task2/attention_kernel.cu"
    kernel.write_text(kernel.read_text() + "// a note\n")
    done = restore(tmp_path / "e", stages=[2, 5])
    assert done[file] == (2, 1) and done["task2/attention_kernel.cu"] == (0, 0)
    assert "    return 7\n" in ours.read_text() and ours.read_text().endswith("# a note\n")
    assert kernel.read_text().endswith("// a note\n")


def test_restoring_a_checkout_with_windows_line_ends(tmp_path):
    make(tmp_path / "e")
    for file in WITH_ANSWERS:
        path = tmp_path / "e" / file
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    own = tmp_path / "e/task1/attention.py"
    own.write_bytes(re.sub(b"raise NotImpl.*", b"return x\r", own.read_bytes()))
    written = own.read_bytes()
    done = restore(tmp_path / "e")
    assert [file for file, (_, own) in done.items() if own] == ["task1/attention.py"]
    assert own.read_bytes() == written
    for file in WITH_ANSWERS[1:]:
        assert (tmp_path / "e" / file).read_bytes() == (ROOT / file).read_bytes(), file


@pytest.mark.parametrize(
    "old, new, says",
    [
        (b"// END SOLUTION", b"//", "BEGIN SOLUTION inside BEGIN SOLUTION"),
        (b"// BEGIN SOLUTION", b"//", "END SOLUTION without BEGIN SOLUTION"),
        (b"// YOUR CODE HERE", b"// \xe4", r"byte \d+, 0xe4, is not UTF-8"),
    ],
)
def test_restoring_reports_broken_marks_and_writes_nothing(tmp_path, old, new, says):
    make(tmp_path / "e")
    kernel = tmp_path / "e/task2/attention_kernel.cu"
    kernel.write_bytes(kernel.read_bytes().replace(old, new, 1))
    before = {file: (tmp_path / "e" / file).read_bytes() for file in WITH_ANSWERS}
    with pytest.raises(SystemExit) as end:
        main(["--restore", str(tmp_path / "e")])
    assert re.fullmatch(rf"error: task2/attention_kernel.cu:\d+: {says}.*", str(end.value))
    assert {file: (tmp_path / "e" / file).read_bytes() for file in WITH_ANSWERS} == before


def test_an_edition_is_not_made_from_broken_marks(tmp_path, monkeypatch):
    def without_an_end(path, file):
        text = path.read_text()
        return (
            text.replace("// END SOLUTION", "//", 1)
            if file == "task4/attention_kernel.cu"
            else text
        )

    monkeypatch.setattr(student_edition, "read", without_an_end)
    with pytest.raises(SystemExit, match=r"task4/attention_kernel.cu:\d+: BEGIN SOLUTION without"):
        main([str(tmp_path / "e")])
    monkeypatch.setattr(
        student_edition, "read", lambda path, file: re.sub(".*SOLUTION.*", "", path.read_text())
    )
    with pytest.raises(
        SystemExit, match="task1/attention.py: CustomSelfAttention.forward has no BEGIN"
    ):
        main([str(tmp_path / "e")])
    assert not list(tmp_path.iterdir())


def test_restoring_needs_an_edition(tmp_path):
    with pytest.raises(RestoreError, match="has no task1/attention.py"):
        restore(tmp_path)
    with pytest.raises(RestoreError, match="not a folder"):
        restore(tmp_path / "gone")
