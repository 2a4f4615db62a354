"""Timing GPT-2: the bars, what is written, and the command."""

import json
import math

import pytest
import torch

from common.record import provenance
from common.record.grid import Grid
from common.record.typed import Tables, read, write
from common.timing import Timing
from task6.generation.measure import Speed
from task7 import speed
from task7.speed import GENERATE, LOOP, ONE_LAUNCH, SDPA, Found, Record


def found(launches=0.5, one=0.4, ours=8.0, sdpa=8.0, same=128):
    """Made-up times in milliseconds."""

    def timing(ms):
        return Timing.of([0.99 * ms, ms, 1.01 * ms])

    loops = {
        name: Speed(timing(3.0), timing(ms), 1.1 * ms)
        for name, ms in ((ONE_LAUNCH, one), (LOOP, launches))
    }
    calls = {GENERATE: timing(ours), SDPA: timing(sdpa)}
    texts = {SDPA: 128, GENERATE: 128, ONE_LAUNCH: 128, LOOP: same}
    return Found(128, 0.115, loops, calls, sdpa / ours, texts)


def facts(date="2026-01-01"):
    run = provenance(speed.SOURCES, device="cpu", seed=1)
    gpu = {"gpu": "NVIDIA H200", "driver": "580", "cuda": "13.0"}
    return run | {"date": date, "machine": run["machine"] | gpu}


def test_bars_are_judged():
    grid = speed.bars_grid(found())
    assert grid.rows[0] == [f"{ONE_LAUNCH}: time between tokens", "0.4 ms", "at most 0.4 ms", "met"]
    assert grid.rows[1][1:] == ["1.000 x", "at least 1 x", "met"]
    assert [row[1:] for row in grid.rows[2:]] == [["128 of 128", "all", "met"]] * 3
    assert grid.bars == [True] * 5
    missed = speed.bars_grid(found(launches=0.41, one=0.42, ours=8.01, same=127))
    assert missed.rows[0][:2] == [f"{LOOP}: time between tokens", "0.41 ms"]
    assert missed.bars == [False, False, True, False, True] and missed.rows[3][1] == "127 of 128"
    nan = speed.bars_grid(found(launches=math.nan, one=math.nan, ours=math.nan))
    assert nan.bars[:2] == [False, False]


def test_the_times():
    rows = speed.times_grid(found()).rows
    assert rows[0] == [
        ONE_LAUNCH,
        "3",
        "0.4",
        "0.3968 to 0.4032",
        "2,500",
        "20.000",
        "29%",
        "128 of 128",
    ]
    assert rows[-2][:3] == [SDPA, "", "8"] and rows[-1][:3] == ["floor", "", "0.115"]
    assert len({len(row) for row in rows}) == 1


def test_calls_of_a_round_are_compared(monkeypatch):
    """The host is ten times slower in the second one, which begins with SDPA."""
    times = iter([1.0, 2.0, 10.0, 10.0])
    monkeypatch.setattr(speed, "timed", lambda run, cuda: next(times))
    result = speed.run(*speed.made(0, torch.device("cpu")), 2)
    assert result.beside == 1.5 and next(times, None) is None


def test_the_bytes_of_a_step():
    model, _ = speed.made(0, torch.device("cpu"))
    layer = 12 * 128 * 128 + 13 * 128
    weights = 2 * layer + 2 * 128 + 300 * 128 + 128  # the last norm, the embedding, a position
    assert speed.step_bytes(model, 10) == 4 * (weights + 2 * 2 * 128 * 10)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """table.json and RESULTS.md of its own."""
    monkeypatch.setattr(speed, "FOLDER", tmp_path)
    monkeypatch.setattr(speed, "TABLE", tmp_path / "table.json")
    (tmp_path / "RESULTS.md").write_text(
        "mine\n<!-- ladder: speed -->\n<!-- end: speed -->\nmine\n"
    )
    return tmp_path


def test_results_are_filled_in_between_the_markers_only(folder):
    assert "Not measured yet" in speed.rendered(read(Record, speed.TABLE))
    record = Record(Tables(facts("2026-03-03"), [speed.bars_grid(found())]))
    write(speed.TABLE, record)
    assert read(Record, speed.TABLE) == record
    text = speed.rendered(record)
    assert text.startswith("mine\n") and text.endswith("\nmine\n") and "5 of 5 bars met" in text
    assert "2026-03-03" in text and "NVIDIA H200" in text and speed.STALE not in text
    record.speed.run["sources"]["sha256"] = "0"
    assert speed.STALE in speed.rendered(record)


def test_the_committed_results_are_what_is_rendered_from_the_record():
    """All but whether the sources have changed since, which table.json does not say."""

    def lines(text):
        return [line for line in text.splitlines() if line not in (speed.STALE, "")]

    committed = (speed.FOLDER / "RESULTS.md").read_text("utf-8")
    assert lines(committed) == lines(speed.rendered(read(Record, speed.TABLE))), (
        "task7/RESULTS.md is not as table.json has it: python -m task7.speed --render"
    )


def test_the_command_on_a_cpu(folder, capsys):
    assert speed.main(["--device", "cpu", "--seed", "3"]) == 0
    shown = capsys.readouterr().out
    for side in (LOOP, GENERATE, SDPA):
        assert f"\n{side} " in shown
    assert shown.count("8 of 8") == 3 and "nothing is written" in shown
    assert not speed.TABLE.exists() and "bars met" not in shown


def test_what_a_gpu_found_is_kept(folder, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, stand_in in {
        "device_of": lambda _: torch.device("cpu"),
        "provenance": lambda *_, **__: facts("2026-05-05"),
        "run": lambda *_: found(one=0.3),
    }.items():
        monkeypatch.setattr(speed, name, stand_in)
    assert speed.main([]) == 0
    assert "5 of 5 bars met" in capsys.readouterr().out and json.loads(speed.TABLE.read_text())
    assert "2026-05-05" in (folder / "RESULTS.md").read_text()
    monkeypatch.setattr(speed, "run", lambda *_: found(same=2))
    assert speed.main([]) == 1
    assert isinstance(read(Record, speed.TABLE).speed.grids[0], Grid)
    assert speed.main(["--render"]) == 0
    assert "2 of 128" in (folder / "RESULTS.md").read_text()


def test_an_error_is_one_sentence(folder, monkeypatch, capsys):
    def refuses(*_, **__):
        raise ValueError("of GPUs, a persistent step runs on Hopper alone")

    monkeypatch.setattr(speed, "Gpt2Decoder", refuses)
    assert speed.main(["--device", "cpu"]) == 1
    assert (
        capsys.readouterr().out == "task7.speed: of GPUs, a persistent step runs on Hopper alone\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seed", "-1"], "a seed is a whole number from 0 to 2147483647; got -1"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--device", "cuda"], "--device cuda: PyTorch sees no GPU here"),
    ],
)
def test_bad_arguments(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        speed.main(arguments)
    assert end.value.code == 2 and message in capsys.readouterr().err
