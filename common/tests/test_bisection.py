"""Where GPT-2 with our attention parts from Hugging Face's."""

import copy
import io
import json
import re

import pytest
import torch
from rich.console import Console

from common.tests import models
from common.tests.models import PROMPTS, change_weights, command
from task7 import bisection
from task7.attention import NAME
from task7.bisection import _origin, bisect, bisect_batch, show
from task7.inference import PROMPT, TINY, ModelWithCustomAttention
from task7.streaming import NotFinite

model, planted, folder = models.model, models.planted, models.folder  # fixtures


@pytest.fixture(scope="module")
def reference():
    return ModelWithCustomAttention(TINY, device="cpu", attention="sdpa")


def shown(found, model):
    console = Console(file=io.StringIO(), width=100)
    show(found, model, console)
    return console.file.getvalue()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_bisect_finds_nothing(model, reference, cache):
    found = bisect(model, reference, PROMPT, 40, cache=cache)
    assert found.fork is None and found.origin is None and found.new == 40
    tokens, mask = model.encode([PROMPT])
    assert found.tokens == model.generate_tokens(tokens, mask, 40)[0].tolist()
    assert 0 < found.logits < 1e-4 and len(found.layers) == 4
    assert 0 < found.logits_off < found.logits_allowed < 1e-3 and not found.behind_layers
    for layer in found.layers:
        assert 0 < layer.ours <= layer.allowed and 0 < layer.reference < 1e-5
    said = shown(found, model)
    assert "then 40 alike" in said and "all tokens agree" in said and "first" not in said


def test_bisect_names_layer_and_token(model, reference, planted):
    planted(torch.zeros_like, where=lambda q: q.shape[2] == 1)  # decode only
    found = bisect(model, reference, PROMPT, 40)
    prompt = len(model.encode([PROMPT])[0][0])
    # the pass of the first decoded token; what follows may need some tokens to differ
    assert (found.origin.layer, found.origin.position) == (1, prompt)
    assert found.origin.first == found.origin.last == prompt
    assert found.layers[1].ours > 0.01 > found.layers[1].allowed > found.layers[0].ours
    fork = found.fork
    assert fork.position == len(found.tokens) == prompt + found.new
    assert fork.gap_ours <= 0 <= fork.gap_reference and fork.ours != fork.reference
    assert fork.gap_float64 == pytest.approx(fork.gap_reference, abs=1e-3)
    said = shown(found, model)
    assert f"token {fork.position} is the first that differs" in said
    assert f"layer 1 is the first with more than a rounding error, from token {prompt} " in said
    assert [line.split()[0] for line in said.splitlines() if line.split()[-1:] == ["first"]] == [
        "1"
    ]


def test_bisect_sees_an_error_that_changes_no_token(model, reference, planted):
    planted(lambda out: out * 1.001, where=lambda q: q.shape[2] > 1)  # prefill only
    found = bisect(model, reference, PROMPT, 5)
    assert found.fork is None and (found.origin.layer, found.origin.first) == (1, 0)
    assert found.origin.last == len(found.tokens) - 5 - 1
    assert found.layers[1].allowed < found.layers[1].ours < 1e-3


def test_bisect_sees_nan(model, reference, planted):
    planted(lambda out: out * torch.nan, where=lambda q: q.shape[2] == 1)
    found = bisect(model, reference, "Once upon", 5)
    assert found.origin.layer == 1 and found.fork is not None


def test_bisect_allows_for_the_dtype(planted):
    models = [
        ModelWithCustomAttention(TINY, device="cpu", dtype=torch.bfloat16, attention=name)
        for name in (NAME, "sdpa")
    ]
    found = bisect(*models, PROMPT, 10)
    assert found.origin is None and found.layers[1].allowed > 1e-2 and not found.behind_layers
    planted(torch.zeros_like)
    assert bisect(*models, PROMPT, 10).origin.layer == 1


def test_origin_is_the_first_pass_then_the_first_layer():
    beyond = torch.zeros(3, 8, dtype=torch.bool)
    assert _origin(beyond, 4) is None
    beyond[1, 6] = beyond[2, 5] = beyond[0, 7] = True
    assert (_origin(beyond, 4).layer, _origin(beyond, 4).position) == (2, 5)
    beyond[2, 1] = beyond[1, 3] = True  # one pass, of the whole prompt
    found = _origin(beyond, 4)
    assert (found.layer, found.position, found.first, found.last) == (1, 3, 0, 3)


def test_bisect_of_weights_that_are_nan(folder):
    change_weights(folder, lambda weights: weights["transformer.ln_f.weight"].fill_(torch.nan))
    models = [ModelWithCustomAttention(folder, attention=name) for name in (NAME, "sdpa")]
    with pytest.raises(NotFinite, match="the logits of the reference must be finite"):
        bisect(*models, "Once", 3)


@pytest.mark.parametrize(
    "file, change",
    [
        ("config.json", {"reorder_and_upcast_attn": True}),
        ("generation_config.json", {"use_cache": False}),
        ("generation_config.json", {"prefill_chunk_size": 1}),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, dict) else "",
)
def test_bisect_of_a_model_with_other_options(folder, file, change):
    content = json.loads((folder / file).read_text()) | change
    (folder / file).write_text(json.dumps(content))
    models = [ModelWithCustomAttention(folder, attention=name) for name in (NAME, "sdpa")]
    found = bisect(*models, PROMPT, 5)
    assert found.new == 5 and found.origin is None and not found.behind_layers


@pytest.mark.parametrize("factor", [0.0, torch.nan], ids=["wrong", "NaN"])
def test_bisect_sees_what_only_a_batch_has(capsys, planted, factor):
    planted(lambda out: out * factor, where=lambda q: len(q) > 1)
    with pytest.raises(SystemExit) as ended:
        command("--bisect", "--prompt", *PROMPTS[:2], "--max-new-tokens", "12")
    said = capsys.readouterr().out
    assert ended.value.code == 1 and said.count("all tokens agree") == 2
    assert re.search(
        r"prompt 1, 'Why\?': only the batch differs, whose prompts are padded on the left; token \d+ is the first: "
        r"\d+ '.*' with our attention, \d+ '.*' with Hugging Face; their logits are .* apart in float64",
        said,
    )


def test_bisect_of_a_batch_allows_for_rounding(model, reference, planted, monkeypatch):
    assert bisect_batch(model, reference, PROMPTS, 20) == []
    planted(torch.zeros_like, where=lambda q: len(q) > 1)
    found = {fork.prompt: fork for fork in bisect_batch(model, reference, PROMPTS, 20)}
    assert 1 in found and all(fork.gap > 100 * fork.explained > 0 for fork in found.values())
    tokens, mask = model.encode(PROMPTS)
    fork, at = found[1], tokens.shape[1] - int(mask[1].sum())
    for each, token in ((model, fork.ours), (reference, fork.reference)):
        assert each.generate_tokens(tokens, mask, 20)[1, at + fork.position] == token
    monkeypatch.setattr(bisection, "FACTOR", 1e9)
    assert bisect_batch(model, reference, PROMPTS, 20) == []


def test_bisect_wants_one_set_of_weights(model):
    other = copy.copy(model)
    other.model = copy.deepcopy(model.model)
    other.model.transformer.h[2].mlp.c_fc.bias.data[0] += 1
    with pytest.raises(ValueError, match="the same weights; transformer.h.2.mlp.c_fc.bias differs"):
        bisect(model, other, "Once")
    with pytest.raises(ValueError, match="one dtype and device"):
        bisect(model, ModelWithCustomAttention(TINY, device="cpu", dtype=torch.float16), "Once")


def test_the_command_bisects(capsys, planted):
    command("--bisect", "--prompt", "Once", "Why?", "--max-new-tokens", "4")
    said = capsys.readouterr().out
    assert said.count("all tokens agree") == 2
    assert said.endswith("as one batch the prompts have no token that differs beyond rounding\n")
    planted(lambda out: out * 1.01)
    with pytest.raises(SystemExit) as ended:
        command("--bisect", "--prompt", "Once", "--max-new-tokens", "4")
    assert ended.value.code == 1 and "layer 1 is the first" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        command("--bisect", "--sample")
    assert ended.value.code == 2
