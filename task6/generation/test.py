"""The decoder against plain models: task 6's own, and transformers' Llama."""

import pytest
import torch

from common.check.rng import new_seed
from common.memory import NotEnoughMemory
from common.tests.devices import HOPPER, of_gpus_hopper
from task6.generation import CONFIGS, Config, Decoder, Weights, elementwise, find_config
from task6.generation.elementwise import add_rms_norm, swiglu
from task6.generation.parallel import Group
from task6.generation.peers import llama
from task6.model import count_weights, customModel, generate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Config(2, 256, 4, 2, 64, 320, 97, tied=True, rope_base=500.0, eps=1e-5)


def plain(**sizes):
    torch.manual_seed(sizes.pop("seed", 0))
    return customModel(128, 2, 3, 61, 40, device=DEVICE, **sizes)


@pytest.mark.parametrize("persistent", [None, False], ids=["by default", "launches"])
@pytest.mark.parametrize("batch", [1, 3])
def test_tokens_equal_the_plain_models(batch, persistent):
    model = plain()
    prompt = torch.randint(61, (batch, 7), device=DEVICE)
    want = generate(model, prompt, 20)
    decoder = Decoder(Weights.of(model), batch, 40, persistent=persistent)
    assert torch.equal(decoder.generate(prompt, 20), want)
    assert torch.equal(decoder.generate(prompt, 20), want), "the second text of the same decoder"
    assert torch.equal(generate(model, prompt, 20), want), "the plain model shares the weights"


def test_a_long_prompt_goes_through_the_mlp_in_parts(monkeypatch):
    model = plain()
    prompt = torch.randint(61, (3, 11), device=DEVICE)
    want = generate(model, prompt, 4)
    monkeypatch.setattr("task6.generation.decoder.ROWS", 7)  # of 33
    assert torch.equal(Decoder(Weights.of(model), 3, 20).generate(prompt, 4), want)


@pytest.mark.parametrize("columns", [1, 97, 160, 4096])
def test_the_largest_logit(columns):
    torch.manual_seed(columns)
    out = torch.full((5, 1), -1, device=DEVICE)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(5, columns, device=DEVICE).to(dtype)
        x[1], x[2, columns // 2 :], x[3] = 0.5, 9.0, -torch.inf  # of equals the first
        x[4, columns // 3] = torch.nan
        Group().best(x, out)
        assert torch.equal(out, x.argmax(-1, keepdim=True))


@pytest.mark.parametrize("batch", [2, 11])  # 11: of 16 bits norms are apart
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_products_give_the_same_logits(dtype, batch):
    torch.manual_seed(new_seed())
    model = customModel(64, 1, 1, 30, 12, device=DEVICE, dtype=dtype)
    prompt, weights = torch.randint(30, (batch, 4), device=DEVICE), Weights.of(model)
    plainly, fused = (Decoder(weights, batch, 12, fused=fused) for fused in (False, True))
    plainly.prefill(prompt), fused.prefill(prompt)
    in_16_bits = dtype == torch.bfloat16
    for _ in range(5):
        fused.tokens.copy_(plainly.tokens)  # in 16 bits they may differ where candidates are close
        plainly.step(), fused.step()
        tolerance = 2**-4 if in_16_bits else 1e-4
        torch.testing.assert_close(fused.logits, plainly.logits, atol=tolerance, rtol=0)
        assert torch.equal(fused.tokens[:, 0], fused.logits.argmax(-1))
        assert in_16_bits or torch.equal(fused.tokens, plainly.tokens)


def test_weights_are_held_once():
    model = plain()
    weights = Weights.of(model)
    assert weights.layers[0].gate_up.data_ptr() == model.layers[0].mlp.gate.weight.data_ptr()
    assert weights.config.weights == count_weights(128, 3, 61)
    again = Weights.of(model)
    assert again.layers[0].gate_up.data_ptr() == weights.layers[0].gate_up.data_ptr()
    assert torch.equal(again.layers[0].gate_up, weights.layers[0].gate_up)


@pytest.mark.parametrize("persistent", [None, False], ids=["by default", "launches"])
@pytest.mark.parametrize("tied", [True, False])
def test_grouped_heads_equal_transformers_llama(tied, persistent):
    config = Config(**{**SMALL.__dict__, "tied": tied})
    torch.manual_seed(1)
    weights = Weights.random(config, device=DEVICE)
    model = llama(weights)
    prompt = torch.randint(config.vocab, (2, 9), device=DEVICE)
    decoder = Decoder(weights, 2, 64, persistent=persistent)
    got = decoder.generate(prompt, 30)
    want = model.generate(prompt, max_new_tokens=30, do_sample=False, pad_token_id=0)[:, 9:]
    assert torch.equal(got, want)
    with torch.no_grad():
        logits = model(torch.cat((prompt, want[:, :-1]), 1)).logits[:, -1]
    torch.testing.assert_close(decoder.logits, logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("batch", "persistent"),
    [(1, False), (4, False), (11, False)] + [pytest.param(n, True, marks=of_gpus_hopper) for n in (1, 4)],
)  # fmt: skip
def test_bfloat16_loses_no_more_than_the_plain_model(batch, persistent):
    usual, ours = [0.0, 0.0], [0.0, 0.0]  # of the prompt, and of a step
    for seed in range(80 // batch):  # one model's error is one draw
        exact, rounded = plain(seed=seed), plain(seed=seed).to(torch.bfloat16)
        tokens = torch.randint(61, (batch, 13), device=DEVICE)
        decoder = Decoder(Weights.of(rounded), batch, 40, persistent=persistent)
        decoder.prefill(tokens[:, :12])
        for i, read in enumerate((tokens[:, :12], tokens)):
            if i == 1:
                decoder.tokens.copy_(tokens[:, 12:])
                decoder.step()
            truth = exact(read)[0][:, -1]
            usual[i] += (rounded(read)[0][:, -1].float() - truth).square().mean().item()
            ours[i] += (decoder.logits.float() - truth).square().mean().item()
    assert all(x**0.5 <= 1.1 * y**0.5 for x, y in zip(ours, usual, strict=True)), (ours, usual)


def test_a_step_past_the_last_position_is_refused():
    decoder = Decoder(Weights.of(plain()), 1, 9)
    with pytest.raises(ValueError, match="a step needs a prompt .* 0 of 9 are filled"):
        decoder.step()
    decoder.prefill(torch.zeros(1, 8, dtype=torch.int64, device=DEVICE))
    decoder.step()
    with pytest.raises(ValueError, match="9 of 9 are filled"):
        decoder.step()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (torch.zeros(2, 3, dtype=torch.int64), r"prompt must be \(1, seq\)"),
        (torch.zeros(1, 3), "prompt must be .* int64"),
        (torch.zeros(1, 0, dtype=torch.int64), "a prompt must have from 1 to 8 tokens; got 0"),
        (torch.zeros(1, 9, dtype=torch.int64), "a prompt must have from 1 to 8 tokens; got 9"),
        (torch.full((1, 3), 61), "token ids must be from 0 to 60; got 61 to 61"),
    ],
)
def test_prompts_that_do_not_fit(prompt, message):
    decoder = Decoder(Weights.of(plain()), 1, 9)
    for begin in (decoder.prefill, lambda prompt: decoder.generate(prompt, 1)):
        with pytest.raises(ValueError, match=message):
            begin(prompt.to(DEVICE))


@pytest.mark.parametrize("config", [CONFIGS["tiny"], Config(2, 128, 4, 2, 64, 64, 100, tied=True)])
def test_the_parameters_of_a_share(config):
    """Of an untied model a process has its own rows of the logits' matrix alone."""
    assert Weights.random(config).count == config.weights
    half = Weights.random(config, group=Group(0, 2))
    rows = 0 if config.tied else config.vocab // 2 * config.hidden
    assert half.count == config.share(2).weights - rows


def test_configurations():
    assert find_config("llama-3.2-1b").weights == 1_235_814_400  # as published
    assert CONFIGS["course"].weights == count_weights(4096, 24, 8192)
    with pytest.raises(
        ValueError, match="the configurations are tiny, course, llama-3.2-1b; got 'gpt'"
    ):
        find_config("gpt")
    with pytest.raises(ValueError, match="kv_heads must divide heads; got 4 and 3"):
        Config(1, 256, 4, 3, 64, 64, 10)
    with pytest.raises(ValueError, match="head_dim must be one of"):
        Config(1, 256, 4, 2, 96, 64, 10)
    with pytest.raises(ValueError, match="inner must be a multiple of 8, in each process; got 12"):
        Config(1, 256, 4, 2, 64, 24, 10).share(2)


def test_what_does_not_fit_is_not_allocated(monkeypatch):
    monkeypatch.setattr("task6.generation.weights.free_memory", lambda device: (10, 10))
    with pytest.raises(NotEnoughMemory, match="the weights need .* are free on cpu"):
        Weights.random(SMALL)


@pytest.mark.parametrize("begin, n", [(48, 600), (50, 600), (48, 257)], ids=["16 bytes", "", "odd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("hopper", [False, True])
def test_norm_and_swiglu(dtype, begin, n, hopper, monkeypatch):
    """With Hopper's norm or the other one. The CPU runs both."""
    if DEVICE == "cuda" and hopper and not HOPPER:
        pytest.skip("of GPUs, needs a Hopper")
    monkeypatch.setattr(elementwise, "is_hopper", lambda device: hopper)
    x, delta = torch.randn(2, 5, 720, device=DEVICE).to(dtype).unbind()
    weight = torch.randn(n, device=DEVICE).to(dtype)
    x, delta = x[:, begin : begin + n], delta[:, :n]  # rows with a stride
    total = x + delta
    out = torch.full((5, n), torch.nan, device=DEVICE, dtype=dtype)
    add_rms_norm(x, delta, weight, out, 1e-5)
    assert torch.equal(x, total)
    truth = torch.nn.functional.rms_norm(total.double(), (n,), weight.double(), 1e-5)
    torch.testing.assert_close(out.double(), truth, atol=1e-6, rtol=torch.finfo(dtype).eps * 2)
    add_rms_norm(x, None, weight, out, 1e-5)
    torch.testing.assert_close(out.double(), truth, atol=1e-6, rtol=torch.finfo(dtype).eps * 2)
    both = torch.randn(3, 2 * n + 104, device=DEVICE).to(dtype)[:, begin : begin + 2 * n]
    out = torch.full((3, n), torch.nan, device=DEVICE, dtype=dtype)
    swiglu(both, out)
    gate, up = both.double().chunk(2, 1)
    truth = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(out.double(), truth, atol=1e-6, rtol=torch.finfo(dtype).eps * 2)
    with pytest.raises(ValueError, match="out must be"):
        swiglu(both, out[:2])
