"""A step in one launch against the decoder's steps, and what it does not take."""

import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from common.build import using
from common.check.rng import new_seed
from common.tests.devices import DEVICE, of_gpus_hopper
from task5.ladder import gpu
from task6.generation import CONFIGS, Decoder, Weights, persistent
from task6.generation import decoder as decoder_module
from task6.generation.benchmark import Case, prepare
from task6.generation.config import Config
from task6.generation.parallel import Group
from task6.generation.persistent import PersistentStep

CASES, STEPS = (6, 5) if DEVICE == "cuda" else (3, 2)


def random_case(r):
    """A config, dtype, batch and length of prompts."""
    kv_heads, group = r.choice((1, 2, 8)), r.choice((1, 2, 3, 4, 8))
    config = Config(
        r.randint(1, 3), 64 * r.choice((1, 5, 32 if DEVICE == "cuda" else 17)), kv_heads * group, kv_heads, r.choice((64, 128)), 64 * r.choice((3, 16)),
        r.choice((100, 5001)), tied=r.random() < 0.5,
    )  # fmt: skip
    dtype = r.choice((torch.float32, torch.float16, torch.bfloat16))
    return config, dtype, r.randint(1, 8), r.choice((1, 7, 60, 700 if DEVICE == "cuda" else 200))


@of_gpus_hopper
@pytest.mark.parametrize("part", range(4))
def test_the_same_logits_as_many_launches(part):
    for _ in range(CASES):
        seed = new_seed()
        r = random.Random(seed)
        torch.manual_seed(seed)
        config, dtype, batch, seq = random_case(r)
        weights = Weights.random(config, device=torch.device(DEVICE), dtype=dtype)
        many, one = (Decoder(weights, batch, seq + 9, persistent=p) for p in (False, True))
        prompt = torch.randint(config.vocab, (batch, seq), device=DEVICE)
        assert torch.equal(many.prefill(prompt), one.prefill(prompt))
        for _ in range(STEPS):
            one.tokens.copy_(many.tokens)
            many.step()
            one.logits.fill_(math.nan)
            one.step()
            assert torch.equal(one.lengths, many.lengths)
            unit = torch.finfo(dtype).eps * many.logits.abs().max()
            assert (one.logits - many.logits).abs().max() <= (
                64 if dtype == torch.float32 else 8
            ) * unit, seed
            assert torch.equal(one.tokens[:, 0], one.logits.argmax(-1)), seed


@of_gpus_hopper
def test_float32_tokens_are_the_decoders():
    torch.manual_seed(0)
    config = Config(3, 512, 8, 2, 64, 1024, 1000)
    weights = Weights.random(config, device=torch.device(DEVICE), dtype=torch.float32)
    prompt = torch.randint(1000, (3, 20), device=DEVICE)
    many, one = (Decoder(weights, 3, 200, persistent=p) for p in (False, True))
    tokens = 150 if DEVICE == "cuda" else 20
    assert torch.equal(many.generate(prompt, tokens), one.generate(prompt, tokens))


@of_gpus_hopper
@pytest.mark.skipif(
    DEVICE == "cpu", reason="there a meeting makes all results visible, with or without tags"
)
@pytest.mark.parametrize(
    "config, dtype, batch",
    [
        (Config(12, 768, 12, 12, 64, 1536, 5000), torch.float32, 1),
        (Config(8, 2048, 32, 8, 64, 8192, 5000), torch.bfloat16, 1),
        (Config(12, 768, 12, 12, 64, 1536, 5000), torch.float32, 7),
        (Config(7, 2048, 32, 8, 64, 8192, 5000), torch.bfloat16, 4),
    ],
)
def test_the_same_text_each_time(config, dtype, batch):
    """A result that is read too early gives another one, sooner or later."""
    torch.manual_seed(new_seed())
    decoder = Decoder(
        Weights.random(config, device=torch.device(DEVICE), dtype=dtype),
        batch,
        600,
        persistent=True,
    )
    prompt = torch.randint(config.vocab, (batch, 300), device=DEVICE)
    first = decoder.generate(prompt, 250).clone()
    for _ in range(29):
        assert torch.equal(decoder.generate(prompt, 250), first)


@of_gpus_hopper
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_result_that_looks_like_an_empty_place(dtype):
    """A NaN with all bits set, as those of some embeddings: nobody waits for another value there."""
    config = Config(1, 128, 2, 1, 64, 192, 100)
    weights = Weights.random(config, device=torch.device(DEVICE), dtype=dtype)
    integers = torch.int32 if dtype == torch.float32 else torch.int16
    weights.embedding.view(integers)[7] = -1
    decoder = Decoder(weights, 2, 9, persistent=True)
    decoder.prefill(torch.randint(7, (2, 3), device=DEVICE))
    decoder.tokens.copy_(torch.tensor([[7], [3]]))
    decoder.step()
    assert decoder.logits[0].isnan().all() and decoder.logits[1].isfinite().all()


@of_gpus_hopper
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize(
    "hidden, inner, head_dim, dtype, batch",
    [
        (3584, 3872, 64, torch.float32, 1),
        (6464, 192, 64, torch.bfloat16, 1),
        (3104, 224, 64, torch.float32, 2),
        (4160, 224, 128, torch.float32, 3),
    ],
)
def test_rows_of_x_that_do_not_fit(monkeypatch, hidden, inner, head_dim, dtype, batch, blocks):
    """In shared memory: they come again for each pass over the weights."""
    monkeypatch.setattr(gpu, "ON_CPU", blocks)
    config = Config(1, hidden, 2, 1, head_dim, inner, 300)
    weights = Weights.random(config, device=torch.device(DEVICE), dtype=dtype)
    for norm in (weights.layers[0].attention_norm, weights.layers[0].mlp_norm):
        norm.uniform_(0.5, 1.5)
    many, one = (Decoder(weights, batch, 9, persistent=p) for p in (False, True))
    prompt = torch.randint(300, (batch, 5), device=DEVICE)
    assert torch.equal(many.prefill(prompt), one.prefill(prompt))
    many.step()
    one.logits.fill_(math.nan)
    one.step()
    unit = torch.finfo(dtype).eps * many.logits.abs().max()
    assert (one.logits - many.logits).abs().max() <= (64 if dtype == torch.float32 else 8) * unit


@of_gpus_hopper
def test_the_clocks_of_a_step():
    weights = tiny_weights()
    decoder, plain = (Decoder(weights, 1, 9, persistent=p) for p in (True, False))
    prompt = torch.tensor([[3, 1, 4]], device=DEVICE)
    assert torch.equal(decoder.prefill(prompt), plain.prefill(prompt))
    clocks = decoder.one_launch.clocks()
    assert clocks.shape == (5 + 3,) and clocks.dtype == torch.int64
    assert bool((clocks.diff() > 0).all()) and clocks[0] > 0
    assert torch.equal(decoder.tokens, plain.step()) and torch.equal(decoder.lengths, plain.lengths)


@pytest.mark.skipif(DEVICE == "cuda", reason="the check build is the CPU's")
@pytest.mark.parametrize("order, blocks", [("forward", 1), ("forward", 11), ("random", 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch, heads", [(1, 8), (1, 12), (3, 12)])
def test_the_check_build_finds_nothing(monkeypatch, batch, heads, dtype, order, blocks):
    monkeypatch.setattr(gpu, "ON_CPU", blocks)
    # Six heads of a group are two sets, of which one's blocks load the place where the other's append.
    config = Config(2, 128, heads, 2, 64, 192, 100)
    weights = Weights.random(config, device=torch.device(DEVICE), dtype=dtype)
    decoder = Decoder(weights, batch, 80, persistent=True)
    decoder.prefill(torch.randint(100, (batch, 70)))
    with using(check=True, order=order, seed=1, limit=120):
        decoder.step()


def tiny_weights():
    config = Config(1, 64, 1, 1, 64, 64, 50)
    return Weights.random(config, device=torch.device(DEVICE), dtype=torch.float32)


def test_more_sequences_than_it_takes():
    with pytest.raises(ValueError, match="a persistent step takes from 1 to 8 sequences; got 9"):
        Decoder(tiny_weights(), 9, 9, persistent=True)


def test_of_gpus_it_is_for_hopper(monkeypatch):
    decoder = Decoder(tiny_weights(), 1, 9)
    monkeypatch.setattr(persistent, "is_hopper", lambda device: False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with pytest.raises(ValueError, match="of GPUs, a persistent step runs on Hopper alone"):
        PersistentStep(decoder._step_model(), decoder.tokens, decoder.lengths, decoder.logits)


def test_which_way_a_decoder_takes_by_itself(monkeypatch):
    """On a Hopper one launch, where the kernel takes the model and the GPUs reach each other's memory."""
    decoder = Decoder(tiny_weights(), 1, 9, persistent=False)
    model = decoder._step_model()
    assert decoder.one_launch is None
    assert persistent.why_not(model, torch.zeros(1)) is None or DEVICE == "cuda"
    if DEVICE == "cpu":
        assert Decoder(tiny_weights(), 1, 9).one_launch is None
        assert not persistent.by_default(model, decoder.lengths)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    for hopper in (True, False):
        monkeypatch.setattr(persistent, "is_hopper", lambda device, hopper=hopper: hopper)
        assert persistent.by_default(model, decoder.lengths) is hopper
    monkeypatch.setattr(persistent, "is_hopper", lambda device: True)
    nine = torch.zeros(9, dtype=torch.int32, device=DEVICE)
    assert not persistent.by_default(model, nine)
    assert not persistent.by_default(replace(model, heads=3, layers=[*model.layers] * 81), nine[:1])
    two = Group(0, 2)
    assert not persistent.by_default(model, decoder.lengths, two)
    two._shared = torch.zeros(1)
    assert persistent.by_default(model, decoder.lengths, two)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU would have to run it")
def test_what_is_asked_for_by_name_is_what_runs(monkeypatch):
    monkeypatch.setattr(decoder_module, "by_default", lambda *_: True)  # as on a Hopper
    ways = [
        ({}, True),
        ({"persistent": False}, False),
        ({"fused": False}, False),
        ({"fused": True}, False),
    ]
    for options, one in ways:
        decoder = Decoder(tiny_weights(), 1, 9, **options)
        assert (decoder.one_launch is not None) is one, options
    config = CONFIGS["tiny"]
    case = Case("tiny", 1, 2, 2, "float32")
    for way, one in (
        ({}, False),
        ({"persistent": None}, True),
    ):  # "the decoder" of the tables is the launches
        decoder, _ = prepare(case, torch.device("cpu"), 0, Group(), **way)
        assert decoder.config == config and (decoder.one_launch is not None) is one


def test_the_pace_of_L2_ahead(monkeypatch):
    """Of 3.35 TB/s at 1.98 GHz, as an H100 has it: the clocks are in kHz, and the memory's has two edges."""
    gpu = SimpleNamespace(memory_clock_rate=2_619_000, memory_bus_width=5120, clock_rate=1_980_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    assert persistent._bytes_per_cycle(torch.device("cuda")) == pytest.approx(
        persistent.PACE * 3352e9 / 1.98e9, rel=1e-3
    )
    assert persistent._bytes_per_cycle(torch.device("cpu")) == math.inf
    for unknown in ("memory_clock_rate", "memory_bus_width", "clock_rate"):
        with monkeypatch.context() as hidden:
            hidden.setattr(gpu, unknown, 0)
            assert persistent._bytes_per_cycle(torch.device("cuda")) == math.inf


def test_a_norm_that_begins_elsewhere():
    decoder = Decoder(tiny_weights(), 1, 9)
    model = replace(decoder._step_model(), norm=torch.ones(65, device=DEVICE)[1:])
    with pytest.raises(ValueError, match=r"must begin at multiples of 16 bytes, .*; got .*\(64,\)"):
        PersistentStep(model, decoder.tokens, decoder.lengths, decoder.logits, blocks=1)


def test_rows_that_are_no_whole_lines():
    weights = Weights.random(
        Config(1, 64, 1, 1, 64, 72, 50), device=torch.device(DEVICE), dtype=torch.float32
    )
    with pytest.raises(ValueError, match=r"their rows of 128; got .*\(64, 72\)"):
        Decoder(weights, 1, 9, persistent=True)
    prompt = torch.tensor([[3, 1, 4]], device=DEVICE)
    assert len(Decoder(weights, 1, 9).generate(prompt, 3)) == 1  # in many launches


@pytest.mark.parametrize(
    "change, says",
    [
        (dict(heads=3), "kv_heads must divide heads; got 2 and 3"),
        (dict(cos=torch.ones(9, 64)), r"cos must be \(max_seq, 32\) float32"),
        (dict(sin=torch.ones(9, 32, dtype=torch.float64)), r"sin must be \(max_seq, 32\) float32"),
        (dict(cos=torch.ones(32, 9).T), "logits, cos and sin must be contiguous"),
        (dict(sin=torch.ones(8, 32)), "sin must have the cache's 9 rows; got 8"),
        (dict(positions=torch.ones(8, 64)), "positions must have the cache's 9 rows; got 8"),
        (
            dict(layers=[{"up": torch.ones(128, 64), "up_bias": torch.ones(128)}]),
            "swiglu has neither",
        ),
    ],
)
def test_models_that_it_does_not_take(change, says):
    config = Config(1, 64, 2, 2, 64, 64, 50)
    weights = Weights.random(config, device=torch.device("cpu"), dtype=torch.float32)
    decoder = Decoder(weights, 1, 9)
    with pytest.raises(ValueError, match=says):
        PersistentStep(
            replace(decoder._step_model(), **change),
            decoder.tokens,
            decoder.lengths,
            decoder.logits,
        )


def test_logits_of_another_shape():
    decoder = Decoder(tiny_weights(), 1, 9)
    with pytest.raises(ValueError, match=r"logits must be \(1, 50\) float32"):
        PersistentStep(
            decoder._step_model(), decoder.tokens, decoder.lengths, decoder.logits[:, :49]
        )
