"""Calling a rung of the ladder: which one runs, and what it says about tensors that it cannot take."""

import logging
import os
import subprocess
import sys

import pytest
import torch

from common.build import planner
from common.check import assert_close
from common.check.attention import attention_float64, attention_pytorch
from common.paths import ROOT
from common.tests.devices import DEVICE, needs_hopper, of_gpus_hopper
from task4.ladder import call, rungs
from task4.ladder.benchmark import host_cost
from task4.ladder.call import ladder_attention
from task4.ladder.evidence.bars import finite_rows
from task4.ladder.rungs import BF16, FP16, FP32, RUNGS, fastest

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


def _qkv(device, *shape, dtype=FP16):
    return [torch.randn(shape, device=device).to(dtype) for _ in range(3)]


@pytest.mark.parametrize("device", DEVICES)
def test_the_default_is_a_rung_that_is_as_accurate_as_its_tensors(device):
    device = torch.empty(0, device=device).device
    for dtype in (FP32, FP16, BF16):
        for head_dim in (64, 128):
            assert fastest(device, dtype, head_dim).exact_in(dtype)
            assert fastest(device, dtype, head_dim, alignment=2 if dtype != FP32 else 4).vector == 1
        assert fastest(device, dtype, 80) is None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("how", ["pointer", "row stride"])
def test_what_a_vector_load_cannot_take_goes_to_a_rung_that_can(device, which, how, caplog):
    q, k, v = inputs = _qkv(device, 1, 40, 2, 64)
    if how == "pointer":
        odd = torch.empty(inputs[which].numel() + 1, dtype=FP16, device=device)[1:].view(
            1, 40, 2, 64
        )
    else:
        odd = torch.empty(1, 40, 2 * 64 + 3, dtype=FP16, device=device)[..., :128].unflatten(
            -1, (2, 64)
        )
    inputs[which] = odd.copy_(inputs[which])
    with caplog.at_level(logging.INFO, logger="task4.ladder"):
        got = ladder_attention(*inputs, causal=True)
    name = "qkv"[which]
    assert (
        f"instead of {fastest(q.device, FP16, 64, kv_len=40)}" in caplog.text
        and f"which {name} does not" in caplog.text
    )
    args = dict(axes=("batch", "row", "head", "column"))
    assert_close(
        got,
        attention_float64(*inputs, causal=True),
        attention_pytorch(*inputs, causal=True),
        **args,
    )
    with pytest.raises(
        ValueError, match=r"rung 9 .*loads 16 bytes at once, which " + name + r" .* [Rr]ungs 1 to 6"
    ):
        ladder_attention(*inputs, rung=9)


@pytest.mark.parametrize("device", DEVICES)
def test_strides_that_are_never_used_are_not_looked_at(device):
    q, k, v = _qkv(device, 1, 1, 1, 64)
    q = q.as_strided(q.shape, (3, 5, 7, 1))
    assert rungs.aligned_to(q) == 16
    assert torch.equal(ladder_attention(q, k, v, rung=10 if device == "cpu" else None), v)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rung", [None, 3])
def test_nothing_to_compute(device, rung):
    for batch, q_len, kv_len in ((0, 4, 4), (2, 0, 4), (2, 4, 0)):
        q = torch.randn(batch, q_len, 3, 64, device=device)
        k = torch.randn(batch, kv_len, 3, 64, device=device)
        out = ladder_attention(q, k, k, causal=True, rung=rung)
        assert out.shape == q.shape and out.dtype == q.dtype and out.device == q.device
        assert not out.any()


def test_the_parts_of_what_a_call_costs_the_host():
    """How much that may be is a bar of the ladder: python -m task4.ladder --bars."""
    cost = host_cost(*_qkv("cpu", 1, 1, 1, 64), rung=3)
    assert list(cost) == ["allocate", "dispatch and launch", "in all"]
    *parts, whole = cost.values()
    assert min(parts) > 0 and sum(parts) == pytest.approx(whole)


SHARED = """
import re, sys, torch
from common.build import KernelError
from task4.ladder import RUNGS, ladder_attention
for rung in RUNGS:
    if not rung.hopper and rung.capability == tuple(map(int, sys.argv[1].split("."))):
        for d in rung.head_dims:
            for dtype in rung.dtypes:
                q = torch.zeros(1, 130, 1, d, dtype=dtype)
                try:
                    ladder_attention(q, q, q, rung=rung.number)
                except KernelError as error:
                    print(rung.number, d, *re.findall(r"asks for (\\d+) bytes", str(error)))
"""


@pytest.mark.parametrize("capability, smallest", [("7.5", "sm_75"), ("8.0", "sm_86")])
def test_every_gpu_that_a_rung_is_for_has_the_shared_memory_that_it_takes(capability, smallest):
    run = [sys.executable, "-c", SHARED, capability]
    done = subprocess.run(
        run,
        cwd=ROOT,
        env=os.environ | {"CUDA_ON_CPU_ARCH": smallest},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""  # rung, head_dim and bytes that a block cannot have


def test_the_rungs_and_their_files_agree():
    for rung in RUNGS:
        assert planner.architectures(rung.source) == (("sm_90a",) if rung.hopper else ()), rung
        assert planner.is_for_cpu(rung.source), rung
    assert [r.number for r in RUNGS] == list(range(1, len(RUNGS) + 1))
    assert sorted(rungs.FASTEST_FIRST) == [r.number for r in RUNGS]


HOPPER = [rung for rung in RUNGS if rung.hopper]


@of_gpus_hopper
@pytest.mark.parametrize("rung", HOPPER, ids=str)
def test_nan_reaches_the_rows_that_see_it_and_no_others(rung):
    """A sum that is NaN must not be taken for one that recomputing the tile would repair."""
    for dtype in rung.dtypes:  # with so many keys a maximum may be lazy
        q, k, v = _qkv(DEVICE, 1, 2304, 2, 64, dtype=dtype)
        q = q if DEVICE == "cuda" else q[:, :330]
        k[0, 40, 0] = torch.nan  # every row of head 0 sees it
        q[0, 300, 1] = torch.inf
        bad = ladder_attention(q, k, v, rung=rung.number).isnan().any(-1)[0]
        assert bad[:, 0].all()
        assert bad[:, 1].nonzero().flatten().tolist() == [300]


@of_gpus_hopper
@pytest.mark.parametrize("rung", HOPPER, ids=str)
def test_rows_to_which_an_infinite_key_gives_the_score_minus_infinity_are_finite(rung):
    for head_dim in rung.head_dims:
        finite, rows = finite_rows(rung, head_dim)
        assert finite == rows > 0


@needs_hopper
@pytest.mark.parametrize("rung", [r for r in RUNGS if r.counter], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_launch_leaves_its_counter_at_0(rung, head_dim):
    """Tiles are counted if there are more of them than SMs; those computed again are not counted twice."""
    device = torch.device("cuda", torch.cuda.current_device())
    counter = call.counter(device)
    for _ in range(3):
        for rows in (2500, 300):  # 420 or 600 tiles, and 90
            q, k, v = _qkv("cuda", 1, rows, 30, head_dim)
            k[:, :200] *= 60  # scores above the first ones by more than exp() can take
            got = ladder_attention(q, k, v, causal=True, rung=rung.number)
            assert counter.item() == 0
            assert_close(
                got,
                attention_float64(q, k, v, causal=True),
                attention_pytorch(q, k, v, causal=True),
                axes=("batch", "row", "head", "column"),
            )
    assert call.counter(device) is counter
    with torch.cuda.stream(torch.cuda.Stream()):
        assert call.counter(device) is not counter
