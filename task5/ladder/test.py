"""Decode's rungs against float64: contiguous and paged caches, groups, windows, several tokens, the same bits in any batch."""

import math
import random

import pytest
import torch

from common.check import assert_close
from common.check.rng import new_seed
from common.tests.devices import DEVICE, of_gpus_hopper
from task5.ladder import call, decode_attention, plan
from task5.ladder.call import ON_CPU
from task5.ladder.plan import BY_LENGTH, KEYS_AS_ROWS, OF_EIGHT_WARPS, ONE_TREE
from task5.ladder.plan import RUNGS as ALL_RUNGS

RUNGS = [1, *(pytest.param(n, marks=of_gpus_hopper) for n in ALL_RUNGS[1:]), None]
HALVES = (torch.float16, torch.bfloat16)
LENGTHS = (1, 63, 64, 65, 200, 333, 700) if DEVICE == "cpu" else (1, 64, 65, 333, 700, 2500, 5000)
CASES = 40 if DEVICE == "cpu" else 200
PAGE_SIZES = (16, 32, 48, 64, 256)
HEAD_DIMS = (64, 128, 128, 256)


class Case:
    """Random shapes, lengths and options. Keys and values that no token sees are NaN."""

    WINDOWS = (None, None, 1, 17, 100)

    def __init__(self, seed, dtypes=(torch.float32, *HALVES), head_dims=HEAD_DIMS):
        self.rng = r = random.Random(seed)
        torch.manual_seed(seed)
        self.choose(r, head_dims)
        dtype = r.choice(dtypes)
        self.window = r.choice(self.WINDOWS)
        self.new_keys = r.choice((None, 0, self.q_len, 100))
        self.leftpad = [r.choice((0, 0, 0, r.randint(0, self.room))) for _ in range(self.batch)]

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
        chosen = list(range(self.batch)) if sequences is None else sequences
        given = dict(window=self.window, new_keys=self.new_keys) | options
        for name, values in (("seqlens_k", self.lengths), ("leftpad_k", self.leftpad)):
            given[name] = torch.tensor(
                [values[b] for b in chosen], dtype=torch.int32, device=DEVICE
            )
        k, v = self.k[chosen], self.v[chosen]
        if paged:
            k, v, given["block_table"] = self.pages(k, v)
        q = self.q[chosen]
        if DEVICE == "cuda":
            torch.cuda.synchronize()  # new_keys is a promise: the launch ahead writes no older ones
        return decode_attention(q, k, v, **given)

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
    if rung == KEYS_AS_ROWS:
        return Case(seed, HALVES)
    return Case(seed, head_dims=(64, 128) if rung in OF_EIGHT_WARPS else HEAD_DIMS)


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
def test_a_sequence_has_the_same_bits_in_any_batch(rung):
    for _ in range(CASES // 4):
        seed = new_seed()
        case = case_for(rung, seed)
        whole = case.run(rung=rung, batch_invariant=True)
        some = case.rng.sample(range(case.batch), case.rng.randint(1, case.batch))
        for paged in (False, True):
            again = case.run(some, rung=rung, batch_invariant=True, paged=paged)
            assert torch.equal(again, whole[some]), f"Case({seed}), {some}, {paged=}"


@pytest.fixture
def small_hopper(monkeypatch):
    """As if the device were a Hopper GPU with 8 SMs, and few keys were many: the fastest rung may be any."""
    monkeypatch.setattr(call, "is_hopper", lambda device: True)
    monkeypatch.setattr(call, "sms_of", lambda device: 8)
    few = dict(FEW_KEYS=60, MEDIUM_KEYS=150, MOST_KEYS=600, SHORT_CACHE=32, LONG_CACHE=128)
    few |= dict(LONG_BYTES=4e5, LONG_BYTES_COMPUTE_BOUND=1e5, UNEVEN_BYTES=3e5)
    for name, value in few.items():
        monkeypatch.setattr(plan, name, value)
    plan.plan.cache_clear()
    yield
    plan.plan.cache_clear()


@of_gpus_hopper
@pytest.mark.parametrize("part", range(2))
def test_the_fastest_rung_matches_float64_in_any_batch(small_hopper, part):
    for _ in range(CASES // 4):
        seed = new_seed()
        case = Case(seed)
        paged = case.rng.random() < 0.5
        got = case.run(paged=paged)
        whole = case.run(batch_invariant=True)
        some = case.rng.sample(range(case.batch), case.rng.randint(1, case.batch))
        again = case.run(some, batch_invariant=True, paged=paged)
        try:
            case.check(got)
            assert torch.equal(again, whole[some])
        except AssertionError as error:
            error.add_note(f"Case({seed}), {some}, {paged=}")
            raise


@of_gpus_hopper
def test_rungs_that_share_a_tree_have_the_same_bits():
    """Four warps a block or eight: of a batch-invariant call the leaves are the same."""
    for _ in range(CASES // 4):
        seed = new_seed()
        case = case_for(OF_EIGHT_WARPS[0], seed)
        one, *others = (case.run(rung=rung, batch_invariant=True) for rung in ONE_TREE)
        assert all(torch.equal(other, one) for other in others), f"Case({seed})"


def test_room_makes_no_difference_to_the_bits():
    """A sequence in a long cache takes another rung than in a short one, and has the same bits."""
    torch.manual_seed(new_seed())
    q = torch.randn(2, 1, 8, 128, device=DEVICE).half()
    k, v = (torch.randn(2, 40_000, 2, 128, device=DEVICE).half() for _ in "kv")
    lengths = torch.tensor([900, 333], dtype=torch.int32, device=DEVICE)
    in_all, *others = (
        decode_attention(q, k[:, :room], v[:, :room], seqlens_k=lengths, batch_invariant=True)
        for room in (40_000, 9000, 1500, 900)
    )
    assert all(torch.equal(other, in_all) for other in others)


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


@of_gpus_hopper
@pytest.mark.parametrize("rung", [rung for rung in ONE_TREE if rung != BY_LENGTH])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_blocks_that_are_no_cluster_share_a_pair(monkeypatch, rung, batch_invariant):
    """As of long caches of few heads; the same bits as from a cluster, where a call is batch-invariant."""
    torch.manual_seed(seed := new_seed())
    kinds = [(torch.float16, 64), (torch.float16, 128), (torch.float32, 128)] + [
        (torch.float16, 256)
    ] * (rung not in OF_EIGHT_WARPS)
    r = random.Random(seed)
    dtype, head_dim = r.choice(kinds)
    q = torch.randn(2, 1, 4, head_dim, device=DEVICE).to(dtype)
    k, v = (torch.randn(2, 9008, 1, head_dim, device=DEVICE).to(dtype) for _ in "kv")
    table = torch.randperm(2 * 563, device=DEVICE).int().view(2, 563)
    pools = [torch.empty_like(t).view(-1, 16, 1, head_dim) for t in (k, v)]
    for pool, t in zip(pools, (k, v), strict=True):
        pool[table.flatten().long()] = t.view(-1, 16, 1, head_dim)
    given = dict(rung=rung, batch_invariant=batch_invariant)
    given["seqlens_k"] = torch.tensor([9000, 77], dtype=torch.int32, device=DEVICE)
    monkeypatch.setattr(call, "sms_of", lambda device: 64)
    plan.plan.cache_clear()
    launch, slots = plan.Kernels.launch, []

    def watched(self, name, **arguments):
        slots.append(arguments["slots"])
        return launch(self, name, **arguments)

    monkeypatch.setattr(plan.Kernels, "launch", watched)
    paged = r.random() < 0.5
    if paged:
        given["block_table"] = table
    caches = pools if paged else (k, v)
    one = decode_attention(q, *caches, **given)
    assert slots.pop() == 0
    monkeypatch.setattr(plan, "LONG_BYTES", 0)
    monkeypatch.setattr(plan, "LONG_BYTES_COMPUTE_BOUND", 0)
    monkeypatch.setattr(plan, "_of_a_cluster", lambda *_: 1)
    plan.plan.cache_clear()
    several = [decode_attention(q, *caches, **given) for _ in range(2)]  # the counters are 0 again
    plan.plan.cache_clear()
    assert min(slots) > 2
    assert torch.equal(*several)
    if batch_invariant:
        assert torch.equal(several[0], one)
    truth = decode_attention(q.float(), k.float(), v.float(), seqlens_k=given["seqlens_k"], rung=1)
    assert (several[0] - truth).abs().max() < (1e-5 if dtype == torch.float32 else 2e-3)


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


@of_gpus_hopper
@pytest.mark.parametrize("rung", ONE_TREE)
def test_the_most_leaves(monkeypatch, rung):
    """A long sequence is cut into twice as many; one block's warps then have 16 or 32 of them."""
    torch.manual_seed(new_seed())
    q, k, v = (
        torch.randn(1, n, h, 128, device=DEVICE) for n, h in ((1, 4), (70_000, 1), (70_000, 1))
    )
    results = []
    for bytes_, of_a_cluster in ((math.inf, 1), (0, 1), (math.inf, 4)):
        monkeypatch.setattr(call, "sms_of", lambda device: 64)
        monkeypatch.setattr(plan, "LONG_BYTES_COMPUTE_BOUND", bytes_)
        monkeypatch.setattr(plan, "_of_a_cluster", lambda *_, blocks=of_a_cluster: blocks)
        plan.plan.cache_clear()
        results.append(decode_attention(q, k, v, batch_invariant=True, rung=rung))
    plan.plan.cache_clear()
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert (results[0] - decode_attention(q, k, v, rung=1)).abs().max() < 1e-5


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
        given = dict(window=window, rung=rung, batch_invariant=rung is None or rung in ONE_TREE)
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


def test_no_pages():
    q, pages = torch.randn(2, 1, 2, 64, device=DEVICE), torch.zeros(0, 16, 2, 64, device=DEVICE)
    table = torch.zeros(2, 3, dtype=torch.int32, device=DEVICE)
    assert not decode_attention(q, pages, pages, block_table=table).any()


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
