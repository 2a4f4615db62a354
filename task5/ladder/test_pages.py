"""Paged caches: pages in any order, shared, outside of the pool, and many of them."""

import math
import random

import pytest
import torch

from common.check.rng import new_seed
from common.tests.devices import DEVICE, of_gpus_hopper
from task5.ladder import call, decode_attention, plan
from task5.ladder.cases import RUNGS
from task5.ladder.kernels import KEYS_AS_ROWS


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_pages_outside_of_the_pool_are_not_seen(rung, head_dim):
    q, k, v = torch.randn(1, 1, 2, head_dim), *torch.randn(2, 3, 16, 2, head_dim)
    q, k, v = (t.to(DEVICE, torch.float16) for t in (q, k, v))
    table = torch.tensor([[2, 99, 0, -1, 1]], dtype=torch.int32, device=DEVICE)
    got = decode_attention(q, k, v, block_table=table, rung=rung)
    seen = decode_attention(q, k, v, block_table=table[:, ::2].contiguous(), rung=rung)
    torch.testing.assert_close(got, seen, atol=2e-3, rtol=0)
    none = decode_attention(q, k, v, block_table=torch.full_like(table, 7), rung=rung)
    assert torch.equal(none, torch.zeros_like(q))


@pytest.mark.parametrize("rung", [1, pytest.param(2, marks=of_gpus_hopper)])
def test_pages_of_a_share_of_several_pairs(monkeypatch, rung):
    """A block's share may begin with the last tiles of a pair; the next one has more pages than a warp holds at once."""
    for seed in random.Random(new_seed()).sample(range(10**9), 12):
        r = random.Random(seed)
        torch.manual_seed(seed)
        blocks = r.choice((6, 16, 264))
        monkeypatch.setattr(call, "sms_of", lambda device, blocks=blocks: blocks)
        plan.plan.cache_clear()
        batch, heads, room = r.choice((8, 24, 40)), r.choice((1, 3)), r.choice((700, 2000))
        head_dim, page_size = r.choice((128, 256)), r.choice((16, 64, 256))
        q = torch.randn(batch, 1, heads, head_dim, device=DEVICE)
        k, v = (torch.randn(batch, room, heads, head_dim, device=DEVICE) for _ in "kv")
        each = -(-room // page_size)
        table = torch.randperm(batch * each, device=DEVICE).int().view(batch, each)
        pools = []
        for t in (k, v):
            filled = torch.nn.functional.pad(t, (0, 0, 0, 0, 0, each * page_size - room))
            pool = torch.empty(batch * each, page_size, heads, head_dim, device=DEVICE)
            pool[table.flatten().long()] = filled.view(-1, page_size, heads, head_dim)
            pools.append(pool)
        lengths = torch.randint(0, room + 1, (batch,), dtype=torch.int32, device=DEVICE)
        given = dict(seqlens_k=lengths, rung=rung)
        got = decode_attention(q, *pools, block_table=table, **given)
        assert torch.equal(got, decode_attention(q, k, v, **given)), seed
    plan.plan.cache_clear()


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize(("head_dim", "heads"), [(64, 4), (128, 4), (128, 26)])
def test_sequences_of_many_pages(rung, head_dim, heads):
    """More than a warp has in its registers; a page makes no difference to the bits."""
    torch.manual_seed(new_seed())
    q = torch.randn(3, 1, heads, head_dim, device=DEVICE).half()
    k, v = (torch.randn(3, 4800, 2, head_dim, device=DEVICE).half() for _ in "kv")
    table = torch.randperm(3 * 300, device=DEVICE).int().view(3, 300)
    pools = [t.new_full((3 * 300, 16, 2, head_dim), math.nan) for t in (k, v)]
    for pool, t in zip(pools, (k, v), strict=True):
        pool[table.flatten().long()] = t.reshape(-1, 16, 2, head_dim)
    for window in (None, 2500):
        # By default pages may be read in another order, or by another rung, with other bits.
        given = dict(window=window, rung=rung, batch_invariant=rung not in (1, 2, KEYS_AS_ROWS))
        given["seqlens_k"] = torch.tensor([4801 - 10, 605, 3300], dtype=torch.int32, device=DEVICE)
        if given["batch_invariant"]:
            by_default = given | dict(batch_invariant=False)
            torch.testing.assert_close(
                decode_attention(q, *pools, block_table=table, **by_default),
                decode_attention(q, k, v, **by_default),
                atol=2e-3,
                rtol=0,
            )
        assert torch.equal(
            decode_attention(q, *pools, block_table=table, **given),
            decode_attention(q, k, v, **given),
        )


def test_sequences_share_pages():
    q, k, v = torch.randn(2, 1, 2, 64), *torch.randn(2, 3, 16, 2, 64)
    q, k, v = (t.to(DEVICE, torch.float16) for t in (q, k, v))
    table = torch.tensor([[1, 2], [1, 0]], dtype=torch.int32, device=DEVICE)
    got = decode_attention(q, k, v, block_table=table)
    for b in range(2):
        alone = [t[table[b].long()].flatten(0, 1)[None] for t in (k, v)]
        torch.testing.assert_close(
            got[b : b + 1], decode_attention(q[b : b + 1], *alone), atol=2e-3, rtol=0
        )


def test_no_pages():
    q, pages = torch.randn(2, 1, 2, 64, device=DEVICE), torch.zeros(0, 16, 2, 64, device=DEVICE)
    table = torch.zeros(2, 3, dtype=torch.int32, device=DEVICE)
    assert not decode_attention(q, pages, pages, block_table=table).any()
