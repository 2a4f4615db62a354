"""Which kernel a prompt gets: a rung of the ladder on a GPU where one is faster, otherwise task 4's own."""

import subprocess
import sys
from unittest import mock

import pytest
import torch

from common.paths import ROOT
from task4 import ladder, prefill
from task4.ladder.rungs import RUNGS, by_number
from task4.prefill import fast_attention
from task6.test import count_launches

OWN = "task 4"


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    device = property(lambda self: torch.device("cuda", 0))


@pytest.fixture
def ran(monkeypatch):
    """The kernels that were called, one after another: ``OWN`` or a rung's number. The ladder's choice is ``ran.best``."""

    class Ran(list):
        best, asked = None, []

    ran = Ran()

    def fastest(*of):
        ran.asked.append(of)
        return ran.best

    monkeypatch.setattr(ladder, "fastest", fastest)
    monkeypatch.setattr(ladder, "choose", lambda *of: (ran.best, ""))
    monkeypatch.setattr(ladder, "ladder_attention", lambda *qkv, **_: ran.append(ran.best.number))
    monkeypatch.setattr(prefill, "flash_attention", lambda *qkv, **options: ran.append(OWN))
    return ran


def qkv():
    return [torch.randn(1, 9, 2, 64).as_subclass(OnGpu) for _ in "qkv"]


@pytest.mark.parametrize("rung", [None, *RUNGS], ids=str)
def test_only_a_faster_rung_replaces_the_own_kernel(ran, rung):
    ran.best = rung
    fast_attention(*qkv(), causal=True)
    assert ran == [OWN if rung is None or rung.number in ladder.SLOWER else rung.number]
    assert ran.asked[-1] == (torch.device("cuda", 0), torch.float32, 64)


def test_a_rung_for_other_alignments_may_be_slower_than_the_own_kernel(ran, monkeypatch, caplog):
    ran.best = by_number(3)  # the fastest that can load these
    monkeypatch.setattr(ladder, "fastest", lambda *of: by_number(14))
    with caplog.at_level("INFO", logger="task4.ladder"):
        fast_attention(*qkv())
    assert ran == [OWN]
    assert "task 4's own kernel instead of rung 3" in caplog.text


def test_few_queries_against_many_keys_are_split(ran, monkeypatch):
    ran.best = by_number(14)
    chunk = mock.Mock()
    monkeypatch.setattr(prefill, "chunk_attention", chunk)
    monkeypatch.setattr(prefill, "faster_than_the_ladder", lambda q, k, v: k.shape[1] > q.shape[1])
    q, k, v = qkv()
    fast_attention(q, k, v, causal=True)
    assert ran == [14] and not chunk.called
    fast_attention(q[:, :5], k, v, causal=True)
    assert ran == [14] and chunk.call_args.kwargs == {"causal": True, "scale": None}


@pytest.mark.parametrize(
    "options",
    [
        {"seqlens_k": torch.ones(1, dtype=torch.int32)},
        {"leftpad_k": torch.ones(1, dtype=torch.int32)},
        {"scale": 0.0},
        {"scale": -1.0},
    ],
)
def test_what_no_rung_takes_goes_to_the_own_kernel(ran, options):
    ran.best = by_number(14)
    fast_attention(*qkv(), **options)
    assert ran == [OWN]


def test_the_cpu_runs_the_own_kernel(ran):
    ran.best = by_number(14)
    fast_attention(*(torch.randn(1, 9, 2, 64) for _ in "qkv"))
    assert ran == [OWN] and not ran.asked


@pytest.mark.parametrize("rung", [None, *RUNGS], ids=str)
def test_float32_in_16_bit_parts_is_what_such_a_rung_does(ran, rung):
    ran.best = rung
    on_gpu, on_cpu = qkv()[0], torch.randn(1, 9, 2, 64)
    assert prefill.splits_float32(on_gpu) == bool(rung and rung.split)
    assert not prefill.splits_float32(on_cpu)


def test_a_named_rung_runs():
    q, k, v = (torch.randn(1, 9, 2, 64, dtype=torch.float16) for _ in "qkv")
    with mock.patch.object(ladder, "ladder_attention") as ladder_attention:
        fast_attention(q, k, v, causal=True, rung=9)
    ladder_attention.assert_called_once_with(q, k, v, causal=True, scale=None, rung=9)


@pytest.mark.parametrize("by_a_rung", [False, True])
def test_a_rung_counts_as_task_4s_kernel(by_a_rung, monkeypatch):
    monkeypatch.setattr(prefill, "_a_rung_is_faster", lambda q: by_a_rung)
    q, k, v = (torch.randn(1, 9, 2, 64, dtype=torch.float16) for _ in "qkv")
    with count_launches() as launches:
        fast_attention(q, k, v)
        fast_attention(q, k, v, causal=True)
    assert launches == {"task4 flash_attention": 2}


def test_a_chunk_counts_as_task_4s_kernel(monkeypatch):
    monkeypatch.setattr(prefill, "_a_rung_is_faster", lambda q: True)
    monkeypatch.setattr(prefill, "faster_than_the_ladder", lambda q, k, v: True)
    monkeypatch.setattr(prefill, "chunk_attention", lambda q, k, v, **_: q)
    q, k, v = (torch.randn(1, 9, 2, 64, dtype=torch.float16) for _ in "qkv")
    with count_launches() as launches:
        fast_attention(q, k, v, causal=True)
    assert launches == {"task4 flash_attention": 1}


def test_a_broken_ladder_is_not_hidden():
    """An import that fails inside the ladder ends the program instead of choosing another kernel."""
    breaks = "import sys; sys.modules['task4.ladder.rungs'] = None; import task5.attention"
    done = subprocess.run([sys.executable, "-c", breaks], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0 and "task4.ladder" in done.stderr
