"""Task 7's own loop as the command and the class use it: like transformers' generate, in all that can be asked of it."""

import re
import shutil
from functools import partial

import pytest
import torch
from torch.overrides import TorchFunctionMode

from common.memory import NotEnoughMemory
from task7 import decoder, inference
from task7.attention import NAME, course_attention, course_mask, kernel_calls
from task7.bisection import bisect
from task7.decoder import Gpt2Decoder
from task7.inference import PROMPT, TINY, TINY_FOLDER, ModelWithCustomAttention
from task7.streaming import Meter, NotFinite

PROMPTS = ("Once upon a time there was", "Why?", "One morning, Mira walked to")


def in_path(path):
    model = ModelWithCustomAttention(TINY, device="cpu")
    model.use(path)
    return model


@pytest.fixture(scope="module")
def loop():
    return in_path("loop")


@pytest.fixture(scope="module")
def reference():
    return in_path("reference")


def joined(pieces):
    return ["".join(column) for column in zip(*pieces, strict=True)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cache": "static"},
        {"do_sample": True, "seed": 3},
        {"do_sample": True, "seed": 5, "temperature": 1.7, "top_k": 20, "top_p": 0.9},
        # tokens at random: sequences that end early
        {"do_sample": True, "seed": 4, "temperature": 100.0, "top_k": 0},
    ],
    ids=["greedy", "static", "sampled", "shaped", "random"],
)
@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["one", "several"])
def test_texts_are_those_of_transformers(loop, reference, prompts, options):
    calls, state = kernel_calls.total(), torch.get_rng_state()
    want = reference.generate(prompts, 30, **options)
    assert loop.generate(prompts, 30, **options) == want
    pieces = joined(loop.stream(prompts, 30, **options))
    assert [p + text for p, text in zip(prompts, pieces, strict=True)] == want
    assert kernel_calls.total() == calls  # those of generate did not run
    assert torch.equal(torch.get_rng_state(), state)


# Values, given the first and the tenth token that are written without the option.
OPTIONS = {
    "repetition_penalty": lambda first, tenth: 1.8,
    "no_repeat_ngram_size": lambda first, tenth: 1,
    "suppress_tokens": lambda first, tenth: [first],
    "begin_suppress_tokens": lambda first, tenth: [first],
    "bad_words_ids": lambda first, tenth: [[first]],
    "forced_eos_token_id": lambda first, tenth: 5,
    "eos_token_id": lambda first, tenth: tenth,
    "max_time": lambda first, tenth: 1e-9,
    # these change nothing
    "return_dict_in_generate": lambda first, tenth: True,
    "cache_implementation": lambda first, tenth: "static",
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 2}], ids=["greedy", "sampled"])
def test_options_of_the_folder_are_those_of_transformers(
    loop, reference, monkeypatch, option, options
):
    tokens, mask = loop.encode(PROMPTS)
    plain = reference.generate_tokens(tokens, mask, 20, **options)
    value = OPTIONS[option](*plain[0, tokens.shape[1] :][[0, 9]].tolist())
    for model in (loop, reference):
        monkeypatch.setattr(model.model.generation_config, option, value)
    want = reference.generate_tokens(tokens, mask, 20, **options)
    changed = option not in ("return_dict_in_generate", "cache_implementation")
    assert torch.equal(want, plain) != changed
    assert torch.equal(loop.generate_tokens(tokens, mask, 20, **options), want)
    steps = torch.stack(list(loop.stream_tokens(tokens, mask, 20, **options)), dim=1)
    assert torch.equal(steps, want[:, tokens.shape[1] :])


BEAMS = "one token per step is expected, from greedy decoding or sampling; .* asks for beam search"


def test_beam_search_is_refused_before_anything_runs(loop, reference, monkeypatch):
    for model in (loop, reference):
        monkeypatch.setattr(model.model.generation_config, "num_beams", 2)
        with pytest.raises(ValueError, match=BEAMS):
            model.stream("Once", 3)
        with pytest.raises(ValueError, match=BEAMS):
            model.trace(*model.encode(["Once"]), 3)
    assert reference.generate("Once", 3)  # transformers' own
    with pytest.raises(ValueError, match=BEAMS):
        loop.generate("Once", 3)


@pytest.mark.parametrize("ends", ["one", "a list", "none"])
def test_the_end_of_a_text(loop, reference, monkeypatch, ends):
    tokens, mask = loop.encode(PROMPTS)
    new = loop.generate_tokens(tokens, mask, 20)[:, tokens.shape[1] :]
    id = int(new[1, 6])
    end = {"one": id, "a list": [id, int(new[0, 9])], "none": None}[ends]
    for model in (loop, reference):
        monkeypatch.setattr(model.model.generation_config, "eos_token_id", end)
    want = reference.generate_tokens(tokens, mask, 20)
    assert torch.equal(loop.generate_tokens(tokens, mask, 20), want)
    steps = torch.stack(list(Meter(end).watch(loop.stream_tokens(tokens, mask, 20))), dim=1)
    assert torch.equal(steps, want[:, tokens.shape[1] :])


@pytest.mark.parametrize("end", ["the first", "outside the vocabulary"])
def test_no_text_ends_where_its_end_is_ignored(loop, reference, monkeypatch, end):
    tokens, mask = loop.encode(PROMPTS[:1])
    first = int(reference.generate_tokens(tokens, mask, 1)[0, -1])
    id = first if end == "the first" else loop.model.config.vocab_size + 7
    for model in (loop, reference):
        monkeypatch.setattr(model.model.generation_config, "eos_token_id", id)
    want = reference.generate_tokens(tokens, mask, 8, ignore_end=True)
    assert want.shape[1] == tokens.shape[1] + 8
    assert torch.equal(loop.generate_tokens(tokens, mask, 8, ignore_end=True), want)


def test_a_loop_of_steps_in_one_launch(reference, monkeypatch):
    """Logits for sampling and for options, tokens that replace the likeliest, and hidden states."""
    monkeypatch.setattr(decoder, "Gpt2Decoder", partial(Gpt2Decoder, persistent=True))
    model, prompts = in_path("loop"), ["Once upon", "Why?"]
    for options in ({}, {"do_sample": True, "seed": 3}):
        assert model.generate(prompts, 4, **options) == reference.generate(prompts, 4, **options)
    assert model._loop._decoder.one_launch is not None
    for each in (model, reference):
        monkeypatch.setattr(each.model.generation_config, "repetition_penalty", 1.8)
    assert model.generate(prompts, 4) == reference.generate(prompts, 4)
    tokens, mask = model.encode(prompts[:1])
    mine, theirs = (each.trace(tokens, mask, 4) for each in (model, reference))
    assert torch.equal(mine.sequences, theirs.sequences)
    for a, b in zip(mine.logits, theirs.logits, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    for step, other in zip(mine.hidden_states, theirs.hidden_states, strict=True):
        for a, b in zip(step, other, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


def test_a_path_can_be_changed(reference):
    model = in_path("loop")
    calls = kernel_calls.total()
    want = model.generate("Once", 5)
    buffers = model._loop._decoder
    model.use("generate")
    assert model.generate("Once", 5) == want and kernel_calls.total() > calls
    model.use("loop")
    assert model.generate("Why", 5) == reference.generate("Why", 5)
    assert model._loop._decoder is buffers  # and with them the graph
    with pytest.raises(
        ValueError, match="path must be one of generate, loop, reference; got 'lop'"
    ):
        model.use("lop")


def test_closing_a_stream_ends_its_thread(loop):
    pieces = loop.stream("Once upon", 1000)
    next(pieces)
    pieces.close()
    assert loop.generate("Once upon", 3)  # the lock is free


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 1}], ids=["greedy", "sampled"])
def test_logits_that_are_not_finite(loop, monkeypatch, options):
    real = decoder.decode_attention
    monkeypatch.setattr(decoder, "decode_attention", lambda *a, **o: real(*a, **o) * torch.nan)
    pieces = loop.stream(PROMPTS, 4, **options)
    assert next(pieces)  # the prompts' own are finite
    with pytest.raises(
        NotFinite, match="of the model must be finite; got NaN or infinity in float32"
    ):
        list(pieces)
    with pytest.raises(NotFinite):
        loop.generate(PROMPTS, 4, **options)
    assert loop.generate(PROMPTS, 1, **options)


# ---- what does not fit


def test_a_text_past_what_was_captured_is_refused_before_anything_runs(loop, monkeypatch):
    ran = []
    monkeypatch.setattr(Gpt2Decoder, "_layers", lambda *_: ran.append(_))
    with pytest.raises(ValueError, match="leaves room for 1023 new ones in 1024 tokens"):
        loop.stream("Once", 1024)
    decoder = Gpt2Decoder(loop.model, 1, 16)
    for call in (decoder.generate, decoder.steps):
        with pytest.raises(ValueError, match="16 positions are too few for 10 tokens and 8 new"):
            call([[5] * 10], 8)
    with pytest.raises(ValueError, match="needs a prompt and a position that is left; 0 of 16"):
        decoder.step()
    assert not ran


def test_a_step_past_the_last_position_is_refused(loop):
    decoder = Gpt2Decoder(loop.model, 1, 8)
    decoder.generate([[5] * 6], 3)
    with pytest.raises(ValueError, match="a position that is left; 8 of 8 are filled"):
        decoder.step()


def test_a_cache_that_does_not_fit_is_refused(loop, monkeypatch):
    def expect_room(what, elements, dtype, device):
        raise NotEnoughMemory(f"{what} need {elements}")

    monkeypatch.setattr(decoder, "expect_room", expect_room)
    c = loop.model.config
    with pytest.raises(NotEnoughMemory, match=f"need {c.n_layer * 2 * 3 * 64 * c.n_embd}$"):
        Gpt2Decoder(loop.model, 3, 64)


def test_a_model_that_the_loop_cannot_run(monkeypatch):
    model = in_path("reference")
    monkeypatch.setattr(model.model.config, "activation_function", "relu")
    with pytest.raises(ValueError, match="activation_function must be 'gelu_new'"):
        model.use("loop")
    assert model.generate("Once", 2)  # as before


# ---- bisect


@pytest.mark.parametrize(
    "paths", [("loop", "reference"), ("loop", "generate"), ("generate", "loop")], ids="-".join
)
def test_bisect_of_any_two_finds_nothing(paths):
    models = [in_path(path) for path in paths]
    found = bisect(*models, PROMPT, 12)
    assert found.fork is None and found.origin is None and found.new == 12
    assert 0 < found.logits < 1e-4 and len(found.layers) == 4 and not found.behind_layers
    assert all(0 < layer.ours <= layer.allowed for layer in found.layers)


def test_the_trace_is_transformers(loop, reference):
    tokens, mask = loop.encode([PROMPT])
    mine, theirs = (model.trace(tokens, mask, 6) for model in (loop, reference))
    assert torch.equal(mine.sequences, theirs.sequences)
    for a, b in zip(mine.logits, theirs.logits, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    for step, other in zip(mine.hidden_states, theirs.hidden_states, strict=True):
        assert len(step) == len(other) == 5
        for a, b in zip(step, other, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)
    with pytest.raises(ValueError, match="prompts of one length; got padding"):
        loop.trace(*loop.encode(PROMPTS), 3)


def test_bisect_names_a_layer_of_the_loop(loop, reference, monkeypatch):
    real, layer = decoder.decode_attention, [0]

    def wrong(q, k_cache, v_cache, **options):
        layer[0] += 1
        out = real(q, k_cache, v_cache, **options)
        return out * 0 if layer[0] % 4 == 3 else out  # the third of four

    monkeypatch.setattr(decoder, "decode_attention", wrong)
    found = bisect(loop, reference, PROMPT, 20)
    assert found.origin.layer == 2
    assert found.origin.position == found.origin.first == len(loop.encode([PROMPT])[0][0])


def wrong_logits(decoder, hidden):
    choose(decoder, hidden)
    decoder.logits[:, 7] += 30
    torch.argmax(decoder.logits, dim=-1, out=decoder.tokens)


def wrong_choice(decoder, hidden):
    choose(decoder, hidden)
    decoder.tokens.fill_(7)


def a_little_off(decoder, hidden):
    choose(decoder, hidden)
    decoder.logits[:, 7] += 0.01  # changes no token


choose = Gpt2Decoder._choose


@pytest.mark.parametrize("wrong", [wrong_logits, wrong_choice, a_little_off])
def test_bisect_sees_a_fault_behind_the_layers(monkeypatch, capsys, wrong):
    monkeypatch.setattr(Gpt2Decoder, "_choose", wrong)
    with pytest.raises(SystemExit) as ended:
        command("--bisect", "--path", "loop", "--prompt", "Once", "--max-new-tokens", "4")
    said = capsys.readouterr().out
    assert ended.value.code == 1 and "the fault lies behind the layers, in the logits or" in said
    assert ("all tokens agree" in said) == (wrong is a_little_off)


# ---- the command


def command(*arguments):
    inference.run(["--model", TINY, "--device", "cpu", *arguments], NAME, "")


def test_the_command_writes_the_same_by_both_paths(capsys):
    numbers = ("--max-new-tokens", "10", "--prompt", *PROMPTS)
    for sampling in ((), ("--sample", "--top-p", "0.9", "--temperature", "1.3", "--seed", "8")):
        said = []
        for path in ("generate", "loop"):
            command(*numbers, *sampling, "--path", path)
            said.append(capsys.readouterr().out)
        texts = [out.partition(" tokens in ")[0] for out in said]
        assert texts[0] == texts[1] and PROMPTS[1] in texts[0]
        assert re.search(r"30 tokens in [\d.]+ s, [\d.]+ tokens/s; the first after", said[1])
        assert said[1].endswith("cpu, float32, our own loop: no CUDA graph\n")


@pytest.mark.parametrize("path", ["generate", "loop"])
def test_the_command_refuses_beam_search_before_it_prints(tmp_path, capsys, path):
    folder = shutil.copytree(TINY_FOLDER, tmp_path / "beams")
    (folder / "generation_config.json").write_text('{"num_beams": 2}')
    with pytest.raises(SystemExit, match=f"error: {BEAMS}"):
        command("--model", str(folder), "--prompt", "Once", "--path", path)
    assert capsys.readouterr().out == f"model: {folder}\n"


def test_the_command_bisects_two_paths(capsys):
    short = ("--bisect", "--max-new-tokens", "4", "--prompt", "Once")
    command("--path", "loop", *short)
    said = capsys.readouterr().out
    assert "all tokens agree" in said and re.search("layer +our loop +Hugging Face", said)
    command("--against", "loop", *short)
    assert re.search("layer +our attention +our loop", capsys.readouterr().out)
    with pytest.raises(SystemExit) as ended:
        command("--path", "loop", "--against", "loop", *short)
    assert ended.value.code == 2
    assert "--path and --against are both loop" in capsys.readouterr().err


def test_the_commands_help(capsys):
    for arguments in (["--path", "lop"], ["--help"]):
        with pytest.raises(SystemExit):
            command(*arguments)
    said = capsys.readouterr()
    assert "invalid choice: 'lop'" in said.err
    assert "part only where rounding of a logit changes a draw" in " ".join(said.out.split())


# ---- what a step of generate costs the host


class Calls(TorchFunctionMode):
    """Counts the calls of torch's functions and of tensors' methods and attributes."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.names.append(getattr(function, "__name__", str(function)))
        return function(*args, **(kwargs or {}))


def bounds(mask2d, q_length=1, offset=99, keys=100, **options):
    return course_mask(len(mask2d), q_length, keys, offset, attention_mask=mask2d, **options)


def test_a_text_without_padding_needs_no_mask():
    ones, padded = torch.ones(2, 100, dtype=torch.bool), torch.ones(2, 100, dtype=torch.bool)
    padded[1, :7] = False
    assert bounds(ones) is None and bounds(ones, q_length=100, offset=0) is None
    assert course_mask(2, 1, 100, 99) is None
    want = torch.tensor([[0, 7], [100, 100]], dtype=torch.int32)
    assert torch.equal(bounds(padded)[..., 0, 0], want)
    # a chunk of a prompt, a cache whose tail is not filled, and where transformers wants a mask
    assert bounds(ones, q_length=10, offset=90) is not None
    assert bounds(ones, keys=200) is not None
    assert bounds(ones, offset=torch.tensor([99])) is not None
    assert bounds(ones, allow_is_causal_skip=False) is not None
    longer = torch.ones(2, 120, dtype=torch.bool)
    assert (
        bounds(longer) is not None
        and bounds(ones[:, :60], q_length=50, offset=0, keys=50) is not None
    )


def test_a_layer_takes_bounds_without_copies():
    """It does so for every layer and token, and such calls are what generate spends its time on."""
    q, k = torch.randn(3, 2, 1, 64), torch.randn(3, 2, 100, 64)
    padded = torch.ones(3, 100, dtype=torch.bool)
    padded[1, :7] = False
    mask = bounds(padded)
    assert (
        mask.is_contiguous()
    )  # transformers makes it so for a static cache, which would be a copy
    module = torch.nn.Module()
    made = {}
    for name, given in (("bounds", mask), ("none", None)):
        with Calls() as calls:
            course_attention(module, q, k, k, given)
        asked = ("__get__", "dim", "get_device", "is_contiguous", "stride")
        made[name] = [n for n in calls.names if n not in asked]
    assert made["none"] == ["transpose"] * 3 + ["empty_like"]
    assert made["bounds"] == ["transpose"] * 3 + ["flatten", "unbind", "empty_like"]
