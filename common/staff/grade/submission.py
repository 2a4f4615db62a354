"""What students hand in: which submissions there are, and the wanted files of each.

A submission is a folder, a zip or a git bundle. :mod:`~common.staff.grade.archives` opens it without trusting it; here
is decided which of its files count. A file that is missing, or that two entries could mean, is a sentence for a person.
"""

import os
import re
import unicodedata
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from posixpath import basename, dirname
from typing import NamedTuple

from common.staff.grade.archives import (
    FILE,
    FOLDER,
    MAX_DEPTH,
    SKIPPED,
    TASKS,
    Entry,
    RefusedError,
    SubmissionError,
    opened,
    shown,
)

__all__ = ["Contents", "Found", "Submission", "SubmissionError", "find", "read", "shown"]

MAX_LISTED = 20_000  # files and folders
MAX_PATH = 400  # characters


@dataclass(frozen=True)
class Submission:
    """What one student handed in; the name is unique, and can be a file's name on every system."""

    name: str
    path: Path


class Found(NamedTuple):
    """The submissions by name, and a sentence for each path that is none."""

    submissions: list[Submission]
    others: list[str]


@dataclass(frozen=True)
class Contents:
    """The wanted files; the names of all others, fit to be printed; a sentence for each thing that is wrong."""

    files: dict[str, bytes]
    ignored: list[str]
    problems: list[str]


# Which submissions there are --------------------------------------------------------------------------


def find(paths: Sequence[Path]) -> Found:
    """The submissions at these paths: each is a folder with ``task1`` ..., an archive, or a folder of such.

    A folder with nothing but one archive is this archive, under the folder's name. Links and hidden files in a folder
    are not taken. What is wrong with a path is one of the sentences: nothing is raised.
    """
    taken: dict[Path, str] = {}
    others: list[str] = []
    for path in (Path(os.path.abspath(path)) for path in paths):
        inside = _visible(path)
        several = bool(inside) and TASKS.isdisjoint(entry.name for entry in inside)
        for entry in inside if several else [path]:
            if several and os.path.islink(entry):
                others.append(f"{shown(entry.name)} is a symbolic link")
            elif os.path.isdir(entry):
                held = _visible(entry)
                alone = len(held) == 1 and _is_archive(held[0]) and not os.path.islink(held[0])
                taken[held[0] if alone else entry] = _safe(entry.name)
            elif _is_archive(entry):
                taken[entry] = _safe(entry.stem)
            else:
                wrong = "is not a folder, .zip or .bundle"
                gone = not os.path.lexists(entry)
                others.append(f"{shown(entry.name)} {'does not exist' if gone else wrong}")
    submissions: list[Submission] = []
    used: set[str] = set()
    for path, name in sorted(taken.items(), key=lambda item: (item[1], item[0])):
        unique, count = name, 1
        while unique.casefold() in used:
            count += 1
            unique = f"{name}-{count}"
        used.add(unique.casefold())
        submissions.append(Submission(unique, path))
    return Found(sorted(submissions, key=lambda submission: submission.name), sorted(others))


def _visible(folder: Path) -> list[Path]:
    """What is in a folder; nothing where it cannot be listed: reading it says why."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return [folder / name for name in names if name[0] != "." and name not in SKIPPED]


def _is_archive(path: Path) -> bool:
    return os.path.isfile(path) and path.suffix.lower() in (".zip", ".bundle")


def _safe(name: str) -> str:
    """A file's name on every system, with room for a suffix in 255 bytes."""
    name = unicodedata.normalize("NFC", name)
    kept = "".join(c if c.isprintable() and c not in '<>:"/\\|?*' else "_" for c in name)
    return kept.lstrip(".- ")[:50].rstrip(". ") or "submission"


# What is in one ---------------------------------------------------------------------------------------


def read(submission: Submission, wanted: Collection[str]) -> Contents:
    """The wanted files of a submission, below the shallowest folder that holds ``task1`` ... ``task7``.

    Args:
        submission: from :func:`find`.
        wanted: paths such as ``task2/attention_kernel.cu``.

    Returns:
        The files that are there and can be taken; for the others, ``problems`` has the reason. ``ignored`` has paths
        from the same folder, so that what lies outside of it begins with ``../``; caches and environments are left out.

    Raises:
        SubmissionError: it cannot be read at all.
    """
    listing = _Listing(wanted)
    try:
        with opened(submission.path) as entries:
            for entry in entries:
                listing.add(entry)
            return listing.contents()
    except OSError as error:
        raise SubmissionError(f"it cannot be read: {error.strerror or error}") from None


class _Listing:
    """What a submission has, by path."""

    def __init__(self, wanted: Collection[str]) -> None:
        self.wanted = sorted(set(wanted))
        self.entries: dict[str, Entry] = {}  # without folders
        self.folders: set[str] = set()
        self.twice: set[str] = set()
        self.unsafe: list[tuple[str, str]] = []  # names that are never used, and why
        self.full = False
        self._names = {basename(path).casefold() for path in wanted}

    def add(self, entry: Entry) -> None:
        """Once there are too many, only files that are named like wanted ones are added."""
        parts = [part for part in entry.name.split("/") if part not in ("", ".")]
        path = "/".join(parts)
        if not parts or (".." not in parts and not SKIPPED.isdisjoint(parts)):
            return
        is_wanted = parts[-1].casefold() in self._names
        listed = len(self.entries) + len(self.folders) + len(self.unsafe)
        if listed >= MAX_LISTED * (2 if is_wanted else 1):
            self.full = True
        elif why := _unsafe(entry.name, parts):
            self.unsafe.append((shown(entry.name), why))
        elif entry.kind == FOLDER:
            self.folders.add(path)
        else:
            self.folders.update(_above(path))
            if path in self.entries:
                self.twice.add(path)
            self.entries[path] = entry

    def contents(self) -> Contents:
        """Takes the wanted files.

        Raises:
            SubmissionError: there is no root, or more than one.
        """
        problems = [f"{name} is not used: {why}" for name, why in self.unsafe[:5]]
        if len(self.unsafe) > 5:
            problems.append(f"{len(self.unsafe) - 5:,} more such names are not used")
        if self.full:
            problems.append(f"more than {MAX_LISTED:,} files or folders: not all are listed")
        root, *deeper = self._roots(problems)
        problems += [f"{shown(other)} holds task folders as well; not used" for other in deeper]
        alike = defaultdict(set)
        for path in [*self.entries, *self.folders]:
            alike[_fold(path)].add(path)
        files = {}
        for name in self.wanted:
            path = f"{root}/{name}".lstrip("/")
            try:
                files[name] = self._take(path, alike[_fold(path)])
            except RefusedError as why:
                problems.append(f"{name} {why}")
        theirs = {_from(root, path) for path in self.entries}.difference(self.wanted)
        ignored = [*map(shown, theirs), *(name for name, _ in self.unsafe)]
        return Contents(files, sorted(ignored), problems)

    def _roots(self, problems: Sequence[str]) -> list[str]:
        """The root, and up to five folders further down that look like one."""
        holders = {folder for path in self.entries for folder in _above(path)}  # not the empty ones
        roots = {dirname(folder) for folder in holders if basename(folder) in TASKS}
        ordered = sorted(roots, key=lambda path: (_depth(path), path))
        if not ordered:
            tops = {path.split("/")[0] for path in [*self.entries, *self.folders]}
            kinds = {top: getattr(self.entries.get(top), "kind", FOLDER) for top in sorted(tops)}
            held = [f"{shown(top)} ({kind})" for top, kind in islice(kinds.items(), 5)]
            words = f"it has no folder task1 ... task7; it holds {', '.join(held) or 'nothing'}"
            raise SubmissionError("; ".join([words, *problems[:1]]))
        first = [shown(path) for path in ordered if _depth(path) == _depth(ordered[0])]
        if len(first) > 1:
            raise SubmissionError(f"task folders are in {', '.join(first[:5])}: which count?")
        return ordered[:6]

    def _take(self, path: str, alike: set[str]) -> bytes:
        """A wanted file; ``alike`` are the paths that a file system may not tell from its path."""
        for folder in _above(path):
            if folder in self.entries:
                raise RefusedError(f"is missing: {shown(folder)} is {self.entries[folder].kind}")
        if others := ", ".join(shown(other) for other in sorted(alike - {path})):
            what = "is unclear" if path in alike else "is missing"
            raise RefusedError(f"{what}: {others} differs in upper and lower case")
        if path in self.twice or (path in self.folders and path in self.entries):
            raise RefusedError("is unclear: it is there more than once")
        if path in self.folders:
            raise RefusedError("is missing: it is a folder")
        if path not in self.entries:
            raise RefusedError("is missing")
        if self.entries[path].kind != FILE:
            raise RefusedError(f"is missing: it is {self.entries[path].kind}")
        return self.entries[path].read()


def _unsafe(name: str, parts: Sequence[str]) -> str | None:
    if "\0" in name:
        return "it has a NUL"
    if "\\" in name:
        return "it has a backslash"
    if name.startswith("/") or re.match("[A-Za-z]:", name):
        return "it is an absolute path"
    if ".." in parts:
        return "it leads out of the submission"
    if len(name) > MAX_PATH or len(parts) > MAX_DEPTH:
        return f"it has more than {MAX_DEPTH} folders or {MAX_PATH} characters"
    return None


def _above(path: str) -> Iterator[str]:
    """The folders of a path, outermost first."""
    return accumulate(path.split("/")[:-1], "{}/{}".format)


def _from(root: str, path: str) -> str:
    inside = f"{root}/" if root else ""
    return path[len(inside) :] if path.startswith(inside) else f"{'../' * _depth(root)}{path}"


def _fold(path: str) -> str:
    return unicodedata.normalize("NFC", path).casefold()


def _depth(path: str) -> int:
    return path.count("/") + 1 if path else 0
