"""Which rung and how many blocks a call of decode gets on an H200. No GPU is asked."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from task5.ladder.plan import (
    BY_LENGTH,
    EIGHT_WARPS,
    IN_STEP,
    KEYS_AS_ROWS,
    OF_EIGHT_WARPS,
    ONE_TREE,
    Call,
    Choice,
    fastest,
    plan,
)


@pytest.fixture
def h200(monkeypatch):
    """What a plan asks of a GPU, answered as by an H200."""
    gpu = SimpleNamespace(multi_processor_count=132, shared_memory_per_multiprocessor=228 * 1024)
    room, of_eight_warps = (
        {1: 396, 2: 198, 4: 92, 8: 45, 16: 21},
        {1: 132, 2: 66, 4: 30, 8: 15, 16: 7},
    )

    def query(self, rung, name, blocks=None, tiles=None):
        fit = (of_eight_warps if rung in OF_EIGHT_WARPS else room).get(blocks)
        answers = {"rows_of_a_pair": 8 if self.rows <= 8 else 32, "keys_of_a_tile": 64}
        answers |= {"shared_memory_bytes": 80 * 1024, "clusters_at_once": fit}
        return answers[name]

    monkeypatch.setattr(Call, "query", query)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    plan.cache_clear()
    yield lambda rows=4, head_dim=128, dtype=0: Call(
        torch.device("cuda", 0), dtype, head_dim, rows, gpu.multi_processor_count, hopper=True
    )
    plan.cache_clear()


def test_the_leaves_of_a_batch_invariant_call_depend_on_the_model_alone(h200):
    for kv_heads in (1, 2, 8, 32, 100):
        for shape in ({}, {"dtype": 2}, {"dtype": 2, "head_dim": 64}, {"dtype": 2, "rows": 32}):
            rungs, leaves = set(), set()
            for batch, kv_len, page_size, promised, differ in itertools.product(
                (1, 3, 64), (1, 100, 5000, 200_000), (None, 16, 64), (False, True), (False, True)
            ):
                call = h200(**shape)
                how = fastest(
                    call, batch * kv_heads, kv_len, batch_invariant=True, page_size=page_size,
                    promised=promised, lengths=batch if differ else 1,
                )  # fmt: skip
                work = plan(call, batch, kv_heads, kv_len, True, how.rung, how.every_other_sm)
                rungs.add(how.rung)
                leaves.add(work.chunks)
            assert rungs <= set(ONE_TREE) and len(leaves) == 1
    for wide, rung in (
        (dict(head_dim=256), 4),
        (dict(head_dim=256, rows=17), 5),
        (dict(rows=33), 5),
    ):
        for heads, kv_len, page_size in itertools.product((1, 8, 500), (9, 99_999), (None, 16)):
            given = dict(batch_invariant=True, page_size=page_size, promised=True)
            assert fastest(h200(dtype=2, **wide), heads, kv_len, **given).rung == rung


@pytest.mark.parametrize(
    ("batch", "kv_heads", "kv_len", "rung", "blocks"),
    [
        (1, 8, 1024, 4, 8 * 8),  # two tiles each
        (1, 8, 4096, 4, 8 * 16),
        (1, 8, 8192, EIGHT_WARPS, 8 * 8),
        (8, 8, 2048, 4, 64 * 2),
        (16, 8, 2048, 4, 128),
        (16, 8, 8192, IN_STEP, 128),
        (16, 32, 1024, 4, 512),  # more pairs than fit
        (1, 1, 64, 4, 1),
        (1, 8, 131072, IN_STEP, 8 * 16),  # a block on each SM, no clusters
    ],
)
def test_the_rung_of_float32(h200, batch, kv_heads, kv_len, rung, blocks):
    for promised in (False, True):
        assert fastest(h200(), batch * kv_heads, kv_len, promised=promised) == Choice(rung)
    work = plan(h200(), batch, kv_heads, kv_len, False, rung)
    assert work.blocks == blocks
    assert work.slots == (blocks if kv_len == 131072 else 0)  # the blocks of a pair are no cluster
    assert fastest(h200(head_dim=256), batch * kv_heads, kv_len) == Choice(4)


def test_two_blocks_share_an_sm_where_each_has_much_to_do(h200):
    assert [plan(h200(), 16, 8, n, False, 4).blocks for n in (2048, 8192)] == [128, 256]


@pytest.mark.parametrize(
    ("kv_heads", "kv_len", "blocks"),
    [(8, 1024, 64), (8, 2048, 64), (8, 8192, 64), (32, 512, 64), (16, 4096, 64), (4, 16384, 64)],
)
def test_a_launch_leaves_every_other_sm_to_the_next(h200, kv_heads, kv_len, blocks):
    for shape in ({}, {"batch_invariant": True}):
        how = fastest(h200(dtype=2), kv_heads, kv_len, **shape)
        assert how == Choice(4, every_other_sm=True)
        invariant = "batch_invariant" in shape
        work = plan(h200(dtype=2), 1, kv_heads, kv_len, invariant, how.rung, how.every_other_sm)
        assert work.blocks == blocks and work.slots == 0


def test_rung_7_reads_long_caches_in_order(h200):
    def rung(heads, kv_len, invariant=False, page_size=None, **shape):
        given = dict(batch_invariant=invariant, page_size=page_size)
        return fastest(h200(**{"dtype": 2} | shape), heads, kv_len, **given).rung

    assert rung(128, 8192) == rung(8, 131072) == rung(128, 8192, True) == IN_STEP
    assert rung(128, 8192, head_dim=64) == rung(500, 2048, head_dim=64) == IN_STEP
    assert rung(128, 8192, page_size=64) == rung(128, 4096) == rung(256, 8192) == 4
    assert rung(128, 4096, head_dim=64) == 4
    assert rung(128, 8192, rows=9) == rung(128, 8192, head_dim=256) == 4
    assert rung(128, 4096, dtype=0) == IN_STEP and rung(128, 4096, True, dtype=0) == 4


HALF, AHEAD = {"every_other_sm": True}, {"ahead": True}


@pytest.mark.parametrize(
    ("heads", "kv_len", "shape", "rung", "how"),
    [
        (8, 1024, {}, 4, HALF | AHEAD),
        (8, 1024, {"head_dim": 64}, 4, HALF | AHEAD),
        (8, 2048, {}, 4, HALF | AHEAD),
        (8, 3000, {}, 4, AHEAD),
        (8, 4096, {}, 4, AHEAD),
        (8, 8192, {}, 4, HALF),
        (8, 16384, {"head_dim": 64}, 4, HALF),
        (8, 65536, {}, EIGHT_WARPS, {}),
        (4, 8192, {}, 4, HALF),  # all SMs would have no more blocks
        (32, 512, {}, 4, HALF | AHEAD),
        (32, 1024, {}, EIGHT_WARPS, AHEAD),
        (32, 2048, {}, 4, HALF),
        (12, 1024, {"head_dim": 64}, 4, {}),  # which would be blocks on a third of the SMs
        (24, 1024, {}, 4, AHEAD),
        (24, 2048, {}, EIGHT_WARPS, AHEAD),
        (1, 8192, {}, EIGHT_WARPS, AHEAD),
        (1, 65536, {}, KEYS_AS_ROWS, {}),
        (64, 256, {}, 4, {}),
        (64, 512, {}, 4, AHEAD),
        (128, 1024, {}, EIGHT_WARPS, AHEAD),
        (96, 1024, {"head_dim": 64}, EIGHT_WARPS, AHEAD),
        (128, 8192, {}, IN_STEP, AHEAD),
        (128, 8192, {"rows": 9}, EIGHT_WARPS, AHEAD),
        (256, 1024, {}, 4, AHEAD),  # two blocks on almost each SM
        (384, 1024, {}, 3, AHEAD),  # three
        (384, 1024, {"rows": 9}, EIGHT_WARPS, AHEAD),
        (384, 2048, {}, EIGHT_WARPS, AHEAD),
        (256, 8192, {}, 4, AHEAD),
        (768, 1024, {"head_dim": 64}, KEYS_AS_ROWS, AHEAD),
        (1536, 1024, {"head_dim": 64}, EIGHT_WARPS, AHEAD),
        (768, 2048, {"head_dim": 64}, IN_STEP, AHEAD),
        (8, 4096, {"rows": 32}, EIGHT_WARPS, {}),  # as two pairs each
        (4, 4096, {"rows": 32}, EIGHT_WARPS, AHEAD),
        (8, 1024, {"rows": 32}, 4, AHEAD),
        (1, 32768, {"rows": 32}, KEYS_AS_ROWS, {}),  # clusters for two pairs leave SMs idle
        (67, 4096, {"rows": 32}, KEYS_AS_ROWS, {}),  # one read for all rows
        (8, 4096, {"rows": 33}, KEYS_AS_ROWS, {}),
        (384, 1024, {"head_dim": 64}, 3, AHEAD),
        (384, 1024, {"head_dim": 64, "rows": 9}, EIGHT_WARPS, AHEAD),
        (320, 1024, {"head_dim": 64}, EIGHT_WARPS, AHEAD),  # a fifth of the third blocks is missing
        (8, 2048, {"head_dim": 256}, 4, AHEAD),
        (32, 1024, {"head_dim": 256}, 4, {}),  # clusters of four fill the SMs
        (64, 1024, {"head_dim": 256}, 4, AHEAD),
        (32, 8192, {"head_dim": 256}, 4, {}),
        (133, 8192, {"head_dim": 256}, 4, {}),
        (8, 4096, {"head_dim": 256, "rows": 32}, KEYS_AS_ROWS, {}),
    ],
)
def test_the_rung_of_16_bits(h200, heads, kv_len, shape, rung, how):
    call = h200(**{"dtype": 2} | shape)
    assert fastest(call, heads, kv_len, promised=True) == Choice(rung, **how)
    assert not fastest(call, heads, kv_len).ahead


@pytest.mark.parametrize(
    ("heads", "kv_len", "shape", "how"),
    [
        (8, 4096, {}, Choice(4, every_other_sm=True)),
        (24, 1024, {}, Choice(4)),
        (24, 8192, {}, Choice(EIGHT_WARPS)),
        (64, 2048, {}, Choice(4)),
        (64, 8192, {}, Choice(EIGHT_WARPS)),
        (128, 4096, {}, Choice(4)),
    ],
)
def test_the_rung_without_a_promise(h200, heads, kv_len, shape, how):
    assert fastest(h200(dtype=2, **shape), heads, kv_len) == how


def test_the_rungs_of_pages(h200):
    def how(heads, kv_len, page_size, **shape):
        call = h200(dtype=2, **shape)
        return fastest(call, heads, kv_len, page_size=page_size, promised=True)

    assert [how(1, 65536, n).rung for n in (256, 64, 48)] == [KEYS_AS_ROWS] * 2 + [EIGHT_WARPS]
    assert how(8, 4096, 64) == Choice(4, every_other_sm=True)
    assert how(16, 2048, 64) == Choice(4, ahead=True)
    assert how(32, 1024, 64) == Choice(EIGHT_WARPS, ahead=True)
    assert how(500, 4096, 64, head_dim=64).rung == KEYS_AS_ROWS


def test_the_rungs_of_many_pairs_batch_invariant(h200):
    kv_lens = (1024, 2048, 4096, 8192, 16384)

    def rungs(heads, page_size=None, **shape):
        given = dict(batch_invariant=True, page_size=page_size, promised=True)
        return [fastest(h200(dtype=2, **shape), heads, n, **given).rung for n in kv_lens]

    assert rungs(512) == [4, 4, *[IN_STEP] * 3] and rungs(384) == [6, 6, *[IN_STEP] * 3]
    assert rungs(512, head_dim=64) == [3, *[IN_STEP] * 4]
    assert rungs(512, 64) == [4] * 5 and rungs(512, 64, head_dim=64) == [3] * 5
    assert rungs(8, rows=32) == [4, *[EIGHT_WARPS] * 4]


@pytest.mark.parametrize(
    ("batch", "kv_heads", "kv_len", "blocks", "parts"),
    [
        (1, 8, 8192, 8 * 8, 0),  # every other SM
        (1, 32, 8192, 32 * 2, 0),
        (1, 1, 131072, 16 * 4, 4),  # one cluster would leave most SMs idle
        (1, 2, 2048, 2 * 16, 0),  # several would have too little to do
    ],
)
def test_the_blocks_of_rung_5(h200, batch, kv_heads, kv_len, blocks, parts):
    work = plan(h200(dtype=2), batch, kv_heads, kv_len, False, KEYS_AS_ROWS)
    assert (work.blocks, work.slots) == (blocks, parts)


def test_lengths_that_may_differ_decide(h200):
    """From 400 MB of room on."""

    def rung(heads, kv_len, lengths, **shape):
        return fastest(h200(**{"dtype": 2} | shape), heads, kv_len, lengths=lengths).rung

    assert rung(256, 4096, 32) == rung(256, 4096, 128) == rung(16, 65536, 2) == BY_LENGTH
    assert rung(64, 8192, 8, dtype=0) == rung(64, 8192, 8, head_dim=256) == BY_LENGTH
    assert BY_LENGTH not in (rung(256, 4096, 1), rung(1032, 4096, 129), rung(64, 8192, 8))
    assert rung(256, 4096, 32, rows=33) == KEYS_AS_ROWS
    promised = fastest(h200(dtype=2), 64, 16384, promised=True, lengths=8)
    assert promised == Choice(BY_LENGTH, ahead=True)


def test_a_grid_has_a_cluster_for_each_pair_or_as_many_as_fit(h200):
    call = h200(dtype=2)
    one_each = plan(call, 64, 8, 4096, False, BY_LENGTH)
    assert (one_each.blocks, one_each.slots) == (64 * 8, 396) and one_each.counters == 64 * 8 + 1
    few = plan(call, 16, 8, 8192, False, BY_LENGTH)  # clusters of two
    assert (few.blocks, few.slots) == (25 * 8 * 2, 198) and few.counters == 128 * 2 + 1
    long = plan(call, 2, 8, 131072, False, BY_LENGTH)  # of 16 blocks
    assert (long.blocks, long.slots) == (3 * 8 * 16, 21)
    # Rows of O, m and l, for clusters with more than three quarters of a share each.
    assert few.floats == (4 * 198 // 3 + 1) * 8 * 128 // 4 * 6
