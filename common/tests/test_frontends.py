"""The command of task 4's front ends. Their checks are in task4/frontends/test.py."""

import subprocess
import sys
from importlib.metadata import version

import pytest
import torch

from common.paths import ROOT
from task4.frontends import __main__ as command
from task4.frontends.benchmark import Times
from task4.frontends.frontends import FrontEnd
from task4.frontends.test import ASSIGNMENT, HOST

CHECKS = len(HOST) + len(ASSIGNMENT)


def test_the_command(capsys):
    with pytest.raises(SystemExit):
        command.main(["rust"])
    assert "there is no front end 'rust'; there are cpp, numba, " in capsys.readouterr().err
    done = subprocess.run(
        [sys.executable, "-m", "task4.frontends", "cpp", "--device", "cpu", "--check-only"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"cpp   {CHECKS} of {CHECKS}" in done.stdout


def test_the_table_has_bars_and_says_which_are_not_met(monkeypatch):
    slow = {"host.cpp": Times(1.0, 0.5, 9), "PyTorch": Times(0.5, 1.0, 9)}
    monkeypatch.setattr(command, "time_on_cpu", lambda *_: slow)
    grids = command._on_cpu(seed=1)
    assert [grid.bars for grid in grids] == [[False] * 3] * 2
    assert grids[0].rows[0][-1] == "0.50 (n 9)" and grids[0].rows[1][-1] == "0.50 ! (n 9)"


def test_what_is_not_installed_is_said():
    other = FrontEnd("other", "", (), ("cpu",), packages=("no-such-package", "torch"))
    assert (
        other.why_not("cpu")
        == "other needs no-such-package: make frontends, or pip install '.[other]'"
    )
    assert other.versions == f"torch {version('torch')}"


@pytest.mark.parametrize(("simulator", "words"), [("", ""), ("a simulator", ", and in a simulator where there is no GPU")])  # fmt: skip
def test_where_a_front_end_runs_is_said(monkeypatch, simulator, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    other = FrontEnd("other", "", (), ("cuda",), simulator=simulator, module="task4.attention")
    assert other.why_not("cuda") is None
    assert other.why_not("cpu") == f"other runs on cuda tensors{words}; here they are on cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (other.why_not("cpu") is None) == bool(simulator)


def test_a_gpu_that_is_not_there(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        command.main(["--device", "cuda"])
    assert "--device cuda: PyTorch sees no GPU here" in capsys.readouterr().err


def test_a_run_replaces_its_devices_section_alone(tmp_path, monkeypatch, capsys):
    results = tmp_path / "RESULTS.md"
    results.write_text(
        "<!-- frontends: cuda -->\nA\n\nB\n<!-- end: cuda -->\n<!-- frontends: cpu -->\n<!-- end: cpu -->\n"
    )
    monkeypatch.setattr(command, "RESULTS", results)
    for device, lines in (("cpu", ["new"]), ("cuda", ["C"])):
        before = results.read_text()
        results.write_text(command._filled(device, lines))
        assert results.read_text() != before
    assert (
        "cuda -->\nC\n<!-- end" in results.read_text() and "cpu -->\nnew\n" in results.read_text()
    )
    results.write_text("<!-- frontends: cpu -->\n")
    assert command.main(["cpp", "--device", "cpu"]) == 1
    assert "RESULTS.md: <!-- end: cpu --> is missing" in capsys.readouterr().out
