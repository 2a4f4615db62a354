"""Timing decode: each side is a CUDA graph of calls on caches that are not in L2, and the graphs take turns in one run.

A call takes microseconds, less than its launch from Python. So each side captures one call per cache in a graph, and a
call's time is the graph's by their number. The caches of a graph are more than L2 holds: K and V come from memory.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from common.check.attention import attention_float64
from common.dtypes import dtype_name
from common.timing import Timing
from common.timing.compare import Measured, seconds_of
from common.timing.measure import Turns
from task5.ladder.call import decode_attention
from task5.ladder.rungs import Rung

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BYTES = 300e6  # of K and V in a graph
CACHES = (2, 96)  # in a graph, at least and at most
ROUNDS = 20
PAGES = (64, 16)  # sizes that are timed
CHECKED = 16  # rows at either end of a chunk
TOLERANCE = {BF16: 2**-4, FP16: 2**-7, FP32: 2**-11}  # of the largest value; the tests are stricter
OURS, INVARIANT, NO_PROMISE = "ours", "batch-invariant", "no promise"

Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Shape:
    """What one call attends to: one query per sequence, or a chunk of a prompt.

    Attributes:
        kv_len: keys for which there is room.
    """

    batch: int
    heads: int
    kv_heads: int
    kv_len: int
    head_dim: int = 128
    dtype: torch.dtype = BF16
    q_len: int = 1

    @property
    def key(self) -> str:
        """In records, and for ``--shape``."""
        heads = f"{self.heads}/{self.kv_heads}"
        name = dtype_name(self.dtype)
        chunk = f" q{self.q_len}" if self.q_len > 1 else ""
        return f"B{self.batch}{chunk} {heads} kv{self.kv_len} d{self.head_dim} {name}"

    @property
    def lengths(self) -> tuple[int, ...]:
        """Keys of each sequence: as many as there is room for."""
        return (self.kv_len,) * self.batch

    @property
    def bytes(self) -> int:
        """K and V, once."""
        return 2 * sum(self.lengths) * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def caches(self) -> int:
        """How many of them a graph reads."""
        least, most = CACHES
        return min(most, max(least, math.ceil(BYTES / self.bytes)))


SHAPES = (
    Shape(1, 32, 32, 1024),
    *(Shape(1, 32, 8, kv_len) for kv_len in (1024, 4096, 8192, 131072)),
    Shape(4, 32, 32, 1074),
    Shape(8, 32, 8, 2048),
    Shape(8, 32, 32, 1024),
    Shape(8, 32, 8, 8192),
    Shape(16, 32, 32, 1024),
    Shape(16, 32, 8, 8192),
    Shape(64, 32, 8, 4096),
    *(Shape(batch, 12, 12, 1024, 64) for batch in (1, 8, 64)),
    Shape(8, 32, 1, 4096),
    Shape(4, 16, 8, 8192, 256),
    Shape(16, 32, 32, 1024, dtype=FP32),
    Shape(1, 32, 8, 8192, dtype=FP32),
    Shape(16, 32, 8, 8192, dtype=FP32),
)
LENGTHS = tuple(2**n for n in range(10, 18))
CURVES = {batch: [Shape(batch, 32, 8, kv_len) for kv_len in LENGTHS] for batch in (1, 16)}


class Inputs:
    """Random tensors of a shape: one q, several caches, and the same caches in pages.

    Attributes:
        q: ``(batch, q_len, heads, head_dim)``.
        caches: pairs of k and v, ``(batch, kv_len, kv_heads, head_dim)``.
        lengths: int32 ``(batch,)``, the shape's: ours reads them.
    """

    def __init__(self, shape: Shape, device: str = "cuda", caches: int | None = None) -> None:
        def randn(length: int, heads: int) -> Tensor:
            size = (shape.batch, length, heads, shape.head_dim)
            return torch.randn(size, device=device).to(shape.dtype)

        self.shape = shape
        self.q = randn(shape.q_len, shape.heads)
        self.lengths = torch.tensor(shape.lengths, dtype=torch.int32, device=device)
        number = shape.caches if caches is None else caches
        self.caches = [
            (randn(shape.kv_len, shape.kv_heads), randn(shape.kv_len, shape.kv_heads))
            for _ in range(number)
        ]
        self._pages: dict[int, tuple[Tensor, list[tuple[Tensor, Tensor]]]] = {}

    def pages(self, size: int) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """The caches in pages of this size, in random order.

        Returns:
            The block table of all of them, int32 ``(batch, pages of a sequence)``; and pairs of k and v,
            ``(pages, size, kv_heads, head_dim)`` in the shape's dtype.
        """
        if size not in self._pages:
            shape, device = self.shape, self.q.device
            each = -(-shape.kv_len // size)  # pages of a sequence
            order = torch.randperm(shape.batch * each, device=device)

            def in_pages(t: Tensor) -> Tensor:
                filled = pad(t, (0, 0, 0, 0, 0, each * size - shape.kv_len))
                pages = filled.view(-1, size, *t.shape[2:])
                return torch.empty_like(pages).index_copy_(0, order, pages)

            table = order.view(shape.batch, each).int()
            self._pages[size] = table, [(in_pages(k), in_pages(v)) for k, v in self.caches]
        return self._pages[size]

    def truth(self, number: int = -1) -> Tensor:
        """The result for a cache in float64, ``(batch, rows, heads, head_dim)``, found a sequence at a time.

        Rows are the queries, or of more than 32 the first and the last 16.
        """
        (k, v), q_len = self.caches[number], self.shape.q_len
        rows = [slice(0, q_len)]
        if q_len > 2 * CHECKED:
            rows = [slice(0, CHECKED), slice(q_len - CHECKED, q_len)]

        def of(b: int, row: slice) -> Tensor:
            # Of the keys that the last of these rows sees.
            end, one = self.shape.lengths[b] - q_len + row.stop, slice(b, b + 1)
            return attention_float64(self.q[one, row], k[one, :end], v[one, :end], causal=True)

        return torch.cat(
            [torch.cat([of(b, row) for row in rows], dim=1) for b in range(self.shape.batch)]
        )

    def checked(self, out: Tensor) -> Tensor:
        """What :meth:`truth` has of a result with the numbers of ``(batch, q_len, heads, head_dim)``."""
        out = out.reshape(self.q.shape)
        if out.shape[1] <= 2 * CHECKED:
            return out
        return torch.cat((out[:, :CHECKED], out[:, -CHECKED:]), dim=1)


Prepare = Callable[[Inputs], list[Call]]  # one call for each cache


def ours(inputs: Inputs, *, page_size: int | None = None, **options: object) -> list[Call]:
    """``decode_attention`` with these options on each cache, in pages if they have a size.

    As in a decode step, a call has the promise that the launch ahead of it writes no key but the newest.
    """
    caches, options = inputs.caches, {"new_keys": inputs.shape.q_len} | options
    if page_size is not None:
        options["block_table"], caches = inputs.pages(page_size)
    options["seqlens_k"] = inputs.lengths
    return [partial(decode_attention, inputs.q, k, v, **options) for k, v in caches]


def paged(size: int) -> str:
    """The label of ours on pages of this size."""
    return f"pages of {size}"


def our_sides(rungs: Sequence[Rung]) -> dict[str, Prepare]:
    """The rung that calls get, by the name OURS; these rungs; and its variants."""
    sides: dict[str, Prepare] = {OURS: ours}
    sides |= {rung.label: partial(ours, rung=rung.number) for rung in rungs}
    sides[NO_PROMISE] = partial(ours, new_keys=None)
    sides[INVARIANT] = partial(ours, batch_invariant=True)
    return sides | {paged(size): partial(ours, page_size=size) for size in PAGES}


class Graph:
    """Calls, captured in one CUDA graph on the current stream, and what they returned."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = calls  # they hold what the graph reads
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=torch.cuda.current_stream()):
            self.outs = [call() for call in calls]
        self.replay()

    def replay(self) -> None:
        """All calls again, into the same outputs."""
        self._graph.replay()


@cache
def _stream() -> torch.cuda.Stream:
    """Where all is captured: scratch of a stream that is there before the capture does not become part of it."""
    return torch.cuda.Stream()


def time_shape(shape: Shape, sides: Mapping[str, Prepare], seed: int) -> Measured:
    """The time of one call of each side on the current GPU. Left out is what does not run, or gives a wrong result."""
    torch.cuda.empty_cache()  # of the shape before
    torch.manual_seed(seed)
    found = Measured()
    try:
        with torch.no_grad(), torch.cuda.stream(_stream()):
            inputs = Inputs(shape)
            graphs = {}
            for name, prepare in sides.items():
                captured = captured_or_reason(prepare, inputs)
                kept = found.left_out if isinstance(captured, str) else graphs
                kept[name] = captured
            samples = _replay_in_turns(graphs, random.Random(seed))
            for name in _wrong(graphs, inputs, found):
                samples.pop(name)
    except torch.cuda.OutOfMemoryError:
        return Measured(left_out=dict.fromkeys(sides, "out of memory"))
    number = len(inputs.caches)
    found.times |= {name: Timing.of(times).per(number) for name, times in samples.items()}
    return found


def captured_or_reason(prepare: Prepare, inputs: Inputs) -> Graph | str:
    """A side's graph; or why it does not run, in a line."""
    try:
        calls = prepare(inputs)
        for call in calls[:2]:
            if isinstance(reason := seconds_of(call), str):
                return reason
        torch.cuda.synchronize()
        return Graph(calls)
    except (
        Exception
    ) as error:  # libraries raise all kinds of errors for shapes that they do not take
        return reason_of(error)


def reason_of(error: Exception) -> str:
    """The last line of an error's text, or its kind, fit for a table."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(lines[-1].split())[:150].replace("|", "/")


def _replay_in_turns(graphs: Mapping[str, Graph], rng: random.Random) -> dict[str, list[float]]:
    """Milliseconds of each replay; in each round the graphs are in another order."""
    turns, samples = Turns(), {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name in rng.sample(list(graphs), len(graphs)):
            samples[name].append(turns.take(graphs[name].replay)[1])
    return samples


def _wrong(graphs: Mapping[str, Graph], inputs: Inputs, found: Measured) -> list[str]:
    """The sides whose last replay is wrong; ``found`` says by how much. Their outputs are NaN before it."""
    truth = inputs.truth()
    allowed = TOLERANCE[inputs.shape.dtype] * truth.abs().max()
    wrong = []
    for name, graph in graphs.items():
        for out in graph.outs:
            out.fill_(math.nan)
        graph.replay()
        error = (inputs.checked(graph.outs[-1]) - truth).abs().max()
        if not error <= allowed:
            found.left_out[name] = f"wrong result: {error.item():.3g} away from float64"
            wrong.append(name)
    return wrong
