"""What a call costs the host: a rung of the ladder, and a decode step of task 5.

The GPU's queue takes the work, so that only Python, the launch and the allocation of the output are timed.
"""

from collections.abc import Callable
from typing import Any

import torch

from common.timing import microseconds
from task4.ladder import ladder_attention
from task5.attention import choose_num_splits, flash_attention_decode, sm_count, update_kv_cache

LADDER_US, TASK5_US = 10.0, 12.0  # allowed: for a call, and for each launch of a step


def run_host() -> dict[str, Any]:
    """Microseconds by what is called, with those that are allowed."""
    costs = {"ladder_attention": (1, LADDER_US, _prompt())}
    for kv_len in (100, 1000):
        splits, step = _decode_step(kv_len)
        launches = (
            2 if splits == 1 else 3
        )  # the cache's update, the decode kernel, and what merges the splits
        costs[f"decode step, {splits} splits, {launches} launches"] = (launches, TASK5_US, step)
    found = {}
    for name, (launches, allowed, call) in costs.items():
        found[name] = {"us": microseconds(call), "allowed": launches * allowed}
        print(f"  {name}: {found[name]['us']:.1f} us (allowed: {launches * allowed:.0f})")
    return {"ok": all(cost["us"] <= cost["allowed"] for cost in found.values()), "costs": found}


def _prompt() -> Callable[[], object]:
    q, k, v = torch.randn(3, 1, 128, 4, 128, device="cuda").bfloat16()
    return lambda: ladder_attention(q, k, v, causal=True)


def _decode_step(
    kv_len: int, batch: int = 4, heads: int = 32, head_dim: int = 128
) -> tuple[int, Callable[[], object]]:
    """How many splits it has, and the step: one token is appended to the cache and attends to ``kv_len``."""
    hidden = heads * head_dim
    k_cache, v_cache = torch.zeros(2, batch, kv_len, hidden, device="cuda").bfloat16()
    q, k, v = torch.randn(3, batch, 1, hidden, device="cuda").bfloat16()
    q, keys, values = (t.unflatten(-1, (heads, head_dim)) for t in (q, k_cache, v_cache))

    def step() -> object:
        update_kv_cache(k_cache, v_cache, k, v, kv_len - 1)
        return flash_attention_decode(q, keys, values)

    return choose_num_splits(batch * heads, kv_len, sm_count(q.device)), step
