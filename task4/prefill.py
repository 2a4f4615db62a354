"""Attention for prompts, by the fastest kernel in this checkout. The layers of tasks 5 to 7 call it."""

from torch import Tensor

__all__ = ["fast_attention", "splits_float32"]

# BEGIN SOLUTION, until then: from task4.attention import flash_attention as fast_attention
from task4.attention import flash_attention
from task4.ladder import rungs

SLOWER = (1, 2, 3, 4)  # the rungs that flash_attention beats


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
        return rungs.ladder_attention(q, k, v, causal=causal, scale=scale, rung=rung)
    if plain and (scale is None or scale > 0) and _a_rung_is_faster(q):
        call = rungs.prepared(q, k, v, causal, scale)
        if call.rung.number not in SLOWER:
            return call(q, k, v)
        rungs.log.info("task 4's own kernel instead of %s, which is slower", call.rung)
    return flash_attention(
        q, k, v, causal=causal, scale=scale, seqlens_k=seqlens_k, leftpad_k=leftpad_k
    )


def _a_rung_is_faster(q: Tensor) -> bool:
    """Whether one is for such tensors, if its loads suit their addresses and strides."""
    if not isinstance(q, Tensor) or q.device.type != "cuda" or q.dim() != 4:
        return False
    best = rungs.fastest(q.device, q.dtype, q.shape[3])
    return best is not None and best.number not in SLOWER


# END SOLUTION


def splits_float32(q: Tensor) -> bool:
    """Whether :func:`fast_attention` multiplies float32 tensors like ``q`` on tensor cores, in 16-bit parts."""
    # BEGIN SOLUTION, until then: return False
    return _a_rung_is_faster(q) and rungs.fastest(q.device, q.dtype, q.shape[3]).split
    # END SOLUTION
