"""The texts: what they refer to exists, their samples are what the programs print, and each is short enough to read."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from common import grade
from common.staff.student_edition import ROOT, TEMPLATES, tracked_files
from common.tests.texts import FENCE, MAKE, anchors, broken, make_targets

FILES = tracked_files()
PAGES = [file for file in FILES if file.endswith(".md")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def read(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


# What they refer to -------------------------------------------------------------------------------


def test_every_reference_exists() -> None:
    # The pages of the edition refer to its files: its own test follows them.
    problems = [p for p in broken(ROOT, FILES) if not p.startswith(TEMPLATES)]
    assert not problems, "\n".join(problems)


def test_make_help_names_targets() -> None:
    help_lines = "\n".join(re.findall(r"@echo '(make .*)'", read("Makefile")))
    named = {target for _, target in MAKE.findall(help_lines)}
    assert {"grade", "test"} <= named <= make_targets(ROOT)


@pytest.mark.parametrize(
    "text, problem",
    [
        ("[x](gone.md)", "link to gone.md: there is no such file"),
        ("![x](gone.svg)", "link to gone.svg"),
        ("[x](../../etc)", "link to ../../etc"),
        ("[x](other.md#no-heading)", "other.md has no such heading"),
        ("`make gone`", "make gone: the Makefile has no such target"),
        ("```bash\nmake PYTHON=python3 gone\n```", "make gone"),
        ("`python -m task1.gone`", "python -m task1.gone: there is no such module"),
        ("`python -m task1`", "python -m task1: there is no such module"),
        ("`python -m no_such_package`", "python -m no_such_package"),
        ("see `task1/gone.py`", "`task1/gone.py`: there is no such file"),
        ("see `gone/`", "`gone/`: there is no such file"),
        ("see `tas.py`", "`tas.py`: there is no such file"),
        (
            "[x](other.md#a-heading-with-code) `task1/test.py` `taskN/test.py` `task1/` `python -m task1.test` `.venv/`"
            " [y](https://a.b/c) `python -m pip` `make grade` `common/records/cpu.json` [z](#here)\n# Here",
            None,
        ),
    ],
)
def test_a_wrong_reference_is_found(tmp_path: Path, text: str, problem: str | None) -> None:
    (tmp_path / "task1").mkdir()
    (tmp_path / "task1/test.py").touch()
    (tmp_path / "Makefile").write_text(".PHONY: grade\n")
    (tmp_path / "other.md").write_text("## A `heading`, with code\n")
    (tmp_path / "page.md").write_text(text)
    found = broken(tmp_path, ["page.md", "other.md", "task1/test.py"])
    assert (
        [problem] == [p if p in f else f for f, p in zip(found, [problem], strict=True)]
        if problem
        else not found
    )


def test_anchors_are_githubs() -> None:
    text = "# A `b`: c, d?\n```\n# not this\n```\n## Choosing $B_r$\n## Same\n## Same\n### [Link](x.md) here\n"
    assert anchors(text) == ["a-b-c-d", "choosing-b_r", "same", "same-1", "link-here"]


# Their samples of output --------------------------------------------------------------------------

SAMPLE = re.compile(
    r"<!-- sample: ([\w ]+) -->\n```text\n\$ ([^\n]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)


def test_every_sample_has_its_marker() -> None:
    for file in PAGES:
        blocks = [block for _, block in FENCE.findall(read(file)) if block.startswith("$ ")]
        assert len(blocks) == len(SAMPLE.findall(read(file))), file


@pytest.fixture(scope="module")
def missing_barrier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout whose GEMM_NT lacks the second barrier of its loop."""
    checkout = tmp_path_factory.mktemp("checkout")
    for file in FILES:
        if file.startswith(("task2/", "common/")) and not file.startswith("common/tests/"):
            (checkout / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, checkout / file)
    kernel = checkout / "task2/attention_kernel.cu"
    source = kernel.read_text()
    at = source.index("__syncthreads();", source.index("void GEMM_NT_kernel_batched("))
    at = source.index("__syncthreads();", at + 1)
    kernel.write_text(source[:at] + source[at:].removeprefix("__syncthreads();"))
    return checkout


def run(checkout: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=checkout, capture_output=True, text=True, timeout=300
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "file, name, at", [(f, m[1], m.start()) for f in PAGES for m in SAMPLE.finditer(read(f))]
)
def test_sample_is_what_the_program_prints(
    file: str, name: str, at: int, request: pytest.FixtureRequest
) -> None:
    _, command, shown = SAMPLE.match(read(file), at).groups()
    if command == "make grade":
        output = request.getfixturevalue("graded")
    else:
        arguments = command.removeprefix("python ").split()
        output = run(request.getfixturevalue("missing_barrier"), *arguments, "--device", "cpu")
    printed = iter([comparable(line) for line in output.splitlines()])
    for line in shown.splitlines():
        if line.strip() == "...":
            continue
        wanted, cut = comparable(line.removesuffix(" ...")), line.endswith(" ...")
        assert any(p.startswith(wanted) if cut else p == wanted for p in printed), (
            f"{file}, sample {name}: this is not printed, or not at this place:\n{line}\n\nprinted:\n{output}"
        )


def comparable(line: str) -> str:
    """Without what changes from one commit or machine to the next: numbers, and the width of columns."""
    return re.sub(r"\d[\d.,]*(e[+-]?\d+)?", "#", " ".join(line.split()))


@pytest.fixture
def graded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """What grading prints at its end; task 1 is enough to see it."""
    monkeypatch.setattr(grade, "RESULTS", tmp_path / "Results.md")
    monkeypatch.setattr(grade, "RECORDS", tmp_path / "records")
    shutil.copy2(ROOT / "Results.md", tmp_path / "Results.md")
    assert grade.main(["--device", "cpu", "--stage", "1"]) == 0
    return capsys.readouterr().out


# Lengths and versions -----------------------------------------------------------------------------

LONGEST = {"README.md": 150, "task4/ladder/README.md": 150, "common/staff/edition/README.md": 70}


@pytest.mark.parametrize("file", [f for f in PAGES if f.endswith("README.md")])
def test_a_page_is_short(file: str) -> None:
    lines = len(read(file).splitlines())
    assert lines <= LONGEST.get(file, 200), f"{file} has {lines} lines"


def test_every_task_and_every_folder_of_common_has_its_text() -> None:
    assert {f"task{n}/README.md" for n in range(1, 8)} <= set(PAGES)
    table = read("common/README.md")
    folders = {file.split("/")[1] for file in FILES if re.match(r"common/\w+/", file)}
    missing = [folder for folder in sorted(folders) if f"`{folder}/`" not in table]
    assert not missing, f"common/README.md does not say what these are for: {', '.join(missing)}"


def test_versions_in_the_texts_are_those_of_pyproject() -> None:
    python = SpecifierSet(PROJECT["project"]["requires-python"])
    minors = [minor for minor in range(30) if f"3.{minor}" in python]
    said = re.findall(r"Python (3\.\d+) to (3\.\d+)", "\n".join(map(read, PAGES)))
    assert said and set(said) == {(f"3.{minors[0]}", f"3.{minors[-1]}")}
    # A package's version is stated in pyproject.toml, and in what a program has written.
    written = re.compile(
        r"<!-- (train|grade|ladder|mutants|cheats|frontends):.*?<!-- end", re.DOTALL
    )
    for file in PAGES:
        text = written.sub("", read(file))
        assert not re.search(r"\b(torch|transformers)( |[=<>~]=?)\d", text), file


def test_versions_here_and_pinned_are_declared() -> None:
    pinned = {r.name: r for r in map(Requirement, PROJECT["tool"]["course"]["pinned"])}
    declared = {r.name: r for r in map(Requirement, PROJECT["project"]["dependencies"])}
    assert pinned.keys() == declared.keys()
    for name, requirement in declared.items():
        version = next(iter(pinned[name].specifier)).version
        assert requirement.specifier.contains(version), name
        assert requirement.specifier.contains(importlib.metadata.version(name).split("+")[0]), name
    assert ".".join(map(str, sys.version_info[:2])) in SpecifierSet(
        PROJECT["project"]["requires-python"]
    )
