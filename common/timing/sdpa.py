"""PyTorch's attention by a named backend, the baseline of every benchmark."""

from enum import StrEnum

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


class Backend(StrEnum):
    """The backends of ``scaled_dot_product_attention``; the value is the name in tables and records."""

    MATH = "SDPA math"
    EFFICIENT = "SDPA memory-efficient"
    FLASH = "SDPA flash"
    CUDNN = "SDPA cuDNN"


_SELECT = {
    Backend.MATH: SDPBackend.MATH,
    Backend.EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
    Backend.FLASH: SDPBackend.FLASH_ATTENTION,
    Backend.CUDNN: SDPBackend.CUDNN_ATTENTION,
}


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    backend: Backend,
    causal: bool = False,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """softmax(scale q k^T) v by this backend and no other.

    Args:
        q: ``(batch, q_len, heads, head_dim)``.
        k, v: ``(batch, kv_len, heads, head_dim)``.
        backend: the one that runs.
        causal: query i sees the keys up to i. PyTorch aligns that to the first key, the course's kernels align it to
            the last one, so the lengths have to be equal.
        mask: bool or added to the scores, ``(batch, heads, q_len, kv_len)`` or a shape that expands to it.
        scale: of the scores; ``1 / sqrt(head_dim)`` if None.

    Returns:
        ``(batch, q_len, heads, head_dim)``, a view.

    Raises:
        ValueError: causal with different numbers of queries and keys.
        RuntimeError: this backend does not take these tensors here.
    """
    if causal and q.shape[1] != k.shape[1]:
        raise ValueError(
            f"causal needs as many queries as keys; got {q.shape[1]} queries and {k.shape[1]} keys"
        )
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    with sdpa_kernel(_SELECT[backend]):
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
    return out.transpose(1, 2)
