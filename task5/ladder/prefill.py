"""Chunked prefill beside the libraries: some tokens of a prompt against the keys before them, and its bar."""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from common.record.grid import Grid
from common.timing.compare import Measured
from task4.ladder import ladder_attention
from task4.prefill import fast_attention
from task5.ladder.benchmark import OURS, Call, Inputs, Prepare, Shape, time_shape
from task5.ladder.peers import CHUNK_PEERS

LADDER = "task 4's ladder"
AT_LEAST = 1.0  # x the best library
Q_LENS, KV_LENS = (16, 64, 256, 1024, 2048), (2048, 8192, 65536)
CHUNKS = (
    Shape(3, 16, 4, 5000, 64, q_len=333),
    Shape(1, 32, 8, 16384, 64, q_len=1024),
    *(
        Shape(batch, 32, 8, kv_len, head_dim, q_len=q_len)
        for head_dim in (64, 128)
        for batch in (1, 4)
        for q_len in Q_LENS
        for kv_len in KV_LENS
        if q_len < kv_len
    ),
)


def _of(attention: Callable[..., Tensor]) -> Prepare:
    def prepare(inputs: Inputs) -> list[Call]:
        return [partial(attention, inputs.q, k, v, causal=True) for k, v in inputs.caches]

    return prepare


SIDES: dict[str, Prepare] = {OURS: _of(fast_attention), LADDER: _of(ladder_attention)}
SIDES |= CHUNK_PEERS


def time_chunks(
    chunks: Sequence[Shape], seed: int, say: Callable[[str], object] = lambda _: None
) -> Grid:
    """Time these on the current GPU, each side in turn, and judge them. ``say`` gets the name of each that begins."""
    found = {}
    for chunk in chunks:
        say(chunk.key)
        found[chunk.key] = time_shape(chunk, SIDES, seed)
    return judge(chunks, found)


def judge(chunks: Sequence[Shape], found: dict[str, Measured]) -> Grid:
    """The table of these times, beside the bar."""
    columns = ["", OURS, "TFLOP/s", LADDER, *CHUNK_PEERS, "x best library", "best library"]
    grid = Grid(f"Microseconds per call. Bar: {AT_LEAST:g} x the best library", columns)
    for chunk in chunks:
        times, left_out = found[chunk.key].times, found[chunk.key].left_out
        us = {side: 1e3 * timing.median_ms for side, timing in times.items()}
        if OURS not in us:
            grid.bars.append(False)
            reason = f"{left_out.get(OURS)} !"
            grid.rows.append([chunk.key, reason] + ["-"] * (len(columns) - 2))
            continue
        best = min((x for x in CHUNK_PEERS if x in us), key=us.__getitem__, default=None)
        ratio = grid.judged(us[best] / us[OURS], AT_LEAST) if best else "-"
        others = (f"{us[x]:.1f}" if x in us else "-" for x in (LADDER, *CHUNK_PEERS))
        rate = f"{flop(chunk) / us[OURS] / 1e6:.0f}"
        grid.rows.append([chunk.key, f"{us[OURS]:.1f}", rate, *others, ratio, best or "-"])
    return grid


def flop(chunk: Shape) -> int:
    """Of the products with the keys that the queries see."""
    seen = chunk.q_len * chunk.kv_len - chunk.q_len * (chunk.q_len - 1) // 2
    return 4 * chunk.batch * chunk.heads * chunk.head_dim * seen
