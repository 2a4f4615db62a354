"""The course without its answers: ``python -m common.staff.student_edition DESTINATION``.

The edition is made from this checkout's own files; there is no second copy of a task.

- ``LEFT_OUT`` names the files and folders that it does not get.
- Lines between ``BEGIN SOLUTION`` and ``END SOLUTION`` become a placeholder: they are the answers. The marks stay:
  what a student writes goes between them.
- Lines between ``BEGIN STAFF`` and ``END STAFF`` are dropped: they point at something in ``LEFT_OUT``.
- The files below ``TEMPLATES`` are for the edition alone. They come to its root, such as its own README.md.

A mark is a comment on a line of its own: ``# BEGIN STAFF``, ``// BEGIN SOLUTION``, ``<!-- END STAFF -->``.
"""

import argparse
import re
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from common.check.hints import HintError, load, pieces_of
from common.marked import write_atomically
from common.paths import ROOT
from common.record import POINTS, render
from common.regions import MarkError, blocks, join, read, regions, split
from common.staff import delivery

LEFT_OUT = (
    ".ci/",
    ".clang-format",
    "CONTRIBUTING.md",
    # What only the ladder needs of these packages.
    "common/check/hard_inputs.py",
    "common/check/launches.py",
    "common/check/loss.py",
    "common/products/",  # float32 products on tensor cores, an option of common/layer.py
    "common/record/chart.py",
    "common/record/typed.py",
    "common/timing/peers.py",
    "task4/frontends/",
    "common/report/host/",  # the C++ of task4/frontends/
    "common/records/",  # the edition writes its own
    "common/staff/",
    "common/tests/",
    "task5/ladder/",  # the same for decode
    "task6/generation/",  # and for a whole model
    "task4/ladder/",  # faster kernels for task 4; without it custom_flash_attention runs the student's
    "task7/decoder.py",  # GPT-2 by a loop of our own, on task5/ladder/
    "task7/speed.py",  # and its times
    "task7/RESULTS.md",
    "task7/table.json",
    "task7/tiny_gpt2/corpus.py",
    "task7/tiny_gpt2/train.py",
    "task7/tiny_gpt2/training.json",
)
TEMPLATES = "common/staff/edition/"
POLICY = "AGENTS.md"  # what AI assistants are asked to do; a template
SOLVED_HERE = (
    "<!-- solved stages -->\n"  # where README.md says which stages come with their answers
)
MARKED = (".py", ".cu", ".md", ".toml", "Makefile")  # how the names of files with marks end


class RestoreError(ValueError):
    """A folder that is not a student edition."""


@dataclass(frozen=True)
class Answer:
    """An answer: its function, the lines between the marks, and what replaces them."""

    function: str
    lines: str
    placeholder: str


class Cut(NamedTuple):
    """A file for students, and the answers that were cut out of it."""

    text: str
    answers: list[Answer]


def cut(source: str, path: str, *, solved: bool = False) -> Cut:
    """A file without its answers and without what is for staff.

    Between the marks, an answer in Python becomes ``raise NotImplementedError("... is not written yet")``, in CUDA a
    comment. Where an optional part must not stop the others, ``BEGIN SOLUTION, until then: return 1`` names the line
    instead; the edition's mark does not show it. A line above says how much is to be written, if the stage's hints do.
    Lines for staff are dropped, or replaced where ``BEGIN STAFF, for students: return 1`` names a line. The rest of
    the file is unchanged.

    Args:
        source: of the file.
        path: its path in the checkout.
        solved: the answers stay between the marks.

    Raises:
        MarkError: marks that do not pair up.
    """
    sign = "#" if path.endswith(".py") else "//"
    sizes = {piece.name: piece.size for piece in pieces_of(path)}
    lines = split(source)
    kept: list[str] = []
    answers: list[Answer] = []
    at = 0  # the lines before this one are done
    for block in blocks(lines, path, ("SOLUTION", "STAFF")):
        kept += lines[at : block.begin - 1]
        instead = block.instead
        if block.word == "SOLUTION":
            size = sizes.get(block.function)
            placeholder = [f"{sign} {size}"] if size else []
            placeholder.append(instead or _placeholder(path, block.function))
            text = "".join(f"{block.indent}{line}\n" for line in placeholder)
            answer = "".join(lines[block.begin : block.end - 1])
            answers.append(Answer(block.function, answer, text))
            begin = f"{block.indent}{sign} BEGIN SOLUTION\n"
            kept += [begin, answer if solved else text, lines[block.end - 1]]
        elif instead:
            kept.append(f"{block.indent}{instead}\n")
        at = block.end
    return Cut("".join([*kept, *lines[at:]]), answers)


def _placeholder(path: str, function: str) -> str:
    if not path.endswith(".py"):
        return "// YOUR CODE HERE"
    return f'raise NotImplementedError("{function} is not written yet")'


# The whole edition ------------------------------------------------------------------------------------


def make(
    destination: Path,
    *,
    solved: Collection[int] = (),
    ai_policy: bool = True,
    git: bool = False,
) -> dict[str, int]:
    """Write the student edition: a folder, or a zip where the name ends in ``.zip``.

    Args:
        destination: a new path, or an empty directory.
        solved: the stages that keep their answers.
        ai_policy: with ``AGENTS.md``, which asks AI assistants to teach and not to write the answers.
        git: the folder is a git repository with one commit.

    Returns:
        How many answers were cut out of each file that had any.

    Raises:
        FileExistsError: there is something at the destination.
        DeliveryError: it cannot be made like this: inside of this checkout, ``git`` for a zip or without git.
        MarkError, HintError: marks that do not pair up, an answer without hints, hints without an answer.
        OSError: it cannot be written.

    After an error, or when interrupted, nothing is left at the destination.
    """
    files, answers = contents(solved=solved, ai_policy=ai_policy)
    delivery.deliver(files, destination, git=git)
    return answers


def contents(
    *, solved: Collection[int] = (), ai_policy: bool = True
) -> tuple[list[delivery.File], dict[str, int]]:
    """The files of the edition, and how many answers were cut out of each.

    Raises:
        MarkError, HintError: marks that do not pair up, an answer without hints, hints without an answer.
    """
    files: dict[str, delivery.File] = {}
    answers: dict[str, int] = {}
    for file, name in _sources(ai_policy):
        data = (ROOT / file).read_bytes()
        if name.endswith(MARKED):
            text, found = cut(read(ROOT / file, file), file, solved=_stage(file) in solved)
            regions(text, file)  # whoever takes a student's answers out has to find them
            if found and _stage(file) not in solved:
                answers[name] = len(found)
            if name == "Results.md":
                text = render(text, {}, root=ROOT)  # no results yet
            elif file == f"{TEMPLATES}README.md":
                text = text.replace(SOLVED_HERE, _solved_sentence(solved))
            data = text.encode("utf-8")
        files[name] = delivery.File(name, data, bool((ROOT / file).stat().st_mode & 0o100))
    return [files[name] for name in sorted(files)], answers


def _sources(ai_policy: bool) -> Iterator[tuple[str, str]]:
    """The files that the edition is made from, and their names in it; a template comes after what it replaces."""
    tracked = tracked_files()
    yield from ((file, file) for file in tracked if not file.startswith(LEFT_OUT))
    for file in tracked:
        name = file.removeprefix(TEMPLATES)
        if name != file and (ai_policy or name != POLICY):
            yield file, name


def _stage(file: str) -> int | None:
    found = re.match(r"task(\d+)/", file)
    return int(found[1]) if found else None


def _solved_sentence(solved: Collection[int]) -> str:
    if not solved:
        return ""
    numbers = [str(n) for n in sorted(set(solved))]
    listed = " and ".join(filter(None, [", ".join(numbers[:-1]), numbers[-1]]))
    if len(numbers) == 1:
        return f"**Task {listed} is already written.** Read it, because the later tasks build on it.\n\n"
    return f"**Tasks {listed} are already written.** Read them, because the later tasks build on them.\n\n"


def stages_with_answers() -> list[int]:
    """The numbers of the stages that have something to write."""
    return [n for n in (int(name.removeprefix("task")) for name in POINTS) if load(f"task{n}")]


def tracked_files() -> list[str]:
    """Paths of the files that git tracks or would track; without git, all but what was built."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
    except OSError:  # there is no git
        listed = None
    if listed is not None and listed.returncode == 0:
        return sorted(f for f in listed.stdout.split("\0") if f and (ROOT / f).is_file())
    hidden = (".venv", ".build", ".git", ".pytest_cache", ".ruff_cache", "__pycache__")
    found = (p.relative_to(ROOT) for p in ROOT.rglob("*") if p.is_file())
    return sorted(p.as_posix() for p in found if not set(p.parts) & set(hidden))


# Back again -------------------------------------------------------------------------------------------


def restore(edition: Path, *, stages: Collection[int] | None = None) -> dict[str, tuple[int, int]]:
    """Put the answers back into a student edition, wherever the placeholder is still between the marks.

    What a student has written stays. A file in which it is nothing becomes this checkout's file again, byte for byte.

    Args:
        edition: its folder.
        stages: only these; None: all.

    Returns:
        By file: how many answers were put back, and how many places have something that a student wrote.

    Raises:
        RestoreError: the folder lacks a file that has answers.
        MarkError: the marks of a file are broken.

    After an error, nothing is written.
    """
    if not edition.is_dir():
        raise RestoreError(f"{edition} must be the folder of a student edition; it is not a folder")
    new: dict[str, str] = {}
    done: dict[str, tuple[int, int]] = {}
    for stage in stages_with_answers() if stages is None else sorted(stages):
        for file in dict.fromkeys(piece.file for piece in load(f"task{stage}")):
            if not (edition / file).is_file():
                raise RestoreError(f"{edition} must be a student edition; it has no {file}")
            new[file], done[file] = _restored(read(edition / file, file), file)
    for file, text in new.items():
        if text.encode() != (edition / file).read_bytes():
            write_atomically(edition / file, text)
    return done


def _restored(now: str, file: str) -> tuple[str, tuple[int, int]]:
    source = read(ROOT / file, file)
    if now == source:  # its marks may name a line
        return source, (0, 0)
    whole = cut(source, file, solved=True)
    answers = {answer.function: answer for answer in whole.answers}
    back = own = 0
    found = regions(now.replace("\r\n", "\n"), file)
    for i, region in enumerate(found):
        answer = answers[region.function]
        if region.lines == answer.placeholder:
            found[i] = region._replace(lines=answer.lines)
            back += 1
        elif region.lines != answer.lines:
            own += 1
    text = join(found)
    if text == whole.text:
        text = source
    elif not back:
        text = now
    return text, (back, own)


# The command ------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    """The command; ends the process with a message if something is wrong."""
    options = _parse(sys.argv[1:] if argv is None else argv)
    signal.signal(signal.SIGTERM, _terminated)
    try:
        if options.restore:
            _restore(options.restore, options.solved)
        else:
            _make(options)
    except (MarkError, HintError, RestoreError, delivery.DeliveryError, FileExistsError) as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        target = options.restore or options.destination
        sys.exit(f"error: cannot write {target}: {error.strerror or error}")
    except KeyboardInterrupt:
        print("\ninterrupted; no file is half-written", file=sys.stderr)
        sys.exit(130)


def _terminated(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m common.staff.student_edition", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "destination", type=Path, nargs="?", metavar="DESTINATION",
        help="where to write it: a new or an empty directory, or a new file that ends in .zip",
    )  # fmt: skip
    parser.add_argument(
        "--git", action="store_true", help="make the directory a git repository with one commit"
    )
    parser.add_argument(
        "--solved", nargs="+", type=int, default=[], metavar="N",
        help="these stages keep their answers: --solved 4 for stage 5 without stage 4",
    )  # fmt: skip
    parser.add_argument(
        "--without-ai-policy", action="store_true",
        help=f"leave out {POLICY}, which asks AI assistants to teach and not to write the answers",
    )  # fmt: skip
    parser.add_argument(
        "--restore", type=Path, metavar="EDITION",
        help="put the answers back into this edition, with --solved those of these stages;"
        " what a student has written stays",
    )  # fmt: skip
    options = parser.parse_args(_numbers_last(argv))
    known = stages_with_answers()
    if wrong := [n for n in options.solved if n not in known]:
        listed = ", ".join(map(str, known))
        parser.error(
            f"--solved takes stages that have answers, of {listed}; got {', '.join(map(str, wrong))}"
        )
    if (options.destination is None) == (options.restore is None):
        parser.error(
            "expected either DESTINATION or --restore EDITION; got "
            + ("none of them" if options.restore is None else "both")
        )
    if options.restore and (options.git or options.without_ai_policy):
        parser.error("--restore goes with --solved alone; got --git or --without-ai-policy")
    return options


def _numbers_last(argv: Sequence[str]) -> list[str]:
    """``--solved 1 4 edition`` as ``edition --solved 1 4``: argparse would take the destination for a stage."""
    words = list(argv)
    if "--solved" not in words:
        return words
    begin = end = words.index("--solved")
    while end + 1 < len(words) and words[end + 1].isdecimal():
        end += 1
    return words[:begin] + words[end + 1 :] + words[begin : end + 1] if end > begin else words


def _make(options: argparse.Namespace) -> None:
    answers = make(
        options.destination,
        solved=options.solved,
        ai_policy=not options.without_ai_policy,
        git=options.git,
    )
    for file, count in answers.items():
        print(f"{file}: {count} to write")
    for stage in sorted(set(options.solved)):
        print(f"task{stage}: with its answers")
    kind = "a git repository with one commit" if options.git else ""
    print(
        f"{sum(answers.values())} answers cut; the student edition is in {options.destination}"
        + (f", {kind}" if kind else "")
    )


def _restore(edition: Path, stages: Collection[int]) -> None:
    done = restore(edition, stages=stages or None)
    for file, (back, own) in done.items():
        said = f"{file}: {back} put back" if back or own else f"{file}: has its answers"
        print(said + (f", {own} that a student wrote left as they are" if own else ""))
    print(f"{sum(back for back, _ in done.values())} answers put back into {edition}")


if __name__ == "__main__":
    main()
