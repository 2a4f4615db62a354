"""GPT-2's text as it comes, and what generate adds to a prompt."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from common.build import KernelError
from common.tests import models
from common.tests.models import PROMPTS
from task7 import attention
from task7.attention import kernel_calls
from task7.bisection import bisect
from task7.inference import PROMPT, TINY, ModelWithCustomAttention
from task7.model import LEAST_TEMPERATURE
from task7.streaming import Meter, NotFinite, texts_of

model, planted = models.model, models.planted  # fixtures
said_by_transformers = models.said_by_transformers


def joined(pieces):
    return ["".join(column) for column in zip(*pieces, strict=True)]


def generating():
    return [t for t in threading.enumerate() if t.name.startswith("generate")]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cache": "static"},
        {"do_sample": True, "seed": 3, "top_p": 0.9},
        # tokens at random: bytes that are no character, and sequences that end early
        {"do_sample": True, "seed": 4, "temperature": 100.0, "top_k": 0},
    ],
    ids=["greedy", "static", "sampled", "random"],
)
def test_the_pieces_are_what_generate_adds(model, options):
    for prompts in (PROMPTS, PROMPTS[:1]):
        expected = model.generate(prompts, 40, **options)
        pieces = list(model.stream(prompts, 40, **options))
        assert [p + text for p, text in zip(prompts, joined(pieces), strict=True)] == expected
        assert 40 <= len(pieces) <= 41  # one more for bytes that are still no character
    assert not generating()


def test_one_prompt_may_be_a_string(model):
    (text,) = joined(model.stream(PROMPT, 20))
    assert PROMPT + text == model.generate(PROMPT, 20)


def test_a_text_that_ends_early(model, monkeypatch):
    step = 7
    tokens, mask = model.encode(PROMPTS)
    whole = model.generate_tokens(tokens, mask, 20)[:, tokens.shape[1] :]
    end = int(whole[1, step - 1])
    monkeypatch.setattr(model.model.generation_config, "eos_token_id", end)
    meter = Meter(end)
    steps = torch.stack(list(meter.watch(model.stream_tokens(tokens, mask, 20))), dim=1)
    got = model.generate_tokens(tokens, mask, 20)[:, tokens.shape[1] :]
    assert torch.equal(steps, got) and meter.steps == steps.shape[1]
    lengths = [row.index(end) + 1 if end in row else len(row) for row in got.tolist()]
    assert min(lengths) < max(lengths) and meter.tokens == sum(lengths)
    assert 0 < meter.first <= meter.seconds and f"{sum(lengths)} tokens in" in str(meter)


def test_a_character_comes_when_it_is_whole(model):
    rows = [model.tokenizer(text)["input_ids"] for text in ("é€😀x", "€" * 4)]
    steps = min(len(row) for row in rows)
    rows = [row[:steps] for row in rows]
    pieces = list(
        texts_of((torch.tensor(step) for step in zip(*rows, strict=True)), 2, model.decode)
    )
    assert joined(pieces) == [model.decode(row) for row in rows]
    assert "" in {row[0] for row in pieces}
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(row[0] for row in pieces[:-1])


def test_an_error_in_the_thread_is_raised(model, monkeypatch):
    def fail(*args, **options):
        raise KernelError("the launch failed")

    pieces = model.stream("Once upon", 20)
    assert next(pieces)  # the prompt's own kernel works
    monkeypatch.setattr(attention, "flash_attention_decode", fail)
    with pytest.raises(KernelError, match="the launch failed"):
        list(pieces)
    assert not generating()


def test_closing_the_iterator_ends_the_thread(model):
    pieces = model.stream("Once upon", 1000)
    next(pieces)
    assert generating()
    pieces.close()
    assert not generating()
    calls = kernel_calls.total()
    assert model.generate("Once", 1) and kernel_calls.total() == calls + 4  # the lock is free


def test_nothing_runs_before_the_first_piece_is_wanted(model):
    calls = kernel_calls.total()
    pieces = model.stream("Once upon", 1000)
    assert kernel_calls.total() == calls and not generating()
    del pieces


def test_texts_at_once_do_not_share_random_numbers(model):
    state = torch.get_rng_state()

    def sample(seed):
        return joined(model.stream("Once", 30, do_sample=True, seed=seed))

    alone = [sample(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(sample, range(4))) == alone
    assert torch.equal(torch.get_rng_state(), state)


def test_top_p(model):
    greedy = model.generate("Once upon", 20)
    assert model.generate("Once upon", 20, 5.0, 0, do_sample=True, seed=1, top_p=1e-6) == greedy
    assert model.generate("Once upon", 20, 5.0, 0, do_sample=True, seed=1, top_p=1.0) != greedy


@pytest.mark.parametrize("temperature", [LEAST_TEMPERATURE, 1e-20])
def test_the_least_temperature_is_greedy(model, temperature):
    options = {"temperature": temperature, "do_sample": True, "seed": 1}
    assert model.generate("Once upon", 20, **options) == model.generate("Once upon", 20)


def test_a_special_token_in_a_prompt(said_by_transformers):
    model = ModelWithCustomAttention(TINY, device="cpu")
    end = model.tokenizer.eos_token
    assert model.encode([f"{end}Once"])[0].shape == (1, 2)
    assert model.generate(f"{end}Once", 3).startswith("Once")  # the text is without it
    assert model.generate(end, 3) == joined(model.stream(end, 3))[0] != ""
    assert bisect(model, model, end, 3).new == 3 and not said_by_transformers.records


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 1}], ids=["greedy", "sampled"])
def test_logits_that_are_not_finite(model, planted, options):
    planted(lambda out: out * torch.nan, where=lambda q: q.shape[2] == 1)
    words = (
        "of the model must be finite; got NaN or infinity in float32, whose largest number is 3.4"
    )
    for prompts in (PROMPTS, PROMPTS[:1]):
        with pytest.raises(NotFinite, match=words):
            model.generate(prompts, 4, **options)
        pieces = model.stream(prompts, 4, **options)
        assert next(pieces)  # the prompt's own are finite
        with pytest.raises(NotFinite, match=words):
            list(pieces)
        assert model.generate(prompts, 1, **options)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1; got 0"),
        ({"max_new_tokens": 2.5}, "max_new_tokens must be at least 1; got 2.5"),
        ({"max_new_tokens": 1024}, "leaves room for"),
        (
            {"temperature": 0.0, "do_sample": True},
            "temperature must be at least 1e-30 and finite; got 0.0",
        ),
        ({"temperature": float("nan")}, "temperature must be at least 1e-30 and finite; got nan"),
        ({"temperature": -1.0}, "temperature must be at least 1e-30"),
        (
            {"temperature": 1e-40, "do_sample": True},
            "temperature must be at least 1e-30 and finite; got 1e-40",
        ),
        ({"top_k": -1}, "top_k must be at least 0 (0: the whole vocabulary); got -1"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1; got 0.0"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1; got 1.5"),
        ({"seed": -1}, "seed must be from 0 to 2**64 - 1; got -1"),
        ({"seed": 2**64}, "seed must be"),
        ({"cache": "paged"}, 'cache must be "dynamic" or "static"'),
    ],
)
@pytest.mark.parametrize("method", ["generate", "stream"])
def test_numbers_out_of_range(model, method, options, words):
    calls = kernel_calls.total()
    with pytest.raises(ValueError, match=re.escape(words)):
        getattr(model, method)(
            "Once", **options
        )  # a stream's error comes here, not with its first piece
    assert kernel_calls.total() == calls
