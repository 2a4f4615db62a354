"""The command of decode's ladder, on the CPU: inputs, tables, bars, picture and endurance, with made-up times."""

import contextlib
import json
import re
from functools import partial

import pytest
import torch

from common.check.attention import attention_float64
from common.record import provenance
from common.record.grid import Grid
from common.timing import Backend, Timing
from common.timing.compare import Measured
from common.timing.peers import FA3
from task5.ladder import __main__ as command
from task5.ladder import bars, benchmark, peers, plot, prefill, record, steps, table, uneven
from task5.ladder.benchmark import (
    BF16,
    CURVES,
    FP32,
    INVARIANT,
    NO_PROMISE,
    OURS,
    SHAPES,
    Inputs,
    Shape,
    our_sides,
    paged,
)
from task5.ladder.record import Record, Tables, Times
from task5.ladder.rungs import FOLDER, RUNGS

ON_CPU = [rung for rung in RUNGS if rung.number == 1]
CUDNN, XQA = Backend.CUDNN.value, "XQA"
SMALL = Shape(2, 4, 2, 100, 64)
LARGE = Shape(16, 32, 8, 8192)  # 537 MB: 122.6 us at 4,380 GB/s
SHORT = Shape(1, 32, 8, 4096)


@pytest.fixture
def ladder(tmp_path, monkeypatch):
    """table.json and RESULTS.md of its own."""
    for module in (table, plot):
        monkeypatch.setattr(module, "FOLDER", tmp_path)
    monkeypatch.setattr(record, "TABLE", tmp_path / "table.json")
    parts = ("times", "bars", "uneven", "prefill", "steps")
    marks = (f"<!-- ladder: {s} -->\n<!-- end: {s} -->\n" for s in parts)
    (tmp_path / "RESULTS.md").write_text("mine\n" + "".join(marks) + "mine\n")
    return tmp_path


def run(date="2026-01-01"):
    facts = provenance(command.SOURCES, device="cpu", seed=1)
    gpu = {"gpu": "NVIDIA H200", "driver": "580", "cuda": "13.0"}
    peers = {"FlashAttention-3": "3", "FlashInfer": "0.6.13"}
    return facts | {"date": date, "machine": facts["machine"] | gpu, "peers": peers}


def at(microseconds, **left_out):
    """A shape whose sides take so long."""
    times = {
        side: Timing(us / 1e3, us / 1.01e3, us / 0.99e3, 20) for side, us in microseconds.items()
    }
    return Measured(times, left_out)


def times(shapes=None):
    """A run, of a made-up model of all shapes if none are given."""
    found = Times(run(), 4380.0)
    if shapes is None:
        for shape in table.TIMED:
            own = 4 + 1.04 * found.floor(shape)
            sides = {OURS: own, INVARIANT: 1.02 * own, paged(64): 1.01 * own, paged(16): 1.2 * own}
            slower = dict(
                zip(peers.peer_sides(shape.dtype), (1.1, 1.3, 1.2, 1.7, 1.4), strict=False)
            )
            sides |= {rung.label: own + rung.number for rung in RUNGS}
            sides |= {peer: 3 + factor * own for peer, factor in slower.items()}
            found.shapes[shape.key] = at(sides)
    else:
        found.shapes = {shape.key: measured for shape, measured in shapes.items()}
    return found


# Inputs and times -----------------------------------------------------------------------------------------


def test_the_shapes():
    assert len({shape.key for shape in table.TIMED}) == len(table.TIMED) == len(SHAPES) + 11
    assert LARGE.bytes == 2 * 16 * 8192 * 8 * 128 * 2 and LARGE.caches == 2
    assert Shape(1, 32, 8, 1024).caches == 72 and Shape(1, 12, 12, 1024, 64).caches == 96
    assert all(shape.caches * shape.bytes > 250e6 for shape in table.TIMED)


def test_the_rungs_are_the_numbered_sources():
    assert [rung.number for rung in RUNGS] == list(range(1, len(RUNGS) + 1))
    assert all(rung.source.exists() for rung in RUNGS)
    assert str(RUNGS[0]) == f"rung 1 ({RUNGS[0].name})" and RUNGS[0].label == f"1 {RUNGS[0].name}"
    assert all(not re.match(r"Rung|//", rung.title) and rung.title for rung in RUNGS)


@pytest.mark.parametrize("size", [64, 16])
def test_pages_hold_the_same_keys(size):
    torch.manual_seed(1)
    inputs = Inputs(SMALL, "cpu", caches=2)
    order, caches = inputs.pages(size)
    assert inputs.pages(size) is inputs.pages(size)
    for (k, v), (k_pages, v_pages) in zip(inputs.caches, caches, strict=True):
        for t, pages in ((k, k_pages), (v, v_pages)):
            assert torch.equal(pages[order.long()].flatten(1, 2)[:, : SMALL.kv_len], t)


def test_every_side_gives_the_same():
    torch.manual_seed(2)
    inputs = Inputs(SMALL, "cpu", caches=2)
    truth = inputs.truth()
    math = peers._on_caches(partial(peers._grouped, backend=Backend.MATH))
    for name, prepare in {**our_sides(ON_CPU), "SDPA math": math}.items():
        calls = prepare(inputs)
        assert len(calls) == 2, name
        error = (calls[-1]().reshape(truth.shape) - truth).abs().max()
        assert error <= 2**-7 * truth.abs().max(), name


class Eager:
    """A graph where there is no GPU."""

    def __init__(self, calls):
        self.calls, self.outs = calls, [call() for call in calls]

    def replay(self):
        for out, call in zip(self.outs, self.calls, strict=True):
            out.copy_(call())


class Turns:
    def take(self, replay):
        return replay(), 6.0


@pytest.fixture
def on_cpu(monkeypatch):
    """time_shape without a GPU: two caches in a graph that takes 6 ms."""
    monkeypatch.setattr(benchmark, "Inputs", partial(Inputs, device="cpu", caches=2))
    monkeypatch.setattr(benchmark, "Graph", Eager)
    monkeypatch.setattr(benchmark, "Turns", Turns)
    monkeypatch.setattr(benchmark, "ROUNDS", 2)
    monkeypatch.setattr(benchmark, "_stream", lambda: None)
    monkeypatch.setattr(benchmark, "seconds_of", lambda call: call() is None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def test_what_is_timed_and_what_is_left_out(on_cpu, monkeypatch):
    def fails(inputs):
        raise TypeError("a long story\nno such | shape")

    def wrong(inputs):
        return [lambda: inputs.q + 1] * 2

    sides = our_sides(ON_CPU) | {"fails": fails, "wrong": wrong}
    found = benchmark.time_shape(SMALL, sides, seed=1)
    expected = [OURS, ON_CPU[0].label, NO_PROMISE, INVARIANT, "pages of 64", "pages of 16"]
    assert list(found.times) == expected
    assert all(timing.median_ms == 3 and timing.n == 2 for timing in found.times.values())
    assert found.left_out.keys() == {"fails", "wrong"}
    assert found.left_out["fails"] == "no such / shape"
    assert re.fullmatch(r"wrong result: [\d.]+ away from float64", found.left_out["wrong"])

    def no_memory(*_):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(benchmark, "Inputs", no_memory)
    assert benchmark.time_shape(SMALL, {OURS: None}, 1).left_out == {OURS: "out of memory"}


def test_a_library_that_is_not_here_says_so(monkeypatch):
    for name in ("flash_attn_interface", "flashinfer"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    inputs = Inputs(SMALL, "cpu", caches=1)
    for label in (FA3.label, "FlashInfer", XQA):
        with pytest.raises(ImportError, match="cannot be imported .ModuleNotFoundError"):
            peers.peer_sides(BF16)[label](inputs)[0]()
    assert all("cannot be imported" in version for version in peers.versions().values())
    assert set(peers.peer_sides(FP32)) == {"SDPA math", "SDPA memory-efficient"}


# Bars -------------------------------------------------------------------------------------------------------


def test_which_bar_a_shape_has():
    assert bars.faster(Shape(64, 12, 12, 1024, 64)) == 1.05
    assert bars.faster(LARGE) == 1.0 and bars.faster(Shape(1, 32, 8, 131072)) == 1.0
    assert bars.faster(Shape(16, 32, 32, 1024, dtype=FP32)) == 1.0
    assert bars.faster(SHORT) == bars.faster(Shape(4, 32, 32, 1074)) == 1.25
    assert bars.faster(Shape(16, 32, 8, 1024)) is bars.faster(Shape(1, 32, 8, 512)) is None


def judged(shape, microseconds, **left_out):
    grid = bars.speed_grid(times({shape: at(microseconds, **left_out)}))
    (row,) = grid.rows
    assert len(row) == len(grid.columns)
    return row[1:], grid.bars


def test_speed_is_judged():
    row, met = judged(
        LARGE, {OURS: 130, CUDNN: 130, XQA: 131, NO_PROMISE: 140, INVARIANT: 134, paged(64): 133}
    )
    assert row == ["537", "1.00", "1", CUDNN, "0.93", "0.94 !", "1.03 !", "1.02", "-"]
    assert met == [True, False, False, True]
    row, met = judged(SHORT, {OURS: 10, XQA: 12, paged(64): 10.2, paged(16): 10.9})
    assert row == ["17", "1.20 !", "1.25", XQA, "-", "0.38", "-", "1.02", "1.09 !"]
    assert met == [False, True, False]
    row, met = judged(LARGE, {OURS: 125})  # no library is here
    assert row[1:6] == ["-", "1", "-", "-", "0.98"] and met == [True]
    row, met = judged(LARGE, {OURS: 125}, **{paged(64): "wrong"})
    assert row[7:] == ["left out !", "-"] and met == [True, False]
    row, met = judged(LARGE, {CUDNN: 125}, ours="wrong result: 1 away from float64")
    assert row[1] == "wrong result: 1 away from float64 !" and met == [False]


def test_errors_are_judged(monkeypatch):
    shapes = [Shape(2, 4, 2, 96, 64), Shape(2, 4, 2, 32, 64, torch.float16)]

    def fails(inputs):
        raise RuntimeError("not here")

    def better(inputs):
        return [lambda: inputs.truth(0).float()]

    sides = {"same": benchmark.ours, "better": better, "fails": fails}
    monkeypatch.setattr(bars, "peer_sides", lambda dtype: sides)
    monkeypatch.setattr(bars, "LABELS", tuple(sides))
    grid = bars.accuracy_grid(1, shapes, "cpu")
    for row in grid.rows:
        assert row[1] == "1.00, 1.00" and row[3] == "-" and row[4].endswith(" !")
    assert grid.bars == [False] * 4
    del sides["better"]
    assert bars.accuracy_grid(1, shapes, "cpu").bars == [True] * 4
    monkeypatch.setattr(bars, "ours", fails)
    grid = bars.accuracy_grid(1, shapes, "cpu")
    assert grid.rows[0][-2:] == ["not here !", "-"] and grid.bars == [False] * 2
    assert all(len(row) == len(grid.columns) for row in grid.rows)


# The record, its text and its picture -----------------------------------------------------------------------


def test_a_run_replaces_its_part_of_the_record(ladder):
    found = Tables(run(), [Grid("speed", ["", "ratio"], [["x", "0.98 !"]], [False])])
    record.save(times=times(), bars=found)
    record.save(steps=found)
    again = times({LARGE: at({OURS: 125}, XQA="not here")})
    record.save(times=again)
    assert record.load() == Record(again, found, steps=found)
    assert again.microseconds(LARGE, OURS) == 125 and again.microseconds(LARGE, CUDNN) is None
    assert again.floor(LARGE) == pytest.approx(122.6, abs=0.1)


def test_results_are_filled_in_between_the_markers_only(ladder):
    found = Tables(run("2026-03-03"), [Grid("speed", ["", "ratio"], [["x", "0.98 !"]], [False])])
    full = Record(times(), bars=found)
    full.times.shapes[LARGE.key].left_out["FlashInfer"] = "no such shape"
    (ladder / "decode.png").touch()
    table.write(full)
    text = (ladder / "RESULTS.md").read_text()
    assert text.startswith("mine\n") and text.endswith("\nmine\n")
    assert "A pure read in the same run: 4,380 GB/s." in text and "(decode.png)" in text
    assert "0 of 1 bars met" in text and text.count("Not measured yet") == 3
    assert "2026-01-01" in text and "2026-03-03" in text and "FlashInfer: 0.6.13" in text
    assert f"- FlashInfer, {LARGE.key}: no such shape" in text
    assert f"- [{RUNGS[0].label}]({RUNGS[0].file}): {RUNGS[0].title}" in text
    row = next(x for x in text.splitlines() if x.startswith(f"| {LARGE.key} | 123 "))
    assert "| 131 | 130 to 133 | 4,083 | 93% |" in row
    assert table.STALE not in text
    table.write(full)
    assert text == (ladder / "RESULTS.md").read_text()
    full.times.run["sources"]["sha256"] = "0"
    assert table.STALE in table.rendered(full)
    (ladder / "RESULTS.md").write_text("nothing")
    with pytest.raises(
        ValueError, match="RESULTS.md: the marker <!-- ladder: times --> is missing"
    ):
        table.write(full)


def test_why_sides_are_missing():
    full = "full at /a/b-1/c.h:49: 1 / 2"
    found = times({LARGE: at({}, XQA="gone"), SHORT: at({}, XQA="gone", FA3="old", cuDNN=full)})
    assert table.reasons(found) == [
        f"FA3, {SHORT.key}: old",
        "XQA, 2 shapes: gone",
        f"cuDNN, {SHORT.key}: full at c.h:49: 1 / 2",
    ]


def test_the_committed_results_are_what_is_rendered_from_the_record():
    """All but whether the kernels have changed since, which table.json does not say."""

    def lines(text):
        return [line for line in text.splitlines() if line not in (table.STALE, "")]

    committed = (FOLDER / "RESULTS.md").read_text("utf-8")
    assert lines(committed) == lines(table.rendered(record.load())), (
        "task5/ladder/RESULTS.md is not as table.json has it: python -m task5.ladder --render"
    )


def test_the_picture(ladder):
    pytest.importorskip("matplotlib")
    full = times()
    assert plot.draw(full).stat().st_size > 10_000
    for shape in CURVES[16]:
        del full.shapes[shape.key]
    assert plot.draw(full) is None


# The command ------------------------------------------------------------------------------------------------


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
    assert command.main(["--steps", "3", "--seed", "1"]) == 0
    assert "3 decode steps in" in capsys.readouterr().out
    assert command.main(["--render"]) == 0
    assert "Not measured yet" in (ladder / "RESULTS.md").read_text()
    assert not (ladder / "table.json").exists()


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


# Uneven lengths ---------------------------------------------------------------------------------------------


def test_lengths_differ_in_a_call():
    even = uneven.Uneven(4, 4, 2, 64, 64, FP32)
    long = uneven.Uneven(3, 4, 2, 64, 64, FP32, spread=uneven.ONE_LONG)
    assert sorted(even.lengths) == [16, 32, 48, 64] and long.lengths == (2, 2, 64)
    assert even.key.endswith("float32, 1 to all") and long.key.endswith("float32, one long")
    assert long.bytes == 2 * 68 * 2 * 64 * 4
    for shape in (even, long):
        inputs = Inputs(shape, "cpu", caches=1)
        for prepare in (uneven.SIDES[OURS], uneven.SIDES[paged(uneven.PAGE)]):
            (call,) = prepare(inputs)
            torch.testing.assert_close(call().double(), inputs.truth(), atol=1e-5, rtol=1e-4)


def test_uneven_lengths_are_judged():
    fast, slow, broken = uneven.SHAPES[:3]
    found = {
        fast.key: at({OURS: 10, XQA: 12.5, "FlashInfer": 15}),
        slow.key: at({OURS: 10, FA3.label: 9}),
        broken.key: at({XQA: 10}, ours="wrong result: 1 away from float64"),
    }
    grid = uneven.judge([fast, slow, broken], found, 3000.0)
    assert all(len(row) == len(grid.columns) for row in grid.rows)
    assert grid.rows[0][1:4] == ["151", "50.3", "10.0"]
    assert grid.rows[0][-2:] == ["1.25", XQA] and grid.rows[1][-2:] == ["0.90 !", FA3.label]
    assert grid.bars == [True, False, False]
    assert "SDPA" not in "".join(grid.columns)


def test_the_uneven_shapes():
    keys = [shape.key for shape in uneven.SHAPES]
    assert len(set(keys)) == len(keys) and all(len(set(s.lengths)) > 1 for s in uneven.SHAPES)
    assert all(min(s.lengths) >= 1 and max(s.lengths) == s.kv_len for s in uneven.SHAPES)


@pytest.mark.parametrize("option", ["uneven", "prefill"])
def test_tables_beside_the_libraries_are_kept(on_gpu, monkeypatch, option):
    grid = Grid(option, ["", "found"], [["x", "1.0"]], [True])
    monkeypatch.setattr(uneven, "time_lengths", lambda seed, say: grid)
    monkeypatch.setattr(prefill, "time_chunks", lambda seed, say: grid)
    assert command.main([f"--{option}"]) == 0
    assert getattr(record.load(), option).grids == [grid]
    assert "| x | 1.0 |" in (on_gpu / "RESULTS.md").read_text()


# Chunked prefill --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("q_len", [5, 50])
def test_a_chunk_is_checked_at_its_ends(q_len):
    torch.manual_seed(4)
    inputs = Inputs(Shape(2, 4, 2, 70, 64, FP32, q_len), "cpu", caches=1)
    ((k, v),) = inputs.caches
    whole = attention_float64(inputs.q, k, v, causal=True)
    rows = range(5) if q_len == 5 else (*range(16), *range(34, 50))
    torch.testing.assert_close(inputs.truth(), whole[:, list(rows)])
    assert torch.equal(inputs.checked(whole), whole[:, list(rows)])
    (call,) = prefill.SIDES[OURS](inputs)
    torch.testing.assert_close(
        inputs.checked(call()).double(), inputs.truth(), atol=1e-5, rtol=1e-4
    )


def test_chunks_are_judged():
    fast, slow, broken = prefill.CHUNKS[:3]
    found = {
        fast.key: at({OURS: 10, prefill.LADDER: 30, CUDNN: 12.5}),
        slow.key: at({OURS: 10, CUDNN: 12.5, "FlashInfer": 9}),
        broken.key: at({CUDNN: 10}, ours="wrong result: 1 away from float64"),
    }
    grid = prefill.judge([fast, slow, broken], found)
    assert all(len(row) == len(grid.columns) for row in grid.rows)
    assert grid.rows[0][-2:] == ["1.25", CUDNN] and grid.rows[1][-2:] == ["0.90 !", "FlashInfer"]
    assert grid.rows[2][1] == "wrong result: 1 away from float64 !"
    assert grid.bars == [True, False, False]
    assert prefill.flop(Shape(1, 1, 1, 3, 64, q_len=2)) == 4 * 64 * 5  # 2 keys and 3


def test_the_chunks():
    keys = [chunk.key for chunk in prefill.CHUNKS]
    assert keys[0] == "B3 q333 16/4 kv5000 d64 bfloat16" and len(set(keys)) == len(keys) == 58


# Endurance --------------------------------------------------------------------------------------------------


def test_steps_grow_end_and_start_anew(monkeypatch):
    monkeypatch.setattr(steps, "ENDS", 0.2)
    torch.manual_seed(3)
    decoding = steps.Decoding("cpu", 64)
    before = decoding.lengths.clone()
    grew = 0
    for _ in range(30):
        assert decoding.step().max() <= steps.LARGEST
        assert ((decoding.lengths >= 1) & (decoding.lengths <= 64)).all()
        grew += int((decoding.lengths == before + 1).sum())
        before = decoding.lengths.clone()
    assert 60 < grew < 120 and 4 < decoding.ended < 60


@pytest.mark.parametrize("mistake", ["a key too few", "a page table of the step before", "NaN"])
def test_a_mistake_is_found(monkeypatch, mistake):
    right, tables = steps.decode_attention, []

    def wrong(q, k, v, *, seqlens_k, block_table, **options):
        tables.append(block_table.clone())
        if mistake == "a key too few":
            seqlens_k = (seqlens_k - 1).clamp(min=1)
        elif mistake == "NaN":
            return right(q, k, v, seqlens_k=seqlens_k, block_table=block_table).fill_(torch.nan)
        else:
            block_table = tables[max(0, len(tables) - 3)]
        return right(q, k, v, seqlens_k=seqlens_k, block_table=block_table, **options)

    monkeypatch.setattr(steps, "decode_attention", wrong)
    grid = steps.run(8, 1, "cpu", room=64)
    assert grid.rows[0][1].endswith(" !") and not grid.bars[0]


def test_a_run_of_steps_is_judged():
    grid = steps.run(12, 1, "cpu", room=32)
    assert grid.title.startswith("12 decode steps in") and grid.bars[:2] == [True, True]
    assert [row[2] for row in grid.rows] == ["1.5", "-", "0", "16"]
