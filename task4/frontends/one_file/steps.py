"""The assignment's first two steps, for any of the files here: is it right, and how fast is it?"""

import importlib
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.check import CheckFailed, assert_close
from common.check.attention import mistakes, references
from common.check.rng import Rng
from common.record.grid import Grid
from common.timing import all_alike, measure
from task4.frontends.benchmark import in_turns, pytorch

FOLDER = Path(__file__).resolve().parent
HEADS, HEAD_DIM = 8, 64
SEQS = (128, 512, 1024)
LARGEST = 1e-3  # the assignment's max_err
SECONDS = 2.0  # of measuring, for each length
_HAS_SOURCE = re.compile(r"^_(CUDA|CPP)_SRC = ", re.MULTILINE)
AXES = ("batch", "row", "head", "column")


@dataclass(frozen=True)
class OneFile:
    """A Python file of this folder with kernels in strings: ``_CUDA_SRC``, ``_CPP_SRC`` or both."""

    name: str

    @property
    def module(self) -> Any:
        """The file, imported."""
        return importlib.import_module(f"{__package__}.{self.name}")

    def attentions(self, device: str) -> dict[str, Callable[..., Tensor]]:
        """What runs on tensors of a device, by name, the one that is made for it first."""
        cuda, cpp = (hasattr(self.module, source) for source in ("_CUDA_SRC", "_CPP_SRC"))
        attend = self.module.attention
        if device == "cuda":
            return {self.name: attend} if cuda else {}
        found = {f"{self.name}, C++": partial(attend, cuda=False)} if cpp else {}
        return found | ({f"{self.name}, CUDA": partial(attend, cuda=True)} if cuda else {})

    def made_for(self, device: str) -> Callable[..., Tensor] | None:
        """The attention that is made for a device; None if the file has no such string."""
        source = "_CUDA_SRC" if device == "cuda" else "_CPP_SRC"
        return self.module.attention if hasattr(self.module, source) else None


def files() -> list[OneFile]:
    """Those of this folder: the three kernels, the fused one, and what was added."""
    known = ["three_kernels", "fused"]
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.py"))}
    added = [n for n, t in texts.items() if _HAS_SOURCE.search(t) and n not in known]
    return [OneFile(name) for name in known + added]


def inputs(seq: int, device: str, seed: int) -> list[Tensor]:
    """q, k and v ``(1, seq, 8, 64)`` float32."""
    rng = Rng(seed, device, "one_file", f"{seq}")
    return [rng.randn(1, seq, HEADS, HEAD_DIM) for _ in range(3)]


def check(
    wanted: Sequence[OneFile], seqs: Sequence[int], device: str, seed: int
) -> tuple[Grid, list[str]]:
    """Each attention beside PyTorch's and beside float64.

    Returns:
        The table, and what is wrong, in sentences. On the CPU it has the CUDA string too, run by the course's CPU
        layer.

    Raises:
        BuildError, KernelError: one does not compile, or its launch fails.
    """
    wrong = []
    columns = ["", "S", "max_err to PyTorch", "error", "PyTorch's error", ""]
    title = f"Not causal, B1, {HEADS} heads, D {HEAD_DIM}, float32. max_err must be below {LARGEST:g}, the error to"
    grid = Grid(f"{title} float64 within the course's budget.", columns)
    for file in wanted:
        for name, attend in file.attentions(device).items():
            for seq in seqs:
                q, k, v = inputs(seq, device, seed)
                truth, expected = references(q, k, v)
                got = attend(q, k, v)
                problem = _problem(got, truth, expected, mistakes(q, k, v))
                wrong += [f"{name}, S {seq}: {problem}"] if problem else []
                errors = (_largest(got, expected), _largest(got, truth), _largest(expected, truth))
                verdict = "wrong" if problem else "passed"
                grid.rows.append([name, f"{seq}", *(f"{e:.1e}" for e in errors), verdict])
    return grid, wrong


def _problem(got: Tensor, truth: Tensor, expected: Tensor, suspects: dict) -> str | None:
    """What is wrong with a result; None if nothing is."""
    try:
        assert_close(got, truth, expected, axes=AXES, suspects=suspects)
    except CheckFailed as error:
        return str(error)
    max_err = _largest(got, expected)
    return None if max_err < LARGEST else f"max_err is {max_err:.3g}; it must be below {LARGEST:g}"


def _largest(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


def benchmark(wanted: Sequence[OneFile], seqs: Sequence[int], device: str, seed: int) -> Grid:
    """Milliseconds of each file and of ``F.scaled_dot_product_attention``, and how many times as long it takes."""
    attentions = {f.name: attend for f in wanted if (attend := f.made_for(device))}
    title = f"{_where(device)}: B1, {HEADS} heads, D {HEAD_DIM}, float32. Milliseconds, and how many times as long as"
    slower = [f"{name} / PyTorch" for name in attentions]
    grid = Grid(f"{title} F.scaled_dot_product_attention.", ["S", *attentions, "PyTorch", *slower])
    for seq in seqs:
        times = seconds_of(attentions, seq, device, seed)
        ratios = [f"{times[name] / times['PyTorch']:.2f}" for name in attentions]
        took = [f"{1e3 * times[name]:.3f}" for name in (*attentions, "PyTorch")]
        grid.rows.append([f"{seq}", *took, *ratios])
    return grid


def seconds_of(
    attentions: dict[str, Callable[..., Tensor]], seq: int, device: str, seed: int
) -> dict[str, float]:
    """The median of each attention and of ``"PyTorch"``, called in turns on the same inputs."""
    given = inputs(seq, device, seed)
    candidates = {**attentions, "PyTorch": partial(pytorch, causal=False)}
    if device == "cuda":
        calls = {name: partial(attend, *given) for name, attend in candidates.items()}
        times = measure(calls, seconds=SECONDS, check=all_alike)
        return {name: timing.median_ms / 1e3 for name, timing in times.items()}
    rounds = in_turns(candidates, given, False, random.Random(seed), SECONDS)
    return {name: timing.seconds for name, timing in rounds.items()}


def _where(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"On the CPU, {torch.get_num_threads()} threads"
