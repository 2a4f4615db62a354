"""What a student writes is found between its marks, and marks that are broken are named."""

import re
import time
from pathlib import Path

import pytest

from common.check.hints import load
from common.paths import ROOT
from common.record import POINTS
from common.regions import MarkError, join, read, regions
from common.staff.student_edition import contents

FILES = list(dict.fromkeys(piece.file for stage in POINTS for piece in load(stage)))
KERNEL = "task2/attention_kernel.cu"
TEXT = (ROOT / KERNEL).read_text()
NAMES = [piece.name for piece in load("task2")]
BEGIN, END = "  // BEGIN SOLUTION\n", "  // END SOLUTION\n"


def line_of(mark: str, n: int = 0) -> int:
    """The line number of the n-th such mark."""
    return [i for i, line in enumerate(TEXT.splitlines(True), start=1) if line == mark][n]


def without(*lines: int) -> str:
    return "".join(s for i, s in enumerate(TEXT.splitlines(True), start=1) if i not in lines)


def with_line(n: int, text: str) -> str:
    """The kernel's file with another line n."""
    lines = TEXT.splitlines(True)
    lines[n - 1] = text
    return "".join(lines)


B, E = line_of(BEGIN), line_of(END)
B2 = line_of(BEGIN, 1)


# What is found ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def edition() -> dict[str, str]:
    return {file.path: file.data.decode() for file in contents()[0] if file.path in FILES}


@pytest.mark.parametrize("file", FILES)
def test_a_file_is_its_regions_and_what_is_given(file: str, edition: dict[str, str]) -> None:
    for text in ((ROOT / file).read_text(), edition[file]):
        found = regions(text, file)
        assert join(found) == text
        names = [piece.name for stage in POINTS for piece in load(stage) if piece.file == file]
        assert sorted(r.function for r in found) == sorted(names)
        lines = text.splitlines()
        for r in found:
            assert "BEGIN SOLUTION" in lines[r.begin - 1] and "END SOLUTION" in lines[r.end - 1]
            assert r.lines.splitlines() == lines[r.begin : r.end - 1]
            assert r.before.splitlines()[-1] == lines[r.begin - 1]
            assert r.after.splitlines()[0] == lines[r.end - 1]
    ours, theirs = regions((ROOT / file).read_text(), file), regions(edition[file], file)
    assert [r.function for r in ours] == [r.function for r in theirs]


def test_other_lines_come_back_in_the_same_place() -> None:
    found = regions(TEXT, KERNEL)
    found[1] = found[1]._replace(lines="  own();\n")
    again = regions(join(found), KERNEL)
    assert [r.lines for r in again] == [r.lines for r in found]
    assert [r.function for r in again] == NAMES


def test_windows_line_ends_stay() -> None:
    text = TEXT.replace("\n", "\r\n")
    found = regions(text, KERNEL)
    assert join(found) == text
    assert [r.lines.replace("\r\n", "\n") for r in found] == [
        r.lines for r in regions(TEXT, KERNEL)
    ]
    assert [r.begin for r in found] == [r.begin for r in regions(TEXT, KERNEL)]


@pytest.mark.parametrize("odd", ["\f", "\v", "\x1c", "\x85", "\u2028", "\r"], ids=ascii)
def test_only_a_line_feed_ends_a_line(odd: str) -> None:
    text = with_line(B + 1, f'  f("{odd}"); //{odd} note\n')
    assert join(regions(text, KERNEL)) == text
    assert [r.end for r in regions(text, KERNEL)] == [r.end for r in regions(TEXT, KERNEL)]


def test_an_empty_region_and_a_file_without_a_last_line_feed() -> None:
    text = without(*range(B + 1, E)).rstrip("\n")
    found = regions(text, KERNEL)
    assert found[0].lines == "" and join(found) == text


def test_functions_may_change_places() -> None:
    body = "    # BEGIN SOLUTION\n    x\n    # END SOLUTION\n"
    text = "".join(f"def {name}():\n{body}" for name in ("_fewest_splits", "choose_num_splits"))
    text += (
        f"class CustomFlashAttention:\n    def forward(self):\n{body.replace('    #', '        #')}"
    )
    found = regions(text, "task5/attention.py")
    assert [r.function for r in found][:2] == ["_fewest_splits", "choose_num_splits"]


def test_a_file_of_which_the_hints_know_nothing_has_no_regions() -> None:
    for file in ("task2/attention.py", "common/grade.py", "task7/attention.py", "README.md"):
        assert regions("x = 1\n", file) == []


def test_five_megabytes_take_no_time() -> None:
    many = with_line(B + 1, '  f("//");  // an own line, //, END\n' * 130_000)
    one = with_line(B + 1, "  // " + "/ " * 2_500_000 + "\n")
    spaces = with_line(B + 1, "  //" + " " * 5_000_000 + "x\n")
    for text in (many, one, spaces):
        assert len(text) > 4_500_000
        begin = time.perf_counter()
        assert join(regions(text, KERNEL)) == text
        assert time.perf_counter() - begin < 10, "some pattern backtracks"


@pytest.mark.parametrize("tail", ["x", ", until then: x"])
def test_five_megabytes_in_a_mark_take_no_time(tail: str) -> None:
    begin = time.perf_counter()
    with pytest.raises(MarkError) as error:
        regions(with_line(E, "  // END SOLUTION" + " " * 5_000_000 + tail + "\n"), KERNEL)
    assert time.perf_counter() - begin < 10 and len(str(error.value)) < 300


# What is broken -----------------------------------------------------------------------------------

BROKEN = {
    "no END at the file's end": (without(line_of(END, 3)), f":{line_of(BEGIN, 3)}: BEGIN SOLUTION without END SOLUTION"),
    "no END": (without(E), f":{B2 - 1}: BEGIN SOLUTION inside BEGIN SOLUTION (line {B}), which has no END SOLUTION yet"),
    "no BEGIN": (without(B), f":{E - 1}: END SOLUTION without BEGIN SOLUTION"),
    "neither": (without(B, E), f": {NAMES[0]} has no BEGIN SOLUTION and END SOLUTION"),
    "no marks at all": (re.sub(r" *// (BEGIN|END) SOLUTION\n", "", TEXT), f": {NAMES[0]} has no BEGIN SOLUTION and"),
    "nothing at all": ("", f": {NAMES[0]} has no BEGIN SOLUTION and END SOLUTION"),
    "a region of two functions": (without(E, B2), f": {NAMES[1]} has no BEGIN SOLUTION and END SOLUTION"),
    "BEGIN twice": (with_line(B, BEGIN * 2), f":{B + 1}: BEGIN SOLUTION inside BEGIN SOLUTION (line {B})"),
    "END twice": (with_line(E, END * 2), f":{E + 1}: END SOLUTION without BEGIN SOLUTION"),
    "a pair twice": (with_line(E, END + BEGIN + END), f":{E + 1}: BEGIN SOLUTION for the second time in {NAMES[0]}"),
    "a pair twice after a function": (
        with_line(E, "__device__ void own(float x) {\n" + END + BEGIN + END),
        f":{E + 2}: BEGIN SOLUTION for the second time in {NAMES[0]}",
    ),
    "a pair inside": (with_line(B + 1, BEGIN + END), f":{B + 1}: BEGIN SOLUTION inside BEGIN SOLUTION (line {B})"),
    "END first": (with_line(B, END), f":{B}: END SOLUTION without BEGIN SOLUTION"),
    "text behind": (with_line(B, "  // BEGIN SOLUTION of the row\n"), f":{B}: a mark stands alone on its line; got '// BEGIN SOLUTION of"),
    "code before": (with_line(E, "  f();  // END SOLUTION\n"), f":{E}: a mark stands alone on its line; got 'f();  // END"),
    "words between": (with_line(E, "  // --- END SOLUTION ---\n"), f":{E}: a mark stands alone on its line"),
    "another comment": (with_line(E, "  /* END SOLUTION */\n"), f":{E}: a mark stands alone on its line"),
    "another function": (
        with_line(B, "}\n\n__device__ void own(float x) {\n" + BEGIN),
        f":{B + 3}: BEGIN SOLUTION in own, which task2/hints.toml does not have",
    ),
    "outside": ("// BEGIN SOLUTION\n// END SOLUTION\n" + TEXT, ":1: BEGIN SOLUTION outside of a function"),
}  # fmt: skip


@pytest.mark.parametrize("text, says", BROKEN.values(), ids=BROKEN)
def test_a_broken_mark_is_named_with_its_line(text: str, says: str) -> None:
    assert text != TEXT
    with pytest.raises(MarkError) as error:
        regions(text, KERNEL)
    assert str(error.value).startswith(KERNEL + says)
    assert "\n" not in str(error.value)


def test_marks_in_a_python_file_are_indented_like_the_code() -> None:
    file = "task1/attention.py"
    text = (ROOT / file).read_text().replace("        # BEGIN", "# BEGIN")
    with pytest.raises(
        MarkError, match=r"task1/attention.py:\d+: BEGIN SOLUTION outside of a func"
    ):
        regions(text, file)


def test_a_file_that_is_not_utf8_is_named_with_its_byte(tmp_path: Path) -> None:
    (tmp_path / "f.cu").write_bytes("// ä\n// é".encode("latin-1"))
    with pytest.raises(MarkError, match=r"^f.cu:1: byte 3, 0xe4, is not UTF-8$"):
        read(tmp_path / "f.cu", "f.cu")
    (tmp_path / "f.cu").write_bytes(b"// a\n//\xff")
    with pytest.raises(MarkError, match=r"^f.cu:2: byte 7, 0xff, is not UTF-8$"):
        read(tmp_path / "f.cu", "f.cu")


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(MarkError, match=r"^f.cu: No such file or directory$"):
        read(tmp_path / "f.cu", "f.cu")
