"""The ladder's command: what it measured is kept, told and drawn right; and what ncu and ptxas say is read right."""

import json
from dataclasses import asdict

import pytest
import torch

from common.build import BuildError, builder
from common.build.cli import resources
from common.record import provenance
from common.timing import Timing
from task4.ladder import __main__ as command
from task4.ladder import counters, plot, speed, table
from task4.ladder.rungs import RUNGS, by_number
from task4.ladder.speed import CUDNN, EFFICIENT, FA3, FLASH, KINDS, MATH, Cell, Measured
from task4.ladder.test import suite

SHORT, LONG = Cell(128, 2048, False), Cell(128, 4096, True)


@pytest.fixture
def ladder(tmp_path, monkeypatch):
    """table.json and README.md of its own."""
    for module in (table, plot):
        monkeypatch.setattr(module, "FOLDER", tmp_path)
    monkeypatch.setattr(table, "TABLE", tmp_path / "table.json")
    monkeypatch.setattr(table, "README", tmp_path / "README.md")
    (tmp_path / "README.md").write_text(
        "mine\n"
        + "".join(
            f"<!-- ladder: {s} -->\n<!-- end: {s} -->\n" for s in ("table", "bars", "profile")
        )
        + "mine\n"
    )
    return tmp_path


def run(date: str) -> dict:
    facts = provenance(suite.stage.sources, device="cpu", seed=1)
    gpu = {"gpu": "NVIDIA H200", "driver": "580", "cuda": "13.0"}
    return facts | {"date": date, "machine": facts["machine"] | gpu}


def at(cell: Cell, **tflops: float) -> Measured:
    """A cell in which everybody has so many TFLOP/s; ``rung_14`` for rung 14."""
    names = {"cudnn": CUDNN, "fa3": FA3, "flash": FLASH, "math": MATH, "efficient": EFFICIENT}
    times = {}
    for name, value in tflops.items():
        ms = cell.flops / value / 1e9
        times[names.get(name, name.replace("_", " "))] = Timing(ms, ms, ms, 9)
    return Measured(times=times)


def begin(date: str = "2026-01-01", kind: str = "bfloat16") -> table.Records:
    records = table.Records()
    records.begin(kind, run(date), 800.0)
    return records


def test_a_run_replaces_what_it_measured_and_keeps_the_rest(ladder):
    begin("2026-01-01").add("bfloat16", SHORT, at(SHORT, rung_13=500, rung_14=600, cudnn=500))
    records = begin("2026-02-02")
    records.add("bfloat16", SHORT, at(SHORT, rung_14=660, cudnn=600))
    records.add("bfloat16", LONG, Measured(left_out={"rung 1": "a run would take about 2.0 s"}))
    kept = json.loads((ladder / "table.json").read_text())["bfloat16"]
    entries = kept["cells"][SHORT.name]
    assert entries["rung 14"]["tflops"] == pytest.approx(660)
    assert table.best_ratio(entries["rung 14"]) == pytest.approx(1.1)
    assert table.best_ratio(entries["rung 13"]) == pytest.approx(1.0)  # to its own run's cuDNN
    assert {e["run"] for e in entries.values()} == set(kept["runs"]) == {"2026-01-01", "2026-02-02"}
    records.add("bfloat16", SHORT, at(SHORT, rung_13=500))
    assert set(records.kinds["bfloat16"]["runs"]) == {"2026-02-02"}  # nothing is left of the first
    begin("2026-03-03", "float16").add("float16", SHORT, at(SHORT, rung_14=1, cudnn=1))
    assert set(json.loads((ladder / "table.json").read_text())) == {"bfloat16", "float16"}


def test_the_readme_is_filled_in_between_its_markers_only(ladder):
    records = begin()
    records.add("bfloat16", SHORT, at(SHORT, rung_1=0.5, rung_14=640, cudnn=600, fa3=620))
    records.add("bfloat16", LONG, Measured(left_out={"rung 1": "a run would take about 2.0 s"}))
    table.write_readme(records.kinds)
    text = (ladder / "README.md").read_text()
    assert text.startswith("mine\n") and text.endswith("\nmine\n")
    row = next(
        line for line in text.splitlines() if line.startswith("| [14 persistent](14_persistent.cu)")
    )
    assert "640<br>80%, 1.03x" in row
    assert f"- rung 1: where a run would take more than {speed.LONGEST:g} s" in text
    assert "NVIDIA H200" in text and "have changed since" not in text
    table.write_readme(records.kinds)
    assert (ladder / "README.md").read_text() == text
    records.kinds["bfloat16"]["runs"]["2026-01-01"]["sources"]["sha256"] = "0"
    table.write_readme(records.kinds)
    assert "The kernels have changed since." in (ladder / "README.md").read_text()
    (ladder / "README.md").write_text("nothing")
    with pytest.raises(ValueError, match="marker <!-- ladder: table --> or its"):
        table.write_readme(records.kinds)


def test_the_bars():
    def standing(kind, cell, **tflops):
        record = {"cells": {}}
        found = {
            n: {"tflops": cell.flops / t.median_ms / 1e9}
            for n, t in at(cell, **tflops).times.items()
        }
        against = {n: e["tflops"] for n, e in found.items() if n in speed.PEERS}
        record["cells"][cell.name] = {n: e | {"against": against} for n, e in found.items()}
        return table.standing(kind, record, cell)

    ratio, rival, bar = standing("bfloat16", SHORT, rung_14=660, cudnn=600, fa3=630, flash=300)
    assert (round(ratio, 3), rival, bar) == (1.048, FA3, 1.05)
    ratio, rival, _ = standing(
        "bfloat16", SHORT, rung_14=660, cudnn=589
    )  # FA3 by its ratio to cuDNN: 680 / 589
    assert (round(ratio, 3), rival) == (0.971, f"{FA3}*")
    assert standing("float16", Cell(64, 512, True), rung_14=250, cudnn=259)[1:] == (CUDNN, 1.0)
    assert standing("float16", Cell(256, 4096, True), rung_14=700, cudnn=600)[2] is None
    ratio, rival, bar = standing("float32", SHORT, rung_15=120, efficient=45, math=60)
    assert (round(ratio, 2), rival, bar) == (2.67, EFFICIENT, 2.5)
    assert standing("float32", Cell(64, 512, False), rung_15=120, efficient=45)[2] is None
    assert (
        standing("bfloat16", SHORT, rung_13=660, cudnn=600) is None
    )  # not the rung that a call gets


def test_every_rung_is_of_the_kinds_that_it_computes_in():
    kinds = {n: [k for k in KINDS if speed.takes(by_number(n), k)] for n in (3, 6, 9, 14, 15)}
    assert kinds == {
        3: ["bfloat16", "float16", "float32"],
        6: ["bfloat16", "float16", "tf32"],
        9: ["bfloat16", "float16"],
        14: ["bfloat16", "float16"],
        15: ["float32"],
    }
    defaults = {kind: table.default_rung(kind, 128) for kind in KINDS}
    assert defaults == {
        "bfloat16": "rung 14",
        "float16": "rung 14",
        "float32": "rung 15",
        "tf32": None,
    }


def test_the_picture(ladder):
    pytest.importorskip("matplotlib")
    records = begin()
    for cell in (SHORT, LONG, Cell(128, 8192, True)):
        records.add("bfloat16", cell, at(cell, rung_1=0.5, rung_14=640, cudnn=600))
    (path,) = plot.draw("bfloat16", records.kinds["bfloat16"])
    assert path.name == "bfloat16-d128.png" and path.stat().st_size > 10_000


@pytest.mark.skipif(torch.cuda.is_available(), reason="what it says without a GPU")
def test_the_command_without_a_gpu(capsys):
    assert command.main(["--rung", "12"]) == 1
    assert (
        "rung 12 (warp specialised) needs a GPU of compute capability 9.0 (Hopper)"
        in capsys.readouterr().out
    )
    assert command.main(["--rung", "1", "--dtype", "float16", "--head-dim", "64"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "1 naive" in out and "timing and profiling need a GPU" in out
    assert command.main(["--rung", "9", "--dtype", "tf32"]) == 1
    assert "is not for tf32" in capsys.readouterr().out


def test_a_failing_rung_is_told_and_ends_with_status_1(capsys, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("the checks of a GPU take longer")
    wrong = lambda q, k, v, rung, **options: torch.zeros_like(q)  # noqa: E731
    monkeypatch.setattr("task4.ladder.test.ladder_attention", wrong)
    assert command.main(["--rung", "1", "--dtype", "float16", "--head-dim", "64"]) == 1
    out = capsys.readouterr().out
    assert "FAILED" in out and "largest error" in out and "python -m task4.ladder.test" in out


def test_nothing_spills_and_no_wgmma_is_serialised():
    """Rungs 9 and up as compiled for the first of the architectures that each is for."""
    wanted = [rung.source for rung in RUNGS if rung.number >= 9]
    try:
        targets = [
            builder.plan(s, "cuda", arch=(builder.architectures(s) or ("sm_90a",))[0])
            for s in wanted
        ]
    except BuildError as error:  # no nvcc
        pytest.skip(str(error).splitlines()[0])
    if not torch.cuda.is_available() and not all(target.path.exists() for target in targets):
        pytest.skip("not compiled here: python -m common.build --arch sm_90a")
    for built in builder.make(targets):
        name, kernels = built.target.source.name, resources(built.said)
        assert kernels, f"{name}: ptxas told nothing"
        assert all(line.endswith("no spills") for line in kernels), (name, kernels)
        assert not builder.readable(built.said), name  # that wgmma is serialised would be told here


NCU = """\
==PROF== Connected to process 1
==PROF== Profiling "attention_kernel" - 0: 0%....100% - 9 passes
"ID","Process ID","Kernel Name","sm__inst_issued.avg.pct_of_peak_sustained_active","sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active","sm__inst_executed_pipe_tensor_op_hmma.avg.pct_of_peak_sustained_active","sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active","gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed","smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio","smsp__average_warps_issue_stalled_wait_per_issue_active.ratio","smsp__average_warps_issue_stalled_selected_per_issue_active.ratio"
"","","","%","%","%","%","%","inst","inst","inst"
"0","1","void attention_kernel<__nv_bfloat16, 128>(Attention)","41.50","1,012.5","20","33.3","2.1","0.5","1.75","1.0"
"""


def test_what_ncu_counts():
    (row,) = counters._rows(NCU)
    units, stalls = counters._units(row), counters._stalls(row)
    assert units == {"tensor": 1012.5, "issue": 41.5, "MUFU": 33.3, "DRAM": 2.1}
    assert stalls == {"long scoreboard": 0.5, "wait": 1.75}
    kernel = counters.Kernel(
        "k", 168, 200_000, 384, 132, units=units | {"tensor": 80.0}, stalls=stalls
    )
    assert kernel.limiter() == "tensor 80 %, waits: wait"


def test_what_bounds_them_is_kept_and_written(ladder):
    def kernel(tensor: float) -> list[dict]:
        found = counters.Kernel(
            "k", 168, 2048, 384, 132, 0, {"tensor": tensor}, {"wait": 2, "math": 1}
        )
        return [asdict(found) | {"resident": 1, "occupancy": 0.1875}]

    records = begin()
    records.add("bfloat16", SHORT, at(SHORT, rung_14=600, cudnn=500))
    peer = [{**kernel(70)[0], "spilled": None, "units": {}, "stalls": {}}]
    records.add_profile("bfloat16", run("2026-02-02"), SHORT, {"rung 14": kernel(80), CUDNN: peer})
    table.Records().add_profile("bfloat16", run("2026-03-03"), SHORT, {"rung 14": kernel(85)})
    begin("2026-04-04").add("bfloat16", SHORT, at(SHORT, rung_14=600, cudnn=500))
    table.write_readme(table.Records().kinds)
    above, below = (ladder / "README.md").read_text().split("<!-- ladder: profile -->")
    dashes = " | ".join("-" * (len(counters.UNITS) - 1))
    assert f"| 168 | 0 | 2 | 1 | 19% | 85 | {dashes} | wait |" in below
    assert f"| *{CUDNN}* | 168 | - | 2 | 1 | 19% | - | {dashes} | - |" in below
    assert "2026-02-02" in below and "2026-03-03" in below and "2026-04-04" not in below
    assert "2026-04-04" in above and "2026-03-03" not in above


HOPPER = type("H200", (), dict(max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, shared_memory_per_multiprocessor=233472))  # fmt: skip


def test_without_counters_there_is_nothing_to_keep(monkeypatch):
    found = [counters.Kernel("void k<8>(int)", 168, 214_016, 384, 132)]
    monkeypatch.setattr(counters, "_names", lambda *_: ["rung 14"])
    monkeypatch.setattr(counters, "_launched", lambda *_: found)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: HOPPER)
    monkeypatch.setattr(counters.shutil, "which", lambda _: None)
    with command.console.capture() as said:
        assert counters.show(command.console, [], "bfloat16", SHORT) == {}
    assert "there is no ncu" in said.get()
    monkeypatch.setattr(counters, "_count", lambda *_: None)
    with command.console.capture():
        (kernel,) = counters.show(command.console, [], "bfloat16", SHORT)["rung 14"]
    assert (kernel["name"], kernel["resident"], kernel["occupancy"]) == ("k", 1, 12 / 64)


def test_occupancy_and_spills():
    blocks = [
        counters.Kernel("k", registers, shared, threads, 1).resident(HOPPER)
        for registers, shared, threads in (
            (168, 214_016, 384),
            (128, 0, 256),
            (32, 0, 64),
            (255, 50_000, 128),
        )
    ]
    assert blocks == [1, 2, 32, 2]
    log = (
        "ptxas info    : Compiling entry function '_Z16attention_kernelIfLi64EEv9Attention' for 'sm_90a'\n"
        "    8 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads\n"
        "ptxas info    : Used 40 registers, used 1 barriers, 8192 bytes smem\n"
    )
    name = counters._plain("void attention_kernel<float, 64>(Attention)")
    assert counters._spills(log) in ({name: 40}, {"_Z16attention_kernelIfLi64EEv9Attention": 40})
