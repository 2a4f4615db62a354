"""A student edition as a folder, a repository or a zip: whole, or not there."""

import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile

import pytest

from common.staff import delivery
from common.staff.student_edition import ROOT, contents, main, make

FILES = {file.path for file in contents()[0]}


def left_in(folder):
    return sorted(path.name for path in folder.iterdir())


def git(folder, *arguments):
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


@needs_git
def test_a_repository_has_one_commit_and_is_clean(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_AUTHOR_NAME", "somebody")
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    make(tmp_path / "a", git=True)
    make(tmp_path / "b", git=True)
    monkeypatch.undo()
    assert git(tmp_path / "a", "rev-list", "--all", "--count") == "1"
    assert git(tmp_path / "a", "status", "--porcelain", "--ignored") == ""
    assert git(tmp_path / "a", "symbolic-ref", "--short", "HEAD") == "main"
    people = git(tmp_path / "a", "log", "--format=%an <%ae> %cn <%ce>")
    assert people == "Course <course@localhost> Course <course@localhost>"
    assert set(git(tmp_path / "a", "ls-files").splitlines()) == FILES
    heads = {git(tmp_path / name, "rev-parse", "HEAD") for name in "ab"}
    assert len(heads) == 1, "the same files give the same commit"
    assert left_in(tmp_path) == ["a", "b"]


def test_a_zip_has_the_same_files_below_one_folder(tmp_path):
    make(tmp_path / "new" / "course.zip")
    make(tmp_path / "again" / "course.zip")
    with zipfile.ZipFile(tmp_path / "new/course.zip") as archive:
        assert archive.testzip() is None
        assert set(archive.namelist()) == {f"course/{file}" for file in FILES}
        text = archive.read("course/task2/attention_kernel.cu").decode()
    assert "YOUR CODE HERE" in text and "STAFF" not in text
    assert left_in(tmp_path / "new") == ["course.zip"]
    zips = [(tmp_path / name / "course.zip").read_bytes() for name in ("new", "again")]
    assert zips[0] == zips[1], "the same files give the same zip"


@pytest.mark.parametrize(
    "name, options, error",
    [
        ("used", {}, "new or an empty directory"),
        ("used/file", {}, "new or an empty directory"),
        ("used/file/below", {}, "is a file, not a directory"),
        ("used.zip", {}, "must be a new file"),
        ("x.zip", {"git": True}, "--git makes a directory; got .*x.zip"),
        (ROOT / "edition", {}, "must be outside of"),
    ],
)
def test_a_wrong_destination_is_refused(tmp_path, name, options, error):
    (tmp_path / "used").mkdir()
    (tmp_path / "used/file").write_text("mine")
    (tmp_path / "used.zip").write_text("mine")
    with pytest.raises((FileExistsError, delivery.DeliveryError), match=error):
        make(tmp_path / name, **options)
    assert left_in(tmp_path) == ["used", "used.zip"] and left_in(tmp_path / "used") == ["file"]
    assert (tmp_path / "used.zip").read_text() == (tmp_path / "used/file").read_text() == "mine"
    assert not (ROOT / "edition").exists()


@pytest.mark.parametrize("before", ["nothing", "an empty directory"])
@pytest.mark.parametrize("name", ["e", "deep/er/e", "e.zip"])
@pytest.mark.parametrize("stage", ["_write", "_zip", "_publish"])
def test_a_failed_run_leaves_nothing(tmp_path, monkeypatch, before, name, stage):
    destination = tmp_path / name
    if before == "an empty directory" and not name.endswith(".zip"):
        destination.mkdir(parents=True)
    there = sorted(tmp_path.rglob("*"))
    real = getattr(delivery, stage)

    def fail(*arguments):
        if stage != "_publish":
            real(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(delivery, stage, fail)
    if (stage == "_zip") == name.endswith(".zip") or stage == "_publish":
        with pytest.raises(KeyboardInterrupt):
            make(destination)
        assert sorted(tmp_path.rglob("*")) == there


def test_a_move_that_fails_is_undone(tmp_path, monkeypatch):
    (tmp_path / "e").mkdir()
    real, calls = os.rename, []

    def fail_at_third(source, target):
        calls.append(target)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "rename", fail_at_third)
    with pytest.raises(OSError, match="No space"):
        make(tmp_path / "e")
    assert left_in(tmp_path / "e") == []


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_stopped_leaves_nothing(tmp_path, how):
    slow = (
        "import time; from common.staff import delivery, student_edition as s; real = delivery._write\n"
        "def write(*a): real(*a); print('written', flush=True); time.sleep(60)\n"
        f"delivery._write = write; s.main([{str(tmp_path / 'e')!r}])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", slow], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout.readline() == b"written\n"
    time.sleep(0.1)
    process.send_signal(how)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130 and b"interrupted" in said and b"Traceback" not in said
    assert left_in(tmp_path) == []


def test_without_git_there_is_one_clear_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit) as end:
        main([str(tmp_path / "e"), "--git"])
    assert "error: --git needs git, and there is none on PATH" in str(end.value)
    assert left_in(tmp_path) == []
    main([str(tmp_path / "e")])  # a directory needs no git
    assert (tmp_path / "e/task2/attention_kernel.cu").is_file()


@pytest.mark.parametrize(
    "arguments, says",
    [
        ([], "expected either DESTINATION or --restore EDITION; got none"),
        (["e", "--restore", "e"], "got both"),
        (["--restore", "e", "--git"], "--restore goes with --solved alone"),
        (["e", "--solved", "9"], "of 1, 2, 3, 4, 5, 6; got 9"),
        (["--solved", "7", "e"], "of 1, 2, 3, 4, 5, 6; got 7"),
        (["e", "--solved", "four"], "invalid int value: 'four'"),
    ],
)
def test_wrong_arguments(tmp_path, monkeypatch, capsys, arguments, says):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2 and says in capsys.readouterr().err
    assert left_in(tmp_path) == []


def test_a_place_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(delivery.tempfile, "mkdtemp", refuse)
    with pytest.raises(SystemExit) as end:
        main([str(tmp_path / "e")])
    assert str(end.value) == f"error: cannot write {tmp_path / 'e'}: Permission denied"


def test_the_command_says_what_it_did(tmp_path, capsys):
    main(["--solved", "1", "4", str(tmp_path / "e")])
    said = capsys.readouterr().out.splitlines()
    assert "task2/attention_kernel.cu: 4 to write" in said and "task4: with its answers" in said
    assert said[-1] == f"13 answers cut; the student edition is in {tmp_path / 'e'}"
    main(["--restore", str(tmp_path / "e")])
    assert f"13 answers put back into {tmp_path / 'e'}" in capsys.readouterr().out
