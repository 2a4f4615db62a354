"""Write text with GPT-2 through the kernels of tasks 4 and 5: ``python -m task7.inference``.

``python -m task7.inference_ref`` does the same with Hugging Face's own attention.
"""

import argparse
import json
import math
import sys
import threading
import urllib.error
import urllib.request
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors import SafetensorError
from torch import Tensor
from transformers import GPT2LMHeadModel, GPT2Tokenizer
from transformers.generation import BaseStreamer
from transformers.utils import logging

from common.build import BuildError, KernelError
from task7.attention import NAME, kernel_calls
from task7.streaming import Meter, print_texts, steps_of, texts_of

HUB_MODELS = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
TINY = "tiny"
TINY_FOLDER = Path(__file__).parent / "tiny_gpt2"
DTYPES = ("float32", "float16", "bfloat16")
PROMPT = (
    "What are the advantages of using flashattention kernels compared to the naive pytorch "
    "implementation? Think about the shared memory usage, the computation complexity, and the "
    "performance."
)

# A model on disk has all files of one of these sets.
_FILES = ("config.json", "model.safetensors", "vocab.json", "merges.txt")
_FILE_SETS = (_FILES, ("config.json", "model.safetensors", "tokenizer.json"))
_CONNECT_SECONDS = 5

# Sampling uses PyTorch's random state, of which a process has one: one text at a time, whatever thread asks for it.
_generating = threading.Lock()


class ModelWithCustomAttention:
    """GPT-2 whose attention is ours, driven by Hugging Face's ``generate``.

    Args:
        model_name: gpt2, gpt2-medium, gpt2-large or gpt2-xl (from the local Hugging Face cache; if it is not there, the
            bundled tiny model, with a warning), "tiny", or a folder with a GPT-2.
        max_seq_len: length of the longest text in tokens, prompt included; the model's number of positions limits it.
        device: where to run; the GPU if there is one, otherwise the CPU.
        dtype: of weights and activations.
        download: fetch a model that is not in the local cache.
        attention: name of the attention; ``"sdpa"`` or ``"eager"`` for Hugging Face's own.

    Raises:
        ValueError: an unknown name, a model that is not a GPT-2, a download that failed.
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
        try:
            with _no_progress_bar():
                self.model = GPT2LMHeadModel.from_pretrained(
                    folder, attn_implementation=attention, dtype=dtype, local_files_only=True
                )
            self.tokenizer = GPT2Tokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, RuntimeError, SafetensorError) as error:
            raise ValueError(f"cannot load the model in {folder}: {error}") from error
        self.model.to(self.device).eval()
        self.tokenizer.padding_side = "left"  # so that the last token of every prompt is its end
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.max_seq_len = min(max_seq_len, self.model.config.n_positions)

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
        """The prompt and its continuation; a list for a list of prompts.

        Args:
            prompt: one text, or several that are continued together as one batch.
            max_new_tokens: upper limit; fewer where the model ends its text.
            temperature, top_k, top_p: for sampling. Scores are divided by the temperature; then the top_k likeliest
                tokens remain (0: the whole vocabulary), and of these the fewest whose probabilities reach top_p.
            do_sample: draw each token at random; otherwise greedy decoding.
            seed: makes sampling repeatable, and leaves PyTorch's own random state unchanged.
            cache: "dynamic" grows with each token; "static" is allocated once for the longest text.

        Raises:
            ValueError: an empty prompt, one that does not fit the model together with the new tokens, or numbers out
                of range.
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
            ValueError: as ``generate``, before the first step.
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
        """The text of one sequence, without padding and end."""
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
        options = _options(max_new_tokens, temperature, top_k, top_p, do_sample, seed, cache)
        if ignore_end:
            options["min_new_tokens"] = max_new_tokens
        return self._generate(tokens, mask, seed, options)

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
        """
        self._check_lengths(tokens.shape[1], max_new_tokens)
        options = _options(max_new_tokens, temperature, top_k, top_p, do_sample, seed, cache)
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
        options = _options(max_new_tokens, 1.0, 0, 1.0, False, None, cache)
        recorded = dict.fromkeys(
            ("return_dict_in_generate", "output_logits", "output_hidden_states"), True
        )
        return self._generate(tokens, mask, None, options | recorded)

    def _generate(
        self, tokens: Tensor, mask: Tensor, seed: int | None, options: dict[str, Any]
    ) -> Tensor:
        devices = [self.device] if self.device.type == "cuda" else []
        keep_random_state = nullcontext() if seed is None else torch.random.fork_rng(devices)
        with _generating, keep_random_state:
            if seed is not None:
                torch.manual_seed(seed)
            return self.model.generate(
                tokens,
                attention_mask=mask,
                pad_token_id=self.tokenizer.pad_token_id,
                **options,
            )

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


def _options(
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    do_sample: bool,
    seed: int | None,
    cache: str,
) -> dict[str, Any]:
    """What transformers' ``generate`` takes for these numbers; ValueError where one is out of range."""
    if not (0 < temperature < math.inf or (temperature == 0 and not do_sample)):
        raise ValueError(f"temperature must be above 0 and finite; got {temperature}")
    if not isinstance(top_k, int) or top_k < 0:
        raise ValueError(f"top_k must be at least 0 (0: the whole vocabulary); got {top_k!r}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1; got {top_p}")
    if seed is not None and not (isinstance(seed, int) and 0 <= seed < 2**64):
        raise ValueError(f"seed must be from 0 to 2**64 - 1; got {seed!r}")
    if cache not in ("dynamic", "static"):
        raise ValueError(f'cache must be "dynamic" or "static"; got {cache!r}')
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": do_sample}
    if do_sample:
        options |= {"temperature": float(temperature), "top_k": top_k, "top_p": float(top_p)}
    if cache == "static":
        # otherwise transformers runs torch.compile, which takes a minute
        options |= {"cache_implementation": "static", "disable_compile": True}
    return options


def find_model(
    name: str | Path, *, download: bool = False, cache_dir: str | Path | None = None
) -> tuple[Path, str]:
    """The folder with a model's files, and one line that tells the user which model that is.

    It looks on this machine only, and so returns at once, unless ``download`` is set.

    Args:
        name: one of HUB_MODELS, "tiny", or a folder.
        download: fetch one of HUB_MODELS from the Hugging Face hub if it is not in the cache.
        cache_dir: the Hugging Face cache; the user's own by default.

    Raises:
        ValueError: an unknown name, a folder without a GPT-2, a download that failed.
    """
    if str(name) == TINY:
        return TINY_FOLDER, f"model: {_tiny()}"
    if str(name) not in HUB_MODELS:
        return _folder(Path(name)), f"model: {Path(name)}"
    repo = f"openai-community/{name}"
    folder = _cached(str(name), cache_dir) or _cached(repo, cache_dir)
    if folder:
        return folder, f"model: {name}, from the local Hugging Face cache"
    if download:
        return _download(repo, cache_dir), f"model: {name}, downloaded from the Hugging Face hub"
    return TINY_FOLDER, (
        f"model: {_tiny()}, because {name} is not in the local Hugging Face cache (--download fetches it)"
    )


def _tiny() -> str:
    return "the bundled tiny GPT-2, which was trained on made-up sentences and knows nothing"


def _folder(folder: Path) -> Path:
    if not folder.is_dir():
        known = ", ".join((*HUB_MODELS, TINY))
        raise ValueError(
            f"unknown model {str(folder)!r}: known are {known}, or a folder with a GPT-2 in it"
        )
    if not any(all((folder / file).is_file() for file in files) for files in _FILE_SETS):
        raise ValueError(f"{folder} has no GPT-2 in it: expected {', '.join(_FILES)}")
    model_type = json.loads((folder / "config.json").read_text()).get("model_type")
    if model_type != "gpt2":
        raise ValueError(f"task 7 runs GPT-2; the model in {folder} is of type {model_type!r}")
    return folder


def _cached(repo: str, cache_dir: str | Path | None) -> Path | None:
    """Folder of a model in the Hugging Face cache; None if it or one of its files is not there."""
    from huggingface_hub import try_to_load_from_cache

    for files in _FILE_SETS:
        found = [try_to_load_from_cache(repo, file, cache_dir=cache_dir) for file in files]
        if all(isinstance(path, str) for path in found):
            return Path(str(found[0])).parent
    return None


def _download(repo: str, cache_dir: str | Path | None) -> Path:
    from huggingface_hub import constants, hf_hub_url, snapshot_download

    if constants.HF_HUB_OFFLINE:
        raise ValueError(f"cannot download {repo}: HF_HUB_OFFLINE is set")
    url = hf_hub_url(repo, "config.json")
    try:
        # The hub's client retries for a minute before it gives up, so one request of our own goes first.
        urllib.request.urlopen(
            urllib.request.Request(url, method="HEAD"), timeout=_CONNECT_SECONDS
        ).close()
        return Path(snapshot_download(repo, allow_patterns=list(_FILES), cache_dir=cache_dir))
    except urllib.error.HTTPError as error:
        raise ValueError(
            f"cannot download {repo}: {url} answers {error.code} {error.reason}"
        ) from error
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ValueError(f"cannot download {repo} from {url}: {reason}") from error


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Hides the bar that transformers shows while it loads weights."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
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


def run(arguments: Sequence[str] | None, attention: str, description: str) -> None:
    """The command line of inference and inference_ref."""
    prog = "python -m task7.inference" if attention == NAME else "python -m task7.inference_ref"
    parser = _parser(prog, description)
    args = parser.parse_args(arguments)
    if args.bisect and args.sample:
        parser.error("--bisect compares greedy decoding; leave --sample out")
    try:
        status = _bisect(args) if args.bisect else _write(args, attention)
    except (ValueError, BuildError, KernelError, torch.OutOfMemoryError) as error:
        sys.exit(f"error: {error}")
    except NotImplementedError as error:
        sys.exit(f"error: task 7 runs on the kernels of tasks 4 and 5: {error}")
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
    if status:
        sys.exit(status)


def _parser(prog: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description=description)
    add = parser.add_argument
    add(
        "--model", default="gpt2", metavar="NAME",
        help=f"{', '.join(HUB_MODELS)}; {TINY}, the bundled model; or a folder with a GPT-2 in it (default: gpt2, and "
        f"{TINY} where it is not in the Hugging Face cache)",
    )  # fmt: skip
    add("--download", action="store_true", help="fetch the model if it is not in the cache")
    add("--device", help="cpu or cuda (default: the GPU if there is one)")
    add(
        "--dtype", choices=DTYPES, default="float32", help="of weights and activations (default: %(default)s)"
    )  # fmt: skip
    add(
        "--prompt", nargs="+", action="extend", metavar="TEXT",
        help="what the text begins with; several are continued together, as one batch; - reads them from standard "
        "input, one per line (default: a question about FlashAttention)",
    )  # fmt: skip
    add(
        "--max-new-tokens", type=int, default=200, metavar="N", help="for each prompt, at most (default: %(default)s)"
    )  # fmt: skip
    add(
        "--bisect", action="store_true",
        help="instead of the text: compare our attention with Hugging Face's, and name the first layer and token that "
        "differ; the exit status is 1 if rounding does not explain it",
    )  # fmt: skip
    add = parser.add_argument_group("sampling").add_argument
    add("--sample", action="store_true", help="draw tokens at random (default: greedy decoding)")
    add("--seed", type=int, default=0, metavar="N", help="of the random numbers (default: %(default)s)")  # fmt: skip
    add(
        "--temperature", type=float, default=1.0, metavar="T",
        help="above 1 more random, below 1 less (default: %(default)s)",
    )  # fmt: skip
    add(
        "--top-k", type=int, default=50, metavar="K",
        help="draw from the K likeliest tokens; 0: from all (default: %(default)s)",
    )  # fmt: skip
    add(
        "--top-p", type=float, default=1.0, metavar="P",
        help="draw from the fewest likeliest tokens whose probabilities reach P (default: %(default)s, all)",
    )  # fmt: skip
    return parser


def _load(args: argparse.Namespace, *attentions: str) -> list[ModelWithCustomAttention]:
    """The model that the user asked for, once for each attention."""
    folder, says = find_model(args.model, download=args.download)
    print(says, flush=True)
    dtype = getattr(torch, args.dtype)
    return [
        ModelWithCustomAttention(folder, device=args.device, dtype=dtype, attention=attention)
        for attention in attentions
    ]


def _prompts(args: argparse.Namespace) -> list[str]:
    prompts: list[str] = []
    for prompt in args.prompt or [PROMPT]:
        if prompt == "-":
            prompts += [line.rstrip("\n") for line in sys.stdin if line.strip()]
        else:
            prompts.append(prompt)
    return prompts


def _bisect(args: argparse.Namespace) -> int:
    from task7.bisection import bisect, show

    prompts = _prompts(args)
    ours, reference = _load(args, NAME, "sdpa")
    ours.encode(prompts)  # all of them are checked before the first is compared
    beyond_rounding = False
    for prompt in prompts:
        found = bisect(ours, reference, prompt, args.max_new_tokens)
        print()
        show(found, ours, Console())
        beyond_rounding |= found.origin is not None
    return int(beyond_rounding)


def _write(args: argparse.Namespace, attention: str) -> int:
    prompts = _prompts(args)
    (model,) = _load(args, attention)
    tokens, mask = model.encode(prompts)
    steps = model.stream_tokens(
        tokens,
        mask,
        args.max_new_tokens,
        args.temperature,
        args.top_k,
        top_p=args.top_p,
        do_sample=args.sample,
        seed=args.seed,
    )
    # The first launch compiles and loads the kernels. It is in the main thread, where Ctrl-C can end even a kernel that
    # does not return.
    warm_up = min(2, args.max_new_tokens)
    model.generate_tokens(tokens, mask, warm_up)
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)  # before the clock starts
    before = kernel_calls.copy()
    meter = Meter(model.model.generation_config.eos_token_id)
    print_texts(prompts, texts_of(meter.watch(steps), len(prompts), model.decode))
    calls = kernel_calls - before
    print(f"{meter} (warm-up before: {warm_up} steps)")
    print(
        f"{model.device}, {args.dtype}, attention {attention}: our prefill kernel was called "
        f"{calls['prefill']} times and our decode kernel {calls['decode']} times"
    )
    return 0


if __name__ == "__main__":
    run(None, NAME, "Write text with GPT-2 through our kernels.")
