"""Measuring generation: the sides, their times, the parts of a step, and many tokens."""

import sys
from dataclasses import replace

import pytest
import torch

from common.memory import NotEnoughMemory
from common.tests.devices import DEVICE, HOPPER, of_gpus_hopper
from task6.generation import (
    CONFIGS,
    Config,
    Decoder,
    Weights,
    benchmark,
    endurance,
    peers,
)
from task6.generation import breakdown as parts
from task6.generation.benchmark import OURS, Case, run
from task6.generation.breakdown import GAPS
from task6.generation.measure import generate, measure, step_bytes
from task6.generation.parallel import Group

PLAIN = Config(2, 128, 2, 2, 64, 512, 61)  # task 6's model has this architecture too
GROUPED = Config(2, 256, 4, 2, 64, 320, 97, tied=True, rope_base=500.0, eps=1e-5)
TINY = Case("tiny", 2, 5, 6, "float32")
READ = 4000.0  # GB/s


def made(config, batch=2, length=30):
    torch.manual_seed(4)
    weights = Weights.random(config, device=DEVICE)
    prompt = torch.randint(config.vocab, (batch, 5), device=DEVICE)
    return weights, Decoder(weights, batch, length, persistent=False), prompt


# Times ------------------------------------------------------------------------------------------------------


def test_a_speed():
    weights, decoder, prompt = made(GROUPED)
    tokens = generate(decoder, prompt, 8)
    assert torch.equal(tokens, decoder.generate(prompt, 8))
    speeds = measure({"a": decoder, "b": decoder}, prompt, 8, rounds=2)
    for speed in speeds.values():
        assert speed.first.n == 2 and speed.between.n == 2 * 7
        assert 0 < speed.between.p10_ms <= speed.between.median_ms <= speed.p99_ms
    # tied: the last product reads all of the embedding
    assert step_bytes(decoder, 5 + 4) == 4 * (GROUPED.weights + 2 * 2 * 2 * 2 * 64 * (5 + 4))
    with pytest.raises(ValueError, match="two tokens or more"):
        measure({"a": decoder}, prompt, 1)


@pytest.mark.parametrize("make", [peers.Readable, peers.HuggingFace, peers.compiled])
def test_every_side_gives_the_same_tokens(make, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda run, **how: run)  # it would take ten seconds
    weights, decoder, prompt = made(PLAIN)
    before = [t.clone() for t in vars(weights.layers[1]).values()]
    side = make(weights, 2, 30)
    want = generate(decoder, prompt, 12)
    for _ in range(2):  # the second text on the same cache
        assert torch.equal(generate(side, prompt, 12), want)
    assert all(map(torch.equal, before, vars(weights.layers[1]).values()))


def test_the_sides_share_the_weights():
    weights, _, _ = made(PLAIN)
    for model in (peers.Readable(weights, 1, 9)._model, peers.llama(weights)):
        mine = {t.untyped_storage().data_ptr() for t in vars(weights.layers[0]).values()}
        theirs = {w.untyped_storage().data_ptr() for w in model.parameters()}
        assert mine <= theirs


def test_grouped_heads_are_not_task_6s():
    weights, _, _ = made(GROUPED)
    with pytest.raises(ValueError, match="it has as many kv heads as heads"):
        peers.Readable(weights, 2, 30)


def test_a_case_is_measured(monkeypatch):
    monkeypatch.setitem(CONFIGS, "plain", PLAIN)

    def fails(*_):
        raise RuntimeError("a long story\nno such shape")

    case, device = Case("plain", 2, 5, 6, "float32"), torch.device(DEVICE)
    found = run(case, device=device, peers=peers.PEERS | {"library": fails}, profile=True)
    names = [peers.ONE_LAUNCH] * HOPPER + [peers.READABLE, peers.LLAMA]
    assert list(found.speeds) == [OURS, *names]
    assert found.same == dict.fromkeys(names, 6)
    assert found.left_out.pop("library") == "no such shape"
    reason = "a step in one launch is timed on a Hopper GPU alone"
    assert found.left_out == ({} if HOPPER else {peers.ONE_LAUNCH: reason})
    assert len(found.begins) == 6 and found.parts and case.length == 5 + parts.STEPS + 2
    assert found.held == 4 * (PLAIN.weights + PLAIN.cache(2, case.length))
    if DEVICE == "cuda":
        assert found.allocated / found.held >= 1 and found.allocated <= found.reserved


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": "gpt"}, "the configurations are tiny, course, llama-3.2-1b; got 'gpt'"),
        ({"batch": 0}, "--batch must be at least 1; got 0"),
        ({"prompt": -3}, "--prompt must be at least 1; got -3"),
        ({"new_tokens": 1}, "--new-tokens must be at least 2; got 1"),
        ({"dtype": "int8"}, "dtype must be one of float32, float16, bfloat16; got 'int8'"),
    ],
)
def test_cases_that_make_no_sense(change, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, **change)


def test_processes_of_one_host_share_its_memory(monkeypatch):
    """On a CPU; each GPU has its own."""
    case, alone = Case("course", 1, 4, 2, "float32"), []
    monkeypatch.setattr(benchmark, "expect_room", lambda what, n, *_: alone.append((what, n)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for device in ("cpu", "cuda"):
        case.expect_room(torch.device(device), Group(0, 2))
    assert alone[0][1] == 2 * alone[1][1] and alone[0][0].endswith(", of 2 processes,")


def test_what_does_not_fit_is_known_before_anything_is_made(monkeypatch):
    monkeypatch.setattr(benchmark.Weights, "random", lambda *_, **__: pytest.fail("made"))
    c, case = CONFIGS["tiny"], TINY
    weights_alone = 4 * c.weights  # fit, but not with the cache
    monkeypatch.setattr("task6.generation.weights.free_memory", lambda _: (weights_alone, 0))
    with pytest.raises(NotEnoughMemory, match="weights, cache and .* need 7 MiB; 6 MiB are free"):
        run(case, device=torch.device(DEVICE))


# The parts of a step ----------------------------------------------------------------------------------------


def test_the_parts_of_a_step_add_up():
    product, append, decode = "void tensor_core_kernel<__half, 8>(Product)", "void append_kernel<T>(A)", "decode_kernel"  # fmt: skip
    sample = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>>>(R)"
    other = "void at::native::(anonymous namespace)::some_kernel<4>(int)"
    step = [product, append, decode, product, product, product, product, sample, other]
    ran, now = [], 0.0
    for name in step * 2:
        ran.append((name, now, now + 10.0))
        now += 8.0 if name == append else 12.0  # the kernel behind append begins 2 us early
    found = {p.name: p for p in parts.parts_of(ran[::-1], 2, 1, {"o": 8e6, "attention": 4e6})}
    assert set(found) == {*parts.PRODUCTS, parts.LOGITS, "append, RoPE", "attention", "sampling", "some_kernel", GAPS}  # fmt: skip
    assert found["attention"].us == 8.0 and found["o"].us == 10.0
    assert found["o"].calls == 1 and found["o"].kernel == "tensor_core_kernel"
    assert found["o"].floor(4000.0) == 2.0 and found["down"].floor(4000.0) is None
    assert found[GAPS].calls == 0 and found[GAPS].us == (2 * 8 - 1) * 2.0 / 2
    assert sum(p.us for p in found.values()) == pytest.approx((now - 2.0) / 2)
    merged = parts.parts_of(ran[:-3], 2, 1, {"product": 1e6})  # an unknown order
    assert {p.name for p in merged} >= {"product"} and not {p.name for p in merged} & {"o"}
    assert parts.parts_of([], 2, 1, {}) == []


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("void float_kernel<4>(Product)", "product"),
        ("nvjet_hsh_64x8_64x16_4x1_v_bz_TNT", "product"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16>(float)", "product"),
        ("void add_rms_norm_kernel<float>(float*)", "norm"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgs)", "sum of processes"),
        ("void at::native::vectorized_gather_kernel<16, long>(char*)", "embedding"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD"),
    ],
)
def test_what_a_kernel_does(kernel, kind):
    assert parts._kind(kernel) == kind


def test_the_bytes_of_the_parts_are_those_of_a_step():
    _, decoder, _ = made(GROUPED)
    moved = parts.part_bytes(decoder, 9)
    assert moved["product"] == sum(moved[name] for name in (*parts.PRODUCTS, parts.LOGITS))
    norms = 4 * GROUPED.hidden * (2 * GROUPED.layers + 1)
    assert moved["product"] + moved["attention"] + norms == step_bytes(decoder, 9)


@of_gpus_hopper
def test_the_parts_of_a_step_in_one_launch():
    config = Config(2, 64, 2, 1, 64, 64, 50)
    weights = Weights.random(config, device=torch.device(DEVICE), dtype=torch.float32)
    decoder = Decoder(weights, 1, 3 + parts.STEPS, persistent=True)
    found = parts.phases(decoder, torch.randint(50, (1, 2), device=DEVICE), 100.0)
    assert {part.name for part in found} == {
        "embedding",
        "attention",
        *parts.PRODUCTS,
        parts.LOGITS,
    }
    assert sum(part.us for part in found) == pytest.approx(100) and found[-1].us > 0
    moved = parts.part_bytes(decoder, 2 + 1 + parts.STEPS / 2)
    assert all(part.bytes == moved[part.name] for part in found)


# Endurance --------------------------------------------------------------------------------------------------


class Repeats:
    """A decoder whose tokens are 0, 1, 2 ... in each text; with ``wrong`` once another one."""

    def __init__(self, wrong=None):
        self.batch, self.max_seq_len, self.config = 2, 12, GROUPED
        self.tokens, self.wrong, self.steps = torch.zeros(2, 1, dtype=torch.int64), wrong, 0

    def prefill(self, prompt):
        self.tokens = torch.zeros_like(self.tokens)
        return self.step()

    def step(self):
        self.steps += 1
        self.tokens = self.tokens + (2 if self.steps == self.wrong else 1)
        return self.tokens


def test_many_tokens_twice(monkeypatch):
    said = []
    grid = endurance.run(Repeats(), 5, 7, 20, 1, said.append)
    assert grid.bars == [True] * 2 and said[-1].startswith("20 of 20 tokens, again: ")
    assert grid.title.startswith("20 tokens for each of 2 sequences, in 3 texts, twice, in ")
    assert not endurance.run(Repeats(wrong=9), 5, 7, 20, 1, said.append).bars[0]
    with pytest.raises(ValueError, match="a prompt of 5 and 8 new tokens need .* has 12"):
        endurance.run(Repeats(), 5, 8, 20, 1, said.append)
    growing = iter([(0, 0, 0), (1, 2, 10**8)])
    monkeypatch.setattr(endurance, "memory", lambda device: next(growing, (0, 0, 0)))
    with monkeypatch.context() as on_gpu:
        on_gpu.setattr(torch.Tensor, "is_cuda", True)
        bars = endurance.run(Repeats(), 5, 7, 20, 1, said.append).bars
    assert bars == [True, False, False, False]
    assert (
        len(endurance.run(Repeats(), 5, 7, 7, 1, said.append).bars) == 1
    )  # no text behind the first look
    with pytest.raises(NotEnoughMemory, match="the tokens of both runs need .* are free on cpu"):
        endurance.run(Repeats(), 5, 7, 10**20, 1, said.append)


def test_the_memory_of_this_process_is_known():
    assert endurance.memory(torch.device("cpu"))[2] > 10**7 or sys.platform != "linux"
