"""Endurance: thousands of decode steps from a CUDA graph, each compared with float64. ``--steps``.

Sequences grow by a token per step, end and start anew. In each step their pages are in other places, and all that no
query may see is NaN. The state is on the GPU and changes there: a graph of some steps, replayed, decodes on and on.

An error is the root mean square of a sequence's distance from float64, relative to what is lost where P and O are
rounded to bfloat16 and nothing else is.
"""

import math
import os
import time
from collections.abc import Callable

import torch
from torch import Tensor

from common.record.grid import Grid
from task5.ladder.call import decode_attention

BATCH, HEADS, KV_HEADS, HEAD_DIM, PAGE, DTYPE = 4, 8, 2, 128, 16, torch.bfloat16
ROOM = 1024  # keys of the longest sequence
ENDS = 1 / 200  # the chance that a sequence ends, in each step
SPARE = 3  # pages of no sequence
STEPS = 50  # of a graph
LARGEST = (
    1.5  # error, at most; right results have 0.8 to 1.05, without the last key it is 5 and more
)
DRIFT, FROM = (
    1.1,
    1000,
)  # the last tenth's mean error by that of the first, at most; in so many steps
GROWTH = 16  # MB of the process, at most; of the GPU's memory 0


class Decoding:
    """Sequences with a cache of up to ``room`` keys in pages; ``step`` moves all of them on by a token.

    Attributes:
        lengths: int32 ``(BATCH,)``.
        ended: how many sequences have ended so far.
    """

    def __init__(self, device: str, room: int) -> None:
        on = dict(dtype=DTYPE, device=device)
        each = room // PAGE
        pool = (BATCH * each + SPARE, PAGE, KV_HEADS, HEAD_DIM)
        self._keys = [torch.zeros(BATCH, room, KV_HEADS, HEAD_DIM, **on) for _ in "kv"]
        self._pools = [torch.empty(pool, **on) for _ in "kv"]
        self._q = torch.empty(BATCH, 1, HEADS, HEAD_DIM, **on)
        self._table = torch.empty(BATCH, each, dtype=torch.int32, device=device)
        self._j = torch.arange(room, device=device)
        self.lengths = torch.full((BATCH,), room, dtype=torch.int32, device=device)  # all end
        self.ended = torch.zeros((), dtype=torch.int64, device=device)

    def step(self) -> Tensor:
        """One more token each; the errors ``(2, BATCH)`` by default, and batch-invariant. Reads nothing on the host."""
        device, room = self.lengths.device, len(self._j)
        ends = (self.lengths >= room) | (torch.rand(BATCH, device=device) < ENDS)
        again = torch.randint(1, room + 1, (BATCH,), dtype=torch.int32, device=device)
        self.lengths.copy_(torch.where(ends, again, self.lengths + 1))
        self.ended += ends.sum()
        last = self.lengths[:, None] - 1
        hidden = (self._j > last)[..., None, None]  # (BATCH, room, 1, 1)
        new = (ends[:, None] | (self._j == last))[..., None, None]
        places = torch.rand(len(self._pools[0]), device=device).argsort()[: self._table.numel()]
        self._table.copy_(places.view_as(self._table))
        for keys, pool in zip(self._keys, self._pools, strict=True):
            keys.copy_(torch.where(new, torch.randn_like(keys), keys))
            pages = keys.masked_fill(hidden, math.nan).view(-1, *pool.shape[1:])
            pool.fill_(math.nan).index_copy_(0, places, pages)
        self._q.normal_()
        truth, rounded = _attention(self._q, *self._keys, hidden)
        least = (
            0.1 * torch.finfo(DTYPE).eps * _rms(truth)
        )  # a single key is copied: nothing is lost
        lost = torch.maximum(_rms(rounded - truth), least)
        outs = (self._decode(batch_invariant=invariant) for invariant in (False, True))
        errors = torch.stack([_rms(out - truth) / lost for out in outs])
        return errors.nan_to_num(nan=math.inf)

    def _decode(self, **options: bool) -> Tensor:
        paged = dict(seqlens_k=self.lengths, block_table=self._table)
        return decode_attention(self._q, *self._pools, **paged, **options)


def _attention(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """softmax(q k^T / sqrt(d)) v in float64, and the same with P and O rounded to DTYPE; both of q's shape."""
    Q = q.double().view(BATCH, KV_HEADS, -1, HEAD_DIM)  # a row for each head of the group
    K, V = k.double().transpose(1, 2), v.double().transpose(1, 2)
    S = Q @ K.transpose(-1, -2) / math.sqrt(HEAD_DIM)
    S = S.masked_fill(hidden.permute(0, 2, 3, 1), -math.inf)
    P = (S - S.amax(-1, keepdim=True)).exp()
    l = P.sum(-1, keepdim=True)
    rounded = P.to(DTYPE).double() @ V / l
    return (P @ V / l).view(q.shape), rounded.to(DTYPE).view(q.shape)


def _rms(x: Tensor) -> Tensor:
    """Of each sequence."""
    return x.double().square().mean((1, 2, 3)).sqrt()


def run(steps: int, seed: int, device: str, *, room: int = ROOM) -> Grid:
    """Decode so many steps and judge what was found. On a GPU a graph has STEPS of them: rounded up to whole graphs."""
    torch.manual_seed(seed)
    decoding, begin = Decoding(device, room), time.perf_counter()
    each = STEPS if device == "cuda" else 1
    replays = -(-steps // each)
    errors = torch.zeros(replays, each, 2, BATCH, dtype=torch.float64, device=device)
    advance = _captured(decoding) if device == "cuda" else lambda: decoding.step()[None]
    errors[0].copy_(advance())
    before = _memory(device)  # all is loaded and allocated now
    for replay in range(1, replays):
        errors[replay].copy_(advance())
    found = errors.flatten(0, 1).cpu()
    gpu_growth, growth = (b - a for a, b in zip(before, _memory(device), strict=True))
    steps, tenth = len(found), max(1, len(found) // 10)
    drift = found[-tenth:].mean().item() / max(found[:tenth].mean().item(), 1e-9)
    seconds = time.perf_counter() - begin
    title = f"{steps:,} decode steps in {seconds:.1f} s; {int(decoding.ended):,} sequences ended"
    grid = Grid(title, ["", "found", "at most"])
    for name, value, bar in (
        ("largest error of a sequence", found.max().item(), LARGEST),
        ("mean error, last tenth by first tenth", drift, DRIFT if steps >= FROM else None),
        ("growth of the GPU's memory, MB", gpu_growth, 0),
        ("growth of the process's memory, MB", growth, GROWTH),
    ):
        text = grid.judged(value, bar, at_most=True)
        grid.rows.append([name, text, "-" if bar is None else f"{bar:g}"])
    return grid


def _captured(decoding: Decoding) -> Callable[[], Tensor]:
    """Replays a graph of STEPS steps; their errors ``(STEPS, 2, BATCH)``, always in the same tensor."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # what a stream allocates once must not be allocated in the graph
            decoding.step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            errors = torch.stack([decoding.step() for _ in range(STEPS)])
    torch.cuda.synchronize()

    def replay() -> Tensor:
        graph.replay()
        return errors

    return replay


def _memory(device: str) -> tuple[float, float]:
    """MB allocated on the GPU, and resident of this process (0 where there is no /proc)."""
    allocated = torch.cuda.memory_allocated() if device == "cuda" else 0
    try:
        with open("/proc/self/statm") as statistics:
            resident = int(statistics.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        resident = 0
    return allocated / 1e6, resident / 1e6
