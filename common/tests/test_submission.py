"""Submissions: what counts is read, whatever else is in them; nothing of theirs is executed, extracted or followed."""

import os
import random
import shutil
import socket
import stat
import struct
import subprocess
import tracemalloc
import unicodedata
import warnings
import zipfile
from pathlib import Path

import pytest

from common.staff.grade import archives, submission
from common.staff.grade.archives import MAX_FILE, RefusedError, opened
from common.staff.grade.submission import Submission, SubmissionError, find, read

KERNEL, ANSWER = "task2/attention_kernel.cu", "task1/attention.py"
WANTED = (KERNEL, ANSWER)
GOOD = {KERNEL: b"// kernel\n", ANSWER: b"# answer\n"}
LOCAL, CENTRAL, END = b"PK\3\4", b"PK\1\2", b"PK\5\6"


def folder(path, files=GOOD):
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def zipped(path, files=GOOD, *, mode=0, method=zipfile.ZIP_DEFLATED):
    """A zip with these names as they are: zipfile changes names only where a ZipInfo is made."""
    items = files.items() if isinstance(files, dict) else files
    with zipfile.ZipFile(path, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that are there twice
        for name, data in items:
            info = zipfile.ZipInfo("x")
            info.filename, info.compress_type, info.external_attr = name, method, mode << 16
            archive.writestr(info, data)
    return path


def patch(path, place, offset, form, value):
    """Write a number into the first header of a kind."""
    data = bytearray(path.read_bytes())
    struct.pack_into(f"<{form}", data, data.index(place) + offset, value)
    path.write_bytes(data)


def contents(path, wanted=WANTED):
    return read(Submission("name", path), wanted)


def problem(path, wanted=WANTED):
    """The only problem of what is otherwise good."""
    found = contents(path, wanted)
    assert len(found.problems) == 1, found.problems
    return found.problems[0]


def error(path):
    with pytest.raises(SubmissionError) as info:
        contents(path)
    assert "\n" not in str(info.value)
    return str(info.value)


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


# Zips ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, why",
    [
        ("../task1/attention.py", "it leads out of the submission"),
        ("__MACOSX/../task1/attention.py", "it leads out of the submission"),
        ("task2/../task1/attention.py", "it leads out of the submission"),
        ("/task1/attention.py", "it is an absolute path"),
        ("C:task1/attention.py", "it is an absolute path"),
        ("task1\\attention.py", "it has a backslash"),
        ("task1/attention.py\0.txt", "it has a NUL"),
        ("x/" * 30 + "task1/attention.py", "it has more than 24 folders or 400 characters"),
        ("x" * 500 + "/task1/attention.py", "it has more than 24 folders or 400 characters"),
    ],
)
def test_names_in_a_zip_that_are_never_used(tmp_path, name, why):
    path = zipped(tmp_path / "x.zip", {KERNEL: b"k", name: b"evil"})
    found = contents(path)
    assert found.files == {KERNEL: b"k"} and len(found.ignored) == 1
    assert len(found.problems) == 2 and found.problems[1] == f"{ANSWER} is missing"
    assert found.problems[0] == f"{found.ignored[0]} is not used: {why}"
    assert found.ignored[0].isprintable() and len(found.ignored[0]) < 250


def test_many_such_names_are_counted(tmp_path):
    path = zipped(tmp_path / "x.zip", GOOD | {f"../{n}": b"" for n in range(9)})
    assert contents(path).problems[-1] == "4 more such names are not used"
    only = zipped(tmp_path / "y.zip", {"task1\\attention.py": b""})
    assert r"it holds nothing; task1\attention.py is not used: it has a backslash" in error(only)


def test_names_that_mean_the_same(tmp_path):
    path = zipped(tmp_path / "x.zip", {f"./{name}": data for name, data in GOOD.items()})
    assert contents(path).files == GOOD
    for name in (ANSWER, f"./{ANSWER}", "task1//attention.py"):
        path = zipped(tmp_path / "x.zip", [*GOOD.items(), (name, b"second")])
        assert problem(path) == f"{ANSWER} is unclear: it is there more than once"
    path = zipped(tmp_path / "x.zip", [*GOOD.items(), (f"{ANSWER}/", b"")])
    assert problem(path) == f"{ANSWER} is unclear: it is there more than once"


@pytest.mark.parametrize(
    "kind, what",
    [(stat.S_IFLNK, "a symbolic link"), (stat.S_IFIFO, "a FIFO"), (stat.S_IFBLK, "a device")],
)
def test_links_and_devices_in_a_zip(tmp_path, kind, what):
    path = zipped(tmp_path / "x.zip", {ANSWER: b"/etc/passwd"}, mode=kind | 0o777)
    assert problem(path, [ANSWER]) == f"{ANSWER} is missing: it is {what}"
    zipped(path, {"task1": b"/etc"}, mode=kind | 0o777)
    with zipfile.ZipFile(path, "a") as archive:
        for name, data in GOOD.items():
            archive.writestr(name, data)
    assert problem(path) == f"{ANSWER} is missing: task1 is {what}"


def test_entries_of_folders(tmp_path):
    path = zipped(tmp_path / "x.zip", {"c/": b"", "c/task1/": b"", f"c/{KERNEL}": b"k"})
    assert (problem(path), contents(path).ignored) == (f"{ANSWER} is missing", [])
    path = zipped(tmp_path / "y.zip", {"task1": b""}, mode=stat.S_IFDIR)
    assert error(path).endswith("it holds task1 (a folder)")


def test_only_wanted_files_are_decompressed(tmp_path, monkeypatch):
    path = zipped(tmp_path / "x.zip", GOOD | {"task1/more.py": b"", "inner.zip": b"PK"})
    real, names = zipfile.ZipFile.open, []

    def note(self, info, *arguments, **options):
        names.append(info.filename)
        return real(self, info, *arguments, **options)

    monkeypatch.setattr(zipfile.ZipFile, "open", note)
    for way in ("extract", "extractall"):
        monkeypatch.setattr(zipfile.ZipFile, way, None)
    assert contents(path).files == GOOD and sorted(names) == sorted(GOOD)
    assert os.listdir(tmp_path) == ["x.zip"]


SIZES = {"compressed": (18, 20), "size": (22, 24)}  # where they are in a local and a central header


@pytest.mark.parametrize(
    "size, what, value, says",
    [
        (40 << 20, "size", 1000, "it is damaged (Bad CRC-32"),
        (40 << 20, "size", 0xFFFFFFFE, "4,294,967,294 bytes; at most"),
        (40 << 20, "compressed", 1 << 30, "1,073,741,824 bytes; at most"),
        (9 << 20, "size", MAX_FILE, "it is damaged (9,437,184 of 10,485,760 bytes)"),
        (9 << 20, "compressed", 1000, "it is damaged ("),
    ],
)
def test_declared_sizes_lie(tmp_path, size, what, value, says):
    path = zipped(tmp_path / "x.zip", {ANSWER: bytes(size)})
    for place, offset in zip((LOCAL, CENTRAL), SIZES[what], strict=True):
        patch(path, place, offset, "I", value)
    tracemalloc.start()
    said = problem(path, [ANSWER])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert f"{ANSWER} is not taken: " in said and says in said
    assert peak < 3 * MAX_FILE, "no more is decompressed than may be read"


def test_a_list_of_files_that_is_too_long(tmp_path):
    path = tmp_path / "x.zip"
    with path.open("wb") as file:
        size = file.truncate(archives.MAX_LIST + 1)
        file.seek(size)
        file.write(struct.pack("<4s4H2IH", END, 0, 0, 1, 1, size, 0, 0))
    assert error(path) == "its list of files is larger than 16,777,216 bytes"


@pytest.mark.parametrize(
    "method, says",
    [(zipfile.ZIP_LZMA, "compression method 14"), (zipfile.ZIP_BZIP2, "compression method 12")],
)
def test_other_compressions_are_refused(tmp_path, method, says):
    assert says in problem(zipped(tmp_path / "x.zip", {ANSWER: b"a"}, method=method), [ANSWER])


def test_stored_files(tmp_path):
    assert contents(zipped(tmp_path / "x.zip", method=zipfile.ZIP_STORED)).files == GOOD


def test_an_encrypted_file(tmp_path):
    path = zipped(tmp_path / "x.zip", {ANSWER: b"a", KERNEL: b"k"})
    patch(path, CENTRAL, 8, "H", 1)
    assert problem(path) == f"{ANSWER} is not taken: it is encrypted"
    assert contents(path).files == {KERNEL: b"k"}


@pytest.mark.parametrize(
    "place, offset, says",
    [(LOCAL, 0, "Bad magic number"), (LOCAL, 31, "differ"), (CENTRAL, 16, "Bad CRC-32")],
)
def test_a_damaged_file_stops_no_other(tmp_path, place, offset, says):
    path = zipped(tmp_path / "x.zip", {ANSWER: b"a", KERNEL: b"k"})
    patch(path, place, offset, "B", 0x7E)
    assert f"{ANSWER} is not taken: it is damaged" in problem(path) and says in problem(path)
    assert contents(path).files == {KERNEL: b"k"}


def test_a_damaged_zip(tmp_path):
    path = zipped(tmp_path / "x.zip")
    whole = path.read_bytes()
    for wrong in (whole[: len(whole) // 2], whole[:-5], b"", b"text"):
        path.write_bytes(wrong)
        assert "it is damaged or not a zip" in error(path)
    zipped(path, GOOD | {"ü": b""})
    path.write_bytes(path.read_bytes().replace("ü".encode(), b"\xff\xff"))
    assert "can't decode" in error(path)


def test_no_bytes_give_another_error(tmp_path):
    path = zipped(tmp_path / "x.zip", GOOD | {"task1/": b"", "x" * 50: b""})
    whole, dice, read_well = path.read_bytes(), random.Random(0), 0
    for _ in range(400):
        data = bytearray(whole)
        for _ in range(dice.randint(1, 4)):
            data[dice.randrange(len(data))] = dice.choice([0, 0xFF, dice.randrange(256)])
        path.write_bytes(data)
        try:
            read_well += set(contents(path).files) <= set(GOOD)
        except SubmissionError as said:
            assert str(said).isprintable()
    assert 50 < read_well < 400


# Git bundles --------------------------------------------------------------------------------------

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def git(path, *arguments, text=None, data=None):
    identity = ["-c", "user.name=x", "-c", "user.email=x", "-c", "protocol.file.allow=always"]
    said = data if data is not None else (text or "").encode()
    command = ["git", *identity, "-c", "init.defaultBranch=main", *arguments]
    done = subprocess.run(command, cwd=path, input=said, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode().strip()


@pytest.fixture
def repository(tmp_path):
    path = folder(tmp_path / "work")
    git(path, "init", "-q")
    commit(path)
    return path


def commit(path):
    git(path, "add", ".")
    git(path, "commit", "-q", "-m", "x")


def bundle(path, *what):
    git(path, "bundle", "create", "-q", "../x.bundle", *(what or ["--all"]))
    return path.parent / "x.bundle"


def commit_of(path, tree):
    git(path, "update-ref", "refs/heads/main", git(path, "commit-tree", "-m", "x", tree))
    return bundle(path, "main")


@needs_git
def test_a_bundle(repository, tmp_path, monkeypatch):
    folder(repository, {"common/ü.py": b""})
    commit(repository)
    path = bundle(repository)
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(archives.tempfile, "tempdir", str(tmp_path / "scratch"))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("GIT_OBJECT_DIRECTORY", str(tmp_path / "elsewhere"))
    found = contents(path)
    assert (found.files, found.ignored, found.problems) == (GOOD, ["common/ü.py"], [])
    assert not os.listdir(tmp_path / "scratch") and not (tmp_path / "elsewhere").exists()
    assert find([path]).submissions == [Submission("x", path)]


@needs_git
@pytest.mark.parametrize(
    "what, branch",
    [
        (["HEAD"], "mine"),
        (["--all"], "mine"),
        (["main", "other"], "main"),
        (["master", "other"], "master"),
        (["mine"], "mine"),
        (["--branches", "--tags"], "main"),
    ],
)
def test_which_branch_counts(repository, what, branch):
    for name in ("mine", "master", "other"):
        git(repository, "checkout", "-q", "-b", name)
        (repository / KERNEL).write_text(name)
        commit(repository)
    git(repository, "tag", "t")
    git(repository, "checkout", "-q", "mine")
    expected = {"main": GOOD[KERNEL]}.get(branch, branch.encode())
    assert contents(bundle(repository, *what)).files[KERNEL] == expected


@needs_git
def test_a_detached_head_and_no_branch(repository):
    git(repository, "checkout", "-q", "--detach")
    (repository / KERNEL).write_text("detached")
    commit(repository)
    assert contents(bundle(repository, "HEAD")).files[KERNEL] == b"detached"
    git(repository, "tag", "t")
    assert error(bundle(repository, "t")) == (
        "it must have HEAD, main, master or one branch; it has none"
    )
    git(repository, "branch", "a")
    git(repository, "branch", "b\u2028c")
    assert error(bundle(repository, "a", "b\u2028c")).endswith(r"it has a, b\u2028c")


@needs_git
def test_a_bundle_without_its_first_commits(repository):
    git(repository, "commit", "-q", "--allow-empty", "-m", "y")
    assert "lacks these prerequisite commits" in error(bundle(repository, "main~1..main"))


@needs_git
def test_links_and_submodules_in_a_bundle(repository):
    os.unlink(repository / ANSWER)
    os.symlink("/etc/passwd", repository / ANSWER)
    git(repository, "add", ".")
    shutil.rmtree(repository / "task2")
    head = git(repository, "rev-parse", "HEAD")
    git(repository, "update-index", "--cacheinfo", f"160000,{head},{KERNEL}")
    git(repository, "commit", "-qm", "y")
    assert contents(bundle(repository)).problems == [
        f"{ANSWER} is missing: it is a symbolic link",
        f"{KERNEL} is missing: it is a submodule",
    ]


@needs_git
def test_nothing_of_a_bundle_is_executed(repository, tmp_path, monkeypatch):
    (repository / ".gitattributes").write_text("* filter=evil eol=crlf ident\n")
    commit(repository)
    path = bundle(repository)
    done = tmp_path / "done"
    template = tmp_path / "template/hooks"
    template.mkdir(parents=True)
    for hook in ("post-checkout", "reference-transaction", "post-index-change"):
        (template / hook).write_text(f"#!/bin/sh\ntouch {done}\n")
        (template / hook).chmod(0o755)
    config = tmp_path / "config"
    config.write_text(
        f"[init]\ntemplateDir = {template.parent}\n[core]\nhooksPath = {template}\n"
        f'[filter "evil"]\nsmudge = touch {done}; cat\n[core]\nfsmonitor = touch {done}\n'
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    monkeypatch.setenv("GIT_TEMPLATE_DIR", str(template.parent))
    assert contents(path).files == GOOD
    assert not done.exists()


@needs_git
def test_what_is_no_bundle_is_not_given_to_git(repository, tmp_path):
    for text in (f"gitdir: {repository}/.git\n", "", "PK", "# v9 git bundle\n"):
        (tmp_path / "x.bundle").write_text(text)
        assert error(tmp_path / "x.bundle") == "it is not a git bundle"


@needs_git
def test_a_damaged_bundle(repository):
    path = bundle(repository)
    whole = path.read_bytes()
    for wrong in (whole[:-30], whole[:60], whole[:-25] + b"\0\0" + whole[-23:]):
        path.write_bytes(wrong)
        assert error(path).startswith("git bundle: ")


@needs_git
def test_sizes_in_a_bundle(repository, monkeypatch):
    (repository / KERNEL).write_bytes(bytes(5 << 20))
    (repository / ANSWER).write_bytes(bytes(MAX_FILE + 1))
    commit(repository)
    path = bundle(repository)
    assert problem(path) == f"{ANSWER} is not taken: 10,485,761 bytes; at most 10,485,760 are read"
    assert contents(path).files == {KERNEL: bytes(5 << 20)}
    monkeypatch.setattr(archives, "MAX_BUNDLE", 1000)
    assert "bytes; at most 1,000 are read" in error(path)


def tree(path, *entries):
    """A tree as no git would write it."""
    data = b"".join(f"{mode} {name}\0".encode() + bytes.fromhex(oid) for mode, name, oid in entries)
    return git(path, "hash-object", "-t", "tree", "--literally", "-w", "--stdin", data=data)


@needs_git
def test_names_in_a_bundle_that_are_never_used(repository):
    blob = git(repository, "hash-object", "-w", "--stdin", text="evil")
    inner = tree(repository, ("100644", "attention.py", blob))
    dots = tree(repository, ("40000", "task1", inner))
    path = commit_of(repository, tree(repository, ("40000", "..", dots), ("40000", "task1", inner)))
    assert problem(path, [ANSWER]) == f"../{ANSWER} is not used: it leads out of the submission"
    twice = tree(repository, ("40000", "task1", inner), ("100644", ANSWER, blob))
    path = commit_of(repository, twice)
    assert problem(path, [ANSWER]) == f"{ANSWER} is unclear: it is there more than once"


@needs_git
def test_a_small_bundle_with_many_files(repository):
    oid, mode = git(repository, "hash-object", "-w", "--stdin", text=""), "100644"
    for _ in range(12):  # 10^12 files
        oid, mode = tree(repository, *((mode, f"a{n}", oid) for n in range(10))), "40000"
    assert "git ls-tree: ended with status" in error(commit_of(repository, oid))


def fake_git(tmp_path, monkeypatch, script):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/git").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "bin/git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "x.bundle").write_text("# v2 git bundle\n")
    return error(tmp_path / "x.bundle")


def test_git_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "GIT_SECONDS", 1)
    assert fake_git(tmp_path, monkeypatch, "sleep 60") == "git init took more than 1 seconds"


def test_git_is_limited(tmp_path, monkeypatch):
    script = 'echo "$(ulimit -c) $(ulimit -t) $(ulimit -f)" >&2; exit 1'
    said = fake_git(tmp_path, monkeypatch, script)
    assert said == f"git init: 0 60 {archives.MAX_LIST >> 9}"


def test_git_has_no_settings_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_SSH_COMMAND", "evil")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "config"))
    script = 'shift 6; echo "$@" $(env | grep ^GIT_ | sort) >&2; exit 1'  # 6: its -c options
    assert fake_git(tmp_path, monkeypatch, script) == (
        "git init: init --quiet --bare --template= . GIT_ALLOW_PROTOCOL="
        " GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1 GIT_DIR=. GIT_TERMINAL_PROMPT=0"
    )


def test_without_git(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "x.bundle").write_text("# v2 git bundle\n")
    assert error(tmp_path / "x.bundle") == "a bundle needs git, and there is none on PATH"
