"""The ladder's command: what it measured is kept, printed and drawn right."""

import json
import sys
import warnings
from dataclasses import replace

import pytest
import torch

from common.build import BuildError, builder, planner
from common.build.cli import resources
from common.check import Rng
from common.check.hard_inputs import FLOAT32, LAZY
from common.record import provenance
from common.record.grid import Grid
from common.tests.test_counters import HOPPER, launch
from common.timing import Timing, compare, counters
from common.timing.compare import Measured
from common.timing.peers import CUDNN, EFFICIENT, FA3, FLASH, MATH
from task4.ladder import __main__ as command
from task4.ladder import benchmark, plot, record, table, test
from task4.ladder.benchmark import PRECISIONS, SEQS, Cell
from task4.ladder.evidence import bars
from task4.ladder.evidence import counters as evidence_counters
from task4.ladder.record import Record, Tables, Times
from task4.ladder.rungs import FOLDER, RUNGS, by_number

SHORT, LONG = Cell(128, 2048, True), Cell(128, 4096, True)
BF16, FP32 = PRECISIONS["bfloat16"], PRECISIONS["float32"]
REFERENCES = {BF16.reference(MATH): 800.0}


@pytest.fixture
def ladder(tmp_path, monkeypatch):
    """table.json, README.md and RESULTS.md of its own."""
    for module in (table, plot):
        monkeypatch.setattr(module, "FOLDER", tmp_path)
    monkeypatch.setattr(record, "TABLE", tmp_path / "table.json")
    for name, sections in (("README.md", ["table"]), ("RESULTS.md", PRECISIONS)):
        marks = (f"<!-- ladder: {s} -->\n<!-- end: {s} -->\n" for s in sections)
        (tmp_path / name).write_text("mine\n" + "".join(marks) + "mine\n")
    return tmp_path


def run(date: str) -> dict:
    facts = provenance(test.SOURCES, device="cpu", seed=1)
    gpu = {"gpu": "NVIDIA H200", "driver": "580", "cuda": "13.0"}
    return facts | {"date": date, "machine": facts["machine"] | gpu, "fa3": "3.0.0"}


def at(cell: Cell, tflops: dict) -> Measured:
    """A cell in which each rung, by its number, and each library has so many TFLOP/s."""
    found = Measured()
    for method, value in tflops.items():
        ms = cell.flops / value / 1e9
        method = by_number(method) if isinstance(method, int) else method
        found.times[method.label] = Timing(ms, ms, ms, 9)
    return found


def test_a_run_replaces_its_part_of_the_record(ladder):
    first = Times(run("2026-01-01"), REFERENCES, {SHORT.key: at(SHORT, {15: 600, CUDNN: 500})})
    record.save("bfloat16", "times", first)
    found = Grid("speed", ["", "ratio"], [["sharp", "0.98 !"]], [False])
    record.save("bfloat16", "bars", Tables(run("2026-01-02"), [found]))
    record.save("float16", "times", replace(first, cells={}))
    again = Times(run("2026-02-02"), REFERENCES, {LONG.key: Measured(left_out={"1 naive": "slow"})})
    record.save("bfloat16", "times", again)
    kept = record.load()
    assert kept == {
        "bfloat16": Record(again, Tables(run("2026-01-02"), [found])),
        "float16": Record(replace(first, cells={})),
    }
    assert kept["bfloat16"].times.find(LONG, by_number(15)) is None


def test_the_files_are_filled_in_between_their_markers_only(ladder):
    cells = {SHORT.key: at(SHORT, {1: 0.5, 15: 640, CUDNN: 600, FA3: 620})}
    cells[LONG.key] = Measured(left_out={"1 naive": "a run would take more than 0.3 s"})
    own = Record(
        Times(run("2026-01-01"), REFERENCES, cells),
        profile=Tables(run("2026-03-03"), [Grid("counters", ["", "issue"], [["15", "35"]])]),
    )
    table.write({"bfloat16": own})
    readme, results = ((ladder / name).read_text() for name in ("README.md", "RESULTS.md"))
    for text in (readme, results):
        assert text.startswith("mine\n") and text.endswith("\nmine\n")
        row = next(x for x in text.splitlines() if x.startswith("| [15 lazy maximum](15_lazy_max"))
        assert "640 (80 %, 1.03 x)" in row
        assert "a bfloat16 matrix product 800 TFLOP/s" in text
        assert "2026-01-01" in text and "NVIDIA H200" in text and table.STALE not in text
    assert "- 1 naive: a run would take more than 0.3 s" in results and "| 15 | 35 |" in results
    assert "2026-03-03" in results and "2026-03-03" not in readme
    assert results.count("Not measured yet") == 3
    table.write({"bfloat16": own})
    assert results == (ladder / "RESULTS.md").read_text()
    own.times.run["sources"]["sha256"] = "0"
    table.write({"bfloat16": own})
    assert all(table.STALE in (ladder / name).read_text() for name in ("README.md", "RESULTS.md"))
    (ladder / "README.md").write_text("nothing")
    with pytest.raises(ValueError, match="README.md: the marker <!-- ladder: table --> is missing"):
        table.write({"bfloat16": own})


def test_the_committed_tables_are_what_is_rendered_from_the_record():
    """All but whether the kernels have changed since, which table.json does not say."""

    def lines(text):
        return [line for line in text.splitlines() if line != table.STALE]

    for name, text in table.rendered(record.load()).items():
        committed, rendered = lines((FOLDER / name).read_text("utf-8")), lines(text)
        while "" in committed:
            committed.remove("")
        assert committed == [line for line in rendered if line], (
            f"task4/ladder/{name} is not as table.json has it: python -m task4.ladder --render"
        )


def test_the_readme_is_a_page():
    assert len((FOLDER / "README.md").read_text("utf-8").splitlines()) <= 150


def ratio(precision, cell, tflops, left_out=()) -> tuple[str, list[bool]]:
    """What the table of ratios says of a cell, and whether its bar is met."""
    found = at(cell, tflops)
    found.left_out |= dict(left_out)
    grid = bars.ratio_grid(precision, lambda other: found if other == cell else None)
    (row,) = grid.rows
    return row[1 + SEQS.index(cell.seq)], grid.bars


def test_the_bars():
    assert ratio(BF16, SHORT, {15: 660, CUDNN: 600, FA3: 630, FLASH: 300}) == ("1.05 !", [False])
    assert ratio(BF16, SHORT, {15: 662, CUDNN: 600, FA3: 630}) == ("1.05", [True])
    short = Cell(64, 512, True)  # rows of which rung 14 is the default
    assert ratio(BF16, short, {14: 260, 15: 9, CUDNN: 259, FA3: 220}) == ("1.00 r14", [True])
    assert ratio(BF16, Cell(256, 4096, True), {15: 700, CUDNN: 900, FA3: 700}) == ("0.78", [])
    assert ratio(BF16, SHORT, {15: 600, CUDNN: 600}) == ("1.00", [])  # no FA3: not held to the bar
    wrong = {"15 lazy maximum": "wrong result: 1 away from SDPA cuDNN"}.items()
    assert ratio(BF16, SHORT, {CUDNN: 600}, wrong) == (
        "wrong result: 1 away from SDPA cuDNN",
        [False],
    )
    assert ratio(FP32, SHORT, {16: 120, EFFICIENT: 45, MATH: 60}) == ("2.67", [True])
    assert ratio(FP32, Cell(64, 512, False), {16: 40, EFFICIENT: 45}) == ("0.89", [])
    # Not the rung that a call gets; and in tf32 there is no such rung.
    only_14 = at(SHORT, {14: 660, CUDNN: 600})
    assert not bars.ratio_grid(BF16, lambda c: only_14 if c.seq >= 2048 else None).rows
    assert not bars.ratio_grid(PRECISIONS["tf32"], lambda _: only_14).rows
    (row, *_) = bars.ratio_grid(BF16, lambda _: only_14, lambda *_: by_number(14)).rows
    assert row[0] == "d 64, 14 persistent" and row[3] == "1.10"


def test_all_bars_are_measured_and_judged(monkeypatch):
    """Every table of --bars, with times and losses that miss where they are said to."""
    timed = []

    def time_methods(methods, qkv, causal, precision):
        timed.append((tuple(qkv[0].shape), causal))
        return at(SHORT, {m: 100 if m in (CUDNN, FA3, EFFICIENT) else 94 for m in methods})

    monkeypatch.setattr(bars, "time_methods", time_methods)
    monkeypatch.setattr(bars, "host_cost", lambda *_: {"launch": 9.0, "in all": 11.0})
    monkeypatch.setattr(bars, "worst", lambda *_: {"rms": 1.05, "largest": 1.2})
    losses = iter(range(10_000))
    monkeypatch.setattr(bars, "compare", lambda *_: {"rms": 0.5, "largest": 1.5 + next(losses) % 2})
    monkeypatch.setattr(bars, "finite_rows", lambda rung, d: (d, 128))
    monkeypatch.setattr(bars, "make_inputs", lambda *given: [torch.empty(given[2])] * 3)
    monkeypatch.setattr(Cell, "inputs", lambda self, precision: [torch.empty(self.shape)] * 3)
    monkeypatch.setattr(bars.Trial, "_rng", lambda self, *_: Rng(1, "cpu"))
    monkeypatch.setattr(bars, "ODD", {"odd": ((2, 11, 4, 64), (12, 2), True)})
    grids = list(bars.Trial(BF16, [by_number(13), by_number(15)], seed=1).grids())
    host, accuracy, ratios, weak, odd = grids
    assert host.rows == [["", "9.00", "11.00 !"]]
    assert accuracy.rows[-1] == ["15 lazy maximum, d 256", "1.05", "1.20 !"]
    assert len(ratios.bars) == 24 and not any(ratios.bars)
    assert [row[0] for row in weak.rows] == list(LAZY)
    assert weak.rows[:2] == [
        ["rising scores", *["0.94 !"] * 4, "0.97"],
        ["jumps of more than 2^126", *["0.94"] * 4, "0.9"],
    ]
    assert odd.rows == [["odd", "0.94"]] and not odd.bars
    assert timed.count(((2, 8192, 16, 128), True)) == 1 + len(LAZY)
    *_, ratios, loss, infinite = bars.Trial(FP32, [by_number(16)], seed=1).grids()
    assert len(ratios.bars) == 16
    assert [row[0] for row in loss.rows] == list(FLOAT32)
    assert loss.rows[0][1:] == ["0.50", "2.00", "0.50", "2.00", "2"] and all(loss.bars[:4])
    assert loss.rows[-1][1:] == ["0.50", "2.00 !", "0.50", "2.00 !", "1"]
    assert infinite.rows == [["d 64", "64 of 128"], ["d 128", "128 of 128"]]
    assert infinite.bars == [False, True]


class Event:
    """A CUDA event where there is no GPU; a run takes a millisecond."""

    def __init__(self, enable_timing):
        self.record = self.synchronize = lambda: None

    def elapsed_time(self, end):
        return 1.0


@pytest.fixture
def timed(monkeypatch):
    """Timing without a GPU: rungs 2 and 3 and two libraries, each of which has the time that is said here."""
    milliseconds = {"2 coalesced": 1.0, "3 register tile": 2.0, FLASH.label: 4.0, CUDNN.label: 8.0}

    def measure(functions, *, each, check):
        outputs = {label: function() for label, function in functions.items()}
        if check:
            check(outputs)
        return {label: Timing(*[milliseconds[label]] * 3, 9) for label in functions}

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(compare, "measure", measure)
    monkeypatch.setattr(benchmark, "PEERS", (FLASH, CUDNN))
    monkeypatch.setattr(Cell, "inputs", lambda *_: [torch.full((1, 2, 1, 4), 3.0)] * 3)
    benchmark._seconds_in.cache_clear()
    yield lambda calls: monkeypatch.setattr(
        benchmark, "call_of", lambda method, qkv, causal: lambda: calls[method.label](*qkv)
    )
    benchmark._seconds_in.cache_clear()


def test_what_is_timed_and_what_is_left_out(timed, monkeypatch):
    def raises(error):
        def call(*_):
            raise error

        return call

    first = lambda q, k, v: v  # noqa: E731
    ladder = [by_number(2), by_number(3)]
    timed({"2 coalesced": first, "3 register tile": first, FLASH.label: first, CUDNN.label: first})
    found = benchmark.time_cell(SHORT, ladder, BF16)
    assert {label: t.median_ms for label, t in found.times.items()} == {
        "2 coalesced": 1, "3 register tile": 2, FLASH.label: 4, CUDNN.label: 8,
    }  # fmt: skip
    assert not found.left_out
    benchmark._seconds_in.cache_clear()
    nearly, wrong = (lambda q, k, v, d=d: v + d for d in (0.1, 0.3))
    calls = {"2 coalesced": nearly, "3 register tile": wrong, CUDNN.label: first}
    timed(calls | {FLASH.label: raises(ImportError("it cannot be imported"))})
    found = benchmark.time_cell(SHORT, ladder, BF16)
    assert list(found.times) == ["2 coalesced", CUDNN.label]
    assert found.left_out == {
        "3 register tile": "wrong result: 0.3 away from SDPA cuDNN",
        FLASH.label: "it cannot be imported",
    }
    benchmark._seconds_in.cache_clear()

    def says_why(*_):
        warnings.warn("Dropout is on (Triggered internally at x.cpp)", stacklevel=1)
        warnings.warn("Flash kernel not used because: (Triggered internally)", stacklevel=1)
        raise RuntimeError("No available kernel")

    errors = {
        "2 coalesced": torch.cuda.OutOfMemoryError("CUDA out of memory"),
        "3 register tile": ValueError("no rung\nmore"),
    }
    timed({k: raises(e) for k, e in errors.items()} | {FLASH.label: says_why, CUDNN.label: first})
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert benchmark.time_cell(SHORT, ladder, BF16).left_out == {
        "2 coalesced": "out of memory",
        "3 register tile": "no rung",
        FLASH.label: "Dropout is on",
    }
    benchmark._seconds_in.cache_clear()
    monkeypatch.setattr(Event, "elapsed_time", lambda self, end: 1e3 * benchmark.LONGEST / 16.1)
    found = benchmark.time_cell(Cell(64, 8192, False), [], BF16)  # 16 x the work of 512
    assert len(found.left_out) == 1 and not found.left_out.get(CUDNN.label)
    found = benchmark.time_cell(Cell(64, 16384, False), [], BF16)
    assert found.left_out[CUDNN.label] == "a run would take more than 0.3 s" and not found.times


def test_every_rung_has_the_precisions_that_it_computes_in():
    has = {
        n: [name for name, p in PRECISIONS.items() if p.has(by_number(n))]
        for n in (3, 6, 9, 14, 15, 16)
    }
    assert has == {
        3: ["bfloat16", "float16", "float32"],
        6: ["bfloat16", "float16", "tf32"],
        **dict.fromkeys((9, 14, 15), ["bfloat16", "float16"]),
        16: ["float32"],
    }
    defaults = [precision.default(128) for precision in PRECISIONS.values()]
    assert defaults == [by_number(15), by_number(15), by_number(16), None]
    assert FP32.reference(by_number(3)) == "a float32 matrix product"
    assert FP32.reference(by_number(16)) == "a float32 matrix product split into three of 16 bits"


def test_the_picture(ladder):
    pytest.importorskip("matplotlib")
    cells = {
        cell.key: at(cell, {1: 0.5, 15: 640, CUDNN: 600})
        for cell in (SHORT, LONG, Cell(128, 8192, False))
    }
    (path,) = plot.draw(BF16, Times(run("2026-01-01"), REFERENCES, cells))
    assert path.name == "bfloat16-d128.png" and path.stat().st_size > 10_000


@pytest.mark.skipif(torch.cuda.is_available(), reason="what it says without a GPU")
def test_the_command_without_a_gpu(capsys):
    assert command.main(["--rung", "12", "--dtype", "float16", "--head-dim", "64"]) == 0
    assert "rung 12 (warp specialised)" in capsys.readouterr().out
    assert command.main(["--rung", "1", "--dtype", "float16", "--head-dim", "64"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "rung 1 (naive)" in out and "timing and profiling need a GPU" in out
    assert command.main(["--rung", "9", "--dtype", "tf32"]) == 1
    assert "is not for tf32" in capsys.readouterr().out


def test_a_failing_rung_is_reported_and_ends_with_status_1(capsys, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("the checks of a GPU take longer")
    wrong = lambda q, k, v, rung, **options: torch.zeros_like(q)  # noqa: E731
    monkeypatch.setattr("task4.ladder.test.ladder_attention", wrong)
    assert command.main(["--rung", "1", "--dtype", "float16", "--head-dim", "64"]) == 1
    out = capsys.readouterr().out
    assert "failed" in out and "largest error" in out and "python -m task4.ladder.test" in out


@pytest.fixture
def on_gpu(ladder, monkeypatch):
    """The command as on a GPU that all rungs run on, where nothing is built and every check passes but rung 2's."""
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(command, "device_of", lambda _: gpu)
    monkeypatch.setattr(type(RUNGS[0]), "why_not", lambda *_: None)
    monkeypatch.setattr(command, "_build", lambda ladder, options: ladder)
    monkeypatch.setattr(command, "_provenance", lambda options: run("2026-05-05"))
    monkeypatch.setattr(
        type(BF16), "references", lambda precision: {precision.reference(MATH): 800.0}
    )
    monkeypatch.setattr(
        command,
        "time_cell",
        lambda cell, ladder, precision: at(cell, {r: 500 for r in ladder} | {CUDNN: 450}),
    )
    failing = []
    monkeypatch.setattr(
        command, "_check", lambda ladder, _: [r for r in ladder if r.number not in failing]
    )
    monkeypatch.setattr(plot, "draw", lambda *_: [])
    return ladder, failing


def test_only_a_complete_run_is_written(on_gpu, capsys):
    ladder, failing = on_gpu
    for arguments in (
        ["--rung", "9"],
        ["--seq", "512"],
        ["--head-dim", "64"],
        ["--no-causal"],
        ["--no-check"],
    ):
        assert command.main(arguments) == 0
        assert "9 Q and P in registers" in capsys.readouterr().out
        assert not record.TABLE.exists()
    failing.append(2)
    assert command.main([]) == 1 and not record.TABLE.exists()
    failing.clear()
    assert command.main([]) == 0
    assert record.load()["bfloat16"].times.run["date"] == "2026-05-05"
    assert "2026-05-05" in (ladder / "README.md").read_text()


def test_bars_end_with_status_1_if_one_is_missed(on_gpu, monkeypatch, capsys):
    met = [True]
    grids = lambda self: iter([Grid(self.precision.name, [""], [["x"]], met)])  # noqa: E731
    monkeypatch.setattr(bars.Trial, "grids", grids)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)  # as where there is none
    assert command.main(["--bars"]) == 0
    out = capsys.readouterr().out
    assert (
        "flash_attn_interface cannot be imported (ModuleNotFoundError)" in out
        and "bfloat16" in out
        and "float32" in out
    )
    assert {name for name, found in record.load().items() if found.bars} == {"bfloat16", "float32"}
    met[0] = False
    assert command.main(["--bars"]) == 1
    assert (
        command.main(["--bars", "--dtype", "tf32"]) == 0
        and "tf32 has no bars" in capsys.readouterr().out
    )


def test_nothing_spills_and_no_wgmma_is_serialised():
    """Rungs 9 and up as compiled for the first of the architectures that each is for."""
    wanted = [rung.source for rung in RUNGS if rung.number >= 9]
    try:
        targets = [
            planner.plan(s, "cuda", arch=(planner.architectures(s) or ("sm_90a",))[0])
            for s in wanted
        ]
    except BuildError as error:  # no nvcc
        pytest.skip(str(error).splitlines()[0])
    if not torch.cuda.is_available() and not all(target.path.exists() for target in targets):
        pytest.skip("not compiled here: python -m common.build --arch sm_90a")
    for built in builder.make(targets):
        name, kernels = built.target.source.name, resources(built.said)
        assert kernels, f"{name}: ptxas reported nothing"
        assert all(line.endswith("no spills") for line in kernels), (name, kernels)
        assert not builder.readable(built.said), (
            name
        )  # ptxas would report here that it serialises wgmma


def test_what_limits_a_rung(on_gpu, monkeypatch, capsys):
    def launched(subject, call):
        return [counters._kernel("void k<8>(int)", launch(168, 214_016, 384), {"k<8>": 16}, HOPPER)]

    missing = "flash_attn_interface cannot be imported"
    monkeypatch.setattr(counters, "_launched", launched)
    monkeypatch.setattr(counters, "seconds_of", lambda call: missing if call is FA3 else 1.0)
    monkeypatch.setattr(evidence_counters, "_call", lambda method, *_: method)
    monkeypatch.setattr(counters.shutil, "which", lambda _: None)
    assert command.main(["--profile"]) == 0
    out = capsys.readouterr().out
    assert "there is no ncu" in out and "14 persistent" in out
    assert not record.TABLE.exists()  # what an earlier run counted is kept

    def count(command, number, _):
        *_, module, precision, cell = command[:-number]
        assert (module, precision) == ("task4.ladder.evidence.counters", "bfloat16")
        assert Cell(**json.loads(cell)) == Cell(128, 2048, False)
        assert command[-number:] == subjects
        return [{"smsp__average_warps_issue_stalled_wait_per_issue_active.ratio": 1.0}] * number

    monkeypatch.setattr(counters, "counted", count)
    methods = [r for r in RUNGS if BF16.has(r)] + [EFFICIENT, FLASH, CUDNN]
    subjects = [method.label for method in methods]
    assert command.main(["--profile"]) == 0
    resources, not_profiled, counts = record.load()["bfloat16"].profile.grids
    assert not_profiled.rows == [[FA3.label, missing]]
    assert resources.rows[13] == [
        "14 persistent",
        "k",
        "168",
        "16",
        "209.0",
        "384",
        "132",
        "1",
        "19%",
    ]
    assert counts.rows[13] == ["14 persistent", "k", *["-"] * len(counters.UNITS), "wait"]
    labels = [row[0] for row in counts.rows]
    assert labels[13:] == [
        "14 persistent",
        "15 lazy maximum",
        EFFICIENT.label,
        FLASH.label,
        CUDNN.label,
    ]
