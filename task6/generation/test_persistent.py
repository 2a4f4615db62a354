"""A step in one launch against the decoder's steps, and what it does not take."""

import math
import random
from dataclasses import replace

import pytest
import torch

from common.check.rng import new_seed
from task6.generation import Decoder, Weights
from task6.generation.config import Config
from task6.generation.persistent import PersistentStep

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability()[0] == 9
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")


def random_case(r):
    """A config, dtype, batch and length of prompts."""
    kv_heads, group = r.choice((1, 2, 8)), r.choice((1, 2, 3, 4, 8))
    config = Config(
        2, 8 * r.choice((8, 40, 256)), kv_heads * group, kv_heads, r.choice((64, 128)), 8 * r.choice((20, 128)),
        r.choice((100, 5001)), tied=r.random() < 0.5,
    )  # fmt: skip
    dtype = r.choice((torch.float32, torch.float16, torch.bfloat16))
    return config, dtype, r.randint(1, 8), r.choice((1, 7, 60, 700))


@needs_hopper
@pytest.mark.parametrize("part", range(4))
def test_the_same_logits_as_many_launches(part):
    for _ in range(6):
        seed = new_seed()
        r = random.Random(seed)
        torch.manual_seed(seed)
        config, dtype, batch, seq = random_case(r)
        weights = Weights.random(config, device=torch.device(DEVICE), dtype=dtype)
        many, one = (Decoder(weights, batch, seq + 9, persistent=p) for p in (False, True))
        prompt = torch.randint(config.vocab, (batch, seq), device=DEVICE)
        assert torch.equal(many.prefill(prompt), one.prefill(prompt))
        for _ in range(5):
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


@needs_hopper
def test_float32_tokens_are_the_decoders():
    torch.manual_seed(0)
    config = Config(3, 512, 8, 2, 64, 1024, 1000)
    weights = Weights.random(config, device=torch.device(DEVICE), dtype=torch.float32)
    prompt = torch.randint(1000, (3, 20), device=DEVICE)
    many, one = (Decoder(weights, 3, 200, persistent=p) for p in (False, True))
    assert torch.equal(many.generate(prompt, 150), one.generate(prompt, 150))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (9, "a persistent step takes from 1 to 8 sequences; got 9"),
        pytest.param(
            1, "runs on a Hopper GPU alone; got tensors on cpu",
            marks=pytest.mark.skipif(HOPPER, reason="it may run here"),
        ),
    ],
)  # fmt: skip
def test_what_it_does_not_take(batch, message):
    config = Config(1, 64, 1, 1, 64, 64, 50)
    weights = Weights.random(config, device=torch.device(DEVICE), dtype=torch.float32)
    with pytest.raises(ValueError, match=message):
        Decoder(weights, batch, 9, persistent=True)


def test_a_norm_that_begins_elsewhere():
    config = Config(1, 64, 1, 1, 64, 64, 50)
    weights = Weights.random(config, device=torch.device(DEVICE), dtype=torch.float32)
    decoder = Decoder(weights, 1, 9)
    model = replace(decoder._step_model(), norm=torch.ones(65, device=DEVICE)[1:])
    with pytest.raises(ValueError, match=r"must begin at multiples of 16 bytes; got .*\(64,\)"):
        PersistentStep(model, decoder.tokens, decoder.lengths, decoder.logits, blocks=1)
