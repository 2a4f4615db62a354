"""Where a number comes from: sources, commit, machine, versions, seed and date."""

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from common.paths import ROOT


def provenance(
    sources: Sequence[str], *, device: str, seed: int, root: Path = ROOT
) -> dict[str, Any]:
    """Date, seed, commit, sources (glob patterns from the root) and machine of a run."""
    commit, dirty = git_commit(root)
    return {
        "date": now(),
        "seed": seed,
        "commit": commit,
        "dirty": dirty,
        "sources": {"patterns": list(sources), "sha256": sources_hash(sources, root)},
        "machine": machine(device),
    }


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


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


_DECIDING = (".py", ".cu", ".cuh", ".h", ".cpp", ".toml")
# Folders of common/.
# BEGIN STAFF, for students: _NOT_DECIDING = ("records",)
_NOT_DECIDING = ("records", "staff", "tests")  # students have the first alone
# END STAFF


def hashes(stage: str, answers: Sequence[str], root: Path = ROOT) -> dict[str, str]:
    """What a stage's result depends on besides its sources: a sha256 of its tests, of common/ and of its answers.

    Of common/, code, headers and tables count. Records, texts and pictures decide nothing, and what is hidden was
    built. Line ends do not count.

    Args:
        stage: its folder; the tests are ``test.py`` in it.
        answers: the files that a student writes in, from the root.
        root: the checkout.

    Returns:
        ``tests``, ``common`` and ``answers``.
    """
    common = [
        path
        for path in (root / "common").rglob("*")
        if path.suffix in _DECIDING
        and (inside := path.relative_to(root / "common").parts)[0] not in _NOT_DECIDING
        and not any(part.startswith(".") for part in inside)
    ]
    files = {
        "tests": [root / stage / "test.py"],
        "common": common,
        "answers": [root / file for file in answers],
    }
    return {
        name: content_hash(
            {p.relative_to(root).as_posix(): p.read_bytes() for p in paths if p.is_file()}
        )
        for name, paths in files.items()
    }


def content_hash(files: Mapping[str, bytes]) -> str:
    """sha256 over the names and contents of files; line ends do not count."""
    digest = hashlib.sha256()
    for name, data in sorted(files.items()):
        text = data.replace(b"\r\n", b"\n")
        digest.update(f"{name}\0{len(text)}\0".encode())
        digest.update(text)
    return digest.hexdigest()


# What grading and timing write: it does not make a checkout dirty.
_WRITTEN = (
    "Results.md",
    "common/records",
    "report",
    # BEGIN STAFF
    "task4/ladder/README.md",
    "task4/ladder/RESULTS.md",
    "task4/ladder/table.json",
    "task4/ladder/*.png",
    "task5/ladder/RESULTS.md",
    "task5/ladder/table.json",
    "task5/ladder/*.png",
    "task6/generation/RESULTS.md",
    "task6/generation/table.json",
    "task6/generation/*.png",
    "task7/RESULTS.md",
    "task7/table.json",
    # END STAFF
)


def git_commit(root: Path = ROOT) -> tuple[str | None, bool | None]:
    """The commit's short hash, and whether tracked or new files differ from it (what is measured does not count).

    In a tree that was copied to a compute node without git, the environment variable GIT_COMMIT names the commit, and
    the second is unknown (None). Without either, both are None.
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
        driver = facts.get("driver") or "unknown"
        hardware = f"{facts['gpu']} (driver {driver}, CUDA {facts.get('cuda')})"
    else:
        hardware = f"{facts['cpu']}, {facts['cores']} cores, {facts['system']}"
    return f"{hardware}, {', '.join(versions)}"


def describe_run(run: Mapping[str, Any]) -> str:
    """Date, commit and machine in one line."""
    commit = f"commit {run['commit']}" if run["commit"] else "outside of git"
    changed = " with uncommitted changes" if run["dirty"] else ""
    return f"{run['date']}, {commit}{changed}, {describe_machine(run['machine'])}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """The driver's version, through nvidia-ml-py; None without that package or a driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # not installed (ImportError), or no driver (an error of its own)
        return None
    try:
        version = pynvml.nvmlSystemGetDriverVersion()
    finally:
        pynvml.nvmlShutdown()
    return version.decode() if isinstance(version, bytes) else version


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
