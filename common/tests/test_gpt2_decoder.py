"""GPT-2 by our own loop: greedy tokens equal those of transformers' generate."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from common.tests.devices import DEVICE, of_gpus_hopper
from task6.generation import persistent
from task7.decoder import Gpt2Decoder
from task7.inference import ModelWithCustomAttention

# The CPU layer takes long for the fused products: there, a few tokens.
WAYS = [
    ({"fused": False}, 25),
    ({"fused": True}, 25 if DEVICE == "cuda" else 3),
    pytest.param({"persistent": True}, 25 if DEVICE == "cuda" else 3, marks=of_gpus_hopper),
]  # fmt: skip
PROMPTS = [
    "Once upon a time there was",
    "The cat",
    "In the morning the little dog ran to the river and",
]


@pytest.fixture(scope="module")
def reference():
    return ModelWithCustomAttention("tiny", attention="sdpa", device=DEVICE)


@pytest.mark.parametrize(("way", "new"), WAYS)
@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS])
def test_tokens_equal_transformers_generate(reference, prompts, way, new):
    tokens, mask = reference.encode(prompts)
    want = reference.generate_tokens(tokens, mask, new)[:, tokens.shape[1] :].tolist()
    ids = [row[keep.bool()].tolist() for row, keep in zip(tokens, mask, strict=True)]
    end = reference.tokenizer.eos_token_id
    decoder = Gpt2Decoder(reference.model, len(prompts), 128, **way)
    for _ in range(2):  # the second text of the same decoder
        got = decoder.generate(ids, new, end=end)
        for mine, theirs in zip(got, want, strict=True):
            assert mine == (theirs[: theirs.index(end) + 1] if end in theirs else theirs)


@pytest.mark.parametrize(("way", "new"), WAYS)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_random_weights_of_another_shape(way, new, tied):
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=50,
        n_embd=128,
        n_head=1,
        n_layer=2,
        n_positions=40,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=tied,  # whether the logits are of the embeddings
    )
    model = GPT2LMHeadModel(config).to(DEVICE).eval()
    with torch.no_grad():  # else all norms are the same, and all biases 0
        for name, p in model.named_parameters():
            if name.endswith("bias") or "ln_" in name:
                p.add_(torch.randn_like(p) / 3)
    prompt = torch.randint(50, (1, 7), device=DEVICE)
    want = model.generate(prompt, max_new_tokens=new + 8, do_sample=False, pad_token_id=0)[
        0, 7:
    ].tolist()
    decoder = Gpt2Decoder(model, 1, 40, **way)
    assert decoder.generate(prompt.tolist(), new + 8) == [want]
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt[0].tolist(), *want[:-1]]], device=DEVICE)).logits[
            :, -1
        ]
    torch.testing.assert_close(decoder.logits, logits, atol=1e-5, rtol=1e-4)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU would have to run it")
def test_which_way_it_takes_by_itself(monkeypatch):
    size = dict(vocab_size=56, n_embd=64, n_head=1, n_layer=1, n_positions=40)
    model = GPT2LMHeadModel(GPT2Config(bos_token_id=None, eos_token_id=None, **size))

    def one_launch(**way):
        return Gpt2Decoder(model, 1, 40, **way).one_launch is not None

    assert not one_launch() and one_launch(persistent=True)
    with monkeypatch.context() as patch:
        patch.setattr(persistent, "is_hopper", lambda device: True)
        patch.setattr(persistent, "sms_of", lambda device: 3)
        patch.setattr(torch.Tensor, "is_cuda", True)
        assert one_launch()
        assert not one_launch(fused=True) and not one_launch(persistent=False)
        assert Gpt2Decoder(model, 9, 40).one_launch is None
    with pytest.raises(ValueError, match="from 1 to 8 sequences; got 9"):
        Gpt2Decoder(model, 9, 40, persistent=True)


@pytest.mark.parametrize(
    ("prompts", "new", "message"),
    [
        ([[1], [2]], 3, r"1 prompts of at least one token are needed; got lengths \[1, 1\]"),
        ([[]], 3, "at least one token"),
        ([[1] * 30], 12, "40 positions are too few for 30 tokens and 12 new ones"),
        ([[1, 50]], 3, "token ids must be from 0 to 49; got 1 to 50"),
    ],
)
def test_prompts_that_do_not_fit(prompts, new, message):
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_embd=64, n_head=1, n_layer=1, n_positions=40)
    ).to(DEVICE)
    with pytest.raises(ValueError, match=message):
        Gpt2Decoder(model, 1, 40).generate(prompts, new)


def test_models_that_do_not_fit():
    for change, message in (
        ({"n_head": 2}, r"head_dim must be one of \(64, 128\); got 32"),
        (
            {"activation_function": "relu"},
            "activation_function must be 'gelu_new', GPT-2's own; got 'relu'",
        ),
        ({"scale_attn_weights": False}, "scale_attn_weights must be True, GPT-2's own; got False"),
        ({"n_inner": 100}, "n_inner must be a positive multiple of 8; got 100"),
        ({"n_layer": 0}, "n_layer must be at least 1; got 0"),
    ):
        config = GPT2Config(
            vocab_size=50, n_embd=64, n_positions=40, **({"n_head": 1, "n_layer": 1} | change)
        )
        with pytest.raises(ValueError, match=message):
            Gpt2Decoder(GPT2LMHeadModel(config), 1, 40)
    with pytest.raises(ValueError, match="max_seq_len from 2 to 40; got 1 and 41"):
        Gpt2Decoder(
            GPT2LMHeadModel(
                GPT2Config(vocab_size=50, n_embd=64, n_head=1, n_layer=1, n_positions=40)
            ),
            1,
            41,
        )
