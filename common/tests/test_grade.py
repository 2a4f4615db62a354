"""Grading: stages that crash or hang, records that are kept, Results.md that is only filled in."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from common import child, grade
from common.check.hints import load
from common.marked import MarkerError
from common.paths import ROOT
from common.record import POINTS, merge, render, sources_hash

FORM = "# My results\nName: Ada\n" + "".join(
    f"## {name}\n<!-- grade: {name} -->\nNot run yet.\n<!-- end: {name} -->\nnote on {name}\n"
    for name in ("stages", "task4", "task5", "task6", "task7", "machines")
)

MACHINE = {"cpu": "a CPU", "cores": 2, "system": "Linux", "python": "3.11.9", "torch": "2.13.0"}
GPU = MACHINE | {"gpu": "NVIDIA H200", "driver": "580", "cuda": "13.0"}


def make_record(
    stage: str,
    device: str,
    *,
    root: Path | None = None,
    date: str = "2026-01-01",
    **changes: object,
) -> dict:
    """A record as a stage writes it."""
    patterns = [f"{stage}/attention.py"]
    digest = sources_hash(patterns, root) if root else "0" * 64
    run = {
        "date": f"{date}T00:00:00Z",
        "seed": 1,
        "commit": "abc123",
        "dirty": False,
        "sources": {"patterns": patterns, "sha256": digest},
        "machine": GPU if device == "cuda" else MACHINE,
    }
    group = {"name": "attention", "passed": 3, "total": 3, "seconds": 1.0, "status": "passed"}
    record = {
        "stage": stage,
        "title": "a stage",
        "device": device,
        "status": "passed",
        "complete": True,
        "groups": [group],
        "points": POINTS[stage],
        "earned": POINTS[stage],
        "fields": ["layer", "attention alone"],
        "benchmarks": {},
        "texts": {},
        "problems": [],
        "run": run,
    }
    return record | changes


def make_benchmark(ms: float = 2.0) -> dict:
    timing = {"median_ms": ms, "p10_ms": ms, "p90_ms": ms, "n": 9}
    return {
        "shape": "B4",
        "dtype": "float32",
        "ours": timing,
        "baselines": {"SDPA": timing},
        "speedups": {"SDPA": 1.0},
        "note": "",
        "tflops": {"rate": 20.0, "share": 0.4, "of": "a float32 matrix product"},
    }


def records(**stages: dict) -> dict:
    found: dict = {}
    for record in stages.values():
        device = found.setdefault(record["device"], {"device": record["device"], "stages": {}})
        device["stages"][record["stage"]] = record
    return found


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with a form, and no stages yet."""
    monkeypatch.setattr(grade, "ROOT", tmp_path)
    monkeypatch.setattr(grade, "RESULTS", tmp_path / "Results.md")
    monkeypatch.setattr(grade, "RECORDS", tmp_path / "common/records")
    (tmp_path / "Results.md").write_text(FORM)
    return tmp_path


def add_stage(checkout: Path, stage: str, body: str = "pass", **changes: object) -> None:
    """A stage whose test writes a ready-made record after ``body``."""
    folder = checkout / stage
    folder.mkdir()
    (folder / "attention.py").write_text("answer = 42\n")
    record = json.dumps(make_record(stage, "cpu", root=checkout, **changes))
    (folder / "test.py").write_text(
        "import os, pathlib, sys, time\n"
        "file = pathlib.Path(sys.argv[sys.argv.index('--record') + 1])\n"
        f"{textwrap.dedent(body)}\n"
        f"file.write_text({record!r})\n"
        f"print('{stage} has run', *sys.argv[1:5])\n"
    )


def run(*arguments: str) -> int:
    return grade.main(["--device", "cpu", *arguments])


# Grading -----------------------------------------------------------------------------------------


def test_stages_run_and_the_form_is_filled(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_stage(checkout, "task1")
    add_stage(checkout, "task7", texts={"generated text": "Once upon a time"})
    assert run("--stage", "7", "1", "--seed", "5") == 0
    out = capsys.readouterr().out
    assert "task1 has run --device cpu --both --seed" in out
    table = [" ".join(line.split()) for line in out.splitlines()]
    assert "task1 cpu 3 of 3 2 of 2 speed: needs a GPU" in table
    assert "total 3 of 3" in table
    assert "task7 cpu 3 of 3 1 of 1 generated text: Once upon a time" in table
    record = json.loads((checkout / "common/records/cpu.json").read_text())
    assert set(record["stages"]) == {"task1", "task7"}
    form = (checkout / "Results.md").read_text()
    assert "| task1 | 3 of 3 | not run | 2 of 2 |" in form
    assert "**3 of 20**" in form and "> Once upon a time" in form and "Name: Ada" in form


def test_a_stage_that_crashes_hangs_or_fails_does_not_end_the_others(
    checkout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grade, "STAGE_SECONDS", 2)
    add_stage(checkout, "task1", "print('hello'); os.kill(os.getpid(), 11)")
    add_stage(checkout, "task2", "import nowhere")
    hang = (
        "import subprocess; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    )
    add_stage(checkout, "task3", hang)
    add_stage(checkout, "task4", status="failed", earned=0)
    add_stage(checkout, "task5")
    started = time.monotonic()
    assert run("--stage", "1", "2", "3", "4", "5") == 1
    assert time.monotonic() - started < 20
    out = capsys.readouterr().out
    assert "task1 ended early: killed by SIGSEGV" in out
    assert re.search(r"task2 ended early: task2/test.py:\d+: ModuleNotFoundError: No module", out)
    assert "task3 ended early: stopped after" in out
    form = (checkout / "Results.md").read_text()
    assert "| task1 | crashed | not run | 0 of 2 |" in form
    assert "| task5 | 3 of 3 | not run | 4 of 4 |" in form


def test_builds_come_first(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for stage, status in (("task2", 0), ("task4", 1)):
        add_stage(checkout, stage)
        (checkout / stage / "compile.py").write_text(
            f"import sys; print('compiling {stage}', *sys.argv[1:]); sys.exit({status})"
        )
    assert run("--stage", "2", "4") == 0
    out = capsys.readouterr().out
    assert out.index("compiling task2 --device cpu") < out.index("task2 has run")
    assert "task4 does not build" in out and "compiling task4" not in out


def test_ctrl_c_changes_nothing(
    checkout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_stage(checkout, "task1")
    assert run("--stage", "1") == 0
    before = {p: p.read_bytes() for p in checkout.rglob("*") if p.is_file()}

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(grade, "_run_stage", interrupted)
    assert run("--stage", "1") == 130
    assert "as they were" in capsys.readouterr().err
    assert before == {p: p.read_bytes() for p in checkout.rglob("*") if p.is_file()}


def test_an_interrupted_child_is_ended_with_all_it_started(checkout: Path) -> None:
    (checkout / "sleeper.py").write_text(
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    pids: list[int] = []

    def hear(line: str) -> None:
        pids.append(int(line))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        child.run([sys.executable, "-m", "sleeper"], 30, hear, cwd=checkout)
    for _ in range(100):
        if not _alive(pids[0]):
            return
        time.sleep(0.05)
    raise AssertionError("its child is still running")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    # Killed but not yet collected by the init process counts as ended.
    return not (stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] == "Z")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            ("<!-- grade: task5 -->\n", ""),
            "line 15: <!-- end: task5 --> ends a section that was not begun",
        ),
        (("<!-- end: task5 -->\n", ""), "<!-- grade: task6 --> comes before the end of task5"),
        (("<!-- end: machines -->\n", ""), "<!-- end: machines --> is missing"),
        (("task5 -->", "task55 -->"), "names no section"),
        (("note on task5", "<!-- grade: task5 -->\n<!-- end: task5 -->"), "occurs twice"),
        ((FORM[FORM.index("## machines") :], ""), "the marker <!-- grade: machines --> is missing"),
    ],
)
def test_broken_markers_are_reported_before_anything_runs(
    checkout: Path, capsys: pytest.CaptureFixture[str], damage: tuple[str, str], words: str
) -> None:
    add_stage(checkout, "task1")
    broken = FORM.replace(*damage)
    (checkout / "Results.md").write_text(broken)
    assert run("--stage", "1") == 2
    said = capsys.readouterr()
    assert words in said.err and "Nothing was written" in said.err and "has run" not in said.out
    assert (checkout / "Results.md").read_text() == broken
    assert not (checkout / "common/records").exists()


def test_a_missing_form_and_a_damaged_record(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkout / "common/records").mkdir(parents=True)
    (checkout / "common/records/cuda.json").write_text("{")
    assert run("--stage", "1") == 2
    assert "common/records/cuda.json is damaged" in capsys.readouterr().err
    (checkout / "Results.md").unlink()
    assert run("--stage", "1") == 2
    assert "Results.md is missing" in capsys.readouterr().err


# Records and Results.md --------------------------------------------------------------------------


def test_a_run_replaces_only_what_it_measured() -> None:
    first = merge(
        None,
        make_record(
            "task4",
            "cuda",
            benchmarks={"layer": make_benchmark(2), "attention alone": make_benchmark(1)},
        ),
    )
    assert first["benchmarks"]["layer"]["run"]["date"].startswith("2026-01-01")
    # one benchmark ran out of memory, say
    second = merge(
        first,
        make_record("task4", "cuda", date="2026-02-02", benchmarks={"layer": make_benchmark(3)}),
    )
    assert second["benchmarks"]["layer"]["ours"]["median_ms"] == 3
    assert second["benchmarks"]["layer"]["run"]["date"].startswith("2026-02-02")
    assert second["benchmarks"]["attention alone"]["run"]["date"].startswith("2026-01-01")
    # what is no longer measured goes; a run that crashed takes nothing away
    third = merge(second, make_record("task4", "cuda", fields=["layer"]))
    assert set(third["benchmarks"]) == {"layer"}
    crashed = merge(second, make_record("task4", "cuda", fields=[], status="crashed", groups=[]))
    assert set(crashed["benchmarks"]) == {"layer", "attention alone"}


def test_gpu_figures_stay_and_are_marked_stale(tmp_path: Path) -> None:
    (tmp_path / "task4").mkdir()
    source = tmp_path / "task4/attention.py"
    source.write_text("first")
    cuda = merge(
        None, make_record("task4", "cuda", root=tmp_path, benchmarks={"layer": make_benchmark(2)})
    )
    fresh = render(FORM, records(cuda=cuda), tmp_path)
    assert (
        "| layer<br>B4, float32 | 2 ms (2-2, n 9) | 20 TFLOP/s (40% of a float32 matrix product) |"
        in fresh
    )
    assert "**1.00x** SDPA" in fresh and "| attention alone | needs a GPU |" in fresh
    assert "[1] 2026-01-01T00:00:00Z, commit abc123, NVIDIA H200 (driver 580, CUDA 13.0)" in fresh
    assert "stale" not in fresh.lower() and "| task4 | not run | 3 of 3 | 4 of 4 |" in fresh

    source.write_text("second")
    cpu = merge(None, make_record("task4", "cpu", root=tmp_path, earned=2))
    later = render(fresh, records(cuda=cuda, cpu=cpu), tmp_path)
    assert "| layer<br>B4, float32 | 2 ms" in later and "[1, **stale**]" in later
    assert "| task4 | 3 of 3 | 3 of 3, **stale**: sources changed since | 2 of 4 |" in later


def test_the_lower_of_two_machines_counts(tmp_path: Path) -> None:
    cpu = make_record("task4", "cpu", root=tmp_path, earned=4)
    cuda = make_record("task4", "cuda", root=tmp_path, earned=2, status="failed")
    assert "| 2 of 4 |" in render(FORM, records(cpu=cpu, cuda=cuda), tmp_path)


def test_what_the_student_wrote_survives(tmp_path: Path) -> None:
    form = FORM.replace("note on task5", "My **own** note, é, <!-- a comment -->, `<x>`")
    once = render(form, {}, tmp_path)
    assert "My **own** note, é, <!-- a comment -->, `<x>`" in once
    again = render(once, records(a=make_record("task5", "cpu", root=tmp_path)), tmp_path)
    assert _outside(again) == _outside(form)
    windows = form.replace("\n", "\r\n")
    assert "\n" not in render(windows, {}, tmp_path).replace("\r\n", "")


def _outside(text: str) -> list[str]:
    inside, kept = False, []
    for line in text.splitlines():
        inside = (inside or line.startswith("<!-- grade")) and not line.startswith("<!-- end")
        if not inside:
            kept.append(line)
    return kept


def test_a_generated_text_cannot_break_the_form(tmp_path: Path) -> None:
    record = make_record("task7", "cpu", root=tmp_path, fields=[])
    record["texts"] = {"generated text": "<!-- end: task7 -->\n| a | b"}
    filled = render(FORM, records(a=merge(None, record)), tmp_path)
    render(filled, {}, tmp_path)
    assert "> <\\!-- end: task7 -->\n> | a | b" in filled


def test_the_real_form_is_whole() -> None:
    text = (ROOT / "Results.md").read_text(encoding="utf-8")
    try:
        render(text, {}, ROOT)
    except MarkerError as error:
        raise AssertionError(str(error)) from None
    assert sum(POINTS.values()) == 20 and sys.version_info >= (3, 11)


def test_without_a_compiler_good_records_stay():
    files = [grade.RESULTS, *grade.RECORDS.glob("*.json")]
    before = [file.read_bytes() for file in files]
    done = subprocess.run(
        [sys.executable, "-m", "common.grade", "--stage", "2", "--device", "cpu"],
        cwd=ROOT, env=os.environ | {"CXX": "no-such-compiler"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    assert "task2 does not build: the environment variable CXX names" in done.stderr
    assert "Nothing was written" in done.stderr
    assert [file.read_bytes() for file in files] == before


@pytest.fixture
def marked(checkout: Path) -> Path:
    """A checkout with the files of two stages, which have answers; if these are run, they write a record."""
    for stage in ("task1", "task2"):
        add_stage(checkout, stage)
        for file in {"hints.toml", *(Path(piece.file).name for piece in load(stage))}:
            shutil.copy(ROOT / stage / file, checkout / stage)
    return checkout


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize(
    "old, new, says",
    [
        (b"  // END SOLUTION\n", b"", "BEGIN SOLUTION inside BEGIN SOLUTION (line "),
        (b"  // BEGIN SOLUTION\n", b"", "END SOLUTION without BEGIN SOLUTION"),
        (b"  // BEGIN SOLUTION\n", b"  // BEGIN SOLUTION: mine\n", "a mark stands alone on its line; got "),
        (b" SOLUTION\n", b"\n", "softmax_kernel_batched has no BEGIN SOLUTION and END SOLUTION"),
        (b" SOLUTION\n", b"\r\n", "softmax_kernel_batched has no BEGIN SOLUTION and END SOLUTION"),
        (b"partial", b"\xff", "is not UTF-8"),
    ],
)  # fmt: skip
def test_broken_marks_end_a_grade_before_anything_runs(marked, capsys, old, new, says):
    kernel = marked / "task2/attention_kernel.cu"
    kernel.write_bytes(kernel.read_bytes().replace(old, new, -1 if old == b" SOLUTION\n" else 1))
    before = files_in(marked)
    assert run("--stage", "1", "2") == 2
    first, advice = capsys.readouterr().err.splitlines()
    assert re.match(r"task2/attention_kernel.cu:(\d+:)? ", first) and says in first
    assert advice.startswith("Graders read what stands between the marks: put them back (git diff ")
    assert "Nothing was written" in advice and files_in(marked) == before


def test_each_file_with_broken_marks_has_a_sentence(marked, capsys):
    (marked / "task1/attention.py").unlink()
    (marked / "task2/attention_kernel.cu").write_text("")
    assert run("--stage", "1", "2") == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "task1/attention.py: No such file or directory"
    assert (
        said[1].startswith("task2/attention_kernel.cu: softmax_kernel_batched has no")
        and len(said) == 3
    )


def test_marks_of_other_stages_do_not_matter(marked):
    (marked / "task2/attention_kernel.cu").write_text("")
    assert run("--stage", "1") == 0


def test_the_marks_of_the_course_are_whole():
    grade._check_marks(list(POINTS))


def test_line_ends_of_windows_do_not_matter(marked):
    kernel = marked / "task2/attention_kernel.cu"
    kernel.write_bytes(kernel.read_bytes().replace(b"\n", b"\r\n"))
    assert run("--stage", "1", "2") == 0


def test_a_disk_that_cannot_be_written_ends_a_grade_before_anything_runs(
    marked, capsys, monkeypatch
):
    before = files_in(marked)
    monkeypatch.setenv("TMPDIR", str(marked / "gone"))
    assert run("--stage", "1", "2") == 2
    out, said = capsys.readouterr()
    assert "has run" not in out
    assert re.match(
        r"cannot write \d+ MB into .*/gone: No such file or directory. Nothing was", said
    )
    assert files_in(marked) == before


def test_results_of_a_run_that_filled_the_disk_are_not_kept(marked, capsys, monkeypatch):
    """The record of a stage may be lacking for that reason alone."""
    real = grade._run_stage

    def run_and_fill(*arguments):
        monkeypatch.setenv("TMPDIR", str(marked / "gone"))
        return real(*arguments)

    assert run("--stage", "1") == 0
    before = files_in(marked)
    monkeypatch.setattr(grade, "_run_stage", run_and_fill)
    assert run("--stage", "1") == 2
    assert "/gone: No such file or directory. Nothing was written" in capsys.readouterr().err
    assert files_in(marked) == before


def test_a_kernel_that_does_not_compile_is_not_the_machines_fault(monkeypatch):
    monkeypatch.setattr(child, "run", lambda *command, **options: 1)
    said = []
    grade._build("task2", "cpu", said.append)
    assert said == ["task2 does not build; the errors follow with its checks"]


@pytest.mark.parametrize(
    ("said", "ending"),
    [
        ([], "status 1"),
        (["error: no GPU here", ""], "error: no GPU here"),
        (['  File "{root}/task2/attention.py", line 7', "    import math)", "SyntaxError: unmatched ')'"], "task2/attention.py:7: SyntaxError: unmatched ')'"),
        (['  File "{root}/task2/test.py", line 13, in <module>', '  File "/lib/x.py", line 3, in f', "KeyError"], "/lib/x.py:3: KeyError"),
    ],
)  # fmt: skip
def test_how_a_stage_ended(said: list[str], ending: str) -> None:
    assert grade._ending(1, [line.format(root=ROOT) for line in said]) == ending
