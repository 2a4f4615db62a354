"""GPT-2 through the kernels of tasks 4 and 5: texts to tokens, tokens to more of them, and back to texts."""

import math
import threading
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2LMHeadModel, GPT2Tokenizer
from transformers.generation import BaseStreamer
from transformers.utils import logging

from task7.attention import NAME
from task7.find import HUB_MODELS, TINY_FOLDER, find_model
from task7.streaming import expect_finite, expect_steps, steps_of, texts_of

# The ways to continue a text, and the attention that transformers then has for the model.
PATHS = {
    "generate": NAME,  # transformers' generate with our attention
    # BEGIN STAFF
    "loop": NAME,  # a loop of our own around our kernels, each step one CUDA graph
    # END STAFF
    "reference": "sdpa",  # transformers' generate with its own attention, PyTorch's SDPA
}

LEAST_TEMPERATURE = 1e-30  # scores divided by less could be infinite in float32

# Sampling uses PyTorch's random state, of which a process has one: one text at a time, whatever thread asks for it.
_generating = threading.Lock()


class ModelWithCustomAttention:
    """GPT-2 whose attention is ours, driven by Hugging Face's ``generate``; ``use`` names other ways.

    Args:
        model_name: gpt2, gpt2-medium, gpt2-large or gpt2-xl (from the local Hugging Face cache; if it is not there, the
            bundled tiny model, with a warning), "tiny", or a folder with a GPT-2.
        max_seq_len: length of the longest text in tokens, prompt included; the model's number of positions limits it.
        device: where to run; the GPU if there is one, otherwise the CPU.
        dtype: of weights and activations.
        download: fetch a model that is not in the local cache.
        attention: name of the attention; ``"sdpa"`` or ``"eager"`` for Hugging Face's own.

    Raises:
        ValueError: an unknown name, a model that is not a GPT-2, files that are broken, incomplete or do not belong
            together, a download that failed.
    """

    def __init__(
        self,
        model_name: str | Path = "gpt2",
        max_seq_len: int = 1024,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        download: bool = False,
        attention: str = NAME,
    ) -> None:
        if max_seq_len < 1:
            raise ValueError(f"max_seq_len must be at least 1; got {max_seq_len}")
        folder, says = find_model(model_name, download=download)
        if folder == TINY_FOLDER and str(model_name) in HUB_MODELS:
            warnings.warn(says, stacklevel=2)
        self.device = _device(device)
        # Each object reads the folder again: two models made from one config object would both run the
        # attention of the later one.
        with _loading(folder):
            with _silence():
                self.model, report = GPT2LMHeadModel.from_pretrained(
                    folder,
                    attn_implementation=PATHS["reference"],
                    dtype=dtype,
                    local_files_only=True,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # they are in the report
                )
            self.tokenizer = GPT2Tokenizer.from_pretrained(folder, local_files_only=True)
        self._check_files(folder, report)
        self.model.to(self.device).eval()
        # Where no token is hidden, transformers drops the mask, and would warn that it is missing if this is a token.
        self.model.config.pad_token_id = None
        self.tokenizer.padding_side = "left"  # so that the last token of every prompt is its end
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.max_seq_len = min(max_seq_len, self.model.config.n_positions)
        # BEGIN STAFF
        self._loop: Any = None
        self._in_loop = False
        # END STAFF
        # A token by transformers' own attention: odd files fail here, not in the first text. What is a ValueError has
        # its own sentence there.
        with _loading(folder), suppress(ValueError), torch.inference_mode():
            tokens, mask = self.encode(["a"])
            self.model.generate(
                tokens,
                attention_mask=mask,
                pad_token_id=self.tokenizer.pad_token_id,
                **generate_options(1, 1.0, 0, 1.0, False, None, "dynamic"),
            )
        self.model.set_attn_implementation(attention)

    def _check_files(self, folder: Path, report: dict[str, Any]) -> None:
        """ValueError for weights that are not the config's, and for tokens that have no row of the embeddings."""
        if (layers := self.model.config.n_layer) < 1:
            raise ValueError(f"the model in {folder} must have at least one layer; got {layers}")
        if others := sorted(report["mismatched_keys"]):
            name, got, wanted = others[0]
            raise ValueError(
                f"the weights in {folder} do not fit its config.json, {len(others)} of them: {name} must be "
                f"{tuple(wanted)}; got {tuple(got)}"
            )
        if missing := sorted(report["missing_keys"]):
            raise ValueError(
                f"the weights in {folder} lack {len(missing)} of the model's, {missing[0]} among them"
            )
        # masks of earlier versions; transformers ignores attn.bias, the other one, by itself
        others = [key for key in report["unexpected_keys"] if not key.endswith("attn.masked_bias")]
        if others:
            raise ValueError(
                f"the weights in {folder} have {len(others)} beyond those of its config.json: "
                f"{', '.join(sorted(others)[:3])}{', ...' if len(others) > 3 else ''}"
            )
        most = max(self.tokenizer.get_vocab().values(), default=0)
        if most >= (vocabulary := self.model.config.vocab_size):
            raise ValueError(
                f"the tokenizer in {folder} has ids up to {most}; the model's end at {vocabulary - 1}"
            )

    def use(self, path: str) -> None:
        """Continue texts in another way from now on, with the same weights: ``path`` is one of PATHS.

        Raises:
            ValueError: an unknown path, or a model that it cannot run.
        """
        if path not in PATHS:
            raise ValueError(f"path must be one of {', '.join(PATHS)}; got {path!r}")
        # BEGIN STAFF
        if path == "loop" and self._loop is None:
            from task7.decoder import Gpt2Loop

            self._loop = Gpt2Loop(self.model, self.max_seq_len)
        self._in_loop = path == "loop"
        # END STAFF
        self.model.set_attn_implementation(PATHS[path])

    def generate(
        self,
        prompt: str | Sequence[str],
        max_new_tokens: int = 50,
        temperature: float = 1.0,
        top_k: int = 50,
        *,
        top_p: float = 1.0,
        do_sample: bool = False,
        seed: int | None = None,
        cache: str = "dynamic",
    ) -> str | list[str]:
        """The prompt and its continuation, without special tokens; a list for a list of prompts.

        Args:
            prompt: one text, or several that are continued together as one batch.
            max_new_tokens: upper limit; fewer where the model ends its text.
            temperature, top_k, top_p: for sampling. Scores are divided by the temperature; then the top_k likeliest
                tokens remain (0: the whole vocabulary), and of these the fewest whose probabilities reach top_p.
            do_sample: draw each token at random; otherwise greedy decoding.
            seed: makes sampling repeatable, and leaves PyTorch's own random state unchanged.
            cache: "dynamic" grows with each token; "static" is allocated once for the longest text.

        Raises:
            ValueError: an empty prompt, one that does not fit the model together with the new tokens, numbers out of
                range, or :class:`task7.streaming.NotFinite`: logits that are NaN or infinite.
        """
        out = self.generate_tokens(
            *self.encode(_as_list(prompt)),
            max_new_tokens,
            temperature,
            top_k,
            top_p=top_p,
            do_sample=do_sample,
            seed=seed,
            cache=cache,
        )
        texts = [self.decode(row) for row in out]
        return texts[0] if isinstance(prompt, str) else texts

    def stream(
        self,
        prompt: str | Sequence[str],
        max_new_tokens: int = 50,
        temperature: float = 1.0,
        top_k: int = 50,
        *,
        top_p: float = 1.0,
        do_sample: bool = False,
        seed: int | None = None,
        cache: str = "dynamic",
    ) -> Generator[list[str]]:
        """As ``generate``, but yields the new text of each prompt after every step.

        A piece is "" where a sequence is over, or where its bytes so far are not a whole character. The pieces of a
        prompt, joined, are what ``generate`` adds to it. A thread generates; it ends when the iterator is closed or
        deleted, and its exceptions are raised here.

        Raises:
            ValueError: as ``generate``, before the first step; NotFinite after the last one.
        """
        tokens, mask = self.encode(_as_list(prompt))
        steps = self.stream_tokens(
            tokens,
            mask,
            max_new_tokens,
            temperature,
            top_k,
            top_p=top_p,
            do_sample=do_sample,
            seed=seed,
            cache=cache,
        )
        return texts_of(steps, len(tokens), self.decode)

    def encode(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Tokens and attention mask, both int64 (prompts, longest), padded on the left."""
        if not prompts or not all(isinstance(p, str) and p for p in prompts):
            raise ValueError(f"a prompt must be a text of at least one character; got {prompts!r}")
        if any("\ud800" <= c <= "\udfff" for c in "".join(prompts)):  # from bytes that are no UTF-8
            raise ValueError(f"a prompt must be valid Unicode; got {prompts!r}")
        batch = self.tokenizer(list(prompts), return_tensors="pt", padding=True, verbose=False)
        return batch["input_ids"].to(self.device), batch["attention_mask"].to(self.device)

    def decode(self, tokens: Tensor | list[int]) -> str:
        """The text of one sequence, without special tokens: padding, the end, and what a prompt has of them."""
        # The clean-up is for texts of separate words; a folder may ask for it, and it would change the prompt.
        return self.tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def generate_tokens(
        self,
        tokens: Tensor,
        mask: Tensor,
        max_new_tokens: int = 50,
        temperature: float = 1.0,
        top_k: int = 50,
        *,
        top_p: float = 1.0,
        do_sample: bool = False,
        seed: int | None = None,
        cache: str = "dynamic",
        ignore_end: bool = False,
    ) -> Tensor:
        """As ``generate``, with tokens and mask from ``encode``; returns (prompts, prompt + new tokens).

        ``ignore_end``: generate exactly ``max_new_tokens``, for measurements; the end token is never chosen.
        """
        self._check_lengths(tokens.shape[1], max_new_tokens)
        options = generate_options(
            max_new_tokens, temperature, top_k, top_p, do_sample, seed, cache
        )
        if ignore_end:
            options["min_new_tokens"] = max_new_tokens
        return self._generate(tokens, mask, seed, options).clone()  # an ordinary tensor

    def stream_tokens(
        self,
        tokens: Tensor,
        mask: Tensor,
        max_new_tokens: int = 50,
        temperature: float = 1.0,
        top_k: int = 50,
        *,
        top_p: float = 1.0,
        do_sample: bool = False,
        seed: int | None = None,
        cache: str = "dynamic",
    ) -> Generator[Tensor]:
        """As ``generate_tokens``, but yields the new tokens after every step, int64 (prompts,) on the CPU.

        A step's tokens are yielded when the device has computed them. A sequence that is over goes on with padding.

        Raises:
            ValueError: as ``stream``; a generation_config.json that asks for more than one token per step, such as
                beam search.
        """
        self._check_lengths(tokens.shape[1], max_new_tokens)
        options = generate_options(
            max_new_tokens, temperature, top_k, top_p, do_sample, seed, cache
        )
        expect_steps(self.model.generation_config)
        # a thread begins with PyTorch's default stream, whatever its parent's is
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

        def generate(streamer: BaseStreamer) -> None:
            with torch.cuda.stream(stream):
                self._generate(tokens, mask, seed, options | {"streamer": streamer})

        return steps_of(generate)

    def trace(
        self, tokens: Tensor, mask: Tensor, max_new_tokens: int = 50, *, cache: str = "dynamic"
    ) -> Any:
        """As ``generate_tokens``, greedy, with what led to the tokens, as transformers returns it.

        ``sequences`` is (prompts, prompt + new tokens). ``logits`` has for each step (prompts, vocabulary), and
        ``hidden_states`` has for each step a tuple of (prompts, its tokens, hidden): after the embeddings, and after
        each layer.
        """
        self._check_lengths(tokens.shape[1], max_new_tokens)
        options = generate_options(max_new_tokens, 1.0, 0, 1.0, False, None, cache)
        expect_steps(self.model.generation_config)
        recorded = dict.fromkeys(
            ("return_dict_in_generate", "output_logits", "output_hidden_states"), True
        )
        # each token's states once, whatever the folder's generation_config.json has
        once = {"use_cache": True, "prefill_chunk_size": None}
        return self._generate(tokens, mask, None, options | recorded | once)

    def _generate(
        self, tokens: Tensor, mask: Tensor, seed: int | None, options: dict[str, Any]
    ) -> Tensor:
        devices = [self.device] if self.device.type == "cuda" else []
        keep_random_state = nullcontext() if seed is None else torch.random.fork_rng(devices)
        # inference_mode: each call of torch takes a tenth less time than under transformers' own no_grad
        expecting_finite = (
            nullcontext() if options["return_dict_in_generate"] else self._expecting_finite()
        )
        with _generating, keep_random_state, torch.inference_mode(), expecting_finite:
            if seed is not None:
                torch.manual_seed(seed)
            # BEGIN STAFF, for students: generator = self.model
            generator = self._loop if self._in_loop else self.model
            # END STAFF
            return generator.generate(
                tokens,
                attention_mask=mask,
                pad_token_id=self.tokenizer.pad_token_id,
                **options,
            )

    @contextmanager
    def _expecting_finite(self) -> Iterator[None]:
        """NotFinite at the end of transformers' ``generate`` if its last logits are not finite.

        To look at those of each step would wait for the GPU. What overflows in a layer stays in the cache of the next
        one, and makes the last logits NaN, too.
        """
        newest: list[Tensor] = []

        def keep(module: nn.Module, inputs: Any, logits: Tensor) -> None:
            newest[:] = [logits[:, -1]]

        with self.model.lm_head.register_forward_hook(keep):
            try:
                yield
            finally:  # also where nothing could be drawn from them
                for logits in newest:
                    expect_finite(logits, self.model.dtype)

    def _check_lengths(self, prompt_tokens: int, max_new_tokens: int) -> None:
        if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1; got {max_new_tokens!r}")
        room = self.max_seq_len - prompt_tokens
        limit = (
            f"{self.max_seq_len} tokens (max_seq_len; the model has "
            f"{self.model.config.n_positions} positions)"
        )
        if room < 1:
            raise ValueError(f"the prompt has {prompt_tokens} tokens, too long for {limit}")
        if max_new_tokens > room:
            raise ValueError(
                f"a prompt of {prompt_tokens} tokens leaves room for {room} new ones in {limit}; "
                f"max_new_tokens is {max_new_tokens}"
            )


def _as_list(prompt: str | Sequence[str]) -> list[str]:
    return [prompt] if isinstance(prompt, str) else list(prompt)


def generate_options(
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    do_sample: bool,
    seed: int | None,
    cache: str,
) -> dict[str, Any]:
    """What transformers' ``generate`` takes for these numbers; ValueError where one is out of range."""
    if not (LEAST_TEMPERATURE <= temperature < math.inf or (temperature == 0 and not do_sample)):
        raise ValueError(
            f"temperature must be at least {LEAST_TEMPERATURE:g} and finite; got {temperature}"
        )
    if not isinstance(top_k, int) or top_k < 0:
        raise ValueError(f"top_k must be at least 0 (0: the whole vocabulary); got {top_k!r}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1; got {top_p}")
    if seed is not None and not (isinstance(seed, int) and 0 <= seed < 2**64):
        raise ValueError(f"seed must be from 0 to 2**64 - 1; got {seed!r}")
    if cache not in ("dynamic", "static"):
        raise ValueError(f'cache must be "dynamic" or "static"; got {cache!r}')
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "do_sample": do_sample,
        # whatever the folder's generation_config.json has: one text for each prompt, as tokens
        "num_return_sequences": 1,
        "return_dict_in_generate": False,
        "disable_compile": True,  # of a static cache: torch.compile takes a minute
    }
    if do_sample:
        options |= {"temperature": float(temperature), "top_k": top_k, "top_p": float(top_p)}
    if cache == "static":
        options["cache_implementation"] = "static"
    return options


@contextmanager
def _loading(folder: Path) -> Iterator[None]:
    """ValueError that names the folder: for what is wrong in its files transformers raises any class."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ValueError(
            f"cannot load the model in {folder}: {type(error).__name__}: {error}"
        ) from error


@contextmanager
def _silence() -> Iterator[None]:
    """Hides the bar that transformers shows while it loads weights, and its report of those that do not fit."""
    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()


def _device(wanted: torch.device | str | None) -> torch.device:
    try:
        device = torch.device(wanted or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:  # PyTorch's own words are a list of 20 kinds
        raise ValueError(f"device must be cpu or cuda; got {wanted!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"the kernels run on cpu and cuda; got {device}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda was asked for, but PyTorch sees no GPU")
    return device
