"""The run of many decode steps, on the CPU."""

import pytest
import torch

from task5.ladder import steps


def test_steps_grow_end_and_start_anew(monkeypatch):
    monkeypatch.setattr(steps, "ENDS", 0.2)
    torch.manual_seed(3)
    decoding = steps.Decoding("cpu", 64)
    before = decoding.lengths.clone()
    grew = 0
    for _ in range(30):
        assert decoding.step().max() <= steps.LARGEST
        assert ((decoding.lengths >= 1) & (decoding.lengths <= 64)).all()
        grew += int((decoding.lengths == before + 1).sum())
        before = decoding.lengths.clone()
    assert 60 < grew < 120 and 4 < decoding.ended < 60


@pytest.mark.parametrize("mistake", ["a key too few", "a page table of the step before", "NaN"])
def test_a_mistake_is_found(monkeypatch, mistake):
    right, tables = steps.decode_attention, []

    def wrong(q, k, v, *, seqlens_k, block_table, **options):
        tables.append(block_table.clone())
        if mistake == "a key too few":
            seqlens_k = (seqlens_k - 1).clamp(min=1)
        elif mistake == "NaN":
            return right(q, k, v, seqlens_k=seqlens_k, block_table=block_table).fill_(torch.nan)
        else:
            block_table = tables[max(0, len(tables) - 3)]
        return right(q, k, v, seqlens_k=seqlens_k, block_table=block_table, **options)

    monkeypatch.setattr(steps, "decode_attention", wrong)
    grid = steps.run(8, 1, "cpu", room=64)
    assert grid.rows[0][1].endswith(" !") and not grid.bars[0]


def test_a_run_of_steps_is_judged():
    grid = steps.run(12, 1, "cpu", room=32)
    assert grid.title.startswith("12 decode steps in") and grid.bars[:2] == [True, True]
    assert [row[2] for row in grid.rows] == ["1.5", "-", "0", "16"]
