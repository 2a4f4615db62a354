"""The same bits of a sequence in any batch, order, paging and room."""

import math

import pytest
import torch

from common.check.rng import new_seed
from common.tests.devices import DEVICE, of_gpus_hopper
from task5.ladder import by_length, call, choice, chunk, decode_attention, kernels, plan, trees
from task5.ladder.cases import CASES, RUNGS, Case, case_for
from task5.ladder.kernels import OF_EIGHT_WARPS, ONE_TREE


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
    few |= dict(FEW_KEYS_OF_FLOAT32=60, MANY_KEYS_OF_FLOAT32=300)
    few |= dict(LONG_BYTES=4e5, LONG_BYTES_COMPUTE_BOUND=1e5, UNEVEN_BYTES=2e5)
    few |= dict(MANY_UNEVEN_BYTES=3e5, FEW_UNEVEN_BYTES=1e5, UNEVEN_BYTES_COMPUTE_BOUND=2e5)
    few |= dict(SOME_UNEVEN_BYTES=15e4, UNEVEN_BYTES_OF_WAVES=12e4, SOME_PAIRS=2)
    few |= dict(SPREAD_PAIR_KEYS=120)
    few |= dict(KEYS_OF_A_TREE=500, KEYS_OF_SEVERAL_TREES=300, KEYS_OF_LARGE_TREES=100)
    few |= dict(
        KEYS_OF_LEAVES=80,
        KEYS_OF_SEVERAL_LEAVES=300,
        KEYS_IN_PAGES=(120, 240),
        KEYS_ON_SOME_SMS=(60, 90),
    )
    few |= dict(CROWDED_KEYS=80, SHARED_KEYS=100, KEYS_OF_FEW_BLOCKS=120)
    for name in ("SPREAD_KEYS", "SPREAD_KEYS_OF_TWO_TILES", "SPREAD_KEYS_OF_FLOAT32"):
        few[name] = dict.fromkeys((1, 2, 4, 8, 16, 32), 200)
    for module in (by_length, choice, chunk, kernels, plan, trees):
        for name in few.keys() & vars(module).keys():
            monkeypatch.setattr(module, name, few[name])
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
