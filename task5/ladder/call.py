"""Calling a rung of decode."""

import math

import torch
from torch import Tensor

from common.build import dtype_code
from common.inputs import check_lengths, describe
from task5.ladder.checks import (
    MAX_BATCH,
    check_cached,
    expect_loadable,
    expect_room,
    expect_scale,
    expect_window,
)
from task5.ladder.choice import fastest, is_faster_as_a_chunk
from task5.ladder.chunk import chunk_attention, fits
from task5.ladder.gpu import is_hopper, sms_of, workspace
from task5.ladder.kernels import (
    BY_LENGTH,
    IN_16_BITS,
    KERNELS,
    MOST_SEQUENCES,
    OF_EIGHT_WARPS,
    ROWS,
    RUNGS,
    Call,
    Choice,
)
from task5.ladder.plan import plan

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)
MAX_QUERIES = 16
MAX_TILES = (1 << 31) - 1
MAX_DIVIDED = 1 << 32  # rows of q by their group: below, a product finds a row's token


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
    new_keys: int | None = None,
    batch_invariant: bool = False,
    rung: int | None = None,
) -> Tensor:
    """softmax(scale q k^T) v for the newest tokens of each sequence against its cache, which is read in place, once.

    Nothing is read on the host: a CUDA graph that captured a call stays right while sequences grow.

    Args:
        q: ``(batch, q_len, heads, head_dim)``, float32, float16 or bfloat16, head_dim 64, 128 or 256, at most 16
            tokens. Token i sees the keys up to ``seqlens_k[b] - q_len + i``.
        k, v: ``(batch, max_seq, kv_heads, head_dim)``; with ``block_table`` the pages of all sequences,
            ``(pages, page_size, kv_heads, head_dim)``, page_size a multiple of 16 up to 256, all of them within 64
            GiB. kv_heads divides heads.
        scale: factor of the scores, from 1.18e-38 to 2.36e38; ``1 / sqrt(head_dim)`` if None.
        seqlens_k: int32 ``(batch,)`` on q's device, keys of each sequence, the new tokens' included; all for which
            there is room if None, and where a length is larger. A negative one counts as 0.
        leftpad_k: int32 ``(batch,)``, keys to skip at the start of each sequence; a negative number counts as 0.
        block_table: int32 ``(batch, max_pages)``, contiguous: key j is row ``j % page_size`` of page
            ``block_table[b, j // page_size]``. Sequences may share pages. A page outside of the pool is not read, and
            its keys are not seen.
        window: how many keys a token sees at most, itself included; None: no limit.
        new_keys: a promise about the launch directly ahead on the stream: of ``k`` and ``v`` it writes at most so many
            keys of each sequence, its newest. In a decode step that is ``q_len``, which :func:`append_rope` writes.
            Older keys are then loaded before that launch is complete, where that is faster; lengths and page numbers
            need no promise. None: it may write any key.
        batch_invariant: a sequence's result has the same bits alone, in any batch and order, contiguous or paged.
        rung: 1, or of GPUs on Hopper 2 to 12: 5, 11 and 12 for 16 bits alone, 6, 7 and 10 to 12 for head_dim up to 128,
            8, 9, 10 and 12 for up to 128 sequences; the fastest for these shapes if None.

    Returns:
        ``(batch, q_len, heads, head_dim)``, contiguous, q's dtype. A query that sees no key gives 0.

    Raises:
        ValueError: arguments that do not fit, named.
    """
    batch, kv_len = _check(q, k, v, block_table)
    check_lengths("seqlens_k", seqlens_k, q)
    check_lengths("leftpad_k", leftpad_k, q)
    expect_scale(scale)
    expect_window(window)
    if new_keys is not None and (not isinstance(new_keys, int) or new_keys < 0):
        raise ValueError(f"new_keys must be at least 0 keys, or None; got {new_keys!r}")
    _, q_len, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    _check_rung(q, rung)
    out = torch.empty((batch, q_len, heads, head_dim), dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    if kv_len == 0 or not k.numel():
        return out.zero_()
    rows = heads // kv_heads * q_len
    call = Call(
        q.device, dtype_code(q.dtype), head_dim, rows, sms_of(q.device), is_hopper(q.device)
    )
    page_size = None if block_table is None else k.shape[1]
    lengths = 1 if seqlens_k is None and leftpad_k is None else batch
    seen = kv_len if window is None else min(kv_len, window + q_len - 1)  # of a sequence, at most
    choice = Choice(rung, new_keys is not None)
    if rung is None:
        if fits(batch, heads, kv_heads) and is_faster_as_a_chunk(
            call, batch * kv_heads, seen, batch_invariant=batch_invariant, page_size=page_size,
            lengths=lengths,
        ):  # fmt: skip
            return chunk_attention(
                q, k, v, causal=True, scale=scale, seqlens_k=seqlens_k, leftpad_k=leftpad_k,
                block_table=block_table, window=window, batch_invariant=batch_invariant,
            )  # fmt: skip
        choice = fastest(
            call, batch * kv_heads, seen, batch_invariant=batch_invariant, page_size=page_size,
            promised=new_keys is not None, batch=batch, lengths=lengths,
        )  # fmt: skip
    if not choice.ahead:
        new_keys = None
    work = plan(call, batch, kv_heads, seen, batch_invariant, choice.rung, choice.every_other_sm)
    partial, counters = None, None
    if work.floats:
        partial, counters = workspace(q.device, work.floats, work.counters)
    KERNELS[work.rung].launch(
        "decode", q=q, k=k, v=v, out=out, seqlens_k=seqlens_k, leftpad_k=leftpad_k, block_table=block_table,
        max_pages=0 if block_table is None else block_table.shape[1], window=min(window or 0, kv_len),
        new_keys=kv_len if new_keys is None else min(new_keys, kv_len),
        scale=1 / math.sqrt(head_dim) if scale is None else scale, chunks=work.chunks, partial=partial,
        slots=work.slots, counters=counters, blocks=work.blocks, dtype=call.dtype,
    )  # fmt: skip
    return out


def _check(q: Tensor, k: Tensor, v: Tensor, block_table: Tensor | None) -> tuple[int, int]:
    """batch, and the keys for which a sequence has room."""
    batch, heads, kv_heads, q_len, kv_len, _ = check_cached(q, k, v, block_table, DTYPES, HEAD_DIMS)
    expect_room(kv_len)
    if not 1 <= q_len <= MAX_QUERIES:
        raise ValueError(f"q must have from 1 to {MAX_QUERIES} tokens; got {q_len}")
    expect_loadable(q=q, k=k, v=v)
    if batch > MAX_BATCH:
        raise ValueError(f"batch must be at most {MAX_BATCH:,}; got {batch:,}")
    group = heads // max(1, kv_heads)
    if q_len * group**2 >= MAX_DIVIDED:
        raise ValueError(
            f"tokens by the square of the query heads of a kv head must be below {MAX_DIVIDED:,}; got {q_len} tokens"
            f" and {group:,} heads"
        )
    pairs = batch * kv_heads * -(-group * q_len // ROWS)
    if pairs * -(-kv_len // ROWS) > MAX_TILES:
        raise ValueError(
            f"there must be at most {MAX_TILES:,} tiles of {ROWS} keys for {ROWS} rows in a call; got batch {batch:,},"
            f" {heads} heads, {kv_heads} kv heads, {q_len} tokens and room for {kv_len:,} keys"
        )
    return batch, kv_len


def _check_rung(q: Tensor, rung: int | None) -> None:
    if rung is not None and not (isinstance(rung, int) and rung in RUNGS):
        raise ValueError(f"rung must be one of {RUNGS}; got {rung!r}")
    if rung is not None and rung > 1 and q.is_cuda and not is_hopper(q.device):
        raise ValueError(
            f"of GPUs, rung {rung} runs on Hopper alone; the tensors are on {q.device}"
        )
    if rung in IN_16_BITS and q.dtype == torch.float32:
        raise ValueError(f"rung {rung} computes in 16 bits; got {describe(q)}")
    if rung in OF_EIGHT_WARPS and q.shape[3] > 128:
        raise ValueError(f"rung {rung} is for head_dim up to 128; got {q.shape[3]}")
    if rung in BY_LENGTH and q.shape[0] > MOST_SEQUENCES:
        raise ValueError(f"rung {rung} is for up to {MOST_SEQUENCES} sequences; got {q.shape[0]}")
