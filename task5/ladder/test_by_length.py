"""Decode by length: sequences that are longer than others are cut for more clusters."""

import math
import random
from functools import partialmethod

import pytest
import torch

from common.check.rng import new_seed
from common.tests.devices import of_gpus_hopper
from task5.ladder import call, plan
from task5.ladder.cases import CASES, HALVES, Case, head_dims_of
from task5.ladder.plan import BY_LENGTH, IN_16_BITS, MORE_ROWS, OF_EIGHT_WARPS


class Uneven(Case):
    """A few long sequences among short ones."""

    WINDOWS = (None, None, None, 1000)
    ROOM = 1500

    def choose(self, r, head_dims):
        self.batch, self.kv_heads = r.choice(((2, 2), (3, 3), (5, 2), (33, 1), (70, 1), (128, 1)))
        self.heads, self.q_len = self.kv_heads * r.choice((1, 2, 4, 5)), r.choice((1, 1, 2, 5))
        self.head_dim, self.room = r.choice(head_dims if self.batch < 10 else (64,)), self.ROOM
        self.lengths = [r.randint(0, 40) for _ in range(self.batch)]
        for b in r.sample(range(self.batch), r.randint(1, 1 + self.batch // 16)):
            self.lengths[b] = r.randint(self.room // 2, self.room)


class UnevenOfEightWarps(Uneven):
    """Parts of a pair have twice as many keys."""

    ROOM = 3000


@of_gpus_hopper
@pytest.mark.parametrize("rung", BY_LENGTH)
@pytest.mark.parametrize("part", range(2))
def test_long_sequences_among_short_ones(monkeypatch, part, rung):
    """Also as on a GPU that holds fewer clusters than there are pairs, or more: then some take several items, or none."""
    query, workspace, scratch = plan.Call.query, call.workspace, []

    def watched(device, floats, counters):
        scratch.append(
            (torch.full((floats,), math.nan, device=device), workspace(device, 1, counters)[1])
        )
        return scratch[-1]

    def few(self, most, rung, name, **arguments):
        found = query(self, rung, name, **arguments)
        return min(found, most) if name == "clusters_at_once" else found

    monkeypatch.setattr(call, "workspace", watched)
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

        monkeypatch.setattr(plan.Call, "query", partialmethod(few, most))
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
