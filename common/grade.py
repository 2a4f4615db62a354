"""``python -m common.grade``: build, check, time and record all stages, and fill in Results.md.

Each stage runs in a process of its own, so that a crash or a hang does not end the others. What it found comes back
in a file. common/records/cpu.json and cuda.json keep what was found last on each device; they and Results.md are
written at the very end, whole or not at all.

A record that no run has written is refused before anything runs: it was edited, or its figures do not follow from each
other. Lines of Results.md that were edited are written anew.
"""

import argparse
import json
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from common import child
from common.build import BuildError, builder, toolchain
from common.check.hints import HintError, answers
from common.check.progress import progress
from common.check.rng import new_seed
from common.marked import MarkerError, write_atomically
from common.paths import ROOT
from common.record import (
    DEVICES,
    POINTS,
    WORTH,
    Record,
    Stage,
    checks_passed,
    edited,
    merge,
    refused,
    render,
    summary,
    write_json,
)
from common.regions import MarkError, read, regions

RESULTS = ROOT / "Results.md"
RECORDS = ROOT / "common/records"
BUILD_SECONDS = 600
STAGE_SECONDS = (
    1800  # then a stage counts as hung; the longest, task 4 on a GPU, needs a few minutes
)
# A compiler may be there and not work: then this does not build either.
TRIAL = """#include <cuda_runtime.h>
__global__ void trial_kernel() {}
extern "C" cudaError_t trial(cudaStream_t stream) {
  trial_kernel<<<1, 32, 0, stream>>>();
  return cudaGetLastError();
}
"""
SHOWN = 4  # measured lines of a stage in the table; Results.md has them all

Show = Callable[[str], None]


class FormError(Exception):
    """Nothing can be graded: Results.md, a record or marks are damaged, or nothing can be built."""


def main(argv: Sequence[str] | None = None) -> int:
    """Grade; returns 0 if every stage that ran has passed, 1 if not, 2 if nothing can be graded or written."""
    options = _parse(argv)
    signal.signal(signal.SIGTERM, _terminated)
    try:
        return _grade(options)
    except (FormError, MarkerError, HintError, BuildError, OSError) as error:
        system = isinstance(error, OSError)  # its own text begins with a number
        said = f"{error.filename}: {error.strerror}" if system else str(error)
        print(f"{said}. Nothing was written; correct that and run again.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; the records and Results.md are as they were", file=sys.stderr)
        return 130


def _terminated(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m common.grade", description=__doc__)
    stages = [int(name.removeprefix("task")) for name in POINTS]
    parser.add_argument(
        "--stage", type=int, nargs="+", choices=stages, metavar="N", help="only these (1 to 7)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument("--seed", type=int, help="repeat the random inputs of an earlier run")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no GPU here")
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options.seed = new_seed() if options.seed is None else options.seed
    options.stages = [f"task{n}" for n in sorted(set(options.stage or stages))]
    return options


def _grade(options: argparse.Namespace) -> int:
    before = _read_results()
    render(before, _read_records(), ROOT)  # errors in them before minutes of work
    _check_marks(options.stages)
    builder.check_disk()
    where = torch.cuda.get_device_name() if options.device == "cuda" else "the CPU, without a GPU"
    # Without a terminal the table need not be folded at 80 columns.
    width = None if sys.stdout.isatty() else 160
    console = Console(highlight=False, markup=False, emoji=False, width=width)
    show = partial(console.print, soft_wrap=True)
    if edited(before):
        show(
            "Results.md was edited between its markers; these lines are written anew, from the records"
        )
    show(f"grading {len(options.stages)} stages on {where} (--seed {options.seed})")
    entries = {}
    with progress(console) as bar:
        task = bar.add_task("", total=len(options.stages))
        for stage in options.stages:
            bar.update(task, description=f"building {stage}")
            _build(stage, options.device, show)
        for stage in options.stages:
            bar.update(task, description=stage)
            entries[stage] = _run_stage(stage, options, show)
            bar.advance(task)
    builder.check_disk()  # once it is full, any check may have failed for that reason
    records = _read_records()
    kept = records.setdefault(options.device, {"device": options.device, "stages": {}})
    for stage, new in entries.items():
        entries[stage] = merge(kept["stages"].get(stage), new)
    kept["stages"].update(entries)
    text = render(_read_results(), records, ROOT)  # again: it may have been edited meanwhile
    write_json(RECORDS / f"{options.device}.json", kept)
    write_atomically(RESULTS, text)
    show_table(console, entries)
    show(f"\nResults.md and common/records/{options.device}.json are up to date.")
    return 0 if all(entry["status"] == "passed" for entry in entries.values()) else 1


def _read_results() -> str:
    try:
        return RESULTS.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise FormError("Results.md is missing") from None
    except UnicodeDecodeError as error:
        raise FormError(f"Results.md is not UTF-8 text ({error})") from None


def _read_records() -> dict[str, Any]:
    records = {}
    for path in (RECORDS / f"{device}.json" for device in DEVICES):
        try:
            records[path.stem] = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (ValueError, RecursionError) as error:
            raise FormError(f"{path.relative_to(ROOT)} is damaged ({error})") from None
    if sentences := refused(records, ROOT):
        raise FormError("\n".join(sentences))
    return records


def _check_marks(stages: Sequence[str]) -> None:
    """What a grader cannot take out of a student's file must not earn points here."""
    problems = []
    for file in dict.fromkeys(file for stage in stages for file in answers(stage, ROOT)):
        try:
            regions(read(ROOT / file, file), file)
        except MarkError as error:
            problems.append(str(error))
    if problems:
        listed = "\n".join(problems)
        raise FormError(
            f"{listed}\nGraders read what stands between the marks: put them back (git diff shows the line)"
        )


def _build(stage: str, device: str, show: Show) -> None:
    """Build first, so that no check waits for a compiler; a build that fails is reported by the checks."""
    if not (ROOT / stage / "compile.py").exists():
        return
    lines: list[str] = []
    command = [sys.executable, "-m", f"{stage}.compile", "--device", device]
    if child.run(command, BUILD_SECONDS, lines.append, cwd=ROOT) == 0:
        for line in lines:
            show(line)
        return
    if reason := _why_nothing_builds(device):
        raise FormError(f"{stage} does not build: {reason}")
    show(f"{stage} does not build; the errors follow with its checks")


def _why_nothing_builds(device: str) -> str:
    """What this machine lacks, whatever the sources are: then good records are not replaced by bad ones."""
    try:
        builder.check_disk()
        toolchain.cpp_compiler()
        if device == "cuda" and (gpu := toolchain.find_gpu()):
            toolchain.nvcc_for(gpu.arch, gpu.driver_cuda)
        with tempfile.TemporaryDirectory(prefix="trial-") as folder:
            source = Path(folder) / "trial.cu"
            source.write_text(TRIAL)
            builder.build([source], device)
    except BuildError as error:
        return str(error).rstrip(".")
    return ""


def _run_stage(stage: str, options: argparse.Namespace, show: Show) -> dict[str, Any]:
    """The stage's record; an empty one if the stage crashed or hung before it wrote any."""
    said: list[str] = []

    def hear(line: str) -> None:
        said.append(line)
        show(line)

    with tempfile.TemporaryDirectory(prefix="grade-") as folder:
        file = Path(folder) / "record.json"
        wanted = [
            "--device",
            options.device,
            "--both",
        ]  # a race that only the check build sees counts
        wanted += ["--seed", str(options.seed), "--record", str(file)]
        command = [sys.executable, "-m", f"{stage}.test", *wanted]
        status = child.run(command, STAGE_SECONDS, hear, cwd=ROOT)
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            # It did not reach its first line: usually the answer cannot be imported.
            unknown = Stage(stage, title="", worth=WORTH[stage], sources=(f"{stage}/*",))
            record = Record(
                unknown,
                device=options.device,
                seed=options.seed,
                complete=False,
                answers=answers(stage, ROOT),
                root=ROOT,
            ).as_json()
    if record["status"] == "crashed":
        problem = _ending(status, said)
        record["problems"].append(problem)
        show(f"{stage} ended early: {problem}")
    return record


def _ending(status: int | None, said: Sequence[str]) -> str:
    if status is None:
        return f"stopped after {STAGE_SECONDS // 60} minutes"
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    lines = [line for line in said if line.strip()]
    if not lines:
        return f"status {status}"
    # A traceback ends with the error; the line before it that names a file is where it was raised.
    places = (re.match(r'\s*File "(.+)", line (\d+)', line) for line in reversed(lines))
    place = next(filter(None, places), None)
    if place is None or not re.match(r"\w+(\.\w+)*(:|$)", lines[-1]):
        return lines[-1].strip()
    path = Path(place[1])
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    return f"{shown}:{place[2]}: {lines[-1].strip()}"


def show_table(console: Console, entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Stage, device, checks, points and what was measured."""
    table = Table(box=None, pad_edge=False)
    for title in ("stage", "device", "checks", "points", "measured"):
        table.add_column(title, no_wrap=title != "measured", overflow="fold")
    for stage, entry in entries.items():
        measured = summary(entry) or ["-"]
        if len(measured) > SHOWN:
            measured[SHOWN:] = [f"and {len(measured) - SHOWN} more in Results.md"]
        checks = checks_passed(entry)
        if entry["status"] not in ("passed", checks):
            checks += f", {entry['status']}"
        points = f"{entry['earned']:g} of {entry['points']:g}"
        table.add_row(stage, entry["device"], checks, points, "\n".join(measured))
    earned = sum(entry["earned"] for entry in entries.values())
    points = sum(entry["points"] for entry in entries.values())
    table.add_row("total", "", "", f"{earned:g} of {points:g}", "")
    console.print()
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
