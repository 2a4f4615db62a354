"""Tasks 1 to 7 called as the original course's tests call them: names, argument order, keywords, shapes, results.

The weights are those of a ``torch.nn.MultiheadAttention``, unchanged. What is right is decided as everywhere here: by
float64, with the loss of PyTorch's own float32 as the budget.
"""

import copy
import inspect
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from common.check import FACTOR, assert_close
from common.layer import AttentionLayer
from common.paths import ROOT
from task1.attention import CustomSelfAttention as NaiveInPyTorch
from task2 import attention as task2
from task2.attention import CustomSelfAttention as NaiveInCuda
from task3.attention import CustomFlashAttention as FlashInPyTorch
from task4.attention import CustomFlashAttention as FlashInCuda
from task4.attention import custom_flash_attention
from task5.attention import CustomFlashAttention as FlashWithCache
from task5.attention import custom_flash_attention_decode, update_kv_cache
from task6.model import customAttention, customDecoderLayer, customMLP, customModel
from task6.rope import RoPE, apply_rotary_emb
from task6.test import plain_logits

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
BOTH = ["cpu", pytest.param("cuda", marks=ON_GPU)]
AXES = ("batch", "row", "column")


@pytest.fixture(autouse=True)
def as_in_the_course(pytestconfig):
    torch.manual_seed(pytestconfig.getoption("--seed"))
    with torch.no_grad():
        yield


def sizes(on_both, on_gpu):
    """Arguments of a test on both devices, and those of the course's own sizes where the CPU would take minutes."""
    return [
        *(pytest.param(*each, device) for device in ("cpu",) for each in on_both),
        *(pytest.param(*each, "cuda", marks=ON_GPU) for each in [*on_both, *on_gpu]),
    ]


def make_mha(hidden_dim, num_heads, device, bias=False):
    mha = nn.MultiheadAttention(
        embed_dim=hidden_dim, num_heads=num_heads, bias=bias, batch_first=True
    )
    if bias:  # PyTorch begins with zeros, which would show nothing
        nn.init.normal_(mha.in_proj_bias, std=0.1)
        nn.init.normal_(mha.out_proj.bias, std=0.1)
    return mha.to(torch.float).to(device).eval()


def make_layer(layer_class, mha):
    """The layer of a task on the weights of ``mha``."""
    parameters = dict(mha.named_parameters())
    w_q, w_k, w_v = parameters["in_proj_weight"].chunk(3)
    w_o = parameters["out_proj.weight"]
    biases = ()
    if "in_proj_bias" in parameters:
        biases = *parameters["in_proj_bias"].chunk(3), parameters["out_proj.bias"]
    layer = layer_class(w_q, w_k, w_v, w_o, mha.embed_dim, mha.num_heads, *biases)
    return layer.to(torch.float).to(w_o.device).eval()


def by_pytorch(mha, x, causal):
    seq_len = x.shape[1]
    mask = torch.triu(torch.ones(seq_len, seq_len), diagonal=1).bool().to(x.device)
    return mha(x, x, x, need_weights=False, attn_mask=mask if causal else None)[0]


def by_float64(mha, x, causal):
    plain = copy.deepcopy(mha).double().train()  # without PyTorch's fast path for inference
    return by_pytorch(plain, x.double(), causal)


# ---- tasks 1 to 4: a layer on x


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layer_class", [NaiveInPyTorch, NaiveInCuda, FlashInPyTorch, FlashInCuda])
@pytest.mark.parametrize(
    "batch_size, seq_len, hidden_dim, num_heads, device",
    sizes(
        [(4, 10, 128, 8), (3, 100, 128, 8), (1, 128, 256, 2)],
        [(16, 100, 128, 8), (4, 128, 4096, 32)],
    ),
)
def test_layers_equal_multihead_attention(
    layer_class, batch_size, seq_len, hidden_dim, num_heads, causal, device
):
    mha = make_mha(hidden_dim, num_heads, device)
    layer = make_layer(layer_class, mha)
    x = torch.randn(batch_size, seq_len, hidden_dim).to(device)
    out = layer(x, causal=causal)
    assert_close(out, by_float64(mha, x, causal), by_pytorch(mha, x, causal), axes=AXES)
    if not causal:  # the default
        assert torch.equal(layer(x), out)


@pytest.mark.parametrize("device", BOTH)
def test_the_layer_has_no_second_copy_of_the_weights(device):
    mha = make_mha(128, 8, device)
    for layer_class in (NaiveInPyTorch, NaiveInCuda, FlashInPyTorch, FlashInCuda, FlashWithCache):
        layer = make_layer(layer_class, mha)
        assert isinstance(layer, AttentionLayer)
        assert layer.w_q.data_ptr() == mha.in_proj_weight.data_ptr()
        assert layer.w_o.data_ptr() == mha.out_proj.weight.data_ptr()


@pytest.mark.parametrize("device", BOTH)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("attention", [task2.custom_attention, custom_flash_attention])
def test_attention_of_q_k_and_v(attention, causal, device):
    num_heads = 4
    q, k, v = (torch.randn(2, 50, 256).to(device) for _ in "qkv")

    def sdpa(q, k, v):
        heads = (t.unflatten(-1, (num_heads, -1)).transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(*heads, is_causal=causal).transpose(1, 2).flatten(2)

    out = attention(q, k, v, num_heads, causal)
    assert_close(out, sdpa(q.double(), k.double(), v.double()), sdpa(q, k, v), axes=AXES)


# ---- task 2: its kernels


@pytest.mark.parametrize(
    "shape, dim, device",
    sizes(
        [((4, 10, 10), -1), ((4, 5, 5), -2), ((4, 70, 300), -1), ((4, 300, 70), -2)],
        [((4, 1000, 1000), -1), ((4, 1000, 1000), -2)],
    ),
)
def test_softmax_of_a_batch_of_matrices(shape, dim, device):
    x = torch.randn(*shape).to(device)
    out = task2.test_batched_softmax(x, dim)
    assert_close(out, F.softmax(x.double(), dim), F.softmax(x, dim), axes=AXES)


@pytest.mark.parametrize("n, device", sizes([(10,), (100,)], [(1000,)]))
def test_products_of_a_batch_of_matrices(n, device):
    a, b = (torch.randn(4, n, n).to(device) for _ in "ab")
    for product in (
        task2.test_batched_GEMM_NN(a, b),
        task2.test_batched_GEMM_NN(a, b.mT.contiguous().mT),
    ):
        assert_close(product, a.double() @ b.double(), a @ b, axes=AXES)
    b_t = b.transpose(-2, -1)
    for product in (task2.test_batched_GEMM_NT(a, b), task2.test_batched_GEMM_NN(a, b_t)):
        assert_close(product, a.double() @ b_t.double(), a @ b_t, axes=AXES)


# ---- task 5: a cache


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "batch_size, seq_len, hidden_dim, num_heads, device",
    sizes([(2, 30, 128, 2)], [(4, 1024, 4096, 32)]),
)
def test_101_decode_steps_equal_recomputation(
    batch_size, seq_len, hidden_dim, num_heads, bias, causal, device
):
    steps, max_seq_len = 101, seq_len + 200
    mha = make_mha(hidden_dim, num_heads, device, bias)
    layer = make_layer(FlashWithCache, mha)
    x = torch.randn(batch_size, seq_len, hidden_dim).to(device)
    k_cache, v_cache = (torch.zeros(batch_size, max_seq_len, hidden_dim).to(device) for _ in "kv")

    torch_out = by_pytorch(mha, x, causal)
    custom_out = layer(x, kv_cache=(k_cache, v_cache), current_pos=0, causal=causal)
    assert_close(custom_out, by_float64(mha, x, causal), torch_out, axes=AXES)

    all_tokens, torch_rows, custom_rows = x, [], []
    for i in range(steps):
        new_token = torch_out[:, -1:, :]
        all_tokens = torch.cat([all_tokens, new_token], dim=1)
        torch_out = by_pytorch(mha, all_tokens, causal)
        custom_out = layer(
            new_token,
            kv_cache=(k_cache, v_cache),
            decode=True,
            current_pos=seq_len + i,
            causal=causal,
        )
        torch_rows.append(torch_out[:, -1:, :])
        custom_rows.append(custom_out)
    # The last row of each recomputation is that row of one causal pass over everything.
    truth = by_float64(mha, all_tokens, True)[:, -steps:]
    axes = ("batch", "step", "column")
    assert_close(torch.cat(custom_rows, dim=1), truth, torch.cat(torch_rows, dim=1), axes=axes)
    assert not k_cache[:, seq_len + steps :].any() and not v_cache[:, seq_len + steps :].any()


@pytest.mark.parametrize("device", BOTH)
@pytest.mark.parametrize("causal", [False, True])
def test_a_cache_by_hand(causal, device):
    num_heads, current_pos = 2, 20
    k_cache, v_cache = (torch.randn(3, 32, 128).to(device) for _ in "kv")
    q, k, v = (torch.randn(3, 1, 128).to(device) for _ in "qkv")
    update_kv_cache(k_cache, v_cache, k, v, current_pos)
    assert torch.equal(k_cache[:, current_pos : current_pos + 1], k)
    assert torch.equal(v_cache[:, current_pos : current_pos + 1], v)
    keys, values = k_cache[:, : current_pos + 1, :], v_cache[:, : current_pos + 1, :]
    out = custom_flash_attention_decode(q, keys, values, num_heads, causal)

    def sdpa(*qkv):
        heads = (t.unflatten(-1, (num_heads, -1)).transpose(1, 2) for t in qkv)
        return F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)

    truth, pytorch = sdpa(q.double(), keys.double(), values.double()), sdpa(q, keys, values)
    assert_close(out, truth, pytorch, axes=AXES)


# ---- task 6: a model


@pytest.mark.parametrize(
    "batch_size, seq_len, steps, hidden_dim, num_heads, num_layers, vocab_size, device",
    sizes([(2, 40, 20, 128, 4, 2, 100)], [(4, 1024, 100, 1024, 8, 2, 8192)]),
)
def test_a_model_generates_through_its_cache(
    batch_size, seq_len, steps, hidden_dim, num_heads, num_layers, vocab_size, device
):
    model = customModel(hidden_dim, num_heads, num_layers, vocab_size).to(device).eval()
    x = torch.randint(0, vocab_size, (batch_size, seq_len)).to(device)
    logits, kv_cache = model(x)
    assert logits.shape == (batch_size, seq_len, vocab_size)
    assert len(kv_cache) == num_layers
    for k_cache, v_cache in kv_cache:  # max_seq_len is 4096 by default
        assert k_cache.shape == v_cache.shape == (batch_size, 4096, hidden_dim)
    all_logits = [logits]
    for i in range(steps):
        next_token = logits[:, -1:].argmax(dim=-1)
        x = torch.cat([x, next_token], dim=1)
        logits, kv_cache = model(next_token, kv_cache=kv_cache, current_pos=seq_len + i)
        assert logits.shape == (batch_size, 1, vocab_size)
        all_logits.append(logits)
    assert_close(
        torch.cat(all_logits, dim=1),
        plain_logits(model, x, torch.float64),
        plain_logits(model, x, torch.float32),
        axes=("batch", "position", "vocabulary"),
    )


def test_parts_of_the_model_have_their_names_and_defaults():
    model = customModel(64, 4, 2, 50)
    assert all(isinstance(layer, customDecoderLayer) for layer in model.layers)
    parts = [type(module) for module in model.modules()]
    assert parts.count(customAttention) == parts.count(customMLP) == 2

    def defaults(function):
        parameters = inspect.signature(function).parameters.values()
        return {p.name: p.default for p in parameters if p.default not in (p.empty, None)}

    assert defaults(customModel) == {"max_seq_len": 4096}
    assert defaults(RoPE) == {"max_seq_len": 8192, "base": 10000}
    assert [*inspect.signature(apply_rotary_emb).parameters] == ["x", "cos", "sin"]


# ---- task 7: GPT-2


@pytest.mark.parametrize("device", BOTH)
@pytest.mark.filterwarnings(
    "ignore:model. the bundled tiny GPT-2"
)  # where gpt2 is not in the cache
def test_gpt2_writes_what_its_float64_self_finds_likeliest(device):
    from task7.inference import PROMPT, ModelWithCustomAttention

    model = ModelWithCustomAttention("gpt2", 2048, device=device)  # GPT-2 has 1024 positions
    text = model.generate(prompt=PROMPT, max_new_tokens=50, temperature=0.95, top_k=10)
    assert text.startswith(PROMPT) and len(text) > len(PROMPT)
    assert model.generate(PROMPT, 50) == text  # greedy by default

    prompt, mask = model.encode([PROMPT])
    tokens = model.generate_tokens(prompt, mask, 50)
    plain = ModelWithCustomAttention("gpt2", device=device, attention="eager").model
    pytorch = plain(tokens[:, :-1]).logits[0, prompt.shape[1] - 1 :]  # (new, vocabulary)
    truth = plain.double()(tokens[:, :-1]).logits[0, prompt.shape[1] - 1 :]
    loss = (pytorch.double() - truth).abs().max()
    new = tokens[0, prompt.shape[1] :]
    margin = truth.amax(-1) - truth.gather(-1, new[:, None])[:, 0]
    assert (margin <= 2 * FACTOR * loss).all(), (
        f"at {margin.argmax()}: {margin.max()} below the best"
    )


# ---- the commands


def run(module, *arguments):
    return subprocess.run(
        [sys.executable, "-m", module, *arguments], cwd=ROOT, capture_output=True, text=True
    )


@pytest.mark.parametrize("task", range(1, 8))
def test_compile(task):
    done = run(f"task{task}.compile")
    assert done.returncode == 0, done.stderr
    sources = {2: [2], 4: [4], 5: [5], 6: [4, 5], 7: [4, 5]}.get(task, [])
    lines = done.stdout.splitlines()
    if sources:
        for line, source in zip(lines, sources, strict=True):
            assert line.startswith(f"task{source}/attention_kernel.cu: for "), line
    else:
        assert lines == ["nothing to compile: this task is written in PyTorch"]


@pytest.mark.parametrize("task", range(1, 8))
def test_compile_takes_the_same_options_everywhere(task):
    done = run(f"task{task}.compile", "--device", "cpu", "--verbose")
    assert done.returncode == 0, done.stderr
    done = run(f"task{task}.compile", "--device", "cpu", "--arch", "sm_90a")
    assert done.returncode == 2 and "--arch is for --device cuda" in done.stderr


@pytest.mark.parametrize("group", ["softmax", "gemm", "attention"])
def test_task2_by_group(group):
    done = run("task2.test", f"--{group}", "--case", "one")
    assert done.returncode == 0, done.stdout + done.stderr
    groups = [line.split()[0] for line in done.stdout.splitlines() if " of " in line]
    assert groups == [group], done.stdout


@pytest.mark.parametrize("module, ours", [("inference", True), ("inference_ref", False)])
def test_inference(module, ours):
    from task7.inference import PROMPT

    done = run(f"task7.{module}", "--max-new-tokens", "50")
    assert done.returncode == 0, done.stderr
    assert f"\n{PROMPT} " in done.stdout
    unused = "our prefill kernel was called 0 times and our decode kernel 0 times"
    assert (unused not in done.stdout) == ours
