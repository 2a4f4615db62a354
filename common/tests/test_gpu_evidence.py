"""The sanitizer's part of the GPU evidence, with a stand-in for compute-sanitizer."""

import os
import stat
import threading
import time
from pathlib import Path

import pytest

from common import child
from common.staff import gpu_evidence, host_cost

TEST = ["-m", "task2.test"]


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Let a shell script be ``compute-sanitizer``."""

    def become(script: str) -> None:
        path = tmp_path / "compute-sanitizer"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return become


@pytest.mark.parametrize(
    ("script", "clean", "summary"),
    [
        ("echo ERROR SUMMARY: 0 errors", True, ["ERROR SUMMARY: 0 errors"]),
        ("echo ERROR SUMMARY: 2 errors; exit 9", False, ["ERROR SUMMARY: 2 errors"]),
        ("echo ERROR SUMMARY: 0 errors; exit 1", False, ["ERROR SUMMARY: 0 errors"]),
        ("true", False, []),
    ],
)
def test_what_counts_as_clean(tool, script, clean, summary):
    tool(script)
    job = gpu_evidence.sanitize("memcheck", TEST)
    assert job == {"tool": "memcheck", "test": "task2.test", "clean": clean, "summary": summary}


def test_the_parts_are_told_apart(tool):
    tool("echo ERROR SUMMARY: 0 errors")
    parts = [("memcheck", "decode"), ("memcheck", "not decode"), ("initcheck", "not decode")]
    jobs = [(tool, gpu_evidence.kernels(tool, part)) for tool, part in parts]
    names = [gpu_evidence.sanitize(*job)["test"] for job in jobs]
    file = "common/tests/test_devices_agree.py"
    assert names == [
        f"{file} -k {part}" for part in ("decode", "not decode", "not decode and not step")
    ]


def test_a_job_that_hangs_is_stopped_and_reported(tool, monkeypatch, capsys):
    monkeypatch.setattr(gpu_evidence, "LONGEST", 0.5)
    tool("echo rung 14; sleep 60 & wait")
    job = gpu_evidence.sanitize("memcheck", TEST)
    assert not job["clean"] and job["summary"] == ["stopped after 0.5 s"]
    assert "rung 14" in capsys.readouterr().out


def test_what_other_threads_run_can_be_ended(tmp_path: Path):
    said: list[str] = []
    command = ["sh", "-c", "echo on; sleep 60 & wait"]

    def run():
        with pytest.raises(KeyboardInterrupt):
            child.run(command, 60, said.append, cwd=tmp_path)
        said.append("off")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    until = time.monotonic() + 10
    while not said and time.monotonic() < until:
        time.sleep(0.01)
    assert said == ["on"] and thread.is_alive()
    child.end_all()
    thread.join(10)
    assert not thread.is_alive() and said == ["on", "off"]


@pytest.mark.parametrize(("us", "ok"), [(9.9, True), (10.1, False)])
def test_what_a_call_may_cost_the_host(us, ok, monkeypatch, capsys):
    step = lambda kv_len: (kv_len // 100, None)  # noqa: E731
    monkeypatch.setattr(host_cost, "_prompt", lambda: None)
    monkeypatch.setattr(host_cost, "_decode_step", step)
    monkeypatch.setattr(host_cost, "microseconds", lambda call: us)
    found = host_cost.run_host()
    assert found["ok"] == ok
    assert [cost["allowed"] for cost in found["costs"].values()] == [10, 24, 36]
    assert f"decode step, 10 splits, 3 launches: {us} us (allowed: 36)" in capsys.readouterr().out
