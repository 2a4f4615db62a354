"""GPT-2's attention through our kernels, by Hugging Face's own attention interface.

transformers lets a model be loaded with ``attn_implementation="<name>"``, where two functions are
registered under the name:

    course_mask        once a forward: which keys each sequence may see, as [start, end)
    course_attention   once a layer: the attention itself

``model.generate`` then does the rest (tokens, caches, sampling) and calls our prefill kernel (task 4)
when there are several queries and our decode kernel (task 5) when there is one. Importing this module
registers both.

A mask is usually a (batch, 1, q_len, kv_len) tensor. For left-to-right text two numbers a sequence say
the same: the first key that is no padding, and the length up to now. That is all that our kernels
need, also for a static cache, whose tail is not filled yet.
"""

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from common.inputs import describe
from task4.prefill import fast_attention
from task5.attention import flash_attention_decode

NAME = "course_attention"  # transformers treats a name with "flash" in it as one of its own

kernel_calls: Counter[str] = Counter()
"""How often each kernel was called in this process: ``prefill`` (task 4) and ``decode`` (task 5)."""

# Arguments by which some models ask for an attention that differs from the plain one.
_UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")


def course_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor:
    """The keys that each sequence may see, int32 (batch, 1, 1, 2): ``[start, end)``.

    Called by transformers, see its ``sdpa_mask``. ``attention_mask`` is (batch, keys), true where
    there is a token. Four dimensions, because transformers passes such a mask on as it is.

    Raises:
        ValueError: a pattern that [start, end) cannot express: padding on the right or in between,
            packed sequences, sliding windows, attention that is not causal. The mask is read for
            this check, so on a GPU only that of the prefill is (reading waits for the GPU).
    """
    if mask_function is not causal_mask_function or kv_offset != 0:
        raise ValueError(
            f"{NAME} knows plain causal attention with padding on the left; this model or call asks "
            "for another pattern (a sliding window, packed sequences, attention in both directions)"
        )
    # q_offset is an int or, with a static cache, a tensor on the device
    ends = torch.as_tensor(q_offset + q_length, dtype=torch.int32, device=device).expand(batch_size)
    if attention_mask is None:
        starts = torch.zeros_like(ends)
    else:
        if attention_mask.dim() != 2 or len(attention_mask) != batch_size:
            raise ValueError(
                f"attention_mask must be ({batch_size}, keys), true where there is a token; "
                f"got {describe(attention_mask)}"
            )
        is_token = attention_mask.to(device=device, dtype=torch.bool)
        # tokens before or at each key; where it is 0, the key is padding on the left
        seen = is_token.cumsum(-1)
        key = torch.arange(is_token.shape[1], device=device)
        inside = key < ends[:, None]
        starts = ((seen == 0) & inside).sum(-1, dtype=torch.int32)
        if q_length > 1 or is_token.device.type == "cpu":
            hole = ~is_token & (seen > 0) & inside
            if hole.any() or (ends > is_token.shape[1]).any():
                raise ValueError(
                    f"{NAME} needs padding on the left: in attention_mask {describe(attention_mask)} "
                    f"something is masked after the first token (tokenizer.padding_side = 'left')"
                )
    # (2, batch) in memory, so that start and end of all sequences are contiguous
    return torch.stack((starts, ends)).T[:, None, None, :]


@torch.compiler.disable  # a launch through ctypes cannot be traced; the graph is split here instead
def course_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, called by transformers.

    Args:
        module: the layer; its ``is_causal`` counts where the argument of this name is None.
        query: (batch, heads, q_len, head_dim).
        key, value: (batch, kv_heads, kv_len, head_dim), the cache with the new keys and values in it;
            kv_heads divides heads.
        attention_mask: from ``course_mask``; or None, which means what it means for PyTorch's SDPA:
            all keys for one query, otherwise query i sees the keys 0..i if causal.
        scaling: factor of the scores; 1/sqrt(head_dim) if None.

    Returns:
        (batch, q_len, heads, head_dim) contiguous, zeros for a query that sees no key; and None in
        place of the attention weights, which are never stored.

    Raises:
        ValueError: dropout or gradients, a mask that is not from ``course_mask``, or a kind of
            attention that our kernels do not have.
    """
    if dropout != 0.0:
        raise ValueError(f"our kernels have no dropout, got {dropout}; call model.eval()")
    if torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad
    ):
        raise ValueError("our kernels have no backward pass; run the model under torch.no_grad()")
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ValueError(f"our kernels have no {name}; got {kwargs[name]!r}")

    # (batch, heads, n, d) -> (batch, n, heads, d): views with other strides, nothing is moved
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    batch, q_len = q.shape[:2]
    start = end = None
    causal = q_len > 1
    if attention_mask is not None:
        start, end = _bounds(attention_mask, batch)
    elif causal:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        if causal and q_len > k.shape[1]:
            raise ValueError(f"{q_len} causal queries but only {k.shape[1]} keys, and no mask")
        if causal:  # query i sees keys 0..i, and what is behind them in a static cache is not read
            k, v = k[:, :q_len], v[:, :q_len]

    if q_len == 1:
        kernel_calls["decode"] += 1
        out = flash_attention_decode(q, k, v, scale=scaling, seqlens_k=end, leftpad_k=start)
    else:
        kernel_calls["prefill"] += 1
        out = fast_attention(q, k, v, causal=causal, scale=scaling, seqlens_k=end, leftpad_k=start)
    return out, None


def _bounds(mask: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """start and end, int32 (batch,), from what ``course_mask`` returned."""
    if mask.dtype != torch.int32 or mask.shape != (batch, 1, 1, 2):
        raise ValueError(
            f"{NAME} takes attention_mask as (batch, keys) with padding on the left; a mask with an "
            f"entry for each query and key is not supported, got {describe(mask)}"
        )
    return mask[:, 0, 0, 0].contiguous(), mask[:, 0, 0, 1].contiguous()


AttentionInterface.register(NAME, course_attention)
AttentionMaskInterface.register(NAME, course_mask)
