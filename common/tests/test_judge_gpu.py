"""Grading on a GPU: bands of speed, and a student's device code in a library of ours."""

import dataclasses
import sys

import pytest
import torch

from common.build import BuildError, builder, toolchain
from common.paths import ROOT
from common.record import WORTH
from common.staff.grade.one import with_gpu
from common.staff.judge import device_code
from common.staff.judge.exchanged import Exchanged, used_by
from common.staff.judge.speed import decided, median_interval, part_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
BANDS = ((0.9, 1.0), (0.7, 0.75), (0.5, 0.5))


def _nvcc():
    try:
        return toolchain.nvcc_for("sm_80")
    except BuildError:
        return None


needs_nvcc = pytest.mark.skipif(_nvcc() is None, reason="needs nvcc")


def test_a_ratio_on_a_boundary_is_measured_longer_and_then_counts_as_the_higher_one():
    assert decided((0.95, 1.0), BANDS) and decided((0.71, 0.89), BANDS)
    assert not decided((0.88, 0.91), BANDS) and not decided((0.6, 0.7), BANDS)
    assert part_of((0.88, 0.91), BANDS) == 1.0
    assert part_of((0.71, 0.89), BANDS) == 0.75
    assert part_of((0.1, 0.49), BANDS) == 0.0


def test_the_interval_holds_the_median_as_often_as_it_says():
    torch.manual_seed(0)
    held = 0
    for _ in range(400):
        low, high = median_interval((torch.rand(30) ** 3).tolist())  # a skewed distribution
        held += low <= 0.5**3 <= high
    assert 0.92 <= held / 400 <= 0.99
    assert median_interval([1.0]) == (1.0, 1.0)


def test_a_group_counts_if_it_has_passed_on_both_devices():
    worth = WORTH["task4"]
    assert worth.speed == 0.25
    groups = [{"name": n, "status": "passed", "given": False} for n in ("attention", "layer")]
    cpu = {"points": 4, "earned": 4, "status": "passed", "groups": groups, "reason": ""}
    cpu["output"] = []
    speed = {"a": {"part": 1.0}, "b": {"part": 0.5}}
    both = with_gpu("task4", cpu, cpu, speed)
    assert both["earned"] == 3 + 0.75 and both["status"] == "passed" and both["speed"] == speed
    failed = dict(cpu, status="failed", groups=[groups[0], groups[1] | {"status": "failed"}])
    assert with_gpu("task4", cpu, failed, {})["earned"] == 1.5
    half = dict(failed, earned=2)  # a mistake in what only the CPU runs
    assert with_gpu("task4", half, cpu, {"a": {"part": 1.0}})["earned"] == 2
    crashed = dict(cpu, status="not run", groups=[], reason="the checks stopped")
    found = with_gpu("task4", cpu, crashed, {})
    assert (found["earned"], found["reason"], found["status"]) == (
        0,
        "the checks stopped",
        "failed",
    )


@needs_nvcc
def test_of_their_file_only_device_code_is_in_the_library(tmp_path):
    source = ROOT / "task2/attention_kernel.cu"
    theirs = tmp_path / "attention_kernel.cu"
    host = '__attribute__((constructor)) static void at_load() { puts("a text of theirs"); }'
    kernel = "__global__ void a_kernel_of_theirs(float* x) { *x = 1; }"
    theirs.write_text(f"#include <cstdio>\n{source.read_text()}\n{host}\n{kernel}\n")
    code = tmp_path / "task2.fatbin"
    code.write_bytes(device_code.compiled(theirs, "sm_80"))
    target = device_code.plan(source, "sm_80", code)
    builder.make([target])
    library = target.path.read_bytes()
    assert b"a_kernel_of_theirs" in library and b"custom_attention" in library
    assert b"a text of theirs" not in library
    assert target.path.parent == tmp_path


@needs_nvcc
def test_what_does_not_compile_says_where(tmp_path):
    source = tmp_path / "attention_kernel.cu"
    source.write_text("__global__ void kernel() { wrong }\n")
    with pytest.raises(BuildError, match=r"attention_kernel.cu\(1\): error"):
        device_code.compiled(source, "sm_80")


@needs_gpu
def test_our_launchers_run_their_kernels(tmp_path):
    import task2.attention as module

    source = ROOT / "task2/attention_kernel.cu"
    arch = toolchain.find_gpu().arch
    theirs = tmp_path / "attention_kernel.cu"
    text = source.read_text()
    changed = text.replace("// BEGIN SOLUTION\n", "// BEGIN SOLUTION\n  return;\n", 1)
    assert changed != text
    x = torch.randn(2, 5, 70, device="cuda")
    outputs = []
    for content in (text, changed):
        theirs.write_text(content)
        code = tmp_path / f"{len(outputs)}.fatbin"
        code.write_bytes(device_code.compiled(theirs, arch))
        target = device_code.plan(source, arch, code)
        builder.make([target])
        with used_by(module, Exchanged(source, target.path)):
            torch.full_like(x, 7.0)  # freed: the output gets this memory
            outputs.append(module.test_batched_softmax(x))
    assert torch.allclose(outputs[0], x.softmax(-1), atol=1e-6)
    assert not torch.allclose(outputs[1], x.softmax(-1), atol=1e-6)  # its kernel returns at once


def test_bands_are_those_of_the_data_file():
    assert {stage for stage, worth in WORTH.items() if worth.bands} == {"task2", "task4", "task5"}
    assert all(dataclasses.asdict(worth)["speed"] for worth in WORTH.values() if worth.bands)
