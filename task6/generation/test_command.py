"""The command: what it refuses, prints and keeps."""

import json
import subprocess
import sys

import pytest
import torch

from common.paths import ROOT
from task6.generation import __main__ as command
from task6.generation import graded, peers, record
from task6.generation.bars import COURSE
from task6.generation.benchmark import OURS
from task6.generation.fakes import READ, beside, facts, made_up, speed, times
from task6.generation.record import Record

SMALL = ["--device", "cpu", "--config", "tiny", "--dtype", "float32", "--batch", "2", "--prompt", "5", "--new-tokens", "6"]  # fmt: skip


def test_the_command(capsys):
    assert command.main([*SMALL, "--profile"]) == 0
    shown = capsys.readouterr().out
    for words in ("first token", "between tokens", "99 %", "tokens/s", "GB/s", OURS, peers.LLAMA, "operator"):  # fmt: skip
        assert words in shown
    assert "task 6's model: it has as many kv heads as heads" in shown and "6 of 6" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "gpt"], "the configurations are tiny, course, llama-3.2-1b; got 'gpt'"),
        (["--batch", "0"], "--batch must be at least 1; got 0"),
        (["--prompt", "-1"], "--prompt must be at least 1; got -1"),
        (["--new-tokens", "0"], "--new-tokens must be at least 2; got 0"),
    ],
)
def test_bad_input_is_one_sentence(arguments, message, capsys):
    assert command.main([*SMALL, *arguments]) == 1
    assert capsys.readouterr().out == f"task6.generation: {message}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "--tokens must be at least 1; got 0"),
        (["--tokens", "5", "--bars"], "not allowed with"),
        (["--dtype", "int8"], "invalid choice"),
        (["--seed", "1" * 23], "a seed is a whole number from 0 to 2147483647; got 111"),
        (["--device", "cpu", "--bars"], "--bars needs a GPU"),
        (["--device", "cpu", "--products", "tensor cores"], "is for float32 on a Hopper GPU; got"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        command.main(arguments)
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_a_number_of_processes_that_does_not_divide(monkeypatch, capsys):
    """Known before the processes look for each other; the first of them says it."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_RANK", "0")
    for rank, said in (("0", "the number of processes must divide heads; got 3 and 4"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        assert command.main(SMALL) == 1
        assert said in (shown := capsys.readouterr().out) and bool(shown) == bool(said)


def test_many_tokens_through_the_command(folder, capsys):
    assert command.main([*SMALL, "--tokens", "14"]) == 0
    shown = capsys.readouterr().out
    assert "14 tokens for each of 2 sequences, in 3 texts" in shown and "2 of 2 bars met" in shown
    assert not record.TABLE.exists()  # of a CPU nothing is kept


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE from 1 on; got {'WORLD_SIZE': '0'}"),
        ({"WORLD_SIZE": "two"}, "torchrun sets whole numbers"),
        ({"WORLD_SIZE": "2"}, "of 2 processes each has its RANK, from 0 to 1, and LOCAL_RANK"),
        ({"WORLD_SIZE": "2", "RANK": "2", "LOCAL_RANK": "0"}, "from 0 to 1"),
    ],
)
def test_an_environment_that_is_not_torchruns(environment, message, monkeypatch, capsys):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end:
        command.main(SMALL)
    assert end.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "Expecting value: line 1 column 1"),
        ("<<<<<<< HEAD\n{}", "Expecting value"),
        ("[]", "an object was expected; got list"),
        ('{"bars": 3}', "'int' object has no attribute"),
        ('{"bars": {}}', "missing 2 required"),
        ('{"words": 1}', "no field 'words'"),
    ],
)
def test_a_broken_record_is_named_before_anything_runs(folder, capsys, content, message):
    record.TABLE.write_text(content)
    for arguments in (["--render"], SMALL):
        assert command.main(arguments) == 1
        shown = " ".join(capsys.readouterr().out.split())
        assert f"{record.TABLE} is no record of this version" in shown and message in shown
    assert record.TABLE.read_text() == content


def test_results_that_were_not_measured(folder):
    assert command.main(["--render"]) == 0
    assert "Not measured yet" in (folder / "RESULTS.md").read_text()


@pytest.fixture
def on_gpu(folder, monkeypatch):
    """The command as on a GPU, with made-up times."""
    pytest.importorskip("matplotlib")
    made_up_times = {found.case: found for found in times().found}
    for name, stand_in in {
        "device_of": lambda _: torch.device("cuda", 0),
        "reference": lambda: type("Chip", (), {"read_gb_per_s": READ}),
        "run": lambda case, **asked: made_up_times[case],
        "origin": lambda device, seed, *sources: facts("2026-05-05"),
    }.items():
        monkeypatch.setattr(command, name, stand_in)
    monkeypatch.setattr(graded, "grids", lambda seed: [graded.layer_grid([beside(1100.0)])])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return made_up_times


def test_the_bars_of_a_gpu_are_kept(on_gpu, folder, monkeypatch, capsys):
    assert command.main(["--bars"]) == 1  # seven are missed
    shown = capsys.readouterr().out
    assert "6 of 13 bars met" in shown
    assert set(json.loads(record.TABLE.read_text())) == {"bars", "shared", "tokens", "graded"}
    assert "3.67" in shown and "1 of 1 bars met" in (folder / "RESULTS.md").read_text()
    assert "2026-05-05" in (folder / "RESULTS.md").read_text() and (folder / "step.png").exists()
    on_gpu[COURSE].speeds[OURS] = speed(84.0, 2.0)  # 13 GB in 2 ms
    assert command.main(["--bars"]) == 1
    assert "2 ms for a step is impossible: its bytes take 3.25 ms" in capsys.readouterr().out
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # each process says so, the first one of them aloud
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert command.main(["--bars"]) == 1
        said = "each process needs a GPU of its own: there are 1; got 2" in capsys.readouterr().out
        assert said == (rank == "0")


def test_the_bars_of_two_gpus_are_kept_beside_them(on_gpu, folder, monkeypatch):
    record.save(Record(times()))
    monkeypatch.setattr(
        command, "run", lambda case, group=None, **asked: made_up(case, 60.0, 2.0 if group else 3.3, 2 if group else 1)
    )  # fmt: skip
    options = command._parse(["--bars"], "prog")
    group = type("Two", (), {"rank": 0, "world": 2, "sum": lambda self, x: x})()
    options.device = "cpu"
    assert command._shared_bars(options, group) == 0
    kept = record.load()
    assert [found.world for found in kept.shared["2"].found] == [1, 2] and kept.bars
    assert "on 2 GPUs, relative to one" in (folder / "RESULTS.md").read_text()


def test_task_6s_test_hands_over(monkeypatch):
    assert command.asked_for(["--config=tiny"]) and command.asked_for(
        ["--seed", "1", "--batch", "2"]
    )
    assert not command.asked_for(["--prefill", "--seed", "1"])
    done = subprocess.run(
        [sys.executable, "-m", "task6.test", "--config", "gpt"], cwd=ROOT, capture_output=True, text=True
    )  # fmt: skip
    assert done.returncode == 1 and done.stdout.startswith(
        "task6.generation: the configurations are"
    )
