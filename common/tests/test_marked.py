"""Text between markers: what is replaced, what is refused, and what is written when."""

from pathlib import Path

import pytest

from common.marked import MarkerError, replace, write_atomically

TEXT = """before
<!-- grade: one -->
old
<!-- end: one -->
between <!-- a comment -->
<!-- grade: two -->
<!-- end: two -->
after
"""
NEW = {"one": ["first", "line"], "two": []}


def test_only_what_stands_between_markers_is_replaced() -> None:
    found = replace(TEXT, "grade", NEW, file="a.md")
    assert found == TEXT.replace("old", "first\nline").replace("two -->\n", "two -->\n\n", 1)
    assert replace(found, "grade", NEW, file="a.md") == found
    windows = replace(TEXT.replace("\n", "\r\n"), "grade", NEW, file="a.md")
    assert windows == found.replace("\n", "\r\n")


def test_markers_of_another_word_are_text() -> None:
    text = "<!-- ladder: table -->\n<!-- end: one -->\n"
    with pytest.raises(
        MarkerError, match="a.md, line 2: <!-- end: one --> ends a section that was not"
    ):
        replace(text, "grade", {"one": []}, file="a.md")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            ("<!-- grade: one -->", ""),
            "line 4: <!-- end: one --> ends a section that was not begun",
        ),
        (("<!-- end: one -->\n", ""), "line 5: <!-- grade: two --> comes before the end of one"),
        (("<!-- end: two -->", ""), "a.md: <!-- end: two --> is missing"),
        (("two -->", "three -->"), "names no section; there are one, two"),
        (("between", "<!-- grade: one -->"), "line 5: <!-- grade: one --> occurs twice"),
        ((TEXT[TEXT.index("<!-- grade: two") :], ""), "marker <!-- grade: two --> is missing"),
    ],
)
def test_broken_markers_are_named(damage: tuple[str, str], words: str) -> None:
    with pytest.raises(MarkerError) as error:
        replace(TEXT.replace(*damage), "grade", NEW, file="a.md")
    assert words in str(error.value)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "a.md"
    write_atomically(file, "é\n")
    assert file.read_text(encoding="utf-8") == "é\n"
    with pytest.raises(UnicodeEncodeError):
        write_atomically(file, "new \ud800")
    assert [p.name for p in file.parent.iterdir()] == ["a.md"]
    assert file.read_text(encoding="utf-8") == "é\n"
