"""The ladder: every rung, checked against float64. Nothing here is graded, and `python -m task4.ladder` times them.

python -m task4.ladder.test [--attention | --accuracy | --repeat] [--check]
"""

import contextlib
import functools

import torch

from common.build import BuildError, builder, library
from common.check import Case, CheckFailed, Suite, assert_close
from common.check.attention import attention_float64, attention_pytorch
from task4.ladder import rungs
from task4.ladder.accuracy import (
    ALLOWED,
    INPUTS,
    by_fused_float32,
    compare,
    shape_for,
    yardstick,
)
from task4.ladder.rungs import BF16, FP16, FP32, RUNGS, by_number, ladder_attention

suite = Suite(
    "task4.ladder",
    title="the ladder of attention kernels",
    points=0,
    sources=("task4/ladder/*.cu", "task4/ladder/*.cuh", "task4/ladder/rungs.py"),
)

SHORT = {FP32: "fp32", FP16: "fp16", BF16: "bf16"}
CUDA = ("cuda",)

# Each is taken for every rung, with every dtype and head_dim that the rung has; dtypes and head_dims narrow that down.
SHAPES = [
    Case("one token", why="the output is v", batch=1, heads=1, q_len=1),
    Case("past a tile", why="the last tile of queries and of keys has one row; the diagonal cuts it", head_dims=(64,), dtypes=(FP32, FP16), small=True, batch=1, heads=1, q_len=65, kv_len=65, causal=True),
    Case("many tiles", why="m_i and l_i are rescaled from tile to tile, and buffers are used again", head_dims=(128,), dtypes=(BF16,), small=True, batch=1, heads=1, q_len=70, kv_len=333),
    Case("chunk on a cache", why="more keys than queries: causal is aligned to the end; behind the keys lies NaN", dtypes=(FP16,), small=True, head_dims=(64,), batch=2, heads=4, kv_heads=2, q_len=20, kv_len=150, causal=True, layout="cache"),
    Case("more queries than keys", why="the first queries see nothing and give 0", head_dims=(128,), dtypes=(FP32, FP16), small=True, batch=1, heads=1, q_len=66, kv_len=17, causal=True),
    Case("slices of one qkv tensor", why="rows of q, k and v lie 3 hidden_dim apart", dtypes=(FP32, BF16), batch=2, heads=2, q_len=70, causal=True, layout="fused"),
    Case("heads first", why="(batch, heads, seq, head_dim) in memory", dtypes=(FP32, FP16), batch=1, heads=3, kv_heads=1, q_len=140, layout="heads first"),
    Case("large scores", why="scores in the hundreds", head_dims=(64,), dtypes=(FP32, FP16), batch=1, heads=1, q_len=40, kv_len=150, scale=10.0),
    Case("one huge key", why="the maximum jumps from tile to tile", head_dims=(64,), dtypes=(FP32, BF16), batch=1, heads=1, q_len=40, kv_len=200, huge_key=170),
    Case("growing scores", why="the first maximum is far below the row's", devices=CUDA, dtypes=(FP16, BF16), batch=2, heads=4, kv_heads=2, q_len=1100, drift=(60.0, 0.0)),
    Case("growing negative scores", why="no score is above 0: compared as integers, the smallest would be the largest, and P too large for fp16", devices=CUDA, dtypes=(FP16, BF16), batch=2, heads=4, q_len=1100, drift=(-20.0, -240.0)),
    Case("growing negative scores, causal", why="rows with one key, and others with many", devices=CUDA, dtypes=(FP16, BF16), batch=2, heads=8, q_len=1100, drift=(-20.0, -240.0), causal=True),
    Case("scores that grow in long rows", why="a maximum that stays has to move in every block", devices=CUDA, dtypes=(FP16, BF16), batch=1, heads=4, kv_heads=2, q_len=300, kv_len=4300, drift=(60.0, 0.0)),
    Case("a cliff", why="one of the last keys to come has a score 0 to 200 above the others: what stays has to move, or exp() overflows", devices=CUDA, dtypes=(FP16, BF16), batch=1, heads=30, kv_heads=5, q_len=1000, kv_len=4300, cliff=200.0),
    Case("a cliff, causal", why="the same below a diagonal, and each block has several tiles", devices=CUDA, dtypes=(FP16, BF16), batch=2, heads=30, kv_heads=6, q_len=1000, kv_len=5100, cliff=200.0, causal=True),
    Case("large scores in long rows", why="a row is a few large weights, and its maximum moves all the time", devices=CUDA, dtypes=(FP16,), batch=1, heads=1, q_len=140, kv_len=2100, scale=4.0),
    Case("a small cliff", why="for compute-sanitizer: with so many keys in the small cases of all rungs, racecheck was not done after 300 s", rungs=(14,), devices=CUDA, dtypes=(FP16, BF16), small=True, batch=1, heads=1, q_len=140, kv_len=2100, cliff=200.0),
    Case("large scores in a few long rows", why="the same", rungs=(14,), devices=CUDA, dtypes=(FP16,), small=True, batch=1, heads=1, q_len=140, kv_len=2100, scale=4.0),
    Case("long, causal", why="tiles above the diagonal are skipped", batch=1, heads=2, q_len=515, causal=True),
    Case("some lengths", why="other edges of tiles in each run", head_dims=(64,), dtypes=(FP16,), devices=("cpu",), batch=1, heads=1, lengths=6, causal=True),
    Case("own scale", why="the factor of the scores is an argument", head_dims=(64,), dtypes=(FP32, FP16), devices=CUDA, batch=1, heads=1, q_len=40, kv_len=150, factor=0.03),
    Case("equal keys", why="every weight is 1 / kv_len", devices=CUDA, batch=1, heads=1, q_len=140, kv_len=333, scale=0.0),
    Case("lengths", why="every edge of every tile", devices=CUDA, batch=1, heads=2, lengths=6),
    Case("lengths, causal", why="every edge of every tile", devices=CUDA, batch=1, heads=2, lengths=12, causal=True),
    Case("S 1024", why="as it is timed", devices=CUDA, batch=2, heads=4, q_len=1024),
    Case("S 1024, causal", why="as it is timed", devices=CUDA, batch=2, heads=4, q_len=1024, causal=True),
    Case("S 1000, few kv heads", why="8 heads share 2 of keys and values", devices=CUDA, batch=3, heads=8, kv_heads=2, q_len=1000, causal=True),
    Case("S 4095", why="many tiles, and a ragged last one", devices=CUDA, batch=1, heads=2, q_len=4095, causal=True),
    Case("S 2111", why="as it is timed, with a ragged end", devices=CUDA, dtypes=(FP16, BF16), batch=2, heads=4, q_len=2111),
    Case("S 4500, causal", why="as it is timed, with a ragged end", devices=CUDA, dtypes=(FP16, BF16), batch=1, heads=5, q_len=4500, causal=True),
    Case("several groups of heads", why="more tiles than multiprocessors, of more heads than L2 holds, are taken from a counter", devices=CUDA, batch=2, heads=21, kv_heads=7, q_len=700, kv_len=8200, causal=True),
    Case("large, slices of one qkv tensor", why="strides that are no multiple of a tile", devices=CUDA, batch=2, heads=3, q_len=515, layout="fused", causal=True),
    Case("large, heads first", why="(batch, heads, seq, head_dim) in memory", devices=CUDA, batch=2, heads=3, q_len=515, layout="heads first"),
    Case("large, on a cache", why="behind the keys lies NaN, which must not be read, not even to multiply it by 0", devices=CUDA, batch=2, heads=4, kv_heads=1, q_len=129, kv_len=777, layout="cache", causal=True),
    Case("one kv head for all", why="keys and values that expand() repeats: a stride of 0", devices=CUDA, batch=2, heads=4, q_len=200, layout="expanded"),
    Case("more heads than a grid is high", why="grids end at 65,535 along y and z", devices=CUDA, dtypes=(FP32, BF16), head_dims=(64,), batch=2100, heads=32, q_len=2, kv_len=3),
    Case("more tiles than a grid is high", why="grids end at 65,535 along y and z", devices=CUDA, dtypes=(FP32, FP16), head_dims=(64,), batch=1, heads=1, q_len=1_100_000, kv_len=5),
    Case("past 2^31 elements", why="offsets need 64 bits", devices=CUDA, dtypes=(FP32, BF16), head_dims=(64, 128), batch=2, heads=2, q_len=65, layout="far"),
]  # fmt: skip

LENGTHS = (
    1,
    2,
    8,
    16,
    31,
    63,
    64,
    65,
    80,
    96,
    127,
    128,
    129,
    160,
    176,
    177,
    191,
    192,
    193,
    240,
    256,
    257,
    384,
    385,
    400,
)


def _cases(shapes):
    """Each of the shapes for each rung, dtype and head_dim that has it."""
    for shape in shapes:
        values = {
            k: v for k, v in shape.values.items() if k not in ("rungs", "dtypes", "head_dims")
        }
        for rung in RUNGS:
            if rung.number not in shape.values.get("rungs", (rung.number,)):
                continue
            for dtype in shape.values.get("dtypes", rung.dtypes):
                for head_dim in shape.values.get("head_dims", rung.head_dims):
                    if dtype not in rung.dtypes or head_dim not in rung.head_dims:
                        continue
                    name = (
                        f"rung {rung.number:02}, {shape.name}, {SHORT[dtype]}, head_dim {head_dim}"
                    )
                    yield Case(
                        name, why=shape.why, small=shape.small, devices=_devices(rung, shape.devices),
                        rung=rung.number, dtype=dtype, head_dim=head_dim, **values,
                    )  # fmt: skip


def _devices(rung, devices=("cpu", "cuda")):
    """Those of them that are here and that the rung runs on."""
    found = ["cpu"] if "cpu" in devices and rung.runs_on_cpu else []
    if "cuda" in devices and (not torch.cuda.is_available() or rung in _on_gpu()):
        found.append("cuda")
    return found


@functools.cache
def _on_gpu():
    gpu = torch.device("cuda", torch.cuda.current_device())
    return [r for r in RUNGS if rungs.why_not(r, gpu, r.dtypes[0], r.head_dims[0]) is None]


# Which rungs are built together, at the first check that needs one; `python -m task4.ladder --rung` narrows it down.
wanted = list(RUNGS)


def build_together(device):
    """Build the wanted rungs for this device at once: one after the other, at first launch, would take long."""
    _build_together(device, library.settings().check)


@functools.cache
def _build_together(device, check):
    todo = [r for r in wanted if (r.runs_on_cpu if device.type == "cpu" else r in _on_gpu())]
    with contextlib.suppress(BuildError):  # the check of the rung that does not compile says so
        builder.make([library.target_for(r.source, device) for r in todo if r.source.exists()])


# Attention -----------------------------------------------------------------------------------------------


@suite.check("attention", list(_cases(SHAPES)))
def rung_matches_float64(case, device, rng):
    build_together(device)
    if "lengths" not in case.values:
        _compare(case, rng, case.q_len, case.values.get("kv_len", case.q_len))
        return
    for i, j in rng.integers(0, len(LENGTHS), case.lengths, 2).tolist():
        try:
            _compare(case, rng, LENGTHS[i], LENGTHS[j])
        except CheckFailed as error:
            error.add_note(f"with q_len {LENGTHS[i]}, kv_len {LENGTHS[j]}")
            raise


def _compare(case, rng, q_len, kv_len):
    q, k, v = _random_qkv(case, rng, q_len, kv_len)
    options = {"causal": case.values.get("causal", False), "scale": case.values.get("factor")}
    truth = attention_float64(q, k, v, **options)
    pytorch = _pytorch(case, q, k, v, truth, rng, **options)
    suspects = {
        "the causal mask is ignored": lambda: attention_float64(q, k, v, scale=options["scale"]),
        "the scores are not scaled": lambda: attention_float64(
            q, k, v, causal=options["causal"], scale=1.0
        ),
    }
    if q_len < kv_len and options["causal"]:
        top = torch.full((q.shape[0],), q_len, dtype=torch.int32, device=q.device)
        suspects["the causal mask begins at the first key; it should end at the last"] = lambda: (
            attention_float64(q, k, v, **options, seqlens_k=top)
        )
    assert_close(
        ladder_attention(q, k, v, rung=case.rung, **options),
        truth,
        pytorch,
        axes=("batch", "row", "head", "column"),
        suspects=suspects,
    )


def _pytorch(case, q, k, v, truth, rng, **options):
    """PyTorch's own answer, as precise as the rung may be.

    A rung that rounds fp32 to tf32 is compared with fp16, because both keep 11 significant bits. One that splits fp32 in
    two parts of 16 bits keeps about 22, and so does PyTorch's fused kernel, which splits it in two of tf32. Where scores
    are in the hundreds, the error of a small case is that of the one row whose two largest scores are nearly equal; so
    the sums behind the scores are taken in several orders, and the worst result is PyTorch's.
    """
    rung = by_number(case.rung)
    if case.dtype == FP32 and rung.hopper:
        orders = [rng.uniform(0, 1, case.head_dim).argsort() for _ in range(8)]
        found = [by_fused_float32(q[..., o], k[..., o], v, **options) for o in orders]
        return max(found, key=lambda got: (got - truth).abs().max().item())
    if not rung.exact_in(case.dtype):
        q, k, v = (t.to(FP16) for t in (q, k, v))
    return attention_pytorch(q, k, v, **options).to(case.dtype)


def _random_qkv(case, rng, q_len, kv_len):
    v = case.values
    batch, heads, d = case.batch, case.heads, case.head_dim
    kv_heads, layout, scale = v.get("kv_heads", heads), v.get("layout"), v.get("scale", 1.0)

    def randn(*shape, scale=1.0):
        return rng.randn(*shape, dtype=case.dtype, scale=scale)

    if layout == "fused":
        qkv = randn(batch, q_len, 3 * heads * d)
        return [t.unflatten(-1, (heads, d)) for t in qkv.chunk(3, dim=-1)]
    if layout == "far":
        return _far_apart(randn, batch, q_len, heads, d)
    if layout == "heads first":
        shapes = ((batch, heads, q_len, d), *((batch, kv_heads, kv_len, d),) * 2)
        return [randn(*shape).transpose(1, 2) for shape in shapes]
    q = randn(batch, q_len, heads, d, scale=scale)
    if layout == "expanded":
        return q, *(randn(batch, kv_len, 1, d).expand(-1, -1, heads, -1) for _ in range(2))
    k, value = (randn(batch, kv_len, kv_heads, d, scale=s) for s in (scale, 1.0))
    if layout == "cache":
        k, value = (_begin_of_longer(t) for t in (k, value))
    if huge := v.get("huge_key"):
        k[:, huge] *= 100
    if drift := v.get("drift"):
        _let_drift(q, k, *drift)
    if cliff := v.get("cliff"):
        _raise_one_key(q, k, cliff)
    return q, k, value


def _let_drift(q, k, first, last):
    """Add ``first`` to the scores of the first key, ``last`` to those of the last, in between in proportion."""
    unit = k.shape[3] ** 0.5 / 8
    q[..., 0] = 8.0
    drift = torch.linspace(first * unit, last * unit, k.shape[1], device=k.device)
    k[..., 0] = drift[:, None].to(k.dtype)


def _begin_of_longer(t):
    """The same in a buffer that goes on, with NaN."""
    longer = t.new_full((t.shape[0], t.shape[1] + 100, *t.shape[2:]), torch.nan)
    longer[:, : t.shape[1]] = t
    return longer[:, : t.shape[1]]


def _raise_one_key(q, k, most):
    """Add 0 in the first row to ``most`` in the last to the scores of key 40, which is in the first block."""
    q[..., 0] = torch.linspace(0, 8, q.shape[1], device=q.device)[:, None].to(q.dtype)
    k[..., 0] = 0
    k[:, 40, :, 0] = most * k.shape[3] ** 0.5 / 8


def _far_apart(randn, batch, rows, heads, d):
    """Rows 2^24 elements apart, sequences 2^31; q, k and v lie beside each other."""
    width = heads * d
    store = torch.empty(
        (batch - 1 << 31) + (rows << 24) + 3 * width, dtype=randn(1).dtype, device=randn(1).device
    )
    return [
        store.as_strided((batch, rows, heads, d), (1 << 31, 1 << 24, d, 1), i * width).copy_(randn(batch, rows, heads, d))
        for i in range(3)
    ]  # fmt: skip


# How precise ---------------------------------------------------------------------------------------------


def _accuracy_cases():
    for rung in RUNGS:
        for dtype in rung.dtypes:
            if dtype == FP32 and not rung.hopper:
                continue  # rungs 1 to 6 are only held to the budget above
            for head_dim in rung.head_dims:
                for kind in INPUTS if dtype == FP32 else INPUTS[:3]:
                    for causal in (False, True):
                        mask = "causal" if causal else "not causal"
                        yield Case(
                            f"rung {rung.number:02}, {kind}, {SHORT[dtype]}, head_dim {head_dim}, {mask}",
                            why=f"at most {ALLOWED[dtype]} times the loss of {yardstick(dtype)}",
                            devices=_devices(rung, CUDA), rung=rung.number, kind=kind, dtype=dtype,
                            head_dim=head_dim, causal=causal, shape=shape_for(rung, head_dim, causal),
                        )  # fmt: skip


@suite.check("accuracy", list(_accuracy_cases()))
def rung_is_as_precise_as_pytorch(case, device, rng):
    build_together(device)
    ratios = compare(by_number(case.rung), case.kind, rng, case.shape, case.dtype, case.causal)
    counted = ratios if case.dtype == FP32 else {k: ratios[k] for k in ("largest", "rms")}
    over = {k: r for k, r in counted.items() if not r <= ALLOWED[case.dtype]}
    if over:
        told = ", ".join(f"{k} error {r:.3g} times" for k, r in over.items())
        raise CheckFailed(
            f"{told} that of {yardstick(case.dtype)}; at most {ALLOWED[case.dtype]} is allowed"
        )


# Always the same -----------------------------------------------------------------------------------------


def _repeat_cases(why):
    return [
        Case(f"rung {rung.number:02}, {SHORT[dtype]}, head_dim {head_dim}, {'causal' if causal else 'not causal'}",
             why=why, devices=_devices(rung, CUDA), rung=rung.number, dtype=dtype, head_dim=head_dim, causal=causal)
        for rung in RUNGS for dtype in rung.dtypes[-1:] for head_dim in rung.head_dims for causal in (False, True)
    ]  # fmt: skip


def _enough_for(case, rng):
    """q, k and v as they are timed, many tiles for each multiprocessor; less where a rung is slow."""
    timed = (8, 2048 // case.head_dim, 2048)
    batch, heads, seq = timed if case.rung > 10 else (4, 16, 1000) if case.rung > 6 else (1, 2, 130)
    return [rng.randn(batch, seq, heads, case.head_dim, dtype=case.dtype) for _ in range(3)]


@suite.check("repeat", _repeat_cases("1,000 launches on the same inputs give the same bits"))
def launches_repeat(case, device, rng):
    build_together(device)
    q, k, v = _enough_for(case, rng)
    first = _bits(ladder_attention(q, k, v, causal=case.causal, rung=case.rung))
    different = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(1000):
        again = _bits(ladder_attention(q, k, v, causal=case.causal, rung=case.rung))
        different += (again != first).any()
    if different:
        raise CheckFailed(f"{int(different)} of 1000 launches gave another result than the first")


@suite.check(
    "repeat", _repeat_cases("what a launch reads and writes is ordered by its stream alone")
)
def another_stream_gives_the_same(case, device, rng):
    build_together(device)
    q, k, v = _enough_for(case, rng)
    expected = _bits(ladder_attention(q, k, v, causal=case.causal, rung=case.rung))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(
            10_000_000
        )  # what is launched on another stream than this one comes too early
        later = q + 0.0
        got = ladder_attention(later, k, v, causal=case.causal, rung=case.rung)
    torch.cuda.synchronize()
    if not torch.equal(_bits(got), expected):
        raise CheckFailed("on another stream than the default one the result differs")


@suite.check("repeat", _repeat_cases("a captured launch reads its inputs when it is replayed"))
def a_cuda_graph_gives_the_same(case, device, rng):
    build_together(device)
    inputs = _enough_for(case, rng)
    run = functools.partial(ladder_attention, causal=case.causal, rung=case.rung)
    run(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(*inputs)
    for t in inputs:
        t.copy_(rng.randn(*t.shape, dtype=t.dtype))
    expected = _bits(run(*inputs))
    for _ in range(2):
        got.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        if not torch.equal(_bits(got), expected):
            raise CheckFailed(
                "replayed on new inputs, a CUDA graph gives another result than a launch"
            )


def _bits(t):
    return t.view({2: torch.int16, 4: torch.int32}[t.element_size()])


test_ladder = suite.pytest()


if __name__ == "__main__":
    suite.main()
