"""Calling a rung: the arguments are checked and a rung is chosen once for all tensors like these.

    ladder_attention(q, k, v, causal=True)            # the fastest one that takes these tensors
    ladder_attention(q, k, v, causal=True, rung=9)    # this one, or a ValueError that says which do

A rung is compiled when it is first called.
"""

import functools
import logging
import math
from typing import Any

import torch
from torch import Tensor

from common.build import Kernels, dtype_code
from common.inputs import check_attention
from task4.ladder import known_calls
from task4.ladder.rungs import WIDEST, Rung, choose

log = logging.getLogger("task4.ladder")


def ladder_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    rung: int | None = None,
) -> Tensor:
    """softmax(scale q k^T) v by a rung of the ladder.

    Args:
        q: ``(batch, q_len, heads, head_dim)``, float32, float16 or bfloat16, any strides with a contiguous last
            dimension.
        k, v: ``(batch, kv_len, kv_heads, head_dim)``; kv_heads divides heads, and each serves heads / kv_heads of
            them (grouped-query attention).
        causal: query i sees the keys ``j <= i + kv_len - q_len``: the last one sees all.
        scale: factor of the scores, above 0; ``1 / sqrt(head_dim)`` if None.
        rung: its number. None: the fastest that takes these tensors; for float32 only one with float32's accuracy. If
            the fastest cannot load q, k or v because of their addresses or strides, the next one that can runs, and
            the logger ``task4.ladder`` says so.

    Returns:
        ``(batch, q_len, heads, head_dim)``, contiguous, q's dtype. A query that sees no key gives 0.

    Raises:
        ValueError: arguments that do not fit, named; or a rung that cannot take them, with those that can.
    """
    out = known_calls.launch(q, k, v, causal, scale, rung)
    return prepared(q, k, v, causal, scale, rung)(q, k, v) if out is None else out


def prepared(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    rung: int | None = None,
) -> "Call":
    """What :func:`ladder_attention` calls if the call is not known: everything is checked, and a rung chosen.

    A call like an earlier one (same shapes, strides, dtype, device, alignment) uses what was found for that one: it
    costs a look-up.

    Raises:
        ValueError: see there.
    """
    try:
        key = (
            q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
            q.device, k.device, v.device, (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16, causal, scale, rung,
        )  # fmt: skip
        call = _calls.get(key)
    except (AttributeError, TypeError, RuntimeError):  # not tensors, or without memory
        return Call(q, k, v, causal, scale, rung)
    if call is None:
        call = Call(q, k, v, causal, scale, rung)
        if len(_calls) >= _MOST_CALLS:
            _calls.clear()
        _calls[key] = call
    return call


class Call:
    """A rung with its arguments for tensors like these, all but the tensors themselves.

    Raises:
        ValueError: arguments that do not fit, or a rung that cannot take them.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        scale: float | None,
        rung: int | None,
    ) -> None:
        batch, heads, _, q_len, kv_len, head_dim = check_attention(q, k, v, max_head_dim=WIDEST)
        if scale is not None and not 0 < scale < math.inf:
            raise ValueError(f"scale must be above 0 and finite; got {scale}")
        self.rung, reason = choose(q, k, v, rung)
        if reason:
            log.info("%s instead of %s", self.rung, reason)
        self._out = dict(size=(batch, q_len, heads, head_dim), dtype=q.dtype, device=q.device)
        self._nothing = not (batch and q_len and heads and kv_len)
        self._given = causal, scale, rung
        self._counted = self.rung.counter and bool(causal)
        own = kernels(self.rung)
        asked = own.has_query("workspace_bytes") and not self._nothing
        self._scratch = own.query("workspace_bytes", q.device, q=q, k=k) if asked else 0
        self._numbers = dict(
            scale=1 / math.sqrt(head_dim) if scale is None else float(scale), causal=int(causal),
            dtype=dtype_code(q.dtype),
        )  # fmt: skip

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._nothing:  # no rows, or rows that see no key
            return torch.zeros(**self._out)
        out, workspace = self.allocate()
        own = kernels(self.rung)
        own.launch("attention", q=q, k=k, v=v, out=out, workspace=workspace, **self._numbers)
        if self.rung.hopper and not torch.cuda.is_current_stream_capturing():
            known_calls.add(
                (q, k, v), self._given, own.address("attention", q.device), **self._numbers,
                workspace=workspace, counted=self._counted,
            )  # fmt: skip
        return out

    def allocate(self) -> tuple[Tensor, Tensor | None]:
        """The output, and the rung's workspace if it wants one, not initialised unless it is a counter."""
        out = torch.empty(**self._out)
        if self._counted:
            return out, counter(out.device)
        if not self._scratch:
            return out, None
        return out, torch.empty(self._scratch, dtype=torch.uint8, device=out.device)


def counter(device: torch.device) -> Tensor:
    """An int32 on this GPU that is 0 when the current stream's next launch begins, which leaves it so.

    A CUDA graph that is captured gets one of its own, and zeroes it: it may be replayed beside others, on any stream.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    # torch.cuda.current_stream() builds an object: 3 us
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    found = _counters.get((device, stream))
    if found is None:
        found = _counters[device, stream] = torch.zeros(1, dtype=torch.int32, device=device)
    return found


_counters: dict[tuple[torch.device, int], Tensor] = {}
_calls: dict[tuple[Any, ...], Call] = {}
_MOST_CALLS = 4096


@functools.cache
def kernels(rung: Rung) -> Kernels:
    """The rung's launcher."""
    return Kernels(str(rung.source), rung.file)
