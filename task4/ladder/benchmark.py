"""Timing the rungs beside PyTorch's kernels and FlashAttention-3, on one GPU, in one run.

A cell is one head_dim, one length and one mask; batch * seq is 16,384 and heads * head_dim 2,048 in all of them, so
that the work grows with the length alone. Within a cell the launches are interleaved (common.timing.measure); ratios
are therefore taken within a cell, and never between two runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from common.timing import Timing, float32_products, matmul_tflops, microseconds
from common.timing import split_matmul_tflops as split_tflops
from common.timing.compare import Measured, compare_times, seconds_of
from common.timing.peers import MATH, PEERS, Peer
from task4.ladder.call import ladder_attention
from task4.ladder.rungs import BF16, FASTEST_FIRST, FP16, FP32, RUNGS, Rung, by_number

TOKENS, HIDDEN = 16384, 2048
SEQS = (512, 1024, 2048, 4096, 8192, 16384)
HEAD_DIMS = (64, 128, 256)
EACH = 0.1  # seconds of measuring that each function gets in a cell, not counting the warm-up
LONGEST = 0.3  # seconds that one run may take
Method = Rung | Peer  # what is timed


@dataclass(frozen=True)
class Precision:
    """What tensors hold and products are computed in."""

    name: str  # as on the command line and in records
    dtype: torch.dtype
    eps: float  # relative error by which two right results may differ, coarsely
    tf32: bool = False  # float32 tensors, rounded to tf32 for the products

    def has(self, rung: Rung) -> bool:
        """Whether a rung computes in it."""
        return self.dtype in rung.dtypes and rung.exact_in(self.dtype) != self.tf32

    @property
    def methods(self) -> list[Method]:
        """Rungs in ladder order, then peers."""
        return [*filter(self.has, RUNGS), *PEERS]

    @property
    def head_dims(self) -> list[int]:
        """Those that one of its rungs has."""
        return [d for d in HEAD_DIMS if any(self.has(r) and d in r.head_dims for r in RUNGS)]

    def default(self, head_dim: int, kv_len: int | None = None) -> Rung | None:
        """The rung that a call gets on a Hopper GPU, for long rows if ``kv_len`` is None; None for tf32."""
        fits = (
            r
            for r in map(by_number, FASTEST_FIRST)
            if self.has(r) and head_dim in r.head_dims and (kv_len is None or kv_len >= r.min_keys)
        )
        return None if self.tf32 else next(fits, None)

    def reference(self, method: Method) -> str:
        """The matrix product that a method is compared with."""
        split = " split into three of 16 bits" if method.split else ""
        return f"a {self.name} matrix product{split}"

    def references(self) -> dict[str, float]:
        """TFLOP/s of those products, 8192 cubed, by PyTorch."""
        found = {self.reference(MATH): matmul_tflops(self.dtype, tf32=self.tf32)}
        split = {self.reference(m): split_tflops() for m in self.methods if m.split}
        return found | split


PRECISIONS = {
    "bfloat16": Precision("bfloat16", BF16, 2**-7),
    "float16": Precision("float16", FP16, 2**-10),
    "float32": Precision("float32", FP32, 2**-14),
    "tf32": Precision("tf32", FP32, 2**-10, tf32=True),
}


@dataclass(frozen=True)
class Cell:
    """One line of measurements."""

    head_dim: int
    seq: int
    causal: bool

    @property
    def key(self) -> str:
        """In records and titles."""
        return f"d{self.head_dim} S{self.seq}{' causal' if self.causal else ''}"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, seq, heads, head_dim)."""
        return TOKENS // self.seq, self.seq, HIDDEN // self.head_dim, self.head_dim

    @property
    def flops(self) -> float:
        """Two matrix products; half of them if causal."""
        return 4 * TOKENS * self.seq * HIDDEN * (0.5 if self.causal else 1)

    def tflops(self, timing: Timing) -> float:
        return self.flops / timing.median_ms / 1e9

    def inputs(self, precision: Precision) -> list[Tensor]:
        """Random q, k and v on the GPU."""
        return [torch.randn(self.shape, device="cuda").to(precision.dtype) for _ in range(3)]


def call_of(method: Method, qkv: Sequence[Tensor], causal: bool) -> Callable[[], Tensor]:
    """A function without arguments that runs the method on these tensors."""
    if isinstance(method, Peer):
        return partial(method.attention, *qkv, causal=causal)
    return partial(ladder_attention, *qkv, causal=causal, rung=method.number)


def time_cell(cell: Cell, ladder: Sequence[Rung], precision: Precision) -> Measured:
    """Time these rungs and all peers in a cell; not what would take too long, going by the shortest length."""
    shortest = Cell(cell.head_dim, SEQS[0], cell.causal)
    ready, left_out = [], {}
    for method in (*(rung for rung in ladder if cell.head_dim in rung.head_dims), *PEERS):
        pace = _seconds_in(shortest, method, precision)
        if isinstance(pace, str):
            left_out[method.label] = pace
        elif pace * cell.flops / shortest.flops > LONGEST:
            left_out[method.label] = f"a run would take more than {LONGEST:g} s"
        else:
            ready.append(method)
    found = time_methods(ready, cell.inputs(precision), cell.causal, precision)
    return Measured(found.times, left_out | found.left_out)


def time_methods(
    methods: Sequence[Method], qkv: Sequence[Tensor], causal: bool, precision: Precision
) -> Measured:
    """Time them on the same tensors, interleaved. Left out is what does not run, or gives another result.

    Another than the last peer's, coarsely: how accurate each is has been tested before.
    """
    with float32_products(tf32=precision.tf32):
        return compare_times(
            {method.label: call_of(method, qkv, causal) for method in methods},
            references=[peer.label for peer in PEERS],
            tolerance=8 * precision.eps,
            each=EACH,
        )


@cache
def _seconds_in(cell: Cell, method: Method, precision: Precision) -> float | str:
    with float32_products(tf32=precision.tf32):
        return seconds_of(call_of(method, cell.inputs(precision), cell.causal))


def host_cost(q: Tensor, k: Tensor, v: Tensor, rung: int | None = None) -> dict[str, float]:
    """Microseconds of the host for one causal ``ladder_attention`` like earlier ones, by what they are for."""
    allocate = microseconds(lambda: torch.empty_like(q))
    whole = microseconds(lambda: ladder_attention(q, k, v, causal=True, rung=rung))
    launch = max(0.0, whole - allocate)
    return {"allocate": allocate, "dispatch and launch": launch, "in all": whole}
