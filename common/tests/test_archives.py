"""Zips and git bundles of strangers: nothing is extracted, executed or fetched, and no size is believed."""

import os
import random
import shutil
import stat
import struct
import subprocess
import tracemalloc
import zipfile

import pytest

from common.staff.grade import archives
from common.staff.grade.archives import MAX_FILE
from common.staff.grade.submission import Submission, SubmissionError, find
from common.tests.submissions import (
    ANSWER,
    CENTRAL,
    END,
    GOOD,
    KERNEL,
    LOCAL,
    contents,
    error,
    folder,
    patch,
    problem,
    zipped,
)

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
