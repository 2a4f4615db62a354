# ruff: noqa: E402
"""The report: the page, the picture, the command, and what ncu says."""

import sys
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch

mpl_text = pytest.importorskip("matplotlib.text")

from common.build import Kernels
from common.marked import MarkerError
from common.report import __main__ as command
from common.report import gpu, host, page, picture, shapes
from common.report.page import ANSWER, NEEDS_GPU, Side
from common.report.roof import Dot, Roof
from common.report.shapes import (
    DECODE,
    FUSED,
    NAIVE,
    PRODUCT,
    SCORES,
    SOFTMAX,
    sizes,
)
from common.timing import counters
from task4.frontends import benchmark

ROOF = Roof(100e12, 4e12, "a read; a product")
OUT = torch.device("cpu")


# The page -------------------------------------------------------------------------------------------------


def side(where="the GPU", roof=ROOF, seconds=1e-5):
    works = (SCORES, SOFTMAX, PRODUCT, NAIVE, FUSED, DECODE)
    why = "" if roof else NEEDS_GPU
    dots = [
        Dot(w, sizes(seq), seconds if roof else None, why) for seq in (128, 1024) for w in works
    ]
    times = {seq: {w.name: 3e-5 for w in works} | {"PyTorch": 1e-5} for seq in (128, 512, 1024)}
    peers = {NAIVE.name: "PyTorch"}
    found = Side(where, dots, NAIVE.name, FUSED.name, roof, times if roof else {}, peers)
    found.run = f"a run on {where}" if roof else ""
    return found


def filled(text, gpu_side, host_side=None):
    found = page.sections([SCORES, FUSED], [FUSED], {128: 1, 1024: 1}, gpu_side, host_side)
    return page.fill(text, found, "README.md")


def test_answers_stay():
    text = filled(page.empty(), side(roof=None), side("the CPU"))
    assert text.count(ANSWER) == 4 and f"On the GPU: {NEEDS_GPU}." in text
    answered = text.replace(ANSWER, f"{ANSWER} because 2 < 25\n\nMore <!-- a note -->.", 1)
    answered = answered.replace("# Report: the kernels", "# My report: the kernels")
    again = filled(answered, side("the GPU"), side("the CPU", seconds=2e-5))
    assert f"{ANSWER} because 2 < 25\n\nMore <!-- a note -->." in again
    assert again.startswith("# My report") and NEEDS_GPU not in again
    assert "| 512 | 30 us | 10 us | 3.00 |" in again
    assert filled(again, side("the GPU"), side("the CPU", seconds=2e-5)) == again


def test_a_run_without_a_gpu_keeps_what_one_with_a_gpu_found():
    text = filled(page.empty(), side("the GPU"))
    again = filled(text, side(roof=None), side("the CPU"))
    assert "a run on the GPU" in again and "a run on the CPU" in again and NEEDS_GPU not in again
    unwritten = side(roof=None)
    unwritten.dots = [Dot(d.work, d.sizes, None, "not written") for d in unwritten.dots]
    text = filled(page.empty(), unwritten)
    assert NEEDS_GPU in filled(text, side(roof=None)) and "not written" in text


def test_a_page_without_its_markers_is_refused_before_anything_is_measured(tmp_path, capsys):
    (tmp_path / "README.md").write_text(page.empty().replace("<!-- report: gap-gpu -->", ""))
    assert command.main(["--out", str(tmp_path), "--device", "cpu"]) == 1
    assert "<!-- end: gap-gpu --> ends a section" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(MarkerError):
        page.check("", "README.md")


def test_windows_line_ends_stay():
    text = filled(page.empty().replace("\n", "\r\n"), side())
    assert "\r\n\r\n| " in text and text.replace("\r\n", "").count("\n") == 0
    assert filled(text, side(roof=None)).count("a run on the GPU") == 1


# What is written, and what is not ---------------------------------------------------------------------------


STUB = """\
#include <cuda_runtime.h>
#include "tensor.cuh"
extern "C" cudaError_t stub(View out, cudaStream_t stream) { return cudaGetLastError(); }
"""


def test_what_is_not_written_is_said(monkeypatch, tmp_path):
    (tmp_path / "stub.cu").write_text(STUB)
    kernels = Kernels(str(tmp_path / "x.py"), "stub.cu")

    def stub():
        kernels.launch("stub", out=(out := torch.empty(3, 4)))
        return out * 2  # a step that is written, after one that is not

    def refuses():
        raise NotImplementedError("f is not written yet")

    def fails():
        raise RuntimeError("stub.cu:3: error\nmore")

    def calls(*_):
        right = torch.ones(3, 4).clone
        found = [
            stub,
            refuses,
            fails,
            lambda: torch.zeros(3, 4),
            lambda: right() * torch.nan,
            right,
        ]
        return {name: gpu.Call(ours, right) for name, ours in zip(gpu.KERNELS, found, strict=True)}

    monkeypatch.setattr(gpu, "calls", calls)
    wrong = "wrong result: see python -m task{}.test"
    assert list(gpu.problems(OUT).values()) == [
        "not written", "not written", "stub.cu:3: error", wrong.format(2), wrong.format(4)
    ]  # fmt: skip


def test_the_kernels_here_are_written():
    assert gpu.problems(OUT) == {}


# The GPU, without one ---------------------------------------------------------------------------------------


@pytest.fixture
def no_gpu(monkeypatch):
    """A GPU as the command sees it."""
    monkeypatch.setattr(gpu, "ceilings", lambda: ROOF)
    monkeypatch.setattr(gpu, "seconds", lambda seq, device, names: dict.fromkeys([*names, gpu.PYTORCH, gpu.PYTORCH_DECODE], 1e-5))  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    monkeypatch.setattr(command, "provenance", lambda *_, **__: {})
    monkeypatch.setattr(command, "describe_run", lambda _: "a run")


def on_gpu(out, problems=()):
    options = SimpleNamespace(out=out, seed=1)
    return command._gpu(options, torch.device("cuda", 0), dict(problems), {128: 1, 1024: 7})


def test_a_run_on_a_gpu(no_gpu, monkeypatch, tmp_path):
    rows = [["task 4: fused, S 128", "k", "1 %", "2 %", "3 %"]]
    monkeypatch.setattr(gpu, "speed_of_light", lambda names: rows)
    found = on_gpu(tmp_path, {SOFTMAX.name: "not written"})
    assert [d.why for d in found.dots if d.seconds is None] == ["not written"] * 2
    assert found.dots[-1].work.name == DECODE.name and found.dots[-1].bytes > found.dots[5].bytes
    text = filled(page.empty(), found)
    assert "| task 4: fused, S 128 | k | 1 % | 2 % | 3 % |" in text
    assert "| task 2: softmax | 128 | 0.625 | memory | not written | - | - | - | - |" in text
    assert "| 512 | 10 us | 10 us | 1.00 |" in text and "a run" in text
    assert (tmp_path / "roofline-gpu.png").read_bytes().startswith(b"\x89PNG")


def test_where_ncu_may_not_count_the_reason_is_there(no_gpu, monkeypatch, tmp_path):
    def refuse(_):
        raise counters.NoCounters(counters.PERMISSION)

    monkeypatch.setattr(gpu, "speed_of_light", refuse)
    monkeypatch.setattr(picture, "draw", lambda *_: None)
    assert "Speed of Light: ncu may not read the GPU's counters" in on_gpu(tmp_path).more[0]
    nothing = dict.fromkeys(gpu.KERNELS, "not written")
    assert on_gpu(tmp_path, nothing).more == ["Nsight Compute: no kernel to profile."]


def test_what_ncu_counts(monkeypatch):
    ran = []
    name = "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed"
    row = {name: 91.4, "sm__throughput.avg.pct_of_peak_sustained_elapsed": 20.5}
    row |= {"gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": 80.0, "other": 1.0}

    def count(command, number, advice):
        ran.append(command)
        return [row] * number

    launched = [["task 4: fused, S 128", "k", "40"], ["task 4: fused, S 1,024", "k", "40"]]
    monkeypatch.setattr(gpu, "resources", lambda subjects: (launched, [["refused", "why"]]))
    monkeypatch.setattr(counters, "counted", count)
    assert gpu.speed_of_light([FUSED.name, NAIVE.name])[0] == [
        *launched[0][:2],
        "91 %",
        "80 %",
        "20 %",
    ]
    assert ran == [
        [
            sys.executable,
            "-m",
            "common.report.gpu",
            "task 4: fused, S 128",
            "task 4: fused, S 1,024",
        ]
    ]
    labels = [subject.label for subject in gpu._subjects(gpu.KERNELS)]
    assert len(labels) == 10 and "task 5: decode, S 1,024" in labels


# The picture ------------------------------------------------------------------------------------------------


def test_no_label_covers_another(tmp_path, monkeypatch):
    monkeypatch.setattr(picture.plt, "close", lambda figure: None)
    works = (SCORES, SOFTMAX, PRODUCT, NAIVE, FUSED, DECODE)
    dots = [Dot(w, sizes(s), 1e-5 if s == 128 else 2e-4) for s in (128, 1024) for w in works]
    missing = Dot(DECODE, sizes(128), None, NEEDS_GPU)
    picture.draw(tmp_path / "x.png", "a title", Roof(2e12, 1e11, "", cache=4e11), [*dots, missing])
    (axis,) = picture.plt.gcf().axes
    boxes = [
        mpl_text.Text.get_window_extent(text) for text in axis.texts
    ]  # without their thin lines
    assert len(boxes) == len(dots) + 4  # memory, cache, compute, ridge
    assert not [pair for pair in combinations(boxes, 2) if pair[0].overlaps(pair[1])]
    assert all(axis.bbox.contains(*box.min) and axis.bbox.contains(*box.max) for box in boxes)
    assert axis.get_xlabel().endswith("FLOP/byte") and axis.get_ylabel() == "TFLOP/s"
    assert [file.name for file in tmp_path.iterdir()] == ["x.png"]
    monkeypatch.undo()
    picture.plt.close("all")


# The command ------------------------------------------------------------------------------------------------


@pytest.fixture
def short(monkeypatch):
    """Lengths and budgets that take seconds."""
    for module in (shapes, page, gpu, picture, command):
        monkeypatch.setattr(module, "LENGTHS", (16, 32))
    monkeypatch.setattr(command, "GAP_LENGTHS", (16, 24, 32))
    monkeypatch.setattr(benchmark, "SECONDS", 0.01)
    monkeypatch.setattr(benchmark, "ROUNDS", (1, 3))
    monkeypatch.setattr(host, "_last_cache", lambda: 0)
    for name, few in {"READ": 1 << 22, "MULTIPLY_ADDS": 1000, "ROUNDS": 1, "TRIES": 2}.items():
        monkeypatch.setattr(host, name, few)


def test_the_command_on_the_cpu(short, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu, "problems", lambda device: {FUSED.name: "not written"})
    assert command.main(["--out", str(tmp_path), "--device", "cpu", "--seed", "3"]) == 0
    said = capsys.readouterr().out
    assert "task 4: fused (task4/attention_kernel.cu): not written" in said and "(--seed 3)" in said
    text = (tmp_path / "README.md").read_text()
    assert "| task 4: fused | 16 | 4.09 | - | not written |" in text
    assert "| task 2: scores | 16 | 3.56 | - | needs a GPU |" in text
    assert "![Roofline of the CPU, with the kernels at S 16 and 32](roofline-host.png)" in text
    assert "`for (int j = 0; j < seen; ++j) m = std::max(m, row[j]);`" in text
    assert sorted(file.name for file in tmp_path.iterdir()) == ["README.md", "roofline-host.png"]

    (tmp_path / "README.md").write_text(text.replace(ANSWER, "Mine.", 1))
    monkeypatch.setitem(sys.modules, "common.report.picture", None)
    monkeypatch.delattr("common.report.picture")
    assert command.main(["--out", str(tmp_path), "--device", "cpu"]) == 0
    assert command.MISSING in " ".join(capsys.readouterr().out.split())
    text = (tmp_path / "README.md").read_text()
    assert "Mine." in text and f"{command.MISSING}." in text and "![" not in text


def test_without_the_c_plus_plus_there_is_a_sentence(short, monkeypatch, tmp_path):
    monkeypatch.setattr(command, "host", None)
    monkeypatch.setattr(gpu, "problems", lambda device: {})
    assert command.main(["--out", str(tmp_path), "--device", "cpu"]) == 0
    text = (tmp_path / "README.md").read_text()
    assert page.NO_HOST in text and "naive.cpp" not in text


def test_an_interrupted_run_leaves_the_report(monkeypatch, tmp_path, capsys):
    def interrupt(device):
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "problems", interrupt)
    (tmp_path / "README.md").write_text(page.empty())
    assert command.main(["--out", str(tmp_path), "--device", "cpu"]) == 130
    assert (tmp_path / "README.md").read_text() == page.empty()
    assert "interrupted; the report is as it was" in capsys.readouterr().out


def test_bad_input_is_said(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        command.main(["--device", "cuda"])
    assert "--device cuda: PyTorch sees no GPU here" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert command.main(["--out", str(tmp_path / "file" / "below")]) == 1
    assert "error: cannot write" in capsys.readouterr().out
