"""GPT-2's text as it comes, its command, and where it parts from Hugging Face's."""

import copy
import http.client
import io
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface, GPT2Config, GPT2LMHeadModel
from transformers.utils import logging as transformers_logging

from common.build import KernelError
from common.paths import ROOT
from task7 import attention, bisection, find, inference
from task7.attention import NAME, course_attention, kernel_calls
from task7.bisection import _origin, bisect, bisect_batch, show
from task7.inference import PROMPT, TINY, ModelWithCustomAttention
from task7.model import LEAST_TEMPERATURE
from task7.streaming import Meter, NotFinite, _Blocks, texts_of

PROMPTS = ("Once upon a time there was", "Why?", "One morning, Mira walked to")


@pytest.fixture(scope="module")
def model():
    return ModelWithCustomAttention(TINY, device="cpu")


@pytest.fixture(scope="module")
def reference():
    return ModelWithCustomAttention(TINY, device="cpu", attention="sdpa")


@pytest.fixture
def planted():
    """A function that plants an error: calls of layer 1 that ``where`` accepts return what ``spoil`` makes of them."""

    def plant(spoil, where=lambda q: True):
        def wrong(module, query, *args, **options):
            out, weights = course_attention(module, query, *args, **options)
            if module.layer_idx == 1 and where(query):
                out = spoil(out)
            return out, weights

        AttentionInterface.register(NAME, wrong)

    yield plant
    AttentionInterface.register(NAME, course_attention)


def joined(pieces):
    return ["".join(column) for column in zip(*pieces, strict=True)]


def generating():
    return [t for t in threading.enumerate() if t.name.startswith("generate")]


# ---- streaming


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


@pytest.fixture
def said_by_transformers(caplog, monkeypatch):
    """What its logger would write to stderr, also if it has said it before."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    transformers_logging.warning_once.cache_clear()
    return caplog


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


# ---- the command


def command(*arguments):
    inference.run(["--model", TINY, "--device", "cpu", *arguments], NAME, "")


SPEED = (
    r"(\d+) tokens in [\d.]+ s, [\d.]+ tokens/s; the first after [\d.]+ ms, then [\d.]+ ms per step"
)


def test_one_prompt_is_continued(model, capsys):
    command("--max-new-tokens", "12")
    said = capsys.readouterr().out
    assert f"\n{model.generate(PROMPT, 12)}\n\n" in said
    assert re.search(SPEED + r" \(warm-up before: 2 steps\)", said)[1] == "12"
    assert "our prefill kernel was called 4 times and our decode kernel 44 times" in said


def test_several_prompts_have_a_block_each(model, capsys, monkeypatch):
    blocks = "\n\n".join(model.generate(PROMPTS, 8))
    command("--prompt", *PROMPTS[:2], "--prompt", PROMPTS[2], "--max-new-tokens", "8")
    said = capsys.readouterr().out
    assert f"\n\n{blocks}\n\n" in said and re.search(SPEED, said)[1] == "24"
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join([*PROMPTS, "", ""])))
    command("--prompt", "-", "--max-new-tokens", "8")
    assert f"\n\n{blocks}\n\n" in capsys.readouterr().out


def test_a_terminal_shows_several_prompts_growing(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # for rich, a terminal
    monkeypatch.setenv("TERM", "xterm")
    command("--prompt", *PROMPTS[:2], "--max-new-tokens", "8")
    said = capsys.readouterr().out
    assert "\x1b[1mWhy?\x1b[0m" in said and "\x1b[?25h" in said  # the cursor is shown again


def test_blocks_that_do_not_fit_show_their_last_rows_until_they_are_complete():
    blocks, console = _Blocks(["a", "b"]), Console(width=10, height=8, file=io.StringIO())

    def shown():
        rows = console.render_lines(blocks, pad=False)
        return ["".join(segment.text for segment in row).rstrip() for row in rows]

    for i in range(6):
        blocks.add([f" {i}1234567", f" {i}1"])
    assert shown() == ["", "31234567", "41234567", "51234567", "", "b 01 11 21", "31 41 51"]
    blocks.growing = False
    assert len(shown()) == 10 and shown()[:3] == ["", "a 01234567", "11234567"]


def test_numbers_and_dtype_reach_the_model(model, capsys):
    numbers = {"temperature": 1.5, "top_k": 5, "top_p": 0.8, "seed": 7}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in numbers.items()]
    command("--sample", *options, "--max-new-tokens", "8")
    expected = model.generate(PROMPT, 8, do_sample=True, **numbers)
    assert expected in capsys.readouterr().out and expected != model.generate(PROMPT, 8)
    command("--dtype", "bfloat16", "--max-new-tokens", "2")
    assert "cpu, bfloat16, attention course_attention" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--model", "gpt-17"], "known are gpt2, gpt2-medium, gpt2-large, gpt2-xl, tiny"),
        (
            ["--model", str(ROOT / "task7")],
            "has no GPT-2 in it: expected config.json; model.safetensors or model.safetensors.index.json; "
            "and vocab.json and merges.txt, or tokenizer.json",
        ),
        (["--model", ""], "unknown model '': known are gpt2"),
        (["--model", "m" * 5000], "mm...': known are gpt2"),
        (["--prompt", ""], "at least one character"),
        (["--prompt", "\udcff"], "valid Unicode"),
        (["--sample", "--top-p", "2"], "top_p must be above 0 and at most 1; got 2.0"),
        (["--sample", "--temperature", "0"], "temperature must be at least 1e-30"),
        (["--device", "abacus"], "device must be cpu or cuda; got 'abacus'"),
        (["--max-new-tokens", "0"], "max_new_tokens must be at least 1"),
        (["--bisect", "--prompt", "a", ""], "at least one character"),
        (
            ["--bisect", "--temperature", "nan"],
            "temperature must be at least 1e-30 and finite; got nan",
        ),
        (["--bisect", "--top-k", "-3"], "top_k must be at least 0"),
        (["--bisect", "--top-p", "0"], "top_p must be above 0"),
        (["--bisect", "--seed", "-3"], "seed must be from 0 to 2**64 - 1; got -3"),
    ],
)
def test_bad_arguments_end_with_a_sentence(arguments, words):
    with pytest.raises(SystemExit, match=re.escape(words)):
        command(*arguments)


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(inference.TINY_FOLDER, tmp_path / "model")


@pytest.mark.parametrize(
    "file, content, words",
    [
        ("model.safetensors", "no weights", "cannot load the model in {}: SafetensorError: "),
        ("config.json", "[]", "{}/config.json must be a JSON object; got list"),
        ("config.json", "{", "cannot read {}/config.json as JSON: Expecting"),
        ("config.json", b"\xff", "cannot read {}/config.json as JSON: 'utf-8' codec"),
        ("config.json", "{}", "the model in {} is of type None"),
        ("config.json", {"n_head": 0}, "cannot load the model in {}: ZeroDivisionError: "),
        ("config.json", {"n_head": 5}, "cannot load the model in {}: ValueError: "),
        ("config.json", {"n_layer": 0}, "the model in {} must have at least one layer; got 0"),
        (
            "config.json", {"n_layer": 2},
            "the weights in {} have 22 beyond those of its config.json: transformer.h.2.attn.c_attn.weight, "
            "transformer.h.2.attn.c_proj.bias, transformer.h.2.attn.c_proj.weight, ...",
        ),
        (
            "config.json", {"n_positions": 2048},
            "the weights in {} do not fit its config.json, 1 of them: transformer.wpe.weight must be (2048, 192); "
            "got (1024, 192)",
        ),
        ("config.json", {"return_dict": False}, "cannot load the model in {}: AttributeError: "),
        ("config.json", {"n_layer": 6}, "the weights in {} lack 24 of the model's, transformer.h.4"),
        ("config.json", {"tie_word_embeddings": False}, "lack 1 of the model's, lm_head.weight among"),
        ("generation_config.json", "{", "cannot read {}/generation_config.json as JSON"),
        ("generation_config.json", {"eos_token_id": "x"}, "cannot load the model in {}: TypeError: "),
        ("generation_config.json", {"max_time": "x"}, "cannot load the model in {}: TypeError: "),
        ("generation_config.json", {"cache_implementation": "quantized"}, "cannot load the model in {}: ImportError: "),
        ("tokenizer_config.json", {"model_max_length": "x"}, "cannot load the model in {}: TypeError: "),
        ("tokenizer.json", "{", "cannot read {}/tokenizer.json as JSON"),
        ("tokenizer.json", "{}", "cannot load the model in {}: KeyError: "),
        ("tokenizer_config.json", "null", "{}/tokenizer_config.json must be a JSON object"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_read(folder, file, content, words, said_by_transformers):
    if isinstance(content, dict):  # changes to what is there
        content = json.dumps(json.loads((folder / file).read_text()) | content)
    (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=re.escape(words.format(folder))):
        ModelWithCustomAttention(folder)
    assert not said_by_transformers.records  # the sentence has it all


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_masks_of_earlier_versions_among_the_weights(folder, model):
    def add_masks(weights):
        weights["transformer.h.0.attn.bias"] = torch.ones(1, 1, 4, 4).tril()
        weights["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)

    change_weights(folder, add_masks)
    assert ModelWithCustomAttention(folder).generate("Once", 5) == model.generate("Once", 5)


def test_weights_in_several_files(folder, model):
    (folder / "model.safetensors").unlink()
    model.model.save_pretrained(folder, max_shard_size="4MB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    loaded, _ = inference.find_model(folder)
    assert ModelWithCustomAttention(loaded).generate("Once", 5) == model.generate("Once", 5)
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ValueError, match="model.safetensors.index.json as JSON"):
        inference.find_model(folder)


def test_a_server_that_does_not_speak_http(monkeypatch):
    def answer(*_, **__):
        raise http.client.BadStatusLine("SSH-2.0")

    monkeypatch.setattr(find.urllib.request, "urlopen", answer)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(ValueError, match="cannot download openai-community/gpt2 from .*: SSH-2.0"):
        find._download("openai-community/gpt2", None)


def overflow(weights):
    """In float16 alone: the inner product of layer 1 exceeds 65504."""
    for name in ("c_fc", "c_proj"):
        weights[f"transformer.h.1.mlp.{name}.weight"] *= 200


@pytest.mark.parametrize("arguments", [[], ["--sample"], ["--bisect"]], ids=" ".join)
def test_a_model_that_overflows(folder, capsys, arguments):
    change_weights(folder, overflow)
    options = ["--model", str(folder), "--max-new-tokens", "3", "--prompt", "Once upon"]
    whose = "reference" if "--bisect" in arguments else "model"
    with pytest.raises(
        SystemExit, match=f"error: the logits of the {whose} must be finite; got NaN or infinity in float16, whose "
        "largest number is 65504",
    ):  # fmt: skip
        command(*options, "--dtype", "float16", *arguments)
    assert "Once" not in capsys.readouterr().out
    command(*options, "--dtype", "bfloat16", *arguments)


def test_a_tokenizer_of_another_model(folder, model):
    config = GPT2Config.from_pretrained(folder, vocab_size=1000)
    GPT2LMHeadModel(config).save_pretrained(folder)
    most = model.model.config.vocab_size - 1
    with pytest.raises(ValueError, match=f"has ids up to {most}; the model's end at 999"):
        ModelWithCustomAttention(folder)


@pytest.mark.parametrize(
    "stdin, words", [(None, "is closed"), (io.StringIO(), "is empty"), (io.StringIO("\n"), "is empty")]
)  # fmt: skip
def test_no_prompt_on_the_standard_input(monkeypatch, stdin, words):
    monkeypatch.setattr("sys.stdin", stdin)
    with pytest.raises(SystemExit, match=f"per line of the standard input; it {words}"):
        command("--prompt", "Once", "-")


@pytest.mark.parametrize("prompts", [["Once"], ["Once", "Why?"]], ids=["one", "several"])
@pytest.mark.parametrize("target", ["a pipe", "/dev/full"])
def test_an_output_that_takes_no_more(prompts, target):
    if target == "a pipe":
        reader, writer = os.pipe()
        os.close(reader)
    elif os.path.exists(target):
        writer = os.open(target, os.O_WRONLY)
    else:
        pytest.skip(f"needs {target}")
    arguments = ["--model", TINY, "--device", "cpu", "--max-new-tokens", "2", "--prompt", *prompts]
    done = subprocess.run(
        [sys.executable, "-m", "task7.inference", *arguments],
        cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120,
    )  # fmt: skip
    os.close(writer)
    full = "error: [Errno 28] No space left on device\n"
    assert (done.returncode, done.stderr) == (1, "" if target == "a pipe" else full)


def test_help(capsys):
    with pytest.raises(SystemExit) as ended:
        command("--help")
    said = capsys.readouterr().out
    assert ended.value.code == 0 and said.startswith("usage: python -m task7.inference ")
    for option in re.findall(r"add\(\s*\"(--[\w-]+)\"", (ROOT / "task7/inference.py").read_text()):
        assert option in said


def test_ctrl_c_ends_it():
    process = subprocess.Popen(
        [sys.executable, "-m", "task7.inference", "--model", TINY, "--device", "cpu", "--max-new-tokens", "900"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        said = process.stdout.readline() + process.stdout.readline()
        said += process.stdout.read(len(PROMPT) + 5)  # the text has begun
        process.send_signal(signal.SIGINT)
        more, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 130 and errors.decode() == "\ninterrupted\n"
    assert b"tokens/s" not in said + more


# ---- bisect


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
