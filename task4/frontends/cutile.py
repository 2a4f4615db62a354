"""FlashAttention-2 in cuTile, NVIDIA's Python for tiles. See https://docs.nvidia.com/cuda/cutile-python.

    grid  (ceil(q_len / B_r), heads, batch)     one block for each Q_i, a tile of B_r queries of one head

A kernel loads, multiplies and stores whole tiles. The compiler, tileiras, decides what a thread does, what is in shared
memory and how it gets there: on Hopper, 16-bit tiles by the tensor memory accelerator, for the tensor cores. The sides
of a tile are powers of two. What is outside of an array is loaded as 0, and not stored.
"""

import functools
import math
import types

import cuda.tile as ct
import torch
from cuda.tile.tune import exhaustive_search
from torch import Tensor

from common.inputs import check_attention, check_lengths, describe

LOG2_E = math.log2(math.e)
ZERO = ct.PaddingMode.ZERO
SHORT = 512  # queries, up to which the first tile is taken; beyond, the fastest one is found by measuring
# (B_r, B_c, warps that compute) by the bytes of an element.
TILES = {
    2: ((64, 64, 4), (64, 128, 4), (128, 64, 8), (128, 128, 8)),
    4: ((32, 16, 8), (32, 32, 8), (64, 16, 8), (64, 32, 8)),  # larger ones spill more registers
}
Tile = tuple[int, int, int]
Int = ct.Constant[int]
Bool = ct.Constant[bool]


def _attention(
    q, k, v, out, seqlens_k, leftpad_k, scale_log2_e, GROUP: Int, HEAD_DIM: Int, B_r: Int, B_c: Int,
    CAUSAL: Bool, SEQLENS: Bool, LEFTPAD: Bool,
):  # fmt: skip
    i = ct.num_blocks(0) - 1 - ct.bid(0)  # causal: the longest rows start first
    head, b = ct.bid(1), ct.bid(2)
    first, end = 0, k.shape[1]
    if SEQLENS:
        end = ct.maximum(ct.minimum(ct.gather(seqlens_k, b), end), 0)
    if LEFTPAD:
        first = ct.minimum(ct.maximum(ct.gather(leftpad_k, b), 0), end)
    if SEQLENS or LEFTPAD:  # tiles of K and V begin after the padding, and 0 is loaded past the end
        k, v = k.slice(1, first, end), v.slice(1, first, end)
    keys = end - first
    diagonal = keys - q.shape[1]

    Q_i = ct.load(q, (b, i, head, 0), (1, B_r, 1, HEAD_DIM), padding_mode=ZERO)
    Q_i = Q_i.reshape((B_r, HEAD_DIM))
    O_i = ct.zeros((B_r, HEAD_DIM), ct.float32)
    m_i = ct.full((B_r, 1), -math.inf, ct.float32)
    l_i = ct.zeros((B_r, 1), ct.float32)
    row = i * B_r + ct.arange(B_r, dtype=ct.int32)[:, None]
    end = ct.maximum(ct.minimum(keys, (i + 1) * B_r + diagonal), 0) if CAUSAL else keys
    for j in range(ct.cdiv(end, B_c)):  # line 6
        K_j = ct.load(k, (b, j, head // GROUP, 0), (1, B_c, 1, HEAD_DIM), padding_mode=ZERO)
        S = ct.mma(  # line 8
            Q_i, K_j.reshape((B_c, HEAD_DIM)).transpose(), ct.zeros((B_r, B_c), ct.float32)
        )
        col = j * B_c + ct.arange(B_c, dtype=ct.int32)[None, :]
        seen = col < keys
        if CAUSAL:
            seen = seen & (col <= row + diagonal)
        S = ct.where(seen, S * scale_log2_e, -math.inf)
        m_new = ct.maximum(m_i, ct.max(S, 1, keepdims=True))  # line 9
        shift = ct.where(m_new == -math.inf, 0.0, m_new)  # no key so far: -inf - -inf would be NaN
        P = ct.exp2(S - shift)
        rescale = ct.exp2(m_i - shift)
        l_i = l_i * rescale + ct.sum(P, 1, keepdims=True)
        m_i = m_new
        V_j = ct.load(v, (b, j, head // GROUP, 0), (1, B_c, 1, HEAD_DIM), padding_mode=ZERO)
        O_i = ct.mma(P.astype(v.dtype), V_j.reshape((B_c, HEAD_DIM)), O_i * rescale)  # line 10
    O_i = ct.where(l_i == 0.0, 0.0, O_i / l_i)  # line 12
    ct.store(out, (b, i, head, 0), O_i.astype(out.dtype).reshape((1, B_r, 1, HEAD_DIM)))


# The same for arrays of more than 2^31 elements. Their tiles are not loaded by the accelerator.
_attention_64 = types.FunctionType(_attention.__code__, globals(), "_attention_64")
_attention_64.__annotations__ = _attention.__annotations__ | dict.fromkeys(
    ("q", "k", "v", "out", "seqlens_k", "leftpad_k"), ct.IndexedWithInt64
)
_kernel, _kernel_64 = ct.kernel(_attention), ct.kernel(_attention_64)

_fastest: dict[tuple[object, ...], Tile] = {}


@functools.cache
def _with_warps(kernel: ct.kernel, warps: int) -> ct.kernel:
    return kernel.replace_hints(num_worker_warps=warps)


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
    """softmax(scale q k^T) v in cuTile. [FA2] arXiv:2307.08691, Algorithm 1.

    Args, returns, raises:
        As :func:`task4.attention.flash_attention`, with tensors on a GPU.
    """
    batch, heads, kv_heads, q_len, kv_len, head_dim = check_attention(q, k, v)
    if not q.is_cuda:
        raise ValueError(f"this attention runs on a GPU alone; got q {describe(q)}")
    check_lengths("seqlens_k", seqlens_k, q)
    check_lengths("leftpad_k", leftpad_k, q)
    out = torch.empty((batch, q_len, heads, head_dim), dtype=q.dtype, device=q.device)
    if kv_len == 0:
        return out.zero_()
    if not out.numel():
        return out
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    HEAD_DIM = max(16, 1 << (head_dim - 1).bit_length())
    lengths = seqlens_k, leftpad_k
    given = [t is not None for t in lengths]

    def grid(tile: Tile) -> tuple[int, int, int]:
        return -(-q_len // tile[0]), heads, batch

    def arguments(tile: Tile) -> tuple[object, ...]:
        # Where there are no lengths, any array stands in for them; it is not read.
        arrays = q, k, v, out, *(out if t is None else t for t in lengths)
        return *arrays, scale * LOG2_E, heads // kv_heads, HEAD_DIM, *tile[:2], causal, *given

    large = max(map(_extent, (q, k, v, out))) >= 1 << 31
    kernel = _kernel_64 if large else _kernel
    tiles = TILES[q.element_size()]
    with torch.cuda.device(q.device):
        stream = torch.cuda.current_stream()
        key = (q.device, q.dtype, HEAD_DIM, causal, large)
        if q_len > SHORT and key not in _fastest:
            found = exhaustive_search(
                tiles, stream, grid, lambda tile: _with_warps(kernel, tile[2]), arguments, quiet=True
            )  # fmt: skip
            _fastest[key] = found.best.config
        tile = tiles[0] if q_len <= SHORT else _fastest[key]
        ct.launch(stream, grid(tile), _with_warps(kernel, tile[2]), arguments(tile))
    return out


def _extent(t: Tensor) -> int:
    """Elements from the first one of a tensor to its last."""
    return sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True)) + 1
