"""How accurate a rung is, compared with the kernel of PyTorch that sets its bar.

    float16, bfloat16   at most 1.1 x the loss of SDPA's flash backend (FlashAttention-2)
    float32             at most 2 x the loss of SDPA's memory-efficient backend, PyTorch's fused fp32 kernel

The loss is the distance from float64: root mean square, and largest (common.check.loss). For float32 no single head may
be worse either.
"""

import torch

from common.check import Rng
from common.check.attention import attention_float64
from common.check.hard_inputs import ACCURACY, make_inputs
from common.check.loss import Loss
from common.timing import Backend, sdpa
from task4.ladder.call import ladder_attention
from task4.ladder.rungs import BF16, FP16, FP32, Rung

ALLOWED = {FP16: 1.1, BF16: 1.1, FP32: 2.0}
YARDSTICK = {FP16: Backend.FLASH, BF16: Backend.FLASH, FP32: Backend.EFFICIENT}
INPUTS = {FP16: ACCURACY[:3], BF16: ACCURACY[:3], FP32: ACCURACY}


def shape_for(rung: Rung, head_dim: int, causal: bool) -> tuple[int, int, int, int]:
    """(batch, rows, heads, head_dim) of a comparison; long rows, which a rung may treat in its own way."""
    if rung.number <= 3:
        return 4, 1024, 8, head_dim
    return (2, 4096, 8, head_dim) if causal else (4, 2048, 8, head_dim)


def compare(
    rung: Rung, inputs: str, rng: Rng, head_dim: int, dtype: torch.dtype, causal: bool
) -> dict[str, float]:
    """A rung's loss as a multiple of the yardstick's, on inputs of that name.

    Raises:
        RuntimeError: the yardstick does not run here.
    """
    q, k, v = make_inputs(inputs, rng, shape_for(rung, head_dim, causal), dtype)
    truth = attention_float64(q, k, v, causal=causal)
    theirs = Loss.of(sdpa(q, k, v, backend=YARDSTICK[dtype], causal=causal), truth)
    return Loss.of(ladder_attention(q, k, v, causal=causal, rung=rung.number), truth).ratios(theirs)


def worst(rung: Rung, seed: int, head_dim: int, dtype: torch.dtype) -> dict[str, float]:
    """The largest ratio over inputs and masks, by what is compared."""
    found = [
        compare(rung, inputs, Rng(seed, "cuda", "accuracy", inputs), head_dim, dtype, causal)
        for inputs in INPUTS[dtype]
        for causal in (False, True)
    ]
    return {what: max(ratios[what] for ratios in found) for what in found[0]}
