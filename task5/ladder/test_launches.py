"""Decode among other launches: one that is not complete yet, and those of a graph."""

import math

import pytest
import torch

from common.check.rng import new_seed
from common.tests.devices import DEVICE
from task5.ladder import append_rope, call, decode_attention
from task5.ladder.cases import RUNGS, Case


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("new_keys", [None, 0])
@pytest.mark.parametrize("rung", RUNGS)
def test_lengths_may_change_just_before(rung, new_keys, paged):
    """A launch may begin before the one that changes the lengths is complete."""
    case = Case(5, (torch.float16,))
    case.leftpad, case.room = [0] * case.batch, case.k.shape[1]
    k, v = (t.nan_to_num(0.5) for t in (case.k, case.v))
    own, table = (k, v), None
    if paged:
        pages = -(-k.shape[1] // 16)
        table = torch.arange(case.batch * pages, dtype=torch.int32, device=DEVICE)
        table = table.view(case.batch, pages)
        rest = (0, 0, 0, 0, 0, 16 * pages - k.shape[1])
        own = [torch.nn.functional.pad(t, rest).unflatten(1, (-1, 16)).flatten(0, 1) for t in own]
    lengths = torch.zeros(case.batch, dtype=torch.int32, device=DEVICE)
    want = [
        decode_attention(case.q, k, v, seqlens_k=torch.full_like(lengths, n), rung=1)
        for n in range(0, 90, 3)
    ]
    got = []

    def steps():
        lengths.fill_(-3)
        for _ in want:
            lengths.add_(3)
            options = dict(seqlens_k=lengths, block_table=table, rung=rung, new_keys=new_keys)
            got.append(decode_attention(case.q, *own, **options))

    steps()
    if DEVICE == "cuda":
        got.clear()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            steps()
        graph.replay()
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=2e-3, rtol=0)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("rung", RUNGS)
def test_the_launch_ahead_writes_the_newest_keys(rung, paged):
    """Older keys are loaded before that launch is complete, the newest ones after it, with their page numbers."""
    torch.manual_seed(new_seed())
    batch, heads, kv_heads, q_len = 2, 8, 2, 3
    room = 640 if DEVICE == "cpu" else 2560
    cache = torch.randn(2, batch, room, kv_heads, 128, device=DEVICE).half()
    lengths = torch.zeros(batch, dtype=torch.int32, device=DEVICE)
    begin = torch.tensor([room // 2, 20], dtype=torch.int32, device=DEVICE)
    qkv = torch.randn(30, batch, q_len, heads + 2 * kv_heads, 128, device=DEVICE).half()
    table = None
    if paged:
        table = torch.randperm(batch * room // 64).view(batch, -1).to(DEVICE, torch.int32)
        cache = cache.view(2, -1, 64, kv_heads, 128)

    def steps(own, alone=False):
        lengths.copy_(begin)
        outs = []
        for new in qkv:
            lengths.add_(q_len)
            q, k, v = new.split((heads, kv_heads, kv_heads), 2)
            append_rope(q, k, v, *own, seqlens_k=lengths, block_table=table)
            if alone:
                torch.cuda.synchronize()
            options = dict(seqlens_k=lengths, block_table=table, rung=rung, new_keys=q_len)
            outs.append(decode_attention(q, *own, **options))
        return outs

    want, own = steps(cache.clone(), alone=DEVICE == "cuda"), cache.clone()
    got = steps(own)
    if DEVICE == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = steps(own)
        own.copy_(cache)
        graph.replay()
        got, want = got + again, want + want
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA graphs")
@pytest.mark.parametrize("rung", RUNGS)
def test_graphs_may_be_replayed_in_another_order_than_captured(rung):
    q, k, v = (
        torch.randn(2, n, h, 64, device=DEVICE).half() for n, h in ((1, 4), (3000, 2), (3000, 2))
    )
    want = decode_attention(q, k, v, rung=rung)
    graphs, outs = [torch.cuda.CUDAGraph() for _ in range(3)], []
    for graph in graphs:
        with torch.cuda.graph(graph):
            outs.append([decode_attention(q, k, v, rung=rung) for _ in range(3)])
    for i in (2, 0, 1, 2):
        for out in outs[i]:
            out.fill_(math.nan)
        graphs[i].replay()
        assert torch.equal(decode_attention(q, k, v, rung=rung), want)
        assert all(torch.equal(out, want) for out in outs[i])


@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA graphs")
def test_a_graph_zeroes_its_counters_once():
    """Between two launches of a capture, a node that zeroes would end what they overlap."""
    q, k = (
        torch.randn(1, 1, 4, 64, device=DEVICE).half(),
        torch.randn(1, 9000, 1, 64, device=DEVICE).half(),
    )
    seen, graphs = [], [torch.cuda.CUDAGraph() for _ in range(2)]
    for graph in graphs:
        with torch.cuda.graph(graph):
            for _ in range(3):
                decode_attention(q, k, k, rung=1)
                seen.append([t.data_ptr() for t in call.workspace(q.device, 1, 1)])
    assert seen[0] == seen[1] == seen[2] and seen[3] == seen[4] == seen[5] and seen[0] != seen[3]
    decode_attention(q, k, k, rung=1)
    assert [
        t.data_ptr() for t in call.workspace(q.device, 1, 1)
    ] not in seen  # outside of a capture
