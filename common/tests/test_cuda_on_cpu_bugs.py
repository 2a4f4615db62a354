"""The check build names planted bugs with file and line, and says nothing about correct kernels."""

import math
import re
from pathlib import Path

import pytest
import torch

from common.build import KernelError, Kernels, using

SOURCE = Path(__file__).parent / "kernels/planted_bugs.cu"
TEXT = SOURCE.read_text()
_kernels = Kernels(__file__, "kernels/planted_bugs.cu")
BUGS = re.search(r"enum Bug \{(.*?)\}", TEXT, re.DOTALL)[1].replace(",", " ").split()


def number(bug: str) -> int:
    return BUGS.index(bug)


def line_of(tag: str) -> str:
    lines = [i for i, line in enumerate(TEXT.splitlines(), 1) if line.endswith(f"// @{tag}")]
    assert len(lines) == 1, f"@{tag} marks {len(lines)} lines"
    return rf"planted_bugs\.cu:{lines[0]}[: ]|, line {lines[0]}[;)]"  # of the kernel, or of a lambda in it


# ---- each kernel on small odd sizes: returns the kernel's result and the expected one


def gemm(bug: int):
    M, N, K = 41, 35, 37
    # Room behind A, so that no other tensor is past its end.
    A = torch.randn(M * K + 10_000)[: M * K].view(M, K)
    B, C = torch.randn(K, N), torch.full((M, N), math.nan)
    _kernels.launch("run_gemm", bug=bug, A=A, B=B, C=C, M=M, N=N, K=K)
    return C, A @ B


def softmax(bug: int):
    x = torch.randn(3, 200) * 5
    y = torch.full_like(x, math.nan)
    _kernels.launch("run_softmax", bug=bug, x=x, y=y, rows=3, columns=200)
    return y, x.softmax(-1)


def _attention(name: str, bug: int, queries: int, keys: int, d: int, dtype=torch.float32):
    q = torch.randn(queries, d).to(dtype)
    k, v = torch.randn(keys, d).to(dtype), torch.randn(keys, d).to(dtype)
    out = torch.full((queries, d), math.nan)
    scale = d**-0.5
    _kernels.launch(name, bug=bug, Q=q, K=k, V=v, O=out, S=keys, scale=scale)
    truth = (q.float() @ k.float().T * scale).softmax(-1) @ v.float()
    return out, truth


def flash(bug: int):
    return _attention("run_flash", bug, 70, 70, 16)


def mma(bug: int):  # 200 keys: four tiles, so that each of the two buffers is used again
    return _attention("run_mma", bug, 200, 200, 64, torch.bfloat16)


def decode(bug: int):
    return _attention("run_decode", bug, 1, 33, 64)


KERNELS = [(gemm, 1e-4), (softmax, 1e-5), (flash, 1e-4), (mma, 2e-2), (decode, 1e-4)]
ORDERS = ("forward", "reverse", "random")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("kernel, tolerance", KERNELS, ids=lambda x: getattr(x, "__name__", ""))
@pytest.mark.parametrize("check", [False, True], ids=["fast", "check"])
def test_correct_kernels_pass_in_every_order(kernel, tolerance, check):
    for order in ORDERS:
        for eager in (False, True):
            with using(check=check, order=order, seed=3, eager_copies=eager):
                out, truth = kernel(0)
            assert (out - truth).abs().max() < tolerance, (order, eager)


# bug, kernel, what the message says, and at which lines (either access may come second)
PLANTED = [
    ("GEMM_NO_BARRIER_AFTER_LOAD", gemm, "race on [AB]_tile|uninitialised", "gemm-use"),
    ("GEMM_NO_BARRIER_AFTER_USE", gemm, "race on [AB]_tile", "gemm-use gemm-load-a gemm-load-b"),
    # The last column of a row is the first of the next one: a race, and past the end in the last row.
    (
        "GEMM_NARROW_TILE",
        gemm,
        "(race on|out of range: writes 4 bytes of).* '?B_tile",
        "gemm-load-b",
    ),
    ("GEMM_NO_ROW_CHECK", gemm, "out of range: reads 4 bytes of tensor 'A'", "gemm-load-a"),
    (
        "GEMM_DIVERGENT_BARRIER",
        gemm,
        r"divergent __syncthreads\(\)|race|uninitialised",
        "gemm-second-barrier gemm-use",
    ),
    ("SOFTMAX_NO_BARRIER_BEFORE_TREE", softmax, "uninitialised|race", "softmax-max-tree"),
    ("SOFTMAX_NO_BARRIER_IN_TREE", softmax, "race", "softmax-max-tree softmax-read-max"),
    ("SOFTMAX_NO_BARRIER_AFTER_MAX", softmax, "race", "softmax-store-sum softmax-read-max"),
    ("SOFTMAX_NO_BARRIER_BEFORE_SUM", softmax, "race", "softmax-sum-tree softmax-store-sum"),
    (
        "SOFTMAX_SHORT_SHARED",
        softmax,
        "out of range: writes 4 bytes of shared memory 'scratch'",
        "softmax-store-max",
    ),
    (
        "SOFTMAX_UNINITIALISED",
        softmax,
        "uninitialised shared memory: reads scratch",
        "softmax-max-tree",
    ),
    ("FLASH_NO_BARRIER_AFTER_LOAD", flash, "race on K_j|uninitialised", "flash-use-k"),
    ("FLASH_NO_BARRIER_AFTER_USE", flash, "race on K_j", "flash-load-k flash-use-k"),
    ("FLASH_EARLY_RETURN", flash, "uninitialised shared memory: reads K_j", "flash-use-k"),
    ("MMA_NO_BARRIER_AFTER_WAIT", mma, "uninitialised|race|in flight", "mma-read-q mma-read-k"),
    ("MMA_NO_BARRIER_AFTER_USE", mma, r"race on [KV]_j\[\d+\] .*write after read", "mma-copy"),
    ("MMA_LAST_WAIT_TOO_SHORT", mma, "in flight; cp_async_wait first", "mma-read-k"),
    ("MMA_NO_WAIT", mma, "in flight; cp_async_wait first", "mma-read-q"),
    ("DECODE_NO_BARRIER", decode, "uninitialised|race", "decode-combine"),
    ("DECODE_SHUFFLE_IN_BRANCH", decode, "deadlock|a shuffle", ""),
]


@pytest.mark.parametrize("order", ORDERS)
def test_a_conflict_after_an_early_return_says_so(order):
    with using(check=True, order=order), pytest.raises(KernelError) as caught:
        flash(number("FLASH_EARLY_RETURN"))
    (line,) = [i for i, line in enumerate(TEXT.splitlines(), 1) if "FLASH_EARLY_RETURN &&" in line]
    _, first, second, _ = str(caught.value).splitlines()
    assert re.fullmatch(rf"    threads 6 to 31 returned at \S+planted_bugs\.cu:{line}", first)
    assert re.match(
        r"    and the others have come to the __syncthreads\(\) at \S+planted_bugs.cu:\d+: ", second
    )


@pytest.mark.parametrize("order", ORDERS)
def test_a_conflict_after_a_divergent_barrier_says_so(order):
    with using(check=True, order=order), pytest.raises(KernelError) as caught:
        gemm(number("GEMM_DIVERGENT_BARRIER"))
    assert re.search(
        r"divergent __syncthreads\(\): thread \S+ waits at \S+, and thread \S+ has come to another one, at \S+; "
        "one of the two stands under a condition that not all threads meet",
        str(caught.value),
    )


def test_every_bug_is_in_the_table():
    assert [bug for bug, *_ in PLANTED] == [bug for bug in BUGS if bug not in ("NONE", "BUGS")]


@pytest.mark.parametrize("bug, kernel, message, tags", PLANTED, ids=[p[0] for p in PLANTED])
def test_check_build_names_the_bug(bug, kernel, message, tags):
    for eager in (False, True):
        for order in ORDERS:
            settings = dict(check=True, order=order, seed=1, eager_copies=eager)
            with using(**settings), pytest.raises(KernelError) as caught:
                kernel(number(bug))
            text = str(caught.value)
            assert re.search(message, text), text
            if tags:
                assert any(re.search(line_of(tag), text.splitlines()[0]) for tag in tags.split()), (
                    text
                )
            assert "planted_bugs.cu:" in text and "block (" in text, text
    kernel(0)  # and the next launch is as good as ever
