"""Folders, zips and git bundles of strangers, as lists of entries.

Nothing is executed, and nothing is written to disk under a name of theirs. A file is opened or decompressed only when
its entry is read, up to ``MAX_FILE`` bytes. Links are never followed.
"""

import os
import re
import shutil
import stat
import tempfile
import zipfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from common import child

TASKS = frozenset(f"task{n}" for n in range(1, 8))  # the root of a submission holds these folders
CACHES = (".build", "__pycache__", ".pytest_cache", ".ruff_cache")
SKIPPED = frozenset((".git", ".venv", *CACHES, "__MACOSX", ".DS_Store"))
MAX_FILE = 10 << 20  # bytes of a file that is read
MAX_FOLDERS = 20_000  # that are listed
MAX_DEPTH = 24  # of a file below the top
MAX_LIST = 16 << 20  # bytes of a zip's list of files, and of what git writes
MAX_BUNDLE = 200 << 20  # bytes
GIT_SECONDS = 60  # for each call of git
GIT_MEMORY = 2 << 30  # bytes

FILE, FOLDER = "a file", "a folder"
_KINDS = {
    stat.S_IFREG: FILE,
    0: FILE,  # a zip that was made without Unix modes
    stat.S_IFDIR: FOLDER,
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    0o160000: "a submodule",  # in a git tree
}


class SubmissionError(ValueError):
    """A submission that cannot be read at all; the text says why."""


class RefusedError(ValueError):
    """A file that is not taken; the text ends a sentence that begins with its name."""


class Entry(NamedTuple):
    """Something in a submission: its name as it is there, FILE, FOLDER or what else it is, and how to read a file."""

    name: str
    kind: str
    read: Callable[[], bytes] = bytes


def shown(name: str) -> str:
    """A name that can be printed: not too long, control characters and broken encodings escaped."""
    name = name if len(name) <= 200 else f"{name[:200]}..."
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "a device")


def _check_size(size: int) -> None:
    if size > MAX_FILE:
        raise RefusedError(f"is not taken: {size:,} bytes; at most {MAX_FILE:,} are read")


@contextmanager
def opened(path: Path) -> Iterator[Iterator[Entry]]:
    """The entries of a folder, a .zip or a .bundle; they can be read inside of ``with``.

    Reading one raises RefusedError if it cannot be taken.

    Raises:
        SubmissionError, OSError: it cannot be listed; also while the entries are listed.
    """
    if path.is_dir():
        yield _folder(path)
    elif path.suffix.lower() == ".zip":
        with _Bounded(path) as file:
            yield _zip(file)
    elif path.suffix.lower() == ".bundle":
        with tempfile.TemporaryDirectory(prefix="submission-") as scratch:
            yield _bundle(path, Path(scratch))
    else:
        raise SubmissionError("expected a folder, .zip or .bundle")


# Folders ----------------------------------------------------------------------------------------------


def _folder(top: Path) -> Iterator[Entry]:
    """Breadth first, and the tasks first: what counts comes before a limit is reached."""
    queue = deque([""])
    for _ in range(MAX_FOLDERS):
        if not queue:
            break
        folder = queue.popleft()
        inner = []
        try:
            with os.scandir(top / folder) as there:
                for item in there:
                    name = f"{folder}/{item.name}".lstrip("/")
                    if item.is_dir(follow_symlinks=False):
                        inner.append(name)
                    elif item.is_file(follow_symlinks=False):
                        yield Entry(name, FILE, partial(_read_file, top, name))
                    else:
                        yield Entry(name, _kind(item.stat(follow_symlinks=False).st_mode))
        except OSError as error:
            if not folder:
                raise
            yield Entry(folder, f"a folder that cannot be read ({error.strerror})")
        for name in sorted(inner, key=lambda name: (name.rpartition("/")[2] not in TASKS, name)):
            yield Entry(name, FOLDER)
            if name.rpartition("/")[2] not in SKIPPED and name.count("/") < MAX_DEPTH:
                queue.append(name)


def _read_file(top: Path, path: str) -> bytes:
    """Opened one folder at a time, so that no part of the path can have become a link since it was listed."""
    folders, _, name = path.rpartition("/")
    try:
        with ExitStack() as stack:
            at = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, at)
            for folder in filter(None, folders.split("/")):
                at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
                stack.callback(os.close, at)
            number = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)
            file = stack.enter_context(open(number, "rb"))
            before = os.fstat(number)
            if not stat.S_ISREG(before.st_mode):
                raise RefusedError(f"is missing: it is {_kind(before.st_mode)}")
            if before.st_nlink > 1:
                raise RefusedError("is missing: it is a hard link, one of several names of a file")
            _check_size(before.st_size)
            data = file.read(MAX_FILE + 1)
            after = os.fstat(number)
    except OSError as error:
        raise RefusedError(f"cannot be read: {error.strerror}") from None
    if len(data) != before.st_size or before.st_mtime_ns != after.st_mtime_ns:
        raise RefusedError("is not taken: it changed while it was read")
    return data


# Zips -------------------------------------------------------------------------------------------------


class _Bounded(FileIO):
    """A file for zipfile, which reads a zip's list of files in one piece, at the size that the zip declares."""

    def read(self, size: int | None = -1, /) -> bytes:
        size = -1 if size is None else size
        if size > MAX_LIST:
            raise SubmissionError(f"its list of files is larger than {MAX_LIST:,} bytes")
        return super().read(size if size >= 0 else MAX_LIST) or b""


def _zip(file: FileIO) -> Iterator[Entry]:
    try:
        archive = zipfile.ZipFile(file)
    except (SubmissionError, OSError):
        raise
    except Exception as error:  # on what is no zip, zipfile raises errors of many types
        raise SubmissionError(f"it is damaged or not a zip ({shown(str(error))})") from None
    for info in archive.infolist():
        name, mode = info.orig_filename, info.external_attr >> 16  # info.filename ends at a NUL
        kind = FOLDER if name.endswith("/") else _kind(mode)
        yield Entry(name, kind, partial(_decompress, archive, info))


def _decompress(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    if info.flag_bits & 0x1:
        raise RefusedError("is not taken: it is encrypted")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        # LZMA would allocate a dictionary of the size that the zip asks for.
        raise RefusedError(
            f"is not taken: compression method {info.compress_type}; expected 0 or 8"
        )
    _check_size(max(info.file_size, info.compress_size))
    try:
        with archive.open(info) as stream:
            data = stream.read(MAX_FILE + 1)  # ends at the declared size, and checks the CRC there
    except Exception as error:
        raise RefusedError(f"is not taken: it is damaged ({shown(str(error))})") from None
    if len(data) != info.file_size:
        raise RefusedError(
            f"is not taken: it is damaged ({len(data):,} of {info.file_size:,} bytes)"
        )
    return data


# Git bundles ------------------------------------------------------------------------------------------

# Arguments: the file of its output and that file's limit in blocks of 512 bytes, kilobytes of memory, seconds.
_LIMITED = """
out=$1; ulimit -c 0; ulimit -f "$2"; ulimit -v "$3" 2>/dev/null || :; ulimit -t "$4"
shift 4; exec "$@" >"$out"
"""


def _bundle(path: Path, scratch: Path) -> Iterator[Entry]:
    """The objects come into an empty repository. That is no clone: no remote, no branch, no hook, no work tree."""
    if shutil.which("git") is None:
        raise SubmissionError("a bundle needs git, and there is none on PATH")
    with path.open("rb") as file:
        if not re.match(rb"# v[23] git bundle\n", file.read(32)):
            raise SubmissionError("it is not a git bundle")
    if (size := path.stat().st_size) > MAX_BUNDLE:
        raise SubmissionError(f"{size:,} bytes; at most {MAX_BUNDLE:,} are read")
    _git(scratch, "init", "--quiet", "--bare", "--template=", ".")
    heads = _git(scratch, "bundle", "unbundle", str(path.absolute()), limit=MAX_BUNDLE)
    lines = [line.partition(" ") for line in os.fsdecode(heads).split("\n")]
    commit = _head({name: commit for commit, _, name in lines})
    tree = _git(scratch, "ls-tree", "-r", "-z", "-l", "--full-tree", commit)
    for line in filter(None, tree.split(b"\0")):
        attributes, _, name = line.partition(b"\t")
        mode, _, blob, size_ = attributes.decode().split()
        yield Entry(os.fsdecode(name), _kind(int(mode, 8)), partial(_blob, scratch, blob, size_))


def _head(heads: dict[str, str]) -> str:
    """The commit of HEAD, main, master, or the only branch."""
    branches = [name for name in heads if name.startswith("refs/heads/")]
    only = branches if len(branches) == 1 else []
    for name in ("HEAD", "refs/heads/main", "refs/heads/master", *only):
        if name in heads:
            return heads[name]
    names = ", ".join(shown(name.removeprefix("refs/heads/")) for name in branches[:5])
    raise SubmissionError(
        f"it must have HEAD, main, master or one branch; it has {names or 'none'}"
    )


def _blob(scratch: Path, blob: str, size: str) -> bytes:
    if not size.isdecimal():
        raise RefusedError("is not taken: it is damaged (no such object)")
    _check_size(int(size))
    try:
        return _git(scratch, "cat-file", "blob", blob)
    except SubmissionError as error:
        raise RefusedError(f"is not taken: {error}") from None


def _git(scratch: Path, *arguments: str, limit: int = MAX_LIST) -> bytes:
    """What git writes, in the repository ``scratch``, without the settings of this machine and its user."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    fixed = {
        "GIT_DIR": ".",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_ALLOW_PROTOCOL": "",  # nothing is fetched
        "GIT_TERMINAL_PROMPT": "0",
        "LC_ALL": "C",
    }
    settings = ("core.hooksPath=/dev/null", "pack.threads=1", "core.bigFileThreshold=16m")
    command = ["git", *(word for setting in settings for word in ("-c", setting)), *arguments]
    limits = [str(number) for number in (limit >> 9, GIT_MEMORY >> 10, GIT_SECONDS)]
    said: deque[str] = deque(maxlen=3)
    status = child.run(
        ["sh", "-c", _LIMITED, "sh", "output", *limits, *command],
        GIT_SECONDS,
        said.append,
        cwd=scratch,
        env=own | fixed,
    )
    if status is None:
        raise SubmissionError(f"git {arguments[0]} took more than {GIT_SECONDS} seconds")
    if status:
        why = " ".join(said) or f"ended with status {status}; it may have reached a limit"
        raise SubmissionError(f"git {arguments[0]}: {shown(why)}")
    if (output := scratch / "output").stat().st_size > MAX_LIST:
        raise SubmissionError(f"git {arguments[0]} wrote more than {MAX_LIST:,} bytes")
    return output.read_bytes()
