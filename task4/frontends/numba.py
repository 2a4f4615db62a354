"""FlashAttention-2 as a CUDA kernel in Numba. Where there is no GPU, Numba's simulator runs it on CPU tensors, slowly.

After the kernel of GPU MODE's lecture 12 ("Flash Attention", Thomas Viehmann): here the loop over Q_i is the grid, m_i,
l_i and O_i are in registers, and barriers stand where all threads pass. Numba declares up to 48 KiB of shared memory,
which sets the size of a tile.

    grid   (ceil(q_len / B_r), heads, batch)    one block for each Q_i, a tile of B_r queries of one head
    block  (TX, TY)                             thread (tx, ty) computes rows ty, ty + TY, ... of the tile: columns
                                                tx, tx + TX, ... of S, P and O
"""

import functools
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from numpy import float16, float32, uint16, uint32, uint64
from torch import Tensor

from common.inputs import check_attention, check_lengths, describe

SIMULATED = not torch.cuda.is_available()
if SIMULATED:
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # read when numba is imported
os.environ.setdefault("NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS", "0")  # about small grids

if not hasattr(numpy, "row_stack"):  # numba-cuda 0.30.4 names it, and numpy 2.5 has only vstack
    numpy.row_stack = numpy.vstack

from numba import cuda  # noqa: E402

if SIMULATED:  # each of the block's threads is a thread of Python
    TX, TY, B_c, VECTOR, ALIGNMENT, OPTIONS = 2, 2, 16, 1, None, {}
else:  # vectors of 4 from 16-byte reads; 3 blocks on an SM leave a thread 168 registers
    TX, TY, B_c, VECTOR, ALIGNMENT, OPTIONS = 16, 8, 32, 4, 16, {"launch_bounds": (128, 3)}
LOWEST = float32(-1e30)  # where m_i starts: below all scores
MASKED = float32(-3e38)  # a score that is not seen: exp(MASKED - m_i) is 0 for every m_i
ZERO = float32(0)
TYPES = {torch.float32: float32, torch.float16: float16, torch.bfloat16: uint16}


@cuda.jit(device=True)
def _same(x):
    return x


@cuda.jit(device=True)
def _from_bfloat16(bits):
    return uint32(uint32(bits) << 16).view(float32)


@cuda.jit(device=True)
def _to_bfloat16(x):
    bits = x.view(uint32)
    if bits & 0x7FFFFFFF > 0x7F800000:  # NaN
        return uint32(0x7FC0)
    return uint32((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)  # to nearest, ties to even


@functools.cache
def _kernel(dtype: torch.dtype, head_dim: int) -> tuple[Any, int]:
    """The kernel for a head_dim up to this one, and its B_r."""
    B_r = 16 if SIMULATED else 4096 // head_dim
    ROWS, COLS, D_ROWS, D_COLS = B_r // TY, B_c // TX, B_c // TY, head_dim // TX
    K_row = head_dim + 4  # 16-byte reads of 8 consecutive rows fall into 32 different banks
    # Unsigned: Numba lets a signed index count from the end, and checks its sign at each use.
    START, D, COLS_J, STEP = uint64(0), uint64(head_dim), uint64(B_c), uint64(VECTOR)
    T, bits = TYPES[dtype], dtype == torch.bfloat16
    load, store = (_from_bfloat16, _to_bfloat16) if bits else (_same, _same)

    @cuda.jit(device=True, inline="always")
    def fetch(x, t, b, head, first, end):  # to registers: the loads start, no thread waits yet
        for r in range(D_ROWS):
            for c in range(D_COLS):
                row, e = first + cuda.threadIdx.y + TY * r, cuda.threadIdx.x + TX * c
                x[r, c] = ZERO
                if row < end and e < t.shape[3]:
                    x[r, c] = t[b, row, head, e]

    @cuda.jit(device=True, inline="always")
    def put(tile, first, x):
        for r in range(D_ROWS):
            for c in range(D_COLS):
                tile[first + cuda.threadIdx.y + TY * r, cuda.threadIdx.x + TX * c] = load(x[r, c])

    def attention(q, k, v, out, seqlens_k, leftpad_k, scale, causal):
        Q_i = cuda.shared.array((B_r, head_dim), float32, ALIGNMENT)
        KV_j = cuda.shared.array((B_c, K_row), float32, ALIGNMENT)  # K_j, then V_j
        P_s = cuda.shared.array((B_r, B_c), float32, ALIGNMENT)
        parts = cuda.shared.array((B_r, TX), float32, ALIGNMENT)  # of a row's maximum or sum
        S = cuda.local.array((ROWS, COLS), float32)
        O_i = cuda.local.array((ROWS, D_COLS), float32)
        x = cuda.local.array((D_ROWS, D_COLS), T)  # the next K_j or V_j
        m_i = cuda.local.array(ROWS, float32)
        l_i = cuda.local.array(ROWS, float32)  # of this thread's columns

        tx, ty, head, b = cuda.threadIdx.x, cuda.threadIdx.y, cuda.blockIdx.y, cuda.blockIdx.z
        row_0 = (cuda.gridDim.x - 1 - cuda.blockIdx.x) * B_r  # causal: the longest rows first
        kv_head = head // (q.shape[2] // k.shape[2])
        q_len, seqlen, leftpad = q.shape[1], min(seqlens_k[b], k.shape[1]), max(leftpad_k[b], 0)
        diagonal = seqlen - q_len  # causal: row i sees the keys j <= i + diagonal
        end = min(seqlen, min(row_0 + B_r, q_len) + diagonal) if causal else seqlen

        for r in range(0, B_r, B_c):
            fetch(x, q, b, head, row_0 + r, q_len)
            put(Q_i, r, x)
        for r in range(ROWS):
            m_i[r], l_i[r] = LOWEST, ZERO
            for c in range(D_COLS):
                O_i[r, c] = ZERO

        fetch(x, k, b, kv_head, leftpad, end)
        for col_0 in range(leftpad, end, B_c):  # line 6
            put(KV_j, 0, x)
            cuda.syncthreads()  # K_j (and Q_i) complete

            fetch(x, v, b, kv_head, col_0, end)
            for r in range(ROWS):
                for c in range(COLS):
                    S[r, c] = ZERO
            for e in range(START, D, STEP):  # line 8
                for r in range(ROWS):
                    for c in range(COLS):
                        for i in range(STEP):
                            S[r, c] += Q_i[ty + TY * r, e + i] * KV_j[tx + TX * c, e + i]
            for r in range(ROWS):
                row, largest = row_0 + ty + TY * r, MASKED
                for c in range(COLS):
                    col = col_0 + tx + TX * c
                    seen = col < seqlen and (not causal or col <= row + diagonal)
                    S[r, c] = scale * S[r, c] if seen else MASKED
                    largest = max(largest, S[r, c])
                parts[ty + TY * r, tx] = largest
            cuda.syncthreads()  # parts complete, K_j consumed

            put(KV_j, 0, x)
            for r in range(ROWS):  # line 9
                m_new = m_i[r]
                for part in range(TX):
                    m_new = max(m_new, parts[ty + TY * r, part])
                rescale = math.exp(m_i[r] - m_new)
                m_i[r] = m_new
                l_i[r] *= rescale
                for c in range(COLS):
                    P = math.exp(S[r, c] - m_new)
                    l_i[r] += P
                    P_s[ty + TY * r, tx + TX * c] = P
                for c in range(D_COLS):
                    O_i[r, c] *= rescale
            cuda.syncthreads()  # V_j and P complete, parts consumed

            fetch(x, k, b, kv_head, col_0 + B_c, end)
            for j in range(START, COLS_J, STEP):  # line 10
                for r in range(ROWS):
                    for c in range(D_COLS):
                        for i in range(STEP):
                            O_i[r, c] += P_s[ty + TY * r, j + i] * KV_j[j + i, tx + TX * c]
            cuda.syncthreads()  # V_j and P consumed

        for r in range(ROWS):
            parts[ty + TY * r, tx] = l_i[r]
        cuda.syncthreads()  # parts complete
        for r in range(ROWS):  # line 12
            row, l = row_0 + ty + TY * r, ZERO
            for part in range(TX):
                l += parts[ty + TY * r, part]
            for c in range(D_COLS):
                e = tx + TX * c
                if row < q_len and e < q.shape[3]:
                    out[b, row, head, e] = store(O_i[r, c] / l if l != ZERO else ZERO)

    tensor = f"{T.__name__}[:,:,:,:]"
    signature = (
        f"void({tensor}, {tensor}, {tensor}, {tensor}, int32[:], int32[:], float32, boolean)"
    )
    return cuda.jit(signature, fastmath=True, **OPTIONS)(attention), B_r


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
    """softmax(scale q k^T) v by one kernel in Numba. [FA2] arXiv:2307.08691, Algorithm 1.

    Args, returns, raises:
        As :func:`task4.attention.flash_attention`; a ValueError also for tensors on the CPU where there is a GPU.
    """
    batch, heads, _, q_len, kv_len, head_dim = check_attention(q, k, v)
    check_lengths("seqlens_k", seqlens_k, q)
    check_lengths("leftpad_k", leftpad_k, q)
    if not q.is_cuda and not SIMULATED:
        raise ValueError(f"where there is a GPU, Numba runs on cuda tensors; got q {describe(q)}")
    out = torch.empty((batch, q_len, heads, head_dim), dtype=q.dtype, device=q.device)
    if kv_len == 0:
        return out.zero_()
    if out.numel():
        padded = head_dim + -head_dim % TX if SIMULATED else 64 if head_dim <= 64 else 128
        if seqlens_k is None:
            seqlens_k = torch.full((batch,), kv_len, dtype=torch.int32, device=q.device)
        if leftpad_k is None:
            leftpad_k = torch.zeros(batch, dtype=torch.int32, device=q.device)
        scale = 1 / math.sqrt(head_dim) if scale is None else scale
        with torch.cuda.device_of(q):
            kernel, B_r = _kernel(q.dtype, padded)
            launch = [(-(-q_len // B_r), heads, batch), (TX, TY)]
            if not SIMULATED:
                launch.append(cuda.external_stream(torch.cuda.current_stream().cuda_stream))
            with _switching_often():
                kernel[*launch](*map(_array, (q, k, v, out, seqlens_k, leftpad_k)), scale, causal)
    return out


@contextmanager
def _switching_often() -> Iterator[None]:
    """In the simulator a block's threads spend most of their time waiting for their turns in Python."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4 if SIMULATED else before)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _array(t: Tensor) -> Any:
    """The tensor as Numba takes it, in place. It knows no bfloat16: the kernel gets its bits."""
    t = t.detach().view(torch.uint16) if t.dtype == torch.bfloat16 else t.detach()
    return cuda.devicearray.FakeCUDAArray(t.numpy()) if SIMULATED else cuda.as_cuda_array(t)
