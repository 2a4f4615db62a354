"""Attention for prompts, by the fastest kernel in this checkout. The layers of tasks 5 to 7 call it."""

__all__ = ["fast_attention"]

# BEGIN STAFF, for students: from task4.attention import flash_attention as fast_attention
import logging

from torch import Tensor

from common.inputs import check_attention
from task4 import ladder
from task4.attention import flash_attention
from task5.ladder.chunk import chunk_attention, faster_than_the_ladder

log = logging.getLogger("task4.ladder")


def fast_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    seqlens_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rung: int | None = None,
) -> Tensor:
    """Attention by the fastest kernel for these tensors: on a GPU a rung of the ladder, else :func:`flash_attention`.

    Few queries against many keys leave the ladder's multiprocessors idle: on a Hopper,
    :func:`task5.ladder.chunk.chunk_attention` shares the keys among them where that is faster.

    Arguments and result are :func:`flash_attention`'s. With ``seqlens_k`` or ``leftpad_k``, which no rung takes, it is
    always that one. ``rung`` is the number of a rung to use instead of the fastest.

    Raises:
        ValueError: arguments that do not fit, or a rung that cannot take them, named.
    """
    plain = seqlens_k is None and leftpad_k is None
    if rung is not None:
        if not plain:
            raise ValueError(
                f"rung {rung} takes no seqlens_k and no leftpad_k; flash_attention does"
            )
        return ladder.ladder_attention(q, k, v, causal=causal, scale=scale, rung=rung)
    if plain and (out := ladder.known_calls.launch(q, k, v, causal, scale, None)) is not None:
        return out
    if plain and (scale is None or scale > 0) and _a_rung_is_faster(q):
        check_attention(q, k, v, max_head_dim=ladder.WIDEST)
        if faster_than_the_ladder(q, k, v):
            return chunk_attention(q, k, v, causal=causal, scale=scale)
        chosen, _ = ladder.choose(q, k, v, None)
        if chosen.number not in ladder.SLOWER:
            return ladder.ladder_attention(q, k, v, causal=causal, scale=scale)
        log.info("task 4's own kernel instead of %s, which is slower", chosen)
    return flash_attention(
        q, k, v, causal=causal, scale=scale, seqlens_k=seqlens_k, leftpad_k=leftpad_k
    )


def _a_rung_is_faster(q: Tensor) -> bool:
    """Whether one is for such tensors, if its loads suit their addresses and strides."""
    if not isinstance(q, Tensor) or q.device.type != "cuda" or q.dim() != 4:
        return False
    best = ladder.fastest(q.device, q.dtype, q.shape[3])
    return best is not None and best.number not in ladder.SLOWER


def splits_float32(q: Tensor) -> bool:
    """Whether :func:`fast_attention` multiplies float32 tensors like ``q`` on tensor cores, in 16-bit parts."""
    return _a_rung_is_faster(q) and ladder.fastest(q.device, q.dtype, q.shape[3]).split


# END STAFF
