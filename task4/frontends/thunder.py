"""Task 4's kernel in lightning-thunder, a compiler that rewrites a model's trace, operation by operation.

    compiled = thunder.jit(model)     # of this module
    compiled(x)                       # F.scaled_dot_product_attention is course::flash_attention, where that can do it

Thunder asks each executor's checker for each operation; the first one that agrees gets it. A checker sees shapes,
dtypes and devices, and no data. See https://lightning-thunder.readthedocs.io/en/latest/notebooks/extend_thunder.html.
"""

import math
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

try:
    import thunder
except (
    AttributeError
) as error:  # 0.2.6 names methods of named tensors, which PyTorch 2.13 no longer has
    raise ImportError(
        f"lightning-thunder {version('lightning-thunder')} cannot be imported with torch {torch.__version__}: {error}"
    ) from error
from thunder.core.dtypes import to_torch_dtype
from thunder.core.proxies import TensorProxy
from thunder.extend import OperatorExecutor, register_executor
from thunder.torch import scaled_dot_product_attention

from common.inputs import KERNEL_DTYPES, MAX_HEAD_DIM, check_attention
from task4.frontends import operators

course = OperatorExecutor("course", version="1")
register_executor(course)


def supported(
    query: TensorProxy,
    key: TensorProxy,
    value: TensorProxy,
    attn_mask: TensorProxy | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> bool:
    """The checker: whether the operator can do this, forward only."""
    tensors = query, key, value
    if attn_mask is not None or dropout_p or any(t.ndim != 4 or t.requires_grad for t in tensors):
        return False
    (batch, heads, q_len, head_dim), kv_len = query.shape, key.shape[2]
    return (
        key.shape == value.shape == (batch, heads, kv_len, head_dim)
        and 1 <= head_dim <= MAX_HEAD_DIM
        and not (is_causal and q_len > kv_len)
        and to_torch_dtype(query.dtype) in KERNEL_DTYPES
        and len({(t.dtype, t.device) for t in tensors}) == 1
        and query.device.type in ("cpu", "cuda")
    )


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
    # The checker sees no strides.
    contiguous = all(t.stride(-1) == 1 for t in (query, key, value))
    attend = operators if contiguous else functional
    return attend.scaled_dot_product_attention(query, key, value, *args, **options)


_operator = course.register_operator(
    "course_flash_attention", like=scaled_dot_product_attention, fn=_attention
)
course.register_implementation(scaled_dot_product_attention, _operator, checker=supported)


def jit(model: Callable[..., Any]) -> Callable[..., Any]:
    """``thunder.jit`` with this executor before the others."""
    return thunder.jit(model, executors=[course, *thunder.get_default_executors()])


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None
) -> Tensor:
    """``F.scaled_dot_product_attention`` through :func:`jit`, which puts task 4's kernel in its place.

    Args:
        q, k, v: ``(batch, seq, heads, head_dim)``, with as many heads each: Thunder's SDPA knows no groups.
        causal: query i sees the keys up to i. As PyTorch has it, so q and k must be as long.
        scale: factor of the scores; ``1 / sqrt(head_dim)`` if None.

    Returns:
        ``(batch, q_len, heads, head_dim)``.

    Raises:
        ValueError: arguments that do not fit.
    """
    _, heads, kv_heads, q_len, kv_len, head_dim = check_attention(q, k, v)
    if heads != kv_heads:
        raise ValueError(f"k must have as many heads as q; got {heads} and {kv_heads}")
    if causal and q_len != kv_len:
        raise ValueError(
            f"causal needs as many queries as keys; got {q_len} queries and {kv_len} keys"
        )
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return _attend()(q, k, v, None, 0.0, causal, scale=scale).transpose(1, 2)


@cache
def _attend() -> Callable[..., Tensor]:
    return jit(functional.scaled_dot_product_attention)
