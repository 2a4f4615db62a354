"""What a run found, with everything that is needed to judge it later."""

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from common.check.compare import CheckFailed, dtype_name
from common.check.suite import ROOT, Suite
from common.check.timing import Ceilings, Timing, ceilings

if TYPE_CHECKING:
    from common.check.script import GroupResult

_IMPOSSIBLE = 1.15  # of a measured ceiling; the ceilings themselves vary by a few per cent


@dataclass
class Speed:
    """One measured operation beside its baselines.

    Args:
        name: a field that its measurement promised.
        shape: as people read it: "B4 S128 hidden 4096, 32 heads, causal".
        dtype: of the inputs; decides the ceiling that TFLOP/s are compared with.
        ours: our time.
        baselines: times by name; the name says which backend it is.
        flops: floating-point operations of one run, counted for the algorithm (causal: half).
        bytes: bytes that one run has to read and write at least.
        note: what else must be known, such as a size that was scaled down.
    """

    name: str
    shape: str
    dtype: torch.dtype
    ours: Timing
    baselines: Mapping[str, Timing]
    flops: float | None = None
    bytes: float | None = None
    note: str = ""

    @property
    def tflops(self) -> float | None:
        return self.flops / self.ours.median_ms / 1e9 if self.flops else None

    @property
    def gb_per_s(self) -> float | None:
        return self.bytes / self.ours.median_ms / 1e6 if self.bytes else None

    def speedup(self, baseline: str) -> float:
        """How many times faster than that baseline; below 1 is slower."""
        return self.baselines[baseline].median_ms / self.ours.median_ms

    def as_record(self, chip: Ceilings | None) -> dict[str, Any]:
        """As JSON, with the share of the chip's ceilings.

        Raises:
            CheckFailed: it would be faster than the chip.
        """
        record: dict[str, Any] = {
            "shape": self.shape,
            "dtype": dtype_name(self.dtype),
            "ours": self.ours.as_record(),
            "baselines": {name: timing.as_record() for name, timing in self.baselines.items()},
            "speedups": {name: self.speedup(name) for name in self.baselines},
            "note": self.note,
        }
        for key, value, unit in (
            ("tflops", self.tflops, "TFLOP/s"),
            ("gb_per_s", self.gb_per_s, "GB/s"),
        ):
            if value is None:
                continue
            record[key] = value
            if chip is None:
                continue
            limit = chip.tflops(self.dtype) if key == "tflops" else chip.read_gb_per_s
            # fp32 may go through tensor cores in several pieces, so only their ceiling is a limit
            # for it.
            top = max(limit, chip.bf16_tflops) if key == "tflops" else limit
            if value > _IMPOSSIBLE * top:
                raise CheckFailed(
                    f"{self.name}: {value:.0f} {unit} cannot be, this chip does {top:.0f}:"
                    " the work was not done within the measured time, or it is counted wrong"
                )
            record[f"{key}_share"] = value / limit
        return record


class Report:
    """What one run of a suite found; a measurement adds to it."""

    def __init__(self, suite: Suite, *, device: str, seed: int, complete: bool) -> None:
        self.suite, self.device, self.seed, self.complete = suite, device, seed, complete
        self.groups: list[GroupResult] = []
        self.speeds: dict[str, dict[str, Any]] = {}
        self.texts: dict[str, str] = {}
        self.problems: list[str] = []
        self.ceilings: dict[str, float] | None = None
        self.allowed: Sequence[str] = ()
        self.wrong_measurement = False
        self.finished = False
        self._run = provenance(suite, device=device, seed=seed)

    @property
    def ok(self) -> bool:
        return all(group.ok for group in self.groups) and not self.wrong_measurement

    def note_ceilings(self) -> None:
        """Measure, print and record what this chip does at best."""
        chip = ceilings()
        self.ceilings = asdict(chip)
        print(
            f"  this GPU at best: read {chip.read_gb_per_s:.0f} GB/s, matrix products"
            f" {chip.fp32_tflops:.1f} TFLOP/s in float32, {chip.bf16_tflops:.0f} in bfloat16",
            flush=True,
        )

    def add(self, speed: Speed) -> None:
        """Record and print a measured speed.

        Raises:
            ValueError: the measurement did not promise this name in its ``fields``.
            CheckFailed: the number cannot be.
        """
        if self.allowed and speed.name not in self.allowed:
            raise ValueError(f"{speed.name!r} is not among the fields {tuple(self.allowed)}")
        chip = ceilings() if self.device == "cuda" and (speed.flops or speed.bytes) else None
        record = speed.as_record(chip)
        self.speeds[speed.name] = record
        for line in speed_lines(speed.name, record):
            print(f"    {line}", flush=True)

    def text(self, name: str, text: str) -> None:
        """Record and print a text, such as what a model wrote."""
        self.texts[name] = text
        print(f"    {name}: {text}", flush=True)

    def finish(self) -> None:
        """All has run."""
        self.finished = True

    def as_record(self) -> dict[str, Any]:
        groups = [
            {
                "name": group.name,
                "passed": group.passed,
                "total": group.total,
                "seconds": round(group.seconds, 2),
                "status": group.status,
                "failures": [failure.text for failure in group.failures[:3]],
            }
            for group in self.groups
        ]
        passed = sum(group["status"] == "passed" for group in groups)
        return {
            "stage": self.suite.name,
            "title": self.suite.title,
            "device": self.device,
            "status": self._status(),
            "complete": self.complete,
            "groups": groups,
            "points": self.suite.points,
            "earned": earned(self.suite.points, passed, len(groups)),
            "fields": [field for m in self.suite.measurements for field in m.fields],
            "speeds": self.speeds,
            "texts": self.texts,
            "problems": self.problems,
            "ceilings": self.ceilings,
            "run": self._run,
        }

    def write(self, path: Path) -> None:
        """The report as JSON; appears whole or not at all."""
        write_json(path, self.as_record())

    def _status(self) -> str:
        if not self.finished:
            return "crashed"
        if self.ok:
            return "passed"
        kinds = {group.status for group in self.groups} - {"passed", "not run"}
        return kinds.pop() if len(kinds) == 1 else "failed"


def earned(points: float, passed: int, groups: int) -> float:
    """A stage's points are shared evenly among its groups; a group counts if all its checks pass."""
    return round(points * passed / groups, 2) if groups else 0.0


def speed_lines(name: str, record: Mapping[str, Any]) -> list[str]:
    """A measured speed in words, one line for ours and one for each baseline."""
    ours = record["ours"]
    parts = [f"{name} ({record['shape']}, {record['dtype']}): {show_timing(ours)}"]
    if "tflops" in record:
        parts.append(f"{record['tflops']:.3g} TFLOP/s" + _share(record.get("tflops_share")))
    if "gb_per_s" in record:
        parts.append(f"{record['gb_per_s']:.4g} GB/s" + _share(record.get("gb_per_s_share")))
    lines = [", ".join(parts)]
    for baseline, timing in record["baselines"].items():
        lines.append(f"  {record['speedups'][baseline]:.2f}x {baseline}: {show_timing(timing)}")
    if record["note"]:
        lines.append(f"  {record['note']}")
    return lines


def _share(share: float | None) -> str:
    return f" ({share:.0%} of the ceiling)" if share is not None else ""


def show_timing(timing: Mapping[str, Any]) -> str:
    """``1.44 ms (1.42-1.51, n 200)``."""
    return f"{timing['median_ms']:.4g} ms ({timing['p10_ms']:.4g}-{timing['p90_ms']:.4g}, n {timing['n']})"


# Where a number comes from
# ------------------------------------------------------------------------------


def provenance(suite: Suite, *, device: str, seed: int, root: Path = ROOT) -> dict[str, Any]:
    """Sources, commit, machine, seed and date of a run."""
    commit, dirty = git_commit(root)
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "seed": seed,
        "commit": commit,
        "dirty": dirty,
        "sources": {"patterns": list(suite.sources), "sha256": sources_hash(suite.sources, root)},
        "machine": machine(device),
    }


def sources_hash(patterns: Sequence[str], root: Path = ROOT) -> str:
    """sha256 over the files of these glob patterns and, if one is a ``.cu``, the headers kernels include."""
    paths = {path for pattern in patterns for path in root.glob(pattern) if path.is_file()}
    if any(path.suffix == ".cu" for path in paths):
        paths |= {path for path in (root / "common/include").rglob("*") if path.is_file()}
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(f"{path.relative_to(root).as_posix()}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


_WRITTEN = (
    "Results.md",
    "common/records",
    "task4/ladder/README.md",
    "task4/ladder/table.json",
    "task4/ladder/*.png",
)


def git_commit(root: Path = ROOT) -> tuple[str | None, bool | None]:
    """The commit's short hash and whether files differ from it.

    In a tree that was copied to a compute node, the environment variable GIT_COMMIT says it; outside of git and without
    that it is None. Whether files differ from it is then not known, None.

    Results.md, the records and the ladder's table do not count: grading and timing write them.
    """
    if commit := os.environ.get("GIT_COMMIT"):
        return commit, None
    try:
        commit = _git(root, "rev-parse", "--short=12", "HEAD").strip()
        changed = _git(
            root, "status", "--porcelain", "--", ".", *(f":!{path}" for path in _WRITTEN)
        )
    except (OSError, subprocess.SubprocessError):
        return None, None
    return commit, bool(changed.strip())


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=30
    )
    return done.stdout


@cache
def machine(device: str) -> dict[str, Any]:
    """What it ran on, and with which versions."""
    facts: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
    }
    if device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
        facts["cuda"] = torch.version.cuda
        facts["driver"] = _driver()
    return facts


def describe_machine(facts: Mapping[str, Any]) -> str:
    """The machine in one line."""
    versions = [f"Python {facts['python']}", f"torch {facts['torch']}"]
    if facts.get("transformers"):
        versions.append(f"transformers {facts['transformers']}")
    if "gpu" in facts:
        hardware = f"{facts['gpu']} (driver {facts['driver']}, CUDA {facts['cuda']})"
    else:
        hardware = f"{facts['cpu']}, {facts['cores']} cores, {facts['system']}"
    return f"{hardware}, {', '.join(versions)}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split()[0] if done.stdout.split() else None


def _cpu_name() -> str:
    if sys.platform == "darwin":
        try:
            return subprocess.run(
                ["sysctl", "-n", "machdep.cpu.brand_string"],
                capture_output=True,
                text=True,
                check=True,
                timeout=30,
            ).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return platform.processor()
    try:
        with open("/proc/cpuinfo") as lines:
            names = [
                line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
            ]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def write_json(path: Path, content: Any) -> None:
    """JSON with a final newline, by atomic rename."""
    write_atomically(path, json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """The whole new text, or the old file untouched."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_text(text, encoding="utf-8")
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
