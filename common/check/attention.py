"""Attention's truth in float64, PyTorch's own result in the dtype of a case, and the results of known mistakes.

Both take ``q (batch, q_len, heads, head_dim)``, ``k, v (batch, kv_len, kv_heads, head_dim)`` and return
``(batch, q_len, heads, head_dim)``. Row i of sequence b sees the keys ``leftpad_k[b] <= j < seqlens_k[b]``, and if
causal ``j <= i + seqlens_k[b] - q_len``. A row that sees no key is 0.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from common.check.poison import hide_
from common.timing import Backend, sdpa

LN_2 = math.log(2)
NOT_ZERO = "a {} is not set to 0: its maximum is -inf, and -inf - -inf or 0 / 0 is NaN"
ORDERS = 8
FLOAT16_OVERFLOWS = 65520.0  # from here on a float16 is infinite


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
    scores, v = _scores_float64(q, k, v, scale)
    p = scores.masked_fill(~visible_keys(q, k, **visible), -torch.inf).softmax(-1).nan_to_num(0.0)
    return (p @ v).transpose(1, 2)


def _scores_float64(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, by_remainder: bool = False
) -> tuple[Tensor, Tensor]:
    """All scores ``(batch, heads, q_len, kv_len)``, and v ``(batch, heads, kv_len, head_dim)`` for each head of q."""
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    heads, kv_heads = q.shape[1], k.shape[1]
    group = heads // kv_heads
    of_head = torch.arange(heads, device=q.device)
    of_head = of_head % kv_heads if by_remainder else of_head // group
    k, v = k[:, of_head], v[:, of_head]
    return q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale), v


def online_softmax_float64(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    B_c: int,
    *,
    power_O: int = 1,
    power_l: int = 1,
    divide: bool = True,
    scale: float | None = None,
    **visible: Any,
) -> Tensor:
    """The same over tiles of B_c keys, [FA2] Algorithm 1, with the mistakes that people make in it.

    Args:
        q, k, v, scale, visible: see :func:`attention_float64`.
        B_c: keys in a tile.
        power_O, power_l: O_i and l_i are multiplied by this power of exp(m_old - m_new): right is 1.
        divide: by l_i at the end.
    """
    S, V = _scores_float64(q, k, v, scale)
    S = S.masked_fill(~visible_keys(q, k, **visible), -torch.inf)
    O, l = torch.zeros_like(q.transpose(1, 2), dtype=torch.float64), torch.zeros_like(S[..., :1])
    m = torch.full_like(l, -torch.inf)
    for j in range(0, S.shape[-1], B_c):
        S_j = S[..., j : j + B_c]
        new = torch.maximum(m, S_j.amax(dim=-1, keepdim=True))
        shift = new.masked_fill(new == -torch.inf, 0)
        P, rescale = torch.exp(S_j - shift), torch.exp(m - shift)
        first = m == -torch.inf
        l = torch.where(first, 0, rescale**power_l * l) + P.sum(dim=-1, keepdim=True)
        O = torch.where(first, 0, rescale**power_O * O) + P @ V[:, :, j : j + B_c]
        m = new
    return (O / l.masked_fill(l == 0, 1) if divide else O).transpose(1, 2)


def online_softmax_mistakes(
    q: Tensor, k: Tensor, v: Tensor, B_c: int, **options: Any
) -> dict[str, Callable[[], Tensor]]:
    """What attention in tiles of B_c keys gives with a well-known mistake: suspects for ``assert_close``."""

    def by(**mistake: Any) -> Callable[[], Tensor]:
        return lambda: online_softmax_float64(q, k, v, B_c, **options, **mistake)

    return {
        "line 10 as printed: O_i is divided by exp(m' - m) instead of multiplied": by(power_O=-1),
        "O_i is not rescaled when the maximum grows (line 10)": by(power_O=0),
        "l_i is not rescaled when the maximum grows (line 9)": by(power_l=0),
        "neither l_i nor O_i is rescaled when the maximum grows (lines 9 and 10)": by(
            power_l=0, power_O=0
        ),
        "the division by l_i at the end (line 12) is missing": by(divide=False),
    }


def attention_pytorch(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, **visible: Any
) -> Tensor:
    """The same by ``scaled_dot_product_attention``, in q's dtype."""
    seen = visible_keys(q, k, **visible)
    # Copies: on a GPU some of its kernels fail for rows at odd addresses.
    q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=seen, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.nan_to_num(0.0).transpose(1, 2)


def least_accurate(
    attend: Callable[..., Tensor], truth: Tensor, q: Tensor, k: Tensor, v: Tensor, **options: Any
) -> Tensor:
    """The least accurate of ORDERS results, in which the sums behind the scores are taken in different orders.

    Where scores are in the hundreds, the error of a small case is that of the one row whose two largest scores are
    nearly equal: whether one order gets that row right is luck.

    Args:
        attend: one of PyTorch's, from this module.
        truth: the same in float64.
        q, k, v: see the module.
        options: arguments of ``attend``.
    """
    rng = torch.Generator().manual_seed(0)
    orders = [torch.randperm(q.shape[3], generator=rng).to(q.device) for _ in range(ORDERS)]
    found = [attend(q[..., order], k[..., order], v, **options) for order in orders]
    return max(found, key=lambda got: (got - truth).abs().max().item())


def references(
    q: Tensor, k: Tensor, v: Tensor, *, large_scores: bool = False, **options: Any
) -> tuple[Tensor, Tensor]:
    """The truth, and PyTorch's own; with ``large_scores`` in float32 the least accurate of several."""
    truth = attention_float64(q, k, v, **options)
    if large_scores and q.dtype == torch.float32:
        return truth, least_accurate(attention_pytorch, truth, q, k, v, **options)
    return truth, attention_pytorch(q, k, v, **options)


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
    usual = q.shape[-1] ** -0.5 if scale is None else scale

    def by(**changes: Any) -> Callable[[], Tensor]:
        return lambda: attention_float64(q, k, v, **({"scale": scale} | visible | changes))

    def not_zero() -> Tensor:
        seen = visible_keys(q, k, **visible).any(-1).transpose(1, 2)[..., None]
        return attention_float64(q, k, v, scale=scale, **visible).masked_fill(~seen, torch.nan)

    def mask_after_softmax() -> Tensor:
        scores, values = _scores_float64(q, k, v, scale)
        p = scores.softmax(-1).masked_fill(~visible_keys(q, k, **visible), 0.0)
        return (p @ values).transpose(1, 2)

    def heads_by_remainder() -> Tensor:
        scores, values = _scores_float64(q, k, v, scale, by_remainder=True)
        p = scores.masked_fill(~visible_keys(q, k, **visible), -torch.inf).softmax(-1)
        return (p.nan_to_num(0.0) @ values).transpose(1, 2)

    def overflowing() -> Tensor:
        raw, values = _scores_float64(q, k, v, 1.0)
        raw = raw.where(raw.abs() < FLOAT16_OVERFLOWS, raw.sign() * torch.inf)
        seen = visible_keys(q, k, **visible)
        p = (usual * raw).masked_fill(~seen, -torch.inf).softmax(-1)
        return (p.masked_fill(~seen.any(-1, keepdim=True), 0.0) @ values).transpose(1, 2)

    def diagonal(shift: int) -> Callable[[], Tensor]:
        def shifted() -> Tensor:
            scores, values = _scores_float64(q, k, v, scale)
            others = {name: value for name, value in visible.items() if name != "causal"}
            i = torch.arange(q.shape[1], device=q.device).view(1, 1, -1, 1)
            j = torch.arange(k.shape[1], device=q.device)
            end = others.get("seqlens_k")
            end = k.shape[1] if end is None else end.view(-1, 1, 1, 1)
            seen = visible_keys(q, k, **others) & (j <= i + end - q.shape[1] + shift)
            p = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
            return (p @ values).transpose(1, 2)

        return shifted

    found = {NOT_ZERO.format("query that sees no key"): not_zero}
    found["the scores are not scaled"] = by(scale=1.0)
    if scale is not None:
        found["scale is ignored: the scores are divided by sqrt(head_dim)"] = by(scale=None)
    found["exp2 is taken of scores that were not multiplied by log2(e)"] = by(scale=usual * LN_2)
    found["exp is taken of scores that were multiplied by log2(e), as for exp2"] = by(
        scale=usual / LN_2
    )
    if q.dtype == torch.float16:
        found["q k^T is kept in float16, and overflows"] = overflowing
    if k.shape[2] not in (1, q.shape[2]):
        found["query heads take kv head h % kv_heads; it should be h / (heads / kv_heads)"] = (
            heads_by_remainder
        )
    lengths = [name for name in ("seqlens_k", "leftpad_k") if visible.get(name) is not None]
    if lengths or visible.get("causal"):
        found["the mask is applied after the softmax"] = mask_after_softmax
    if lengths:
        found["the lengths are ignored"] = by(**dict.fromkeys(lengths))
    if visible.get("causal"):
        found["the causal mask is ignored"] = by(causal=False)
        found["the causal mask is off by one: a query sees the key after its own"] = diagonal(1)
        found["the causal mask is off by one: a query does not see its own key"] = diagonal(-1)
        if q.shape[1] < k.shape[1] and not lengths:
            top = torch.full((q.shape[0],), q.shape[1], dtype=torch.int32, device=q.device)
            name = "the causal mask begins at the first key; it should end at the last"
            found[name] = by(seqlens_k=top)
    return found


def equal_splits(
    q: Tensor, k: Tensor, v: Tensor, num_splits: int, **options: Any
) -> Callable[[], Tensor]:
    """What comes out if splits of the keys are merged by their mean, and not by their sums of exponentials."""

    def merged() -> Tensor:
        size = -(-k.shape[1] // num_splits)
        parts = [
            attention_float64(q, k[:, j : j + size], v[:, j : j + size], **options)
            for j in range(0, k.shape[1], size)
        ]
        return torch.stack(parts).mean(0)

    return merged
