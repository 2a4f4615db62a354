"""The assignment's third step: what limits the kernels.

On a GPU the SpeedOfLight section of Nsight Compute, for each kernel. On a CPU what the compiler says of each loop. On
both the arithmetic intensity, and the FLOP/s and bytes/s that were reached: where the kernel is in a roofline plot.
"""

import linecache
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from common.build import BuildError, builder, planner, toolchain
from common.paths import ROOT
from common.record.grid import Grid
from common.timing import counters
from common.timing.counters import RESOURCES, Subject, resources, run_counted
from task4.frontends.one_file import steps
from task4.frontends.one_file.steps import HEAD_DIM, HEADS, OneFile

_ELAPSED = ".avg.pct_of_peak_sustained_elapsed"
SPEED_OF_LIGHT = {  # in per cent: the title in Nsight Compute's panel, and the counter
    "Compute (SM)": "sm__throughput" + _ELAPSED,
    "Memory": "gpu__compute_memory_throughput" + _ELAPSED,
    "L1/TEX": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "L2": "lts__throughput" + _ELAPSED,
    "DRAM": "gpu__dram_throughput" + _ELAPSED,
}
LATENCY, BALANCED = 60, 10  # per cent: below the first neither limits, within the second both do


def rates(wanted: Sequence[OneFile], seqs: Sequence[int], device: str, seed: int) -> Grid:
    """Arithmetic intensity, FLOP/s and bytes/s."""
    columns = ["", "S", "MFLOP", "MB", "FLOP/byte", "GFLOP/s", "GB/s"]
    title = (
        "Arithmetic intensity and what was reached. MFLOP: the two products, 4 S S D for each head."
    )
    grid = Grid(f"{title} MB: what a file's bytes_moved() says.", columns)
    here = {f: attend for f in wanted if (attend := f.made_for(device))}
    for seq in seqs:
        times = steps.seconds_of({f.name: a for f, a in here.items()}, seq, device, seed)
        flops = 4 * HEADS * seq * seq * HEAD_DIM
        for file in here:
            moved, seconds = file.module.bytes_moved(HEADS, seq, HEAD_DIM), times[file.name]
            reached = (flops / seconds / 1e9, moved / seconds / 1e9)
            numbers = (flops / 1e6, moved / 1e6, flops / moved, *reached)
            grid.rows.append([file.name, f"{seq}", *(f"{n:,.4g}" for n in numbers)])
    grid.rows.sort(key=lambda row: [f.name for f in here].index(row[0]))
    return grid


# ---- on a GPU


def speed_of_light(wanted: Sequence[OneFile], seq: int, seed: int) -> Iterator[Grid]:
    """What each kernel takes of an SM, and ncu's SpeedOfLight section.

    Raises:
        NoCounters: ncu is not here, or may not read the GPU's counters.
    """
    title = f"S {seq}"
    kernels, refused = resources(_subjects(wanted, seq, seed))
    yield Grid(f"{title}: resources", RESOURCES, kernels)
    if refused:
        yield Grid(f"{title}: not profiled", ["", "reason"], refused)
    labels = dict.fromkeys(row[0] for row in kernels)
    command = [sys.executable, "-m", __spec__.name, f"{seq}", f"{seed}", *labels]
    counted = counters.counted(command, len(kernels), "name one file")
    rows = [
        [*kernel[:2], *_percentages(found)] for kernel, found in zip(kernels, counted, strict=True)
    ]
    yield Grid(
        f"{title}: ncu's SpeedOfLight, per cent of peak", ["", "kernel", *SPEED_OF_LIGHT, "limited by"], rows
    )  # fmt: skip


def _percentages(found: Mapping[str, float]) -> list[str]:
    texts = [f"{found[c]:.0f}" if c in found else "-" for c in SPEED_OF_LIGHT.values()]
    compute, memory = (found.get(SPEED_OF_LIGHT[name]) for name in ("Compute (SM)", "Memory"))
    if compute is None or memory is None:
        return [*texts, "-"]
    if max(compute, memory) < LATENCY:
        return [*texts, "latency"]
    if abs(compute - memory) < BALANCED:
        return [*texts, "both"]
    return [*texts, "compute" if compute > memory else "memory"]


def _subjects(wanted: Sequence[OneFile], seq: int, seed: int) -> list[Subject]:
    def prepare(file: OneFile) -> partial:
        return partial(file.module.attention, *steps.inputs(seq, "cuda", seed))

    here = [file for file in wanted if file.made_for("cuda")]
    return [Subject(file.name, partial(prepare, file), file.module._cuda.source) for file in here]


# ---- on a CPU


@dataclass
class Loop:
    """A loop that has no other in it, as the compiler saw it; in each of its copies, if a function has several."""

    line: int
    vectors: int = 0  # bytes; 0: not vectorised
    reason: str = ""


def loops(file: OneFile) -> Grid:
    """Which loops of ``_CPP_SRC`` are vectorised, by their line in the Python file, or why they are not.

    Raises:
        BuildError: it does not compile.
    """
    compiler = toolchain.cpp_compiler()
    source = file.module._cpp.source
    python_file = planner.display(Path(file.module.__file__).resolve())
    found = _said_by(compiler.family, source, python_file)
    grid = Grid(f"{python_file}: what {compiler} says of its innermost loops", ["loop", ""])
    for loop in sorted(found.values(), key=lambda loop: loop.line):
        text = linecache.getline(file.module.__file__, loop.line).strip()[:80]
        verdict = f"{loop.vectors}-byte vectors" if loop.vectors else loop.reason
        grid.rows.append([f"{loop.line}: {text}", verdict])
    return grid


def _said_by(family: str, source: Path, python_file: str) -> dict[int, Loop]:
    """The loops by line."""
    (command,) = planner.plan(source, "cpu").commands
    with tempfile.TemporaryDirectory() as folder:
        out, dump = Path(folder) / "out", Path(folder) / "dump"
        if family == "gcc":  # -fopt-info has the reason of its last attempt alone
            flags = [f"-fdump-tree-vect-details={dump}"]
        else:
            remarks = (f"-Rpass{kind}=loop-vectorize" for kind in ("", "-analysis", "-missed"))
            flags = ["-gline-tables-only", *remarks]
        words = [word.replace(planner.OUT, str(out)) for word in command]
        done = subprocess.run([*words, *flags], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise BuildError(builder.readable(done.stderr))
        if family == "clang":
            return _clang(done.stderr, python_file)
        return _gcc(dump.read_text(errors="replace") if dump.exists() else "", python_file)


_OUTER = re.compile(r"Considering outer-loop|multiple nested loops|consecutive inner loops")
_USED = re.compile(r"loop vectorized using (\d+) byte vectors")
_MISSED = re.compile(r"missed: +not vectorized: (.+)")
_ORDER = "a sum or maximum over the loop, in an order that may not change"
_PLAIN = {  # g++'s reasons, then clang's
    r"relevant stmt not supported: \S+ = (?:__builtin_)?(\w+) \(.*": r"calls \1",
    r"relevant stmt not supported: .*[\[*].*": "no vector form of its loads or stores",
    r"unsupported use in stmt\.": _ORDER,
    r"value that could not be identified as reduction is used outside the loop": _ORDER,
    r"cannot prove it is safe to reorder floating-point operations.*": _ORDER,
    r"call instruction cannot be vectorized": "calls a function",
}


def _gcc(dump: str, python_file: str) -> dict[int, Loop]:
    """From the dump of g++'s vectoriser. The first reason is that of the widest vectors."""
    found: dict[int, Loop] = {}
    parts = re.split(r"^Analyzing loop at (.+):(\d+)\n", dump, flags=re.MULTILINE)
    for name, number, said in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        if name != python_file or (_OUTER.search(said) and not _USED.search(said)):
            continue
        loop = found.setdefault(int(number), Loop(int(number)))
        loop.vectors = max(loop.vectors, *map(int, _USED.findall(said)), 0)
        reason = _MISSED.search(said)
        loop.reason = loop.reason or (_plain(reason[1]) if reason else "not vectorised")
    return found


def _clang(said: str, python_file: str) -> dict[int, Loop]:
    """From clang's remarks, which count in elements: floats."""
    found: dict[int, Loop] = {}
    remark = re.compile(rf"^{re.escape(python_file)}:(\d+):\d+: remark: (.+?) \[-Rpass.*\]$", re.MULTILINE)  # fmt: skip
    for number, text in remark.findall(said):
        loop = found.setdefault(int(number), Loop(int(number)))
        if width := re.match(r"vectorized loop \(vectorization width: (\d+)", text):
            loop.vectors = max(loop.vectors, 4 * int(width[1]))
        else:
            loop.reason = loop.reason or _plain(text.removeprefix("loop not vectorized: "))
    return found


def _plain(reason: str) -> str:
    for pattern, words in _PLAIN.items():
        if found := re.fullmatch(pattern, reason):
            return found.expand(words)
    return reason.rstrip(".")


if __name__ == "__main__":
    seq, seed = map(int, sys.argv[1:3])
    run_counted(_subjects(steps.files(), seq, seed), sys.argv[3:])
