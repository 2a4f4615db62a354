"""Rotary positions and the cache's new rows: against float64, task 6, and attention over what was written."""

import math
import random

import pytest
import torch

from common.build import using
from common.check import assert_close
from common.check.rng import new_seed
from common.inputs import KERNEL_DTYPES
from common.tests.devices import DEVICE, of_gpus_hopper
from task5.ladder import append, decode_attention
from task5.ladder.append import append_rope
from task6.rope import RoPE, apply_rotary_emb

WAYS = [False, pytest.param(True, marks=of_gpus_hopper)]
CASES = 60


def bits(t):
    """The tensor's memory as integers: NaN is then equal to itself."""
    return t.view(torch.int32 if t.dtype == torch.float32 else torch.int16)


def anything(*shape, dtype):
    """Random bits: infinities and every NaN among them."""
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    info = torch.iinfo(integer)
    x = torch.randint(info.min, info.max + 1, shape, dtype=torch.int64).to(integer)
    return x.view(dtype).to(DEVICE)


def int32(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


class Case:
    """Random shapes, lengths and pages, some of them outside of the cache, of the pool or of the table of angles."""

    def __init__(self, seed, dtype):
        r = random.Random(seed)
        torch.manual_seed(seed)
        self.batch, self.q_len = r.choice((1, 2, 5)), r.choice((1, 1, 2, 5, 16, 21))
        self.kv_heads, self.head_dim = r.choice((1, 2, 3)), r.choice((16, 64, 80, 128, 256))
        self.heads = self.kv_heads * r.choice((1, 2, 5))
        self.pages, self.page_size, self.max_pages = r.randint(30, 40), r.choice((1, 16, 48)), 4
        paged = r.random() < 0.5
        if not paged:
            self.pages, self.page_size, self.max_pages = self.batch, r.choice((1, 30, 70)), 1
        room = self.page_size * self.max_pages
        self.lengths = [r.randint(0, room + 3) for _ in range(self.batch)]
        if r.random() < 0.2:
            self.lengths[0] = r.choice((-(2**31), -1, 2**31 - 1))
        self.table = None
        if paged:
            table = torch.randperm(self.pages)[: self.batch * self.max_pages].view(self.batch, -1)
            for outside in (-1, self.pages, -(2**31), 2**31 - 1):
                if r.random() < 0.3:
                    table[r.randrange(self.batch), r.randrange(self.max_pages)] = outside
            self.table = int32(table.tolist())
        self.rope = None
        if r.random() < 0.8:
            self.rope = RoPE(self.head_dim, r.choice((room + 3, room + 3, 1 + room // 2)), device=DEVICE)  # fmt: skip
        # q, k and v are slices of one projection, and the two caches of one pool
        rows = self.heads + 2 * self.kv_heads
        self.qkv = torch.randn(self.batch, self.q_len, rows, self.head_dim, device=DEVICE).to(dtype)
        self.q, self.k, self.v = self.qkv.split((self.heads, self.kv_heads, self.kv_heads), 2)
        self.v.copy_(anything(*self.v.shape, dtype=dtype))
        self.pool = anything(self.pages, 2, self.page_size, self.kv_heads, self.head_dim, dtype=dtype)  # fmt: skip
        self.k_cache, self.v_cache = self.pool[:, 0], self.pool[:, 1]

    def written(self):
        """For each token that has a position: sequence, token, position, and its page and row of the cache or None."""
        for b, i in ((b, i) for b in range(self.batch) for i in range(self.q_len)):
            p = self.lengths[b] - self.q_len + i
            if p < 0 or (self.rope and p >= self.rope.max_seq_len):
                continue
            page, row = divmod(p, self.page_size)
            at = None
            if page < self.max_pages:
                page = b if self.table is None else int(self.table[b, page])
                at = (page, row) if 0 <= page < self.pages else None
            yield b, i, p, at

    def rotated(self, x, p):
        """One token's heads in float64, with the float32 table."""
        if self.rope is None:
            return x.double()
        cos, sin = self.rope.cos[p].double(), self.rope.sin[p].double()
        a, b = x.double().chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def run(self, dependent=None):
        angles = {} if self.rope is None else {"cos": self.rope.cos, "sin": self.rope.sin}
        append_rope(
            self.q, self.k, self.v, self.k_cache, self.v_cache, seqlens_k=int32(self.lengths), block_table=self.table,
            dependent=dependent, **angles,
        )  # fmt: skip

    def check(self, dependent=None):
        """Run it; every bit that is not expected to change is as before, and the rest is rounded once."""
        qkv, pool = self.qkv.clone(), self.pool.clone()
        q, k = qkv[:, :, : self.heads].clone(), qkv[:, :, self.heads : self.heads + self.kv_heads]
        self.run(dependent)
        got, truth = [], []

        def moved(now, before, exact):
            got.append(now.flatten().double())
            truth.append(exact.flatten())
            before.copy_(now)  # compared here; the rest is compared bit by bit

        for b, i, p, at in self.written():
            moved(self.q[b, i], q[b, i], self.rotated(q[b, i], p))
            if at:
                page, row = at
                moved(self.k_cache[page, row], pool[page, 0, row], self.rotated(k[b, i], p))
                pool[page, 1, row] = self.v[b, i]
        qkv[:, :, : self.heads] = q
        assert torch.equal(bits(self.pool), bits(pool))
        assert torch.equal(bits(self.qkv), bits(qkv))
        if got:
            half_ulp = 0 if self.rope is None else torch.finfo(self.q.dtype).eps / 2
            torch.testing.assert_close(
                torch.cat(got), torch.cat(truth), rtol=1.01 * half_ulp, atol=2e-6 * bool(half_ulp)
            )


@pytest.mark.parametrize("dependent", WAYS)
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_it_matches_float64_and_writes_nothing_else(dtype, dependent):
    for _ in range(CASES):
        seed = new_seed()
        try:
            Case(seed, dtype).check(dependent)
        except AssertionError as error:
            error.add_note(f"Case({seed}, {dtype})")
            raise


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_it_rotates_as_task_6_does(dtype):
    q, k, v = torch.randn(3, 2, 5, 4, 64, device=DEVICE).to(dtype)
    k_cache, v_cache = torch.zeros(2, 2, 40, 4, 64, dtype=dtype, device=DEVICE)

    def rope(dtype):
        return RoPE(64, 40, dtype=dtype, device=DEVICE)

    def expected(x, dtype):
        return apply_rotary_emb(x.to(dtype), *rope(dtype)(5, current_pos=30))

    before, angles = q.clone(), rope(torch.float32)
    append_rope(
        q, k, v, k_cache, v_cache, seqlens_k=int32([35, 35]), cos=angles.cos, sin=angles.sin
    )
    for got, x in ((q, before), (k_cache[:, 30:35], k)):
        assert_close(
            got,
            expected(x, torch.float64),
            expected(x, dtype),
            axes=("batch", "row", "head", "column"),
        )
    assert torch.equal(v_cache[:, 30:35], v)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_decode_attends_to_what_was_appended(dtype, head_dim, paged):
    heads, kv_heads, prompts, steps = 6, 2, (40, 7), (1, 1, 4)
    rope = RoPE(head_dim, 64, device=DEVICE)
    table = int32([[5, 1, 0, 3], [2, 7, 4, 6]]) if paged else None
    shape = (8, 16) if paged else (2, 64)
    k_cache, v_cache = torch.full((2, *shape, kv_heads, head_dim), math.nan, dtype=dtype, device=DEVICE)  # fmt: skip
    keys = torch.zeros(2, 64, 2, kv_heads, head_dim, dtype=dtype, device=DEVICE)
    lengths = torch.zeros_like(int32(prompts))

    def step(tokens, added):
        """Append at most so many tokens, those at negative positions being none."""
        lengths.add_(int32(added))
        qkv = torch.randn(2, tokens, heads + 2 * kv_heads, head_dim, device=DEVICE).to(dtype)
        q, k, v = qkv.split((heads, kv_heads, kv_heads), 2)
        q_0 = q.clone()
        append_rope(
            q, k, v, k_cache, v_cache, seqlens_k=lengths, cos=rope.cos, sin=rope.sin, block_table=table
        )  # fmt: skip
        for b, (end, n) in enumerate(zip(lengths.tolist(), added, strict=True)):
            keys[b, end - n : end, 0], keys[b, end - n : end, 1] = k[b, -n:], v[b, -n:]
        return q, q_0

    def attention(q_0, dtype):
        """Of the last step's queries; all is rotated in this dtype."""
        out, table = [], RoPE(head_dim, 64, dtype=dtype, device=DEVICE)
        for b, end in enumerate(lengths.tolist()):
            q = apply_rotary_emb(q_0[b : b + 1].to(dtype), *table(tokens, end - tokens))[0]
            k = apply_rotary_emb(keys[b : b + 1, :end, 0].to(dtype), *table(end))[0]
            k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, keys[b, :end, 1].to(dtype)))  # fmt: skip
            S = torch.einsum("thd,khd->htk", q, k) / math.sqrt(head_dim)
            unseen = torch.ones(tokens, end, dtype=torch.bool, device=DEVICE).triu(end - tokens + 1)
            P = S.masked_fill(unseen, -math.inf).softmax(-1)
            out.append(torch.einsum("htk,khd->thd", P, v))
        return torch.stack(out)

    step(max(prompts), prompts)
    for tokens in steps:
        q, q_0 = step(tokens, (tokens, tokens))
        got = decode_attention(q, k_cache, v_cache, seqlens_k=lengths, block_table=table)
        assert_close(
            got,
            attention(q_0, torch.float64),
            attention(q_0, dtype),
            axes=("batch", "row", "head", "column"),
        )


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("dependent", WAYS)
def test_a_captured_graph_follows_the_lengths(dependent):
    q, k, v = torch.randn(3, 2, 1, 4, 64, device=DEVICE, dtype=torch.bfloat16)
    caches = torch.zeros(2, 2, 2, 32, 4, 64, device=DEVICE, dtype=torch.bfloat16)
    rope, lengths, q_0 = RoPE(64, 32, device=DEVICE), int32([3, 9]), q.clone()

    def step(cache):
        q.copy_(q_0)
        lengths.add_(1)
        append_rope(
            q, k, v, *cache, seqlens_k=lengths, cos=rope.cos, sin=rope.sin, dependent=dependent
        )

    step(caches[0])  # builds the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(caches[0])
    for cache, one_step in ((caches[0], graph.replay), (caches[1], lambda: step(caches[1]))):
        cache.zero_()
        lengths.copy_(int32([3, 9]))
        for _ in range(5):
            one_step()
    assert caches[0].any() and torch.equal(caches[0], caches[1])


def test_nothing_to_do():
    rope = RoPE(64, 8, device=DEVICE)
    for batch, q_len in ((0, 1), (2, 0)):
        x = torch.randn(batch, q_len, 2, 64, device=DEVICE)
        cache = torch.zeros(batch, 8, 2, 64, device=DEVICE)
        lengths = int32([4] * batch)
        append_rope(x, x, x, cache, cache.clone(), seqlens_k=lengths, cos=rope.cos, sin=rope.sin)


def test_no_position_has_a_rotation():
    """cos and sin of no rows: nothing is done, as past their end."""
    q, cache, table = (
        torch.ones(shape, device=DEVICE) for shape in ((2, 1, 2, 64), (2, 8, 2, 64), (0, 32))
    )
    before = q.clone(), cache.clone()
    append_rope(q, q.clone() * 2, q.clone() * 2, cache, cache.clone(), seqlens_k=int32([4, 1]), cos=table, sin=table)  # fmt: skip
    assert torch.equal(q, before[0]) and torch.equal(cache, before[1])


def zeros(*shape, dtype=torch.float16):
    return torch.zeros(shape, dtype=dtype)


F32, I32 = {"dtype": torch.float32}, {"dtype": torch.int32}
SAME = zeros(1, 1, 2, 64)
CACHE = zeros(1, 9, 2, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": zeros(1, 1, 4, 64, dtype=torch.float64)}, "q must be .* float32 or float16 or bfloat16; got .* float64"),
        ({"q": zeros(1, 1, 256)}, r"q must be \(batch, q_len, heads, head_dim\)"),
        ({"q": zeros(1, 1, 4, 72)}, "head_dim must be a multiple of 16 up to 256; got 72"),
        ({"q": zeros(1, 1, 4, 272)}, "head_dim must be a multiple of 16 up to 256; got 272"),
        ({"q": zeros(1, 1, 3, 64)}, "kv heads must divide the query heads; got 3 and 2"),
        ({"q": zeros(1, 1, 4, 128)[..., ::2]}, "q must have a contiguous last dimension, and rows that begin"),
        ({"q": zeros(1, 1, 1, 64).expand(1, 1, 4, 64)}, "q is written in place, so it must not be expanded"),
        ({"q": zeros(384).as_strided((1, 1, 4, 64), (64, 64, 32, 1))}, r"nor have rows that overlap; got .* strides \(64, 64, 32, 1\)"),
        ({n: SAME for n in ("q", "k")}, "k must not be the memory of q, which is written in place"),
        ({n: SAME for n in ("q", "v")}, "v must not be the memory of q"),
        ({n: CACHE for n in ("k_cache", "v_cache")}, "v_cache must not be the memory of k_cache"),
        ({"k": zeros(1, 2, 2, 64)}, r"k must be \(1, 1, kv_heads, 64\) float16 on cpu; got \(1, 2, 2, 64\)"),
        ({"k": zeros(1, 1, 2, 64, **F32)}, "k must be .* float16 .* got .* float32"),
        ({"v": zeros(1, 1, 1, 64)}, r"v must be \(1, 1, 2, 64\)"),
        ({"v": zeros(1, 1, 2, 68)[..., 2:-2]}, "v must have a contiguous last dimension, and rows that begin"),
        ({"k_cache": zeros(2, 9, 2, 64)}, r"k_cache must be \(1, max_seq, 2, 64\)"),
        ({"k_cache": zeros(1, 0, 2, 64), "v_cache": zeros(1, 0, 2, 64)}, "k_cache must have room for a key"),
        ({"k_cache": zeros(1, 1, 2, 64).expand(1, 9, 2, 64)}, "k_cache is written in place, so it must not be expanded"),
        ({"v_cache": zeros(1, 8, 2, 64)}, r"v_cache must be \(1, 9, 2, 64\)"),
        ({"v_cache": zeros(1, 9, 2, 64).to("meta")}, "v_cache must be .* on cpu; got .* on meta"),
        ({"seqlens_k": zeros(2, **I32)}, r"seqlens_k must be \(1,\) int32"),
        ({"seqlens_k": None}, r"seqlens_k must be \(1,\) int32 on cpu; got NoneType"),
        ({"block_table": zeros(1, 2, dtype=torch.int64)}, "block_table must be .* int32 .* got .* int64"),
        ({"block_table": zeros(2, 2, **I32)}, r"block_table must be \(1, max_pages\)"),
        ({"block_table": zeros(1, 4, **I32)[:, ::2]}, "block_table must be contiguous"),
        ({"sin": None}, "cos and sin must be given both, or neither"),
        ({"cos": zeros(9, 64, **F32)}, r"cos must be \(positions, 32\) float32 on cpu; got \(9, 64\)"),
        ({"cos": zeros(9, 32)}, "cos must be .* float32 .* got .* float16"),
        ({"cos": zeros(9, 64, **F32)[:, ::2]}, "cos must be contiguous"),
        ({"cos": zeros(9 * 32 + 1, **F32)[1:].view(9, 32)}, "cos must have .* rows that begin at multiples of 16 bytes"),
        ({"sin": zeros(8, 32, **F32)}, r"sin must be \(9, 32\)"),
    ],
)  # fmt: skip
def test_bad_input(change, message):
    with pytest.raises(ValueError, match=message):
        append_rope(**good_input() | change)


def good_input():
    return {
        "q": zeros(1, 1, 4, 64), "k": zeros(1, 1, 2, 64), "v": zeros(1, 1, 2, 64), "k_cache": zeros(1, 9, 2, 64),
        "v_cache": zeros(1, 9, 2, 64), "seqlens_k": zeros(1, **I32),
        "cos": zeros(9, 32, **F32), "sin": zeros(9, 32, **F32),
    }  # fmt: skip


def test_of_gpus_a_dependent_launch_is_for_hopper(monkeypatch):
    monkeypatch.setattr(append, "is_hopper", lambda device: False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with pytest.raises(ValueError, match="of GPUs, dependent=True runs on Hopper alone"):
        append_rope(**good_input(), dependent=True)


@pytest.mark.skipif(DEVICE == "cuda", reason="the check build is the CPU's")
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_the_check_build_finds_nothing(dtype):
    for order in ("forward", "random"):
        with using(check=True, order=order, seed=1):
            for seed in range(6):
                Case(seed, dtype).check()
