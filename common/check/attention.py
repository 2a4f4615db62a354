"""Attention's truth in float64, PyTorch's own result in the dtype of a case, and the results of known mistakes.

Both take ``q (batch, q_len, heads, head_dim)``, ``k, v (batch, kv_len, kv_heads, head_dim)`` and return
``(batch, q_len, heads, head_dim)``. Row i of sequence b sees the keys ``leftpad_k[b] <= j < seqlens_k[b]``, and if
causal ``j <= i + seqlens_k[b] - q_len``. A row that sees no key is 0.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from common.check.poison import hide_
from common.timing import Backend, sdpa


def visible_keys(
    q: Tensor,
    k: Tensor,
    causal: bool = False,
    seqlens_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
) -> Tensor:
    """Bool ``(batch, 1, q_len, kv_len)``: True where a query sees a key."""
    batch, q_len, kv_len = q.shape[0], q.shape[1], k.shape[1]
    end = torch.full((batch,), kv_len, device=q.device) if seqlens_k is None else seqlens_k
    start = torch.zeros_like(end) if leftpad_k is None else leftpad_k
    start, end = start.view(batch, 1, 1), end.view(batch, 1, 1)
    i = torch.arange(q_len, device=q.device).view(1, q_len, 1)
    j = torch.arange(kv_len, device=q.device).view(1, 1, kv_len)
    seen = (j >= start) & (j < end)
    if causal:
        seen = seen & (j <= i + end - q_len)
    return seen.unsqueeze(1).expand(batch, 1, q_len, kv_len)


def attention_float64(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, **visible: Any
) -> Tensor:
    """softmax(scale q k^T) v in float64, by the definition. ``visible``: :func:`visible_keys`'s arguments."""
    seen = visible_keys(q, k, **visible)
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    p = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    return (p @ v).transpose(1, 2)


def attention_pytorch(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, **visible: Any
) -> Tensor:
    """The same by ``scaled_dot_product_attention``, in q's dtype."""
    seen = visible_keys(q, k, **visible)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=seen, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.nan_to_num(0.0).transpose(1, 2)


def attention_fused_float32(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, **visible: Any
) -> Tensor:
    """The same by PyTorch's fused float32 kernel. For any lengths it needs a mask with aligned rows.

    Raises:
        RuntimeError: it does not run here.
    """
    group, kv_len = q.shape[2] // k.shape[2], k.shape[1]
    seen = pad(visible_keys(q, k, **visible), (0, -kv_len % 8))
    mask = torch.zeros(seen.shape, device=q.device).masked_fill_(~seen, -torch.inf)[..., :kv_len]
    mask = mask.expand(-1, q.shape[2], -1, -1)
    k, v = (t.repeat_interleave(group, 2) for t in (k, v))
    out = sdpa(q, k, v, backend=Backend.EFFICIENT, mask=mask, scale=scale)
    return out.masked_fill(~seen.any(-1).transpose(1, 2)[..., None], 0.0)


def hide_invisible(
    k: Tensor,
    v: Tensor,
    *,
    seqlens_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    **_: Any,
) -> None:
    """Put NaN where no query may look: a kernel that reads it gives NaN, even if it multiplies it by 0."""
    j = torch.arange(k.shape[1], device=k.device)
    for lengths, hidden in ((seqlens_k, torch.ge), (leftpad_k, torch.lt)):
        if lengths is not None:
            outside = hidden(j, lengths[:, None])[:, :, None, None]  # (batch, kv_len, 1, 1)
            hide_(k, outside)
            hide_(v, outside)


def mistakes(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, **visible: Any
) -> dict[str, Callable[[], Tensor]]:
    """What attention gives with a well-known mistake, by its name: suspects for ``assert_close``."""

    def by(**changes: Any) -> Callable[[], Tensor]:
        return lambda: attention_float64(q, k, v, **({"scale": scale} | visible | changes))

    found = {"the scores are not scaled": by(scale=1.0)}
    lengths = [name for name in ("seqlens_k", "leftpad_k") if visible.get(name) is not None]
    if lengths:
        found["the lengths are ignored"] = by(**dict.fromkeys(lengths))
    if visible.get("causal"):
        found["the causal mask is ignored"] = by(causal=False)
        if q.shape[1] < k.shape[1] and not lengths:
            top = torch.full((q.shape[0],), q.shape[1], dtype=torch.int32, device=q.device)
            name = "the causal mask begins at the first key; it should end at the last"
            found[name] = by(seqlens_k=top)
    return found
