"""Numbers of the student: the splits that their code chooses, and what they have measured."""

import math
import re
from typing import Any

from common.build import BuildError, KernelError
from common.check import CheckFailed
from common.staff.viva.lab import LIMIT, Lab, Written
from common.staff.viva.questions import Question

SMS = {"an A100": 108, "an H100": 132, "an RTX 4090": 128}


def about_splits(lab: Lab, code: Written, gpu: str, batch: int, kv_len: int) -> Question | None:
    """How many splits their ``choose_num_splits`` takes, and how full the waves of blocks are then."""
    from task5.attention import BLOCKS_PER_SM, MIN_KEYS_PER_SPLIT

    heads, sms = 32, SMS[gpu]
    blocks, slots = batch * heads, sms * BLOCKS_PER_SM
    args = (blocks, kv_len, sms)
    try:
        chosen, _ = lab.ask(LIMIT, "call", "task5.attention", "choose_num_splits", None, args, {})
    except (BuildError, KernelError, CheckFailed, ValueError, TypeError):
        return None
    if type(chosen) is not int or not 1 <= chosen <= kv_len:
        return None
    most = max(1, kv_len // MIN_KEYS_PER_SPLIT)
    rows = [
        f"| {splits} | {blocks * splits} | {blocks * splits / slots:.2f} | {_fullness(blocks * splits, slots):.0%} |"
        for splits in sorted({1, 2, max(1, chosen - 1), chosen, chosen + 1})
    ]
    answer = (
        f"**{chosen}**, says the code. {gpu[0].upper()}{gpu[1:]} holds {sms} x {BLOCKS_PER_SM} = {slots} blocks at"
        f" once; a split should have at least {MIN_KEYS_PER_SPLIT} keys, so at most {most}"
        " splits.\n\n| splits | blocks | waves | how full the waves are |\n|---|---|---|---|\n"
        + "\n".join(rows)
    )
    ask = (
        f"Batch {batch}, {heads} heads, {kv_len:,} keys, on {gpu} ({sms} SMs): how many splits does your code choose?"
        " Why not one more, or one less?"
    )
    return Question(
        "splits", code.stage, code.file, code.first(r"\breturn\b"), ask, answer, "splits"
    )


def _fullness(blocks: int, slots: int) -> float:
    return blocks / slots / math.ceil(blocks / slots)


_ATTENTION = re.compile(
    r"B(\d{1,4}) S(\d{1,6}) hidden (\d{1,6}), (\d{1,4}) heads, (causal|non-causal)"
)
_DECODE = re.compile(r"B(\d{1,4}), (\d{1,4}) heads, head_dim (\d{1,4}), (\d{1,8}) keys, \d+ splits")
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def measured(records: Any, stage: str) -> list[str]:
    """The names of a stage's figures that can be asked about.

    Args:
        records: what a student's ``common/records/cuda.json`` holds: anything.
        stage: task4 or task5.
    """
    found = _at(records, "stages", stage, "benchmarks")
    names = sorted(found) if isinstance(found, dict) else []
    names = [name for name in names[:100] if name.startswith(("attention alone, ", "decode "))]
    return [name for name in names if _work(found[name], stage) and _chip(records, stage)]


def about_measurement(records: Any, code: Written, name: str) -> Question | None:
    """Rate, arithmetic intensity and what limits it, from a student's own figure."""
    figure = _at(records, "stages", code.stage, "benchmarks", name)
    work, chip = _work(figure, code.stage), _chip(records, code.stage)
    if work is None or chip is None:
        return None
    (ops, moved, milliseconds), (tflops, gb_per_s) = work, chip
    seconds = milliseconds / 1000
    intensity, ridge = ops / moved, tflops * 1e12 / (gb_per_s * 1e9)
    bound = "operations" if intensity > ridge else "bytes"
    reached = (
        f"{ops / seconds / 1e12:.3g} of {tflops:.3g} TFLOP/s: {ops / seconds / tflops / 1e12:.0%}"
        if bound == "operations"
        else f"{moved / seconds / 1e9:,.0f} of {gb_per_s:,.0f} GB/s: {moved / seconds / gb_per_s / 1e9:.0%}"
    )
    shape = _at(figure, "shape")
    answer = (
        f"- operations: {ops:.3g}, 4 for each score and element of head_dim; bytes: {moved:.3g}, each tensor once\n"
        f"- arithmetic intensity: {intensity:.3g} operations per byte; the chip's ridge is at {tflops:.3g} TFLOP/s /"
        f" {gb_per_s:,.0f} GB/s = {ridge:.3g}\n"
        f"- so **{bound}** bound. In {milliseconds:.4g} ms it reaches {reached} of what PyTorch reached there\n\n"
        "From common/records/cuda.json of the submission, which a student can edit."
    )
    ask = (
        f"You measured {milliseconds:.4g} ms ({shape}). How many operations and bytes is that? Is it bound by"
        " operations or by bytes, and how near is it to what the chip can do? What would you change next?"
    )
    line = code.first(r"\bfor\b.*B_c", r"\bfor\b")
    return Question(
        "measured", code.stage, code.file, line, ask, answer, f"{code.stage} measured {bound}"
    )


def _work(figure: Any, stage: str) -> tuple[float, float, float] | None:
    """Operations, bytes and milliseconds of a figure; None if it is of another kind, or not a number that can be."""
    shape, size = _at(figure, "shape"), _BYTES.get(str(_at(figure, "dtype")))
    milliseconds = _number(_at(figure, "ours", "median_ms"))
    if not isinstance(shape, str) or not size or milliseconds is None:
        return None
    if stage == "task4" and (found := _ATTENTION.fullmatch(shape)):
        batch, seq, hidden, _ = (int(n) for n in found.groups()[:4])
        if min(batch, seq, hidden):
            half = 0.5 if found[5] == "causal" else 1
            return (
                4 * batch * seq * seq * hidden * half,
                4 * batch * seq * hidden * size,
                milliseconds,
            )
    if stage == "task5" and (found := _DECODE.fullmatch(shape)):
        batch, heads, head_dim, keys = map(int, found.groups())
        elements = batch * heads * head_dim * keys
        if elements:
            return 4 * elements, 2 * elements * size, milliseconds
    return None


def _chip(records: Any, stage: str) -> tuple[float, float] | None:
    """TFLOP/s in float32 and GB/s that PyTorch reached on the student's GPU."""
    reference = _at(records, "stages", stage, "reference")
    tflops, gb_per_s = (_number(_at(reference, name)) for name in ("fp32_tflops", "read_gb_per_s"))
    return (tflops, gb_per_s) if tflops and gb_per_s else None


def _number(value: Any) -> float | None:
    return value if type(value) in (int, float) and 1e-6 < value < 1e9 else None


def _at(value: Any, *path: str) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value
