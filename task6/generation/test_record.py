"""What measuring leaves: the bars, the record with its text and picture, and the command that writes them."""

import json
import math
import subprocess
import sys

import pytest
import torch

from common.paths import ROOT
from common.record.grid import Grid
from task6.generation import __main__ as command
from task6.generation import bars, graded, peers, plot, record, table
from task6.generation.bars import COURSE, COURSE_FP32, LLAMA, TENSOR_CORES
from task6.generation.benchmark import OURS, Found
from task6.generation.breakdown import GAPS, Part
from task6.generation.graded import Beside
from task6.generation.measure import Speed
from task6.generation.record import Record, Tables, Times

READ = 4000.0  # GB/s


# Bars, the record, its text and its picture -----------------------------------------------------------------


def speed(first, between):
    return Speed.of([first] * 3, [0.99 * between, between, 1.01 * between])


def made_up(case, first, between, world=1):
    """A step that has to read 13 GB, 3.25 ms at READ; of the smaller model 2.6 GB."""
    found = Found(
        case,
        world,
        (2.6e9 if case == LLAMA else 13e9) / world,
        10**10,
        int(1.03e10),
        int(1.06e10),
        1980,
        [1, 2, 3],
    )
    found.speeds = {OURS: speed(first, between), peers.READABLE: speed(first, 3 * between)}
    found.same = {peers.READABLE: 99}
    found.left_out = {peers.LLAMA: "out of memory"}
    found.parts = [Part("o", "tensor_core_kernel", 24, 900.0, 3e9), Part(GAPS, "", 0, 30.0), Part("x", "x", 1, 0.1)]  # fmt: skip
    found.one_launch = [Part("o", "", 24, 800.0, 3e9), Part("embedding", "", 1, 5.0)]
    return found


def facts(date="2026-01-01"):
    found = record.origin("cpu", 1)
    gpu = {"gpu": "NVIDIA H200", "driver": "580", "cuda": "13.0"}
    return found | {"date": date, "machine": found["machine"] | gpu}


def times(date="2026-01-01"):
    found = [made_up(COURSE, 84.0, 3.3), made_up(COURSE_FP32, 990.0, 6.8), made_up(LLAMA, 5.0, 0.7)]
    found.append(made_up(TENSOR_CORES, 451.0, 6.8))
    return Times(facts(date), READ, found)


def test_bars_are_judged():
    grid = bars.grid(times())
    judged = {row[0]: (row[1], row[3]) for row in grid.rows}
    assert len(judged) == 5 + 5 + 2 + 1
    assert judged[f"{COURSE}: time between tokens"] == ("3.3 ms", "met")
    assert judged[f"{COURSE}: the same, relative to the floor"] == ("1.015", "met")
    assert judged[f"{COURSE}: memory allocated, relative to weights and cache"] == ("1.03", "met")
    assert judged[f"{COURSE}: memory reserved, relative to weights and cache"][1] == "not met !"
    assert judged[f"{COURSE_FP32}: time between tokens"] == ("6.8 ms", "not met !")
    assert judged[f"{TENSOR_CORES}: time to the first token"] == ("451 ms", "not met !")
    assert judged[f"{COURSE_FP32}: tokens equal to those of task 6's model"] == ("99 of 100", "not met !")  # fmt: skip
    assert judged[f"{LLAMA}: time between tokens"] == ("0.7 ms", "met")
    assert grid.bars.count(False) == 7


def test_the_faster_way_is_judged():
    found = made_up(COURSE_FP32, 990.0, 6.8)
    found.speeds[peers.ONE_LAUNCH] = speed(990.0, 6.6)
    found.same[peers.ONE_LAUNCH] = 100
    rows = bars.grid(Times(facts(), READ, [found])).rows
    judged = {name: (value, verdict) for name, value, _, verdict in rows}
    name = f"{COURSE_FP32}: time between tokens, a step in one launch"
    assert judged[name] == ("6.6 ms", "met")
    name = f"{COURSE_FP32}: tokens equal to those of the decoder, a step in one launch"
    assert judged[name] == ("100 of 100", "met")


@pytest.mark.parametrize(("world", "between", "verdict"), [(2, 2.0, "met"), (4, 1.4, "not met !")])
def test_the_bar_of_several_gpus(world, between, verdict):
    found = [made_up(COURSE, 84.0, 3.3), made_up(COURSE, 60.0, between, world)]
    (row,) = bars.grid(Times(facts(), READ, found)).rows
    assert row[0].endswith(f"on {world} GPUs, relative to one") and row[3] == verdict


def test_several_gpus_are_compared_with_the_faster_way_of_one():
    alone, both = made_up(COURSE, 84.0, 4.0), made_up(COURSE, 60.0, 2.0, 2)
    alone.speeds[peers.ONE_LAUNCH] = speed(84.0, 3.0)
    (row,) = bars.grid(Times(facts(), READ, [alone, both])).rows
    assert row[1] == "0.6667" and row[3] == "not met !"
    both.speeds[peers.ONE_LAUNCH] = speed(60.0, 1.5)
    (row,) = bars.grid(Times(facts(), READ, [alone, both])).rows
    assert "on 2 GPUs, a step in one launch, relative to one" in row[0] and row[1] == "0.5"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """table.json, GRAPHS.md and RESULTS.md of its own."""
    for module in (table, plot):
        monkeypatch.setattr(module, "FOLDER", tmp_path)
    monkeypatch.setattr(record, "TABLE", tmp_path / "table.json")
    results = ("bars", "times", "steps", "shared", "graded", "tokens")
    for name, parts in {"GRAPHS.md": ("ways", "parts"), "RESULTS.md": results}.items():
        marks = (f"<!-- ladder: {part} -->\n<!-- end: {part} -->\n" for part in parts)
        (tmp_path / name).write_text("mine\n" + "".join(marks) + "mine\n")
    return tmp_path


def test_the_record_is_read_as_it_was_written(folder):
    tokens = Tables(facts(), [Grid("10 tokens", ["", "found"], [["x", "1"]], [True])])
    shared = Times(facts(), READ, [made_up(COURSE, 84.0, 3.3), made_up(COURSE, 60.0, 2.0, 2)])
    graded = Tables(facts(), [Grid("products", ["", "x PyTorch"], [["x", "3.10"]], [True])])
    full = Record(times(), {"2": shared}, tokens, graded)
    record.save(full)
    again = record.load()
    for a, b in zip(again.bars.found, full.bars.found, strict=True):
        assert a.case == b.case and a.parts == b.parts and a.same == b.same
        assert a.ours.between.median_ms == b.ours.between.median_ms
        assert a.ours.p99_ms == b.ours.p99_ms
    assert (
        again.shared["2"].found[1].world == 2 and again.tokens == tokens and again.graded == graded
    )
    record.save(again)
    assert record.load() == again


def test_results_are_filled_in_between_the_markers_only(folder):
    table.write(Record())
    assert (folder / "RESULTS.md").read_text().count("Not measured yet") == 6
    full = Record(times("2026-03-03"))
    (folder / "step.png").touch()
    table.write(full)
    text = (folder / "RESULTS.md").read_text()
    assert text.startswith("mine\n") and text.endswith("\nmine\n") and "(step.png)" in text
    assert "6 of 13 bars met" in text and text.count("Not measured yet") == 3
    assert "A pure read in the same run: 4,000 GB/s." in text and "2026-03-03" in text
    assert f"| {OURS} | 84 | 3.3 | " in text and "| floor |  | 3.25 |" in text
    assert f"- {COURSE}: {peers.LLAMA}: out of memory" in text
    assert "allocated 9.6 GiB (1.030 x), reserved 9.9 GiB (1.060 x)" in text
    assert "| o | tensor_core_kernel | 24 | 37.50 | 900.0 | 96.8% | 3,000 | 83% |" in text
    assert "| o |  | 24 | 33.33 | 800.0 | 99.4% | 3,000 | 94% |" in text
    assert "a step in one launch of 805 us" in text and table.STALE not in text
    graphs = (folder / "GRAPHS.md").read_text()
    assert graphs.startswith("mine\n") and graphs.endswith("\nmine\n") and "2026-03-03" in graphs
    assert f"| {COURSE} | - | 9.9 (33%) | 3.3 (98%) | - | 3.25 |" in graphs
    assert "| o | 24 | 3,000 | 37.50 | 83% | 33.33 | 94% |" in graphs and GAPS not in graphs
    full.bars.run["sources"]["sha256"] = "0"
    assert all(table.STALE in text for text in table.rendered(full).values())
    full.graded = Tables(
        facts("2026-04-04"), [Grid("products", ["", "x"], [["a", "3.10"]], [True])]
    )
    text = table.rendered(full)["RESULTS.md"]
    assert "| a | 3.10 |" in text and "2026-04-04" in text and text.count("Not measured yet") == 2
    full.graded.run["sources"]["sha256"] = "0"
    assert table.STALE_PRODUCTS in table.rendered(full)["RESULTS.md"]


def test_the_committed_results_are_what_is_rendered_from_the_record():
    """All but whether the decoder has changed since, which table.json does not say."""

    def lines(text):
        return [
            line
            for line in text.splitlines()
            if line not in (table.STALE, table.STALE_PRODUCTS, "")
        ]

    for name, text in table.rendered(record.load()).items():
        assert lines((record.FOLDER / name).read_text("utf-8")) == lines(text), (
            f"task6/generation/{name} is not as table.json has it: python -m task6.generation --render"
        )


def test_the_picture(folder):
    pytest.importorskip("matplotlib")
    full = times()
    assert plot.draw(full).stat().st_size > 10_000
    assert [part.name for part in plot._drawn(full.found[0].parts)] == ["o", GAPS, "1 others"]
    for found in full.found:
        found.parts = []
    assert plot.draw(full)
    for found in full.found:
        found.one_launch = []
    assert plot.draw(full) is None


# Float32 products -------------------------------------------------------------------------------------------


def beside(theirs, errors=None, ours=300.0, note=""):
    return Beside("made up", speed(0, ours).between, speed(0, theirs).between, note, 2e12, errors)


def test_float32_products_are_judged():
    fine = {"normal": (0.25, 0.5), "subnormal": (1.0, 1.2)}
    lost, nan = {"normal": (1.01, 1.0)}, {"normal": (0.2, 0.3), "tiny": (math.nan, 0.1)}
    rows = [beside(900.0, fine), beside(899.0, lost), beside(900.0, nan), beside(math.nan, fine)]
    grid = graded.product_grid([*rows, beside(900.0)])
    judged = [row[-4:] for row in grid.rows]
    assert judged[0] == ["3.00", "1.00", "subnormal", "1.20"] and grid.rows[0][-5] == "7"
    assert judged[1] == ["3.00 !", "1.01 !", "normal", "1.00"]
    assert judged[2] == ["3.00", "nan !", "tiny", "0.30"] and judged[3][:2] == ["nan !", "1.00"]
    assert judged[4] == ["3.00", "nan !", "-", "nan"]
    assert grid.bars == [True, True, False, False, True, False, False, True, True, False]
    scaled = beside(600.0, note="scaled down: batch 32")
    grid = graded.layer_grid([beside(900.0), scaled, beside(900.0, ours=math.nan)])
    assert [row[-1] for row in grid.rows] == ["3.00", "2.00 !", "nan !"]
    assert grid.bars == [True, False, False] and grid.rows[1][0] == f"made up; {scaled.note}"


def test_errors_are_multiples_of_pytorchs(monkeypatch):
    torch.manual_seed(0)
    x, w = torch.randn(64, 30), torch.randn(20, 30)
    truth = x.double() @ w.double().T
    off = 1e-3 * torch.randn(64, 20) * (x.abs() @ w.abs().T)
    ours, theirs = ((truth + scale * off).float() for scale in (2, 1))
    rms, largest = graded.relative_errors(ours, theirs, x, w)
    assert rms == pytest.approx(2, rel=1e-3) and largest == pytest.approx(2, rel=1e-3)
    ours[3, 4] = torch.nan
    assert graded.relative_errors(ours, theirs, x, w) == (math.inf, math.inf)
    theirs[3, 4] = torch.nan
    assert all(map(math.isnan, graded.relative_errors(ours, theirs, x, w)))
    monkeypatch.setattr(graded, "CHECKED", 16)  # rows 0, 4, 8 ...
    assert graded.relative_errors(ours, theirs, x, w)[0] == pytest.approx(2, rel=1e-3)
    zero = torch.zeros(2, 20)
    assert graded.relative_errors(zero, zero, torch.zeros(2, 30), w) == (0, 0)


def test_float32_products_are_measured(monkeypatch):
    """All but the times, with PyTorch's own product in place of ours on a CPU."""

    def measured(sides, *, check, seconds):
        check({name: side() for name, side in sides.items()})
        return dict(zip(sides, (beside(900.0).ours, beside(900.0).theirs), strict=True))

    monkeypatch.setattr(graded, "measure", measured)
    monkeypatch.setattr(graded, "SIZES", ((40, 30, 20), (90, 30, 20)))
    for name, size in dict(CHECKED=16, BATCH=2, SEQ=12, HIDDEN=128, HEADS=2).items():
        monkeypatch.setattr(graded, name, size)
    products, layer = graded.grids(1, "cpu")
    assert [row[0] for row in products.rows] == ["40 x 30 x 20", "90 x 30 x 20"]
    assert all(row[-4:-2] == ["3.00", "1.00"] for row in products.rows)
    names = [f"B2 S12 hidden 128, 2 heads, {mask}" for mask in ("non-causal", "causal")]
    assert [row[0] for row in layer.rows] == names and layer.bars == [True, True]


# The command ------------------------------------------------------------------------------------------------

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
    assert "14 tokens for each of 2 sequences, in 3 texts" in shown and "4 of 4 bars met" in shown
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
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert command.main(["--bars"]) == 1
    assert "each process needs a GPU of its own: there are 1" in capsys.readouterr().out


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
