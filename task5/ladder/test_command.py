"""The command of the ladder, with and without a GPU, with made-up times."""

import json

import pytest
import torch

from common.record.grid import Grid
from common.timing.compare import Measured
from task5.ladder import __main__ as command
from task5.ladder import bars, plot, prefill, record, steps, table, uneven
from task5.ladder.benchmark import BF16, OURS, paged
from task5.ladder.fakes import ON_CPU, run, times
from task5.ladder.rungs import RUNGS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "B3"], "no shape is named B3; there are\n  B1 32/32 kv1024 d128 bfloat16"),
        (["--shape", "B1 d256"], "no shape is named B1 d256"),
        (["--steps", "0"], "--steps must be at least 1; got 0"),
        (["--rung", "1"], "unrecognized arguments"),
        (["--prefill", "--shape", "B1"], "--shape and --no-check are for the timing of decode"),
        (["--uneven", "--no-check"], "--shape and --no-check are for the timing of decode"),
        (["--uneven", "--prefill"], "argument --prefill: not allowed with argument --uneven"),
        (["--check-only", "--no-check"], "--shape and --no-check are for the timing of decode"),
        (["--prefill", "--render"], "argument --render: not allowed with argument --prefill"),
        (["--steps", "3", "--check-only"], "not allowed with argument --steps"),
        (["--seed", "9" * 23], "a seed is a whole number from 0 to 2147483647; got 999"),
        (["--seed", "-1"], "a seed is a whole number"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        command.main(arguments)
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_shapes_are_chosen_by_words():
    chosen = command._parse(["--shape", "B1 kv8192", "float32"]).shapes
    assert [shape.key for shape in chosen if shape.dtype == BF16] == [
        "B1 32/8 kv8192 d128 bfloat16"
    ]
    assert len(chosen) == 4 and len(command._parse([]).shapes) == len(table.TIMED)


@pytest.mark.skipif(torch.cuda.is_available(), reason="what it does without a GPU")
@pytest.mark.parametrize("option", ["--bars", "--uneven", "--prefill"])
def test_what_needs_a_gpu(option, capsys):
    with pytest.raises(SystemExit) as end:
        command.main([option])
    assert end.value.code == 2 and f"{option} needs a GPU" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="what it does without a GPU")
def test_the_command_without_a_gpu(ladder, monkeypatch, capsys):
    status = {"pytest": 0}
    monkeypatch.setattr(command.pytest, "main", lambda given: status["pytest"])
    assert command.main([]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "timing needs a GPU" in out
    status["pytest"] = 1
    assert command.main(["--check-only"]) == 1
    status["pytest"] = pytest.ExitCode.INTERRUPTED
    assert command.main(["--check-only"]) == 130
    assert capsys.readouterr().out.endswith("\ninterrupted\n")
    assert command.main(["--steps", "3", "--seed", "1"]) == 0
    assert "3 decode steps in" in capsys.readouterr().out
    assert command.main(["--render"]) == 0
    assert "Not measured yet" in (ladder / "RESULTS.md").read_text()
    assert not (ladder / "table.json").exists()


def test_a_rung_that_does_not_compile_is_one_message(monkeypatch, capsys):
    def fails(*_, **__):
        raise command.BuildError("01_shared_work.cu:7: error")

    monkeypatch.setattr(command, "_build", lambda options: [RUNGS[0]])
    monkeypatch.setattr(steps, "run", fails)
    assert command.main(["--steps", "3"]) == 1
    assert capsys.readouterr().out.endswith("01_shared_work.cu:7: error\n")


@pytest.fixture
def on_gpu(ladder, monkeypatch):
    """The command as on a GPU, where nothing is built and every check passes."""
    made_up = times()
    for name, stand_in in {
        "device_of": lambda _: torch.device("cuda", 0),
        "_build": lambda options: list(RUNGS),
        "_check": lambda options: True,
        "_provenance": lambda options, sources=command.SOURCES: run("2026-05-05"),
        "reference": lambda: type("Chip", (), {"read_gb_per_s": 4380.0}),
        "time_shape": lambda shape, sides, seed: Measured(
            {s: t for s, t in made_up.shapes[shape.key].times.items() if s in sides}
        ),
    }.items():
        monkeypatch.setattr(command, name, stand_in)
    grids = {"accuracy": Grid("errors", ["", "rms"], [["x", "1.0"]], [True])}
    monkeypatch.setattr(bars, "accuracy_grid", lambda seed: grids["accuracy"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(plot, "draw", lambda _: None)
    return ladder


def test_only_a_complete_run_is_written(on_gpu, capsys):
    for arguments in (["--shape", "B1"], ["--no-check"], ["--bars"]):
        assert command.main(arguments) == 1  # pages of 16 are too slow
        out = capsys.readouterr().out
        assert "1.20 !" in out and ("all rungs" in out) == (arguments != ["--bars"])
        assert ("errors" in out) == (arguments[0] != "--shape")
        assert not record.TABLE.exists()
    assert command.main(["--check-only"]) == 0 and not record.TABLE.exists()
    assert command.main([]) == 1
    kept = record.load()
    assert kept.times.run["date"] == "2026-05-05" and len(kept.bars.grids) == 2
    curve = kept.times.shapes["B16 32/8 kv131072 d128 bfloat16"].times
    assert OURS in curve and paged(64) not in curve and ON_CPU[0].label not in curve
    assert "2026-05-05" in (on_gpu / "RESULTS.md").read_text()
    kept_parts = {"times", "bars", "uneven", "prefill", "steps"}
    assert set(json.loads(record.TABLE.read_text())) == kept_parts


def test_the_steps_of_a_gpu_are_kept(on_gpu, monkeypatch):
    grid = Grid("9 decode steps", ["", "found"], [["x", "1.0"]], [True])
    monkeypatch.setattr(steps, "run", lambda number, seed, device: grid)
    assert command.main(["--steps", "9"]) == 0
    assert record.load().steps.grids == [grid]
    assert "9 decode steps" in (on_gpu / "RESULTS.md").read_text()


@pytest.mark.parametrize("option", ["uneven", "prefill"])
def test_tables_beside_the_libraries_are_kept(on_gpu, monkeypatch, option):
    grid = Grid(option, ["", "found"], [["x", "1.0"]], [True])
    monkeypatch.setattr(uneven, "time_lengths", lambda seed, say: grid)
    monkeypatch.setattr(prefill, "time_chunks", lambda seed, say: grid)
    assert command.main([f"--{option}"]) == 0
    assert getattr(record.load(), option).grids == [grid]
    assert "| x | 1.0 |" in (on_gpu / "RESULTS.md").read_text()
