"""What comes before attention in a decode step: rotary positions, and the cache's new rows, in one launch."""

import torch
from torch import Tensor

from common.build import Kernels, dtype_code
from common.inputs import (
    KERNEL_DTYPES,
    check_contiguous_rows,
    check_device,
    check_written,
    describe,
    expect,
)
from task5.ladder.checks import expect_loadable
from task5.ladder.gpu import is_hopper

HEAD_DIMS = (16, 256)  # from, to; multiples of 16
_KERNELS = Kernels(__file__, "append.cu")
_DEPENDENT = Kernels(__file__, "append_dependent.cu")  # of GPUs, for Hopper


def append_rope(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    seqlens_k: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    block_table: Tensor | None = None,
    dependent: bool | None = None,
) -> None:
    """Rotate q and k by their positions, and write k and v to the cache: the step before ``decode_attention``.

    [RoFormer] arXiv:2104.09864, equation 34, with task 6's pairs, ``x[e]`` and ``x[e + head_dim / 2]``. It is computed
    in float32 and rounded once.

    q is rotated in place: a decode step needs it only once, so nothing is allocated. k and v stay as they are. All
    three may be slices of one projection. Nothing is read on the host: a CUDA graph that captured a call stays right
    while sequences grow.

    Args:
        q: ``(batch, q_len, heads, head_dim)``, float32, float16 or bfloat16, head_dim a multiple of 16 up to 256.
        k, v: ``(batch, q_len, kv_heads, head_dim)``, the new tokens' keys and values.
        k_cache, v_cache: ``(batch, max_seq, kv_heads, head_dim)``; with ``block_table`` the pages of all sequences,
            ``(pages, page_size, kv_heads, head_dim)``.
        seqlens_k: int32 ``(batch,)`` on q's device, keys of each sequence, the new tokens' included: token i stands at
            position ``seqlens_k[b] - q_len + i``.
        cos, sin: float32 ``(positions, head_dim / 2)``, contiguous: those of :class:`task6.rope.RoPE`. None: nothing is
            rotated, q stays as it is.
        block_table: int32 ``(batch, max_pages)``, contiguous: position p is row ``p % page_size`` of page
            ``block_table[b, p // page_size]``. Two tokens must not have the same page and row.
        dependent: begin while the launch ahead ends, and let the next one do so; of GPUs on Hopper alone, and there if
            None.

    Lengths and pages cannot be checked before the launch. A key and a value whose position is outside of the cache, or
    whose page is outside of the pool, are not written. For a token at a negative position, or at one past cos and sin,
    nothing is done: its query stays as it is, its key and value are not written.

    Raises:
        ValueError: arguments that do not fit, named; nothing is then written.
    """
    _check(q, k, v, k_cache, v_cache, seqlens_k, cos, sin, block_table)
    hopper = is_hopper(q.device)
    if dependent and q.is_cuda and not hopper:
        raise ValueError(
            f"of GPUs, dependent=True runs on Hopper alone; the tensors are on {q.device}"
        )
    if (q.numel() or k.numel()) and (cos is None or cos.numel()):
        kernels = _DEPENDENT if dependent or (hopper and dependent is None) else _KERNELS
        kernels.launch(
            "append", q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache, seqlens_k=seqlens_k, block_table=block_table,
            max_pages=0 if block_table is None else block_table.shape[1], cos=cos, sin=sin,
            positions=0 if cos is None else cos.shape[0], dtype=dtype_code(q.dtype),
        )  # fmt: skip


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seqlens_k: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    block_table: Tensor | None,
) -> None:
    expect("q", q, shape=("batch", "q_len", "heads", "head_dim"), dtype=KERNEL_DTYPES)
    check_device(q)
    batch, q_len, heads, head_dim = q.shape
    least, most = HEAD_DIMS
    if head_dim % least or not least <= head_dim <= most:
        raise ValueError(f"head_dim must be a multiple of {least} up to {most}; got {head_dim}")
    like_q = {"dtype": q.dtype, "device": q.device}
    expect("k", k, shape=(batch, q_len, "kv_heads", head_dim), **like_q)
    expect("v", v, shape=k.shape, **like_q)
    kv_heads = k.shape[2]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"kv heads must divide the query heads; got {heads} and {kv_heads}")
    expect("seqlens_k", seqlens_k, shape=(batch,), dtype=torch.int32, device=q.device)
    check_contiguous_rows("seqlens_k", seqlens_k)
    rows = (batch, "max_seq") if block_table is None else ("pages", "page_size")
    expect("k_cache", k_cache, shape=(*rows, kv_heads, head_dim), **like_q)
    expect("v_cache", v_cache, shape=k_cache.shape, **like_q)
    if not k_cache.shape[1]:
        raise ValueError(f"k_cache must have room for a key; got {describe(k_cache)}")
    if block_table is not None:
        expect("block_table", block_table, shape=(batch, "max_pages"), dtype=torch.int32, device=q.device)  # fmt: skip
    if (cos is None) != (sin is None):
        raise ValueError("cos and sin must be given both, or neither")
    for name, table in (("cos", cos), ("sin", sin)):
        if table is not None:
            positions = "positions" if name == "cos" else cos.shape[0]
            expect(name, table, shape=(positions, head_dim // 2), dtype=torch.float32, device=q.device)  # fmt: skip
    for name, tensor in (("block_table", block_table), ("cos", cos), ("sin", sin)):
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous; got strides {tensor.stride()}")
    expect_loadable(q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache, cos=cos, sin=sin)
    check_written(q=q, k_cache=k_cache, v_cache=v_cache)
    _check_apart(q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v)


def _check_apart(**tensors: Tensor) -> None:
    """ValueError where two of these are the same memory, of which the first three are written."""
    names: dict[int, str] = {}
    for name, tensor in tensors.items():
        if not tensor.numel():
            continue
        same = names.setdefault(tensor.data_ptr(), name)
        if same != name and {same, name} != {"k", "v"}:
            raise ValueError(f"{name} must not be the memory of {same}, which is written in place")
