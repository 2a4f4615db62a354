"""GPT-2's attention through our kernels, by Hugging Face's own attention interface.

transformers loads a model with ``attn_implementation="<name>"`` if two functions are registered under that name:

    course_mask        once per forward pass: the keys that each sequence may see, as [start, end)
    course_attention   once per layer: the attention itself

``model.generate`` does the rest (tokens, caches, sampling). With several queries it calls our prefill kernel (task 4),
with one our decode kernel (task 5). Importing this module registers both functions.

A mask is usually a (batch, 1, q_len, kv_len) tensor. For left-to-right text two numbers per sequence say the same: the
first key that is not padding, and the current length. Our kernels need no more, not even for a static cache, whose tail
is not filled yet. Where nothing is hidden there is no mask: that is most texts, and the shortest way through Python.
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
from task7 import known_calls

NAME = "course_attention"  # transformers takes a name with "flash" in it for one of its own

kernel_calls: Counter[str] = Counter()
"""How often each kernel was called in this process: ``prefill`` (task 4) and ``decode`` (task 5)."""

# Arguments by which some models ask for other attention than softmax(scale q k^T) v.
_UNSUPPORTED = {"sliding_window", "softcap", "s_aux", "position_bias"}


def course_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    allow_is_causal_skip: bool = True,
    **_: Any,
) -> Tensor | None:
    """The keys that each sequence may see, int32 (2, batch, 1, 1): ``start`` and ``end`` of ``[start, end)``.

    Called by transformers, see its ``sdpa_mask``. ``attention_mask`` is (batch, keys), true where there is a token. The
    result has four dimensions because transformers passes such a mask on unchanged.

    Returns:
        The bounds; None where ``course_attention`` needs none: every key is a token, and the queries are the last one
        or all of them. As for ``sdpa_mask``, ``allow_is_causal_skip=False`` rules None out.

    Raises:
        ValueError: a pattern that [start, end) cannot express: padding on the right or in between, packed sequences,
            sliding windows, attention that is not causal. This check reads the whole mask and waits for a GPU, so on a
            GPU only the mask of the prefill is checked.
    """
    if mask_function is not causal_mask_function or kv_offset != 0:
        raise ValueError(
            f"{NAME} does causal attention with padding on the left; this model or call asks for "
            "another pattern (a sliding window, packed sequences, attention in both directions)"
        )
    # q_offset is an int or, with a static cache, a tensor on the device
    end = q_offset + q_length
    last_or_all = isinstance(end, int) and end == kv_length and (q_length == 1 or q_offset == 0)
    if allow_is_causal_skip and last_or_all and _all_tokens(attention_mask, batch_size, kv_length):
        return None
    if isinstance(end, int):
        end = torch.full((1,), end, device=device)  # torch.tensor(end) would wait for a GPU
    ends = end.to(torch.int32).expand(batch_size)
    if attention_mask is None:
        starts = torch.zeros_like(ends)
    else:
        if attention_mask.dim() != 2 or len(attention_mask) != batch_size:
            raise ValueError(
                f"attention_mask must be ({batch_size}, keys), true where there is a token; "
                f"got {describe(attention_mask)}"
            )
        is_token = attention_mask.to(device=device, dtype=torch.bool)
        # number of tokens up to each key; where it is 0, the key is padding on the left
        seen = is_token.cumsum(-1)
        starts = (seen == 0).sum(-1, dtype=torch.int32).minimum(ends)
        if q_length > 1 or is_token.device.type == "cpu":
            inside = torch.arange(is_token.shape[1], device=device) < ends[:, None]
            hole = ~is_token & (seen > 0) & inside
            if hole.any() or (ends > is_token.shape[1]).any():
                raise ValueError(
                    f"{NAME} needs padding on the left: attention_mask {describe(attention_mask)} hides "
                    f"something after the first token (tokenizer.padding_side = 'left')"
                )
    return torch.stack((starts, ends))[:, :, None, None]


def _all_tokens(attention_mask: Tensor | None, batch: int, keys: int) -> bool:
    """Whether no key is padding. It waits for a GPU, once per step, as transformers does for its own SDPA."""
    if attention_mask is None:
        return True
    return attention_mask.shape == (batch, keys) and bool(attention_mask.all())


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
        module: the layer; its ``is_causal`` is used where the argument of this name is None.
        query: (batch, heads, q_len, head_dim).
        key, value: (batch, kv_heads, kv_len, head_dim), the cache with the new keys and values in it; kv_heads divides
            heads.
        attention_mask: from ``course_mask``; or None, with the meaning that it has for PyTorch's SDPA: one query sees
            all keys, and of several query i sees the keys 0..i if causal.
        scaling: factor of the scores; 1/sqrt(head_dim) if None.

    Returns:
        (batch, q_len, heads, head_dim) contiguous, 0 for a query that sees no key; and None in place of the attention
        weights, which are never stored.

    Raises:
        ValueError: dropout or gradients, a mask that is not from ``course_mask``, or attention that our kernels do
            not implement.
    """
    # a launch through ctypes cannot be traced; the graph is split here instead
    if torch.compiler.is_dynamo_compiling():
        return _untraced(
            module, query, key, value, attention_mask, scaling, dropout, is_causal, **kwargs
        )
    if dropout != 0.0:
        raise ValueError(f"our kernels have no dropout, got {dropout}; call model.eval()")
    if torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad
    ):
        raise ValueError("our kernels have no backward pass; run the model under torch.no_grad()")
    for name in _UNSUPPORTED.intersection(kwargs):
        if kwargs[name] is not None:
            raise ValueError(f"our kernels have no {name}; got {kwargs[name]!r}")

    # A step is bound by the host. Calls like earlier ones take half of its time.
    plain_decode = attention_mask is None and query.shape[2] == 1
    if plain_decode and (out := known_calls.launch(query, key, value, scaling)) is not None:
        kernel_calls["decode"] += 1
        return out, None

    # (batch, heads, n, d) -> (batch, n, heads, d): views, nothing is copied
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    batch, _, q_len, _ = query.shape
    start = end = None
    causal = q_len > 1
    if attention_mask is not None:
        start, end = _bounds(attention_mask, batch)
    elif causal:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        if causal and q_len > k.shape[1]:
            raise ValueError(f"{q_len} causal queries but only {k.shape[1]} keys, and no mask")
        if causal:  # query i sees keys 0..i, and the rest of a static cache is not read
            k, v = k[:, :q_len], v[:, :q_len]

    if q_len == 1:
        kernel_calls["decode"] += 1
        out = flash_attention_decode(q, k, v, scale=scaling, seqlens_k=end, leftpad_k=start)
        if plain_decode:
            known_calls.add(query, key, value)
    else:
        kernel_calls["prefill"] += 1
        out = fast_attention(q, k, v, causal=causal, scale=scaling, seqlens_k=end, leftpad_k=start)
    return out, None


# As a decorator, disable would take 2 us of each call.
_untraced = torch.compiler.disable(course_attention)


def _bounds(mask: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """start and end, int32 (batch,), from what ``course_mask`` returned."""
    if mask.dtype != torch.int32 or mask.shape != (2, batch, 1, 1):
        raise ValueError(
            f"{NAME} takes attention_mask as (batch, keys) with padding on the left; a mask with an "
            f"entry for each query and key is not supported; got {describe(mask)}"
        )
    return mask.flatten(1).unbind()


AttentionInterface.register(NAME, course_attention)
AttentionMaskInterface.register(NAME, course_mask)
