"""Grading in jobs: with submitit's jobs of this machine, and on a real Slurm where there is one."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from common.staff.grade import __main__, one, slurm
from common.staff.grade.submission import Submission

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
submitit = pytest.importorskip("submitit", reason="needs submitit: the extra slurm")


def slurm_runs():
    if shutil.which("sbatch") is None:
        return False
    return subprocess.run(["sinfo"], capture_output=True, check=False, timeout=20).returncode == 0


def pretended_work():
    """What a job does with submissions whose names say how they end; submitit sends nested functions as they are."""

    def work(entries, course, options, results):
        import json
        import os
        import signal
        import time

        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which submitit has ignored
        for entry in entries:
            (options.out / f"began-{entry.name}").write_text(str(os.getpid()))
            if "kill" in entry.name:
                os.kill(os.getpid(), signal.SIGKILL)
            if "raise" in entry.name:
                raise ValueError("no space left on device")
            if "sleep" in entry.name:
                time.sleep(120)
            result = {"name": entry.name, "failed": False}
            content = {"result": result, "missing": ["there is no prlimit"]}
            scratch = results / f".{entry.name}"
            scratch.write_text(json.dumps(content))
            scratch.rename(results / f"{entry.name}.json")

    return work


@pytest.fixture
def run(tmp_path, monkeypatch):
    """``run(*names)`` grades submissions of these names; its results by name, as they come."""
    monkeypatch.setattr(slurm, "POLL", 0.2)
    monkeypatch.setattr(slurm, "LATE", 0.0)
    monkeypatch.setattr(slurm, "_work", pretended_work())
    monkeypatch.setattr(one, "known", lambda *_: None)
    out = tmp_path / "out"
    out.mkdir()

    def start(*names, jobs=None):
        course = SimpleNamespace(edition=Path(tempfile.mkdtemp(dir=out)) / "edition")
        entries = [Submission(name, Path(name)) for name in names]
        for result in slurm.grade(entries, course, one.Options(out, 1), jobs):
            yield result["name"], result

    start.out = out
    return start


@pytest.fixture
def local(monkeypatch):
    """Jobs are processes of this machine; the list of them."""
    jobs = []

    def executor(folder, name, minutes, limit, gpu):
        local = submitit.LocalExecutor(folder)
        local.update_parameters(timeout_min=minutes)
        send = local.map_array
        local.map_array = lambda *given: jobs.extend(sent := send(*given)) or sent
        return local

    def state(job):
        name = {"RUNNING": "RUNNING", "INTERRUPTED": "CANCELLED"}.get(job.state, "FAILED")
        return slurm.State(name, "None")

    def cancel(name):
        for job in jobs:
            job.cancel()
        for job in jobs:
            job._process.wait(20)

    monkeypatch.setattr(slurm, "_executor", executor)
    monkeypatch.setattr(slurm, "_states", lambda name: {job.job_id: state(job) for job in jobs})
    monkeypatch.setattr(slurm, "_cancel", cancel)
    return jobs


def test_a_job_that_ends_costs_one_row(run, local, monkeypatch, capsys):
    monkeypatch.setattr(slurm, "JOBS", 2)
    found = dict(run("a", "kill", "b", "c", "raise", "d"))
    assert {name for name, result in found.items() if not result["failed"]} == {"a", "b", "c", "d"}
    (remark,) = found["kill"]["remarks"]
    assert remark.startswith("NOT GRADED: its Slurm job") and "FAILED" in remark
    assert "ValueError: no space left on device" in found["raise"]["remarks"][0]
    assert len(local) == 4  # two with three submissions each; b and d were sent again
    assert (run.out / "kill/feedback.md").exists() and not (run.out / "kill/record.json").exists()
    assert capsys.readouterr().out.count("on a node, there is no prlimit") == 1


def test_a_cancelled_job_is_not_sent_again(run, local, monkeypatch):
    monkeypatch.setattr(slurm, "JOBS", 1)
    states = {"name": "RUNNING"}
    monkeypatch.setattr(
        slurm,
        "_states",
        lambda name: {job.job_id: slurm.State(states["name"], "None") for job in local},
    )
    coming = run("a", "sleep", "b")
    assert next(coming)[0] == "a"
    states["name"] = "CANCELLED"
    rest = dict(coming)
    assert set(rest) == {"sleep", "b"} and len(local) == 1
    assert all("CANCELLED" in result["remarks"][0] for result in rest.values())
    slurm._cancel("")


def test_when_it_is_interrupted_nothing_runs_on(run, local):
    coming = run("a", "sleep")
    assert next(coming)[0] == "a"
    while not (run.out / "began-sleep").exists():
        time.sleep(0.05)
    coming.close()
    pid = int((run.out / "began-sleep").read_text())
    with pytest.raises(ProcessLookupError):
        for _ in range(400):  # a busy machine takes its time to end it
            os.kill(pid, 0)
            time.sleep(0.05)


def test_what_is_known_is_not_sent(run, local, monkeypatch):
    known = {"a": {"name": "a", "failed": False}}
    monkeypatch.setattr(one, "known", lambda entry, *_: known.get(entry.name))
    monkeypatch.setattr(one, "graded", lambda entry, *_: known[entry.name])
    assert [name for name, _ in run("a")] == ["a"] and not local
    assert [name for name, _ in run("a", "b")] == ["a", "b"] and len(local) == 1


def test_slurm_may_be_silent_for_a_while(run, local, monkeypatch):
    answers = iter([None, None])
    said = slurm._states
    monkeypatch.setattr(slurm, "_states", lambda name: next(answers, said(name)))
    assert dict(run("a"))["a"]["failed"] is False


def test_a_job_that_slurm_has_forgotten_is_over(run, local, monkeypatch):
    monkeypatch.setattr(slurm, "_states", lambda name: {})
    found = dict(run("sleep"))
    assert "GONE (Slurm no longer knows it)" in found["sleep"]["remarks"][0]
    slurm._cancel("")


def test_why_jobs_wait_is_said_once(run, local, monkeypatch, capsys):
    said = iter([slurm.State("PENDING", "PartitionTimeLimit")] * 2)
    real = slurm._states
    monkeypatch.setattr(
        slurm,
        "_states",
        lambda name: {j.job_id: s for j in local} if (s := next(said, None)) else real(name),
    )
    assert list(run("a"))
    assert capsys.readouterr().out.count("jobs wait for Slurm: PartitionTimeLimit") == 1


def test_what_a_killed_run_left_is_removed(tmp_path, monkeypatch):
    cancelled = []
    monkeypatch.setattr(slurm, "_cancel", cancelled.append)
    with slurm.scratch(tmp_path, Console()) as folder:
        (folder / "x").write_text("")
        with slurm.scratch(tmp_path, Console()) as again:
            assert again == folder and not any(again.iterdir())
    assert len(cancelled) == 1 and not folder.exists()


@pytest.mark.parametrize("lacks", ["submitit", "sbatch"])
def test_what_is_missing_is_said(lacks, tmp_path, monkeypatch, capsys):
    found = importlib.util.find_spec
    if lacks == "submitit":
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: None if name == lacks else found(name)
        )
    monkeypatch.setattr(shutil, "which", lambda name: None)
    (tmp_path / "one/task1").mkdir(parents=True)
    assert __main__.main([str(tmp_path / "one"), "--out", str(tmp_path / "out"), "--slurm"]) == 2
    assert f"error: --slurm needs {lacks if lacks == 'submitit' else 'Slurm'}" in (
        capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()


needs_slurm = pytest.mark.skipif(not slurm_runs(), reason="needs a running Slurm")


@needs_slurm
def test_on_a_real_slurm(run):
    """A crash, a job that is cancelled, and one that is right."""
    found = {}
    for name, result in run("a", "raise", "sleep"):
        found[name] = result
        if len(found) == 2:
            while not (run.out / "began-sleep").exists():
                time.sleep(0.1)
            queue = ["squeue", "--noheader", "--array", "--format=%i", "--states=running"]
            queue.append(f"--name={slurm._name(run.out)}")
            (job,) = subprocess.run(
                queue, capture_output=True, text=True, check=True
            ).stdout.split()
            subprocess.run(["scancel", job], check=True)
    assert found["a"]["failed"] is False
    assert "FAILED (NonZeroExitCode): ValueError: no space left" in found["raise"]["remarks"][0]
    assert "ended: CANCELLED" in found["sleep"]["remarks"][0]


@needs_slurm
def test_a_real_job_is_cancelled(run):
    coming = run("a", "sleep")
    assert next(coming)[0] == "a"
    while not (run.out / "began-sleep").exists():
        time.sleep(0.1)
    coming.close()
    assert slurm._states(slurm._name(run.out)) is not None
    assert slurm._slurm("squeue", "--noheader", f"--name={slurm._name(run.out)}") == ""
    pid = int((run.out / "began-sleep").read_text())
    until = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.2)
    state = Path(f"/proc/{pid}/status")
    assert not state.exists(), state.read_text()


@needs_slurm
def test_a_cluster_that_takes_no_jobs(run, monkeypatch):
    monkeypatch.setenv("SBATCH_PARTITION", "no-such-partition")
    with pytest.raises(slurm.SlurmError, match="[Ii]nvalid partition"):
        list(run("a"))
