"""Into how many blocks a chunk's keys are split: from shapes alone, as an H200 would."""

import itertools

import pytest

from task5.ladder import chunk
from task5.ladder.chunk import Work, best_split

AT_ONCE = (132, 66, 30, 15)  # clusters of 1, 2, 4 and 8 blocks on an H200


def test_more_splits_where_tiles_are_few():
    assert best_split(Work(132, 1, 40), AT_ONCE) == (1, 1)
    assert best_split(Work(1, 1, 1, chunk.FEW), AT_ONCE) == (1, 1)
    for rows in (chunk.FEW, chunk.ROWS, chunk.MANY):
        for heads in (1, 2, 4, 8, 16, 32):
            for tiles_of_a_head in {1, 1 if rows == chunk.FEW else 2}:
                work = Work(heads, tiles_of_a_head, 512, rows)
                splits, clusters = best_split(work, AT_ONCE)
                assert 64 <= work.tiles * splits * clusters <= 132
                assert work.tiles * clusters <= AT_ONCE[chunk.SPLITS.index(splits)]  # one wave


def test_clusters_of_few_rows_are_on_half_of_the_sms_or_almost_all():
    for tiles, blocks in itertools.product(range(1, 67), (40, 100, 800)):
        splits, clusters = best_split(Work(tiles, 1, blocks, chunk.FEW), AT_ONCE)
        assert splits == 1 or not 66 < tiles * splits * clusters < 112


def test_blocks_and_shares_by_length():
    """Clusters of two on all SMs for few rows; several rounds of shares where the last tiles would be alone."""

    def chosen(tiles, rows=chunk.FEW, head_dim=128):
        return chunk._by_length(Work(tiles, 1, 400, rows, head_dim), 4, AT_ONCE, 132)

    assert chosen(5) == (4, 30) and chosen(6) == chosen(66) == (2, 66)
    assert chosen(67) == chosen(132) == chosen(199) == (1, 132)
    assert chosen(133) == chosen(198) == (1, 264)
    assert chosen(133, head_dim=64) == (1, 396)
    assert chosen(66, chunk.ROWS) == chosen(132, chunk.ROWS) == (4, 30)
    assert chosen(133, chunk.ROWS) == chosen(67, chunk.ROWS, 64) == (4, 60)
    assert chosen(100, chunk.ROWS, 64) == chosen(133, chunk.ROWS, 64) == (4, 30)


@pytest.mark.parametrize("leaves", [1, 2, 16, 256])
def test_batch_invariant_splits_are_no_more_than_leaves(leaves):
    for rows in (chunk.FEW, chunk.ROWS):
        for blocks in (1, 3, 17, 64, 1000):
            work = Work(2, 1, blocks, rows)
            splits, clusters = best_split(work, AT_ONCE, leaves)
            used = chunk._used(leaves, blocks)
            assert clusters & (clusters - 1) == 0
            assert splits * clusters * work.consumers <= max(used, work.consumers)
            assert used <= max(1, blocks)


def test_tiles_of_three_consumers():
    """Of head_dim 64, where there are so many tiles that all SMs have some."""

    def rows(q_len, head_dim=64):
        works = chunk._works(1, q_len, 32, 8, 8192, head_dim)
        return chunk._fastest(works, AT_ONCE)[0].rows

    assert (rows(16), rows(17), rows(700), rows(700, 128)) == (64, 128, 192, 128)


@pytest.mark.parametrize(
    ("batch", "q_len", "kv_len", "heads", "kv_heads", "faster"),
    [
        (3, 333, 5000, 16, 4, True),  # packed heads need no second wave
        (1, 16, 2048, 32, 8, True),  # 8 tiles for 132 SMs
        (1, 256, 65536, 32, 8, True),
        (1, 1024, 16384, 32, 8, False),  # enough tiles for all SMs
        (4, 256, 2048, 32, 8, False),
    ],
)
def test_where_it_is_faster_than_the_ladder(batch, q_len, kv_len, heads, kv_heads, faster):
    assert chunk._is_faster(batch, q_len, heads, kv_heads, kv_len, 128, AT_ONCE) == faster


def test_a_grid_has_no_room_for_more():
    assert chunk._has_room(65535, 8) and not chunk._has_room(65536, 8)
    assert chunk._has_room(1, 4095) and not chunk._has_room(1, 4096)
