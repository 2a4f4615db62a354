"""How made-up times are judged."""

import torch

from common.timing.peers import FA3
from task5.ladder import bars, benchmark, prefill, uneven
from task5.ladder.benchmark import FP32, INVARIANT, NO_PROMISE, OURS, Shape, paged
from task5.ladder.fakes import CUDNN, LARGE, SHORT, XQA, at, times


def test_which_bar_a_shape_has():
    assert bars.faster(Shape(64, 12, 12, 1024, 64)) == 1.05
    assert bars.faster(LARGE) == 1.0 and bars.faster(Shape(1, 32, 8, 131072)) == 1.0
    assert bars.faster(Shape(16, 32, 32, 1024, dtype=FP32)) == 1.0
    assert bars.faster(SHORT) == bars.faster(Shape(4, 32, 32, 1074)) == 1.25
    assert bars.faster(Shape(16, 32, 8, 1024)) is bars.faster(Shape(1, 32, 8, 512)) is None


def judged(shape, microseconds, **left_out):
    grid = bars.speed_grid(times({shape: at(microseconds, **left_out)}))
    (row,) = grid.rows
    assert len(row) == len(grid.columns)
    return row[1:], grid.bars


def test_speed_is_judged():
    row, met = judged(
        LARGE, {OURS: 130, CUDNN: 130, XQA: 131, NO_PROMISE: 140, INVARIANT: 134, paged(64): 133}
    )
    assert row == ["537", "1.00", "1", CUDNN, "0.93", "0.94 !", "1.03 !", "1.02", "-"]
    assert met == [True, False, False, True]
    row, met = judged(SHORT, {OURS: 10, XQA: 12, paged(64): 10.2, paged(16): 10.9})
    assert row == ["17", "1.20 !", "1.25", XQA, "-", "0.38", "-", "1.02", "1.09 !"]
    assert met == [False, True, False]
    row, met = judged(LARGE, {OURS: 125})  # no library is here
    assert row[1:6] == ["-", "1", "-", "-", "0.98"] and met == [True]
    row, met = judged(LARGE, {OURS: 125}, **{paged(64): "wrong"})
    assert row[7:] == ["left out !", "-"] and met == [True, False]
    row, met = judged(LARGE, {CUDNN: 125}, ours="wrong result: 1 away from float64")
    assert row[1] == "wrong result: 1 away from float64 !" and met == [False]


def test_errors_are_judged(monkeypatch):
    shapes = [Shape(2, 4, 2, 96, 64), Shape(2, 4, 2, 32, 64, torch.float16)]

    def fails(inputs):
        raise RuntimeError("not here")

    def better(inputs):
        return [lambda: inputs.truth(0).float()]

    sides = {"same": benchmark.ours, "better": better, "fails": fails}
    monkeypatch.setattr(bars, "peer_sides", lambda dtype: sides)
    monkeypatch.setattr(bars, "LABELS", tuple(sides))
    grid = bars.accuracy_grid(1, shapes, "cpu")
    for row in grid.rows:
        assert row[1] == "1.00, 1.00" and row[3] == "-" and row[4].endswith(" !")
    assert grid.bars == [False] * 4
    del sides["better"]
    assert bars.accuracy_grid(1, shapes, "cpu").bars == [True] * 4
    monkeypatch.setattr(bars, "ours", fails)
    grid = bars.accuracy_grid(1, shapes, "cpu")
    assert grid.rows[0][-2:] == ["not here !", "-"] and grid.bars == [False] * 2
    assert all(len(row) == len(grid.columns) for row in grid.rows)


def test_uneven_lengths_are_judged():
    fast, slow, broken = uneven.SHAPES[:3]
    found = {
        fast.key: at({OURS: 10, XQA: 12.5, "FlashInfer": 15}),
        slow.key: at({OURS: 10, FA3.label: 9}),
        broken.key: at({XQA: 10}, ours="wrong result: 1 away from float64"),
    }
    grid = uneven.judge([fast, slow, broken], found, 3000.0)
    assert all(len(row) == len(grid.columns) for row in grid.rows)
    assert grid.rows[0][1:4] == ["151", "50.3", "10.0"]
    assert grid.rows[0][-2:] == ["1.25", XQA] and grid.rows[1][-2:] == ["0.90 !", FA3.label]
    assert grid.bars == [True, False, False]
    assert "SDPA" not in "".join(grid.columns)


def test_the_uneven_shapes():
    keys = [shape.key for shape in uneven.SHAPES]
    assert len(set(keys)) == len(keys) and all(len(set(s.lengths)) > 1 for s in uneven.SHAPES)
    assert all(min(s.lengths) >= 1 and max(s.lengths) == s.kv_len for s in uneven.SHAPES)


def test_chunks_are_judged():
    fast, slow, broken = prefill.CHUNKS[:3]
    found = {
        fast.key: at({OURS: 10, prefill.LADDER: 30, CUDNN: 12.5}),
        slow.key: at({OURS: 10, CUDNN: 12.5, "FlashInfer": 9}),
        broken.key: at({CUDNN: 10}, ours="wrong result: 1 away from float64"),
    }
    grid = prefill.judge([fast, slow, broken], found)
    assert all(len(row) == len(grid.columns) for row in grid.rows)
    assert grid.rows[0][-2:] == ["1.25", CUDNN] and grid.rows[1][-2:] == ["0.90 !", "FlashInfer"]
    assert grid.rows[2][1] == "wrong result: 1 away from float64 !"
    assert grid.bars == [True, False, False]
    assert prefill.flop(Shape(1, 1, 1, 3, 64, q_len=2)) == 4 * 64 * 5  # 2 keys and 3


def test_the_chunks():
    keys = [chunk.key for chunk in prefill.CHUNKS]
    assert keys[0] == "B3 q333 16/4 kv5000 d64 bfloat16" and len(set(keys)) == len(keys) == 58
