"""Chunked prefill against float64: packed heads, split keys, ragged ends."""

import random

import pytest
import torch

from common.build import using
from common.check import assert_close
from common.check.attention import attention_float64, attention_pytorch
from common.check.hard_inputs import LAZY, add_to_scores, make_inputs
from common.check.rng import Rng, new_seed
from common.tests.devices import DEVICE, HOPPER, of_gpus_hopper
from task5.ladder import checks, chunk, decode_attention
from task5.ladder.cases import CASES, HALVES, Case
from task5.ladder.chunk import chunk_attention, faster_than_the_ladder

HALF = torch.float16
# Blocks of a cluster, and clusters.
WAYS = ((1, 1), (2, 1), (4, 1), (8, 1), (1, 3), (2, 8), (4, 5), (8, 2), (1, 16))
LENGTHS = (1, 127, 128, 129, 1000) + (3000,) * (DEVICE == "cuda")


@of_gpus_hopper
@pytest.mark.parametrize("part", range(4))
def test_it_matches_float64(monkeypatch, part):
    """Also with tiles of 192 rows where smaller ones would be faster."""
    if part % 2:
        monkeypatch.setitem(chunk.COMPUTED, chunk.MANY, 0.1)
    for _ in range(40 if DEVICE == "cuda" else 8):
        seed = new_seed()
        r = random.Random(seed)
        torch.manual_seed(seed)
        batch, kv_heads, group = (
            r.choice((1, 2, 3)),
            r.choice((1, 2, 4)),
            r.choice((1, 2, 3, 4, 7, 8, 16)),
        )
        q_len, kv_len = r.choice((1, 16, 17, 100, 333)), r.choice(LENGTHS)
        head_dim, dtype = r.choice((64, 128)), r.choice((torch.float16, torch.bfloat16))
        options = dict(
            causal=r.random() < 0.6,
            split=r.choice((None, *WAYS)),
        )
        q = torch.randn(batch, q_len, kv_heads * group, head_dim, device=DEVICE).to(dtype)
        # room behind the keys, and both in one tensor: strides that are not those of a contiguous one
        kv = torch.full(
            (batch, kv_len + 5, 2, kv_heads, head_dim), torch.nan, device=DEVICE, dtype=dtype
        )
        kv[:, :kv_len] = torch.randn(batch, kv_len, 2, kv_heads, head_dim, device=DEVICE)
        k, v = (kv[:, :kv_len, i] for i in range(2))
        got = chunk_attention(q, k, v, **options)
        k, v = (t.repeat_interleave(group, 2) for t in (k, v))
        truth, pytorch = (
            f(q, k, v, causal=options["causal"]) for f in (attention_float64, attention_pytorch)
        )
        try:
            assert_close(got, truth, pytorch, axes=("batch", "row", "head", "column"))
        except AssertionError as error:
            error.add_note(f"seed {seed}: {tuple(q.shape)}, {tuple(k.shape)}, {dtype}, {options}")
            raise


@of_gpus_hopper
def test_lengths_in_device_memory(monkeypatch):
    """Behind them the cache has NaN. Some are shorter than the chunk, or past the cache."""
    monkeypatch.setitem(chunk.COMPUTED, chunk.MANY, 0.1)
    for part in range(30 if DEVICE == "cuda" else 8):
        r = random.Random(seed := new_seed())
        torch.manual_seed(seed)
        batch, kv_heads, group = r.choice((1, 2, 3)), r.choice((1, 2)), r.choice((1, 2, 3, 8))
        q_len, room = r.choice((1, 9, 16, 30)), r.choice(LENGTHS)
        head_dim, dtype = r.choice((64, 128)), r.choice((torch.float16, torch.bfloat16))
        q = torch.randn(batch, q_len, kv_heads * group, head_dim, device=DEVICE).to(dtype)
        k, v = (torch.randn(batch, room, kv_heads, head_dim, device=DEVICE).to(dtype) for _ in "kv")
        lengths = [
            r.choice((r.randint(-2, room + 2), room, r.randint(0, q_len))) for _ in range(batch)
        ]
        for b, n in enumerate(lengths):
            k[b, max(n, 0) :] = v[b, max(n, 0) :] = torch.nan
        options = dict(causal=part % 4 > 0, split=r.choice((None, *WAYS)))
        got = chunk_attention(
            q, k, v, **options, seqlens_k=torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        )
        for b, n in enumerate(min(max(n, 0), room) for n in lengths):
            note = f"seed {seed}: {tuple(q.shape)}, {tuple(k.shape)}, {dtype}, {lengths}, {options}"
            if n == 0:
                assert not got[b].any(), note
                continue
            one, many = q[b : b + 1], [t[b : b + 1, :n].repeat_interleave(group, 2) for t in (k, v)]
            truth, pytorch = (
                f(one, *many, causal=options["causal"])
                for f in (attention_float64, attention_pytorch)
            )
            try:
                assert_close(
                    got[b : b + 1], truth, pytorch, axes=("batch", "row", "head", "column")
                )
            except AssertionError as error:
                error.add_note(note)
                raise


class Gaps(Case):
    """Some tokens and many, where windows begin in a tile's first block of keys or end there."""

    WINDOWS = (None, 1, 17, 128, 300)

    def choose(self, r, head_dims):
        super().choose(r, head_dims)
        self.q_len = min(r.choice((1, 9, 30, 150)), self.room)


@of_gpus_hopper
@pytest.mark.parametrize("part", range(4))
def test_pages_windows_and_padding(part):
    for _ in range(CASES // 2):
        seed = new_seed()
        case = Gaps(seed, HALVES, (64, 128))
        options = dict(split=case.rng.choice((None, *WAYS)), paged=case.rng.random() < 0.6)
        q, k, v, given = case.arguments(paged=options["paged"])
        got = chunk_attention(q, k, v, causal=True, split=options["split"], **given)
        try:
            case.check(got)
        except AssertionError as error:
            error.add_note(f"Gaps({seed}), {options}")
            raise


POWERS = [way for way in (None, *WAYS, (1, 2), (4, 4)) if way is None or way[1] in (1, 2, 4, 8, 16)]


class Long(Gaps):
    """A sequence has several leaves for each consumer."""

    def choose(self, r, head_dims):
        super().choose(r, head_dims)
        self.batch, self.kv_heads = r.choice((1, 2)), r.choice((1, 2))
        self.heads, self.q_len = self.kv_heads * r.choice((1, 3, 8, 16)), r.choice((1, 9, 20))
        self.room = r.choice((500, 1000, 3000) + (20_000,) * (DEVICE == "cuda"))
        self.lengths = [r.randint(0, self.room) for _ in range(self.batch)]


@of_gpus_hopper
@pytest.mark.parametrize("kind", [Gaps, Long])
@pytest.mark.parametrize("part", range(2))
def test_a_sequence_has_the_same_bits_in_any_batch(monkeypatch, kind, part):
    monkeypatch.setattr(chunk, "sms_of", lambda device: 132)
    for _ in range(CASES // 4):
        case = kind(seed := new_seed(), HALVES, (64, 128))
        q, k, v, given = case.arguments()
        options = dict(causal=True, batch_invariant=True)
        whole = chunk_attention(q, k, v, split=case.rng.choice(POWERS), **options, **given)
        for paged in (False, True):
            some = case.rng.sample(range(case.batch), case.rng.randint(1, case.batch))
            q, k, v, given = case.arguments(some, paged=paged)
            again = chunk_attention(q, k, v, split=case.rng.choice(POWERS), **options, **given)
            assert torch.equal(again, whole[some]), f"{kind.__name__}({seed}), {some}, {paged=}"
        try:
            case.check(whole)
        except AssertionError as error:
            error.add_note(f"{kind.__name__}({seed})")
            raise


@pytest.mark.skipif(
    DEVICE == "cuda", reason="a GPU runs as many blocks at once as it has SMs, and slots"
)
@pytest.mark.parametrize("group", [16, 32])  # of 4 tokens: tiles of 64 rows, and of 128
def test_blocks_wait_for_slots(monkeypatch, group):
    """Where states of a tree wait in memory: eight blocks have two slots, one behind the other."""
    launch, slots = chunk._BATCH_INVARIANT.launch, []

    def of_two(*names, **arguments):
        slots.append(arguments["slots"])
        return launch(*names, **arguments | {"slots": 2})

    monkeypatch.setattr(chunk, "sms_of", lambda device: 132)
    torch.manual_seed(new_seed())
    q = torch.randn(4, 4, 2 * group, 64).half()
    k, v = (torch.randn(4, 4200, 2, 64).half() for _ in "kv")
    given = dict(batch_invariant=True, split=(1, 1))
    whole = chunk_attention(q, k, v, **given)
    monkeypatch.setattr(chunk._BATCH_INVARIANT, "launch", of_two)
    with using(threads=2, limit=240):
        again = chunk_attention(q, k, v, **given)
    assert slots == [8]
    assert torch.equal(again, whole)


@of_gpus_hopper
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("group", [8, 16])  # of 8 tokens: tiles of 64 rows, and of 128
def test_an_infinite_value_is_infinite(group, batch_invariant):
    torch.manual_seed(new_seed())
    q = torch.randn(1, 8, group, 64, device=DEVICE).half()
    k, v = (torch.randn(1, 700, 1, 64, device=DEVICE).half() for _ in "kv")
    v[:, 33, :, 5] = torch.inf
    for split in ((1, 1), (2, 1), (1, 4), (4, 2), (1, 16)):
        given = dict(causal=True, batch_invariant=batch_invariant, split=split)
        got = chunk_attention(q, k, v, **given)
        assert got[..., 5].isinf().all() and got.isfinite().sum() == got.numel() * 63 // 64


@of_gpus_hopper
@pytest.mark.parametrize("group", [8, 16])  # of 8 tokens: tiles of 64 rows, and of 128
def test_room_makes_no_difference_to_the_bits(group):
    torch.manual_seed(new_seed())
    q = torch.randn(2, 8, group, 64, device=DEVICE).half()
    k, v = (torch.randn(2, 9000, 1, 64, device=DEVICE).half() for _ in "kv")
    given = dict(seqlens_k=torch.tensor([1900, 333], dtype=torch.int32, device=DEVICE))
    in_all, *others = (
        chunk_attention(q, k[:, :room], v[:, :room], causal=True, batch_invariant=True, **given)
        for room in (9000, 4000, 1900)
    )
    assert all(torch.equal(other, in_all) for other in others)


@of_gpus_hopper
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("page_size", [16, 48, 256])
@pytest.mark.parametrize("q_len", [4, 100])
def test_pages_outside_of_the_pool_are_not_seen(page_size, head_dim, q_len):
    """As if they were not in the table, wherever in it they are."""
    torch.manual_seed(new_seed())
    q = torch.randn(1, q_len, 6, head_dim, device=DEVICE).half()
    k, v = (torch.randn(5, page_size, 2, head_dim, device=DEVICE).half() for _ in "kv")
    pages = [3, 4, 0, 2, 1] * (200 // page_size + 1)
    some = torch.tensor([pages], dtype=torch.int32, device=DEVICE)
    outside = torch.tensor([5, -1, 1 << 30], dtype=torch.int32, device=DEVICE)
    for _ in range(4):
        here = torch.rand(len(pages), device=DEVICE) < 0.6
        here[torch.randint(len(pages), (2,))] = torch.tensor([True, False], device=DEVICE)
        table = torch.where(here, some, outside[torch.randint(3, some.shape)])
        got = chunk_attention(q, k, v, block_table=table)
        seen = chunk_attention(q, k, v, block_table=some[:, here].contiguous())
        torch.testing.assert_close(got, seen, atol=2e-3, rtol=0)
    for nothing in outside.tolist():
        none = torch.full_like(table, nothing)
        assert not chunk_attention(q, k, v, block_table=none).any()
        assert not chunk_attention(q, k, v, block_table=none, causal=True, window=7).any()


@of_gpus_hopper
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("window", [None, 40])
def test_sequences_grow_from_launch_to_launch(paged, window):
    """One after the other, and as one CUDA graph: each launch sees the lengths that the one before it has left."""
    torch.manual_seed(new_seed())
    q = torch.randn(2, 7, 12, 64, device=DEVICE).half()
    k, v = (torch.randn(2, 640, 2, 64, device=DEVICE).half() for _ in "kv")
    lengths, table, caches = torch.zeros(2, dtype=torch.int32, device=DEVICE), None, (k, v)
    if paged:
        table = torch.arange(20, dtype=torch.int32, device=DEVICE).view(2, 10)
        caches = tuple(t.view(20, 64, 2, 64) for t in caches)
    want, got = [], []
    for n in range(0, 640, 64):
        given = dict(seqlens_k=torch.full_like(lengths, n), window=window, rung=1)
        want.append(decode_attention(q, k, v, **given))

    def steps():
        lengths.fill_(-64)
        for _ in want:
            lengths.add_(64)
            given = dict(seqlens_k=lengths, block_table=table, window=window)
            got.append(chunk_attention(q, *caches, causal=True, split=(2, 2), **given))

    steps()
    if DEVICE == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            steps()
        graph.replay()
        want += want
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=2e-3, rtol=0)


@of_gpus_hopper
@pytest.mark.parametrize("name", [*LAZY, "a cliff"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_inputs_that_move_a_lazy_maximum(monkeypatch, name, dtype):
    """Long rows keep their maximum until P is too large."""
    monkeypatch.setitem(chunk.COMPUTED, chunk.MANY, 0.1)
    seed = new_seed()
    r = random.Random(seed)
    head_dim, group, causal = r.choice((64, 128)), r.choice((2, 3)), r.random() < 0.5
    rows = 9000 if DEVICE == "cuda" else 1700
    shape, cliff = (1, rows, group, head_dim), name == "a cliff"
    q, k, v = make_inputs("normal" if cliff else name, Rng(seed, DEVICE), shape, dtype)
    q, k, v = q[:, -50:], k[:, :, :1], v[:, :, :1]
    if cliff:  # one of the last keys to come: 0 to 200 above the others, exp() overflows
        amounts = torch.zeros(rows)
        amounts[40] = 200.0
        add_to_scores(q, k, amounts, rows=torch.linspace(0, 1, q.shape[1]))
    many = [t.repeat_interleave(group, 2) for t in (k, v)]
    truth, pytorch = (f(q, *many, causal=causal) for f in (attention_float64, attention_pytorch))
    for split in ((1, 1), (2, 1)):
        got = chunk_attention(q, k, v, causal=causal, split=split)
        try:
            assert_close(got, truth, pytorch, axes=("batch", "row", "head", "column"))
        except AssertionError as error:
            error.add_note(f"seed {seed}: {tuple(q.shape)}, {causal=}, {split}")
            raise


@of_gpus_hopper
def test_only_pages_limit_how_many_keys_there_are(monkeypatch):
    monkeypatch.setattr(checks, "MAX_KEYS", 100)
    q, k = (torch.zeros(1, n, 2, 64, dtype=HALF, device=DEVICE) for n in (20, 160))
    assert not chunk_attention(q, k, k).any()
    table = torch.zeros(1, 5, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="room for at most 100 keys; got 160"):
        chunk_attention(q, k.view(5, 32, 2, 64), k.view(5, 32, 2, 64), block_table=table)


def test_what_it_does_not_take_is_the_ladders():
    q, k = torch.zeros(1, 20, 2, 64, dtype=HALF), torch.zeros(1, 40, 2, 64, dtype=HALF)
    assert not faster_than_the_ladder(q, k, k)  # no GPU
    if HOPPER:
        q, k = (torch.zeros(1, n, 8, 128, dtype=HALF, device=DEVICE) for n in (20, 8000))
        assert faster_than_the_ladder(q, k, k)
        assert not faster_than_the_ladder(k, q, q) and not faster_than_the_ladder(q.float(), k, k)
        odd = torch.zeros(1, 8000, 8, 129, dtype=HALF, device=DEVICE)[..., :128]
        assert not faster_than_the_ladder(q, k, odd)


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        (((1, 20, 3, 64), (1, 40, 2, 64)), {}, "heads"),
        (((1, 20, 2, 96), (1, 40, 2, 96)), {}, "head_dim must be 64 or 128; got 96"),
        (
            ((1, 20, 2, 64), (1, 40, 2, 64)),
            {"split": (7, 1)},
            r"split must be one of \(1, 2, 4, 8\) blocks, and 1 to 16 clusters; got \(7, 1\)",
        ),
        (((1, 20, 2, 64), (1, 40, 2, 64)), {"split": 5}, "split must be one of .* got 5"),
        (
            ((1, 20, 2, 64), (1, 40, 2, 64)),
            {"split": (2, 3), "batch_invariant": True},
            "batch-invariant, clusters must be a power of two; got 3",
        ),
        (((1, 20, 2, 64), (1, 40, 2, 64)), {"split": (2,)}, r"split must be one of .* got \(2,\)"),
        (((1, 20, 2, 64), (1, 40, 2, 64)), {"scale": -1.0}, "scale must be above 0"),
        (((1, 20, 129, 64), (1, 40, 1, 64)), {}, "at most 128 query heads; got 129"),
        (
            ((2, 20, 2, 64), (2, 40, 2, 64)),
            {"seqlens_k": torch.zeros(3, dtype=torch.int32)},
            r"seqlens_k must be .*\(2,\)",
        ),
        (
            ((2, 20, 2, 64), (2, 40, 2, 64)),
            {"seqlens_k": torch.zeros(2)},
            "seqlens_k must .*int32",
        ),
        (((1, 20, 2, 64), (1, 40, 2, 64)), {"window": 0, "causal": True}, "window must .* got 0"),
        (((1, 20, 2, 64), (1, 40, 2, 64)), {"window": 3}, "window .* is for causal=True"),
        (
            ((1, 20, 2, 64), (1, 40, 2, 64)),
            {"leftpad_k": torch.zeros(2, dtype=torch.int32)},
            r"leftpad_k must be \(1,\)",
        ),
        (
            ((1, 20, 2, 64), (3, 40, 2, 64)),
            {"block_table": torch.zeros(1, 2, dtype=torch.int32)},
            "page_size must be a multiple of 16 up to 256; got 40",
        ),
        (
            ((1, 20, 2, 64), (3, 32, 2, 64)),
            {"block_table": torch.zeros(2, 2, dtype=torch.int32)},
            r"block_table must be \(1, max_pages\) int32",
        ),
    ],
)
def test_bad_input(shapes, options, message):
    q, k = (torch.zeros(shape, dtype=HALF) for shape in shapes)
    with pytest.raises(ValueError, match=message):
        chunk_attention(q, k, k, **options)


def test_of_gpus_it_is_for_hopper(monkeypatch):
    monkeypatch.setattr(chunk, "is_hopper", lambda device: False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    q = torch.zeros(1, 20, 2, 64, dtype=HALF)
    with pytest.raises(ValueError, match="of GPUs, chunk_attention runs on Hopper alone"):
        chunk_attention(q, q, q)


@pytest.mark.skipif(DEVICE == "cuda", reason="the check build is the CPU's")
@pytest.mark.parametrize("q_len", [20, 40, 90])  # few rows; more; three consumers
@pytest.mark.parametrize("split", [(1, 1), (4, 1), (2, 3)])
@pytest.mark.parametrize("room", [0, 77])  # behind the keys
def test_the_check_build_finds_nothing(monkeypatch, split, q_len, room):
    monkeypatch.setitem(chunk.COMPUTED, chunk.MANY, 0.1)
    q, k = torch.randn(1, q_len, 4, 64, dtype=HALF), torch.randn(1, 600, 2, 64, dtype=HALF)
    for order in ("forward", "random"):
        with using(check=True, order=order, seed=1, limit=120):
            cache = torch.cat([k, k.new_full((1, room, 2, 64), torch.nan)], 1)
            lengths = torch.tensor([600], dtype=torch.int32) if room else None
            got = chunk_attention(q, cache, cache, causal=True, split=split, seqlens_k=lengths)
        many = k.repeat_interleave(2, 2)
        truth, pytorch = (
            f(q, many, many, causal=True) for f in (attention_float64, attention_pytorch)
        )
        assert_close(got, truth, pytorch, axes=("batch", "row", "head", "column"))


@pytest.mark.skipif(DEVICE == "cuda", reason="the check build is the CPU's")
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_the_check_build_finds_nothing_in_pages(monkeypatch, batch_invariant):
    monkeypatch.setattr(chunk, "sms_of", lambda device: 132)
    ways = POWERS if batch_invariant else WAYS[:-1]
    for _ in range(6):
        case = Gaps(seed := new_seed(), HALVES, (64,))
        for order in ("forward", "random"):
            q, k, v, given = case.arguments(paged=order == "random")
            given |= dict(batch_invariant=batch_invariant, split=case.rng.choice(ways))
            with using(check=True, order=order, seed=1, limit=120):
                got = chunk_attention(q, k, v, causal=True, **given)
            try:
                case.check(got)
            except AssertionError as error:
                error.add_note(f"Gaps({seed})")
                raise
