"""FlashAttention-2 in C++ for the CPU, ``host.cpp``, and attention in three steps beside it, ``naive.cpp``."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from common.build import Kernels, dtype_code
from common.inputs import KERNEL_DTYPES, check_attention, check_lengths, describe

MAX_HEAD_DIM = 256

_host = Kernels(__file__, "host.cpp")
_naive = Kernels(__file__, "naive.cpp")


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
    """softmax(scale q k^T) v in tiles that stay in a core's first cache. [FA2] arXiv:2307.08691, Algorithm 1.

    As many threads as ``torch.get_num_threads()`` take queries of different heads.

    Args, returns, raises:
        As :func:`task4.attention.flash_attention`, with tensors on the CPU and head_dim up to 256.
    """
    batch, heads, _, q_len, _, head_dim = _checked(q, k, v)
    check_lengths("seqlens_k", seqlens_k, q)
    check_lengths("leftpad_k", leftpad_k, q)
    out = torch.empty((batch, q_len, heads, head_dim), dtype=q.dtype)
    if out.numel():
        _host.query(
            "flash_attention", q.device, q=q, k=k, v=v, out=out, seqlens_k=seqlens_k, leftpad_k=leftpad_k,
            scale=1 / math.sqrt(head_dim) if scale is None else scale, causal=causal, dtype=dtype_code(q.dtype),
            threads=torch.get_num_threads(),
        )  # fmt: skip
    return out


def naive_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None
) -> Tensor:
    """The same in three steps by one thread, with all scores in memory: what the fused one is compared with.

    Raises:
        ValueError: arguments that do not fit, or that are not float32.
    """
    batch, heads, _, q_len, kv_len, head_dim = _checked(q, k, v, (torch.float32,))
    out = torch.empty((batch, q_len, heads, head_dim))
    if out.numel():
        _naive.query(
            "naive_attention", q.device, q=q, k=k, v=v, out=out, scores_of=torch.empty(batch, heads, q_len, kv_len),
            scale=1 / math.sqrt(head_dim) if scale is None else scale, causal=causal,
        )  # fmt: skip
    return out


def _checked(
    q: Tensor, k: Tensor, v: Tensor, dtypes: Sequence[torch.dtype] = KERNEL_DTYPES
) -> tuple[int, int, int, int, int, int]:
    if q.device.type != "cpu":
        raise ValueError(f"this attention runs on the CPU alone; got q {describe(q)}")
    return check_attention(q, k, v, dtypes, MAX_HEAD_DIM)
