"""The rungs of the ladder: what there is, and what each can run on. :mod:`task4.ladder.call` calls them."""

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.dtypes import dtype_name

FOLDER = Path(__file__).resolve().parent
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Rung:
    """One kernel of the ladder."""

    number: int
    name: str
    file: str  # a .cu beside this one; all have the same launcher, ``attention``
    change: str  # what it does differently from the rung before
    dtypes: tuple[torch.dtype, ...] = (FP16, BF16)
    head_dims: tuple[int, ...] = (64, 128)
    capability: tuple[int, int] = (8, 0)  # that a GPU needs at least
    hopper: bool = False  # uses wgmma and TMA: of all GPUs, runs on those of ``capability`` alone
    vector: int = 16  # bytes to which pointers and strides must be aligned for its loads
    tf32: bool = False  # takes float32 tensors, but multiplies them rounded to tf32
    split: bool = False  # multiplies float32 on tensor cores, in 16-bit parts
    counter: bool = False  # if causal, its workspace is an int that is 0 before and after
    min_keys: int = 0  # with fewer, the next rung of FASTEST_FIRST is faster

    def __str__(self) -> str:
        return f"rung {self.number} ({self.name})"

    @property
    def label(self) -> str:
        """Its name in tables, pictures and records."""
        return f"{self.number} {self.name}"

    @property
    def source(self) -> Path:
        return FOLDER / self.file

    def exact_in(self, dtype: torch.dtype) -> bool:
        """Whether products are as accurate as the tensors: not where float32 is rounded to tf32."""
        return dtype in self.dtypes and not (self.tf32 and dtype == FP32)

    def why_not(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, alignment: int = 16
    ) -> str | None:
        """Why it cannot take such tensors; None if it can. ``alignment`` in bytes: :func:`aligned_to`."""
        if dtype not in self.dtypes:
            wanted = _join(map(dtype_name, self.dtypes))
            return f"{self} takes {wanted} tensors; got {dtype_name(dtype)}"
        if head_dim not in self.head_dims:
            return f"{self} is made for head_dim {_join(map(str, self.head_dims))}; got {head_dim}"
        needs = f"{self} needs a GPU of compute capability {_version(self.capability)}"
        if device.type != "cpu":
            gpu = torch.cuda.get_device_properties(device)
            has = (gpu.major, gpu.minor)
            if has < self.capability or (self.hopper and has != self.capability):
                newer = "(Hopper)" if self.hopper else "or newer"
                return f"{needs} {newer}; {gpu.name} has {_version(has)}"
        if alignment < self.vector:
            return f"{self} needs tensors aligned to {self.vector} bytes; got {alignment}"
        return None


# What rungs have in common.
_ALL = (FP32, FP16, BF16)
_SIMT: dict[str, Any] = dict(dtypes=_ALL, capability=(7, 5), vector=1)
_WMMA: dict[str, Any] = dict(dtypes=_ALL, vector=1, tf32=True)
_HOPPER: dict[str, Any] = dict(capability=(9, 0), hopper=True)
_WGMMA = _HOPPER | dict(head_dims=(64, 128, 256))

RUNGS: tuple[Rung, ...] = (
    Rung(1, "naive", "01_naive.cu", "one thread computes one row of the output, from global memory", **_SIMT),
    Rung(2, "coalesced", "02_coalesced.cu", "a two-dimensional block loads tiles into shared memory", **_SIMT),
    Rung(3, "register tile", "03_register_tile.cu", "each thread computes a block of S and O in registers", **_SIMT),
    Rung(4, "wmma", "04_wmma.cu", "tensor cores through nvcuda::wmma, one warp per block", **_WMMA),
    Rung(5, "wmma, several warps", "05_wmma_warps.cu", "four warps share each tile of K and V", **_WMMA),
    Rung(6, "wmma, row block", "06_wmma_rows.cu", "32 rows per warp: each fragment of K and V is used twice", **_WMMA),
    Rung(7, "mma.sync", "07_mma.cu", "the tensor cores' own instruction: S and O are kept in registers"),
    Rung(8, "swizzle", "08_swizzle.cu", "swizzled shared memory: no bank conflicts"),
    Rung(9, "Q and P in registers", "09_registers.cu", "FlashAttention-2: neither is read from shared memory again"),
    Rung(10, "async copy", "10_async_copy.cu", "cp.async loads the next K and V while this tile is computed"),
    Rung(11, "wgmma", "11_wgmma.cu", "Hopper: TMA loads whole tiles, wgmma multiplies them", **_WGMMA),
    Rung(12, "warp specialised", "12_warp_specialised.cu", "one warp loads, the others take its registers", **_WGMMA),
    Rung(13, "ping-pong", "13_ping_pong.cu", "one warpgroup's softmax overlaps with another's products", **_WGMMA),
    Rung(14, "persistent", "14_persistent.cu", "persistent blocks and a dynamic tile scheduler: a tile's epilogue"
         " overlaps with the next one's prologue", counter=True, **_WGMMA),
    Rung(15, "lazy maximum", "15_lazy_maximum.cu", "long rows keep their maximum and check P instead",
         counter=True, min_keys=2048, **_WGMMA),
    Rung(16, "fp32", "16_fp32.cu", "float32 in 16-bit parts on wgmma, as accurate as float32", (FP32,),
         split=True, **_HOPPER),
)  # fmt: skip

WIDEST = max(max(rung.head_dims) for rung in RUNGS)

# As measured (RESULTS.md). The first that takes the tensors is the one that runs.
FASTEST_FIRST = (16, 15, 14, 13, 11, 12, 10, 9, 8, 7, 6, 5, 3, 4, 2, 1)


def by_number(number: int) -> Rung:
    """The rung of that number; ValueError if there is none."""
    for rung in RUNGS:
        if rung.number == number:
            return rung
    raise ValueError(f"there is no rung {number!r}; the ladder has {list_rungs(RUNGS)}")


def fastest(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    alignment: int = 16,
    kv_len: int | None = None,
) -> Rung | None:
    """The rung that runs by default; None if there is none for these.

    ``alignment`` in bytes: :func:`aligned_to`. ``kv_len``: enough for any rung if None.
    """
    found = _fastest_first(device, dtype, head_dim, alignment)
    return next((r for r in found if kv_len is None or kv_len >= r.min_keys), None)


@functools.cache
def _fastest_first(
    device: torch.device, dtype: torch.dtype, head_dim: int, alignment: int
) -> list[Rung]:
    rungs = sorted(  # on the CPU, emulated wgmma is slow
        map(by_number, FASTEST_FIRST), key=lambda r: device.type == "cpu" and r.hopper
    )
    return [
        r
        for r in rungs
        if r.exact_in(dtype) and r.why_not(device, dtype, head_dim, alignment) is None
    ]


def choose(q: Tensor, k: Tensor, v: Tensor, number: int | None) -> tuple[Rung, str]:
    """The rung of that number, or the fastest that takes these tensors.

    Returns:
        It; and why it is not the fastest for aligned ones, in a sentence, or nothing.

    Raises:
        ValueError: no rung can take them, or the one of that number cannot: why, and which can.
    """
    device, dtype, head_dim, kv_len = q.device, q.dtype, q.shape[3], k.shape[1]
    alignment = min(map(aligned_to, (q, k, v)))
    wanted = (
        fastest(device, dtype, head_dim, kv_len=kv_len) if number is None else by_number(number)
    )
    where = "the CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
    dims = _join(f"{d}" for d in sorted({d for rung in RUNGS for d in rung.head_dims}))
    none_takes = (
        f"no rung takes {dtype_name(dtype)} tensors with head_dim {head_dim} on {where}; the ladder is made for"
        f" head_dim {dims}, task4.attention.flash_attention for any up to 128"
    )
    if wanted is None:
        raise ValueError(none_takes)
    if reason := wanted.why_not(device, dtype, head_dim):
        otherwise = f"; {none_takes}"
    elif alignment < wanted.vector:
        reason, otherwise = _misaligned(wanted, q, k, v), ". No other rung can take them"
    else:
        return wanted, ""
    if number is None and (found := fastest(device, dtype, head_dim, alignment, kv_len)):
        return found, reason
    others = [r for r in RUNGS if r.why_not(device, dtype, head_dim, alignment) is None]
    if others:
        otherwise = f". {list_rungs(others).capitalize()} can take them"
    raise ValueError(reason + otherwise)


def aligned_to(tensor: Tensor) -> int:
    """The largest power of two up to 16, in bytes, that divides the address of each of its rows."""
    starts = tensor.data_ptr() | 16
    for n, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True):
        if n > 1:
            starts |= stride * tensor.element_size()
    return starts & -starts


def _misaligned(rung: Rung, *qkv: Tensor) -> str:
    """Which of q, k and v its loads cannot take, and why."""
    name, tensor = next(
        (name, t) for name, t in zip("qkv", qkv, strict=True) if aligned_to(t) < rung.vector
    )
    address = tensor.data_ptr() | 16
    strides = " ".join(f"{stride * tensor.element_size()}" for stride in tensor.stride()[:3])
    return (
        f"{rung}: it loads {rung.vector} bytes at once, which {name} does not allow: it begins at a multiple of"
        f" {address & -address} bytes, and its batches, rows and heads are {strides} bytes apart"
    )


def list_rungs(rungs: Sequence[Rung]) -> str:
    """``rungs 1 to 6 and 16``."""
    words = []
    for _, run in itertools.groupby(enumerate(rungs), lambda item: item[1].number - item[0]):
        first, *_, last = [rung.number for _, rung in run] * 2
        words += [f"{first} to {last}"] if last > first + 1 else map(str, range(first, last + 1))
    return ("rung " if len(rungs) == 1 else "rungs ") + _join(words)


def _join(words: Iterable[str]) -> str:
    """``a, b and c``."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def _version(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
