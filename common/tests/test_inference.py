"""GPT-2's command, and the folders of models that it reads."""

import http.client
import io
import json
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
from rich.console import Console
from transformers import GPT2Config, GPT2LMHeadModel

from common.paths import ROOT
from common.tests import models
from common.tests.models import PROMPTS, change_weights, command
from task7 import find, inference
from task7.inference import PROMPT, TINY, ModelWithCustomAttention
from task7.streaming import _Blocks

model, folder = models.model, models.folder  # fixtures
said_by_transformers = models.said_by_transformers

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
