"""What the texts of a checkout refer to, and which of it does not exist."""

import functools
import importlib.util
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?)\s*$", re.MULTILINE)
MAKE = re.compile(r"\bmake ((?:[A-Z_]+=\S+ )*)([a-z][a-z-]*)")
MODULE = re.compile(r"python3? -m ([\w.]+)")
PATH = re.compile(r"[\w.*-]*(?:/[\w.*-]+)*/?")
ENDINGS = (".py", ".cu", ".cuh", ".h", ".cpp", ".md", ".json", ".toml", ".txt", ".svg", ".png")
WRITTEN = (".build/", ".venv/", "common/records/", "grades/")  # exist once something has run


def broken(root: Path, files: Sequence[str]) -> list[str]:
    """Everything that a Markdown file among ``files`` refers to and that is not there, with file and reason.

    Relative links and their anchors; ``make`` targets; modules in ``python -m``; paths in backticks. In a path ``N``
    stands for any number, ``NAME`` and ``*`` for anything.
    """
    problems = []
    for file in files:
        if file.endswith(".md"):
            text = (root / file).read_text(encoding="utf-8")
            problems += [f"{file}: {problem}" for problem in _broken_in(root, files, file, text)]
    return problems


def _broken_in(root: Path, files: Sequence[str], file: str, text: str) -> Iterator[str]:
    prose = FENCE.sub("", text)
    for link in LINK.findall(CODE.sub("", prose)):
        if problem := _broken_link(root, root / file, link):
            yield problem
    code = [*(block for _, block in FENCE.findall(text)), *CODE.findall(prose)]
    for piece in code:
        for _, target in MAKE.findall(piece):
            if target not in make_targets(root):
                yield f"make {target}: the Makefile has no such target"
        for module in MODULE.findall(piece):
            if not runs(root, module):
                yield f"python -m {module}: there is no such module"
    for piece in CODE.findall(prose):
        for token in piece.split():
            if _is_path(token) and not _exists(root, files, file, token):
                yield f"`{token}`: there is no such file"


def _broken_link(root: Path, file: Path, link: str) -> str | None:
    if re.match(r"[a-z]+:", link):
        return None
    path, _, anchor = link.partition("#")
    target = (file.parent / path).resolve() if path else file
    if not target.exists():
        return f"link to {link}: there is no such file"
    if not target.is_relative_to(root.resolve()):
        return f"link to {link}: outside of the repository"
    if anchor and anchor not in anchors(target.read_text(encoding="utf-8")):
        return f"link to {link}: {target.name} has no such heading"
    return None


def anchors(text: str) -> list[str]:
    """The anchors that GitHub makes of a page's headings."""
    found: list[str] = []
    for heading in HEADING.findall(FENCE.sub("", text)):
        words = re.sub(r"[^\w\- ]", "", LINK.sub("]", heading)).strip().lower().replace(" ", "-")
        same = sum(
            re.fullmatch(re.escape(words) + r"(-\d+)?", anchor) is not None for anchor in found
        )
        found.append(f"{words}-{same}" if same else words)
    return found


@functools.cache
def make_targets(root: Path) -> frozenset[str]:
    """The targets that the Makefile declares as ``.PHONY``."""
    declared = re.findall(r"^\.PHONY: (.+)$", (root / "Makefile").read_text(), re.MULTILINE)
    return frozenset(target for line in declared for target in line.split())


def runs(root: Path, module: str) -> bool:
    """Whether ``python -m module`` finds something to run: in this checkout, or among the installed packages."""
    module = module.replace("taskN", "task2")
    path = root / module.replace(".", "/")
    if (root / module.split(".")[0]).exists():
        return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
    return importlib.util.find_spec(module) is not None


def _is_path(token: str) -> bool:
    return (
        PATH.fullmatch(token) is not None
        and not token.startswith(("/", "-"))
        and token not in ENDINGS
        and token.endswith((*ENDINGS, "/"))
    )


def _exists(root: Path, files: Sequence[str], file: str, token: str) -> bool:
    """From the page's folder or from the root; a name alone also of any file that ends so."""
    if token.startswith(WRITTEN) or token in [name.rpartition("/")[2] for name in WRITTEN]:
        return True
    pattern = re.escape(token).replace(r"\*", "[^/]*")
    pattern = re.sub(r"NAME", "[^/]+", re.sub(r"(?<=task)N\b", "[0-9]+", pattern))
    here = file.rpartition("/")[0]
    whole = re.compile(rf"(?:{re.escape(here)}/)?{pattern}" + ("" if token.endswith("/") else "$"))
    ending = re.compile(rf"(?:^|.*/){pattern}$")
    return any(whole.match(name) or ending.match(name) for name in files)
