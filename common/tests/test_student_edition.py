"""The student edition: whole, no larger than a student's run needs, and silent about what it leaves out."""

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from common import grade
from common.record import POINTS
from common.regions import regions
from common.staff import student_edition
from common.staff.student_edition import (
    LEFT_OUT,
    ROOT,
    TEMPLATES,
    MarkError,
    contents,
    cut,
    make,
    tracked_files,
)
from common.tests.texts import MODULE, broken, make_targets, runs

STAGES = range(1, 8)
CODE = (".py", ".cu", ".cuh", ".h", ".cpp")


@pytest.fixture(scope="module")
def edition(tmp_path_factory):
    path = tmp_path_factory.mktemp("student") / "edition"
    return path, make(path)


@pytest.fixture(scope="module")
def files(edition):
    """Path and text of every file, as it is before anything has run; no text where it is binary."""
    path, _ = edition
    found = {}
    for file in sorted(f for f in path.rglob("*") if f.is_file()):
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            text = ""
        found[file.relative_to(path).as_posix()] = text
    return found


@pytest.fixture(scope="module")
def results(edition, files, tmp_path_factory):
    """Each stage's test as a student would start it, two at a time, with what it recorded."""
    folder = tmp_path_factory.mktemp("records")

    def run(stage):
        record = folder / f"{stage}.json"
        command = [sys.executable, "-m", f"task{stage}.test", "--no-timing", "--device", "cpu"]
        done = subprocess.run(
            [*command, "--record", record],
            cwd=edition[0],
            capture_output=True,
            text=True,
            timeout=300,
        )
        done.record = json.loads(record.read_text())
        return done

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(STAGES, pool.map(run, STAGES), strict=True))


def test_every_stage_but_the_demo_has_something_to_write(edition):
    _, answers = edition
    assert {file.split("/")[0] for file in answers} == {f"task{stage}" for stage in range(1, 7)}


def test_no_answer_and_nothing_for_staff_is_left(edition, files):
    assert not [file for file in files if file.startswith(LEFT_OUT)]
    for file, text in files.items():
        assert not re.search("(BEGIN|END) STAFF", text), file
        assert "until then:" not in text or file == "common/regions.py", file
    for file in edition[1]:
        for region in regions(files[file], file):
            size, placeholder = map(str.strip, region.lines.splitlines())
            assert re.fullmatch(r"(#|//) about \d+ lines?: .+", size), (file, size)
            kinds = ("// YOUR CODE HERE", "raise NotImplementedError", "return 1")
            assert placeholder.startswith(kinds), (file, placeholder)


def test_every_entry_of_left_out_is_there_to_be_left_out():
    assert not [
        entry for entry in LEFT_OUT if not any(f.startswith(entry) for f in tracked_files())
    ]


def test_every_reference_of_its_texts_exists(edition, files):
    path, _ = edition
    assert not broken(path, list(files)), "\n".join(broken(path, list(files)))


@pytest.mark.parametrize("code", [False, True], ids=["texts", "code"])
def test_nothing_refers_to_what_was_left_out(edition, files, code):
    path, _ = edition
    words = ["ladder", "rungs?", "staff", "instructors?"]
    words += [f"make {target}" for target in make_targets(ROOT) - make_targets(path)]
    for entry in LEFT_OUT:
        if entry != "common/records/":  # grading writes them here as well
            name = re.escape(entry.removesuffix("/"))
            words.append(
                name.removesuffix(r"\.py").replace("/", "[./]")
            )  # as a path and as a module
    pattern = re.compile(rf"(?<![\w.])({'|'.join(words)})\b", re.IGNORECASE)
    problems = []
    for file, text in files.items():
        if file.endswith(CODE) != code or file.endswith("tokenizer.json"):
            continue
        for number, line in enumerate(text.splitlines(), start=1):
            unknown = [m for m in MODULE.findall(line) if not runs(path, m.rstrip("."))]
            if unknown or pattern.search(line):
                problems.append(f"{file}:{number}: {line.strip()}")
    assert not problems, "\n".join(problems)


def test_common_has_only_what_a_students_run_imports(files):
    modules = {
        file.removesuffix("/__init__.py").removesuffix(".py").replace("/", "."): ast.parse(text)
        for file, text in files.items()
        if file.endswith(".py")
    }
    needed = set()
    waiting = [name for name in modules if not name.startswith("common")]
    waiting += ["common.grade", "common.doctor", "common.build.__main__", "common.report.__main__"]
    while waiting:
        name = waiting.pop()
        if name in modules and name not in needed:
            needed.add(name)
            waiting += [name.rpartition(".")[0], *imported(name, modules[name])]
    assert not (modules.keys() - needed), "add them to LEFT_OUT"


def imported(name, tree):
    """Every module that a module may mean by its imports, at any depth, and by the name of a pytest plugin."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: a relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "pytest_plugins"
        ):
            yield from ast.literal_eval(node.value)


def test_kernels_still_compile(edition):
    path, _ = edition
    for stage in (2, 4, 5):
        command = [sys.executable, "-m", f"task{stage}.compile", "--device", "cpu"]
        built = subprocess.run(command, cwd=path, capture_output=True, text=True)
        assert built.returncode == 0, built.stderr


def test_an_untouched_edition_says_so_and_earns_nothing(results):
    # One test: the results take a minute, and processes that run tests side by side do not share them.
    for result in results.values():
        text = result.stdout + result.stderr
        assert result.returncode == 1, text
        assert "Traceback" not in text, text
        assert "not written yet" in text, text
        assert result.record["earned"] == 0, text
    said = results[7].stdout
    assert "task4/attention_kernel.cu is not written yet, and GPT-2 runs on it" in said
    assert "task7/attention.py is not written" not in said and "as it was allocated" not in said


def test_a_grade_finds_the_marks_of_an_edition(edition, tmp_path, monkeypatch):
    make(tmp_path / "solved", solved=range(1, 7))
    for root in (edition[0], tmp_path / "solved"):
        monkeypatch.setattr(grade, "ROOT", root)
        grade._check_marks(list(POINTS))


def test_python_answers_become_not_implemented():
    source = "class A:\n    def f(self):\n        x = 1\n        # BEGIN SOLUTION\n        return x\n        # END SOLUTION\n"
    text, (answer,) = cut(source, "taskN/attention.py")
    assert answer.function == "A.f" and answer.lines == "        return x\n"
    assert text == source.replace(answer.lines, answer.placeholder)
    assert answer.placeholder == '        raise NotImplementedError("A.f is not written yet")\n'


def test_an_optional_answer_becomes_the_line_that_its_mark_names():
    source = (
        "int f() {\n  // BEGIN SOLUTION, until then: return 1;\n  return 2;\n  // END SOLUTION\n}\n"
    )
    begin, end = "  // BEGIN SOLUTION\n", "  // END SOLUTION\n"
    assert cut(source, "f.cu").text == f"int f() {{\n{begin}  return 1;\n{end}}}\n"
    assert cut(source, "f.cu", solved=True).text == f"int f() {{\n{begin}  return 2;\n{end}}}\n"


def test_what_is_for_staff_is_dropped_or_replaced():
    markdown = "a\n<!-- BEGIN STAFF -->\nsecret\n<!-- END STAFF -->\nb\n"
    assert cut(markdown, "README.md") == ("a\nb\n", [])
    python = "if 1:\n    # BEGIN STAFF, for students: x = 1\n    x = 2\n    # END STAFF\n"
    assert cut(python, "f.py") == ("if 1:\n    x = 1\n", [])


@pytest.mark.parametrize(
    "source, words",
    [
        ("# BEGIN SOLUTION\nx = 1\n", "f.py:1: BEGIN SOLUTION without END SOLUTION"),
        ("x = 1\n# END SOLUTION\n", "f.py:2: END SOLUTION without BEGIN SOLUTION"),
        (
            "# BEGIN SOLUTION\n# BEGIN SOLUTION\n",
            r"f.py:2: BEGIN SOLUTION inside BEGIN SOLUTION \(line 1\)",
        ),
        (
            "# BEGIN SOLUTION\n# BEGIN STAFF\n",
            r"f.py:2: BEGIN STAFF inside BEGIN SOLUTION \(line 1\)",
        ),
        ("# BEGIN STAFF\n# END SOLUTION\n", "f.py:2: END SOLUTION without BEGIN SOLUTION"),
        ("<!-- BEGIN STAFF -->\n", "f.py:1: BEGIN STAFF without END STAFF"),
        ("# BEGIN SOLUTION of this\n", "f.py:1: a mark stands alone"),
    ],
)
def test_marks_that_do_not_pair_up(source, words):
    with pytest.raises(MarkError, match=words):
        cut(source, "f.py")


# What it looks like -------------------------------------------------------------------------------


def test_every_placeholder_says_how_much_is_to_be_written(files):
    for file, text in files.items():
        if file.endswith((".py", ".cu")) and file.startswith("task"):
            lines = text.splitlines()
            for above, line in zip(lines, lines[1:], strict=False):
                if "raise NotImplementedError" in line or line.strip() == "// YOUR CODE HERE":
                    assert re.fullmatch(r"\s*(#|//) about \d+ lines?: .+", above), f"{file}: {line}"
                    assert len(above) <= 120, f"{file}: {above}"


def test_the_templates_replace_the_files_of_their_names(files):
    templates = [f.removeprefix(TEMPLATES) for f in tracked_files() if f.startswith(TEMPLATES)]
    expected = {"README.md", "AGENTS.md", ".clangd", ".devcontainer/devcontainer.json"}
    assert expected <= set(templates) <= set(files)
    assert files["README.md"].startswith("# Attention in seven stages\n")
    assert student_edition.SOLVED_HERE not in files["README.md"]
    assert files["README.md"] != (ROOT / "README.md").read_text()


def test_results_have_no_figures(files):
    text = files["Results.md"]
    assert not re.search(r"NVIDIA|TFLOP/s \(|GB/s \(|\d ms|torch \d", text)
    assert "0 of 20" in text and "**Name:**" in text
    assert not [file for file in files if file.startswith("common/records/")]


WORKFLOW = ".github/workflows/checks.yml"


def test_the_workflow_is_yaml_with_commands_that_exist(edition, files):
    path, _ = edition
    text = files[WORKFLOW]
    assert "\t" not in text
    commands = re.findall(r"^ +(?:- )?run: (.+)$", text, re.MULTILINE)
    try:
        import yaml
    except ImportError:  # it comes with transformers; without it, only the lines are read
        pass
    else:
        parsed = yaml.safe_load(text)
        assert set(parsed) == {
            "name",
            True,
            "permissions",
            "concurrency",
            "jobs",
        }  # "on" is true in YAML
        assert "push" in parsed[True]
        for job in parsed["jobs"].values():
            assert job["timeout-minutes"] <= 60
            steps = job["steps"]
            assert commands == [step["run"] for step in steps if "run" in step]
            assert any(step.get("with", {}).get("cache") == "pip" for step in steps)
            assert not any("continue-on-error" in step for step in steps)
    words = [shlex.split(command) for command in commands]
    assert [".venv/bin/python", "-m", "common.grade", "--device", "cpu"] in words
    for command in words:
        if command[0] == ".venv/bin/python":
            assert runs(path, command[2]), command
        elif command[0] == "make":
            assert re.search(rf"^{re.escape(command[1])}:", files["Makefile"], re.MULTILINE)
        else:
            assert command[0] == "cat" and command[1] in files
    for other in re.findall(r"cache-dependency-path: (\S+)", text):
        assert other in files


def test_the_container_installs_what_the_workflow_installs(files):
    container = json.loads(files[".devcontainer/devcontainer.json"])
    assert f"run: {container['postCreateCommand']}\n" in files[WORKFLOW]


def test_the_editor_finds_its_headers(edition, files):
    path, _ = edition
    flags = re.findall(r"^    - (\S+)$", files[".clangd"], re.MULTILINE)
    folders = [
        path / "task2" / flag.removeprefix("-I") for flag in flags if flag.startswith("-I..")
    ]
    found = [folder for folder in folders if folder.is_dir()]
    assert len(found) == 3, "each folder once for a file of a task, and once for one a level deeper"
    assert flags[flags.index("-include") + 1] == "editor.h"
    for header in ["editor.h", *re.findall(r"#include <(\w+\.h)>", files["common/editor.h"])]:
        assert any((folder / header).is_file() for folder in found), header


@pytest.mark.skipif(shutil.which("clangd") is None, reason="needs clangd")
def test_the_editor_understands_every_kernel(tmp_path):
    make(tmp_path / "edition", solved=range(1, 7))
    kernels = sorted((tmp_path / "edition").glob("task*/*.cu"))
    for kernel in [*kernels, *(tmp_path / "edition/common/include").glob("*.cuh")]:
        command = ["clangd", f"--check={kernel}", "--check-lines=1-1"]
        done = subprocess.run(command, capture_output=True, text=True)
        problems = [line for line in done.stderr.splitlines() if re.match(r"E\[.*Line \d", line)]
        assert "All checks completed" in done.stderr and not problems, (kernel.name, problems)
    broken = kernels[0].read_text().replace("B_tile[ty][tx] =", "B_tiles[ty][tx] =", 1)
    kernels[0].write_text(broken)
    done = subprocess.run(
        ["clangd", f"--check={kernels[0]}", "--check-lines=1-1"], capture_output=True, text=True
    )
    assert "undeclared identifier 'B_tiles'" in done.stderr


def test_the_policy_for_assistants_can_be_left_out(files):
    assert "do not write the answers" in files["AGENTS.md"]
    without = {file.path for file in contents(ai_policy=False)[0]}
    assert set(files) - without == {"AGENTS.md"}
