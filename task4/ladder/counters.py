"""What bounds a rung, and the kernels of others beside it: registers, spills, occupancy, and the hardware's counters.

The first come from the compiler's log and from PyTorch's profiler, which sees every launch. The counters are read by
ncu (Nsight Compute), which comes with the CUDA toolkit and needs permission; without it that part is left out.
"""

import csv
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from common.build import library
from common.build.cli import resources
from common.paths import ROOT
from task4.ladder import rungs
from task4.ladder.rungs import Rung, ladder_attention
from task4.ladder.speed import KINDS, MATH, Cell, peers, rung_name, takes

SEQ = 2048
SECONDS = 300  # for ncu in all; it runs each kernel a few dozen times
SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "SchedulerStats", "WarpStateStats")
PERMISSION = (
    "ncu may not read the GPU's counters (ERR_NVGPUCTRPERM). The administrator allows it with the driver option"
    " NVreg_RestrictProfilingToAdminUsers=0, or runs this as root; in a container it takes --cap-add SYS_ADMIN."
)

# By the column's title: which of ncu's counters, in per cent of what the unit could do; the largest one counts.
UNITS = {
    "tensor": r"sm__(inst_executed_)?pipe_tensor\w*\.avg\.pct_of_peak_sustained_(active|elapsed)",
    "issue": r"sm__inst_issued\.avg\.pct_of_peak_sustained_(active|elapsed)",
    "MUFU": r"sm__inst_executed_pipe_xu\w*\.avg\.pct_of_peak_sustained_(active|elapsed)",
    "FMA": r"sm__(inst_executed_)?pipe_fma\w*\.avg\.pct_of_peak_sustained_(active|elapsed)",
    "ALU": r"sm__(inst_executed_)?pipe_alu\w*\.avg\.pct_of_peak_sustained_(active|elapsed)",
    "L1/shared": r"l1tex__throughput\.avg\.pct_of_peak_sustained_(active|elapsed)",
    "L2": r"lts__throughput\.avg\.pct_of_peak_sustained_elapsed",
    "DRAM": r"(gpu__dram|dram__)_?throughput\.avg\.pct_of_peak_sustained_elapsed",
}
_STALL = (
    r"smsp__average_warps?_(?:latency_)?issue_stalled_(\w+?)(?:_per_issue_active)?\.(?:ratio|pct)"
)


@dataclass
class Kernel:
    """One kernel of those that a call launches."""

    name: str
    registers: int
    shared: int  # bytes a block, dynamic and static
    threads: int  # of a block
    blocks: int
    spilled: int | None = None  # bytes
    units: dict[str, float] = field(default_factory=dict)
    stalls: dict[str, float] = field(default_factory=dict)

    def resident(self, device: Any) -> int:
        """Blocks that a multiprocessor holds at once."""
        warps = -(-self.threads // 32)
        limits = [device.max_threads_per_multi_processor // (32 * warps), 32]
        if self.registers:  # a warp's registers come in units of 256
            limits.append(
                device.regs_per_multiprocessor // (-(-32 * self.registers // 256) * 256 * warps)
            )
        limits.append(
            device.shared_memory_per_multiprocessor // (-(-self.shared // 128) * 128 + 1024)
        )
        return min(limits)

    def occupancy(self, device: Any) -> float:
        """The share of the warps that a multiprocessor could hold which it holds."""
        warps = self.resident(device) * -(-self.threads // 32)
        return warps / (device.max_threads_per_multi_processor // 32)

    def limiter(self) -> str:
        """The busiest unit, and what a warp mostly waits for."""
        if not self.units:
            return ""
        unit = max(self.units, key=self.units.__getitem__)
        wait = f", waits: {max(self.stalls, key=self.stalls.__getitem__)}" if self.stalls else ""
        return f"{unit} {self.units[unit]:.0f} %{wait}"


def show(console: Console, ladder: Sequence[Rung], kind: str, cell: Cell) -> dict[str, list[dict]]:
    """Print what bounds each rung, and each kernel of others.

    Returns:
        The same by name, for the record: for each kernel the fields of ``Kernel``, ``resident`` and ``occupancy``.
        Nothing if the counters could not be read, so that those of an earlier run are kept.
    """
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    with console.status("profiling"):
        kernels = {}
        for name in _names(ladder, kind, cell.head_dim):
            try:
                kernels[name] = _launched(name, kind, cell)
            except RuntimeError as error:  # a peer that does not take these
                console.print(f"{name}: {str(error).splitlines()[0]}")
    console.print(f"\n{kind}, {cell.name}")
    console.print(_resource_table(kernels, device))
    if trouble := _count(console, kernels, kind, cell):
        console.print(trouble)
        return {}
    console.print("\nncu, in per cent of what each unit could do")
    console.print(_counter_table(kernels))
    return {
        name: [
            {
                **asdict(kernel),
                "name": _short(kernel.name),
                "resident": kernel.resident(device),
                "occupancy": kernel.occupancy(device),
            }
            for kernel in launched
        ]
        for name, launched in kernels.items()
    }


def _names(ladder: Sequence[Rung], kind: str, head_dim: int) -> list[str]:
    """Rungs, then peers; PyTorch's math backend launches dozens of kernels and says nothing."""
    mine = [rung_name(r) for r in ladder if takes(r, kind) and head_dim in r.head_dims]
    return mine + [name for name in peers()[0] if name != MATH]


def _call(name: str, kind: str, cell: Cell) -> tuple[Callable[[], Any], Rung | None]:
    """A call of a rung or a peer, and the rung. Slow rungs get less to do, because ncu runs each kernel many times."""
    rung = rungs.by_number(int(name.split()[1])) if name.startswith("rung ") else None
    batch, *shape = cell.shape
    batch = batch if rung is None or rung.number >= 7 else 1
    q, k, v = (torch.randn(batch, *shape, device="cuda").to(KINDS[kind]) for _ in range(3))
    if rung is None:
        peer = peers()[0][name]
        return lambda: peer(q, k, v, cell.causal), None
    return lambda: ladder_attention(q, k, v, causal=cell.causal, rung=rung.number), rung


def _launched(name: str, kind: str, cell: Cell) -> list[Kernel]:
    """The kernels of one call, as PyTorch's profiler sees them, with what the compiler said about a rung's."""
    from torch.profiler import ProfilerActivity, profile

    call, rung = _call(name, kind, cell)
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    found = [
        _from_event(e)
        for e in sorted(events, key=lambda e: e.get("ts", 0))
        if e.get("cat") == "kernel"
    ]
    log = (
        library.target_for(rung.source, torch.device("cuda", torch.cuda.current_device())).log
        if rung
        else None
    )
    spills = _spills(log.read_text()) if log and log.exists() else {}
    for kernel in found:
        kernel.spilled = spills.get(_plain(kernel.name))
    return found


def _from_event(event: dict[str, Any]) -> Kernel:
    values = event["args"]
    threads, blocks = 1, 1
    for n in values.get("block", []):
        threads *= n
    for n in values.get("grid", []):
        blocks *= n
    registers, shared = values.get("registers per thread", 0), values.get("shared memory", 0)
    return Kernel(event["name"], registers, shared, threads, blocks)


def _spills(log: str) -> dict[str, int]:
    """Bytes stored and loaded again, by kernel, from what ptxas said."""
    found = {}
    for line in resources(log):
        name, _, rest = line.partition(": ")
        found[_plain(name)] = sum(int(n) for n in re.findall(r"(\d+) B (?:stored|loaded)", rest))
    return found


def _plain(name: str) -> str:
    """A kernel's name without what demanglers write differently: the return type, spaces, arguments."""
    name = re.sub(r"\s+|\(anonymous namespace\)::|<unnamed>::", "", re.sub(r"^void ", "", name))
    return re.sub(r"\([^()]*\)$", "", name)


def _resource_table(kernels: Mapping[str, list[Kernel]], device: Any) -> Table:
    shown = Table("", "kernel", box=None, pad_edge=False)
    for heading in (
        "registers",
        "spilled B",
        "shared KiB",
        "threads",
        "blocks",
        "blocks/SM",
        "occupancy",
    ):
        shown.add_column(heading, justify="right")
    for name, launched in kernels.items():
        for kernel in launched:
            shown.add_row(
                name, _short(kernel.name), f"{kernel.registers}",
                "?" if kernel.spilled is None else f"{kernel.spilled}", f"{kernel.shared / 1024:.1f}",
                f"{kernel.threads}", f"{kernel.blocks:,}", f"{kernel.resident(device)}",
                f"{kernel.occupancy(device):.0%}",
            )  # fmt: skip
    return shown


def _short(name: str) -> str:
    return re.sub(r"^void |\(.*$|<.*$", "", name)[:40]


def _counter_table(kernels: Mapping[str, list[Kernel]]) -> Table:
    shown = Table("", "kernel", box=None, pad_edge=False)
    for heading in UNITS:
        shown.add_column(heading, justify="right")
    shown.add_column("limiter")
    for name, launched in kernels.items():
        for kernel in launched:
            values = (f"{kernel.units[u]:.0f}" if u in kernel.units else "-" for u in UNITS)
            shown.add_row(name, _short(kernel.name), *values, kernel.limiter())
    return shown


# ---- ncu


def _count(
    console: Console, kernels: Mapping[str, list[Kernel]], kind: str, cell: Cell
) -> str | None:
    """Fill in what ncu counts; a sentence if it cannot."""
    ncu = shutil.which("ncu")
    if ncu is None:
        return "no counters: there is no ncu (Nsight Compute, part of the CUDA toolkit) on PATH"
    sections = [word for name in SECTIONS for word in ("--section", name)]
    command = [
        ncu, "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw", *sections,
        sys.executable, "-m", "task4.ladder.counters", kind, json.dumps(asdict(cell)), *kernels,
    ]  # fmt: skip
    with console.status(f"ncu: {len(kernels)} calls"):
        try:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return f"no counters: ncu took more than {SECONDS} s; ask for fewer rungs with --rung"
    said = done.stdout + done.stderr
    if "ERR_NVGPUCTRPERM" in said:
        return PERMISSION
    rows = list(_rows(done.stdout))
    expected = [kernel for launched in kernels.values() for kernel in launched]
    if len(rows) != len(expected):
        tail = "\n".join(line[:160] for line in said.strip().splitlines()[-12:])
        return f"no counters: ncu saw {len(rows)} kernels and not {len(expected)}. It said:\n{tail}"
    for kernel, row in zip(expected, rows, strict=True):
        kernel.units, kernel.stalls = _units(row), _stalls(row)
    return None


def _rows(output: str) -> Iterator[dict[str, str]]:
    """The kernels in ncu's CSV: what stands before it, and the line with the units, are left out."""
    lines = output.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    for row in csv.DictReader(lines[start:]):
        if (row.get("ID") or "").isdigit():
            yield row


def _units(row: dict[str, str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for unit, pattern in UNITS.items():
        values = [
            v
            for name, text in row.items()
            if name and re.fullmatch(pattern, name) and (v := _value(text)) is not None
        ]
        if values:
            found[unit] = max(values)
    return found


def _stalls(row: dict[str, str]) -> dict[str, float]:
    """How long a warp waits for what, between two instructions."""
    found: dict[str, float] = {}
    for name, text in row.items():
        match = re.fullmatch(_STALL, name or "")
        if (
            match
            and "not_issued" not in match[1]
            and match[1] != "selected"
            and (value := _value(text)) is not None
        ):
            found[match[1].replace("_", " ")] = value
    return found


def _value(text: str | None) -> float | None:
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None


def _launch(kind: str, cell: Cell, names: Sequence[str]) -> None:
    """What runs under ncu: one call of each is looked at."""
    for name in names:
        call, _ = _call(name, kind, cell)
        call()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        call()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


if __name__ == "__main__":
    _launch(sys.argv[1], Cell(**json.loads(sys.argv[2])), sys.argv[3:])
