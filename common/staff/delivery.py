"""Files as a folder, a zip or a git repository, whole or not at all.

They are written into a folder of their own beside the destination, which gets its name at the very end.
"""

import os
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from common.paths import ROOT

AUTHOR, MAIL = "Course", "course@localhost"
MESSAGE = "Attention in seven stages"
EPOCH = "2000-01-01T00:00:00+00:00"  # the commit's date where the checkout has no commit to take it from
ZIP_DATE = (2000, 1, 1, 0, 0, 0)  # so that the same files give the same zip


class DeliveryError(ValueError):
    """The files cannot be delivered like this; the text says what was expected and what came."""


@dataclass(frozen=True)
class File:
    """A file to deliver."""

    path: str
    data: bytes
    executable: bool = False


def check(destination: Path, *, git: bool) -> None:
    """Errors that need no file to be written.

    Raises:
        FileExistsError: there is something at the destination already.
        DeliveryError: the destination is inside of this checkout, or ``git`` does not go with it.
    """
    if _is_zip(destination):
        if git:
            raise DeliveryError(f"--git makes a directory; got {destination}, which is a zip")
        if destination.exists():
            raise FileExistsError(f"{destination} must be a new file; it exists")
    elif destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise FileExistsError(f"{destination} must be a new or an empty directory")
    if destination.resolve().is_relative_to(ROOT):
        raise DeliveryError(
            f"{destination} must be outside of {ROOT}: the next edition would take its files for the course's"
        )
    if git and shutil.which("git") is None:
        raise DeliveryError("--git needs git, and there is none on PATH (sudo apt install git)")


def deliver(files: Sequence[File], destination: Path, *, git: bool = False) -> None:
    """Write the files to ``destination``: a folder, a git repository, or a zip if its name ends in ``.zip``.

    Raises:
        FileExistsError, DeliveryError: see :func:`check`; or git failed.
        OSError: something cannot be written.
    """
    check(destination, git=git)
    destination = destination.resolve()
    with _scratch(destination) as scratch:
        ready = scratch / destination.name
        if _is_zip(destination):
            _zip(files, ready, destination.stem)
        else:
            _write(files, ready)
            if git:
                _commit(ready)
        _publish(ready, destination)


def _is_zip(destination: Path) -> bool:
    return destination.suffix.lower() == ".zip"


@contextmanager
def _scratch(destination: Path) -> Iterator[Path]:
    """A folder on the destination's file system, which is gone afterwards."""
    above = destination
    while not above.is_dir():
        if above.exists():
            raise FileExistsError(f"{destination}: {above} is a file, not a directory")
        above = above.parent
    scratch = Path(tempfile.mkdtemp(prefix=".student-edition-", dir=above))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write(files: Sequence[File], folder: Path) -> None:
    for file in files:
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.data)
        if file.executable:
            path.chmod(path.stat().st_mode | 0o111)


def _zip(files: Sequence[File], path: Path, top: str) -> None:
    """All files below one folder, so that they do not mix with others when unpacked."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            entry = zipfile.ZipInfo(f"{top}/{file.path}", ZIP_DATE)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3  # Unix: the next line is a mode
            entry.external_attr = (0o100755 if file.executable else 0o100644) << 16
            archive.writestr(entry, file.data)


def _publish(ready: Path, destination: Path) -> None:
    """Give it its name. An empty directory that exists is filled, because it may be a mount point."""
    if not destination.is_dir():
        made = [p for p in destination.parents if not p.exists()]
        try:
            destination.parent.mkdir(parents=True, exist_ok=True)
            os.rename(ready, destination)
        except BaseException:
            for folder in filter(Path.is_dir, made):
                folder.rmdir()
            raise
        return
    moved: list[Path] = []
    try:
        for path in ready.iterdir():
            moved.append(destination / path.name)
            os.rename(path, moved[-1])
    except BaseException:
        for path in moved:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        raise


# git --------------------------------------------------------------------------------------------------


def _commit(folder: Path) -> None:
    """A repository with one commit. The same files from the same commit of the course give the same commit."""
    date = _date_of_course()
    _git(folder, "init", "--quiet", "--template=")
    _git(folder, "symbolic-ref", "HEAD", "refs/heads/main")
    _git(folder, "add", "--all", "--force", ".")
    _git(folder, "commit", "--quiet", "--no-verify", "--message", MESSAGE, date=date)


def _git(folder: Path, *arguments: str, date: str = EPOCH) -> str:
    """Run git with the author and the date fixed, and without the settings of this machine and its user."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    fixed = {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_AUTHOR_NAME": AUTHOR,
        "GIT_AUTHOR_EMAIL": MAIL,
        "GIT_AUTHOR_DATE": date,
        "GIT_COMMITTER_NAME": AUTHOR,
        "GIT_COMMITTER_EMAIL": MAIL,
        "GIT_COMMITTER_DATE": date,
        "LC_ALL": "C",
    }
    command = ["git", "-c", "core.autocrlf=false", "-c", "commit.gpgSign=false", *arguments]
    try:
        done = subprocess.run(
            command, cwd=folder, env=own | fixed, capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise DeliveryError(f"git does not run: {error.strerror}") from None
    if done.returncode:
        raise DeliveryError(f"git {arguments[0]} failed: {done.stderr.strip() or done.returncode}")
    return done.stdout.strip()


def _date_of_course() -> str:
    """When this checkout's last commit was made; ``EPOCH`` where it has none."""
    try:
        return _git(ROOT, "log", "-1", "--format=%cI") or EPOCH
    except DeliveryError:
        return EPOCH
