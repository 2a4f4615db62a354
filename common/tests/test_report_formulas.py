"""The report's formulas: operations and bytes of each step, against loops that count theirs."""

import math
import re

import pytest
import torch

from common.report import host, page, shapes
from common.report.roof import Roof
from common.report.shapes import (
    COMBINE,
    DECODE,
    FUSED,
    NAIVE,
    PRODUCT,
    SCALE,
    SCORES,
    SOFTMAX,
    SPLIT,
    decode,
    ratio,
    sizes,
    value,
)

ROOF = Roof(100e12, 4e12, "a read; a product")


class Counted(float):
    """A number that counts the operations it is in."""

    operations = 0

    def _counted(self, number):
        Counted.operations += 1
        return Counted(number)

    def __add__(self, other):
        return self._counted(float(self) + other)

    def __sub__(self, other):
        return self._counted(float(self) - other)

    def __mul__(self, other):
        return self._counted(float(self) * other)

    def __truediv__(self, other):
        return self._counted(float(self) / other)

    def exp(self):
        return self._counted(math.exp(self))

    def larger(self, other):
        return self._counted(max(float(self), other))


def run_attention(heads, queries, keys, dim):
    """FLOPs of each step of attention, written out."""
    found, before = [], 0

    def numbers(*shape):
        if not shape:
            return Counted(0.5)
        return [numbers(*shape[1:]) for _ in range(shape[0])]

    def step():
        nonlocal before
        found.append(Counted.operations - before)
        before = Counted.operations

    Counted.operations = 0
    q, k, v = numbers(heads, queries, dim), numbers(heads, keys, dim), numbers(heads, keys, dim)
    S, O = numbers(heads, queries, keys), numbers(heads, queries, dim)
    rows = [(h, i) for h in range(heads) for i in range(queries)]
    for h, i in rows:
        for j in range(keys):
            S[h][i][j] = Counted(0)
            for e in range(dim):
                S[h][i][j] += q[h][i][e] * k[h][j][e]
    step()
    for h, i in rows:
        S[h][i] = [s * 0.3 for s in S[h][i]]
    step()
    for h, i in rows:
        m, l = Counted(-math.inf), Counted(0)
        for s in S[h][i]:
            m = m.larger(s)
        P = [(s - m).exp() for s in S[h][i]]
        for p in P:
            l += p
        S[h][i] = [p / l for p in P]
    step()
    for h, i in rows:
        for e in range(dim):
            O[h][i][e] = Counted(0)
            for j in range(keys):
                O[h][i][e] += S[h][i][j] * v[h][j][e]
    step()
    return found


def test_flops_are_those_of_the_loops(monkeypatch):
    heads, seq, dim = 2, 5, 3
    monkeypatch.setattr(shapes, "HEADS", heads)
    monkeypatch.setattr(shapes, "HEAD_DIM", dim)
    letters = sizes(seq)
    counted = run_attention(heads, seq, seq, dim)
    steps = SCORES, SCALE, SOFTMAX, PRODUCT
    assert [value(work.flops, letters) for work in steps] == counted
    for whole in (NAIVE, FUSED, host.NAIVE, host.HOST):
        assert value(whole.flops, letters) == sum(counted)
    assert value(host.WORKS[0].flops, letters) == counted[0] + counted[1]
    assert value(DECODE.flops, letters) == sum(run_attention(heads, 1, seq, dim))


def test_bytes_are_those_of_the_tensors():
    heads, seq, dim, n = 8, 24, 64, 3
    letters = sizes(seq, n)
    q = k = v = out = torch.empty(heads, seq, dim)
    scores = torch.empty(heads, seq, seq)
    one, parts, lse = (torch.empty(heads, *rest) for rest in ((dim,), (n, dim), (n,)))
    moved = [
        (SCORES, (q, k, scores)), (SCALE, (scores, scores)), (SOFTMAX, (scores, scores)), (PRODUCT, (scores, v, out)),
        (NAIVE, (q, k, *[scores] * 6, v, out)), (FUSED, (q, k, v, out)), (DECODE, (one, k, v, one)),
        (SPLIT, (one, k, v, parts, lse)), (COMBINE, (parts, lse, one)),
        (decode(n), (one, k, v, parts, lse, parts, lse, one)), (host.NAIVE, (q, k, *[scores] * 4, v, out)),
    ]  # fmt: skip
    for work, tensors in moved:
        assert value(work.bytes, letters) == sum(t.nbytes for t in tensors), work.name
    assert value(COMBINE.flops, letters) == heads * (n * (2 * dim + 4) + dim)


@pytest.mark.parametrize(
    ("work", "short", "long", "formula"),
    [
        (SCORES, 16, 28.444, "S D / (4 D + 2 S)"),
        (SOFTMAX, 0.625, 0.625, "5 / 8"),
        (PRODUCT, 16, 28.444, "S D / (4 D + 2 S)"),
        (NAIVE, 8.1875, 10.48, "(2 S D + 3 S) / (8 D + 12 S)"),
        (FUSED, 32.75, 262, "(2 S D + 3 S) / (8 D)"),
        (DECODE, 0.50775, 0.51122, "(2 S D + 3 S) / (4 D + 4 S D)"),
    ],
)
def test_intensities(work, short, long, formula):
    assert work.intensity(sizes(128)) == pytest.approx(short, rel=1e-4)
    assert work.intensity(sizes(1024)) == pytest.approx(long, rel=1e-4)
    assert ratio(work) == formula
    letters = {"H": 3, "n": 2, "S": 7, "D": 5}
    python = re.sub(r"(?<=\w) (?=\w)", " * ", formula)
    assert work.intensity(letters) == pytest.approx(eval(python, letters))


def test_formulas_as_text():
    assert shapes.text(NAIVE.flops) == "4 H S² D + 6 H S²"
    assert SCORES.traffic == "8 H S D (read q, k) + 4 H S² (write scores)"
    table = page.numbers([SPLIT, COMBINE], {128: 1, 1024: 7})
    assert table.rows[0][1:4] == ["-"] * 3 and table.rows[1][6] == "0.476"  # 988 / 2076


def test_the_roof_has_a_ridge():
    assert ROOF.ridge == 25
    assert (ROOF.at(10), ROOF.at(1000)) == (40e12, 100e12)
    assert (ROOF.limit(24.9), ROOF.limit(25)) == ("memory", "compute")
