"""The ladder: every rung, checked against float64. Nothing here is graded, and `python -m task4.ladder` times them.

python -m task4.ladder.test [--attention | --accuracy | --repeat] [--check]
"""

import contextlib
import functools
from dataclasses import dataclass, replace
from itertools import product

import torch

from common.build import BuildError, builder, library
from common.check import Case, CheckFailed, Suite, assert_close, launches
from common.check.attention import (
    attention_float64,
    attention_fused_float32,
    attention_pytorch,
    least_accurate,
    mistakes,
)
from common.check.hard_inputs import HardCase
from task4.ladder.call import ladder_attention
from task4.ladder.evidence.accuracy import ALLOWED, INPUTS, YARDSTICK, compare
from task4.ladder.rungs import BF16, FP16, FP32, RUNGS, by_number

SOURCES = (
    "task4/ladder/*.cu",
    "task4/ladder/*.cuh",
    "task4/ladder/rungs.py",
    "task4/ladder/*call*.*",
)
suite = Suite("task4.ladder", title="the ladder of attention kernels", sources=SOURCES)

SHORT = {FP32: "fp32", FP16: "fp16", BF16: "bf16"}
CUDA = ("cuda",)


@dataclass(frozen=True, kw_only=True, repr=False)
class RungCase(HardCase):
    """A case for one rung."""

    rung: int  # its number
    q_len: int = 0
    lengths: int = 0  # so many pairs of lengths are drawn instead
    scale: float | None = None
    inputs: str = ""  # of common.check.hard_inputs, instead


def _cases(*shapes):
    """Each shape for each rung, dtype and head_dim that has it."""
    for shape in shapes:
        values = dict(shape.values)
        rungs, dtypes, dims = (values.pop(name, None) for name in ("rungs", "dtypes", "head_dims"))
        for rung in (r for r in RUNGS if r.number in (rungs or (r.number,))):
            for dtype, d in product(dtypes or rung.dtypes, dims or rung.head_dims):
                if dtype in rung.dtypes and d in rung.head_dims:
                    yield RungCase(
                        f"rung {rung.number:02}, {shape.name}, {SHORT[dtype]}, head_dim {d}", why=shape.why, small=shape.small,
                        devices=_devices(rung, shape.devices), rung=rung.number, dtype=dtype, head_dim=d, **values,
                    )  # fmt: skip


def _devices(rung, devices):
    """Those of them that the rung runs on; where there is no GPU, on any of its own."""
    here = {"cpu": True, "cuda": not torch.cuda.is_available() or rung in _on_gpu()}
    return tuple(device for device in devices if here[device])


@functools.cache
def _on_gpu():
    gpu = torch.device("cuda", torch.cuda.current_device())
    return [r for r in RUNGS if r.why_not(gpu, r.dtypes[0], r.head_dims[0]) is None]


# Which rungs are built together, at the first check that needs one; `python -m task4.ladder --rung` narrows it down.
wanted = list(RUNGS)


def rung_of(case, device):
    """The rung of a case. All are built at once: one after the other, at first launch, would take long."""
    _build(device, library.settings().check)
    return by_number(case.rung)


@functools.cache
def _build(device, check):
    todo = [r for r in wanted if device.type == "cpu" or r in _on_gpu()]
    with contextlib.suppress(BuildError):  # the check of the rung that does not compile says so
        builder.make([library.target_for(r.source, device) for r in todo])


# Attention -----------------------------------------------------------------------------------------------

# Each is taken for every rung, with every dtype and head_dim that the rung has; dtypes and head_dims narrow that down.
SHAPES = [
    Case("one token", why="the output is v", batch=1, heads=1, q_len=1),
    Case("past a tile", why="the last tile of queries and of keys has one row; the diagonal cuts it", head_dims=(64,), dtypes=(FP32, FP16), small=True, batch=1, heads=1, q_len=65, kv_len=65, causal=True),
    Case("many tiles", why="m_i and l_i are rescaled from tile to tile, and buffers are used again", head_dims=(128,), dtypes=(BF16,), small=True, batch=1, heads=1, q_len=70, kv_len=333),
    Case("chunk on a cache", why="more keys than queries: causal is aligned to the end; behind the keys lies NaN", dtypes=(FP16,), small=True, head_dims=(64,), batch=2, heads=4, kv_heads=2, q_len=20, kv_len=150, causal=True, layout="cache"),
    Case("more queries than keys", why="the first queries see nothing and give 0", head_dims=(128,), dtypes=(FP32, FP16), small=True, batch=1, heads=1, q_len=66, kv_len=17, causal=True),
    Case("slices of one qkv tensor", why="rows of q, k and v lie 3 hidden_dim apart", dtypes=(FP32, BF16), batch=2, heads=2, q_len=70, causal=True, layout="fused"),
    Case("heads first", why="(batch, heads, seq, head_dim) in memory", dtypes=(FP32, FP16), batch=1, heads=3, kv_heads=1, q_len=140, layout="heads first"),
    Case("large scores", why="scores in the hundreds", head_dims=(64,), dtypes=(FP32, FP16), batch=1, heads=1, q_len=40, kv_len=150, magnitude=10.0),
    Case("one huge key", why="the maximum jumps from tile to tile", head_dims=(64,), dtypes=(FP32, BF16), batch=1, heads=1, q_len=40, kv_len=200, huge_key=170),
    Case("growing scores", why="the first maximum is far below the row's", devices=CUDA, dtypes=(FP16, BF16), batch=2, heads=4, kv_heads=2, q_len=1100, drift=(60.0, 0.0)),
    Case("growing negative scores", why="no score is above 0: compared as integers, the smallest would be the largest, and P too large for fp16", devices=CUDA, dtypes=(FP16, BF16), batch=2, heads=4, q_len=1100, drift=(-20.0, -240.0)),
    Case("growing negative scores, causal", why="rows with one key, and others with many", devices=CUDA, dtypes=(FP16, BF16), batch=2, heads=8, q_len=1100, drift=(-20.0, -240.0), causal=True),
    Case("scores that grow in long rows", why="a lazy maximum has to be updated in every block", devices=CUDA, dtypes=(FP16, BF16), batch=1, heads=4, kv_heads=2, q_len=300, kv_len=4300, drift=(60.0, 0.0)),
    Case("a cliff", why="one of the last keys to come has a score 0 to 200 above the others: a lazy maximum has to be updated, or exp() overflows", devices=CUDA, dtypes=(FP16, BF16), batch=1, heads=30, kv_heads=5, q_len=1000, kv_len=4300, cliff=200.0),
    Case("a cliff, causal", why="the same below a diagonal, and each block has several tiles", devices=CUDA, dtypes=(FP16, BF16), batch=2, heads=30, kv_heads=6, q_len=1000, kv_len=5100, cliff=200.0, causal=True),
    Case("large scores in long rows", why="a row is a few large weights, and its maximum is updated all the time", devices=CUDA, dtypes=(FP16,), batch=1, heads=1, q_len=140, kv_len=2100, magnitude=4.0),
    Case("a small cliff", why="for compute-sanitizer: with so many keys in the small cases of all rungs, racecheck takes more than 300 s", rungs=(15,), devices=CUDA, dtypes=(FP16, BF16), small=True, batch=1, heads=1, q_len=140, kv_len=2100, cliff=200.0),
    Case("large scores in a few long rows", why="the same", rungs=(15,), devices=CUDA, dtypes=(FP16,), small=True, batch=1, heads=1, q_len=140, kv_len=2100, magnitude=4.0),
    Case("long, causal", why="tiles above the diagonal are skipped", batch=1, heads=2, q_len=515, causal=True),
    Case("some lengths", why="other edges of tiles in each run", head_dims=(64,), dtypes=(FP16,), devices=("cpu",), batch=1, heads=1, lengths=6, causal=True),
    Case("own scale", why="the factor of the scores is an argument", head_dims=(64,), dtypes=(FP32, FP16), devices=CUDA, batch=1, heads=1, q_len=40, kv_len=150, scale=0.03),
    Case("equal keys", why="every weight is 1 / kv_len", devices=CUDA, batch=1, heads=1, q_len=140, kv_len=333, magnitude=0.0),
    Case("lengths", why="every edge of every tile", devices=CUDA, batch=1, heads=2, lengths=6),
    Case("lengths, causal", why="every edge of every tile", devices=CUDA, batch=1, heads=2, lengths=12, causal=True),
    Case("S 1024", why="as it is timed", devices=CUDA, batch=2, heads=4, q_len=1024),
    Case("S 1024, causal", why="as it is timed", devices=CUDA, batch=2, heads=4, q_len=1024, causal=True),
    Case("S 1000, few kv heads", why="8 heads share 2 of keys and values", devices=CUDA, batch=3, heads=8, kv_heads=2, q_len=1000, causal=True),
    Case("S 4095", why="many tiles, and a ragged last one", devices=CUDA, batch=1, heads=2, q_len=4095, causal=True),
    Case("S 2111", why="as it is timed, with a ragged end", devices=CUDA, dtypes=(FP16, BF16), batch=2, heads=4, q_len=2111),
    Case("S 4500, causal", why="as it is timed, with a ragged end", devices=CUDA, dtypes=(FP16, BF16), batch=1, heads=5, q_len=4500, causal=True),
    Case("several groups of heads", why="more tiles than SMs, of more heads than L2 holds: the dynamic tile scheduler", devices=CUDA, batch=2, heads=21, kv_heads=7, q_len=700, kv_len=8200, causal=True),
    Case("large, slices of one qkv tensor", why="strides that are not a multiple of a tile", devices=CUDA, batch=2, heads=3, q_len=515, layout="fused", causal=True),
    Case("large, heads first", why="(batch, heads, seq, head_dim) in memory", devices=CUDA, batch=2, heads=3, q_len=515, layout="heads first"),
    Case("large, on a cache", why="behind the keys lies NaN, which must not be read, not even to multiply it by 0", devices=CUDA, batch=2, heads=4, kv_heads=1, q_len=129, kv_len=777, layout="cache", causal=True),
    Case("one kv head for all", why="keys and values that expand() repeats: a stride of 0", devices=CUDA, batch=2, heads=4, q_len=200, layout="expanded"),
    Case("more heads than a grid is high", why="grids end at 65,535 along y and z", devices=CUDA, dtypes=(FP32, BF16), head_dims=(64,), batch=2100, heads=32, q_len=2, kv_len=3),
    Case("more tiles than a grid is high", why="grids end at 65,535 along y and z", devices=CUDA, dtypes=(FP32, FP16), head_dims=(64,), batch=1, heads=1, q_len=1_100_000, kv_len=5),
    Case("past 2^31 elements", why="offsets need 64 bits", devices=CUDA, dtypes=(FP32, BF16), head_dims=(64, 128), batch=2, heads=2, q_len=65, layout="far"),
]  # fmt: skip

# fmt: off
LENGTHS = (1, 2, 8, 16, 31, 63, 64, 65, 80, 96, 127, 128, 129, 160, 176, 177, 191, 192, 193, 240, 256, 257, 384, 385, 400)
# fmt: on


@suite.check("attention", list(_cases(*SHAPES)))
def rung_matches_float64(case, device, rng):
    rung = rung_of(case, device)
    if not case.lengths:
        _compare(case, rung, rng)
    for i, j in rng.integers(0, len(LENGTHS), case.lengths, 2).tolist():
        try:
            _compare(replace(case, q_len=LENGTHS[i], kv_len=LENGTHS[j]), rung, rng)
        except CheckFailed as error:
            error.add_note(f"with q_len {LENGTHS[i]}, kv_len {LENGTHS[j]}")
            raise


def _compare(case, rung, rng):
    q, k, v = case.qkv(rng)
    options = {"causal": case.causal, "scale": case.scale}
    truth = attention_float64(q, k, v, **options)
    got = ladder_attention(q, k, v, rung=rung.number, **options)
    pytorch = _pytorch(rung, q, k, v, truth, **options)
    axes, suspects = ("batch", "row", "head", "column"), mistakes(q, k, v, **options)
    assert_close(got, truth, pytorch, axes=axes, suspects=suspects)


def _pytorch(rung, q, k, v, truth, **options):
    """PyTorch's own answer, as accurate as the rung may be.

    A rung that rounds fp32 to tf32 is compared with fp16, because both keep 11 significant bits. One that splits fp32 in
    two parts of 16 bits keeps about 22, and so does PyTorch's fused kernel, which splits it in two of tf32. The CPU has
    no such kernel, and there PyTorch keeps all 24.
    """
    if rung.split:
        own = attention_fused_float32 if q.is_cuda else attention_pytorch
        return least_accurate(own, truth, q, k, v, **options)
    as_accurate = (t if rung.exact_in(t.dtype) else t.to(FP16) for t in (q, k, v))
    return attention_pytorch(*as_accurate, **options).to(q.dtype)


# How accurate --------------------------------------------------------------------------------------------

MASKS = {False: "not causal", True: "causal"}
# In float32 rungs 1 to 6 only have to meet the budget above.
ACCURACY = [
    Case(f"{inputs}, {mask}", why=f"at most {ALLOWED[dtype]} x the loss of {YARDSTICK[dtype]}", devices=CUDA,
         rungs=[r.number for r in RUNGS if dtype != FP32 or r.split], dtypes=[dtype], inputs=inputs, causal=causal)
    for dtype in SHORT for inputs in INPUTS[dtype] for causal, mask in MASKS.items()
]  # fmt: skip


@suite.check("accuracy", list(_cases(*ACCURACY)))
def rung_is_as_accurate_as_pytorch(case, device, rng):
    rung, dtype = rung_of(case, device), case.dtype
    ratios = compare(rung, case.inputs, rng, case.head_dim, dtype, case.causal)
    counted = ratios if dtype == FP32 else {what: ratios[what] for what in ("largest", "rms")}
    over = [f"{what} error {r:.3g} x" for what, r in counted.items() if not r <= ALLOWED[dtype]]
    if over:
        limit = f"at most {ALLOWED[dtype]} x is allowed"
        raise CheckFailed(f"{', '.join(over)} that of {YARDSTICK[dtype]}; {limit}")


# Always the same -----------------------------------------------------------------------------------------


def _repeated(why):
    """Each rung in one dtype, with both masks."""
    dtypes = {
        BF16: [r.number for r in RUNGS if not r.split],
        FP32: [r.number for r in RUNGS if r.split],
    }
    return list(_cases(*(
        Case(mask, why=why, devices=CUDA, rungs=rungs, dtypes=[dtype], causal=causal)
        for dtype, rungs in dtypes.items() for causal, mask in MASKS.items()
    )))  # fmt: skip


def _prepare(case, device, rng):
    """A function that launches the rung, and q, k and v as they are timed, many tiles per SM; less where it is slow."""
    rung = rung_of(case, device)
    timed = (8, 2048 // case.head_dim, 2048)
    batch, heads, seq = (
        timed if rung.number > 10 else (4, 16, 1000) if rung.number > 6 else (1, 2, 130)
    )
    qkv = [rng.randn(batch, seq, heads, case.head_dim, dtype=case.dtype) for _ in range(3)]
    return functools.partial(ladder_attention, causal=case.causal, rung=rung.number), qkv


@suite.check("repeat", _repeated("1,000 launches on the same inputs give the same bits"))
def launches_repeat(case, device, rng):
    launches.assert_repeat(*_prepare(case, device, rng))


@suite.check("repeat", _repeated("what a launch reads and writes is ordered by its stream alone"))
def another_stream_gives_the_same(case, device, rng):
    launches.assert_ordered_by_stream(*_prepare(case, device, rng))


@suite.check("repeat", _repeated("a captured launch reads its inputs when it is replayed"))
def a_cuda_graph_gives_the_same(case, device, rng):
    launches.assert_same_in_graph(*_prepare(case, device, rng), rng)


test_ladder = suite.pytest()


if __name__ == "__main__":
    suite.main()
