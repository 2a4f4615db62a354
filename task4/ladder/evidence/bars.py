"""The bars: how fast and how accurate the rungs that calls get have to be. ``python -m task4.ladder --bars``."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import mean

import torch
from torch import Tensor

from common.check import Rng
from common.check.hard_inputs import FLOAT32, LAZY, make_inputs
from common.record.grid import Grid
from common.timing.compare import Measured
from common.timing.peers import CUDNN, EFFICIENT, FA3, Peer
from task4.ladder.benchmark import HEAD_DIMS, SEQS, Cell, Precision, host_cost, time_methods
from task4.ladder.call import ladder_attention
from task4.ladder.evidence.accuracy import ALLOWED, YARDSTICK, compare, worst
from task4.ladder.rungs import FP32, Rung

HOST_US = 10  # microseconds that a call may cost the host
WEAK = {"rising scores": 0.97, "jumps of more than 2^126": 0.9}  # x FlashAttention-3, at least
LOSS = dict.fromkeys(FLOAT32, 2.0) | {"subnormal v": 1.0}  # x PyTorch's fused kernel, at most
SEEDS = 20
MASKS = {f"d {d}{', causal' if c else ''}": (d, c) for d in HEAD_DIMS for c in (False, True)}
ODD = {  # (batch, q_len, heads, head_dim), (kv_len, kv_heads), causal
    "S 2,111, d 128": ((2, 2111, 16, 128), (2111, 16), False),
    "S 4,500, d 64, causal": ((1, 4500, 32, 64), (4500, 32), True),
    "S 1,000, 5 heads, d 128, causal": ((3, 1000, 5, 128), (1000, 5), True),
    "S 129, batch 64, d 64": ((64, 129, 16, 64), (129, 16), False),
    "S 16,384, 2 heads, d 128, causal": ((1, 16384, 2, 128), (16384, 2), True),
    "32 heads on 8 kv heads, d 128, causal": ((2, 4096, 32, 128), (4096, 8), True),
    "512 queries on 16,384 keys, d 128, causal": ((1, 512, 16, 128), (16384, 16), True),
}


def rivals(precision: Precision) -> tuple[Peer, ...]:
    """The libraries' kernels that the bars are relative to."""
    return (EFFICIENT,) if precision.dtype == FP32 else (CUDNN, FA3)


def bar(precision: Precision, cell: Cell) -> float | None:
    """The factor by which the default rung has to be faster than the best rival; None where there is no bar."""
    if precision.dtype == FP32:
        return 2.5 if cell.seq >= 2048 else None
    if cell.head_dim not in (64, 128):
        return None
    return 1.05 if cell.seq >= 2048 else 1.0


def judged(
    grid: Grid, rung: Rung, found: Measured | None, peers: Sequence[Peer], bar: float | None
) -> str:
    """A rung's speed relative to the fastest of these libraries. Without one of them it is not held to the bar."""
    if found is None:
        return "-"
    if rung.label in found.left_out:
        grid.bars.append(False)
        return found.left_out[rung.label]
    times = [found.times[peer.label].median_ms for peer in peers if peer.label in found.times]
    if not times or rung.label not in found.times:
        return "-"
    ratio = min(times) / found.times[rung.label].median_ms
    return grid.judged(ratio, bar if len(times) == len(peers) else None)


def ratio_grid(
    precision: Precision,
    find: Callable[[Cell], Measured | None],
    choose: Callable[[int, int], Rung | None] | None = None,
) -> Grid:
    """The ratio in each cell that ``find`` knows, of the rung that ``choose`` gives for (head_dim, keys): the default.

    A row is named for the rung of its longest rows; ``r14`` beside a ratio names another one.
    """
    peers, asked = rivals(precision), "1.05 from S 2,048, 1.00 below, at d 64 and 128"
    if precision.dtype == FP32:
        asked = "2.5 from S 2,048"
    names = " and ".join(peer.label for peer in peers)
    title = f"{precision.name}: speed relative to the best of {names} (bar: {asked})"
    grid = Grid(title, ["", *(f"S {seq:,}" for seq in SEQS)])
    for mask, (d, causal) in MASKS.items():
        ours = {seq: (choose or precision.default)(d, seq) for seq in SEQS}
        if longest := ours[SEQS[-1]]:
            texts = []
            for seq, rung in ours.items():
                cell = Cell(d, seq, causal)
                text = judged(grid, rung, find(cell), peers, bar(precision, cell))
                other = rung != longest and text != "-"
                texts.append(f"{text} r{rung.number}" if other else text)
            if set(texts) != {"-"}:
                grid.rows.append([f"{mask}, {longest.label}", *texts])
    return grid


@dataclass
class Trial:
    """Measures the bars of one precision, and inputs and shapes without one, in one run.

    The accuracy is measured of all rungs of ``ladder``, the rest of those that calls get, or else of the last rung.
    """

    precision: Precision
    ladder: Sequence[Rung]
    seed: int

    def grids(self) -> Iterator[Grid]:
        """Each as soon as it is measured."""
        yield self._host()
        yield self._accuracy()
        yield ratio_grid(self.precision, self._cell, self._ours)
        if self.precision.dtype == FP32:
            yield self._loss()
            yield self._infinite_key()
        else:
            yield self._weak_inputs()
            yield self._odd_shapes()

    def _ours(self, head_dim: int, kv_len: int | None = None) -> Rung:
        default = self.precision.default(head_dim, kv_len)
        return default if default in self.ladder else self.ladder[-1]

    def _timed(self, qkv: Sequence[Tensor], causal: bool) -> Measured:
        ours = self._ours(qkv[0].shape[3], qkv[1].shape[1])
        methods = (ours, *rivals(self.precision))
        return time_methods(methods, qkv, causal, self.precision)

    def _cell(self, cell: Cell) -> Measured | None:
        wanted = bar(self.precision, cell) and cell.head_dim in self._ours(cell.head_dim).head_dims
        return self._timed(cell.inputs(self.precision), cell.causal) if wanted else None

    def _rng(self, name: str, number: int = 0) -> Rng:
        return Rng(self.seed + number, "cuda", "bars", name)

    def _host(self) -> Grid:
        ours = self._ours(128)
        q, k, v = (self._rng("host").randn(1, 128, 4, 128, dtype=ours.dtypes[-1]) for _ in "qkv")
        cost = host_cost(q, k, v, ours.number)
        grid = Grid(f"{ours}: microseconds of the host per call (allowed: {HOST_US})", ["", *cost])
        *parts, whole = cost.values()
        judged = grid.judged(whole, HOST_US, at_most=True)
        grid.rows.append(["", *(f"{part:.2f}" for part in parts), judged])
        return grid

    def _accuracy(self) -> Grid:
        dtype = self.precision.dtype
        against = f"{YARDSTICK[dtype]}'s (allowed: {ALLOWED[dtype]:g})"
        grid = Grid(f"{self.precision.name}: loss relative to {against}", ["", "rms", "largest"])
        for rung, d in ((r, d) for r in self.ladder for d in r.head_dims):
            try:
                found = worst(rung, self.seed, d, dtype)
            except RuntimeError as error:  # PyTorch's kernel does not run here
                grid.rows.append([f"{rung.label}, d {d}", str(error).splitlines()[0], "-"])
                continue
            allowed = ALLOWED[dtype] if dtype != FP32 or rung.split else None
            texts = (grid.judged(found[what], allowed, at_most=True) for what in ("rms", "largest"))
            grid.rows.append([f"{rung.label}, d {d}", *texts])
        return grid

    def _weak_inputs(self) -> Grid:
        masks = {mask: (d, causal) for mask, (d, causal) in MASKS.items() if d != 256}
        title = f"{self.precision.name}, B 2, S 8,192: speed relative to {FA3.label}"
        grid = Grid(title, ["", *masks, "bar"])
        for name in LAZY:
            texts = []
            for d, causal in masks.values():
                shape = Cell(d, 8192, causal).shape
                qkv = make_inputs(name, self._rng(name), shape, self.precision.dtype)
                found = self._timed(qkv, causal)
                texts.append(judged(grid, self._ours(d), found, [FA3], WEAK.get(name)))
            grid.rows.append([name, *texts, f"{WEAK.get(name, '-')}"])
        return grid

    def _odd_shapes(self) -> Grid:
        title = f"{self.precision.name}: speed relative to the best library that takes the shape"
        grid = Grid(title, ["", "ratio"])
        for name, (q_shape, kv, causal) in ODD.items():
            rng, kv_shape = self._rng(name), (q_shape[0], *kv, q_shape[3])
            shapes = (q_shape, kv_shape, kv_shape)
            qkv = [rng.randn(*shape, dtype=self.precision.dtype) for shape in shapes]
            found = self._timed(qkv, causal)
            ours = self._ours(q_shape[3], kv[0])
            grid.rows.append([name, judged(grid, ours, found, [CUDNN, FA3], None)])
        return grid

    def _loss(self) -> Grid:
        ours, errors = self._ours(64), ("rms", "largest")
        title = (
            f"{ours}: loss relative to {EFFICIENT.label}'s, mean of {SEEDS} seeds and both masks"
        )
        columns = [f"{error}, d {d}" for d, error in product(ours.head_dims, errors)]
        grid = Grid(title, ["", *columns, "allowed"])
        for name, allowed in LOSS.items():
            texts = []
            for d in ours.head_dims:
                drawn = product(range(SEEDS), (False, True))
                found = [compare(ours, name, self._rng(name, i), d, FP32, c) for i, c in drawn]
                means = (mean(ratios[error] for ratios in found) for error in errors)
                texts += [grid.judged(ratio, allowed, at_most=True) for ratio in means]
            grid.rows.append([name, *texts, f"{allowed:g}"])
        return grid

    def _infinite_key(self) -> Grid:
        ours = self._ours(64)
        grid = Grid(f"{ours}: rows to which an infinite key gives the score -inf", ["", "finite"])
        for d in ours.head_dims:
            finite, rows = finite_rows(ours, d)
            grid.bars.append(finite == rows)
            grid.rows.append([f"d {d}", f"{finite} of {rows}"])
        return grid


def finite_rows(rung: Rung, head_dim: int) -> tuple[int, int]:
    """Of the rows whose score is -inf because of an infinite key, how many are finite, and how many there are."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (torch.randn(1, 515, 4, head_dim, device=device).to(rung.dtypes[0]) for _ in range(3))
    k[:, 200, :, 0] = torch.inf
    hidden = q[..., 0] < 0
    finite = ladder_attention(q, k, v, rung=rung.number).isfinite().all(-1)
    return int((finite & hidden).sum()), int(hidden.sum())
