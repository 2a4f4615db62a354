"""Each kernel on the same inputs, by the CPU layer and by the GPU, in one run."""

from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

from common.check import Rng, assert_close
from common.check.attention import attention_float64, attention_pytorch
from common.check.rng import new_seed
from common.products import TensorCoreLinear
from common.tests.devices import DEVICE, HOPPER
from task2 import attention as task2
from task4.attention import TILES, flash_attention, tile_fits
from task4.ladder import RUNGS, ladder_attention
from task5.attention import flash_attention_decode, update_kv_cache
from task5.ladder import append_rope, decode_attention
from task5.ladder.chunk import chunk_attention
from task5.ladder.kernels import BY_LENGTH, IN_16_BITS, OF_EIGHT_WARPS
from task5.ladder.kernels import RUNGS as DECODE_RUNGS
from task6.generation import Config, Decoder, Weights
from task6.generation.elementwise import add_rms_norm, swiglu
from task6.generation.peers import llama
from task6.generation.product import product
from task6.generation.weights import Layer
from task6.rope import RoPE, apply_rotary_emb

SEED = new_seed()


def softmax(rng, device):
    x = rng.randn(5, 300, scale=3.0)
    return task2.test_batched_softmax(x.to(device), -1), x.double().softmax(-1), x.softmax(-1)


def gemm_nt(rng, device):
    a, b = rng.randn(2, 40, 50), rng.randn(2, 33, 50)
    return (
        task2.test_batched_GEMM_NT(a.to(device), b.to(device)),
        a.double() @ b.double().mT,
        a @ b.mT,
    )


def gemm_nn(rng, device):
    a, b = rng.randn(2, 40, 50), rng.randn(2, 50, 33)
    return task2.test_batched_GEMM_NN(a.to(device), b.to(device)), a.double() @ b.double(), a @ b


def naive_attention(rng, device):
    q, k, v = (rng.randn(2, 40, 2 * 32) for _ in range(3))
    got = task2.custom_attention(*(t.to(device) for t in (q, k, v)), 2, causal=True)
    heads = [t.unflatten(-1, (2, 32)) for t in (q, k, v)]
    truth, pytorch = (
        f(*heads, causal=True).flatten(2) for f in (attention_float64, attention_pytorch)
    )
    return got, truth, pytorch


def _flash(rng, device, d, tile, dtype=torch.float32):
    q, k, v = (rng.randn(1, 140, 2, d, dtype=dtype) for _ in range(3))
    got = flash_attention(*(t.to(device) for t in (q, k, v)), causal=True, tile=tile)
    return got, attention_float64(q, k, v, causal=True), attention_pytorch(q, k, v, causal=True)


def _decode(rng, device, num_splits, dtype=torch.float32):
    q, k, v = (rng.randn(2, n, 2, 64, dtype=dtype) for n in (1, 100, 100))
    got = flash_attention_decode(*(t.to(device) for t in (q, k, v)), num_splits=num_splits)
    return got, attention_float64(q, k, v), attention_pytorch(q, k, v)


def _decode_rung(rng, device, rung, dtype, d, heads, keys):
    """Pages in another order, two kv heads, two new tokens of each sequence; enough keys for several blocks."""
    q, k, v = (rng.randn(2, n, h, d, dtype=dtype) for n, h in ((2, heads), (keys, 2), (keys, 2)))
    pages = torch.arange(keys // 16, dtype=torch.int32).view(-1, 2).flip(0).T.contiguous()
    pools = [torch.empty(keys // 16, 32, 2, d, dtype=dtype) for _ in "kv"]
    for pool, t in zip(pools, (k, v), strict=True):
        pool[pages.flatten().long()] = t.view(-1, 32, 2, d)
    given = (t.to(device) for t in (q, *pools))
    got = decode_attention(*given, block_table=pages.to(device), new_keys=2, rung=rung)
    k, v = (t.repeat_interleave(heads // 2, 2) for t in (k, v))
    return got, attention_float64(q, k, v, causal=True), attention_pytorch(q, k, v, causal=True)


def _decode_by_length(rng, device, *, rung):
    """One long sequence, whose pairs are cut, so that some clusters of an H200 take two items."""
    lengths = [16, 40, 2048, 5]
    q, k, v = (rng.randn(4, n, 70, 64, dtype=torch.float16) for n in (1, 2048, 2048))
    given = (t.to(device) for t in (q, k, v, torch.tensor(lengths, dtype=torch.int32)))
    q_there, k_there, v_there, lengths_there = given
    got = decode_attention(q_there, k_there, v_there, seqlens_k=lengths_there, rung=rung)

    def of_each(attention):
        one = [slice(b, b + 1) for b in range(4)]
        return torch.cat(
            [attention(q[b], k[b, :n], v[b, :n]) for b, n in zip(one, lengths, strict=True)]
        )

    return got, of_each(attention_float64), of_each(attention_pytorch)


def _chunk(rng, device, split):
    q, k, v = (
        rng.randn(1, n, h, 64, dtype=torch.float16) for n, h in ((70, 6), (600, 2), (600, 2))
    )
    got = chunk_attention(*(t.to(device) for t in (q, k, v)), causal=True, split=split)
    k, v = (t.repeat_interleave(3, 2) for t in (k, v))
    return got, attention_float64(q, k, v, causal=True), attention_pytorch(q, k, v, causal=True)


def _decode_as_a_chunk(rng, device, paged=False, batch_invariant=False):
    """Behind a sequence's keys there is anything. In pages of 32, the last one first."""
    lengths = [600, 130]
    q, k, v = (
        rng.randn(2, n, h, 64, dtype=torch.float16) for n, h in ((5, 16), (640, 2), (640, 2))
    )
    for b, n in enumerate(lengths):
        k[b, n:] = v[b, n:] = torch.nan
    given = (t.to(device) for t in (q, k, v, torch.tensor(lengths, dtype=torch.int32)))
    q_there, k_there, v_there, lengths_there = given
    options = dict(causal=True, seqlens_k=lengths_there, batch_invariant=batch_invariant)
    if batch_invariant:
        options["split"] = (2, 1)
    if paged:
        k_there, v_there = (t.view(40, 32, 2, 64).flip(0) for t in (k_there, v_there))
        pages = torch.arange(39, -1, -1, dtype=torch.int32, device=device)
        options["block_table"] = pages.view(2, 20)
    got = chunk_attention(q_there, k_there, v_there, **options)

    def of_each(attention):
        return torch.cat(
            [
                attention(
                    q[b : b + 1],
                    *(t[b : b + 1, :n].repeat_interleave(8, 2) for t in (k, v)),
                    causal=True,
                )
                for b, n in enumerate(lengths)
            ]
        )

    return got, of_each(attention_float64), of_each(attention_pytorch)


def _product(rng, device, dtype, K):
    """Of a decode step: a norm before it, the residual behind it."""
    sizes, scale = ((4, K), (80, K), (K,), (4, 80)), K**-0.5
    x, w, norm, residual = (
        rng.randn(*size, dtype=dtype, scale=s)
        for size, s in zip(sizes, (1, scale, 1, 1), strict=True)
    )
    there = (t.to(device) for t in (x, w, norm, residual))
    x_there, w_there, norm_there, residual_there = there
    got = product(x_there, w_there, norm=norm_there, residual=residual_there)

    def by_pytorch(x, w, norm, residual):
        return residual + F.rms_norm(x, norm.shape, norm, 1e-6) @ w.T

    truth = by_pytorch(*(t.double() for t in (x, w, norm, residual)))
    return got, truth, by_pytorch(x, w, norm, residual)


def _norm_and_swiglu(rng, device, dtype):
    """Of rows that are not next to each other."""
    x, delta, norm = (rng.randn(*size, dtype=dtype) for size in ((5, 720), (5, 640), (640,)))
    x_there, delta_there, norm_there = (t.to(device, copy=True) for t in (x, delta, norm))
    normed, gated = (torch.empty(5, n, dtype=dtype, device=device) for n in (640, 320))
    add_rms_norm(x_there[:, 48:688], delta_there, norm_there, normed, 1e-5)
    swiglu(normed, gated)

    def by_pytorch(x, delta, norm):
        x = torch.cat((x[:, :48], x[:, 48:688] + delta, x[:, 688:]), 1)
        normed = F.rms_norm(x[:, 48:688], norm.shape, norm, 1e-5)
        gate, up = normed.chunk(2, 1)
        return torch.cat((x, normed, F.silu(gate) * up), 1)

    truth = by_pytorch(*(t.double() for t in (x, delta, norm)))
    return torch.cat((x_there, normed, gated), 1), truth, by_pytorch(x, delta, norm)


def _step(rng, device, dtype, batch):
    """In one launch, behind a prompt that the CPU has read."""
    config = Config(2, 192, 12, 2, 64, 320, 100)
    torch.manual_seed(SEED)
    weights = Weights.random(config, dtype=dtype)
    prompt = torch.randint(config.vocab, (batch, 70))
    reader = Decoder(weights, batch, 80, persistent=False)
    reader.prefill(prompt)
    layers = (Layer(**{n: t.to(device) for n, t in vars(x).items()}) for x in weights.layers)
    others = (t.to(device) for t in (weights.norm, weights.lm_head))
    there = Weights(config, weights.embedding.to(device), tuple(layers), *others)
    decoder = Decoder(there, batch, 80, persistent=True)
    for name in ("k_cache", "v_cache", "tokens", "lengths"):
        getattr(decoder, name).copy_(getattr(reader, name))
    decoder.one_launch()
    read = torch.cat((prompt, reader.tokens), 1)
    model = llama(weights)
    with torch.no_grad():
        pytorch, truth = (m(read).logits[:, -1] for m in (model, deepcopy(model).double()))
    return decoder.logits, truth, pytorch


def _tensor_core_product(rng, device):
    x, w = rng.randn(300, 520), rng.randn(400, 520)
    got = TensorCoreLinear()(x.to(device), w.to(device))
    return got, x.double() @ w.double().T, x @ w.T


def _append(rng, device, dependent):
    q, k, v = (rng.randn(2, 1, h, 64) for h in (4, 2, 2))
    caches = [rng.randn(2, 20, 2, 64) for _ in "kv"]
    lengths, rope = torch.tensor([20, 7], dtype=torch.int32), RoPE(64, max_seq_len=20)
    q_there, *caches_there = (t.to(device, copy=True) for t in (q, *caches))
    append_rope(
        q_there, k.to(device), v.to(device), *caches_there, seqlens_k=lengths.to(device),
        cos=rope.cos.to(device), sin=rope.sin.to(device), dependent=dependent,
    )  # fmt: skip
    for b, n in enumerate(lengths.tolist()):
        cos, sin = (t[n - 1 : n] for t in (rope.cos, rope.sin))
        q[b], caches[0][b, n - 1 : n] = (apply_rotary_emb(t[b, None], cos, sin)[0] for t in (q, k))
        caches[1][b, n - 1] = v[b, 0]
    got, truth = (
        torch.cat([t.flatten() for t in ts]) for ts in ((q_there, *caches_there), (q, *caches))
    )
    return got, truth.double(), truth


# initcheck does not see what TMA stores, and would report these rungs' outputs as uninitialised. So here they begin as NaN
# copied from the host, which it does see, and what a rung does not write is found by the comparison.
BY_TMA = [r for r in RUNGS if "persistent.cuh" in r.source.read_text()]  # whose epilogue stores so


def _nan_from_host(size, dtype, device):
    return torch.full(size, float("nan"), dtype=dtype).to(device)


def _rung(rng, device, rung):
    q, k, v = (rng.randn(1, 140, 2, 64, dtype=rung.dtypes[0]) for _ in range(3))
    with mock.patch.object(torch, "empty", _nan_from_host) if rung in BY_TMA else nullcontext():
        got = ladder_attention(*(t.to(device) for t in (q, k, v)), causal=True, rung=rung.number)
    # Where float32 is rounded to tf32, PyTorch's float16 has as many digits.
    as_precise = (t if rung.exact_in(t.dtype) else t.half() for t in (q, k, v))
    pytorch = attention_pytorch(*as_precise, causal=True).to(q.dtype)
    return got, attention_float64(q, k, v, causal=True), pytorch


THEY_RUN = HOPPER or DEVICE == "cpu"  # the kernels that are for Hopper, of all GPUs
# On an H200 float32 with head_dim 256 has clusters of 16 blocks where there are 512 keys: gpu_evidence looks for the name.
DECODE_CASES = [
    *((torch.float32, d, heads, 640, "") for d, heads in ((64, 2), (128, 8))),
    *(
        (torch.float32, 256, 20, keys, more)
        for keys, more in ((480, ""), (640, ", clusters of 16"))
    ),
    *((torch.float16, d, heads, 640, "") for d, heads in ((64, 2), (256, 20))),
    *((torch.bfloat16, 128, heads, 640, "") for heads in (8, 40)),
]


def _runs_here(rung):
    if not torch.cuda.is_available():
        return True
    return rung.why_not(torch.device("cuda", 0), rung.dtypes[0], 64) is None


def cache_update(rng, device):
    caches = [rng.randn(2, 20, 64) for _ in range(2)]
    new = [rng.randn(2, 3, 64) for _ in range(2)]
    on_device = [t.to(device, copy=True) for t in caches]
    update_kv_cache(*on_device, *(t.to(device) for t in new), 7)
    for cache, rows in zip(caches, new, strict=True):
        cache[:, 7:10] = rows
    truth = torch.stack(caches)
    return torch.stack(on_device), truth.double(), truth


KERNELS = {
    "task2 softmax": softmax,
    "task2 GEMM_NT": gemm_nt,
    "task2 GEMM_NN": gemm_nn,
    "task2 attention": naive_attention,
    **{
        f"task4 {B_r} x {B_c}, head_dim {d}": lambda rng, device, d=d, tile=(B_r, B_c): _flash(
            rng, device, d, tile
        )
        for d in TILES
        for B_r, B_c in TILES[d]
        if not torch.cuda.is_available() or tile_fits((B_r, B_c), d, torch.device("cuda"))
    },
    "task4 float16": lambda rng, device: _flash(rng, device, 64, None, torch.float16),
    "task4 bfloat16": lambda rng, device: _flash(rng, device, 128, None, torch.bfloat16),
    **{
        f"ladder rung {rung.number}": lambda rng, device, rung=rung: _rung(rng, device, rung)
        for rung in RUNGS
        if _runs_here(rung)
    },
    "task5 cache update": cache_update,
    "task5 decode": lambda rng, device: _decode(rng, device, 1),
    "task5 decode, 3 splits": lambda rng, device: _decode(rng, device, 3),
    "task5 decode, bfloat16": lambda rng, device: _decode(rng, device, 1, torch.bfloat16),
    **{
        f"decode rung {rung}, {str(dtype)[6:]}, head_dim {d}, {heads} heads{more}": partial(
            _decode_rung, rung=rung, dtype=dtype, d=d, heads=heads, keys=keys
        )
        for rung in DECODE_RUNGS
        if rung == 1 or THEY_RUN
        for dtype, d, heads, keys, more in DECODE_CASES
        if (rung not in IN_16_BITS or dtype != torch.float32)
        and (rung not in OF_EIGHT_WARPS or d <= 128)
    },
    **{
        f"decode by length, rung {rung}": partial(_decode_by_length, rung=rung)
        for rung in BY_LENGTH
        if THEY_RUN
    },
    **(
        {
            "chunk": partial(_chunk, split=None),
            "chunk, clusters": partial(_chunk, split=(2, 2)),
            "decode as a chunk": _decode_as_a_chunk,
            "decode as a chunk, pages": partial(_decode_as_a_chunk, paged=True),
            "decode as a chunk, batch-invariant": partial(_decode_as_a_chunk, batch_invariant=True),
        }
        if THEY_RUN
        else {}
    ),
    **{
        f"product {str(dtype)[6:]}, {K} columns": partial(_product, dtype=dtype, K=K)
        for dtype in (torch.float32, torch.bfloat16)
        for K in (264, 320)  # 320: whole lines of memory, so on a Hopper w comes by TMA
    },
    **{
        f"norm and swiglu {str(dtype)[6:]}": partial(_norm_and_swiglu, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    },
    **{
        f"step {str(dtype)[6:]}, batch {batch}": partial(_step, dtype=dtype, batch=batch)
        for dtype in (torch.float32, torch.bfloat16)
        for batch in (1, 3)
        if THEY_RUN
    },
    **({"product on tensor cores": _tensor_core_product} if HOPPER else {}),
    **{
        f"append{', dependent' * dependent}": partial(_append, dependent=dependent)
        for dependent in (False, True)
        if THEY_RUN or not dependent
    },
}


GPU_ONLY = {"product on tensor cores"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", KERNELS)
def test_cpu_and_gpu_give_the_same(name, record_property):
    results = []
    for device in ("cuda",) if name in GPU_ONLY else ("cpu", "cuda"):
        got, truth, pytorch = KERNELS[name](Rng(SEED, "cpu", name), device)
        axes = [f"axis {i}" for i in range(truth.dim())]
        assert_close(got.cpu(), truth, pytorch, axes=axes)
        results.append(got.cpu().double())
    if name in GPU_ONLY:  # compared with float64 only
        return
    difference = (results[0] - results[1]).abs().max().item()
    record_property("largest difference between CPU and GPU", difference)
    print(f"{name}: largest difference between CPU and GPU {difference:.3g}")
