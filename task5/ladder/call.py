"""Calling a rung of decode."""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from common.build import Kernels, dtype_code
from common.inputs import check_attention, check_device, check_lengths, describe, expect

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (16, 256)  # from, to; multiples of 16
MAX_QUERIES = 16
TILE = 64  # keys
ON_CPU = 6  # blocks where there is no GPU: enough to share a pair
_KERNELS = {
    1: Kernels(__file__, "01_shared_work.cu"),
    2: Kernels(__file__, "02_dependent_launch.cu"),  # Hopper alone
}


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    seqlens_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    block_table: Tensor | None = None,
    window: int | None = None,
    batch_invariant: bool = False,
    rung: int | None = None,
) -> Tensor:
    """softmax(scale q k^T) v for the newest tokens of each sequence against its cache, which is read in place, once.

    Nothing is read on the host: a CUDA graph that captured a call stays right while sequences grow.

    Args:
        q: ``(batch, q_len, heads, head_dim)``, float16 or bfloat16, head_dim 64, 128 or 256, at most 16 tokens.
            Token i sees the keys up to ``seqlens_k[b] - q_len + i``.
        k, v: ``(batch, max_seq, kv_heads, head_dim)``; with ``block_table`` the pages of all sequences,
            ``(pages, page_size, kv_heads, head_dim)``, page_size a multiple of 16 up to 256. kv_heads divides heads.
        scale: factor of the scores; ``1 / sqrt(head_dim)`` if None.
        seqlens_k: int32 ``(batch,)`` on q's device, keys of each sequence, the new tokens' included; all for which
            there is room if None, and where a length is larger.
        leftpad_k: int32 ``(batch,)``, keys to skip at the start of each sequence.
        block_table: int32 ``(batch, max_pages)``, contiguous: key j is row ``j % page_size`` of page
            ``block_table[b, j // page_size]``. Sequences may share pages. A page outside of the pool is not read, and
            its keys are not seen.
        window: how many keys a token sees at most, itself included; None: no limit.
        batch_invariant: a sequence's result has the same bits alone, in any batch and order, contiguous or paged.
        rung: 1, or 2 on Hopper; the fastest here if None.

    Returns:
        ``(batch, q_len, heads, head_dim)``, contiguous, q's dtype. A query that sees no key gives 0.

    Raises:
        ValueError: arguments that do not fit, named.
    """
    batch, kv_len = _check(q, k, v, block_table)
    check_lengths("seqlens_k", seqlens_k, q)
    check_lengths("leftpad_k", leftpad_k, q)
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 key, or None; got {window}")
    _, q_len, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    number = _choose(q.device, rung)
    out = torch.empty((batch, q_len, heads, head_dim), dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    if kv_len == 0:
        return out.zero_()
    rows = heads // kv_heads * q_len
    tall = 32 if rows > 16 and head_dim <= 128 else 16  # rows that one read serves
    pairs = kv_heads * -(-rows // tall)
    room = _blocks(q.device, rows, head_dim, number)
    blocks = min(room, batch * pairs * -(-kv_len // TILE))
    chunks = -(-2 * room // pairs) if batch_invariant else 0
    slots = batch * pairs * chunks if chunks else 2 * blocks
    partial, counters = _workspace(q.device, slots * tall * (head_dim + 2), batch * pairs)
    _KERNELS[number].launch(
        "decode", q=q, k=k, v=v, out=out, seqlens_k=seqlens_k, leftpad_k=leftpad_k, block_table=block_table,
        max_pages=0 if block_table is None else block_table.shape[1], window=min(window or 0, kv_len), chunks=chunks,
        scale=1 / math.sqrt(head_dim) if scale is None else scale, partial=partial, slots=slots, counters=counters,
        blocks=blocks, dtype=dtype_code(q.dtype),
    )  # fmt: skip
    return out


def _check(q: Tensor, k: Tensor, v: Tensor, block_table: Tensor | None) -> tuple[int, int]:
    """batch, and the keys for which a sequence has room."""
    if block_table is None:
        batch, _, _, q_len, kv_len, head_dim = check_attention(q, k, v, DTYPES, HEAD_DIMS[-1])
    else:
        expect("q", q, shape=("batch", "q_len", "heads", "head_dim"), dtype=DTYPES)
        like_q = {"dtype": q.dtype, "device": q.device}
        expect("k", k, shape=("pages", "page_size", "kv_heads", q.shape[3]), **like_q)
        expect("v", v, shape=k.shape, **like_q)
        check_device(q)
        (batch, q_len, heads, head_dim), (_, page_size, kv_heads, _) = q.shape, k.shape
        if kv_heads == 0 or heads % kv_heads:
            raise ValueError(f"kv heads must divide the query heads; got {heads} and {kv_heads}")
        least, most = PAGE_SIZES
        if page_size % least or not least <= page_size <= most:
            raise ValueError(
                f"page_size must be a multiple of {least} up to {most}; got {page_size}"
            )
        expect("block_table", block_table, shape=(batch, "max_pages"), dtype=torch.int32, device=q.device)  # fmt: skip
        if not block_table.is_contiguous():
            raise ValueError(f"block_table must be contiguous; got strides {block_table.stride()}")
        kv_len = block_table.shape[1] * page_size
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim must be 64, 128 or 256; got {head_dim}")
    if not 1 <= q_len <= MAX_QUERIES:
        raise ValueError(f"q must have from 1 to {MAX_QUERIES} tokens; got {q_len}")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if (
            tensor.stride(-1) != 1
            or any(s % 8 for s in tensor.stride()[:3])
            or tensor.data_ptr() % 16
        ):
            raise ValueError(
                f"{name} must have a contiguous last dimension, and rows that begin at multiples of 16 bytes; got"
                f" {describe(tensor)} with strides {tensor.stride()}"
            )
    return batch, kv_len


def _choose(device: torch.device, rung: int | None) -> int:
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    if rung is None:
        return 2 if hopper else 1
    if rung not in _KERNELS:
        raise ValueError(f"rung must be one of {tuple(_KERNELS)}; got {rung}")
    if rung == 2 and not hopper:
        raise ValueError(f"rung 2 runs on a Hopper GPU alone; the tensors are on {device}")
    return rung


@functools.cache
def _blocks(device: torch.device, rows: int, head_dim: int, rung: int) -> int:
    """How many blocks the GPU holds at once."""
    if device.type == "cpu":
        return ON_CPU
    gpu = torch.cuda.get_device_properties(device)
    size = _KERNELS[rung].query("shared_memory_bytes", device, rows=rows, head_dim=head_dim)
    reserved = 1024  # of each block, for the system
    per_sm = gpu.shared_memory_per_multiprocessor // (size + reserved)
    return gpu.multi_processor_count * max(1, min(2, per_sm))


@dataclass
class _Workspace:
    partial: Tensor
    counters: Tensor  # 0 between launches


_workspaces: dict[tuple[torch.device, int], list[_Workspace]] = {}


def _workspace(device: torch.device, floats: int, counters: int) -> tuple[Tensor, Tensor]:
    """Scratch of at least this size for the current stream. None is ever freed: a CUDA graph may hold it."""
    stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
    known = _workspaces.setdefault((device, stream), [])
    if known and known[-1].partial.numel() >= floats and known[-1].counters.numel() >= counters:
        return known[-1].partial, known[-1].counters
    partial = torch.empty(floats, device=device)
    known.append(_Workspace(partial, torch.zeros(counters, dtype=torch.int32, device=device)))
    return partial, known[-1].counters
