"""By length: sequences that are longer than others are cut for more clusters, and come first."""

import itertools
import math
import random
from functools import partialmethod

import pytest
import torch

from common.build import Kernels, using
from common.check.rng import new_seed
from common.tests.devices import DEVICE, of_gpus_hopper
from task5.ladder import call, chunk, plan
from task5.ladder.by_length import Grid
from task5.ladder.cases import CASES, HALVES, Case, head_dims_of
from task5.ladder.chunk import chunk_attention
from task5.ladder.kernels import (
    BY_LENGTH,
    IN_16_BITS,
    MORE_ROWS,
    MORE_ROWS_BY_LENGTH,
    OF_EIGHT_WARPS,
    Call,
)

_order = Kernels(__file__, "../../common/tests/kernels/longest_first.cu")
_parts = Kernels(__file__, "../../common/tests/kernels/by_length.cu")
_tiles = Kernels(__file__, "../../common/tests/kernels/chunk_by_length.cu")
MOST_PARTS = 64  # of a pair, as in by_length.cuh
LEAST_KEYS = 16  # of a part, where a tile has one key


class Uneven(Case):
    """A few long sequences among short ones; evenly spread lengths, of which none may be cut; or about equal ones."""

    WINDOWS = (None, None, None, 1000)
    ROOM = 1500

    def choose(self, r, head_dims):
        self.batch, self.kv_heads = r.choice(((2, 2), (3, 3), (5, 2), (33, 1), (70, 1), (128, 1)))
        self.heads, self.q_len = self.kv_heads * r.choice((1, 2, 4, 5)), r.choice((1, 1, 2, 5))
        self.head_dim, self.room = r.choice(head_dims if self.batch < 10 else (64,)), self.ROOM
        spread = r.choices(("few long", "even", "equal"), (14, 4, 2))[0]
        least, most = {"even": (0, 400), "equal": (380, 400)}.get(spread, (0, 40))
        if spread == "equal" and self.batch < 10:
            least, most = self.room - 20, self.room
        self.lengths = [r.randint(least, most) for _ in range(self.batch)]
        long = r.randint(1, 1 + self.batch // 16) if spread == "few long" else 0
        for b in r.sample(range(self.batch), long):
            self.lengths[b] = r.randint(self.room // 2, self.room)


class UnevenOfEightWarps(Uneven):
    """Parts of a pair have twice as many keys."""

    ROOM = 3000


class ManyParts(Uneven):
    """One long sequence, of which more clusters have a part than are merged at once."""

    WINDOWS, PADDED = (None,), False
    ROOM = 36_000

    def choose(self, r, head_dims):
        self.batch, self.kv_heads, self.heads, self.q_len = 3, 1, r.choice((1, 5)), r.choice((1, 3))
        self.head_dim, self.room = head_dims[0], self.ROOM
        self.lengths = r.sample(
            [self.room - r.randint(0, 99), r.randint(0, 40), r.randint(0, 400)], 3
        )


class UnevenChunk(Uneven):
    """Tiles of few rows and of many, of one head or several."""

    ROOM = 3000

    def choose(self, r, head_dims):
        super().choose(r, head_dims)
        self.heads, self.q_len = self.kv_heads * r.choice((1, 5, 16)), r.choice((1, 5, 16, 40))


@of_gpus_hopper
@pytest.mark.parametrize("rung", BY_LENGTH)
@pytest.mark.parametrize("part", range(2))
def test_long_sequences_among_short_ones(monkeypatch, part, rung):
    """Also as on a GPU that holds fewer clusters than there are pairs, or more: then some take several items, or none.

    And as on one with many SMs for each pair, or half as many again as pairs: then there are more clusters than pairs.
    """
    query, workspace, scratch = Call.query, call.workspace, []

    def watched(device, floats, counters):
        scratch.append(
            (torch.full((floats,), math.nan, device=device), workspace(device, 1, counters)[1])
        )
        return scratch[-1]

    def few(self, most, rung, name, **arguments):
        found = query(self, rung, name, **arguments)
        return min(found, most) if name == "clusters_at_once" else found

    def on_all_sms(call, pairs, bytes_):
        of_a_cluster, of_an_sm = case.rng.choice(((1, 1), (2, 1), (1, 2), (2, 2)))
        grid = Grid(rung, of_a_cluster, of_an_sm, ahead=False)
        return grid if call.sms < 2 * pairs < 2 * call.sms else None

    monkeypatch.setattr(call, "workspace", watched)
    monkeypatch.setattr(plan, "grid_on_all_sms", on_all_sms)
    cut = False
    seeds = random.Random(new_seed() + 10 * part + rung).sample(range(10**9), CASES)
    for i, seed in enumerate(seeds):
        if cut and i >= CASES // 6:
            break
        of_rung = UnevenOfEightWarps if rung in OF_EIGHT_WARPS else Uneven
        given = {"dtypes": HALVES} if rung in IN_16_BITS else {}
        case = of_rung(seed, head_dims=head_dims_of(rung), **given)
        pairs = case.batch * case.kv_heads
        most = (pairs // 2, pairs, 3 * pairs)[i % 3]
        sms = (6, pairs, 3 * pairs // 2, 8 * pairs)[i % 4]
        monkeypatch.setattr(call, "sms_of", lambda device, sms=sms: sms)
        monkeypatch.setattr(Call, "query", partialmethod(few, most))
        plan.plan.cache_clear()
        scratch.clear()
        case.check(case.run(rung=rung, paged=case.rng.random() < 0.3))
        whole = case.run(rung=rung, batch_invariant=True)
        some = case.rng.sample(range(case.batch), case.rng.randint(1, case.batch))
        again = case.run(some, rung=rung, batch_invariant=True)
        assert torch.equal(again, whole[some])
        assert not any(counters.any() for _, counters in scratch)
        cut = cut or bool(scratch[0][0].isfinite().any())
        tree = MORE_ROWS if rung in IN_16_BITS else 4
        assert torch.equal(case.run(rung=tree, batch_invariant=True), whole)
    plan.plan.cache_clear()
    assert cut


@of_gpus_hopper
@pytest.mark.parametrize("rung", BY_LENGTH)
def test_many_parts_of_a_pair_are_merged_in_groups(monkeypatch, rung):
    """In clusters of two, or in single blocks of which a pair has an odd number."""
    workspace, scratch = call.workspace, []

    def watched(device, floats, counters):
        scratch.append(
            (torch.full((floats,), math.nan, device=device), workspace(device, 1, counters)[1])
        )
        return scratch[-1]

    monkeypatch.setattr(call, "workspace", watched)
    given = {"dtypes": HALVES} if rung in IN_16_BITS else {}
    room = ManyParts.ROOM * (2 if rung in OF_EIGHT_WARPS else 1)
    monkeypatch.setattr(ManyParts, "ROOM", room)
    case = ManyParts(new_seed() + rung, head_dims=(64,), **given)
    for sms, blocks in ((66, 2), (27, 1)):
        monkeypatch.setattr(call, "sms_of", lambda device, sms=sms: sms)
        monkeypatch.setattr(plan, "blocks_by_length", lambda *_, blocks=blocks: (blocks, 0))
        plan.plan.cache_clear()
        scratch.clear()
        case.check(case.run(rung=rung))
        ((partial, counters),) = scratch
        blocks = 2 if rung == MORE_ROWS_BY_LENGTH else blocks
        of_parts = partial.view(4 * (sms // blocks) // 3 + 1, -1).isfinite().any(1)
        assert not counters.any() and of_parts.sum() > (16 if sms // blocks > 16 else 0)
    plan.plan.cache_clear()


@of_gpus_hopper
@pytest.mark.parametrize("sequences", [1, 2, 31, 33, 100, 128])
def test_longest_first(sequences):
    """Each item is of one sequence, in its place; cut ones come first, then the others, by about their length."""
    r = random.Random(new_seed() + sequences)
    shares = [r.choice((0, r.random(), 2 * r.random())) for _ in range(sequences)]
    cut = [int(share > 1.5 and r.random() < 0.5) for share in shares]
    items = [r.choice((2, 7, 40)) if is_cut else r.choice((1, 5)) for is_cut in cut]
    total = sum(items)
    found = torch.full((total, 2), -1, dtype=torch.int32, device=DEVICE)
    numbers = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (cut, items)]
    _order.launch(
        "find", shares=torch.tensor(shares, device=DEVICE), cut=numbers[0], items=numbers[1],
        sequences=sequences, total=total, found=found,
    )  # fmt: skip
    order, first = [], 0
    while first < total:
        b = found[first, 0].item()
        assert found[first : first + items[b]].tolist() == [[b, first]] * items[b]
        order.append(b)
        first += items[b]
    assert sorted(order) == list(range(sequences))
    several = sum(cut)
    assert all(cut[b] for b in order[:several])
    whole = [min(shares[b], 1.75) for b in order[several:]]
    assert all(x > y - 1 / 8 for x, y in itertools.pairwise(whole))


@of_gpus_hopper
@pytest.mark.parametrize("at_once", [1, 2, 7, 132])
def test_of_two_neighbouring_blocks_one_has_an_item_of_the_first_half(at_once):
    found = torch.full((at_once + 5,), -1, dtype=torch.int32, device=DEVICE)
    _order.launch("halves", blocks=len(found), at_once=at_once, found=found)
    items, half = found.tolist(), (at_once + 1) // 2
    assert items[:at_once:2] == list(range(half))
    assert items[1:at_once:2] == list(range(half, at_once))
    assert items[at_once:] == list(range(at_once, at_once + 5))


def parts_of(lengths, kv_heads, at_once, chunks=0):
    """How many parts a pair of each sequence has, after a look at what each item is."""
    batch, sequences = len(lengths), max(len(lengths), at_once // kv_heads)
    found = torch.full((8 * at_once, 4), -1, dtype=torch.int32, device=DEVICE)
    _parts.launch(
        "find", seqlens=torch.tensor(lengths, dtype=torch.int32, device=DEVICE), batch=batch,
        kv_heads=kv_heads, kv_len=max(lengths), sequences=sequences, at_once=at_once, chunks=chunks,
        items=len(found), found=found,
    )  # fmt: skip
    items = [tuple(item) for item in found.tolist() if item[0] >= 0]
    parts = {b: clusters for b, _, _, clusters in items}
    assert sorted(items) == [
        (b, pair, part, parts[b])
        for b in range(batch)
        for pair in range(kv_heads)
        for part in range(parts[b])
    ]
    return [parts[b] for b in range(batch)]


@of_gpus_hopper
@pytest.mark.parametrize("at_once", [66, 132])
def test_the_largest_part_is_as_small_as_can_be(at_once):
    """Where pairs are up to half of the clusters, of any lengths; of about equal ones each pair has as many parts."""
    r = random.Random(new_seed() + at_once)
    for spread in ("equal", "even", "few long") * 7:
        batch = r.randint(1, at_once // 2)
        kv_heads = r.randint(1, at_once // 2 // batch)
        room = r.randint(10_000, 1_000_000)
        lengths = [r.randint(1, room if spread == "even" else room // 32) for _ in range(batch)]
        if spread == "equal":
            lengths = [room - r.randint(0, room // 32) for _ in range(batch)]
        lengths[r.randrange(batch)] = room
        parts = parts_of(lengths, kv_heads, at_once)
        assert kv_heads * sum(parts) <= at_once

        def enough(size, lengths=lengths, kv_heads=kv_heads):
            needed = (min(max(1, n // LEAST_KEYS), MOST_PARTS, -(-n // size)) for n in lengths)
            return kv_heads * sum(needed) <= at_once

        least = next(size for n in itertools.count() if enough(size := int(1.01**n)))
        largest = max(n / p for n, p in zip(lengths, parts, strict=True))
        assert largest <= max(1.1 * least, room / MOST_PARTS) + 1
        if spread == "equal":
            assert set(parts) == {min(at_once // (batch * kv_heads), MOST_PARTS)}


@of_gpus_hopper
def test_parts_of_many_pairs_and_batch_invariant_ones():
    """Of pairs on more than half of the clusters short ones share one. A tree has a power of two of parts."""
    lengths = [64_000] + [100] * 59
    assert parts_of(lengths, 1, 66)[0] >= 40
    assert max(parts_of([64_000] * 60, 1, 66)) == max(parts_of([64_000] * 20, 3, 66)) == 1
    assert parts_of(lengths, 1, 66, chunks=64) == [16] + [1] * 59
    assert parts_of([64_000] * 6, 1, 66, chunks=64) == [8] * 6


@of_gpus_hopper
@pytest.mark.parametrize("batch", [3, 40, 128])
def test_sequences_about_as_long_as_each_other_stay_in_the_grids_order(batch):
    """Within a 32nd of the longest; else long ones come first."""
    r = random.Random(new_seed() + batch)
    lengths = [9000 - r.randint(0, 9000 // 32) for _ in range(batch)]
    lengths[r.randrange(batch)] = 9000

    def order():
        found = torch.full((2 * batch,), -2, dtype=torch.int32, device=DEVICE)
        _parts.launch(
            "pairs", seqlens=torch.tensor(lengths, dtype=torch.int32, device=DEVICE), batch=batch,
            kv_heads=2, kv_len=9000, sequences=batch, pairs=found,
        )  # fmt: skip
        return found.tolist()

    assert order() == list(range(2 * batch))
    lengths[0] = 5000
    assert order()[-2:] == [0, 1]


@of_gpus_hopper
@pytest.mark.parametrize(("batch", "kv_heads"), [(72, 1), (9, 8), (23, 4), (120, 1)])
def test_single_blocks_that_are_idle_lie_beside_those_at_work(batch, kv_heads):
    """Of two neighbours, which share a way to memory, one has an item of the first half: in decode, and in chunks."""
    lengths, pairs = torch.full((batch,), 9000, dtype=torch.int32, device=DEVICE), batch * kv_heads
    sequences, half = 132 // kv_heads, 132 // kv_heads * kv_heads // 2
    of_blocks = torch.full((sequences * kv_heads,), -2, dtype=torch.int32, device=DEVICE)
    _parts.launch(
        "pairs", seqlens=lengths, batch=batch, kv_heads=kv_heads, kv_len=9000, sequences=sequences,
        pairs=of_blocks,
    )  # fmt: skip
    idle = [-1] * (2 * half - pairs)
    assert of_blocks[::2].tolist() == list(range(half))
    assert of_blocks[1::2].tolist() == [*range(half, pairs), *idle]
    found = torch.full((150, 4), -1, dtype=torch.int32, device=DEVICE)
    _tiles.launch(
        "find", seqlens=lengths, batch=batch, kv_heads=kv_heads, kv_len=9000, splits=1, at_once=132,
        blocks=len(found), found=found,
    )  # fmt: skip
    assert found[:132:2, 3].all() and not found[132:, 3].any()
    assert found[1:132:2, 3].tolist() == [i < pairs - 66 for i in range(66)]
    tiles = sorted(tuple(item) for item in found.tolist() if item[3])
    assert tiles == [(b, head, 0, 1) for b in range(batch) for head in range(kv_heads)]


def by_length(monkeypatch, always):
    """Whether chunks are always by length, or never."""
    for name in ("UNEVEN_BYTES", "MANY_UNEVEN_BYTES"):
        monkeypatch.setattr(chunk, name, 0 if always else math.inf)


@of_gpus_hopper
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_chunks_of_long_sequences_among_short_ones(monkeypatch, batch_invariant):
    """Also as on GPUs that hold fewer clusters than there are tiles."""
    workspace, scratch, cut = chunk.workspace, [], False

    def watched(device, floats, counters):
        partial = torch.full((floats,), math.nan, device=device)
        scratch.append((partial, workspace(device, 1, counters)[1]))
        return scratch[-1]

    monkeypatch.setattr(chunk, "workspace", watched)
    monkeypatch.setattr(chunk, "MOST_UNEVEN_TILES", math.inf)
    for at_once in ((132, 66, 30, 15), (16, 8, 4, 2), (7, 3, 1, 1)) * (CASES // 10):
        monkeypatch.setattr(chunk, "_at_once", lambda device, at_once=at_once: at_once)
        case = UnevenChunk(new_seed(), HALVES, (64, 128))
        options = dict(causal=True, batch_invariant=batch_invariant)
        by_length(monkeypatch, True)
        q, k, v, given = case.arguments(paged=case.rng.random() < 0.3)
        whole = chunk_attention(q, k, v, **options, **given)
        case.check(whole)
        partial, counters = scratch[-1]
        assert not counters.any()
        cut = cut or bool(partial[0].isfinite())  # the first part
        if batch_invariant:
            by_length(monkeypatch, False)
            some = case.rng.sample(range(case.batch), case.rng.randint(1, case.batch))
            q, k, v, given = case.arguments(some)
            assert torch.equal(chunk_attention(q, k, v, **options, **given), whole[some])
    assert cut


@pytest.mark.skipif(DEVICE == "cuda", reason="the check build is the CPU's")
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_the_check_build_finds_nothing_in_chunks(monkeypatch, batch_invariant):
    by_length(monkeypatch, True)
    for at_once in ((132, 66, 30, 15), (7, 3, 1, 1)):
        monkeypatch.setattr(chunk, "_at_once", lambda device, at_once=at_once: at_once)
        case = UnevenChunk(new_seed(), HALVES, (64,))
        for order in ("forward", "random"):
            q, k, v, given = case.arguments(paged=order == "random")
            given |= dict(batch_invariant=batch_invariant, causal=True)
            with using(check=True, order=order, seed=1, limit=240):
                case.check(chunk_attention(q, k, v, **given))
