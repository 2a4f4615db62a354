"""Decode's rungs against float64: caches, groups, windows, several tokens, lengths."""

import math
import random

import pytest
import torch
import torch.nn.functional as F

from common.check.rng import new_seed
from common.tests.devices import DEVICE, of_gpus_hopper
from task5.ladder import call, decode_attention, kernels, plan
from task5.ladder.cases import CASES, HALVES, RUNGS, case_for
from task5.ladder.gpu import ON_CPU
from task5.ladder.kernels import BY_LENGTH, MORE_ROWS, MORE_ROWS_BY_LENGTH, OF_EIGHT_WARPS, ONE_TREE


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("part", range(4))
def test_it_matches_float64(rung, part):
    for seed in range(CASES // 4):
        seed = new_seed()
        case = case_for(rung, seed)
        options = dict(paged=case.rng.random() < 0.5, batch_invariant=case.rng.random() < 0.3)
        got = case.run(rung=rung, **options)
        try:
            case.check(got)
        except AssertionError as error:
            error.add_note(f"Case({seed}), {options}")
            raise


@pytest.mark.parametrize("rung", RUNGS)
def test_a_cache_that_expand_repeats(rung):
    """All sequences read one cache: its batch has a stride of 0."""
    torch.manual_seed(new_seed())
    q = torch.randn(3, 1, 8, 64, device=DEVICE).half()
    k, v = (torch.randn(1, 300, 2, 64, device=DEVICE).half() for _ in "kv")
    lengths = torch.tensor([300, 1, 77], dtype=torch.int32, device=DEVICE)
    repeated = (t.expand(3, -1, -1, -1) for t in (k, v))
    got = decode_attention(q, *repeated, seqlens_k=lengths, rung=rung)
    copies = (t.repeat(3, 1, 1, 1) for t in (k, v))
    assert torch.equal(got, decode_attention(q, *copies, seqlens_k=lengths, rung=rung))


@pytest.mark.parametrize("rung", RUNGS)
def test_more_sequences_than_a_warp_has_lanes(rung):
    torch.manual_seed(new_seed())
    q = torch.randn(70, 1, 2, 64, device=DEVICE).half()
    k, v = (torch.randn(70, 90, 1, 64, device=DEVICE).half() for _ in "kv")
    lengths = torch.randint(0, 91, (70,), dtype=torch.int32, device=DEVICE)
    got = [decode_attention(q, k, v, seqlens_k=lengths, rung=rung) for _ in range(5)]
    for b in range(70):
        alone = (t[b : b + 1] for t in (q, k, v))
        one = decode_attention(*alone, seqlens_k=lengths[b : b + 1])
        assert all((out[b] - one[0]).abs().max() < 2e-3 for out in got), b


@of_gpus_hopper
@pytest.mark.parametrize("rung", [rung for rung in ONE_TREE if rung not in BY_LENGTH])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_several_clusters_share_a_pair_or_blocks_that_are_none(monkeypatch, rung, batch_invariant):
    """As of long caches of few heads; the same bits as from a cluster, where a call is batch-invariant."""
    torch.manual_seed(seed := new_seed())
    kinds = [(torch.float16, 64), (torch.float16, 128), (torch.float32, 128)] + [
        (torch.float16, 256)
    ] * (rung not in OF_EIGHT_WARPS)
    r = random.Random(seed)
    dtype, head_dim = r.choice(kinds)
    q = torch.randn(2, 1, 4, head_dim, device=DEVICE).to(dtype)
    pages = 563 if head_dim > 64 else 1126  # of 16 keys: leaves for several clusters
    k, v = (torch.randn(2, 16 * pages, 1, head_dim, device=DEVICE).to(dtype) for _ in "kv")
    table = torch.randperm(2 * pages, device=DEVICE).int().view(2, pages)
    pools = [torch.empty_like(t).view(-1, 16, 1, head_dim) for t in (k, v)]
    for pool, t in zip(pools, (k, v), strict=True):
        pool[table.flatten().long()] = t.view(-1, 16, 1, head_dim)
    given = dict(rung=rung, batch_invariant=batch_invariant)
    given["seqlens_k"] = torch.tensor([16 * pages - 8, 77], dtype=torch.int32, device=DEVICE)
    monkeypatch.setattr(call, "sms_of", lambda device: 64)
    plan.plan.cache_clear()
    launch, slots = kernels.Kernels.launch, []

    def watched(self, name, **arguments):
        slots.append(arguments["slots"])
        return launch(self, name, **arguments)

    monkeypatch.setattr(kernels.Kernels, "launch", watched)
    paged = r.random() < 0.5
    if paged:
        given["block_table"] = table
    caches = pools if paged else (k, v)
    monkeypatch.setattr(plan, "is_spread", lambda *_: False)
    one = decode_attention(q, *caches, **given)
    assert slots.pop() == 0
    ways = []
    if rung in plan.SPREAD:
        ways.append(dict(is_spread=lambda *_: True))
    ways.append(dict(is_spread=lambda *_: False, LONG_BYTES=0, LONG_BYTES_COMPUTE_BOUND=0))
    ways[-1]["_of_a_cluster"] = lambda *_: 1
    several = []
    for way in ways:
        for name, value in way.items():
            monkeypatch.setattr(plan, name, value)
        plan.plan.cache_clear()
        several += [decode_attention(q, *caches, **given) for _ in range(2)]  # counters are 0 again
        plan.plan.cache_clear()
        assert min(slots) > 2
        assert torch.equal(*several[-2:])
        if batch_invariant:
            assert torch.equal(several[-1], one)
    truth = decode_attention(q.float(), k.float(), v.float(), seqlens_k=given["seqlens_k"], rung=1)
    for got in several:
        assert (got - truth).abs().max() < (1e-5 if dtype == torch.float32 else 2e-3)


@of_gpus_hopper
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_more_rows_than_a_product_has_columns(batch_invariant):
    """One read of the keys for 32 rows, by one cluster of a pair or several; by length the same bits."""
    r = random.Random(seed := new_seed())
    for _ in range(CASES // 6):
        batch, kv_heads = r.choice(((1, 1), (1, 3), (2, 2), (3, 1), (5, 4), (1, 70)))
        q_len, group = r.choice(((1, 17), (1, 32), (1, 40), (5, 4), (16, 2), (13, 5), (16, 8)))
        room, dtype, head_dim = r.choice((300, 5000, 9000)), r.choice(HALVES), r.choice((64, 128))
        torch.manual_seed(r.randrange(10**9))
        q = torch.randn(batch, q_len, kv_heads * group, head_dim, device=DEVICE).to(dtype)
        k, v = (torch.randn(batch, room, kv_heads, head_dim, device=DEVICE).to(dtype) for _ in "kv")
        lengths = torch.randint(q_len, room + 1, (batch,), dtype=torch.int32, device=DEVICE)
        for b, n in enumerate(lengths.tolist()):
            k[b, n:] = v[b, n:] = math.nan
        given = dict(seqlens_k=lengths, window=r.choice((None, None, 700)), new_keys=0)
        truth = decode_attention(q.float(), k.float(), v.float(), **given, rung=1)
        one, *others = (
            decode_attention(q, k, v, **given, rung=rung, batch_invariant=batch_invariant)
            for rung in (MORE_ROWS, MORE_ROWS, MORE_ROWS_BY_LENGTH, MORE_ROWS_BY_LENGTH, None)
        )
        sizes = f"seed {seed}: {tuple(q.shape)} {tuple(k.shape)} {dtype}"
        for got in (one, *others):
            assert (got - truth).abs().max() < (2e-2 if dtype == torch.bfloat16 else 2e-3), sizes
        assert torch.equal(others[0], one) and torch.equal(others[1], others[2]), sizes
        if batch_invariant:
            assert torch.equal(others[1], one), sizes


def test_lengths_past_the_cache_count_as_all_of_it_and_negative_ones_as_0():
    q, k, v = (torch.randn(2, n, 2, 64, device=DEVICE).half() for n in (1, 50, 50))

    def run(*, length, skipped=0):
        lengths, skip = (
            torch.full((2,), n, dtype=torch.int32, device=DEVICE) for n in (length, skipped)
        )
        return decode_attention(q, k, v, seqlens_k=lengths, leftpad_k=skip)

    all_seen = decode_attention(q, k, v)
    assert torch.equal(run(length=1000), all_seen)
    assert torch.equal(run(length=50, skipped=-9), all_seen)
    for nothing in (
        run(length=-3),
        run(length=0),
        run(length=9, skipped=9),
        run(length=9, skipped=99),
    ):
        assert not nothing.any()


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize(("dtype", "size"), [(torch.float16, 2e4), (torch.bfloat16, 1e15)])
def test_scores_may_be_as_large_as_float32_holds(rung, dtype, size):
    """A row's largest exponent is 0, however its product with the scale is rounded."""
    torch.manual_seed(new_seed())
    q = (size * torch.randn(2, 2, 6, 128, device=DEVICE).clamp(-3, 3)).to(dtype)
    k = (size * torch.randn(2, 333, 2, 128, device=DEVICE).clamp(-3, 3)).to(dtype)
    v = torch.randn(2, 333, 2, 128, device=DEVICE).to(dtype)
    got = decode_attention(q, k, v, rung=rung)
    groups = (t.double().transpose(1, 2) for t in (q[:, 1:], k, v))
    truth = F.scaled_dot_product_attention(*groups, enable_gqa=True).transpose(1, 2)
    assert (got[:, 1:] - truth).abs().max() < 1e-2


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("q_len", [4, 16])
def test_a_share_of_several_chunks_has_room(rung, q_len):
    """A batch-invariant call counts chunks of tiles, so that a block may have many tiles in few shares."""
    torch.manual_seed(new_seed())
    q = torch.randn(2, q_len, 8, 64, device=DEVICE).half()
    for room in (99, 256, 1153):
        k, v = (torch.randn(2, room, 1, 64, device=DEVICE).half() for _ in "kv")
        got = decode_attention(q, k, v, batch_invariant=True, rung=rung)
        assert torch.equal(
            got[1:], decode_attention(q[1:], k[1:], v[1:], batch_invariant=True, rung=rung)
        )
        truth = decode_attention(q.float(), k.float(), v.float())
        assert (got - truth).abs().max() < 2e-3


def test_a_window_counts_as_a_short_cache(monkeypatch):
    """For the rung, and for how many blocks there are: of 2 tokens with a window of 17 keys, 18."""
    seen = []
    for name in ("fastest", "plan"):
        real, at = getattr(call, name), 2 if name == "fastest" else 3

        def watched(*given, real=real, at=at, **options):
            seen.append(given[at])
            return real(*given, **options)

        monkeypatch.setattr(call, name, watched)
    q, k = torch.randn(1, 2, 4, 64, device=DEVICE), torch.randn(1, 300, 2, 64, device=DEVICE)
    for window in (17, 1000, None):
        decode_attention(q, k, k, window=window)
    assert seen == [18, 18, 300, 300, 300, 300]


def test_a_chunk_gets_all_that_a_call_has(monkeypatch):
    monkeypatch.setattr(call, "is_hopper", lambda device: True)
    taken = []
    monkeypatch.setattr(call, "chunk_attention", lambda *_, **given: taken.append(given))
    q = torch.zeros(1, 16, 4, 64, dtype=torch.float16, device=DEVICE)
    pages = torch.zeros(1, 64, 1, 64, dtype=torch.float16, device=DEVICE)
    lengths = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    table = torch.zeros(1, 40_000, dtype=torch.int32, device=DEVICE)
    given = dict(seqlens_k=lengths, leftpad_k=lengths, block_table=table, window=1 << 20, scale=0.5)
    decode_attention(q, pages, pages, new_keys=16, **given)
    decode_attention(q, pages, pages, new_keys=16, batch_invariant=True, **given)
    assert taken == [dict(causal=True, batch_invariant=b, **given) for b in (False, True)]


@pytest.mark.parametrize(("batch", "room"), [(0, 9), (2, 0)])
def test_nothing_to_do(batch, room):
    q, k, v = (torch.randn(batch, n, 2, 64, device=DEVICE).half() for n in (1, room, room))
    assert torch.equal(decode_attention(q, k, v), torch.zeros_like(q))


@pytest.mark.skipif(DEVICE == "cuda", reason="the check build is the CPU's")
@pytest.mark.parametrize("rung", [1, 3, 5, 6, 7, 8])
def test_the_check_build_finds_nothing(rung):
    from common.build import using

    for _ in range(8):
        seed = new_seed()
        case = case_for(rung, seed)
        for order in ("forward", "random"):
            with using(check=True, order=order, seed=1, limit=120):
                case.run(paged=order == "random", batch_invariant=seed % 2 == 0, rung=rung)
    assert ON_CPU > 1  # several blocks share a pair
