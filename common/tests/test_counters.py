"""What ncu, ptxas and PyTorch's profiler say of a kernel is read right."""

import json
import subprocess
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from common.timing import counters
from common.timing.counters import NoCounters, Subject, count, resources, run_counted

NCU = """\
==PROF== Connected to process 1
==PROF== Profiling "attention_kernel" - 0: 0%....100% - 9 passes
"ID","Process ID","Kernel Name","sm__inst_issued.avg.pct_of_peak_sustained_active","sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active","sm__inst_executed_pipe_tensor_op_hmma.avg.pct_of_peak_sustained_active","sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active","gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed","smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio","smsp__average_warps_issue_stalled_wait_per_issue_active.ratio","smsp__average_warps_issue_stalled_selected_per_issue_active.ratio","smsp__average_warps_issue_stalled_wait_not_issued_per_issue_active.ratio"
"","","","%","%","%","%","%","inst","inst","inst","inst"
"0","1","void attention_kernel<__nv_bfloat16, 128>(Attention)","41.50","1,012.5","20","33.3","2.1","0.5","1.75","1.0","9.0"
"""


def test_what_ncu_counts():
    (row,) = counters._rows(NCU)
    busy = dict.fromkeys(counters.UNITS, "-") | {
        "tensor": "1012",
        "issue": "42",
        "MUFU": "33",
        "DRAM": "2",
    }
    assert counters._busy(row) == [*busy.values(), "wait"]
    assert counters._busy({}) == ["-"] * (len(counters.UNITS) + 1)


HOPPER = type("H200", (), dict(max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, shared_memory_per_multiprocessor=233472))  # fmt: skip


def launch(registers: int, shared: int, threads: int) -> dict:
    """As PyTorch's profiler has it."""
    return {
        "registers per thread": registers,
        "shared memory": shared,
        "block": [threads, 1, 1],
        "grid": [132, 1, 1],
    }


def test_occupancy_and_spills():
    blocks = [
        counters._kernel("k", launch(registers, shared, threads), {}, HOPPER)[6]
        for registers, shared, threads in (
            (168, 214_016, 384),
            (128, 0, 256),
            (32, 0, 64),
            (255, 50_000, 128),
        )
    ]
    assert blocks == ["1", "2", "32", "2"]
    log = (
        "ptxas info    : Compiling entry function '_Z16attention_kernelIfLi64EEv9Attention' for 'sm_90a'\n"
        "    8 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads\n"
        "ptxas info    : Used 40 registers, used 1 barriers, 8192 bytes smem\n"
    )
    name = counters._plain("void attention_kernel<float, 64>(Attention)")
    assert counters._spills(log) in ({name: 40}, {"_Z16attention_kernelIfLi64EEv9Attention": 40})


LOG = """\
ptxas info    : Compiling entry function 'k' for 'sm_90a'
    8 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers
"""


@pytest.fixture
def gpu(monkeypatch):
    """A GPU's calls where there is none; the list of what happened on it."""
    done = []
    profiler = SimpleNamespace(
        cudaProfilerStart=lambda: done.append("start"), cudaProfilerStop=lambda: done.append("stop")
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: profiler)
    event = SimpleNamespace(record=bool, synchronize=bool, elapsed_time=lambda end: 1.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: HOPPER)
    return done


def test_the_kernels_of_a_call(gpu, monkeypatch, tmp_path):
    events = [
        {"cat": "kernel", "ts": 2, "name": "void l<4>(int)", "args": launch(32, 0, 64)},
        {"cat": "cpu_op", "ts": 0, "name": "aten::empty"},
        {"cat": "kernel", "ts": 1, "name": "k", "args": launch(40, 1024, 128)},
    ]
    trace = json.dumps({"traceEvents": events})
    seen = SimpleNamespace(
        export_chrome_trace=lambda path: tmp_path.joinpath(path).write_text(trace)
    )
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: nullcontext(seen))
    (tmp_path / "k.log").write_text(LOG)
    built = SimpleNamespace(log=tmp_path / "k.log")
    monkeypatch.setattr(counters.library, "target_for", lambda source, device: built)

    def refuses():
        raise RuntimeError("No kernel, /its/folder/api.cpp:7, 1 / 2.\nAborting")

    ours = Subject("ours", lambda: lambda: gpu.append("call"), tmp_path / "k.cu")
    theirs = Subject("theirs", lambda: lambda: gpu.append("call"))
    kernels, refused = resources([ours, Subject("refused", lambda: refuses), theirs])
    assert kernels == [
        ["ours", "k", "40", "40", "1.0", "128", "132", "12", "75%"],
        ["ours", "l", "32", "-", "0.0", "64", "132", "32", "100%"],
        ["theirs", "k", "40", "-", "1.0", "128", "132", "12", "75%"],
        ["theirs", "l", "32", "-", "0.0", "64", "132", "32", "100%"],
    ]
    assert refused == [["refused", "No kernel, api.cpp:7, 1 / 2."]]
    assert {len(row) for row in kernels} == {len(counters.RESOURCES)}
    assert gpu == ["call", "call", "synchronize", "call", "synchronize"] * 2


def test_ncu_counts_one_call_of_each(gpu):
    a, b, c = (Subject(name, lambda n=name: lambda: gpu.append(n)) for name in "abc")
    run_counted([a, b, c], ["c", "a"])
    assert gpu == [
        *("c", "synchronize", "start", "c", "synchronize", "stop"),
        *("a", "synchronize", "start", "a", "synchronize", "stop"),
    ]


def test_why_ncu_cannot_count(monkeypatch):
    kernels, said, ran = [["ours", "k", "168"]], [NCU], []

    def run(command, **_):
        ran.append(command)
        if not said:
            raise subprocess.TimeoutExpired(command, 1)
        return SimpleNamespace(stdout=said[0], stderr="")

    monkeypatch.setattr(counters.shutil, "which", lambda _: "/bin/ncu")
    monkeypatch.setattr(counters.subprocess, "run", run)
    (row,) = count(kernels, ["python", "-m", "x"], advice="ask for less")
    assert row[:2] == ["ours", "k"] and row[-1] == "wait" and len(row) == len(counters.COUNTERS)
    assert ran[0][0] == "/bin/ncu" and ran[0][-4:] == ["python", "-m", "x", "ours"]
    said[:] = ["==ERROR== ERR_NVGPUCTRPERM"]
    with pytest.raises(NoCounters, match="NVreg_RestrictProfilingToAdminUsers=0"):
        count(kernels, [], advice="")
    said[:] = ["no such module"]
    with pytest.raises(NoCounters, match="ncu saw 0 kernels and not 1. It said:\nno such module"):
        count(kernels, [], advice="")
    said.clear()
    with pytest.raises(NoCounters, match="ncu took more than 300 s; ask for less"):
        count(kernels, [], advice="ask for less")
    monkeypatch.setattr(counters.shutil, "which", lambda _: None)
    with pytest.raises(NoCounters, match="there is no ncu"):
        count(kernels, [], advice="")
