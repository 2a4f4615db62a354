"""The rungs of the ladder, what each can run on, and one function that calls them all.

    ladder_attention(q, k, v, causal=True)            # the fastest one that takes these tensors
    ladder_attention(q, k, v, causal=True, rung=9)    # this one, or a ValueError that says which do

A rung is compiled when it is first called.
"""

import functools
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.build import Kernels, dtype_code
from common.inputs import check_attention

log = logging.getLogger("task4.ladder")

FOLDER = Path(__file__).resolve().parent
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Rung:
    """One kernel of the ladder.

    Args:
        number: its place.
        name: in a word or two.
        file: its .cu file; all have the same launcher, ``attention``.
        change: what it does differently from the rung before, in one line.
        dtypes, head_dims: what it takes.
        capability: the compute capability that it needs at least.
        hopper: it uses wgmma and TMA: it runs on ``capability`` alone, and not on the CPU.
        vector: bytes to which pointers and strides must be aligned for its loads.
        tf32: it takes float32 tensors, but multiplies them rounded to tf32.
        counter: its workspace is an int that is 0 before and after, if causal.
        split: it multiplies float32 on tensor cores, in 16-bit parts.
    """

    number: int
    name: str
    file: str
    change: str
    dtypes: tuple[torch.dtype, ...] = (FP16, BF16)
    head_dims: tuple[int, ...] = (64, 128)
    capability: tuple[int, int] = (8, 0)
    hopper: bool = False
    vector: int = 16
    tf32: bool = False
    counter: bool = False
    split: bool = False

    def __str__(self) -> str:
        return f"rung {self.number} ({self.name})"

    @property
    def source(self) -> Path:
        return FOLDER / self.file

    @property
    def runs_on_cpu(self) -> bool:
        return not self.hopper

    def exact_in(self, dtype: torch.dtype) -> bool:
        """Whether products are as precise as the tensors: not where float32 goes through tf32."""
        return dtype in self.dtypes and not (self.tf32 and dtype == FP32)


_ALL = (FP32, FP16, BF16)


# What rungs have in common.
_SIMT: dict[str, Any] = dict(dtypes=_ALL, capability=(7, 5), vector=1)
_WMMA: dict[str, Any] = dict(dtypes=_ALL, vector=1, tf32=True)
_HOPPER: dict[str, Any] = dict(capability=(9, 0), hopper=True)
_WGMMA = _HOPPER | dict(head_dims=(64, 128, 256))

RUNGS: tuple[Rung, ...] = (
    Rung(1, "naive", "01_naive.cu", "one thread computes one row of the output, from global memory", **_SIMT),
    Rung(2, "coalesced", "02_coalesced.cu", "a two-dimensional block loads tiles into shared memory", **_SIMT),
    Rung(3, "register tile", "03_register_tile.cu", "each thread computes a block of S and O in registers", **_SIMT),
    Rung(4, "wmma", "04_wmma.cu", "tensor cores through nvcuda::wmma, one warp a block", **_WMMA),
    Rung(5, "wmma, several warps", "05_wmma_warps.cu", "four warps share each tile of K and V", **_WMMA),
    Rung(6, "wmma, row block", "06_wmma_rows.cu", "32 rows a warp: each fragment of K and V is used twice", **_WMMA),
    Rung(7, "mma.sync", "07_mma.cu", "the tensor cores' own instruction: S and O stay in registers"),
    Rung(8, "swizzle", "08_swizzle.cu", "swizzled shared memory: no bank conflicts"),
    Rung(9, "Q and P in registers", "09_registers.cu", "FlashAttention-2: neither is read from shared memory again"),
    Rung(10, "async copy", "10_async_copy.cu", "cp.async brings the next K and V while this tile is computed"),
    Rung(11, "wgmma", "11_wgmma.cu", "Hopper: TMA loads whole tiles, wgmma multiplies them", **_WGMMA),
    Rung(12, "warp specialised", "12_warp_specialised.cu", "one warp loads, the others take its registers", **_WGMMA),
    Rung(13, "ping-pong", "13_ping_pong.cu", "one warpgroup's softmax runs beside another's products", **_WGMMA),
    Rung(
        14, "persistent", "14_persistent.cu",
        "blocks stay; a tile's end overlaps the next one's beginning; in long rows the maximum stays",
        counter=True, **_WGMMA,
    ),
    Rung(
        15, "fp32", "15_fp32.cu", "float32 in parts of 16 bits on wgmma, as accurate as float32", (FP32,),
        split=True, **_HOPPER,
    ),
)  # fmt: skip

_WIDEST = max(max(rung.head_dims) for rung in RUNGS)

# As measured (the table in README.md). The first that takes the tensors is the one that runs.
FASTEST_FIRST = (15, 14, 13, 11, 12, 10, 9, 8, 7, 6, 5, 3, 4, 2, 1)


def ladder_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    rung: int | None = None,
) -> Tensor:
    """softmax(scale q k^T) v by a rung of the ladder.

    Args:
        q: ``(batch, q_len, heads, head_dim)``, float32, float16 or bfloat16, any strides with a contiguous last
            dimension.
        k, v: ``(batch, kv_len, kv_heads, head_dim)``; kv_heads divides heads, and each serves heads / kv_heads of
            them (grouped-query attention).
        causal: query i sees the keys ``j <= i + kv_len - q_len``: the last one sees all.
        scale: factor of the scores, above 0; ``1 / sqrt(head_dim)`` if None.
        rung: the number of one. None: the fastest that takes these tensors; for float32 only one that computes with
            float32's accuracy. If q, k or v does not lie so that the fastest can load it, the next one that can runs,
            which the logger ``task4.ladder`` tells.

    Returns:
        ``(batch, q_len, heads, head_dim)``, contiguous, q's dtype. A query that sees no key gives 0.

    Raises:
        ValueError: arguments that do not fit, named; or a rung that cannot take them, with those that can.
    """
    return prepared(q, k, v, causal, scale, rung)(q, k, v)


def prepared(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    rung: int | None = None,
    least: int = 1,
) -> "Call":
    """What :func:`ladder_attention` calls: everything is checked, and a rung chosen.

    A call like an earlier one (same shapes, strides, dtype, device, alignment) goes where that one went; then a look-up
    is all that it costs. ``least``: to the caller, a rung before this one is no better than its own kernel.

    Raises:
        ValueError: see there.
    """
    try:
        key = (
            q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
            q.device, k.device, v.device, (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16, causal, scale, rung,
        )  # fmt: skip
        call = _calls.get(key)
    except (AttributeError, TypeError, RuntimeError):  # not tensors, or without memory
        return Call(q, k, v, causal, scale, rung, least)
    if call is None:
        call = Call(q, k, v, causal, scale, rung, least)
        if len(_calls) >= _MOST_CALLS:
            _calls.clear()
        _calls[key] = call
    return call


class Call:
    """A rung, and all that it has to be told about tensors like these.

    Raises:
        ValueError: arguments that do not fit, or a rung that cannot take them.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        scale: float | None,
        rung: int | None,
        least: int,
    ) -> None:
        sizes = check_attention(q, k, v, max_head_dim=_WIDEST)
        batch, heads, kv_heads, q_len, kv_len, head_dim = sizes
        if scale is not None and not 0 < scale < math.inf:
            raise ValueError(f"scale must be above 0 and finite; got {scale}")
        self.rung = _fastest(q, k, v, least) if rung is None else _named(rung, q, k, v)
        self._out = dict(size=(batch, q_len, heads, head_dim), dtype=q.dtype, device=q.device)
        self._nothing = not (batch and q_len and heads and kv_len)
        self._counted = self.rung.counter and causal
        own = kernels(self.rung)
        asked = own.has_query("workspace_bytes") and not self._nothing
        self._scratch = own.query("workspace_bytes", q.device, q=q, k=k) if asked else 0
        self._numbers = dict(
            scale=1 / math.sqrt(head_dim) if scale is None else float(scale), causal=int(causal),
            dtype=dtype_code(q.dtype),
        )  # fmt: skip
        self._launch: Callable[..., None] | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._nothing:  # no rows, or rows that see no key
            return torch.zeros(**self._out)
        out, workspace = self.allocate()
        if self._launch is None:
            self._launch = kernels(self.rung).prepare(
                "attention", q=q, k=k, v=v, out=out, workspace=workspace, **self._numbers
            )
        self._launch(q, k, v, out, workspace)
        return out

    def allocate(self) -> tuple[Tensor, Tensor | None]:
        """The output, and the rung's workspace if it wants one, not initialised unless it is a counter."""
        out = torch.empty(**self._out)
        if self._counted:
            return out, counter(out.device)
        if not self._scratch:
            return out, None
        return out, torch.empty(self._scratch, dtype=torch.uint8, device=out.device)


def counter(device: torch.device) -> Tensor:
    """An int32 on this GPU that is 0 when the current stream's next launch begins, which leaves it so.

    A CUDA graph that is captured gets one of its own, and zeroes it: it may be replayed beside others, on any stream.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    # torch.cuda.current_stream() builds an object: 3 us
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    found = _counters.get((device, stream))
    if found is None:
        found = _counters[device, stream] = torch.zeros(1, dtype=torch.int32, device=device)
    return found


_counters: dict[tuple[torch.device, int], Tensor] = {}
_calls: dict[tuple[Any, ...], Call] = {}
_MOST_CALLS = 4096


@functools.cache
def kernels(rung: Rung) -> Kernels:
    """The rung's launcher."""
    return Kernels(str(rung.source), rung.file)


# ---- which rung


def by_number(number: int) -> Rung:
    """The rung of that number; ValueError if there is none."""
    for rung in RUNGS:
        if rung.number == number:
            return rung
    raise ValueError(f"there is no rung {number!r}; the ladder has {list_rungs(RUNGS)}")


def fastest(
    device: torch.device, dtype: torch.dtype, head_dim: int, alignment: int = 16
) -> Rung | None:
    """The rung that runs by default; None if there is none for these. ``alignment`` in bytes: :func:`aligned_to`."""
    return _fastest_of(device, dtype, head_dim, alignment)


@functools.cache
def _fastest_of(
    device: torch.device, dtype: torch.dtype, head_dim: int, alignment: int
) -> Rung | None:
    for number in FASTEST_FIRST:
        rung = by_number(number)
        if rung.exact_in(dtype) and why_not(rung, device, dtype, head_dim, alignment) is None:
            return rung
    return None


def _fastest(q: Tensor, k: Tensor, v: Tensor, least: int) -> Rung:
    alignment = min(map(aligned_to, (q, k, v)))
    found = _fastest_of(q.device, q.dtype, q.shape[3], alignment)
    best = _fastest_of(q.device, q.dtype, q.shape[3], 16)
    if found is None:
        raise ValueError(
            f"{best}: {_misaligned(best, q, k, v)}. No other rung can take them"
            if best
            else _nobody(q.device, q.dtype, q.shape[3])
        )
    if best is not None and best != found:
        instead = found if found.number >= least else "task 4's own kernel"
        log.info("%s instead of %s: %s", instead, best, _misaligned(best, q, k, v))
    return found


def _named(number: int, q: Tensor, k: Tensor, v: Tensor) -> Rung:
    rung = by_number(number)
    dtype, head_dim, alignment = q.dtype, q.shape[3], min(map(aligned_to, (q, k, v)))
    reason = why_not(rung, q.device, dtype, head_dim, 16)
    if reason is None and alignment >= rung.vector:
        return rung
    if reason is None:
        reason = f"{rung}: {_misaligned(rung, q, k, v)}"
    others = takers(q.device, dtype, head_dim, alignment)
    if others:
        raise ValueError(f"{reason}. {list_rungs(others).capitalize()} can take them")
    raise ValueError(f"{reason}; {_nobody(q.device, dtype, head_dim)}")


def takers(
    device: torch.device, dtype: torch.dtype, head_dim: int, alignment: int = 16
) -> list[Rung]:
    """The rungs that run on such tensors."""
    return [r for r in RUNGS if why_not(r, device, dtype, head_dim, alignment) is None]


def why_not(
    rung: Rung, device: torch.device, dtype: torch.dtype, head_dim: int, alignment: int = 16
) -> str | None:
    """Why this rung cannot take such tensors, in a sentence; None if it can."""
    if dtype not in rung.dtypes:
        return f"{rung} takes {_join([_name(d) for d in rung.dtypes])} tensors; got {_name(dtype)}"
    if head_dim not in rung.head_dims:
        return f"{rung} is made for head_dim {_join(map(str, rung.head_dims))}; got {head_dim}"
    if device.type == "cpu":
        return None if rung.runs_on_cpu and alignment >= rung.vector else (
            f"{rung} needs a GPU of compute capability {_version(rung.capability)} (Hopper); got tensors on the CPU"
            if rung.hopper else f"{rung} needs tensors aligned to {rung.vector} bytes; got {alignment}"
        )  # fmt: skip
    gpu = _gpu(device)
    if gpu.capability < rung.capability or (rung.hopper and gpu.capability != rung.capability):
        return (
            f"{rung} needs a GPU of compute capability {_version(rung.capability)}"
            f"{' (Hopper)' if rung.hopper else ' or newer'}; {gpu.name} has {_version(gpu.capability)}"
        )
    if alignment < rung.vector:
        return f"{rung} needs tensors aligned to {rung.vector} bytes; got {alignment}"
    return None


@dataclass(frozen=True)
class _Gpu:
    name: str
    capability: tuple[int, int]


@functools.cache
def _gpu(device: torch.device) -> _Gpu:
    found = torch.cuda.get_device_properties(device)
    return _Gpu(found.name, (found.major, found.minor))


def aligned_to(tensor: Tensor) -> int:
    """The largest power of two up to 16, in bytes, that divides where each of its rows begins."""
    size = tensor.element_size()
    starts = tensor.data_ptr() | 16
    for n, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True):
        if n > 1:
            starts |= stride * size
    return starts & -starts


def _misaligned(rung: Rung, q: Tensor, k: Tensor, v: Tensor) -> str:
    """Which of q, k and v its loads cannot take, and why."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if aligned_to(tensor) < rung.vector:
            size = tensor.element_size()
            strides = " ".join(f"{s * size}" for s in tensor.stride()[:3])
            return (
                f"it loads {rung.vector} bytes at once, which {name} does not allow: it begins at a multiple of"
                f" {_begins(tensor)} bytes, and its batches, rows and heads are {strides} bytes apart"
            )
    raise AssertionError("all are aligned")


def _begins(tensor: Tensor) -> int:
    address = tensor.data_ptr() | 16
    return address & -address


def _nobody(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    where = "the CPU" if device.type == "cpu" else _gpu(device).name
    dims = sorted({d for r in RUNGS for d in r.head_dims})
    return (
        f"no rung takes {_name(dtype)} tensors with head_dim {head_dim} on {where}; the ladder is made for head_dim"
        f" {_join(map(str, dims))}, task4.attention.flash_attention for any up to 128"
    )


def list_rungs(rungs: Sequence[Rung]) -> str:
    """``rungs 1 to 6 and 15``."""
    runs: list[list[int]] = []
    for rung in rungs:
        if runs and rung.number == runs[-1][1] + 1:
            runs[-1][1] = rung.number
        else:
            runs.append([rung.number, rung.number])
    words = [f"{a} to {b}" if b > a + 1 else f"{a} and {b}" if b > a else f"{a}" for a, b in runs]
    return ("rung " if len(rungs) == 1 else "rungs ") + _join(words)


def _join(words: Iterable[str]) -> str:
    """``a, b and c``."""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _version(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
