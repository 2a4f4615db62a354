"""What limits kernels: registers, spills, occupancy, and the hardware's counters.

The first come from the compiler's log and from PyTorch's profiler, which sees every launch. The counters are read by
ncu (Nsight Compute), which comes with the CUDA toolkit and needs permission.

    kernels, refused = resources(subjects)          # rows with the columns RESOURCES
    rows = count(kernels, [sys.executable, "-m", "some.module"])    # rows with the columns COUNTERS
    run_counted(subjects, sys.argv[1:])             # what that module runs: ncu starts it with labels
"""

import csv
import json
import math
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from common.build import library
from common.build.cli import resources as compiled_resources
from common.paths import ROOT
from common.timing.compare import seconds_of

SECONDS = 300  # for ncu in all; it runs each kernel a few dozen times
SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "SchedulerStats", "WarpStateStats")
PERMISSION = (
    "ncu may not read the GPU's counters (ERR_NVGPUCTRPERM). The administrator allows it with the driver option"
    " NVreg_RestrictProfilingToAdminUsers=0, or runs this as root; in a container it takes --cap-add SYS_ADMIN."
)

# By the column's title: which of ncu's counters, in per cent of what the unit could do; the largest one counts.
_PEAK = r"\.avg\.pct_of_peak_sustained_(active|elapsed)"
UNITS = {
    "tensor": r"sm__(inst_executed_)?pipe_tensor\w*" + _PEAK,
    "issue": r"sm__inst_issued" + _PEAK,
    "MUFU": r"sm__inst_executed_pipe_xu\w*" + _PEAK,
    "FMA": r"sm__(inst_executed_)?pipe_fma\w*" + _PEAK,
    "ALU": r"sm__(inst_executed_)?pipe_alu\w*" + _PEAK,
    "L1/shared": r"l1tex__throughput" + _PEAK,
    "L2": r"lts__throughput\.avg\.pct_of_peak_sustained_elapsed",
    "DRAM": r"(gpu__dram|dram__)_?throughput\.avg\.pct_of_peak_sustained_elapsed",
}
_STALL = (
    r"smsp__average_warps?_(?:latency_)?issue_stalled_(?!selected|\w*not_issued)(\w+?)"
    r"(?:_per_issue_active)?\.(?:ratio|pct)"
)
_NUMBER = re.compile(r"-?\d+(\.\d+)?(e[-+]?\d+)?", re.IGNORECASE)
RESOURCES = (
    "",
    "kernel",
    "registers",
    "spilled B",
    "shared KiB",
    "threads",
    "blocks",
    "blocks/SM",
    "occupancy",
)
COUNTERS = ("", "kernel", *UNITS, "waits mostly for")


class NoCounters(Exception):
    """Why ncu cannot count."""


@dataclass(frozen=True)
class Subject:
    """What is profiled.

    Args:
        label: the first column of its rows.
        prepare: makes its inputs on the current GPU, and returns the call.
        source: the .cu of its kernels, if it is one of ours: then the compiler's log says what they spill.
    """

    label: str
    prepare: Callable[[], Callable[[], object]]
    source: Path | None = None


Rows = list[list[str]]


def resources(subjects: Sequence[Subject]) -> tuple[Rows, Rows]:
    """What each kernel of one call takes of an SM.

    Returns:
        A row of ``RESOURCES`` for each kernel that was launched, in this order; and for each subject that does not run,
        such as a library that does not take this dtype, its label and the reason.
    """
    kernels: Rows = []
    refused: Rows = []
    for subject in subjects:
        call = subject.prepare()
        if isinstance(reason := seconds_of(call), str):
            refused.append([subject.label, reason])
        else:
            kernels += [[subject.label, *row] for row in _launched(subject, call)]
    return kernels, refused


def _launched(subject: Subject, call: Callable[[], object]) -> Rows:
    """``RESOURCES`` of the kernels of one call, without the label."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    spills: dict[str, int] = {}
    gpu = torch.device("cuda", torch.cuda.current_device())
    if subject.source and (log := library.target_for(subject.source, gpu).log).exists():
        spills = _spills(log.read_text())
    properties = torch.cuda.get_device_properties(gpu)
    launches = sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: e["ts"])
    return [_kernel(event["name"], event["args"], spills, properties) for event in launches]


def _kernel(name: str, launch: Mapping[str, Any], spills: Mapping[str, int], gpu: Any) -> list[str]:
    """The same from a kernel's entry in the profiler's trace."""
    registers, shared = launch.get("registers per thread", 0), launch.get("shared memory", 0)
    threads, blocks = (math.prod(launch.get(what, [])) for what in ("block", "grid"))
    warps, all_warps = -(-threads // 32), gpu.max_threads_per_multi_processor // 32
    of_a_block = -(-32 * registers // 256) * 256 * warps  # a warp's registers come in units of 256
    fits = [32, all_warps // warps, gpu.regs_per_multiprocessor // max(1, of_a_block)]
    fits.append(gpu.shared_memory_per_multiprocessor // (-(-shared // 128) * 128 + 1024))
    return [
        re.sub(r"^void |\(.*$|<.*$", "", name)[:40], f"{registers}", f"{spills.get(_plain(name), '-')}",
        f"{shared / 1024:.1f}", f"{threads}", f"{blocks:,}", f"{min(fits)}", f"{min(fits) * warps / all_warps:.0%}",
    ]  # fmt: skip


def _spills(log: str) -> dict[str, int]:
    """Bytes stored and loaded again, by kernel, from what ptxas said."""
    lines = (line.partition(": ") for line in compiled_resources(log))
    sizes = r"(\d+) B (?:stored|loaded)"
    return {_plain(name): sum(map(int, re.findall(sizes, said))) for name, _, said in lines}


def _plain(name: str) -> str:
    """A kernel's name without what demanglers write differently: the return type, spaces, arguments."""
    name = re.sub(r"\s+|\(anonymous namespace\)::|<unnamed>::", "", re.sub(r"^void ", "", name))
    return re.sub(r"\([^()]*\)$", "", name)


# ---- ncu


def count(kernels: Sequence[Sequence[str]], command: Sequence[str], *, advice: str) -> Rows:
    """What ncu counts in these kernels, in per cent of what each unit could do.

    Args:
        kernels: rows of :func:`resources`.
        command: what calls :func:`run_counted`; their labels are appended.
        advice: what to do if ncu takes too long.

    Returns:
        A row of ``COUNTERS`` for each kernel.

    Raises:
        NoCounters: it cannot.
    """
    labels = dict.fromkeys(row[0] for row in kernels)
    found = counted([*command, *labels], len(kernels), advice)
    return [[*kernel[:2], *_busy(row)] for kernel, row in zip(kernels, found, strict=True)]


def run_counted(subjects: Sequence[Subject], labels: Sequence[str]) -> None:
    """One call of each of the subjects with these labels, in this order, for ncu to count."""
    by_label = {subject.label: subject for subject in subjects}
    for label in labels:
        call = by_label[label].prepare()
        call()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        call()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


def counted(command: Sequence[str], number: int, advice: str) -> list[dict[str, float]]:
    """What ncu counts in a command's kernels, by its own names: a dict for each.

    Args:
        command: what calls :func:`run_counted`, with its labels.
        number: of kernels that it should launch.
        advice: what to do if ncu takes too long.

    Raises:
        NoCounters: it cannot, or there were more or fewer kernels.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise NoCounters(
            "no counters: there is no ncu (Nsight Compute, part of the CUDA toolkit) on PATH"
        )
    profiled = [
        ncu, "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw",
        *(word for name in SECTIONS for word in ("--section", name)),
        *command,
    ]  # fmt: skip
    try:
        done = subprocess.run(profiled, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise NoCounters(f"no counters: ncu took more than {SECONDS} s; {advice}") from None
    said = done.stdout + done.stderr
    if "ERR_NVGPUCTRPERM" in said:
        raise NoCounters(PERMISSION)
    rows = list(_rows(done.stdout))
    if len(rows) != number:
        tail = "\n".join(line[:160] for line in said.strip().splitlines()[-12:])
        raise NoCounters(
            f"no counters: ncu saw {len(rows)} kernels and not {number}. It said:\n{tail}"
        )
    return rows


def _rows(output: str) -> Iterator[dict[str, float]]:
    """The counters of each kernel in ncu's CSV; what is printed before it, and the line of units, are left out."""
    lines = output.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    for row in csv.DictReader(lines[start:]):
        if (row.get("ID") or "").isdigit():
            found = {name: (text or "").replace(",", "") for name, text in row.items() if name}
            yield {name: float(text) for name, text in found.items() if _NUMBER.fullmatch(text)}


def _busy(row: Mapping[str, float]) -> list[str]:
    """How busy each of ``UNITS`` is, and what a warp waits for longest between two instructions."""
    texts = []
    for pattern in UNITS.values():
        values = [value for name, value in row.items() if re.fullmatch(pattern, name)]
        texts.append(f"{max(values):.0f}" if values else "-")
    found = ((re.fullmatch(_STALL, name), value) for name, value in row.items())
    waits = {match[1].replace("_", " "): value for match, value in found if match}
    return [*texts, max(waits, key=waits.__getitem__, default="-")]
