"""The student edition: whole, no larger than a student's run needs, and silent about what it leaves out."""

import ast
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from common.staff.student_edition import LEFT_OUT, ROOT, MarkError, cut, make, tracked_files
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


def test_no_answer_and_nothing_for_staff_is_left(files):
    assert not [file for file in files if file.startswith(LEFT_OUT)]
    for file, text in files.items():
        assert not re.search("(BEGIN|END) (SOLUTION|STAFF)", text), file


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
    waiting += ["common.grade", "common.build.__main__"]
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


@pytest.mark.parametrize("stage", STAGES)
def test_each_stage_fails_with_one_clear_sentence(results, stage):
    result = results[stage]
    text = result.stdout + result.stderr
    assert result.returncode == 1, text
    assert "Traceback" not in text, text
    assert "not written yet" in text, text


def test_an_untouched_edition_earns_nothing(results):
    assert {stage: result.record["earned"] for stage, result in results.items()} == dict.fromkeys(
        STAGES, 0
    )


def test_the_demo_names_the_kernels_that_it_waits_for(results):
    said = results[7].stdout
    assert "task4/attention_kernel.cu is not written yet, and GPT-2 runs on it" in said
    assert "task7/attention.py is not written" not in said and "as it was allocated" not in said


def test_python_answers_become_not_implemented():
    source = "class A:\n    def f(self):\n        x = 1\n        # BEGIN SOLUTION\n        return x\n        # END SOLUTION\n"
    text, answers = cut(source, "taskN/attention.py")
    assert answers == 1
    assert text == (
        "class A:\n    def f(self):\n        x = 1\n"
        '        raise NotImplementedError("A.f is not written yet")\n'
    )


def test_what_is_for_staff_is_dropped_or_replaced():
    markdown = "a\n<!-- BEGIN STAFF -->\nsecret\n<!-- END STAFF -->\nb\n"
    assert cut(markdown, "README.md") == ("a\nb\n", 0)
    python = "if 1:\n    # BEGIN STAFF, for students: x = 1\n    x = 2\n    # END STAFF\n"
    assert cut(python, "f.py") == ("if 1:\n    x = 1\n", 0)


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


def test_a_directory_in_use_is_refused(tmp_path):
    (tmp_path / "something").write_text("")
    with pytest.raises(FileExistsError, match="new or an empty directory"):
        make(tmp_path)
