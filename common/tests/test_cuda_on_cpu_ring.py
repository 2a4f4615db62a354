"""Mistakes with the barriers of a real kernel, rung 12 of the ladder: the check build finds each of them."""

import math
import re

import pytest
import torch

from common.build import KernelError, Kernels, using
from common.check.attention import attention_float64, attention_pytorch
from task4.ladder.rungs import by_number

SOURCE = by_number(12).source
TEXT = SOURCE.read_text()
# One of its six kernels, which is compiled sooner.
for others in re.findall(r"^.*(?:head_dim == (?:128|256)|== BFLOAT16\)).*\n", TEXT, re.MULTILINE):
    TEXT = TEXT.replace(others, "")
RUNS = [("forward", False), ("reverse", True), *(("random", eager) for eager in (False, True) * 2)]

WAIT_K, FULL_K = "mbarrier_wait(&s.k_empty[k.index], k.parity ^ 1);", "k_full[k.index], k.parity);"
WAIT_V, FULL_V = "mbarrier_wait(&s.v_empty[v.index], v.parity ^ 1);", "v_full[v.index], v.parity);"
GIVE_K = "arrive_as_warp(&s.k_empty[k.index]);"
EXPECT_V = "mbarrier_arrive_expect(&s.v_full[v.index], B_c * D * sizeof(T));"
COUNT = "mbarrier_init(&s.k_empty[i], 4 * CONSUMERS"
RACE, DEADLOCK = r"race on raw\[\d+\]", "deadlock: no thread of the block can go on"
MISTAKES = {
    "K_j is loaded before the last one was read": (WAIT_K, "", f"{RACE}|more arrivals"),
    "V_j is loaded before the last one was read": (WAIT_V, "", f"{RACE}|more arrivals"),
    "K_j is read before it is there": (f"mbarrier_wait(&s.{FULL_K}", "", RACE),
    "V_j is read before it is there": (f"mbarrier_wait(&s.{FULL_V}", "", RACE),
    "Q_i is read before it is there": ("mbarrier_wait(&s.q_full, 0)", "(void)0", RACE),
    "S is used before it is there": (f"wgmma_wait<0>();\n    {GIVE_K}", GIVE_K, RACE),
    "K_j is given back before it was read": (
        "    mbarrier_wait(&s.k_full", f"    {GIVE_K}\n    mbarrier_wait(&s.k_full", f"{RACE}|more arrivals",
    ),
    "V_j is not given back": ("arrive_as_warp(&s.v_empty[v.index]);", "", DEADLOCK),
    "one arrival too few is waited for": (COUNT, f"{COUNT} - 1", RACE),
    "one arrival too many is waited for": (COUNT, f"{COUNT} + 1", f"{DEADLOCK}.* misses 1 of 13 arrivals"),
    "half of the bytes are expected": (EXPECT_V, EXPECT_V.replace("sizeof(T)", "1"), "more have landed than"),
    "twice the bytes are expected": (EXPECT_V, EXPECT_V.replace("B_c", "2 * B_c"), "and 16384 bytes"),
    "the other phase is waited for": (WAIT_K, WAIT_K.replace(" ^ 1", ""), DEADLOCK),
    "barriers are used before they are initialised": (
        "__syncthreads();  // barriers init", "// barriers init", "the mbarrier is not initialised",
    ),
}  # fmt: skip


def errors(text: str) -> list[str]:
    """What the check build says of the kernel, or "wrong", in some orders of its threads."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 1, 64).half() for n in (200, 600, 600))
    truth = attention_float64(q, k, v)
    budget = 2 * (attention_pytorch(q, k, v) - truth).abs().max()
    kernels, found = Kernels.from_text(str(SOURCE), text), []
    for seed, (order, eager) in enumerate(RUNS):
        out = torch.full_like(q, math.nan)
        try:
            with using(check=True, order=order, eager_copies=eager, seed=seed, limit=60):
                kernels.launch(
                    "attention", q=q, k=k, v=v, out=out, workspace=None, scale=1 / 8, causal=0, dtype=1
                )  # fmt: skip
        except KernelError as error:
            found.append(str(error))
        else:
            right = (out - truth).abs().max() <= budget
            found += [] if right else ["wrong"]
    return found


def test_nothing_is_said_of_the_kernel_as_it_is():
    assert errors(TEXT) == []


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake):
    search, replace, says = MISTAKES[mistake]
    assert search in TEXT
    found = errors(TEXT.replace(search, replace, 1))
    assert any(re.search(says, error, re.DOTALL) for error in found), found
