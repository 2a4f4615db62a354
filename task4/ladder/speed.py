"""Timing the rungs beside what PyTorch and FlashAttention-3 have, on one GPU, in one run.

A cell is one head_dim, one length and one mask; batch * seq is 16,384 and heads * head_dim 2,048 in all of them, so
that the work grows with the length alone. Within a cell everybody takes turns (common.timing.measure); ratios are
therefore taken within a cell, and never between two runs.
"""

import contextlib
import timeit
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from common.timing import Timing, measure
from task4.ladder import rungs
from task4.ladder.rungs import Rung, ladder_attention

TOKENS, HIDDEN = 16384, 2048
SEQS = (512, 1024, 2048, 4096, 8192, 16384)
HEAD_DIMS = (64, 128, 256)
KINDS = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "tf32": torch.float32,  # float32 tensors, multiplied in tf32
}
EACH = 0.1  # seconds of measuring that each function gets in a cell, warm-up apart
LONGEST = 0.3  # seconds that one run may take

MATH, EFFICIENT, FLASH, CUDNN = "SDPA math", "SDPA memory-efficient", "SDPA flash", "SDPA cuDNN"
FA3 = "FlashAttention-3"
_BACKENDS = {
    MATH: SDPBackend.MATH,
    EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
    FLASH: SDPBackend.FLASH_ATTENTION,
    CUDNN: SDPBackend.CUDNN_ATTENTION,
}
PEERS = (MATH, EFFICIENT, FLASH, CUDNN, FA3)

Attention = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


@dataclass(frozen=True)
class Cell:
    """One line of measurements."""

    head_dim: int
    seq: int
    causal: bool

    @property
    def name(self) -> str:
        return f"d{self.head_dim} S{self.seq}{' causal' if self.causal else ''}"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, seq, heads, head_dim)."""
        return TOKENS // self.seq, self.seq, HIDDEN // self.head_dim, self.head_dim

    @property
    def flops(self) -> float:
        """Two matrix products; half of them if causal."""
        return 4 * TOKENS * self.seq * HIDDEN * (0.5 if self.causal else 1)


@dataclass
class Measured:
    """What a cell gave: a time, or the reason that there is none, by name."""

    times: dict[str, Timing] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def rung_name(rung: Rung) -> str:
    return f"rung {rung.number}"


def takes(rung: Rung, kind: str) -> bool:
    """Whether a rung belongs to this kind: those that round float32 to tf32 are a kind of their own."""
    dtype = KINDS[kind]
    return dtype in rung.dtypes and rung.exact_in(dtype) == (kind != "tf32")


def peers() -> tuple[dict[str, Attention], dict[str, str]]:
    """What to compare with, by name, and what is not here, with the reason."""
    found: dict[str, Attention] = {name: _sdpa(backend) for name, backend in _BACKENDS.items()}
    try:
        from flash_attn_interface import flash_attn_func
    except Exception as error:  # not there, or not for this torch
        return found, {FA3: f"flash_attn_interface cannot be imported ({type(error).__name__})"}

    def fa3(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        out = flash_attn_func(q, k, v, causal=causal)
        return out[0] if isinstance(out, tuple) else out

    return {**found, FA3: fa3}, {}


def fa3_version() -> str | None:
    """What FlashAttention-3 says of itself; None if it is not there."""
    try:
        import flash_attn_interface
    except Exception:  # as in peers()
        return None
    for name in ("flash_attn_3", "flash-attn-3"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return getattr(flash_attn_interface, "__version__", "of unknown version")


def _sdpa(backend: SDPBackend) -> Attention:
    def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    return attention


class Stopwatch:
    """Measures cells of one kind; remembers how fast everybody is, so as not to start what would take too long."""

    def __init__(self, kind: str, ladder: Sequence[Rung]) -> None:
        self.kind, self.dtype = kind, KINDS[kind]
        self.ladder = [rung for rung in ladder if takes(rung, kind)]
        self.peers, self.absent = peers()
        self._pace: dict[tuple[str, int, bool], float] = {}  # seconds an operation

    def __call__(self, cell: Cell) -> Measured:
        """Time everybody in this cell.

        Shorter lengths first: what is known from them says who is too slow for the longer ones.
        """
        found = Measured(left_out=dict(self.absent))
        q, k, v = (torch.randn(cell.shape, device="cuda").to(self.dtype) for _ in range(3))
        with matmul_precision(self.kind):
            running: dict[str, Callable[[], Tensor]] = {}
            for name, attention in self._entrants(cell).items():
                reason = self._too_slow(name, attention, cell)
                if reason or (reason := _refusal(attention, q, k, v, cell.causal)):
                    found.left_out[name] = reason
                else:
                    running[name] = lambda f=attention: f(q, k, v, cell.causal)
            wrong: dict[str, str] = {}
            times = measure(
                running, each=EACH, check=lambda out: wrong.update(_unlike(out, self.kind))
            )
        found.left_out |= wrong
        for name, timing in times.items():
            self._pace[name, cell.head_dim, cell.causal] = timing.median_ms / 1e3 / cell.flops
            if name not in wrong:
                found.times[name] = timing
        return found

    def _entrants(self, cell: Cell) -> dict[str, Attention]:
        mine = {
            rung_name(r): lambda q, k, v, causal, n=r.number: ladder_attention(
                q, k, v, causal=causal, rung=n
            )
            for r in self.ladder
            if cell.head_dim in r.head_dims
        }
        return mine | self.peers

    def _too_slow(self, name: str, attention: Attention, cell: Cell) -> str | None:
        """Why not to start it: one run would take longer than ``LONGEST``."""
        pace = self._pace.get((name, cell.head_dim, cell.causal))
        if pace is None and cell.seq > SEQS[0] and name.startswith("rung"):
            pace = self._probe(attention, Cell(cell.head_dim, SEQS[0], cell.causal))
            self._pace[name, cell.head_dim, cell.causal] = pace
        seconds = (pace or 0.0) * cell.flops
        return f"a run would take about {seconds:.1f} s" if seconds > LONGEST else None

    def _probe(self, attention: Attention, cell: Cell) -> float:
        """Seconds an operation, from a single run."""
        q, k, v = (torch.randn(cell.shape, device="cuda").to(self.dtype) for _ in range(3))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        try:
            attention(q[:1], k[:1], v[:1], cell.causal)
            start.record()
            attention(q, k, v, cell.causal)
            end.record()
            end.synchronize()
        except RuntimeError:
            return 0.0  # the cell itself will say why
        return start.elapsed_time(end) / 1e3 / cell.flops


def _refusal(attention: Attention, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> str | None:
    """Run it once; why it does not."""
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            attention(q, k, v, causal)
            torch.cuda.synchronize()
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return "out of memory"
    except RuntimeError as error:  # for a backend of SDPA its warnings say why
        reasons = [
            str(w.message).split(" (Triggered")[0].strip()
            for w in said
            if "(Triggered" in str(w.message)
        ]
        useful = [r for r in reasons if "kernel not used because" not in r and "disabled" not in r]
        return " ".join((useful[-1] if useful else str(error).splitlines()[0]).split())
    return None


def _unlike(outputs: Mapping[str, Tensor], kind: str) -> dict[str, str]:
    """Whose result is not what the others have. Coarse: how precise each is has been tested before."""
    eps = {"tf32": 2**-10, "float32": 2**-14}.get(kind) or torch.finfo(KINDS[kind]).eps
    names = [name for name in PEERS if name in outputs]
    if not names:
        return {}
    truth = outputs[names[-1]].float()
    allowed = 8 * eps * truth.abs().max()
    wrong = {}
    for name, out in outputs.items():
        error = (out.float() - truth).abs().max()
        if not error <= allowed:
            wrong[name] = f"wrong result: {error.item():.3g} away from {names[-1]}"
    return wrong


@contextlib.contextmanager
def matmul_precision(kind: str) -> Iterator[None]:
    """PyTorch's matrix products of float32 in tf32 for that kind, in float32 for the others."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def matmul_tflops(kind: str) -> float:
    """The ceiling: what PyTorch's matrix product of 8192 cubed reaches in this kind."""
    n, dtype = 8192, KINDS[kind]
    a, b = (torch.randn(n, n, device="cuda").to(dtype) for _ in range(2))
    with matmul_precision(kind):
        timing = measure({"matmul": lambda: a @ b}, seconds=0.5)["matmul"]
    return 2 * n**3 / timing.median_ms / 1e9


@dataclass(frozen=True)
class HostCost:
    """What one ``ladder_attention`` costs the host, in microseconds."""

    dispatch_us: float  # to check the arguments and to choose the rung
    allocate_us: float  # for the output and the rung's workspace
    launch_us: float  # through ctypes


def host_cost(q: Tensor, k: Tensor, v: Tensor, rung: int | None = None) -> HostCost:
    """Time the parts of a causal call, each as the fastest of several samples."""
    call = rungs.prepared(q, k, v, True, None, rung)
    dispatch = _microseconds(lambda: rungs.prepared(q, k, v, True, None, rung))
    allocate = _microseconds(call.allocate)
    whole = _microseconds(lambda: ladder_attention(q, k, v, causal=True, rung=rung))
    return HostCost(dispatch, allocate, max(0.0, whole - dispatch - allocate))


def _microseconds(run: Callable[[], object], times: int = 300) -> float:
    def several() -> None:
        for _ in range(times):
            run()

    run()
    samples = []
    for _ in range(9):
        samples.append(timeit.timeit(several, number=1) / times * 1e6)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the queue is empty before the next ones are put in
    return min(samples)
