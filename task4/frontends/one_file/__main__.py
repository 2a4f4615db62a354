"""Checks, times and profiles attention in one Python file: ``python -m task4.frontends.one_file``."""

import argparse
import sys
from collections.abc import Sequence

import torch
from rich.console import Console

from common.build import BuildError, KernelError
from common.check.rng import new_seed
from common.timing.counters import NoCounters
from task4.frontends.one_file import profile, steps

STEPS = ("check", "benchmark", "profile")

console = Console(
    width=None if sys.stdout.isatty() else 160, highlight=False, emoji=False, markup=False
)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 0 if all that was checked is right."""
    options = _parse(argv)
    try:
        return _run(options)
    except (BuildError, KernelError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        console.print("\ninterrupted")
        return 130


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m task4.frontends.one_file",
        description="Check, time and profile attention whose kernels are strings in one Python file: 8 heads, D 64,"
        " float32.",
    )
    files = {file.name: file for file in steps.files()}
    add = parser.add_argument
    add("file", nargs="*", metavar="FILE", help=f"only these: {', '.join(files)}; default: all")
    add("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    add("--step", choices=STEPS, help="only this one; default: all")
    add(
        "--seq",
        type=int,
        nargs="+",
        default=list(steps.SEQS),
        metavar="S",
        help="sequence lengths; default: 128 512 1024",
    )
    add("--seed", type=int, help="repeat the random inputs of an earlier run")
    options = parser.parse_args(argv)  # fmt: skip
    if unknown := [name for name in options.file if name not in files]:
        parser.error(f"there is no file {unknown[0]!r} here; there are {', '.join(files)}")
    if min(options.seq) < 1:
        parser.error(f"S must be 1 or more; got {min(options.seq)}")
    has_gpu = torch.cuda.is_available()
    options.device = options.device or ("cuda" if has_gpu else "cpu")
    if options.device == "cuda" and not has_gpu:
        parser.error("--device cuda: PyTorch sees no GPU here")
    options.seed = new_seed() if options.seed is None else options.seed
    options.wanted = [files[name] for name in options.file or files]
    return options


def _run(options: argparse.Namespace) -> int:
    what = options.wanted, options.seq, options.device, options.seed
    chosen = (options.step,) if options.step else STEPS
    if "check" in chosen:
        grid, wrong = steps.check(*what)
        console.print(f"check (--seed {options.seed})", end="")
        grid.print(console)
        for problem in wrong:
            console.print(f"\n{problem}")
        if wrong:
            return 1
    if "benchmark" in chosen:
        steps.benchmark(*what).print(console)
    if "profile" in chosen:
        profile.rates(*what).print(console)
        _profile(options)
    return 0


def _profile(options: argparse.Namespace) -> None:
    if options.device == "cpu":
        for file in options.wanted:
            if file.made_for("cpu"):
                profile.loops(file).print(console)
        return
    try:
        for grid in profile.speed_of_light(options.wanted, max(options.seq), options.seed):
            grid.print(console)
    except NoCounters as reason:
        console.print(f"\n{reason}")


if __name__ == "__main__":
    sys.exit(main())
