"""Task 7: GPT-2 through Hugging Face on your kernels, checked against Hugging Face's own attention.

python -m task7.test [--attention | --tokens | --inputs | --model] [--check] [--no-timing]
"""

import copy
import re
import socket
import tempfile
from collections import Counter
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from common.check import FACTOR, Case, CheckFailed, Suite, assert_close
from common.check.attention import attention_float64, attention_pytorch
from common.record import Record
from common.timing import Benchmark, measure
from task4.attention import flash_attention
from task5.attention import flash_attention_decode
from task6.test import count_launches
from task7 import find
from task7.attention import NAME, course_attention, course_mask, kernel_calls
from task7.inference import PROMPT, TINY, TINY_FOLDER, ModelWithCustomAttention, find_model

suite = Suite(
    "task7",
    title="GPT-2 through your kernels, by Hugging Face",
    sources=(
        "task7/attention.py",
        "task7/find.py",
        "task7/inference*.py",
        "task7/known_calls.*",
        "task7/model.py",
        "task4/attention*",
        "task4/prefill.py",
        "task5/attention*",
    ),
)


# ---- one call, as transformers makes it -----------------------------------------------------------

ATTENTION = [
    Case("prompt", why="as many queries as keys", q_len=33, kv_len=33),
    Case("prompt, left padding", why="a query before its prompt sees no key and gives 0", small=True, q_len=12, kv_len=12, pads=(0, 5, 11)),
    Case("prompt, static cache", why="the cache is longer than the text", small=True, q_len=12, kv_len=30),
    Case("prompt, static cache, left padding", why="both at once", q_len=20, kv_len=64, pads=(3, 0, 7)),
    Case("second chunk of a prompt", why="the causal diagonal ends at the last key", small=True, q_len=7, kv_len=19, offset=12),
    Case("second chunk, static cache", why="the offset comes as a tensor", q_len=7, kv_len=64, offset=12, static=True, pads=(2, 0, 9)),
    Case("one new token", why="decode over a dynamic cache", small=True, q_len=1, kv_len=20, offset=19),
    Case("one new token, static cache", why="decode up to a length", small=True, q_len=1, kv_len=30, offset=11, static=True, pads=(0, 2, 7)),
    Case("a sequence of padding only", why="no key: 0, not NaN", small=True, q_len=1, kv_len=9, offset=8, pads=(0, 9, 1)),
    Case("grouped queries", why="heads share keys and values", q_len=9, kv_len=30, offset=5, heads=4, kv_heads=2),
    Case("no mask, causal", why="None means what it means for SDPA", small=True, q_len=9, kv_len=9, mask=False),
    Case("no mask, static cache", why="query i sees the keys 0..i, the tail is ignored", q_len=9, kv_len=30, mask=False),
    Case("no mask, both directions", why="is_causal=False", q_len=9, kv_len=30, mask=False, is_causal=False),
    Case("float16", why="models are often loaded in 16 bits", q_len=20, kv_len=40, pads=(0, 3, 4), dtype=torch.float16),
]  # fmt: skip


@suite.check("attention", ATTENTION)
def attention_matches_float64(case: Case, device: torch.device, rng: Any) -> None:
    expect_kernels(device, 4 if case.q_len > 1 else 5)
    batch, head_dim = 3, 64
    values = case.values
    heads, offset, dtype = (
        values.get("heads", 2),
        values.get("offset", 0),
        values.get("dtype", torch.float32),
    )
    masked, is_causal = values.get("mask", True), values.get("is_causal")
    length = offset + case.q_len
    # queries come as slices of one projection, a cache is (batch, heads, n, d) in memory
    q = rng.randn(batch, case.q_len, 3 * heads * head_dim, dtype=dtype)[..., : heads * head_dim]
    q = q.unflatten(-1, (heads, head_dim)).transpose(1, 2)
    k, v = (
        rng.randn(batch, values.get("kv_heads", heads), case.kv_len, head_dim, dtype=dtype)
        for _ in range(2)
    )
    visible: dict[str, Any] = {"causal": is_causal is None and case.q_len > 1}
    mask = None
    if masked:
        pads = torch.tensor(values.get("pads", (0,) * batch), dtype=torch.int32, device=device)
        tokens = torch.arange(length, device=device) >= pads[:, None]
        q_offset = torch.tensor([offset], device=device) if "static" in values else offset
        mask = course_mask(
            batch, case.q_len, case.kv_len, q_offset, attention_mask=tokens, device=device
        )
        visible["seqlens_k"] = torch.full((batch,), length, dtype=torch.int32, device=device)
        visible["leftpad_k"] = pads
    elif is_causal is None:
        visible["seqlens_k"] = torch.full((batch,), case.q_len, dtype=torch.int32, device=device)
    as_ours = [t.transpose(1, 2) for t in (q, k, v)]
    truth, pytorch = attention_float64(*as_ours, **visible), attention_pytorch(*as_ours, **visible)
    if is_causal is None:  # what is not written yet must not be read
        k[:, :, length:] = torch.nan
        v[:, :, length:] = torch.nan
    module = torch.nn.Module()
    module.is_causal = True
    got, weights = course_attention(
        module, q, k, v, mask, scaling=head_dim**-0.5, is_causal=is_causal
    )
    if weights is not None:
        raise CheckFailed(
            "the second thing that is returned must be None: no attention weights are stored"
        )
    assert_close(got, truth, pytorch, axes=("sequence", "query", "head", "d"))


# ---- generate -------------------------------------------------------------------------------------


def expect_kernels(device: torch.device, *tasks: int) -> None:
    """CheckFailed while one of tasks 4 and 5 is a stub: GPT-2 then runs on a kernel that writes nothing."""
    x = torch.ones(1, 2, 1, 64, device=device)
    for task in tasks:
        out = flash_attention(x, x, x) if task == 4 else flash_attention_decode(x[:, :1], x, x)
        if out.isnan().all():
            sentence = f"task{task}/attention_kernel.cu is not written yet, and GPT-2 runs on it"
            raise CheckFailed(sentence, not_written=sentence)


STORIES = (
    "Once upon a time there was",
    "One morning, Mira walked to",
    "Why does the softmax subtract the maximum?",
)
SAMPLE_SEED = 3

TOKENS = [
    Case("course prompt", why="what `python -m task7.inference` does", model="tiny", prompts=(PROMPT,), new=60),
    Case("course prompt, static cache", why="keys and values are read in place up to a length", model="tiny", prompts=(PROMPT,), new=60, cache="static"),
    Case("batch, left padding", why="prompts of different lengths", model="tiny", prompts=STORIES, new=40),
    Case("batch, left padding, static cache", why="both at once", model="tiny", prompts=STORIES, new=40, cache="static"),
    Case("random weights", why="token sequences that no text has", model="random", lengths=(17, 17), new=40),
    Case("random weights, static cache", why="the same", model="random", lengths=(9, 17), new=40, cache="static"),
    Case("prompt of one token", why="even the first call has one query", model="random", lengths=(1,), new=10),
    Case("prompt in chunks", why="a chunk of the prompt meets a cache that is not empty", model="random", lengths=(31, 20), new=10, chunk=8),
    Case("beam search", why="the cache is reordered between two tokens", model="random", lengths=(9, 5), new=10, beams=2),
    Case("grouped queries", why="another architecture: Llama with 4 heads on 2", model="llama", lengths=(9, 14), new=12),
    Case("check build", why="small enough for it", small=True, model="random", lengths=(5, 3), new=3),
]  # fmt: skip


@suite.check("tokens", TOKENS)
def greedy_tokens_equal_the_reference(case: Case, device: torch.device, rng: Any) -> None:
    expect_kernels(device, 4, 5)
    ours, plain, truth = _models(case.model, device)
    if case.model == "tiny":
        tokens, mask = _tiny(device).encode(case.prompts)
    else:
        lengths, vocab = case.lengths, ours.config.vocab_size
        tokens = rng.integers(1, vocab, len(lengths), max(lengths))
        pads = max(lengths) - torch.tensor(lengths, device=device)
        mask = (torch.arange(max(lengths), device=device) >= pads[:, None]).long()
        tokens = tokens.where(mask.bool(), 0)
    options: dict[str, Any] = {
        "attention_mask": mask,
        "max_new_tokens": case.new,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        "num_beams": case.values.get("beams", 1),
    }
    if case.values.get("cache") == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    if chunk := case.values.get("chunk"):
        options["prefill_chunk_size"] = chunk

    with count_launches() as ours_launched:
        got = ours.generate(tokens, **options)
    with count_launches() as plain_launched:
        want = plain.generate(tokens, **options)
    if plain_launched:
        raise CheckFailed(f"the reference ran our kernels: {dict(plain_launched)}")
    layers, prompt = ours.config.num_hidden_layers, tokens.shape[1]
    steps = -(-prompt // chunk) if chunk else 1
    prefills = steps if prompt > 1 else 0
    expected = Counter(
        {
            "task4 flash_attention": layers * prefills,
            "task5 flash_attention_decode": layers * (case.new - 1 + steps - prefills),
        }
    )
    if ours_launched != +expected:
        raise CheckFailed(f"kernels launched: {dict(ours_launched)}; expected {dict(+expected)}")
    if "beams" in case.values:
        if not torch.equal(got, want):
            raise CheckFailed(
                f"beam search gives\n{got.tolist()}\nand not the reference's\n{want.tolist()}"
            )
        return
    _same_tokens(got, want, mask, plain, truth)
    if case.new >= 40 and len(got[:, prompt:].unique()) < 8:
        raise CheckFailed("fewer than 8 different tokens: this comparison says nothing")


def _same_tokens(
    got: Tensor, want: Tensor, mask: Tensor, plain: PreTrainedModel, truth: PreTrainedModel
) -> None:
    """Each sequence must be the reference's, up to a token where the two best are equal up to rounding."""
    if got.shape != want.shape:
        raise CheckFailed(f"tokens {tuple(got.shape)}, the reference's {tuple(want.shape)}")
    for row in range(len(got)):
        differing = (got[row] != want[row]).nonzero()
        if not len(differing):
            continue
        at = int(differing[0])
        start = int((mask[row] == 0).sum())
        text = got[row : row + 1, start:at]  # the common part, without its padding
        with torch.no_grad():
            exact = truth(text).logits[0, -1]
            rounded = plain(text).logits[0, -1]
        mine, best = int(got[row, at]), int(exact.argmax())
        gap = (exact[best] - exact[mine]).item()
        budget = FACTOR * (rounded - exact).abs().max().item()
        if gap > budget:
            raise CheckFailed(
                f"sequence {row}, position {at} of {got.shape[1]}: token {mine}, the reference has "
                f"{int(want[row, at])}\nin float64 token {best} is best and {mine} is {gap:.3g} below it "
                f"(float32 alone could explain {budget:.3g})\ngot      {got[row, start:].tolist()}\n"
                f"expected {want[row, start:].tolist()}"
            )


@suite.check("tokens", [Case("sampling", why="a seed makes it repeatable", new=40)])
def sampling_repeats_with_its_seed(case: Case, device: torch.device, rng: Any) -> None:
    expect_kernels(device, 4, 5)
    model = _tiny(device)
    state = torch.get_rng_state()

    def sample(seed: int) -> str:
        return model.generate(PROMPT, case.new, 1.0, 50, do_sample=True, seed=seed)

    with count_launches() as launched:
        first = sample(SAMPLE_SEED)
    if not launched:
        raise CheckFailed("no kernel of ours was launched")
    if sample(SAMPLE_SEED) != first:
        raise CheckFailed("the same seed gives two texts")
    if all(sample(SAMPLE_SEED + i) == first for i in range(1, 4)):
        raise CheckFailed("four seeds give one text: nothing is sampled")
    if not torch.equal(state, torch.get_rng_state()):
        raise CheckFailed("PyTorch's own random state has changed")
    if model.generate(PROMPT, case.new, 5.0, 1, do_sample=True, seed=0) != model.generate(
        PROMPT, case.new
    ):
        raise CheckFailed("top_k = 1 must be greedy at any temperature")


# ---- wrong inputs ---------------------------------------------------------------------------------

# What is called with what, and what its ValueError must name.
_INPUTS = {
    "empty prompt": (lambda m: m.generate(""), "at least one character"),
    "no prompt": (lambda m: m.generate([]), "at least one character"),
    "one empty prompt of two": (lambda m: m.generate(["a", ""]), "at least one character"),
    "prompt longer than the positions": (lambda m: m.generate("a b" * 600, 1), "1024 positions"),
    "prompt and new tokens too long": (lambda m: m.generate("Once", 1024), "leaves room for 1023"),
    "no new tokens": (lambda m: m.generate("Once", 0), "max_new_tokens"),
    "temperature 0": (lambda m: m.generate("Once", 1, 0.0, do_sample=True), "temperature"),
    "negative top_k": (lambda m: m.generate("Once", 1, 1.0, -1, do_sample=True), "top_k"),
    "unknown cache": (lambda m: m.generate("Once", 1, cache="paged"), "dynamic"),
    "unknown model": (lambda m: ModelWithCustomAttention("gpt5"), "gpt2-medium"),
    "folder without a model": (lambda m: find_model(TINY_FOLDER.parent), "no GPT-2 in it"),
    "max_seq_len 0": (lambda m: ModelWithCustomAttention(TINY, 0), "max_seq_len"),
    "right padding": (
        lambda m: m.model(_ones(m), attention_mask=torch.tensor([[1, 1, 1, 0]], device=m.device)),
        "padding on the left",
    ),
    "hole in the mask": (
        lambda m: m.model(_ones(m), attention_mask=torch.tensor([[1, 0, 1, 1]], device=m.device)),
        "padding on the left",
    ),
    "mask too short": (
        lambda m: m.model(_ones(m), attention_mask=torch.ones(1, 3, dtype=torch.long, device=m.device)),
        "padding on the left",
    ),
    "mask for each query and key": (
        lambda m: m.model(_ones(m), attention_mask=torch.ones(1, 1, 4, 4, device=m.device)),
        "each query and key",
    ),
    "two texts in one sequence": (
        lambda m: m.model(_ones(m), position_ids=torch.tensor([[0, 1, 0, 1]], device=m.device), use_cache=False),
        "packed",
    ),
    "dropout": (lambda m: _call(m, dropout=0.1), "dropout"),
    "gradients": (lambda m: _with_gradients(m), "backward"),
    "sliding window": (lambda m: _call(m, sliding_window=4), "sliding_window"),
    "more causal queries than keys": (lambda m: _call(m, keys=3), "4 causal queries"),
}  # fmt: skip


def _ones(model: ModelWithCustomAttention) -> Tensor:
    return torch.ones(1, 4, dtype=torch.long, device=model.device)


def _call(model: ModelWithCustomAttention, keys: int = 4, **options: Any) -> None:
    q, k = (torch.zeros(1, 1, n, 64, device=model.device) for n in (4, keys))
    course_attention(torch.nn.Module(), q, k, k, None, **options)


def _with_gradients(model: ModelWithCustomAttention) -> None:
    with torch.enable_grad():
        model.model(_ones(model))


@suite.check(
    "inputs",
    [Case(name, why="a sentence, and no launch") for name in _INPUTS],
    kernels=False,
    given=True,
)
def wrong_inputs_are_refused(case: Case, device: torch.device, rng: Any) -> None:
    call, words = _INPUTS[case.name]
    model = _tiny(device)
    before = kernel_calls.total()
    with torch.no_grad():
        try:
            call(model)
        except ValueError as error:
            if words not in str(error):
                raise CheckFailed(f"the message should say {words!r}: {error}") from None
        else:
            raise CheckFailed("nothing was raised")
    if kernel_calls.total() != before:
        raise CheckFailed("a kernel was launched before the error")


# ---- the bundled model ----------------------------------------------------------------------------


@suite.check(
    "model", [Case("no network", why="no download, no wait for a connection")], kernels=False
)
def bundled_model_needs_no_network(case: Case, device: torch.device, rng: Any) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise CheckFailed("something tried to reach the network")

    with (
        tempfile.TemporaryDirectory() as empty_cache,
        patch.object(socket.socket, "connect", refuse),
        patch.object(socket, "getaddrinfo", refuse),
    ):
        folder, says = find_model("gpt2", cache_dir=empty_cache)
        if folder != TINY_FOLDER or "tiny" not in says or "--download" not in says:
            raise CheckFailed(
                f"gpt2 is not there, so the tiny model should stand in; got {folder}: {says}"
            )
        with patch.object(find, "_cached", return_value=None):
            ModelWithCustomAttention(TINY, device=device)
    size = sum(file.stat().st_size for file in TINY_FOLDER.iterdir() if file.is_file())
    if size > 5_000_000:
        raise CheckFailed(f"the folder has {size:,} bytes; at most 5,000,000 are allowed")


@suite.check("model", [Case("answer", why="the course's prompt, greedy and sampled", new=160)])
def bundled_model_writes_sentences(case: Case, device: torch.device, rng: Any) -> None:
    expect_kernels(device, 4, 5)
    known = set((TINY_FOLDER / "words.txt").read_text(encoding="utf-8").split())
    for options in ({}, {"do_sample": True, "seed": SAMPLE_SEED}):
        text = _tiny(device).generate(PROMPT, case.new, **options).removeprefix(PROMPT)
        unknown = sorted(set(re.findall(r"[\w-]+", text)) - known)
        if unknown:
            raise CheckFailed(f"words that are not in the corpus: {', '.join(unknown)}\n{text}")
        if len(re.findall(r"[.!?]", text)) < 4:
            raise CheckFailed(f"fewer than 4 sentences in {case.new} tokens: {text}")


# ---- what it writes, and how fast -----------------------------------------------------------------


@suite.benchmark("text", devices=("cpu", "cuda"))
def generated_text(device: torch.device, record: Record) -> None:
    folder, says = find_model("gpt2")
    record.text("text from", says.removeprefix("model: "))
    for name, attention in (("generated text", NAME), ("reference text", "sdpa")):
        model = ModelWithCustomAttention(folder, device=device, attention=attention)
        record.text(name, model.generate(PROMPT, 100))


@suite.benchmark("speed", fields=("time per token",))
def time_per_token(device: torch.device, record: Record) -> None:
    folder, says = find_model("gpt2")
    new = 64
    models = {
        "ours": ModelWithCustomAttention(folder, device=device),
        "Hugging Face with SDPA": ModelWithCustomAttention(folder, device=device, attention="sdpa"),
    }

    def run(model: ModelWithCustomAttention) -> Tensor:
        return model.generate_tokens(*model.encode([PROMPT]), new, ignore_end=True)

    before = kernel_calls.copy()
    run(models["ours"])
    layers = models["ours"].model.config.n_layer
    wanted = {"prefill": layers, "decode": layers * (new - 1)}
    if (calls := dict(kernel_calls - before)) != wanted:
        raise CheckFailed(
            f"{new} tokens should take these kernel calls: {wanted}; they took {calls}"
        )
    times = measure(
        {name: lambda m=m: run(m) for name, m in models.items()}, seconds=6, include_host=True
    )
    times = {name: timing.per(new) for name, timing in times.items()}
    ours = times.pop("ours")
    record.add(
        Benchmark(
            "time per token",
            f"B1, {new} tokens after the course's prompt, {says.removeprefix('model: ').split(',')[0]}",
            torch.float32,
            ours,
            times,
            note="all of generate(), prefill and Hugging Face's Python code included",
        )
    )


# ---- models ---------------------------------------------------------------------------------------


@cache
def _tiny(device: torch.device) -> ModelWithCustomAttention:
    return ModelWithCustomAttention(TINY, device=device)


@cache
def _models(
    weights_from: str, device: torch.device
) -> tuple[PreTrainedModel, PreTrainedModel, PreTrainedModel]:
    """One set of weights in three models: our kernels, Hugging Face's eager attention, and that in float64.

    ``weights_from``: "tiny" (the bundled model), "random" (a small GPT-2) or "llama" (a small Llama).
    """
    if weights_from == "tiny":
        config = GPT2Config.from_pretrained(TINY_FOLDER)
        weights = _tiny(device).model.state_dict()
    elif weights_from == "random":
        config = GPT2Config(
            n_layer=3, n_head=2, n_embd=128, vocab_size=300, n_positions=128,
            bos_token_id=0, eos_token_id=None,
        )  # fmt: skip
        weights = None
    else:
        config = LlamaConfig(
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=128,
            intermediate_size=256, vocab_size=300, max_position_embeddings=128,
            bos_token_id=0, eos_token_id=None,
        )  # fmt: skip
        weights = None
    cls = LlamaForCausalLM if weights_from == "llama" else GPT2LMHeadModel
    models = []
    for attention, dtype in (
        (NAME, torch.float32),
        ("eager", torch.float32),
        ("eager", torch.float64),
    ):
        # _from_config writes into the config: models that share one would all run the same attention
        model = cls._from_config(copy.deepcopy(config), attn_implementation=attention)
        if weights is None:
            # PyTorch's initial weights give almost equal logits, and so always the same token.
            generator = torch.Generator().manual_seed(1)
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.24)
            weights = model.state_dict()
        model.load_state_dict(weights)
        models.append(model.to(device, dtype).eval())
    return tuple(models)


test_task7 = suite.pytest()

if __name__ == "__main__":
    suite.main()
