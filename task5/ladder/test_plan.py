"""Which rung and how many blocks a call of decode gets on an H200. No GPU is asked."""

from types import SimpleNamespace

import pytest
import torch

from task5.ladder.plan import (
    EIGHT_WARPS,
    IN_STEP,
    KEYS_AS_ROWS,
    OF_EIGHT_WARPS,
    ONE_TREE,
    Call,
    fastest,
    fastest_ahead,
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
            for batch in (1, 3, 64):
                for kv_len in (1, 100, 5000, 200_000):
                    for page_size in (None, 16, 64):
                        for choose in (fastest, fastest_ahead):
                            shared = h200(**shape), batch * kv_heads, kv_len
                            rung = choose(*shared, True, page_size) or 4
                            work = plan(shared[0], batch, kv_heads, kv_len, True, rung)
                            rungs.add(rung)
                            leaves.add(work.chunks)
            assert rungs <= set(ONE_TREE) and len(leaves) == 1
    for wide, rung in (
        (dict(head_dim=256), 4),
        (dict(head_dim=256, rows=17), 5),
        (dict(rows=33), 5),
    ):
        chosen = {
            fastest(h200(dtype=2, **wide), heads, kv_len, True, page_size)
            for heads in (1, 8, 500)
            for kv_len in (9, 99_999)
            for page_size in (None, 16)
        }
        assert chosen == {rung}
        assert fastest_ahead(h200(dtype=2, **wide), 8, 99_999, True, None) is None


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
    assert fastest(h200(), batch * kv_heads, kv_len, False, None) == rung
    work = plan(h200(), batch, kv_heads, kv_len, False, rung)
    assert work.blocks == blocks
    assert work.slots == (blocks if kv_len == 131072 else 0)  # the blocks of a pair are no cluster
    assert fastest(h200(head_dim=256), batch * kv_heads, kv_len, False, None) == 1


def test_two_blocks_share_an_sm_where_each_has_much_to_do(h200):
    assert [plan(h200(), 16, 8, n, False, 4).blocks for n in (2048, 8192)] == [128, 256]


def test_rung_7_reads_long_caches_in_order(h200):
    def rung(heads, kv_len, invariant=False, page_size=None, **shape):
        return fastest(h200(**{"dtype": 2} | shape), heads, kv_len, invariant, page_size)

    assert rung(128, 8192) == rung(8, 131072) == rung(128, 8192, True) == IN_STEP
    assert rung(128, 8192, page_size=64) == rung(128, 4096) == rung(256, 8192) == 4
    assert rung(128, 8192, rows=9) == rung(128, 8192, head_dim=256) == 4
    assert rung(128, 4096, dtype=0) == IN_STEP and rung(128, 4096, True, dtype=0) == 4


@pytest.mark.parametrize(
    ("heads", "kv_len", "shape", "rung"),
    [
        (8, 1024, {}, 4),
        (8, 4096, {}, KEYS_AS_ROWS),
        (16, 4096, {}, 3),
        (16, 8192, {}, KEYS_AS_ROWS),
        (4, 4096, {}, 4),
        (4, 12288, {}, KEYS_AS_ROWS),
        (8, 16384, {}, EIGHT_WARPS),
        (32, 1024, {}, EIGHT_WARPS),
        (64, 2048, {}, 4),
        (64, 8192, {}, EIGHT_WARPS),
        (128, 4096, {}, 4),
        (128, 8192, {}, IN_STEP),
        (8, 131072, {}, IN_STEP),
        (512, 1024, {}, 4),
        (512, 1024, {"head_dim": 64}, 3),
        (8, 4096, {"head_dim": 64}, 4),
        (8, 8192, {"head_dim": 64}, 3),
        (8, 4096, {"rows": 32}, EIGHT_WARPS),  # as two pairs each
        (8, 1024, {"rows": 32}, 4),
        (1, 32768, {"rows": 32}, KEYS_AS_ROWS),  # clusters for two pairs leave SMs idle
        (67, 4096, {"rows": 32}, KEYS_AS_ROWS),  # one read for all rows
        (8, 4096, {"rows": 33}, KEYS_AS_ROWS),
        (32, 8192, {"head_dim": 256}, 4),
        (133, 8192, {"head_dim": 256}, 1),
        (8, 4096, {"head_dim": 256, "rows": 32}, KEYS_AS_ROWS),
    ],
)
def test_the_rung_of_16_bits(h200, heads, kv_len, shape, rung):
    assert fastest(h200(dtype=2, **shape), heads, kv_len, False, None) == rung


@pytest.mark.parametrize(
    ("heads", "kv_len", "shape", "rung"),
    [
        (8, 1024, {}, None),
        (8, 2048, {}, KEYS_AS_ROWS),
        (8, 4096, {}, 4),
        (8, 8192, {}, EIGHT_WARPS),
        (32, 1024, {}, EIGHT_WARPS),
        (64, 512, {}, 4),
        (128, 1024, {}, EIGHT_WARPS),
        (128, 8192, {}, IN_STEP),
        (128, 8192, {"rows": 9}, EIGHT_WARPS),
        (256, 1024, {}, 4),
        (256, 8192, {}, 4),
        (12, 1024, {"head_dim": 64}, None),
        (12, 4096, {"head_dim": 64}, 4),
        (96, 1024, {"head_dim": 64}, EIGHT_WARPS),
        (48, 16384, {"head_dim": 64}, 4),
        (96, 4096, {"head_dim": 64}, KEYS_AS_ROWS),
        (768, 1024, {"head_dim": 64}, KEYS_AS_ROWS),
        (8, 4096, {"rows": 32}, EIGHT_WARPS),
        (1, 32768, {"rows": 32}, None),
        (8, 4096, {"rows": 33}, None),
        (32, 8192, {"head_dim": 256}, None),
        (8, 8192, {"dtype": 0}, None),
    ],
)
def test_the_rung_where_keys_are_loaded_ahead(h200, heads, kv_len, shape, rung):
    assert fastest_ahead(h200(**{"dtype": 2} | shape), heads, kv_len, False, None) == rung


def test_rung_5_does_not_take_small_pages(h200):
    rungs = [fastest(h200(dtype=2), 8, 8192, False, size) for size in (None, 256, 64, 48, 16)]
    assert rungs == [KEYS_AS_ROWS] * 3 + [3] * 2


def test_the_rungs_of_a_batch_invariant_call(h200):
    kv_lens = (1024, 2048, 4096, 8192, 16384)

    def rungs(heads, **shape):
        return [fastest(h200(dtype=2, **shape), heads, n, True, None) for n in kv_lens]

    def rungs_ahead(heads, **shape):
        return [fastest_ahead(h200(dtype=2, **shape), heads, n, True, None) for n in kv_lens]

    assert rungs(8) == [4, 4, 3, 3, EIGHT_WARPS] and rungs(16) == [4, 3, 4, 4, EIGHT_WARPS]
    assert rungs(8, head_dim=64) == [4, 4, 4, 3, 3]
    for of in (rungs, rungs_ahead):  # of more pairs than SMs
        assert of(500) == [4, 4, *[IN_STEP] * 3] and set(of(500, head_dim=64)) == {3}
    assert rungs(8, rows=32) == rungs_ahead(8, rows=32) == [4, 4, *[EIGHT_WARPS] * 3]


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
