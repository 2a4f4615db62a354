"""Kernels in strings of a Python file: how they are built, and the command that checks, times and profiles them."""

import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.build import BuildError, Kernels, builder, planner, using
from common.check.attention import references
from common.paths import ROOT
from common.timing import counters
from task4.frontends.one_file import __main__ as command
from task4.frontends.one_file import profile, steps

FILES = {file.name: file for file in steps.files()}

CUDA = """
#include <cuda_runtime.h>
#include "beside.h"
__global__ void add_kernel(float* x) { x[threadIdx.x] += BESIDE; }
extern "C" cudaError_t add(float* x, int n, cudaStream_t stream) {
  add_kernel<<<1, n, 0, stream>>>(x);
  return cudaGetLastError();
}
"""
CPP = """
#include "beside.h"
extern "C" int add(float* x, int n) {
  for (int i = 0; i < n; ++i) x[i] += BESIDE;
  return 0;
}
"""


def python_file(folder: Path, text: str) -> str:
    """A Python file with a text that begins in its line 3."""
    (folder / "beside.h").write_text("#define BESIDE 2\n")
    (folder / "kernels.py").write_text(f'"""Of a student."""\n\nSOURCE = r"""{text}"""\n')
    return str(folder / "kernels.py")


# Kernels.from_text ---------------------------------------------------------------------------------------


def test_a_text_runs_with_the_headers_beside_its_python_file(tmp_path):
    x = torch.zeros(4)
    Kernels.from_text(python_file(tmp_path, CUDA), CUDA).launch("add", x=x, n=3)
    Kernels.from_text(python_file(tmp_path, CPP), CPP, ".cpp").query("add", x.device, x=x, n=2)
    assert x.tolist() == [4, 4, 2, 0]


def test_two_texts_of_one_file_and_an_edited_one(tmp_path):
    file, x = python_file(tmp_path, CPP), torch.zeros(2)
    both = CPP, CPP.replace("+=", "-=")
    first, second = (Kernels.from_text(file, text, ".cpp") for text in both)
    assert first.source != second.source and first.source.name == "kernels.cpp"
    for kernels in (first, second, first):
        kernels.query("add", x.device, x=x, n=1)
    assert x.tolist() == [2, 0]
    python_file(tmp_path, "\n" + CPP)  # another line: other messages, and so another build
    assert Kernels.from_text(file, CPP, ".cpp").source != first.source


def test_nothing_is_written_before_the_first_use(tmp_path, monkeypatch):
    monkeypatch.setattr(planner, "BUILD", tmp_path / "built")
    kernels = Kernels.from_text(python_file(tmp_path, CPP), CPP, ".cpp")
    assert not (tmp_path / "built").exists()
    written = kernels.source
    assert written.read_text() == f'#line 3 "{tmp_path}/kernels.py"\n{CPP}'
    assert [p for p in written.parents[1].rglob("*") if p.is_file()] == [written]
    planner.BUILD.joinpath("texts/file").touch()
    monkeypatch.setattr(planner, "BUILD", planner.BUILD / "texts/file")
    with pytest.raises(BuildError, match=r"cannot write .*kernels\.cu: Not a directory"):
        _ = Kernels.from_text(str(tmp_path / "kernels.py"), CUDA).source


@pytest.mark.parametrize(
    ("text", "wrong", "message"),
    [
        (CUDA, "x[threadIdx.y2] +=", r"kernels\.py:6:\d+: error: .*y2"),
        (CUDA, 'asm("mbarrier.init;"); x[0] +=', r"kernels\.py:6: inline PTX .* runs on a GPU only"),
        (CPP, "y[i] +=", r"kernels\.py:6:\d+: error: .*y.* was not declared"),
    ],
    ids=["CUDA", "PTX", "C++"],
)  # fmt: skip
def test_an_error_names_the_line_of_the_python_file(tmp_path, text, wrong, message):
    text = re.sub(r"x\[\S+\] \+=", lambda _: wrong, text)
    kernels = Kernels.from_text(
        python_file(tmp_path, text), text, ".cu" if "cuda" in text else ".cpp"
    )
    with pytest.raises(BuildError, match=message) as caught:
        builder.build([kernels.source])
    assert ".build" not in str(caught.value)


def test_a_text_that_is_not_in_the_file_as_it_is_counts_its_own_lines(tmp_path):
    made = CPP.replace("x[i] +=", "y[i] +=")
    kernels = Kernels.from_text(python_file(tmp_path, CPP), made, ".cpp")
    with pytest.raises(BuildError, match=r"kernels\.py \(text\):4:\d+: error: .*y"):
        builder.build([kernels.source])


def test_what_a_text_must_be(tmp_path):
    file = python_file(tmp_path, CPP)
    with pytest.raises(ValueError, match=r"suffix must be '.cu' or '.cpp'; got '.c'"):
        Kernels.from_text(file, CPP, ".c")
    with pytest.raises(ValueError, match="text must be a source; got NoneType None"):
        Kernels.from_text(file, None)
    with pytest.raises(BuildError, match=r"kernels\.py is C\+\+ for the CPU, and not for cuda"):
        planner.plan(Kernels.from_text(file, CPP, ".cpp").source, "cuda")
    x = torch.zeros(2)
    with pytest.raises(TypeError, match="add: missing n. It takes x, n"):
        Kernels.from_text(file, CPP, ".cpp").query("add", x.device, x=x)


# The attentions ------------------------------------------------------------------------------------------


def test_the_files_pass_the_check_at_small_sizes():
    grid, wrong = steps.check(list(FILES.values()), [1, 70], "cpu", seed=5)
    assert not wrong
    names = [f"{file}, {source}" for file in FILES for source in ("C++", "CUDA")]
    assert [row[0] for row in grid.rows[::2]] == names
    assert {row[-1] for row in grid.rows} == {"passed"}


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_masks_groups_and_strides(name, cuda):
    attend = partial(FILES[name].module.attention, cuda=cuda)
    for q_len, causal in ((37, False), (37, True), (90, True)):  # 90: the first queries see no key
        q = torch.randn(2, 4, q_len, 40).transpose(1, 2)
        k, v = torch.randn(2, 70, 2, 2, 40).unbind(2)
        options = {"causal": causal, "scale": 0.3}
        truth, pytorch = references(q, k, v, **options)
        assert steps._problem(attend(q, k, v, **options), truth, pytorch, {}) is None
    assert attend(q, k[:, :0], v[:, :0]).eq(0).all()
    assert attend(q[:0], k[:0], v[:0]).shape == (0, 90, 4, 40)
    with pytest.raises(ValueError, match="q must be .* float32"):
        attend(q.half(), k.half(), v.half())


@pytest.mark.parametrize("name", FILES)
def test_the_cuda_has_no_race(name):
    q, k, v = (torch.randn(1, n, 2, 33) for n in (70, 40, 40))
    with using(check=True, order="reverse"):
        got = FILES[name].module.attention(q, k, v, causal=True, cuda=True)
    assert steps._problem(got, *references(q, k, v, causal=True), {}) is None


# The command ---------------------------------------------------------------------------------------------


def test_help():
    said = subprocess.run(
        [sys.executable, "-m", "task4.frontends.one_file", "--help"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert "three_kernels, fused" in said and "{check,benchmark,profile}" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone"], "there is no file 'gone' here; there are three_kernels, fused"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--device", "cuda"], "--device cuda: PyTorch sees no GPU here"),
        (["--seq", "0"], "S must be 1 or more; got 0"),
    ],
)
def test_bad_arguments(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert message in capsys.readouterr().err


def run(*arguments: str, capsys) -> str:
    assert command.main([*arguments, "--device", "cpu", "--seq", "33", "--seed", "3"]) == 0
    return capsys.readouterr().out


def test_the_benchmark(monkeypatch, capsys):
    monkeypatch.setattr(steps, "SECONDS", 0.05)
    said = run("--step", "benchmark", capsys=capsys)
    (row,) = (line.split() for line in said.splitlines() if line.startswith("33"))
    assert len(row) == 6 and all(float(number) > 0 for number in row)


def test_the_profile_on_a_cpu(monkeypatch, capsys):
    monkeypatch.setattr(steps, "SECONDS", 0.05)
    said = run("three_kernels", "--step", "profile", capsys=capsys)
    (row,) = (line.split() for line in said.splitlines() if line.startswith("three_kernels "))
    assert row[1:3] == ["33", "2.23"] and float(row[4]) == pytest.approx(64 * 33 / (4 * 97), 1e-3)
    text = (ROOT / "task4/frontends/one_file/three_kernels.py").read_text().splitlines()
    loops = {}
    for number, rest in re.findall(r"^(\d+): (.*\S)", said, re.MULTILINE):
        line = text[int(number) - 1].strip()
        assert rest.startswith(line[:40])
        loops[line] = rest
    verdict = {
        "S_i[j] += Q_ie * K_e[j]": r"\d+-byte vectors$",
        "P[j] /= l": r"\d+-byte vectors$",
        "std::exp": "calls |not|no vector",
    }
    for part, expected in verdict.items():
        (rest,) = (rest for line, rest in loops.items() if part in line)
        assert re.search(expected, rest), rest


def test_a_wrong_attention_is_reported(monkeypatch, capsys):
    right = FILES["fused"].module.attention
    monkeypatch.setattr(FILES["fused"].module, "attention", lambda *a, **b: 1.01 * right(*a, **b))
    assert command.main(["fused", "--device", "cpu", "--seq", "33", "--step", "check"]) == 1
    said = capsys.readouterr().out
    assert "wrong" in said and "fused, C++, S 33: " in said


def test_a_file_that_does_not_compile_is_reported(monkeypatch, capsys):
    fused = FILES["fused"].module
    text = fused._CPP_SRC.replace("Row sum[N]", "Row total[N]")
    monkeypatch.setattr(fused, "_cpp", Kernels.from_text(fused.__file__, text, ".cpp"))
    assert command.main(["fused", "--device", "cpu", "--step", "check", "--seq", "9"]) == 1
    assert "sum" in (said := capsys.readouterr().err) and "Traceback" not in said


# What a GPU and another compiler say, from samples ---------------------------------------------------------


def test_speed_of_light(monkeypatch):
    kernels = [["three_kernels", name, *["-"] * 7] for name in ("scores", "softmax", "product")]
    percent = ((80.0, 30.0), (20.0, 91.4), (41.0, 50.0))
    found = [
        dict(zip(list(profile.SPEED_OF_LIGHT.values())[:2], pair, strict=True)) for pair in percent
    ]
    monkeypatch.setattr(profile, "resources", lambda _: (kernels, []))
    monkeypatch.setattr(counters, "counted", lambda *_: found)
    _, grid = profile.speed_of_light([], 1024, seed=1)
    rows = [[row[1], *row[2:4], row[-1]] for row in grid.rows]
    assert rows == [
        ["scores", "80", "30", "compute"],
        ["softmax", "20", "91", "memory"],
        ["product", "41", "50", "latency"],
    ]
    assert profile._percentages({}) == ["-"] * 6
    assert profile._percentages(dict.fromkeys(profile.SPEED_OF_LIGHT.values(), 70.0))[-1] == "both"


def test_without_counters_there_is_a_sentence(monkeypatch, capsys):
    def refused(*_):
        raise counters.NoCounters(counters.PERMISSION)

    monkeypatch.setattr(profile, "resources", lambda _: ([], []))
    monkeypatch.setattr(counters, "counted", refused)
    options = SimpleNamespace(device="cuda", wanted=[], seq=[128], seed=1)
    command._profile(options)
    assert "ncu may not read the GPU's counters" in capsys.readouterr().out


CLANG = """\
a.py:7:3: remark: vectorized loop (vectorization width: 8, interleaved count: 4) [-Rpass=loop-vectorize]
a.py:9:5: remark: loop not vectorized: call instruction cannot be vectorized [-Rpass-analysis=loop-vectorize]
a.py:9:5: remark: loop not vectorized [-Rpass-missed=loop-vectorize]
/usr/include/x.h:3:5: remark: loop not vectorized [-Rpass-missed=loop-vectorize]
"""


def test_what_clang_says():
    found = profile._clang(CLANG, "a.py")
    assert {loop.line: (loop.vectors, loop.reason) for loop in found.values()} == {
        7: (32, ""),
        9: (0, "calls a function"),
    }
