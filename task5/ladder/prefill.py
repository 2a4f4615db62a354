"""Chunked prefill beside the libraries: some tokens of a prompt against the keys before them, and its bar."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import Tensor

from common.record.grid import Grid
from common.timing.compare import Measured
from task4.ladder import ladder_attention
from task4.prefill import fast_attention
from task5.ladder import beside
from task5.ladder.benchmark import OURS, Call, Inputs, Prepare, Shape
from task5.ladder.peers import CHUNK_PEERS

LADDER = "task 4's ladder"
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


def time_chunks(seed: int, say: Callable[[str], object]) -> Grid:
    """Time CHUNKS on the current GPU, and judge them. ``say`` gets the name of each that begins."""
    return judge(CHUNKS, beside.time_shapes(CHUNKS, SIDES, seed, say))


def judge(chunks: Sequence[Shape], found: Mapping[str, Measured]) -> Grid:
    """The table of these times, beside the bar."""
    rate = {"TFLOP/s": lambda chunk, us: f"{flop(chunk) / us[OURS] / 1e6:.0f}"}
    columns = beside.of_sides([OURS]) | rate | beside.of_sides([LADDER])
    return beside.judge(chunks, found, columns, list(CHUNK_PEERS))


def flop(chunk: Shape) -> int:
    """Of the products with the keys that the queries see."""
    seen = chunk.q_len * chunk.kv_len - chunk.q_len * (chunk.q_len - 1) // 2
    return 4 * chunk.batch * chunk.heads * chunk.head_dim * seen
