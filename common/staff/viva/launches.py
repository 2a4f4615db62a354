"""What a launch takes and does, counted: bank conflicts, occupancy, skipped tiles."""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from common.build import BuildError, KernelError, using
from common.check import CheckFailed
from common.check.rng import Rng
from common.staff.judge.remote import BUILD
from common.staff.viva.lab import Access, Lab, Launch, Written, by_line
from common.staff.viva.questions import Question


class Call(NamedTuple):
    """A call of one kernel on small inputs.

    ``instance`` is the kernel that it runs, as C++ names it.
    """

    label: str
    instance: str
    run: Callable[[], object]


def _softmax() -> object:
    from task2.attention import test_batched_softmax

    return test_batched_softmax(_random(1, 2, 300), -1)


def _gemm(kind: str) -> object:
    from task2 import attention

    return getattr(attention, f"test_batched_GEMM_{kind}")(_random(1, 64, 64), _random(1, 64, 64))


def _attention(causal: bool = False) -> object:
    from task4.attention import flash_attention

    q = _random(1, 96, 1, 64)
    return flash_attention(q, q, q, causal=causal, tile=(32, 32))


def _decode() -> object:
    from task5.attention import flash_attention_decode

    k = _random(1, 200, 1, 64)
    return flash_attention_decode(k[:, :1], k, k, num_splits=1)


def _random(*shape: int) -> torch.Tensor:
    return Rng(0, "cpu", "viva").randn(*shape)


ATTENTION = "attention of 96 queries and keys, head_dim 64, tiles of 32 x 32"
CALLS = {
    "softmax_kernel_batched": Call("softmax of 2 rows of 300", "softmax_kernel_batched", _softmax),
    "GEMM_NT_kernel_batched": Call(
        "A B^T of 64 x 64 matrices", "GEMM_NT_kernel_batched<32>", lambda: _gemm("NT")
    ),
    "GEMM_NN_kernel_batched": Call(
        "A B of 64 x 64 matrices", "GEMM_NN_kernel_batched<32>", lambda: _gemm("NN")
    ),
    "flashattention_kernel": Call(
        ATTENTION, "flashattention_kernel<32, 32, 64, float>", _attention
    ),
    "flash_attention_decode_kernel": Call(
        "decoding one query against 200 keys, head_dim 64",
        "flash_attention_decode_kernel<4, 64, float>",
        _decode,
    ),
}


def counted(lab: Lab, code: Written, folder: str) -> Launch | None:
    """The kernel's launch on small inputs, counted once; None if it fails."""
    return lab.once(
        ("launch", code.function), lambda: lab.count(folder, code.file, CALLS[code.function].run)
    )


# Bank conflicts ---------------------------------------------------------------------------------------

_VECTOR = re.compile(r"\b(make_)?(u?int|float|double)[24]\b")


def about_conflicts(lab: Lab, code: Written, folder: str, nth: int) -> Question | None:
    """The bank conflicts of the nth line of the region that accesses shared memory; those with conflicts come first."""
    launch = counted(lab, code, folder)
    if launch is None:
        return None
    lines = {
        line: accesses
        for line, accesses in by_line(launch.accesses).items()
        if code.region.begin < line < code.region.end
        and not any(_unclear(code, a) for a in accesses)
    }
    ordered = sorted(
        lines, key=lambda line: (-max(a.passes / max(a.least, 1) for a in lines[line]), line)
    )
    if nth >= len(ordered):
        return None
    line = ordered[nth]
    found = "\n".join(f"- {_cost(access)}" for access in lines[line])
    answer = (
        f"{found}\n\nCounted by the check build in block (0, 0, 0), {CALLS[code.function].label}: what the threads of a"
        " warp do here for the n-th time between two barriers is one instruction. A pass serves each of the 32 banks"
        " once. (The GPU's compiler may join neighbouring accesses of one thread.)"
    )
    ask = "How many bank conflicts has this line, and why? Which elements do the 32 threads of a warp access?"
    return Question(
        "conflicts", code.stage, code.file, line, ask, answer, f"{code.function} conflicts {line}"
    )


def _unclear(code: Written, access: Access) -> bool:
    """A vector that the compiler has split: on a GPU it is one access."""
    return access.bytes < 8 and bool(_VECTOR.search(code.line_text(access.helper or access.line)))


def _cost(access: Access) -> str:
    ways = access.passes / max(access.least, 1)
    verdict = (
        "no conflicts"
        if access.passes == access.least
        else f"{ways:.3g} times as many as without conflicts"
    )
    return (
        f"{access.verb} {access.bytes} bytes per thread: {access.instructions:,} instructions of a warp take"
        f" {access.passes:,} passes, and {access.least:,} is the least: **{verdict}**"
    )


# Occupancy --------------------------------------------------------------------------------------------


KIB = 1024


class Gpu(NamedTuple):
    """Limits of an SM: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"."""

    arch: int
    threads: int
    blocks: int
    shared: int  # bytes
    shared_of_block: int

    def taken(self, shared: int) -> int:
        """Bytes of shared memory that a block takes: in whole units, and from sm_80 on 1 KiB for CUDA itself."""
        unit, own = (128, KIB) if self.arch >= 80 else (256, 0)
        return -(-(shared + own) // unit) * unit


REGISTERS = 64 * KIB  # of an SM, on all of them
GPUS = (
    Gpu(75, 1024, 16, 64 * KIB, 64 * KIB),
    Gpu(80, 2048, 32, 164 * KIB, 163 * KIB),
    Gpu(86, 1536, 16, 100 * KIB, 99 * KIB),
    Gpu(89, 1536, 24, 100 * KIB, 99 * KIB),
    Gpu(90, 2048, 32, 228 * KIB, 227 * KIB),
    Gpu(100, 2048, 32, 228 * KIB, 227 * KIB),
    Gpu(120, 1536, 24, 100 * KIB, 99 * KIB),
)


def blocks_per_sm(gpu: Gpu, threads: int, shared: int, registers: int | None) -> tuple[int, str]:
    """How many blocks an SM holds at once, and what limits them.

    Args:
        gpu: the limits.
        threads: of a block.
        shared: bytes of shared memory of a block.
        registers: of a thread; None if they are not known.
    """
    warps = -(-threads // 32)
    limits = {"threads": gpu.threads // (32 * warps), "blocks": gpu.blocks}
    if shared:
        fits = shared <= gpu.shared_of_block
        limits["shared memory"] = gpu.shared // gpu.taken(shared) if fits else 0
    if registers:
        of_warp = -(-registers * 32 // 256) * 256  # taken in units of 256, and by warps in fours
        limits["registers"] = REGISTERS // of_warp // 4 * 4 // warps
    least = min(limits.values())
    return least, " and ".join(name for name, blocks in limits.items() if blocks == least)


def about_occupancy(lab: Lab, code: Written, folder: str) -> Question | None:
    """How many blocks of a kernel an SM holds; of task 4's kernel for each tile."""
    launch = counted(lab, code, folder)
    if launch is None:
        return None
    registers = lab.registers(code.file)
    rows = [
        _occupancy(name, launch.threads, shared, registers.get(instance))
        for name, shared, instance in _configurations(lab, code, launch)
    ]
    titles = ["", "shared memory", "registers", *(f"sm_{gpu.arch}" for gpu in GPUS)]
    table = [titles, ["---"] * len(titles), *rows]
    lines = "\n".join(f"| {' | '.join(row)} |" for row in table)
    known = (
        "Registers are those of sm_80."
        if registers
        else "Without registers: there is no nvcc here."
    )
    answer = (
        f"Blocks that an SM holds at once, their warps, and what limits them; a block has {launch.threads} threads.\n\n"
        f"{lines}\n\nBy the limits in the CUDA programming guide. {known}"
    )
    ask = "What does a block of this kernel take of an SM, how many does an SM hold at once, and what limits them?"
    if code.function == "flashattention_kernel":
        ask += " What does a larger B_r change, and why may it still be faster?"
    line = code.first(r"\bB_r\b|__shared__|_tile\b|\bpartial\b|\w_s\b")
    return Question(
        "occupancy", code.stage, code.file, line, ask, answer, f"{code.function} occupancy"
    )


def _configurations(lab: Lab, code: Written, launch: Launch) -> Iterator[tuple[str, int, str]]:
    """What is compared: its name, bytes of shared memory, and the kernel."""
    call = CALLS[code.function]
    if code.function != "flashattention_kernel":
        yield call.instance, launch.static + launch.dynamic, call.instance
        return
    from task4.attention import TILES

    for head_dim, tiles in TILES.items():
        for B_r, B_c in tiles:
            sizes = {"B_r": B_r, "B_c": B_c, "head_dim": head_dim}
            try:
                with using(check=True):
                    shared, _ = lab.ask(BUILD, "query", code.file, "shared_memory_bytes", sizes)
            except (BuildError, KernelError, CheckFailed):
                continue
            if type(shared) is int and shared >= 0:
                name = f"flashattention_kernel<{B_r}, {B_c}, {head_dim}, float>"
                yield f"{B_r} x {B_c}, head_dim {head_dim}", launch.static + shared, name


def _occupancy(name: str, threads: int, shared: int, registers: int | None) -> list[str]:
    cells = []
    for gpu in GPUS:
        blocks, limit = blocks_per_sm(gpu, threads, shared, registers)
        warps = f"{blocks * -(-threads // 32)} of {gpu.threads // 32} warps"
        cells.append(f"{blocks}: {warps}, {limit}" if blocks else f"does not run: {limit}")
    return [f"`{name}`", f"{shared:,} B", str(registers or "-"), *cells]


# Skipped tiles ----------------------------------------------------------------------------------------


def about_tiles(lab: Lab, code: Written, folder: str) -> Question | None:
    """How much of the loop over the keys the causal mask saves, by the barriers that each block passes."""
    every = counted(lab, code, folder)
    causal = every and lab.count(folder, code.file, lambda: _attention(causal=True))
    if not every or not causal:
        return None
    rows = [
        f"| {block[0]} | {barriers} | {causal.barriers[block]} |"
        for block, barriers in sorted(every.barriers.items())
        if block in causal.barriers
    ]
    skips = sum(causal.barriers.values()) < sum(every.barriers.values())
    verdict = "tiles above the diagonal are skipped" if skips else "no tile is skipped"
    answer = (
        f"Barriers that each block passes, {ATTENTION}, counted on the CPU. A tile that is visited passes as"
        " many as any other:\n\n"
        "| blockIdx.x | not causal | causal |\n|---|---|---|\n"
        + "\n".join(rows)
        + f"\n\nSo {verdict}."
    )
    ask = (
        "With q_len = kv_len = 96 and tiles of 32 x 32: how many tiles of keys does each block visit if causal, and how"
        " many if not? Where in your code is that decided?"
    )
    line = code.first(r"\bcausal\b.*(min|\?)", r"\bcausal\b", r"\bfor\b")
    return Question("tiles", code.stage, code.file, line, ask, answer, "tiles")
