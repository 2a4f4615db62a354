"""FlashAttention-2 in Triton. Where there is no GPU, Triton's interpreter runs it on CPU tensors.

    grid  (ceil(q_len / B_r), heads, batch)     one program for each Q_i, a tile of B_r queries of one head

A program works on whole tiles. What each thread computes, what goes to shared memory and when a tile is loaded, the
compiler decides; the sizes of the tiles are tuned by measurement.
"""

import math
import os
import sys
from typing import Any

import torch
from torch import Tensor

from common.dtypes import dtype_name
from common.inputs import check_attention, check_lengths, describe

INTERPRETED = not torch.cuda.is_available()
if INTERPRETED:
    if "triton.language" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise ImportError(
            "without a GPU, task4.frontends.triton must be imported before anything that imports Triton"
            " (torch.compile does), or TRITON_INTERPRET=1 must be set"
        )
    os.environ["TRITON_INTERPRET"] = "1"

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

LOG2_E = math.log2(math.e)
PRECISION = tl.constexpr("ieee")  # of float32; tf32, the default, rounds factors to 10 bits
SHORT = 64  # queries for which no tile is tuned


def _tile(B_r: int, B_c: int, num_warps: int, num_stages: int) -> triton.Config:
    return triton.Config({"B_r": B_r, "B_c": B_c}, num_warps=num_warps, num_stages=num_stages)


INTERPRETER = [_tile(32, 32, 4, 1)]
HALF = [
    _tile(64, 64, 4, 2),  # the first is that of SHORT
    _tile(64, 64, 4, 3),
    _tile(128, 64, 4, 3),
    _tile(128, 64, 8, 3),
    _tile(128, 128, 8, 2),
    _tile(128, 128, 8, 3),
]
# Without tensor cores a product's operands are in registers: larger tiles spill.
SINGLE = [_tile(32, 16, 4, 2), _tile(64, 16, 8, 2), _tile(64, 32, 8, 2), _tile(64, 64, 16, 2)]


def _to_time(_: list[triton.Config], args: dict[str, Any], **__: Any) -> list[triton.Config]:
    tiles = HALF if args["q"].element_size() == 2 else SINGLE
    return tiles[:1] if args["q_len"] <= SHORT else tiles


@triton.autotune(
    INTERPRETER if INTERPRETED else HALF + SINGLE,
    key=["head_dim", "CAUSAL", "magnitude"],  # and the dtypes
    prune_configs_by={"early_config_prune": _to_time},
)
@triton.jit(do_not_specialize=["q_len", "kv_len", "magnitude"])
def _attention(
    q, k, v, out, seqlens_k, leftpad_k, q_strides, k_strides, v_strides, out_strides,
    q_len, kv_len, group, scale, magnitude,
    head_dim: tl.constexpr, CAUSAL: tl.constexpr, NEGATIVE: tl.constexpr, PADDED: tl.constexpr, TYPE: tl.constexpr,
    B_r: tl.constexpr, B_c: tl.constexpr,
):  # fmt: skip
    row_0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * B_r  # causal: the longest rows first
    head, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    q += b * q_strides[0] + head * q_strides[2]
    k += b * k_strides[0] + head // group * k_strides[2]
    v += b * v_strides[0] + head // group * v_strides[2]
    out += b * out_strides[0] + head * out_strides[2]
    seqlen, leftpad = kv_len, 0
    if seqlens_k is not None:
        seqlen = tl.minimum(tl.load(seqlens_k + b), kv_len)
    if leftpad_k is not None:
        leftpad = tl.maximum(tl.load(leftpad_k + b), 0)

    # All rows see all keys up to `full`; no row sees one from `end` on. Tiles between the two need a mask.
    full, end, diagonal = seqlen, seqlen, seqlen - q_len
    if CAUSAL:
        full = tl.minimum(seqlen, row_0 + diagonal + 1)
        end = tl.minimum(seqlen, tl.minimum(row_0 + B_r, q_len) + diagonal)
    full = leftpad + tl.maximum(full - leftpad, 0) // B_c * B_c

    rows, cols, e = row_0 + tl.arange(0, B_r), tl.arange(0, B_c), tl.arange(0, PADDED)[None, :]
    rows_64, cols_64 = rows[:, None].to(tl.int64), cols[:, None].to(tl.int64)
    q, out = q + rows_64 * q_strides[1] + e, out + rows_64 * out_strides[1] + e
    k, v = k + cols_64 * k_strides[1] + e, v + cols_64 * v_strides[1] + e
    inside = (rows < q_len)[:, None] & (e < head_dim)
    Q_i = tl.load(q, mask=inside, other=0.0).to(TYPE)
    if NEGATIVE:  # of a positive scale the largest of scale S is scale times the largest of S
        Q_i, scale = -Q_i, -scale
    O_i = tl.zeros((B_r, PADDED), dtype=tl.float32)
    m_i = tl.full((B_r,), float("-inf"), dtype=tl.float32)
    l_i = tl.zeros((B_r,), dtype=tl.float32)

    start, stop = leftpad, full
    for MASKED in tl.static_range(2):
        for col_0 in range(start, stop, B_c):  # line 6
            keys = e < head_dim
            if MASKED:
                keys = keys & (col_0 + cols < seqlen)[:, None]
            first = tl.cast(col_0, tl.int64)
            K_j = tl.load(k + first * k_strides[1], mask=keys, other=0.0).to(TYPE)  # line 7
            V_j = tl.load(v + first * v_strides[1], mask=keys, other=0.0).to(TYPE)
            S = tl.dot(Q_i, K_j.T, input_precision=PRECISION)  # line 8
            if MASKED:
                seen = col_0 + cols[None, :] < seqlen
                if CAUSAL:
                    seen = seen & (col_0 + cols[None, :] <= rows[:, None] + diagonal)
                S = tl.where(seen, S, float("-inf"))
            m_new = tl.maximum(m_i, scale * tl.max(S, 1))  # line 9
            shift = m_new
            if MASKED:
                shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # no key so far
            rescale = tl.exp2(m_i - shift)
            P = tl.exp2(scale * S - shift[:, None])
            l_i = rescale * l_i + tl.sum(P, 1)
            O_i = rescale[:, None] * O_i
            O_i = tl.dot(P.to(TYPE), V_j, O_i, input_precision=PRECISION)  # line 10
            m_i = m_new
        start, stop = full, end
    O_i = O_i / tl.where(l_i == 0.0, 1.0, l_i)[:, None]  # line 12
    tl.store(out, O_i.to(out.dtype.element_ty), mask=inside)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    seqlens_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
) -> Tensor:
    """softmax(scale q k^T) v by one kernel in Triton. [FA2] arXiv:2307.08691, Algorithm 1.

    Longer inputs of a new dtype, head_dim or magnitude of q_len try each tile first, which takes seconds.

    Args, returns, raises:
        As :func:`task4.attention.flash_attention`; a ValueError also for tensors on the CPU where there is a GPU.
    """
    batch, heads, kv_heads, q_len, kv_len, head_dim = check_attention(q, k, v)
    check_lengths("seqlens_k", seqlens_k, q)
    check_lengths("leftpad_k", leftpad_k, q)
    if not q.is_cuda and not INTERPRETED:
        raise ValueError(f"where there is a GPU, Triton runs on cuda tensors; got q {describe(q)}")
    out = torch.empty((batch, q_len, heads, head_dim), dtype=q.dtype, device=q.device)
    if kv_len == 0:
        return out.zero_()
    if out.numel():
        scale = (1 / math.sqrt(head_dim) if scale is None else scale) * LOG2_E
        with torch.cuda.device_of(q):
            _attention[lambda tile: (triton.cdiv(q_len, tile["B_r"]), heads, batch)](
                q, k, v, out, seqlens_k, leftpad_k, q.stride(), k.stride(), v.stride(), out.stride(),
                q_len, kv_len, heads // kv_heads, scale or 1e-30, q_len.bit_length(),  # 0 times -inf is NaN
                head_dim=head_dim, CAUSAL=causal, NEGATIVE=scale < 0, PADDED=max(16, triton.next_power_of_2(head_dim)),
                TYPE=tl.float32 if INTERPRETED else getattr(tl, dtype_name(q.dtype)),
                enable_fp_fusion=True,
            )  # fmt: skip
    return out
