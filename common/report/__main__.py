"""Measures what a report on the kernels needs, and writes it beside your answers: ``python -m common.report``."""

import argparse
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console

from common.build import BuildError, KernelError
from common.check.rng import new_seed
from common.marked import MarkerError, write_atomically
from common.paths import ROOT
from common.record import describe_run, provenance
from common.record.grid import Grid
from common.report import gpu, page
from common.report.page import Side
from common.report.roof import Dot
from common.report.shapes import (
    DECODE,
    FUSED,
    LENGTHS,
    NAIVE,
    ON_GPU,
    PRODUCT,
    SCORES,
    SOFTMAX,
    decode,
    sizes,
)
from common.timing.counters import NoCounters

# BEGIN STAFF, for students: host = None
from common.report import host  # isort: skip

# END STAFF

FOLDER = ROOT / "report"
FILE = "README.md"
MISSING = (
    "no picture: matplotlib is not installed; make report installs it, or pip install matplotlib"
)
GAP_LENGTHS = (128, 512, 1024)  # at which times are compared with PyTorch's
SOURCES = ("task2/attention_kernel.cu", "task4/attention_kernel.cu", "task5/attention_kernel.cu")

console = Console(
    width=None if sys.stdout.isatty() else 160, highlight=False, emoji=False, markup=False
)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 0 if the report was written."""
    options = _parse(argv)
    try:
        _run(options)
    except KeyboardInterrupt:
        console.print("\ninterrupted; the report is as it was")
        return 130
    except (MarkerError, BuildError, KernelError, torch.AcceleratorError) as error:
        console.print(f"error: {error}")
        return 1
    except OSError as error:
        console.print(f"error: cannot write {options.out}: {error.strerror or error}")
        return 1
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m common.report",
        description="Measure what a written report on the kernels needs: arithmetic intensity, times, Nsight Compute's"
        " counters, a roofline. It goes between the markers of FOLDER/README.md; what you have written there stays.",
    )
    add = parser.add_argument
    add("--out", type=Path, default=FOLDER, metavar="FOLDER", help="default: report/")
    add("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    add("--seed", type=int, help="repeat the random inputs of an earlier run")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no GPU here")
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options.seed = new_seed() if options.seed is None else options.seed
    return options


def _run(options: argparse.Namespace) -> None:
    file = options.out / FILE
    text = file.read_text(encoding="utf-8") if file.exists() else page.empty()
    page.check(text, f"{file}")  # before the minutes of measuring
    options.out.mkdir(parents=True, exist_ok=True)
    where = torch.cuda.get_device_name() if options.device == "cuda" else "the CPU, without a GPU"
    console.print(f"report on {where} (--seed {options.seed})")
    torch.manual_seed(options.seed)

    device = torch.empty(0, device=options.device).device  # a GPU's with its index
    with console.status("checking the kernels of tasks 2, 4 and 5"):
        problems = gpu.problems(device)
    for name, problem in problems.items():
        console.print(f"{name} ({gpu.KERNELS[name].relative_to(ROOT)}): {problem}")
    splits = {seq: gpu.splits(seq, device) for seq in LENGTHS}
    on_gpu = _gpu(options, device, problems, splits)
    in_cpp = _host(options) if host else None
    works = [*ON_GPU, *(host.WORKS if host else ())]
    growing = [SCORES, SOFTMAX, PRODUCT, NAIVE, FUSED, DECODE]
    found = page.sections(works, growing, splits, on_gpu, in_cpp)
    page.numbers(works, splits).print(console)
    for grid in (grid for side in (on_gpu, in_cpp) if side for grid in _grids(side)):
        grid.print(console)
    write_atomically(file, page.fill(text, found, f"{file}"))
    console.print(f"written: {file}; your answers go below the questions there")


def _grids(side: Side) -> list[Grid]:
    shown = [page.measured(side), *(part for part in side.more if isinstance(part, Grid))]
    return [*shown, page.gap(side)] if side.seconds else shown


def _gpu(
    options: argparse.Namespace,
    device: torch.device,
    problems: Mapping[str, str],
    splits: Mapping[int, int],
) -> Side:
    """The kernels of tasks 2, 4 and 5; without a GPU they have no times."""
    peers = {NAIVE.name: gpu.PYTORCH, FUSED.name: gpu.PYTORCH, DECODE.name: gpu.PYTORCH_DECODE}
    side = Side("the GPU", [], NAIVE.name, FUSED.name, peers=peers)
    ready = [name for name in gpu.KERNELS if name not in problems]
    if device.type == "cuda":
        with console.status("measuring a read of memory and a matrix product"):
            side.roof = gpu.ceilings()
        side.seconds = {}
        for seq in GAP_LENGTHS:
            with console.status(f"timing the kernels at S {seq:,}"):
                side.seconds[seq] = gpu.seconds(seq, device, ready)
    side.dots = [
        Dot(
            work,
            sizes(seq, splits[seq]),
            side.seconds.get(seq, {}).get(work.name),
            problems.get(work.name) or page.NEEDS_GPU,
        )
        for seq in LENGTHS
        for work in (SCORES, SOFTMAX, PRODUCT, NAIVE, FUSED, decode(splits[seq]))
    ]
    if side.roof is None:
        return side
    side.notes = [
        "Times are medians of interleaved calls, with the L2 cache flushed before each. What a kernel writes may stay"
        " in L2, and there task 2's kernels find what the one before them has written, so a share can exceed 100%. A"
        " decode step with n > 1 is both of its kernels."
    ]
    side.more = [_light(ready)]
    return _finished(side, options, "cuda", SOURCES, f"{torch.cuda.get_device_name()}, float32")


def _light(ready: Sequence[str]) -> Grid | str:
    """Nsight Compute's figures, or why there are none."""
    if not ready:
        return "Nsight Compute: no kernel to profile."
    try:
        with console.status("Nsight Compute profiles the kernels"):
            rows = gpu.speed_of_light(ready)
    except NoCounters as error:
        return f"Nsight Compute's Speed of Light: {error}"
    return Grid("Nsight Compute's Speed of Light:", ["", "kernel", *gpu.LIGHT], rows)


def _host(options: argparse.Namespace) -> Side:
    """The attentions in C++."""
    rng = random.Random(options.seed)
    with console.status("measuring a read of memory and multiply-adds on the CPU"):
        roof = host.ceilings()
    times: dict[int, Mapping[str, float]] = {}
    for seq in GAP_LENGTHS:
        with console.status(f"timing C++ at S {seq:,}"):
            times[seq] = host.seconds(seq, rng)
    dots = [Dot(w, sizes(seq), times[seq][w.name]) for seq in LENGTHS for w in host.WORKS]
    peers = dict.fromkeys((host.NAIVE.name, host.HOST.name), host.PYTORCH)
    side = Side("the CPU", dots, host.NAIVE.name, host.HOST.name, roof, times, peers)
    side.notes = host.notes(roof)
    with console.status("what the C++ compiler made of the loops"):
        side.more = host.vectors()
    return _finished(
        side, options, "cpu", host.SOURCES, f"{torch.get_num_threads()} threads of the CPU"
    )


def _finished(
    side: Side, options: argparse.Namespace, device: str, sources: Sequence[str], title: str
) -> Side:
    """With its picture and provenance."""
    name = f"roofline-{'gpu' if device == 'cuda' else 'host'}.png"
    assert side.roof
    try:
        from common.report import picture

        picture.draw(options.out / name, f"Roofline: {title}", side.roof, side.dots)
        side.picture = name
    except ModuleNotFoundError:
        side.picture = MISSING
        console.print(MISSING)
    side.run = describe_run(provenance(sources, device=device, seed=options.seed))
    return side


if __name__ == "__main__":
    sys.exit(main())
