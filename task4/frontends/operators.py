"""Attention, decode and the cache's update as operators of PyTorch's library.

torch.compile and torch.export look into Python, and cannot look into a kernel that is launched through C. An operator
has a name, a schema and a fake kernel, which says what comes out without computing it; so they keep it whole. See
https://docs.pytorch.org/docs/stable/library.html.

    with operators.in_use():                                # in the layers of tasks 4 to 6
        compiled = torch.compile(layer, fullgraph=True)
        compiled(x)
    with operators.instead_of_sdpa():                       # in anybody's model
        model(x)
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

import task4.attention
import task4.prefill
import task5.attention
import task6.attention

_attention = task4.prefill.fast_attention
_decode = task5.attention.flash_attention_decode
_update = task5.attention.update_kv_cache


@torch.library.custom_op("course::flash_attention", mutates_args=())
def _flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    seqlens_k: Tensor | None,
    leftpad_k: Tensor | None,
) -> Tensor:
    return _attention(q, k, v, causal=causal, scale=scale, seqlens_k=seqlens_k, leftpad_k=leftpad_k)


@torch.library.custom_op("course::flash_attention_decode", mutates_args=())
def _flash_attention_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    seqlens_k: Tensor | None,
    leftpad_k: Tensor | None,
    num_splits: int | None,
) -> Tensor:
    return _decode(
        q, k, v, scale=scale, seqlens_k=seqlens_k, leftpad_k=leftpad_k, num_splits=num_splits
    )


@torch.library.custom_op("course::update_kv_cache", mutates_args=("k_cache", "v_cache"))
def _update_kv_cache(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, current_pos: int
) -> None:
    _update(k_cache, v_cache, k, v, current_pos)


@torch.library.custom_op("course::update_kv_cache_at", mutates_args=("k_cache", "v_cache"))
def _update_kv_cache_at(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, positions: Tensor
) -> None:
    _update(k_cache, v_cache, k, v, positions)


@_flash_attention.register_fake
@_flash_attention_decode.register_fake
def _like_q(q: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape)


@_update_kv_cache.register_fake
@_update_kv_cache_at.register_fake
def _nothing(*_: object) -> None:
    return None


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
    """:func:`task4.prefill.fast_attention` as ``torch.ops.course.flash_attention``."""
    return _flash_attention(q, k, v, causal, scale, seqlens_k, leftpad_k)


def flash_attention_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    seqlens_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """:func:`task5.attention.flash_attention_decode` as ``torch.ops.course.flash_attention_decode``."""
    return _flash_attention_decode(q, k, v, scale, seqlens_k, leftpad_k, num_splits)


def update_kv_cache(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, current_pos: int | Tensor
) -> None:
    """:func:`task5.attention.update_kv_cache` as ``torch.ops.course.update_kv_cache``, or ``..._at`` for a tensor."""
    if isinstance(current_pos, Tensor):
        _update_kv_cache_at(k_cache, v_cache, k, v, current_pos)
    else:
        _update_kv_cache(k_cache, v_cache, k, v, current_pos)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` by :func:`flash_attention`, forward only.

    Args:
        query: ``(batch, heads, q_len, head_dim)``.
        key, value: ``(batch, kv_heads, kv_len, head_dim)``.
        attn_mask, dropout_p: not supported.
        is_causal: query i sees the keys ``j <= i``, also if there are more keys than queries.
        scale: ``1 / sqrt(head_dim)`` if None.
        enable_gqa: whether there may be fewer heads of keys and values than of queries.

    Raises:
        ValueError: something is not supported, or does not fit.
    """
    if attn_mask is not None:
        raise ValueError(
            "attn_mask is not supported by course::flash_attention: use is_causal=True, or lengths as"
            " seqlens_k and leftpad_k of task4.frontends.operators.flash_attention"
        )
    if dropout_p:
        raise ValueError(
            f"dropout is not supported by course::flash_attention; got dropout_p {dropout_p}:"
            " call model.eval() first"
        )
    if query.dim() != 4:
        raise ValueError(
            "query must be (batch, heads, q_len, head_dim) for course::flash_attention;"
            f" got {tuple(query.shape)}"
        )
    if key.shape[1] != query.shape[1] and not enable_gqa:
        raise ValueError(
            f"enable_gqa must be True for {query.shape[1]} heads with {key.shape[1]} of keys"
        )
    q_len, kv_len = query.shape[2], key.shape[2]
    if is_causal and q_len > kv_len:
        raise ValueError(
            "is_causal with more queries than keys is not supported by course::flash_attention;"
            f" got {q_len} queries, {kv_len} keys"
        )
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    if (
        is_causal
    ):  # here the first query sees the first key alone; in the course the last one sees all
        k, v = k[:, :q_len], v[:, :q_len]
    return flash_attention(q, k, v, causal=is_causal, scale=scale).transpose(1, 2)


@contextmanager
def in_use() -> Iterator[None]:
    """A context in which the layers of tasks 4 to 6 call the operators."""
    names = {
        "fast_attention": flash_attention,
        "flash_attention_decode": flash_attention_decode,
        "update_kv_cache": update_kv_cache,
    }
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(task4.attention, "flash_attention", flash_attention))
        for module in (task5.attention, task6.attention):
            for name, operator in names.items():
                stack.enter_context(mock.patch.object(module, name, operator))
        yield


@contextmanager
def instead_of_sdpa() -> Iterator[None]:
    """A context in which ``F.scaled_dot_product_attention`` is :func:`scaled_dot_product_attention`."""
    with mock.patch.object(
        functional, "scaled_dot_product_attention", scaled_dot_product_attention
    ):
        yield
