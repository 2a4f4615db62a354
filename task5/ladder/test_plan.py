"""How many blocks a call of decode gets on an H200. No GPU is asked."""

import itertools

import pytest
import torch

from common.build import Kernels
from task5.ladder.choice import fastest
from task5.ladder.kernels import (
    BY_LENGTH,
    EIGHT_WARPS,
    IN_STEP,
    KEYS_AS_ROWS,
    MORE_ROWS,
    MORE_ROWS_BY_LENGTH,
    ONE_TREE,
    Call,
    Choice,
)
from task5.ladder.plan import plan, used_leaves

_leaves = Kernels(__file__, "../../common/tests/kernels/leaves.cu")


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
        (dict(rows=33), MORE_ROWS),
    ):
        for heads, kv_len, page_size in itertools.product((1, 8, 500), (9, 99_999), (None, 16)):
            given = dict(batch_invariant=True, page_size=page_size, promised=True)
            assert fastest(h200(dtype=2, **wide), heads, kv_len, **given).rung == rung


@pytest.mark.parametrize(
    ("batch", "kv_heads", "kv_len", "rung", "blocks"),
    [
        (1, 8, 1024, 4, 8 * 8),  # two tiles each
        (1, 6, 4096, EIGHT_WARPS, 6 * 16),
        (1, 6, 8192, EIGHT_WARPS, 6 * 16),
        (2, 8, 512, 4, 16 * 4),
        (2, 12, 2048, 4, 24 * 4),
        (8, 8, 2048, 4, 64 * 2),
        (9, 8, 1024, EIGHT_WARPS, 72),
        (16, 8, 2048, 4, 128),
        (16, 8, 8192, IN_STEP, 128),
        (17, 8, 1024, 4, 136),
        (36, 8, 1024, 3, 288),
        (16, 32, 1024, 4, 512),  # more pairs than fit
        (1, 1, 64, 4, 1),
        (1, 8, 131072, IN_STEP, 8 * 16),  # a block on each SM, no clusters
    ],
)
def test_the_rung_of_float32(h200, batch, kv_heads, kv_len, rung, blocks):
    few_keys = batch * kv_heads * kv_len <= 8192
    for promised in (False, True):
        how = fastest(h200(), batch * kv_heads, kv_len, promised=promised)
        assert how == Choice(rung, promised and few_keys)
    work = plan(h200(), batch, kv_heads, kv_len, False, rung)
    assert work.blocks == blocks
    assert work.slots == (blocks if kv_len == 131072 else 0)  # the blocks of a pair are no cluster
    assert fastest(h200(head_dim=256), batch * kv_heads, kv_len) == Choice(4)


@pytest.mark.parametrize(
    ("kv_heads", "kv_len", "shape", "of_a_cluster", "clusters"),
    [
        (1, 8192, {}, 8, 8),  # on half of the SMs
        (2, 99_999, {}, 8, 4),
        (3, 99_999, {}, 2, 16),
        (5, 99_999, {}, 2, 8),
        (8, 16384, {}, 2, 8),
        (8, 8192, {}, 8, 1),  # of too few keys
        (6, 99_999, {}, 16, 1),  # as fast
        (12, 16384, {}, 2, 4),
        (32, 16384, {}, 2, 2),
        (1, 8192, {"dtype": 0}, 8, 16),
        (8, 8192, {"dtype": 0}, 2, 8),
        (1, 16384, {"head_dim": 256}, 8, 8),
        (4, 32768, {"rows": 32}, 2, 8),
        (8, 32768, {"rows": 32}, 1, 8),
    ],
)
def test_a_pair_has_several_clusters(h200, kv_heads, kv_len, shape, of_a_cluster, clusters):
    call = h200(**{"dtype": 2} | shape)
    pairs = kv_heads * (1 + call.two_tiles)
    for invariant in (False, True):
        rung = EIGHT_WARPS if call.head_dim < 256 and not invariant else 4
        work = plan(call, 1, kv_heads, kv_len, invariant, rung)
        if not invariant:
            assert work.blocks == pairs * of_a_cluster * clusters
            assert work.slots == (pairs * clusters if clusters > 1 else 0)
        assert work.blocks <= pairs * of_a_cluster * clusters
        assert work.chunks >= invariant and work.counters <= work.blocks


@pytest.mark.parametrize(
    ("kv_heads", "kv_len", "rows", "of_a_cluster", "clusters"),
    [
        (1, 99_999, 32, 8, 8),  # on half of the SMs
        (1, 99_999, 64, 8, 4),
        (4, 99_999, 32, 2, 16),
        (5, 99_999, 17, 4, 4),
        (8, 99_999, 32, 2, 8),
        (24, 99_999, 32, 4, 1),
        (32, 8192, 32, 2, 2),
        (100, 8192, 32, 1, 1),
        (8, 500, 33, 4, 1),  # two tiles each
        (300, 500, 33, 1, 1),
    ],
)
def test_more_rows_take_small_clusters(h200, kv_heads, kv_len, rows, of_a_cluster, clusters):
    pairs = kv_heads * -(-rows // 32)
    call = h200(dtype=2, rows=rows)
    work = plan(call, 1, kv_heads, kv_len, False, MORE_ROWS)
    assert work.blocks == pairs * of_a_cluster * clusters
    assert work.slots == (pairs * clusters if clusters > 1 else 0)
    assert plan(call, 1, kv_heads, kv_len, True, MORE_ROWS).blocks <= work.blocks


def test_more_rows_by_length_have_more_clusters_than_pairs(h200):
    def work(batch, kv_heads, rows=32):
        found = plan(h200(dtype=2, rows=rows), batch, kv_heads, 8192, False, MORE_ROWS_BY_LENGTH)
        assert found.floats == (4 * found.slots // 3 + 1) * 32 * 128 // 4 * 6
        return found.blocks, found.slots

    assert work(8, 1) == work(2, 2) == work(2, 1, 64) == (66 * 2, 66)
    assert work(2, 8) == work(8, 8) == (64 * 2, 64)
    assert work(9, 8) == (128, 128) and work(4, 25) == (125, 125)  # blocks that are no clusters
    assert work(64, 8) == (512, 132)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_few_pairs_by_length_have_clusters_of_two_on_all_sms(h200, head_dim):
    """Also where clusters of more blocks do not all fit."""
    for rung in BY_LENGTH[: 3 if head_dim <= 128 else 1]:
        for batch, kv_heads, clusters in (
            (8, 1, 66),
            (2, 8, 64),
            (4, 8, 64),
            (9, 4, 64),
            (66, 1, 66),
        ):
            work = plan(h200(dtype=2, head_dim=head_dim), batch, kv_heads, 65536, False, rung)
            assert (work.blocks, work.slots) == (clusters * 2, clusters)
            parts = 4 * clusters // 3 + 1
            assert work.counters == (batch * kv_heads + parts) * 2 + 1
        alone = plan(h200(dtype=2, head_dim=head_dim), 99, 1, 1024, False, rung)
        assert (alone.blocks, alone.slots) == (99, 99)


def test_somewhat_more_pairs_than_half_of_the_sms_have_blocks_on_all_of_them(h200):
    """Of rung 8, two to an SM, or with head_dim 256 one; in long caches clusters of two. In float32 of more pairs."""

    def work(batch, kv_heads, kv_len, rung=8, **shape):
        found = plan(h200(**{"dtype": 2} | shape), batch, kv_heads, kv_len, False, rung)
        return found.blocks, found.slots

    assert work(72, 1, 16384) == work(19, 4, 16384) == (264, 132)
    assert work(9, 8, 16384) == (256, 128)
    assert work(72, 1, 8192) == work(91, 1, 8192) == work(77, 1, 32768) == (264, 264)
    assert work(9, 8, 8192) == (264, 264)
    assert work(81, 1, 4096, head_dim=256) == (132, 132)
    assert work(82, 1, 4096, head_dim=256) == (82, 82)
    assert work(92, 1, 8192) == (92, 92) and work(72, 1, 16384, 10) == (72, 72)
    assert work(67, 1, 1024, dtype=0) == work(131, 1, 1024, dtype=0) == (264, 264)
    assert (
        work(67, 1, 1024, 10, dtype=0, rows=5)
        == work(131, 1, 1024, 10, dtype=0, rows=5)
        == (132, 132)
    )
    assert work(9, 8, 1024, 10, dtype=0, rows=5) == (128, 128)
    assert (
        work(72, 1, 16384, dtype=0, rows=5) == work(72, 1, 16384, dtype=0, head_dim=256) == (72, 72)
    )
    assert plan(h200(dtype=2), 72, 1, 16384, True, 8).blocks == 72  # batch-invariant


def test_two_blocks_share_an_sm_where_lengths_decide(h200):
    """Of few keys one, and where only some SMs would have a second one."""
    deep = BY_LENGTH[0]
    call = h200(dtype=2)
    assert [plan(call, 16, 8, n, False, deep).blocks for n in (2048, 8192)] == [128, 256]
    assert plan(call, 16, 8, 8192, False, 4).blocks == 128
    assert plan(call, 12, 8, 8192, False, deep).blocks == 96


@pytest.mark.parametrize(
    ("kv_heads", "kv_len", "blocks"),
    [(8, 1024, 64), (8, 2048, 64), (8, 8192, 64), (16, 1024, 64), (16, 4096, 64)],
)
def test_a_launch_leaves_every_other_sm_to_the_next(h200, kv_heads, kv_len, blocks):
    for shape in ({}, {"batch_invariant": True}):
        how = fastest(h200(dtype=2), kv_heads, kv_len, **shape)
        assert how == Choice(4, every_other_sm=True)
        invariant = "batch_invariant" in shape
        work = plan(h200(dtype=2), 1, kv_heads, kv_len, invariant, how.rung, how.every_other_sm)
        assert work.blocks == blocks and work.slots == 0


@pytest.mark.parametrize(
    ("pairs", "kv_len", "blocks", "shape"),
    [
        (1, 1000, 16, {}),  # a tile each
        (1, 512, 8, {}),
        (4, 960, 8, {}),  # of 15 tiles
        (5, 1024, 8, {}),  # 16 would be on more than half of the SMs
        (16, 250, 4, {}),
        (17, 250, 2, {}),  # two tiles each
        (33, 128, 2, {}),
        (34, 128, 1, {}),
        (3, 1024, 16, dict(head_dim=256)),
        (4, 1024, 8, dict(head_dim=256)),  # no room for two launches' clusters of 16
        (4, 512, 8, dict(head_dim=256)),
    ],
)
def test_blocks_of_few_tiles(h200, pairs, kv_len, blocks, shape):
    assert plan(h200(dtype=2, **shape), 1, pairs, kv_len, False, 4).blocks == pairs * blocks


def test_batch_invariant_warps_have_a_leaf_each_rather_than_two_tiles(h200):
    call = h200(dtype=2, head_dim=64)
    # Eight blocks of each pair would be on more than half of the SMs.
    assert plan(call, 1, 12, 768, False, 4).blocks == 12 * 4
    assert plan(call, 1, 12, 768, True, 4).blocks == 12 * 8
    assert used_leaves(call, 4, 12, 768) == 8 * 4
    # Three tiles of a block, 12 of a warp, which are 16 leaves.
    call = h200(dtype=0)
    assert plan(call, 1, 4, 192, False, 4).blocks == 4 * 2
    assert plan(call, 1, 4, 192, True, 4).blocks == 4 * 4


@pytest.mark.parametrize(
    ("kv_heads", "shape", "leaves"),
    [  # of 47, 48, 100, 400, 1000, 3000 and 10,000 tiles of a warp
        (8, {}, (16, 32, 32, 32, 64, 64, 128)),
        (4, {}, (16, 32, 64, 64, 64, 128, 128)),
        (1, {}, (16, 32, 64, 256, 256, 256, 512)),
        (32, {}, (16, 16, 16, 16, 16, 32, 32)),
        (2, dict(rows=16), (16, 32, 32, 128, 128, 128, 256)),
        (1, dict(head_dim=256), (16, 32, 64, 128, 256, 256, 512)),
        (8, dict(head_dim=256), (16, 16, 32, 32, 64, 64, 128)),
    ],
)
def test_how_many_leaves(h200, kv_heads, shape, leaves):
    """Two or four tiles each, as many as a quarter of the warps, or half; and more for long sequences."""
    tiles = (47, 48, 100, 400, 1000, 3000, 10_000)
    call = h200(dtype=2, **shape)
    assert tuple(used_leaves(call, 4, kv_heads, 16 * n) for n in tiles) == leaves
    assert tuple(used_leaves(call, 3, kv_heads, 16 * n) for n in tiles) == leaves


def test_a_few_leaves_have_one_tile_each(h200):
    tiles = (1, 2, 3, 5, 6, 11, 12, 23, 24)
    for dtype, leaves in (
        (2, (1, 2, 4, 4, 8, 8, 8, 8, 16)),
        (0, (1, 2, 4, 4, 8, 8, 16, 16, 16)),  # float32
    ):
        assert tuple(used_leaves(h200(dtype=dtype), 4, 8, 16 * n) for n in tiles) == leaves


def test_plans_and_kernels_cut_keys_into_as_many_leaves():
    for dtype, head_dim, rows, kv_heads in itertools.product(
        (0, 1, 2), (64, 128, 256), (1, 4, 16), (1, 2, 3, 4, 8, 12, 32, 132)
    ):
        call = Call(torch.device("cpu"), dtype, head_dim, rows, sms=132, hopper=True)
        for kv_len in {int(1.25**n) for n in range(56)}:  # up to 200,000
            given = dict(
                dtype=dtype, head_dim=head_dim, rows=rows, kv_len=kv_len,
                chunks=plan(call, 1, kv_heads, kv_len, True, 4).chunks,
            )  # fmt: skip
            cut = _leaves.query("leaves", call.device, **given)
            assert used_leaves(call, 4, kv_heads, kv_len) == cut, given


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


def test_where_lengths_decide_a_grid_has_a_cluster_for_each_pair(h200):
    call, (deep, shallow, of_eight_warps, _) = h200(dtype=2), BY_LENGTH
    one_each = plan(call, 64, 8, 4096, False, deep)
    assert (one_each.blocks, one_each.slots) == (64 * 8, 396)
    assert one_each.counters == 64 * 8 + 4 * 396 // 3 + 1 + 1
    few = plan(call, 16, 8, 8192, False, deep)  # clusters of two, no more of them than pairs
    assert (few.blocks, few.slots) == (128 * 2, 128)
    assert few.counters == (128 + 4 * 128 // 3 + 1) * 2 + 1
    assert plan(call, 12, 8, 8192, False, deep).blocks == 96
    for rung, at_once in ((shallow, 396), (of_eight_warps, 132)):
        work = plan(call, 64, 8, 4096, False, rung)
        assert (work.rung, work.blocks, work.slots) == (rung, 64 * 8, at_once)
    # Rows of O, m and l, for clusters with more than three quarters of a share each.
    assert few.floats == (4 * 128 // 3 + 1) * 8 * 128 // 4 * 6
