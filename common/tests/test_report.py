# ruff: noqa: E402
"""The report: formulas, the page, the picture, and what compilers and ncu say."""

import math
import re
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
from common.report.host import compiler
from common.report.page import ANSWER, NEEDS_GPU, Side
from common.report.roof import Dot, Roof
from common.report.shapes import (
    COMBINE,
    DECODE,
    FUSED,
    NAIVE,
    PRODUCT,
    SCALE,
    SCORES,
    SOFTMAX,
    SPLIT,
    decode,
    ratio,
    sizes,
    value,
)
from common.timing import counters
from task4.frontends import benchmark

ROOF = Roof(100e12, 4e12, "a read; a product")
OUT = torch.device("cpu")


# Formulas -------------------------------------------------------------------------------------------------


class Counted(float):
    """A number that counts the operations it is in."""

    operations = 0

    def _counted(self, number):
        Counted.operations += 1
        return Counted(number)

    def __add__(self, other):
        return self._counted(float(self) + other)

    def __sub__(self, other):
        return self._counted(float(self) - other)

    def __mul__(self, other):
        return self._counted(float(self) * other)

    def __truediv__(self, other):
        return self._counted(float(self) / other)

    def exp(self):
        return self._counted(math.exp(self))

    def larger(self, other):
        return self._counted(max(float(self), other))


def run_attention(heads, queries, keys, dim):
    """FLOPs of each step of attention, written out."""
    found, before = [], 0

    def numbers(*shape):
        if not shape:
            return Counted(0.5)
        return [numbers(*shape[1:]) for _ in range(shape[0])]

    def step():
        nonlocal before
        found.append(Counted.operations - before)
        before = Counted.operations

    Counted.operations = 0
    q, k, v = numbers(heads, queries, dim), numbers(heads, keys, dim), numbers(heads, keys, dim)
    S, O = numbers(heads, queries, keys), numbers(heads, queries, dim)
    rows = [(h, i) for h in range(heads) for i in range(queries)]
    for h, i in rows:
        for j in range(keys):
            S[h][i][j] = Counted(0)
            for e in range(dim):
                S[h][i][j] += q[h][i][e] * k[h][j][e]
    step()
    for h, i in rows:
        S[h][i] = [s * 0.3 for s in S[h][i]]
    step()
    for h, i in rows:
        m, l = Counted(-math.inf), Counted(0)
        for s in S[h][i]:
            m = m.larger(s)
        P = [(s - m).exp() for s in S[h][i]]
        for p in P:
            l += p
        S[h][i] = [p / l for p in P]
    step()
    for h, i in rows:
        for e in range(dim):
            O[h][i][e] = Counted(0)
            for j in range(keys):
                O[h][i][e] += S[h][i][j] * v[h][j][e]
    step()
    return found


def test_flops_are_those_of_the_loops(monkeypatch):
    heads, seq, dim = 2, 5, 3
    monkeypatch.setattr(shapes, "HEADS", heads)
    monkeypatch.setattr(shapes, "HEAD_DIM", dim)
    letters = sizes(seq)
    counted = run_attention(heads, seq, seq, dim)
    steps = SCORES, SCALE, SOFTMAX, PRODUCT
    assert [value(work.flops, letters) for work in steps] == counted
    for whole in (NAIVE, FUSED, host.NAIVE, host.HOST):
        assert value(whole.flops, letters) == sum(counted)
    assert value(host.WORKS[0].flops, letters) == counted[0] + counted[1]
    assert value(DECODE.flops, letters) == sum(run_attention(heads, 1, seq, dim))


def test_bytes_are_those_of_the_tensors():
    heads, seq, dim, n = 8, 24, 64, 3
    letters = sizes(seq, n)
    q = k = v = out = torch.empty(heads, seq, dim)
    scores = torch.empty(heads, seq, seq)
    one, parts, lse = (torch.empty(heads, *rest) for rest in ((dim,), (n, dim), (n,)))
    moved = [
        (SCORES, (q, k, scores)), (SCALE, (scores, scores)), (SOFTMAX, (scores, scores)), (PRODUCT, (scores, v, out)),
        (NAIVE, (q, k, *[scores] * 6, v, out)), (FUSED, (q, k, v, out)), (DECODE, (one, k, v, one)),
        (SPLIT, (one, k, v, parts, lse)), (COMBINE, (parts, lse, one)),
        (decode(n), (one, k, v, parts, lse, parts, lse, one)), (host.NAIVE, (q, k, *[scores] * 4, v, out)),
    ]  # fmt: skip
    for work, tensors in moved:
        assert value(work.bytes, letters) == sum(t.nbytes for t in tensors), work.name
    assert value(COMBINE.flops, letters) == heads * (n * (2 * dim + 4) + dim)


@pytest.mark.parametrize(
    ("work", "short", "long", "formula"),
    [
        (SCORES, 16, 28.444, "S D / (4 D + 2 S)"),
        (SOFTMAX, 0.625, 0.625, "5 / 8"),
        (PRODUCT, 16, 28.444, "S D / (4 D + 2 S)"),
        (NAIVE, 8.1875, 10.48, "(2 S D + 3 S) / (8 D + 12 S)"),
        (FUSED, 32.75, 262, "(2 S D + 3 S) / (8 D)"),
        (DECODE, 0.50775, 0.51122, "(2 S D + 3 S) / (4 D + 4 S D)"),
    ],
)
def test_intensities(work, short, long, formula):
    assert work.intensity(sizes(128)) == pytest.approx(short, rel=1e-4)
    assert work.intensity(sizes(1024)) == pytest.approx(long, rel=1e-4)
    assert ratio(work) == formula
    letters = {"H": 3, "n": 2, "S": 7, "D": 5}
    python = re.sub(r"(?<=\w) (?=\w)", " * ", formula)
    assert work.intensity(letters) == pytest.approx(eval(python, letters))


def test_formulas_as_text():
    assert shapes.text(NAIVE.flops) == "4 H S² D + 6 H S²"
    assert SCORES.traffic == "8 H S D (read q, k) + 4 H S² (write scores)"
    table = page.numbers([SPLIT, COMBINE], {128: 1, 1024: 7})
    assert table.rows[0][1:4] == ["-"] * 3 and table.rows[1][6] == "0.476"  # 988 / 2076


def test_the_roof_has_a_ridge():
    assert ROOF.ridge == 25
    assert (ROOF.at(10), ROOF.at(1000)) == (40e12, 100e12)
    assert (ROOF.limit(24.9), ROOF.limit(25)) == ("memory", "compute")


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


# The CPU ----------------------------------------------------------------------------------------------------


def test_the_steps_of_naive_are_its_own(monkeypatch):
    q, k, v = (torch.randn(1, 9, 8, 64) for _ in range(3))
    scores, out = torch.empty(1, 8, 9, 9), torch.empty(1, 9, 8, 64)
    host._steps.query("step_scores", OUT, q=q, k=k, scores_of=scores, scale=0.125)
    host._steps.query("step_softmax", OUT, scores_of=scores)
    host._steps.query("step_product", OUT, scores_of=scores, v=v, out=out)
    torch.testing.assert_close(out, benchmark.pytorch(q, k, v, causal=False))


def test_the_probe_does_what_it_is_timed_for():
    part = 6 * 768  # floats of a thread: what any vectors read at a time divides them
    sums, data = torch.zeros(3), torch.ones(3 * part)
    read = host._probe.query(
        "read_memory", OUT, data=data, n=data.numel(), times=2, threads=3, sums=sums
    )
    assert read == data.numel() and sums.tolist() == [2 * part] * 3
    done = host._probe.query("multiply_add", OUT, a=0.5, b=1.0, times=40, threads=2, sums=sums)
    assert sums[:2].tolist() == [done] * 2  # each of done / 2 sums is 2


GCC = """\
task4/frontends/x.cpp:10:21: missed: couldn't vectorize loop
task4/frontends/x.cpp:10:21: missed: not vectorized: multiple nested loops.
task4/frontends/x.cpp:13:25: optimized: loop vectorized using 32 byte vectors
task4/frontends/x.cpp:13:25: optimized: loop vectorized using 16 byte vectors
task4/frontends/x.cpp:13:25: missed: couldn't vectorize loop
/usr/include/c++/12/cmath:13:49: missed: not vectorized: no vectype for stmt: _191 = *_190;
 scalar_type: float
task4/frontends/x.cpp:42:16: note: vectorized 4 loops in function.
task4/frontends/elements.h:69:23: optimized: loop vectorized using 32 byte vectors
task4/frontends/elements.h:70:23: missed: couldn't vectorize loop
task4/frontends/elements.h:70:23: missed: not vectorized: control flow in loop.
task4/frontends/x.cpp:98:23: missed: couldn't vectorize loop
task4/frontends/x.cpp:99:23: missed: not vectorized: no vectype for stmt: _1 = MEM[(const struct Row &)_2].at[0];
 scalar_type: Vector
task4/frontends/x.cpp:99:23: missed: not vectorized: unsupported data-type
"""
CLANG = """\
task4/frontends/x.cpp:36:44: remark: loop not vectorized: cannot prove it is safe to reorder floating-point operations; allow reordering by specifying '#pragma clang loop vectorize(enable)' before the loop or by providing the compiler option '-ffast-math'. [-Rpass-analysis=loop-vectorize]
   36 |       for (int j = 0; j < kv_len; ++j) sum += P[j] * v[j];
      |                                            ^
task4/frontends/x.cpp:36:7: remark: loop not vectorized [-Rpass-missed=loop-vectorize]
task4/frontends/x.cpp:26:5: remark: vectorized loop (vectorization width: 8, interleaved count: 4) [-Rpass=loop-vectorize]
task4/frontends/x.cpp:24:5: remark: loop not vectorized: value that could not be identified as reduction is used outside the loop [-Rpass-analysis=loop-vectorize]
task4/frontends/x.cpp:24:5: remark: loop not vectorized [-Rpass-missed=loop-vectorize]
task4/frontends/y.h:7:5: remark: loop not vectorized [-Rpass-missed=loop-vectorize]
"""


def test_what_compilers_say_of_loops():
    assert compiler.read("gcc", GCC, "task4/frontends/x.cpp") == {
        10: "no: `multiple nested loops`",
        13: "yes, 32 bytes; not in some copies: `no vectype for stmt: _191 = *_190;`",
        98: "no: `its numbers are vectors already`",
    }
    assert compiler.read("clang", CLANG, "task4/frontends/x.cpp") == {
        36: "no: `cannot prove it is safe to reorder floating-point operations`",
        26: "yes, 8 numbers",
        24: "no: `value that could not be identified as reduction is used outside the loop`",
    }


def test_the_loops_of_a_file():
    loops = compiler.loops(host.FILES[0])
    assert len(loops) == 12 and {loop.place.partition(":")[0] for loop in loops} == {"naive.cpp"}
    (divides,) = (loop for loop in loops if "row[j] / l" in loop.source)
    assert divides.verdict.startswith("yes, ")
    assert host._code("a || b") == "`a \\|\\| b`"


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
