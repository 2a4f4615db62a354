"""Submissions: which there are, and what counts of each; nothing of theirs is executed or followed."""

import os
import shutil
import socket
import stat
import unicodedata
from pathlib import Path

import pytest

from common.staff.grade import archives, submission
from common.staff.grade.archives import MAX_FILE, RefusedError, opened
from common.staff.grade.submission import find, read
from common.tests.submissions import (
    ANSWER,
    GOOD,
    KERNEL,
    WANTED,
    contents,
    error,
    folder,
    problem,
    zipped,
)


@pytest.fixture(params=["folder", "zip"])
def made(request, tmp_path):
    """Makes a folder or a zip of files."""
    if request.param == "folder":
        return lambda files: folder(tmp_path / "made", files)
    return lambda files: zipped(tmp_path / "made.zip", files)


# Which submissions there are ----------------------------------------------------------------------


def names(*paths):
    return [found.name for found in find(paths).submissions]


def test_a_folder_of_submissions(tmp_path):
    folder(tmp_path / "bob")
    folder(tmp_path / "eve/course-main")
    zipped(tmp_path / "ann.zip")
    zipped(tmp_path / "Zed.ZIP")
    (tmp_path / "cal.bundle").touch()
    (tmp_path / "notes.txt").touch()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "__MACOSX").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "bob")
    (tmp_path / "link.zip").symlink_to(tmp_path / "ann.zip")
    os.mkfifo(tmp_path / "fifo.zip")
    found = find([tmp_path])
    assert [s.name for s in found.submissions] == ["Zed", "ann", "bob", "cal", "eve"]
    assert found.submissions[1].path == tmp_path / "ann.zip"
    assert found.others == [
        "fifo.zip is not a folder, .zip or .bundle",
        "link is a symbolic link",
        "link.zip is a symbolic link",
        "notes.txt is not a folder, .zip or .bundle",
    ]
    for one in found.submissions[:1] + found.submissions[4:]:
        assert read(one, WANTED).files == GOOD


def test_paths_that_are_submissions(tmp_path, monkeypatch):
    bob, ann = folder(tmp_path / "bob"), zipped(tmp_path / "ann.zip")
    assert names(bob, ann, bob, tmp_path) == ["ann", "bob"]
    monkeypatch.chdir(bob)
    assert names(Path(".")) == ["bob"]
    found = find([tmp_path / "gone", ann])
    assert found.others == ["gone does not exist"] and len(found.submissions) == 1


def test_a_folder_with_one_archive_is_this_archive(tmp_path):
    zipped(folder(tmp_path / "ann_12_file", {".DS_Store": b""}) / "course.zip")
    zipped(folder(tmp_path / "bob_13_file", {"note.txt": b""}) / "course.zip")
    (tmp_path / "eve_14_file").mkdir()
    (tmp_path / "eve_14_file/course.zip").symlink_to("../ann_12_file/course.zip")
    found = find([tmp_path]).submissions
    assert [s.name for s in found] == ["ann_12_file", "bob_13_file", "eve_14_file"]
    assert error(found[2].path).endswith("it holds course.zip (a symbolic link)")
    assert read(found[0], WANTED).files == GOOD
    assert "it holds course.zip (a file), note.txt (a file)" in error(found[1].path)


def test_an_unreadable_folder_stops_no_other(tmp_path, monkeypatch):
    folder(tmp_path / "ann")
    folder(tmp_path / "bob")
    refuse(monkeypatch, "listdir", "ann")
    refuse(monkeypatch, "scandir", "ann")
    found = find([tmp_path]).submissions
    assert [s.name for s in found] == ["ann", "bob"] and names(tmp_path / "ann") == ["ann"]
    assert error(found[0].path) == "it cannot be read: Permission denied"
    assert read(found[1], WANTED).files == GOOD


@pytest.mark.parametrize(
    "name, safe",
    [
        ("-rf", "rf"),
        ("..hidden", "hidden"),
        ("a\nb\x1b[31m", "a_b_[31m"),
        ("a\\b:c", "a_b_c"),
        ("\u202eevil", "_evil"),
        ("\udcff", "_"),
        ("...", "submission"),
        ("trailing. ", "trailing"),
        ("x" * 200, "x" * 50),
        (unicodedata.normalize("NFD", "Zoë Çelik"), unicodedata.normalize("NFC", "Zoë Çelik")),
    ],
)
def test_names_are_safe(name, safe):
    assert submission._safe(name) == safe


def test_names_are_unique_whatever_the_file_system(tmp_path):
    for name in ("a/Ann", "b/ann", "c/ANN-2", "d/ann"):
        folder(tmp_path / name)
    zipped(tmp_path / "d/ann.zip")
    found = names(*(tmp_path / name for name in "abcd"))
    assert len(found) == len({name.casefold() for name in found}) == 5, found
    assert found == names(*(tmp_path / name for name in "dcba"))


# The root and what counts -------------------------------------------------------------------------


@pytest.mark.parametrize("top", ["", "course/", "course-main/", "a/b/c/"])
def test_the_root_holds_the_tasks(made, top):
    noise = [".git/HEAD", ".venv/bin/x", ".build/y", "task2/__pycache__/z", "task2/.DS_Store"]
    noise += [f"__MACOSX/{top}task2/._x", "task1/.pytest_cache/x"]
    files = {f"{top}{name}": data for name, data in GOOD.items()}
    others = {f"{top}README.md": b"", f"{top}common/grade.py": b"", f"{top}course.zip": b"PK"}
    found = contents(made(files | others | dict.fromkeys(noise, b"")))
    assert (found.files, found.problems) == (GOOD, [])
    assert found.ignored == ["README.md", "common/grade.py", "course.zip"]


def test_what_lies_beside_the_root_is_ignored(made):
    found = contents(made({f"course/{n}": d for n, d in GOOD.items()} | {"a.txt": b"", "b/c": b""}))
    assert (found.files, found.ignored) == (GOOD, ["../a.txt", "../b/c"])


def test_two_roots(made):
    course = {f"course/{name}": data for name, data in GOOD.items()}
    assert error(made(course | {"again/task2/x": b""})) == (
        "task folders are in again, course: which count?"
    )


def test_a_deeper_root_does_not_count(made):
    path = made(GOOD | {f"old/{KERNEL}": b"old"})
    assert problem(path) == "old holds task folders as well; not used"
    assert contents(path).files == GOOD


def test_no_root(made):
    assert error(made({"kernel.cu": b"", "src/x": b""})) == (
        "it has no folder task1 ... task7; it holds kernel.cu (a file), src (a folder)"
    )


def test_folders_without_a_file_are_no_root(tmp_path):
    folder(tmp_path, {f"course/{name}": data for name, data in GOOD.items()})
    (tmp_path / "task2/__pycache__").mkdir(parents=True)
    assert contents(tmp_path).files == GOOD and contents(tmp_path).problems == []


def test_nothing_at_all(tmp_path):
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", zipped(tmp_path / "empty.zip", {})):
        assert error(path).endswith("it holds nothing")
    (tmp_path / "x.txt").touch()
    assert error(tmp_path / "x.txt") == "expected a folder, .zip or .bundle"
    assert error(tmp_path / "gone.zip") == "it cannot be read: No such file or directory"


def test_a_missing_file(made):
    path = made({KERNEL: b"k"})
    assert problem(path) == f"{ANSWER} is missing"
    assert contents(path).files == {KERNEL: b"k"}


def test_a_folder_named_like_a_wanted_file(made):
    assert (
        problem(made({KERNEL: b"k", f"{ANSWER}/x": b""})) == f"{ANSWER} is missing: it is a folder"
    )


def test_a_file_named_like_its_folder(made):
    assert problem(made({KERNEL: b"k", "task1": b""})) == f"{ANSWER} is missing: task1 is a file"


@pytest.mark.parametrize("other", ["task1/Attention.py", "TASK1/attention.py"])
def test_upper_and_lower_case(made, other):
    path = made({KERNEL: b"k", other: b"a"})
    assert problem(path) == f"{ANSWER} is missing: {other} differs in upper and lower case"
    assert contents(path).ignored == [other]


def test_names_that_differ_only_in_case(made):
    other = "task1/Attention.py"
    path = made(GOOD | {other: b"a"})
    if len(list(path.parent.rglob("[aA]ttention.py"))) == 1:
        pytest.skip("this file system has only one of them")
    assert problem(path) == f"{ANSWER} is unclear: {other} differs in upper and lower case"
    assert contents(path).files == {KERNEL: GOOD[KERNEL]}


def test_sizes(made):
    size = {"task2/5.cu": 5 << 20, "task2/10.cu": MAX_FILE, "task2/more.cu": MAX_FILE + 1}
    path = made({name: bytes(length) for name, length in size.items()})
    found = contents(path, list(size))
    assert {name: len(data) for name, data in found.files.items()} == {
        "task2/5.cu": 5 << 20,
        "task2/10.cu": MAX_FILE,
    }
    assert found.problems == [
        "task2/more.cu is not taken: 10,485,761 bytes; at most 10,485,760 are read"
    ]


def test_bytes_and_odd_names_stay_as_they_are(made):
    data = bytes(range(256)) * 3 + b"\r\n\x1a"
    odd = "task1/\x1b[2J\nx"
    found = contents(made({KERNEL: data, ANSWER: b"", odd: b"", "ünï/ç": b""}))
    assert found.files == {KERNEL: data, ANSWER: b""}
    assert found.ignored == [r"task1/\x1b[2J\nx", "ünï/ç"]


def test_a_long_listing_ends(made, monkeypatch):
    monkeypatch.setattr(submission, "MAX_LISTED", 30)
    many = {f"{place}/{n:03}": b"" for place in ("a", "task1", "z") for n in range(100)}
    path = made(many | GOOD)
    assert problem(path) == "more than 30 files or folders: not all are listed"
    found = contents(path)
    assert found.files == GOOD and 20 < len(found.ignored) <= 30


# Folders ------------------------------------------------------------------------------------------


def refuse(monkeypatch, function, name):
    """The system refuses a path with this name: tests may run as root, who may do everything."""
    real = getattr(os, function)

    def call(path, *arguments, **options):
        if os.path.basename(path) == name:
            raise PermissionError(13, "Permission denied")
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, function, call)


def test_a_work_tree_is_read_as_it_is(tmp_path):
    path = folder(tmp_path / "x", GOOD | {".git/HEAD": b"ref: refs/heads/main\n"})
    assert (contents(path).files, contents(path).ignored) == (GOOD, [])


@pytest.mark.parametrize("target", ["/etc/passwd", "../task2/attention_kernel.cu", "gone"])
def test_a_link_is_not_followed(tmp_path, target):
    folder(tmp_path, {KERNEL: b"k", "task1/x": b""})
    (tmp_path / ANSWER).symlink_to(target)
    assert problem(tmp_path) == f"{ANSWER} is missing: it is a symbolic link"
    assert contents(tmp_path).files == {KERNEL: b"k"}


def test_a_link_to_a_folder_is_not_followed(tmp_path):
    folder(tmp_path / "other")
    folder(tmp_path / "mine", {KERNEL: b"k"})
    (tmp_path / "mine/task1").symlink_to(tmp_path / "other/task1")
    (tmp_path / "mine/loop").symlink_to(tmp_path / "mine")
    assert problem(tmp_path / "mine") == f"{ANSWER} is missing: task1 is a symbolic link"
    (tmp_path / "eve").mkdir()
    (tmp_path / "eve/course").symlink_to(tmp_path / "other")
    assert error(tmp_path / "eve").endswith("it holds course (a symbolic link)")


def test_a_link_that_comes_after_the_listing_is_not_followed(tmp_path):
    mine = folder(tmp_path / "mine")
    with opened(mine) as entries:
        kernel, answer = (entry for entry in list(entries) if entry.name in GOOD)
        if kernel.name == ANSWER:
            kernel, answer = answer, kernel
        (mine / KERNEL).unlink()
        (mine / KERNEL).symlink_to("/etc/passwd")
        shutil.move(mine / "task1", tmp_path / "elsewhere")
        (mine / "task1").symlink_to(tmp_path / "elsewhere")
        for entry in (kernel, answer):
            with pytest.raises(RefusedError, match="cannot be read: (Too many|Not a dir)"):
                entry.read()


def test_a_hard_link_is_refused(tmp_path):
    folder(tmp_path / "x", {KERNEL: b"k", "task1/x": b""})
    (tmp_path / "secret").write_text("secret")
    os.link(tmp_path / "secret", tmp_path / "x" / ANSWER)
    assert f"{ANSWER} is missing: it is a hard link" in problem(tmp_path / "x")


def test_what_is_no_file_is_not_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(folder(tmp_path, {KERNEL: b"k", "task1/x": b""}))
    os.mkfifo(ANSWER)
    assert problem(tmp_path) == f"{ANSWER} is missing: it is a FIFO"
    with pytest.raises(RefusedError, match="it is a FIFO"):  # that it became one after the listing
        archives._read_file(tmp_path, ANSWER)
    os.unlink(ANSWER)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(ANSWER)  # short: the path of a socket may have 107 bytes
    assert problem(tmp_path) == f"{ANSWER} is missing: it is a socket"
    assert archives._kind(stat.S_IFCHR | 0o666) == archives._kind(stat.S_IFBLK) == "a device"


def test_an_unreadable_file(tmp_path, monkeypatch):
    folder(tmp_path)
    refuse(monkeypatch, "open", "attention.py")
    assert problem(tmp_path) == f"{ANSWER} cannot be read: Permission denied"


def test_an_unreadable_folder(tmp_path, monkeypatch):
    folder(tmp_path)
    refuse(monkeypatch, "scandir", "task1")
    cannot = "task1 is a folder that cannot be read (Permission denied)"
    assert problem(tmp_path) == f"{ANSWER} is missing: {cannot}"
    assert contents(tmp_path).files == {KERNEL: GOOD[KERNEL]}


@pytest.mark.parametrize(
    "now, time", [(b"longer than it was", 0), (b"", 0), (b"", 1), (b"# ANSWER\n", 1)]
)
def test_a_file_that_changes_while_it_is_read(tmp_path, monkeypatch, now, time):
    folder(tmp_path)
    os.utime(tmp_path / ANSWER, (0, 0))

    def change(_):
        (tmp_path / ANSWER).write_bytes(now)
        os.utime(tmp_path / ANSWER, (time, time))

    monkeypatch.setattr(archives, "_check_size", change)
    assert problem(tmp_path, [ANSWER]) == f"{ANSWER} is not taken: it changed while it was read"


def test_a_file_that_disappears(tmp_path, monkeypatch):
    folder(tmp_path)
    real = archives._read_file
    monkeypatch.setattr(
        archives, "_read_file", lambda top, path: (top / ANSWER).unlink(True) or real(top, path)
    )
    assert problem(tmp_path) == f"{ANSWER} cannot be read: No such file or directory"


def test_a_deep_folder_is_not_descended(tmp_path):
    folder(tmp_path, GOOD | {f"{'d/' * 60}task1/x": b""})
    assert "is not used: it has more than 24 folders" in problem(tmp_path)
    assert contents(tmp_path).files == GOOD


def test_too_many_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MAX_FOLDERS", 20)
    monkeypatch.setattr(submission, "MAX_LISTED", 20)
    folder(tmp_path, GOOD | {f"a{n:02}/x/y": b"" for n in range(40)})
    real, visited = os.scandir, []
    monkeypatch.setattr(os, "scandir", lambda path: visited.append(path) or real(path))
    assert problem(tmp_path) == "more than 20 files or folders: not all are listed"
    assert len(visited) == 20 and contents(tmp_path).files == GOOD


def test_names_that_are_no_text(tmp_path):
    folder(tmp_path)
    try:
        os.close(os.open(os.fsencode(tmp_path) + b"/task1/\xff", os.O_CREAT))
    except OSError:
        pytest.skip("this file system has no such names")
    assert contents(tmp_path).ignored == [r"task1/\udcff"]
