"""Task 5: your KV-cache kernels, checked at every step and timed over a prompt of 1,024 and 100 tokens.

python -m task5.test [--cache | --decode | --splits | --layer] [--check] [--no-timing]
"""

import contextlib
from dataclasses import dataclass

import torch

from common.check import (
    AttentionCase,
    Case,
    CheckFailed,
    Suite,
    Watch,
    assert_close,
    strided_output,
)
from common.check.attention import (
    attention_float64,
    attention_pytorch,
    equal_splits,
    hide_invisible,
    mistakes,
    references,
)
from common.check.attention_case import lay_out
from common.check.poison import hide_
from common.timing import Backend, Benchmark, all_alike, measure, sdpa
from task5 import attention
from task5.attention import CustomFlashAttention, flash_attention_decode, update_kv_cache

suite = Suite(
    "task5",
    title="KV cache and decode",
    sources=(
        "task5/attention.py",
        "task5/attention_kernel.cu",
        "task4/attention.py",
        "task4/attention_kernel.cu",
        "task4/prefill.py",
        "common/layer.py",
    ),
)

HALF, BFLOAT = torch.float16, torch.bfloat16
DECODE_LAUNCHER = "task5 flash_attention_decode"
CACHE = [
    Case("first row", why="the start of the cache", small=True, batch=1, n=1, hidden=64, max_seq_len=8, pos=0),
    Case("last row", why="the end of the cache", small=True, batch=2, n=1, hidden=64, max_seq_len=8, pos=7),
    Case("a prompt", why="many rows at once", batch=2, n=20, hidden=200, max_seq_len=32, pos=0),
    Case("a chunk in the middle", why="rows around it stay as they are", small=True, batch=2, n=5, hidden=130, max_seq_len=32, pos=9),
    Case("fills the cache", why="n = max_seq_len", batch=1, n=16, hidden=64, max_seq_len=16, pos=0),
    Case("one position per sequence", why="positions on the device", small=True, batch=3, n=2, hidden=64, max_seq_len=16, pos=(0, 14, 5)),
    Case("positions past the end", why="rows that do not fit are not written", small=True, batch=3, n=2, hidden=64, max_seq_len=16, pos=(-1, 15, 16)),
    Case("slices of one qkv tensor", why="rows of k and v are 3 hidden_dim apart", small=True, batch=2, n=3, hidden=64, max_seq_len=8, pos=2, fused=True),
    Case("caches with gaps", why="k_cache, v_cache, k and v each have strides of their own", small=True, batch=2, n=3, hidden=64, max_seq_len=8, pos=2, layout="gaps"),
    Case("past 2^31 elements", why="offsets need 64 bits", batch=2, n=3, hidden=64, max_seq_len=8, pos=2, layout="far"),
    Case("float16", why="16-bit caches", batch=2, n=3, hidden=64, max_seq_len=8, pos=2, dtype=HALF),
    Case("bfloat16", why="16-bit caches", batch=2, n=3, hidden=64, max_seq_len=8, pos=2, dtype=BFLOAT),
]  # fmt: skip


@suite.check("cache", CACHE)
def update_writes_these_rows_only(case, device, rng):
    k_cache, v_cache, k, v, behind = _cache_and_rows(case, rng)
    before = [t.clone() for t in behind]
    expected = [k_cache.clone(), v_cache.clone()]
    positions = case.pos if isinstance(case.pos, tuple) else (case.pos,) * case.batch
    for b, pos in enumerate(positions):
        for i in range(case.n):
            if 0 <= pos + i < case.max_seq_len:
                expected[0][b, pos + i], expected[1][b, pos + i] = k[b, i], v[b, i]
    untouched = k_cache.clone()
    pos = (
        torch.tensor(case.pos, dtype=torch.int32, device=device)
        if isinstance(case.pos, tuple)
        else case.pos
    )
    with Watch() as did:
        update_kv_cache(k_cache, v_cache, k, v, pos)
    for name, got, wanted in (("k_cache", k_cache, expected[0]), ("v_cache", v_cache, expected[1])):
        if not torch.equal(got, wanted):
            b, row = (got != wanted).any(-1).nonzero()[0].tolist()
            raise CheckFailed(
                f"{name} differs first at batch {b}, row {row}: {int((got != wanted).sum())} elements. "
                f"Rows {case.pos} ... + {case.n} of each sequence should be the new ones, the others untouched",
                not_written=torch.equal(k_cache, untouched),
            )
    for name, got, wanted in zip(("k_cache", "v_cache"), behind, before, strict=False):
        if not torch.equal(got.view(torch.int32), wanted.view(torch.int32)):
            raise CheckFailed(f"something was written into the gaps between the rows of {name}")
    did.expect({"task5 update_kv_cache": 1}, memory=0)


def _cache_and_rows(case, rng):
    """k_cache, v_cache, k and v; and what of the caches' memory is behind each row."""
    dtype, layout = case.values.get("dtype", torch.float32), case.values.get("layout")
    sizes = (case.max_seq_len, case.max_seq_len, case.n, case.n)
    tensors = [rng.randn(case.batch, length, case.hidden, dtype=dtype) for length in sizes]
    if case.values.get("fused"):
        tensors[2:] = rng.randn(case.batch, case.n, 3 * case.hidden, dtype=dtype).chunk(3, -1)[1:]
    if layout == "far":
        tensors = [lay_out("far", *[t.unsqueeze(2)] * 3)[0].squeeze(2) for t in tensors]
    if layout != "gaps":
        return *tensors, []
    wide = [
        hide_(t.new_empty(case.batch, t.shape[1] + i, case.hidden + 4 * i + 4))
        for i, t in enumerate(tensors)
    ]
    views = [w[:, : t.shape[1], : case.hidden].copy_(t) for w, t in zip(wide, tensors, strict=True)]
    return *views, [w[..., case.hidden :] for w in wide[:2]]


@dataclass(frozen=True, kw_only=True, repr=False)
class DecodeCase(AttentionCase):
    """One query on a cache.

    Args:
        num_splits: into which the keys are split; None: as the rule chooses.
        gaps: the kernel's output has gaps between its heads and sequences.
    """

    q_len: int = 1
    num_splits: int | None = 1
    gaps: bool = False


DECODE = [
    DecodeCase("one key", why="the output is v", small=True, kv_len=1, head_dim=64),
    DecodeCase("fewer keys than threads", why="most groups of threads have none", small=True, kv_len=5, head_dim=64),
    DecodeCase("ragged", why="the last round is not full", small=True, kv_len=77, head_dim=64),
    DecodeCase("head_dim 128", why="one key fills a warp", small=True, kv_len=70, head_dim=128),
    DecodeCase("head_dim 80", why="shorter than the 128 it is padded to", kv_len=70, head_dim=80),
    DecodeCase("head_dim 33", why="rows that no vector load can read", small=True, kv_len=40, head_dim=33),
    DecodeCase("longer", why="many rounds, rescaled each time", batch=1, kv_len=1000, head_dim=64),
    DecodeCase("batch", why="a block for each sequence and head", batch=4, heads=3, kv_len=100, head_dim=32),
    DecodeCase("different lengths", why="each sequence reads its own number of keys", small=True, batch=3, kv_len=90, head_dim=64, seqlens=(40, 90, 1)),
    DecodeCase("left padding", why="keys to skip at the start", small=True, batch=3, kv_len=60, head_dim=64, leftpad=(20, 59, 0)),
    DecodeCase("a sequence without keys", why="gives 0, not NaN", batch=2, kv_len=30, head_dim=64, seqlens=(0, 30)),
    DecodeCase("no keys", why="an empty cache gives 0", kv_len=0, head_dim=64),
    DecodeCase("grouped queries", why="8 heads share 2 of keys and values", heads=8, kv_heads=2, kv_len=50, head_dim=64),
    # 64 rows: many have all their weight on one key, and 4 rows may all be such, without any float32 loss
    DecodeCase("large scores", why="scores in the hundreds", batch=4, heads=16, kv_len=64, head_dim=64, magnitude=10.0),
    DecodeCase("equal keys", why="every weight is 1 / kv_len", kv_len=64, head_dim=64, magnitude=0.0),
    DecodeCase("part of a cache", why="a view of the first rows of a longer cache, with NaN behind", small=True, kv_len=40, layout="cache", head_dim=64),
    DecodeCase("different strides", why="q, k and v each have strides of their own", small=True, kv_len=40, head_dim=64, layout="apart"),
    DecodeCase("odd alignment", why="rows that start at odd addresses", small=True, kv_len=40, head_dim=64, layout="odd"),
    DecodeCase("odd alignment of v", why="rows of v alone start at odd addresses", small=True, kv_len=40, head_dim=64, layout="odd v"),
    DecodeCase("an output with gaps", why="out has strides of its own", small=True, heads=3, kv_len=40, head_dim=64, gaps=True),
    DecodeCase("past 2^31 elements", why="offsets need 64 bits", devices=("cpu",), kv_len=5, head_dim=64, layout="far"),
    DecodeCase("another scale", why="scale need not be 1 / sqrt(head_dim)", small=True, kv_len=40, head_dim=64, scale=0.7),
    DecodeCase("very negative scores", why="scores of about -650: exp of each alone is 0, and a mask of -100 is none", batch=4, kv_len=41, head_dim=64, opposed=9.0, magnitude=0.2, seqlens=(37, 41, 1, 20)),
    DecodeCase("float16, products above 65504", why="q k^T does not fit float16", batch=4, heads=16, kv_len=40, head_dim=64, dtype=HALF, magnitude=60.0),
    DecodeCase("bfloat16, many keys", why="sums kept in 16 bits stop growing", batch=1, heads=1, kv_len=5000, head_dim=16, dtype=BFLOAT, magnitude=0.0, v_mean=20.0),
    DecodeCase("float16, many keys", why="sums kept in 16 bits stop growing", batch=1, heads=1, kv_len=40000, head_dim=16, dtype=HALF, magnitude=0.0, v_mean=0.7),
    DecodeCase("float16", why="16-bit cache, fp32 inside", small=True, kv_len=70, head_dim=64, dtype=HALF),
    DecodeCase("bfloat16", why="16-bit cache, fp32 inside", kv_len=70, head_dim=128, dtype=BFLOAT),
    DecodeCase("course size", why="B16, 32 heads, 1,024 keys", devices=("cuda",), batch=16, heads=32, kv_len=1024, head_dim=128),
]  # fmt: skip

SPLITS = [
    DecodeCase("2 splits", why="two blocks share the keys, and are merged", small=True, kv_len=60, head_dim=64, num_splits=2),
    DecodeCase("7 splits", why="the last split is shorter", kv_len=100, head_dim=128, num_splits=7),
    DecodeCase("more splits than full", why="splits without any key", small=True, kv_len=9, head_dim=64, num_splits=7),
    DecodeCase("splits past a sequence's end", why="some splits see no key of some sequences", batch=3, kv_len=90, head_dim=64, seqlens=(40, 90, 1), num_splits=3),
    DecodeCase("splits and padding", why="some splits are all padding", batch=2, kv_len=90, head_dim=64, leftpad=(50, 89), num_splits=3),
    DecodeCase("splits of head_dim 80", why="partial results of other widths", small=True, kv_len=40, head_dim=80, num_splits=3),
    DecodeCase("splits of head_dim 33", why="partial results of odd widths", kv_len=40, head_dim=33, num_splits=3),
    DecodeCase("splits without a sequence", why="all splits of a sequence are empty: 0, not NaN", small=True, batch=2, kv_len=30, head_dim=64, seqlens=(0, 30), num_splits=3),
    DecodeCase("splits with large scores", why="2^lse of a split alone does not fit a float", batch=4, heads=16, kv_len=64, head_dim=64, magnitude=10.0, num_splits=3),
    DecodeCase("splits with very negative scores", why="2^lse of every split is 0", kv_len=40, head_dim=64, opposed=9.0, magnitude=0.2, num_splits=3),
    DecodeCase("splits with different strides", why="each split begins at its own row", kv_len=40, head_dim=64, layout="apart", num_splits=3),
    DecodeCase("splits, an output with gaps", why="out has strides of its own", heads=3, kv_len=40, head_dim=64, gaps=True, num_splits=3),
    DecodeCase("bfloat16", why="partial results stay fp32", kv_len=70, head_dim=128, dtype=BFLOAT, num_splits=2),
    DecodeCase("long", why="the splits that the rule chooses", devices=("cuda",), batch=1, heads=32, kv_len=30000, head_dim=128, num_splits=None),
]  # fmt: skip


@suite.check("decode", DECODE)
def decode_matches_float64(case, device, rng):
    compare_decode(case, device, rng)


@suite.check("splits", SPLITS, optional=True)
def splits_match_float64(case, device, rng):
    compare_decode(case, device, rng)


def compare_decode(case, device, rng):
    q, k, v = case.qkv(rng)
    visible = case.visible(device)
    del visible["causal"]  # the newest token sees every key
    truth, pytorch = references(q, k, v, large_scores=case.large_scores, **visible)
    inputs = q, k.clone(), v.clone()
    hide_invisible(k, v, **visible)
    gaps = strided_output("out") if case.gaps else contextlib.nullcontext()
    with gaps, Watch() as did:
        got = flash_attention_decode(q, k, v, **visible, num_splits=case.num_splits)
    assert_close(
        got,
        truth,
        pytorch,
        axes=("batch", "row", "head", "column"),
        suspects=mistakes(*inputs, **visible) | _wrong_merge(case, *inputs),
    )
    splits = case.num_splits or attention.choose_num_splits(
        case.batch * case.heads, case.kv_len, attention.sm_count(device)
    )
    partial = 4 * case.batch * case.heads * splits * (case.head_dim + 1) if splits > 1 else 0
    did.expect({DECODE_LAUNCHER: bool(case.kv_len)}, memory=got.nbytes + partial)


def _wrong_merge(case, q, k, v):
    if case.num_splits in (None, 1) or case.seqlens or case.leftpad:
        return {}
    merged = equal_splits(q, k, v, case.num_splits, scale=case.scale)
    return {"the splits are merged by their mean, without the weights 2^(lse_s - lse)": merged}


RULE = [
    Case("one sequence", why="32 blocks leave most of a GPU idle", blocks=32, kv_len=1024, splits=7),
    Case("one long sequence", why="more keys, more splits worth having", blocks=32, kv_len=32768, splits=15),
    Case("nearly a wave", why="0.97 of a wave: splitting would start a second", blocks=512, kv_len=1024, splits=1),
    Case("many blocks", why="the chip is full without", blocks=2048, kv_len=4096, splits=1),
    Case("few keys", why="not enough for two splits", blocks=1, kv_len=200, splits=1),
]  # fmt: skip


@suite.check("splits", RULE, kernels=False, optional=True)
def splits_follow_the_rule(case, device, rng):
    chosen = attention.choose_num_splits(case.blocks, case.kv_len, sms=132)
    if chosen != case.splits:
        raise CheckFailed(
            f"the rule gives {case.splits} splits on 132 SMs; got {chosen}",
            not_written=chosen == 1
            and "task5/attention.py: choose_num_splits is not written yet (it returns 1)",
        )


def _projected(attend, x, parameters, heads, **visible):
    """The whole layer by definition: x and its parameters in one dtype."""
    q, k, v = (
        (x @ parameters[f"w_{n}"].T + parameters[f"b_{n}"]).unflatten(-1, (heads, -1))
        for n in "qkv"
    )
    return attend(q, k, v, **visible).flatten(2) @ parameters["w_o"].T + parameters["b_o"]


GENERATION = [
    Case("prompt and tokens", why="prefill, then one token at a time", small=True, batch=2, chunks=(12, 1, 1, 1), heads=2, hidden=64),
    Case("tokens only", why="an empty cache, one token at a time", batch=2, chunks=(1, 1, 1, 1), heads=2, hidden=64),
    Case("prompt in chunks", why="a chunk sees the cache before it and itself, causally", batch=2, chunks=(20, 33, 7, 1, 1), heads=2, hidden=64),
    Case("course size", why="1,024 tokens and 100 more, each one checked", devices=("cuda",), batch=1, chunks=(1024,) + (1,) * 100, heads=32, hidden=4096),
    Case("laptop size", why="100 tokens after a prompt, each one checked", devices=("cpu",), batch=1, chunks=(40,) + (1,) * 100, heads=2, hidden=64),
]  # fmt: skip


@suite.check("layer", GENERATION)
def every_step_matches_float64(case, device, rng):
    names = [*(f"w_{n}" for n in "qkvo"), *(f"b_{n}" for n in "qkvo")]
    h = case.hidden
    parameters = {n: rng.randn(*((h, h) if n[0] == "w" else (h,)), scale=h**-0.5) for n in names}
    layer = CustomFlashAttention(
        *(parameters[n] for n in names[:4]), h, case.heads, *(parameters[n] for n in names[4:])
    )
    total = sum(case.chunks)
    x = rng.randn(case.batch, total, h)
    caches = [
        rng.randn(case.batch, total + 3, h) for _ in range(2)
    ]  # old contents must not be seen
    exact = _projected(
        attention_float64,
        x.double(),
        {n: p.double() for n, p in parameters.items()},
        case.heads,
        causal=True,
    )
    pytorch = _projected(attention_pytorch, x, parameters, case.heads, causal=True)
    pos = 0
    for n in case.chunks:
        step = slice(pos, pos + n)
        with Watch() as did:
            got = layer(x[:, step], caches, decode=n == 1, current_pos=pos, causal=True)
        # The whole sequence decides the budget: PyTorch's loss in a single row can be 0 by luck.
        everything = pytorch.clone()
        everything[:, step] = got
        assert_close(everything, exact, pytorch, axes=("batch", "token", "column"))
        if n == 1 or device.type == "cpu":  # on a GPU a prompt may get another kernel
            attend = DECODE_LAUNCHER if n == 1 else "task4 flash_attention"
            splits = attention.choose_num_splits(
                case.batch * case.heads, pos + n, attention.sm_count(device)
            )
            # the projections, the kernel's output, partial results of the splits: but not the cache
            memory = 16 * got.nbytes + 4 * case.batch * splits * (h + case.heads)
            did.expect({"task5 update_kv_cache": 1, attend: 1}, memory=memory, torch_computes=True)
            did.expect_projections_only("task5/attention.py")
        pos += n


# Speed ---------------------------------------------------------------------------------------------------

EFFICIENT = f"PyTorch with a cache ({Backend.EFFICIENT})"
RECOMPUTE = "recomputing everything (torch.nn.MultiheadAttention)"
PROMPT, TOKENS, HIDDEN, HEADS = 1024, 100, 4096, 32


@suite.benchmark("generation", fields=["TTFT", "TBT"])
def generation_speed(device, record):
    batch, total = 4, PROMPT + TOKENS
    # Its weights require gradients, as they do by default: without, PyTorch's layer is 6 times slower in float32
    mha = torch.nn.MultiheadAttention(
        HIDDEN, HEADS, bias=False, batch_first=True, device=device
    ).eval()
    for weight in mha.parameters():
        weight.data.normal_(std=HIDDEN**-0.5)
    layer = CustomFlashAttention(*mha.in_proj_weight.chunk(3), mha.out_proj.weight, HIDDEN, HEADS)
    x = torch.randn(batch, total, HIDDEN, device=device)
    ours, theirs = (
        [torch.zeros(batch, total, HIDDEN, device=device) for _ in range(2)] for _ in range(2)
    )
    mask = torch.ones(total, total, dtype=torch.bool, device=device).triu(1)

    def with_cache(pos, n):
        q, k, v = layer.project_qkv(x[:, pos : pos + n])
        theirs[0][:, pos : pos + n], theirs[1][:, pos : pos + n] = k, v
        q, k, v = (
            t.unflatten(-1, (HEADS, -1))
            for t in (q, theirs[0][:, : pos + n], theirs[1][:, : pos + n])
        )
        o = sdpa(q, k, v, backend=Backend.EFFICIENT, causal=n > 1)
        return layer.project_output(o.flatten(2))

    def recompute(end):
        return mha(
            x[:, :end], x[:, :end], x[:, :end], attn_mask=mask[:end, :end], need_weights=False
        )[0]

    def tokens(step):
        return torch.cat([step(pos)[:, -1:] for pos in range(PROMPT, total)], dim=1)

    with torch.inference_mode():
        layer(x[:, :PROMPT], ours, causal=True)
        with Watch() as did:
            layer(x[:, PROMPT : PROMPT + 1], ours, decode=True, current_pos=PROMPT)
        launches = {"task5 update_kv_cache": 1, DECODE_LAUNCHER: 1}
        did.expect(launches, memory=None, torch_computes=True)  # as in what is timed
        first = measure(
            {
                "ours": lambda: layer(x[:, :PROMPT], ours, causal=True),
                EFFICIENT: lambda: with_cache(0, PROMPT),
                RECOMPUTE: lambda: recompute(PROMPT),
            },
            check=all_alike,
            include_host=True,
        )
        later = measure(
            {
                "ours": lambda: tokens(
                    lambda pos: layer(x[:, pos : pos + 1], ours, decode=True, current_pos=pos)
                ),
                EFFICIENT: lambda: tokens(lambda pos: with_cache(pos, 1)),
                RECOMPUTE: lambda: tokens(lambda pos: recompute(pos + 1)),
            },
            check=all_alike,
            include_host=True,
            seconds=5,
        )
    later = {name: timing.per(TOKENS) for name, timing in later.items()}
    shape = f"one layer, B{batch}, prompt {PROMPT}, {TOKENS} tokens, hidden {HIDDEN}, {HEADS} heads"
    record.add(Benchmark("TTFT", shape, x.dtype, first.pop("ours"), first))
    record.add(Benchmark("TBT", shape, x.dtype, later.pop("ours"), later))


DECODE_SPEEDS = {
    "decode B16, 1,024 keys": (16, 1024, torch.float32),
    "decode B1, 1,024 keys": (1, 1024, torch.float32),
    "decode B1, 32,768 keys": (1, 32768, torch.float32),
    "decode B16, 1,024 keys, bfloat16": (16, 1024, BFLOAT),
}


@suite.benchmark("decode kernel alone", fields=list(DECODE_SPEEDS))
def decode_speed(device, record):
    d = HIDDEN // HEADS
    for name, (batch, kv_len, dtype) in DECODE_SPEEDS.items():
        q, k, v = (
            torch.randn(batch, n, HEADS, d, device=device).to(dtype) for n in (1, kv_len, kv_len)
        )
        times = _time_decode(q, k, v)
        splits = attention.choose_num_splits(batch * HEADS, kv_len, attention.sm_count(device))
        record.add(
            Benchmark(
                name,
                f"B{batch}, {HEADS} heads, head_dim {d}, {kv_len} keys, {splits} splits",
                q.dtype,
                times.pop("ours"),
                times,
                bytes=2 * k.numel() * k.element_size(),
            )
        )


def _time_decode(q, k, v):
    with Watch() as did:
        flash_attention_decode(q, k, v)
    did.expect({DECODE_LAUNCHER: 1}, memory=None)
    return measure(
        {
            "ours": lambda: flash_attention_decode(q, k, v),
            Backend.EFFICIENT: lambda: sdpa(q, k, v, backend=Backend.EFFICIENT),
        },
        check=all_alike,
        seconds=1,
    )


test_task5 = suite.pytest()

if __name__ == "__main__":
    suite.main()
