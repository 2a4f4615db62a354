"""``python -m taskN.compile`` and ``python -m common.build``."""

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from common.build import builder, planner, toolchain
from common.build.builder import Built
from common.build.planner import Target
from common.build.toolchain import BuildError
from common.paths import ROOT


def compile_main(file: str, *sources: str) -> None:
    """Read the command line, build, report, exit with 0 or 1: all that a task's compile.py does.

    Args:
        file: the calling module's ``__file__``.
        sources: the task's .cu files, relative to its folder; none for a task in PyTorch alone.
    """
    folder = Path(file).resolve().parent
    paths = [(folder / source).resolve() for source in sources]
    sys.exit(_main(paths, f"python -m {folder.name}.compile"))


def main() -> int:
    """Build every kernel of every task, and those that tasks share; the exit status."""
    sources = (p for at in ("task*/**/*.cu", "common/*/*.cu") for p in ROOT.glob(at))
    return _main(sorted(sources), "python -m common.build", skip=True)


def _main(sources: Sequence[Path], program: str, *, skip: bool = False) -> int:
    """``skip``: a source for other architectures is reported and left out; that is not an error."""
    parser = argparse.ArgumentParser(prog=program, description="Compile the CUDA kernels.")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU"
    )
    parser.add_argument(
        "--arch",
        nargs="+",
        metavar="SM",
        help="GPU architectures, such as sm_80 sm_90a; implies --device cuda",
    )
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="show commands, and registers, shared memory and spills of each kernel",
    )
    options = parser.parse_args()
    if options.arch and options.device == "cpu":
        parser.error("--arch is for --device cuda")
    if not sources:
        print("nothing to compile: this task is written in PyTorch")
        return 0
    try:
        device = options.device or ("cuda" if options.arch or toolchain.find_gpu() else "cpu")
        targets = [
            planner.plan(s, device, arch=a)
            for a in _architectures(options.arch, device)
            for s in sources
            if not (skip and _skipped(s, a))
        ]
        for built in builder.make(targets, verbose=options.verbose):
            if built.seconds is not None or options.verbose or built.target in targets:
                report(built, options.verbose)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _architectures(asked: Sequence[str] | None, device: str) -> Sequence[str | None]:
    """The architectures to build for: those requested, else this machine's GPU; None for the CPU or without a GPU."""
    gpu = toolchain.find_gpu() if device == "cuda" else None
    return asked or (gpu.arch if gpu else None,)


def _skipped(source: Path, arch: str | None) -> bool:
    """Whether this source is not for the architecture being built; prints a line if so."""
    named = planner.architectures(source)
    if not named or (toolchain.normal_arch(arch) in named if arch else planner.is_for_cpu(source)):
        return False
    print(f"{planner.display(source)}: not for {arch or 'the CPU'}, only for {', '.join(named)}")
    return True


def report(built: Built, verbose: bool) -> None:
    """Print how a target was built, its warnings and, if verbose, each kernel's resources."""
    target = built.target
    print(f"{planner.display(target.source)}: {_how(target)}, {_when(built.seconds)}")
    if (built.seconds is not None or verbose) and (warnings := builder.readable(built.said)):
        print(warnings)
    if verbose and target.device == "cuda":
        for line in resources(built.said):
            print(f"  {line}")


def _how(target: Target) -> str:
    device = target.built_for
    gpu = toolchain.find_gpu() if target.device == "cuda" else None
    if gpu and gpu.arch == device:
        device = f"{gpu.name} ({device})"
    return f"for {device} by {target.compiler}"


def _when(seconds: float | None) -> str:
    return "up to date" if seconds is None else f"built in {seconds:.1f} s"


def resources(said: str) -> list[str]:
    """One line per kernel from the output of ptxas: name, registers, shared memory, spills."""
    lines, name, spills = [], "?", ""
    for line in said.splitlines():
        if match := re.search(r"Compiling entry function '(\S+)'", line):
            name = match[1]
        elif match := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spills = (
                f"spills {match[1]} B stored, {match[2]} B loaded"
                if match[1] + match[2] != "00"
                else "no spills"
            )
        elif match := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            lines.append(
                f"{name}: {match[1]} registers, {shared[1] if shared else 0} B static shared memory, {spills}"
            )
    return _demangled(lines)


def _demangled(lines: list[str]) -> list[str]:
    if not lines or not shutil.which("c++filt"):
        return lines
    text = subprocess.run(
        ["c++filt"], input="\n".join(lines), capture_output=True, text=True
    ).stdout
    return text.splitlines() or lines
