"""The student edition: whole, no larger than a student's run needs, and silent about what it leaves out."""

import ast
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from common import grade
from common.record import POINTS
from common.regions import regions
from common.staff import delivery, student_edition
from common.staff.student_edition import (
    LEFT_OUT,
    ROOT,
    TEMPLATES,
    MarkError,
    RestoreError,
    contents,
    cut,
    main,
    make,
    restore,
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


def test_no_answer_and_nothing_for_staff_is_left(files):
    assert not [file for file in files if file.startswith(LEFT_OUT)]
    for file, text in files.items():
        assert not re.search("(BEGIN|END) STAFF", text), file
        assert "until then:" not in text or file == "common/regions.py", file
    for file in WITH_ANSWERS:
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


# Solved stages, and back again --------------------------------------------------------------------


def test_solved_stages_keep_their_answers(tmp_path):
    answers = make(tmp_path / "e", solved=[4, 2])
    assert not [file for file in answers if file.startswith(("task2/", "task4/"))]
    for file in ("task2/attention_kernel.cu", "task4/attention_kernel.cu"):
        text = (tmp_path / "e" / file).read_text()
        assert text == (ROOT / file).read_text()
    assert "YOUR CODE HERE" in (tmp_path / "e/task5/attention_kernel.cu").read_text()
    assert "**Tasks 2 and 4 are already written.**" in (tmp_path / "e/README.md").read_text()


WITH_ANSWERS = [
    file
    for file in tracked_files()
    if re.match(r"task\d/", file)
    and file.endswith((".py", ".cu"))
    and not file.startswith(LEFT_OUT)
    and cut((ROOT / file).read_text(), file).answers
]


@pytest.mark.parametrize("solved", [(), (4,), (1, 2, 5), range(1, 7)], ids=str)
def test_restoring_gives_back_the_original_byte_for_byte(tmp_path, solved):
    assert len(WITH_ANSWERS) == 7
    make(tmp_path / "e", solved=solved)
    done = restore(tmp_path / "e")
    assert set(done) == set(WITH_ANSWERS) and not any(own for _, own in done.values())
    for file in WITH_ANSWERS:
        assert (tmp_path / "e" / file).read_bytes() == (ROOT / file).read_bytes(), file
    assert set(restore(tmp_path / "e").values()) == {(0, 0)}  # once more: nothing to do


def test_restoring_keeps_what_a_student_wrote(tmp_path):
    make(tmp_path / "e")
    file = "task2/attention_kernel.cu"
    kernel = tmp_path / "e" / file
    own = kernel.read_text().replace("  // YOUR CODE HERE\n", "  my_own_code();\n", 1)
    kernel.write_text(own + "// a note\n")
    assert restore(tmp_path / "e", stages=[2]) == {file: (3, 1)}
    text = kernel.read_text()
    assert "my_own_code();" in text and text.endswith("// a note\n")
    written, *others = regions(text, file)
    assert "my_own_code();" in written.lines and "YOUR CODE" not in written.lines
    course = regions((ROOT / file).read_text(), file)
    assert [r.lines for r in others] == [r.lines for r in course[1:]]
    assert restore(tmp_path / "e", stages=[2]) == {file: (0, 1)} and kernel.read_text() == text
    assert "is not written yet" in (tmp_path / "e/task1/attention.py").read_text()


def test_restoring_keeps_what_stands_beside_the_marks(tmp_path):
    make(tmp_path / "e", solved=[2])
    file = "task5/attention.py"
    ours = tmp_path / "e" / file
    ours.write_text(ours.read_text().replace("    return 1\n", "    return 7\n") + "# a note\n")
    kernel = tmp_path / "e/task2/attention_kernel.cu"
    kernel.write_text(kernel.read_text() + "// a note\n")
    done = restore(tmp_path / "e", stages=[2, 5])
    assert done[file] == (2, 1) and done["task2/attention_kernel.cu"] == (0, 0)
    assert "    return 7\n" in ours.read_text() and ours.read_text().endswith("# a note\n")
    assert kernel.read_text().endswith("// a note\n")


def test_restoring_a_checkout_with_windows_line_ends(tmp_path):
    make(tmp_path / "e")
    for file in WITH_ANSWERS:
        path = tmp_path / "e" / file
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    own = tmp_path / "e/task1/attention.py"
    own.write_bytes(re.sub(b"raise NotImpl.*", b"return x\r", own.read_bytes()))
    written = own.read_bytes()
    done = restore(tmp_path / "e")
    assert [file for file, (_, own) in done.items() if own] == ["task1/attention.py"]
    assert own.read_bytes() == written
    for file in WITH_ANSWERS[1:]:
        assert (tmp_path / "e" / file).read_bytes() == (ROOT / file).read_bytes(), file


@pytest.mark.parametrize(
    "old, new, says",
    [
        (b"// END SOLUTION", b"//", "BEGIN SOLUTION inside BEGIN SOLUTION"),
        (b"// BEGIN SOLUTION", b"//", "END SOLUTION without BEGIN SOLUTION"),
        (b"// YOUR CODE HERE", b"// \xe4", r"byte \d+, 0xe4, is not UTF-8"),
    ],
)
def test_restoring_reports_broken_marks_and_writes_nothing(tmp_path, old, new, says):
    make(tmp_path / "e")
    kernel = tmp_path / "e/task2/attention_kernel.cu"
    kernel.write_bytes(kernel.read_bytes().replace(old, new, 1))
    before = {file: (tmp_path / "e" / file).read_bytes() for file in WITH_ANSWERS}
    with pytest.raises(SystemExit) as end:
        main(["--restore", str(tmp_path / "e")])
    assert re.fullmatch(rf"error: task2/attention_kernel.cu:\d+: {says}.*", str(end.value))
    assert {file: (tmp_path / "e" / file).read_bytes() for file in WITH_ANSWERS} == before


def test_an_edition_is_not_made_from_broken_marks(tmp_path, monkeypatch):
    def without_an_end(path, file):
        text = path.read_text()
        return (
            text.replace("// END SOLUTION", "//", 1)
            if file == "task4/attention_kernel.cu"
            else text
        )

    monkeypatch.setattr(student_edition, "read", without_an_end)
    with pytest.raises(SystemExit, match=r"task4/attention_kernel.cu:\d+: BEGIN SOLUTION without"):
        main([str(tmp_path / "e")])
    monkeypatch.setattr(
        student_edition, "read", lambda path, file: re.sub(".*SOLUTION.*", "", path.read_text())
    )
    with pytest.raises(
        SystemExit, match="task1/attention.py: CustomSelfAttention.forward has no BEGIN"
    ):
        main([str(tmp_path / "e")])
    assert left_in(tmp_path) == []


def test_restoring_needs_an_edition(tmp_path):
    with pytest.raises(RestoreError, match="has no task1/attention.py"):
        restore(tmp_path)
    with pytest.raises(RestoreError, match="not a folder"):
        restore(tmp_path / "gone")


# How it is delivered ------------------------------------------------------------------------------


def left_in(folder):
    return sorted(path.name for path in folder.iterdir())


def git(folder, *arguments):
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


@needs_git
def test_a_repository_has_one_commit_and_is_clean(files, tmp_path, monkeypatch):
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
    assert set(git(tmp_path / "a", "ls-files").splitlines()) == set(files)
    heads = {git(tmp_path / name, "rev-parse", "HEAD") for name in "ab"}
    assert len(heads) == 1, "the same files give the same commit"
    assert left_in(tmp_path) == ["a", "b"]


def test_a_zip_has_the_same_files_below_one_folder(files, tmp_path):
    make(tmp_path / "new" / "course.zip")
    make(tmp_path / "again" / "course.zip")
    with zipfile.ZipFile(tmp_path / "new/course.zip") as archive:
        assert archive.testzip() is None
        assert set(archive.namelist()) == {f"course/{file}" for file in files}
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
