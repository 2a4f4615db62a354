"""Calling a rung: the arguments are checked and a rung is chosen once for all tensors on a GPU like these.

    ladder_attention(q, k, v, causal=True)            # the fastest one that takes these tensors
    ladder_attention(q, k, v, causal=True, rung=9)    # this one, or a ValueError that says which do

A rung is compiled when it is first called.
"""

import functools
import logging
import math

import torch
from torch import Tensor

from common.build import Kernels, dtype_code
from common.inputs import check_attention
from task4.ladder import known_calls
from task4.ladder.rungs import WIDEST, Rung, choose

SLOWER = (1, 2, 3, 4)  # than task 4's own kernel

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
    return _check_and_launch(q, k, v, causal, scale, rung) if out is None else out


def _check_and_launch(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, number: int | None
) -> Tensor:
    batch, heads, _, q_len, kv_len, head_dim = check_attention(q, k, v, max_head_dim=WIDEST)
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(f"scale must be above 0 and finite; got {scale}")
    rung, reason = choose(q, k, v, number)
    if reason:
        log.info("%s instead of %s", rung, reason)
    out = torch.empty((batch, q_len, heads, head_dim), dtype=q.dtype, device=q.device)
    if not (batch and q_len and heads and kv_len):  # no rows, or rows that see no key
        return out.zero_()
    own, workspace, counted = kernels(rung), None, rung.counter and bool(causal)
    if counted:
        workspace = counter(q.device)
    elif own.has_query("workspace_bytes"):
        size = own.query("workspace_bytes", q.device, q=q, k=k)
        workspace = _aligned_bytes(size, q.device)
    numbers = dict(
        scale=1 / math.sqrt(head_dim) if scale is None else float(scale), causal=int(causal),
        dtype=dtype_code(q.dtype),
    )  # fmt: skip
    own.launch("attention", q=q, k=k, v=v, out=out, workspace=workspace, **numbers)
    known = q.is_cuda and rung.number not in SLOWER
    if known and not torch.cuda.is_current_stream_capturing():
        launcher = own.address("attention", q.device)
        given = causal, scale, number
        known_calls.add((q, k, v), given, launcher, **numbers, workspace=workspace, counted=counted)
    return out


def _aligned_bytes(size: int, device: torch.device) -> Tensor:
    """Memory from a multiple of 128 bytes on; PyTorch's CPU allocator guarantees less."""
    slack = 127 if device.type == "cpu" else 0
    room = torch.empty(size + slack, dtype=torch.uint8, device=device)
    begin = -room.data_ptr() % 128 if slack else 0
    return room[begin : begin + size]


def counter(device: torch.device) -> Tensor:
    """An int32 on this GPU that is 0 when the current stream's next launch begins, which leaves it so.

    A CUDA graph that is captured gets one of its own, and zeroes it: it may be replayed beside others, on any stream.
    """
    if device.type == "cpu":
        return torch.zeros(1, dtype=torch.int32)
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    # torch.cuda.current_stream() builds an object: 3 us
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    found = _counters.get((device, stream))
    if found is None:
        found = _counters[device, stream] = torch.zeros(1, dtype=torch.int32, device=device)
    return found


_counters: dict[tuple[torch.device, int], Tensor] = {}


@functools.cache
def kernels(rung: Rung) -> Kernels:
    """The rung's launcher."""
    return Kernels(str(rung.source), rung.file)
