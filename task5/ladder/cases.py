"""Random calls of decode, and what is right: what the tests of the rungs share."""

import math
import random

import pytest
import torch

from common.check import assert_close
from common.tests.devices import DEVICE, of_gpus_hopper
from task5.ladder import decode_attention
from task5.ladder.kernels import IN_16_BITS, OF_EIGHT_WARPS
from task5.ladder.kernels import RUNGS as ALL_RUNGS

RUNGS = [1, *(pytest.param(n, marks=of_gpus_hopper) for n in ALL_RUNGS[1:]), None]
HALVES = (torch.float16, torch.bfloat16)
LENGTHS = (1, 63, 64, 65, 200, 333, 700) if DEVICE == "cpu" else (1, 64, 65, 333, 700, 2500, 5000)
CASES = 40 if DEVICE == "cpu" else 200
PAGE_SIZES = (16, 32, 48, 64, 256)
HEAD_DIMS = (64, 128, 128, 256)


class Case:
    """Random shapes, lengths and options. Keys and values that no token sees are NaN."""

    WINDOWS = (None, None, 1, 17, 100)
    PADDED = True  # some sequences, on the left

    def __init__(self, seed, dtypes=(torch.float32, *HALVES), head_dims=HEAD_DIMS):
        self.rng = r = random.Random(seed)
        torch.manual_seed(seed)
        self.choose(r, head_dims)
        dtype = r.choice(dtypes)
        self.window = r.choice(self.WINDOWS)
        self.new_keys = r.choice((None, 0, self.q_len, 100))
        most = self.room if self.PADDED else 0
        self.leftpad = [r.choice((0, 0, 0, r.randint(0, most))) for _ in range(self.batch)]

        def randn(length, heads):
            return torch.randn(self.batch, length, heads, self.head_dim, device=DEVICE).to(dtype)

        self.q, self.k, self.v = (
            randn(self.q_len, self.heads),
            *(randn(self.room, self.kv_heads) for _ in "kv"),
        )
        for b, (begin, end) in enumerate(zip(self.leftpad, self.lengths, strict=True)):
            for t in (self.k, self.v):
                t[b, end:] = math.nan
                t[b, :begin] = math.nan

    def choose(self, r, head_dims):
        """Shapes and lengths."""
        self.batch, self.kv_heads = r.choice((1, 2, 3)), r.choice((1, 2, 3))
        self.heads, self.q_len = (
            self.kv_heads * r.choice((1, 2, 4, 5, 8, 16)),
            r.choice((1, 1, 1, 2, 5, 16)),
        )
        self.head_dim, self.room = r.choice(head_dims), max(self.q_len, r.choice(LENGTHS))
        self.lengths = [r.randint(0, self.room) for _ in range(self.batch)]

    def expected(self, dtype):
        """softmax(scale q k^T) v, sequence by sequence."""
        out = torch.zeros_like(self.q, dtype=dtype)
        group = self.heads // self.kv_heads
        for b, (begin, end) in enumerate(zip(self.leftpad, self.lengths, strict=True)):
            q = self.q[b].to(dtype)
            k, v = (
                t[b, :end].nan_to_num(0).to(dtype).repeat_interleave(group, 1)
                for t in (self.k, self.v)
            )
            j = torch.arange(end, device=DEVICE)
            p = end - self.q_len + torch.arange(self.q_len, device=DEVICE)[:, None]
            seen = (j <= p) & (j >= begin) & (j > p - (self.window or self.room + 1))
            scores = torch.einsum("thd,khd->htk", q, k) / math.sqrt(self.head_dim)
            P = scores.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num(0)
            out[b] = torch.einsum("htk,khd->thd", P, v)
        return out

    def check(self, got):
        """AssertionError if a result is not as close to float64 as it has to be."""
        expected = self.expected(torch.float64), self.expected(got.dtype)
        assert_close(got, *expected, axes=("batch", "row", "head", "column"))

    def run(self, sequences=None, *, paged=False, **options):
        """The kernel's result for these sequences, in this order."""
        q, k, v, given = self.arguments(sequences, paged=paged)
        if DEVICE == "cuda":
            torch.cuda.synchronize()  # new_keys is a promise: the launch ahead writes no older ones
        return decode_attention(q, k, v, new_keys=self.new_keys, **given | options)

    def arguments(self, sequences=None, *, paged=False):
        """q, k, v and what else a call has of these sequences, in this order."""
        chosen = list(range(self.batch)) if sequences is None else sequences
        given = dict(window=self.window)
        for name, values in (("seqlens_k", self.lengths), ("leftpad_k", self.leftpad)):
            given[name] = torch.tensor(
                [values[b] for b in chosen], dtype=torch.int32, device=DEVICE
            )
        k, v = self.k[chosen], self.v[chosen]
        if paged:
            k, v, given["block_table"] = self.pages(k, v)
        return self.q[chosen], k, v, given

    def pages(self, k, v):
        """The caches as pages in a random order, among others full of NaN."""
        size = self.rng.choice(PAGE_SIZES)
        per_sequence = -(-self.room // size)
        table = torch.randperm(len(k) * per_sequence + 3)[: len(k) * per_sequence].view(len(k), -1)
        pools = []
        for t in (k, v):
            pool = t.new_full((len(k) * per_sequence + 3, size, *t.shape[2:]), math.nan)
            padded = torch.nn.functional.pad(
                t, (0, 0, 0, 0, 0, per_sequence * size - self.room), value=math.nan
            )
            pool[table.flatten()] = padded.view(-1, size, *t.shape[2:])
            pools.append(pool)
        return *pools, table.to(device=DEVICE, dtype=torch.int32)


def case_for(rung, seed):
    given = {"dtypes": HALVES} if rung in IN_16_BITS else {}
    return Case(seed, head_dims=head_dims_of(rung), **given)


def head_dims_of(rung):
    return (64, 128) if rung in OF_EIGHT_WARPS else HEAD_DIMS
