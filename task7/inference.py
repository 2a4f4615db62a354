"""Write text with GPT-2 through the kernels of tasks 4 and 5: ``python -m task7.inference``.

``python -m task7.inference_ref`` does the same with Hugging Face's own attention.
"""

import argparse
import json
import sys
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor
from transformers import GPT2LMHeadModel, GPT2Tokenizer
from transformers.utils import logging

from common.build import BuildError, KernelError
from task7.attention import NAME, kernel_calls

HUB_MODELS = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
TINY = "tiny"
TINY_FOLDER = Path(__file__).parent / "tiny_gpt2"
PROMPT = (
    "What are the advantages of using flashattention kernels compared to the naive pytorch "
    "implementation? Think about the shared memory usage, the computation complexity, and the "
    "performance."
)

# A model on disk has all files of one of these sets.
_FILES = ("config.json", "model.safetensors", "vocab.json", "merges.txt")
_FILE_SETS = (_FILES, ("config.json", "model.safetensors", "tokenizer.json"))
_CONNECT_SECONDS = 5


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
        with _no_progress_bar():
            self.model = GPT2LMHeadModel.from_pretrained(
                folder, attn_implementation=attention, dtype=dtype, local_files_only=True
            )
        self.model.to(self.device).eval()
        self.tokenizer = GPT2Tokenizer.from_pretrained(folder, local_files_only=True)
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
        do_sample: bool = False,
        seed: int | None = None,
        cache: str = "dynamic",
    ) -> str | list[str]:
        """The prompt and its continuation; a list for a list of prompts.

        Args:
            prompt: one text, or several that are continued together as one batch.
            max_new_tokens: upper limit; fewer where the model ends its text.
            temperature, top_k: for sampling; top_k 0 means the whole vocabulary.
            do_sample: draw each token at random; otherwise greedy decoding.
            seed: makes sampling repeatable, and leaves PyTorch's own random state unchanged.
            cache: "dynamic" grows with each token; "static" is allocated once for the longest text.

        Raises:
            ValueError: an empty prompt, one that does not fit the model together with the new tokens, or numbers out
                of range.
        """
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        tokens, mask = self.encode(prompts)
        out = self.generate_tokens(
            tokens,
            mask,
            max_new_tokens,
            temperature,
            top_k,
            do_sample=do_sample,
            seed=seed,
            cache=cache,
        )
        texts = self.tokenizer.batch_decode(out, skip_special_tokens=True)
        return texts[0] if isinstance(prompt, str) else texts

    def encode(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Tokens and attention mask, both int64 (prompts, longest), padded on the left."""
        if not prompts or not all(isinstance(p, str) and p for p in prompts):
            raise ValueError(f"a prompt must be a text of at least one character; got {prompts!r}")
        batch = self.tokenizer(list(prompts), return_tensors="pt", padding=True, verbose=False)
        return batch["input_ids"].to(self.device), batch["attention_mask"].to(self.device)

    def generate_tokens(
        self,
        tokens: Tensor,
        mask: Tensor,
        max_new_tokens: int = 50,
        temperature: float = 1.0,
        top_k: int = 50,
        *,
        do_sample: bool = False,
        seed: int | None = None,
        cache: str = "dynamic",
        ignore_end: bool = False,
    ) -> Tensor:
        """As ``generate``, with tokens and mask from ``encode``; returns (prompts, prompt + new tokens).

        ``ignore_end``: generate exactly ``max_new_tokens``, for measurements; the end token is never chosen.
        """
        self._check_lengths(tokens.shape[1], max_new_tokens)
        if cache not in ("dynamic", "static"):
            raise ValueError(f'cache must be "dynamic" or "static"; got {cache!r}')
        options: dict = {"do_sample": False}
        if do_sample:
            if not temperature > 0 or top_k < 0:
                raise ValueError(
                    f"temperature must be above 0 and top_k at least 0; got {temperature} and {top_k}"
                )
            options = {
                "do_sample": True,
                "temperature": float(temperature),
                "top_k": top_k,
                "top_p": 1.0,
            }
        if cache == "static":
            # otherwise transformers runs torch.compile, which takes a minute
            options |= {"cache_implementation": "static", "disable_compile": True}
        if ignore_end:
            options["min_new_tokens"] = max_new_tokens
        keep_random_state = torch.random.fork_rng(
            devices=[self.device] if self.device.type == "cuda" else []
        )
        with keep_random_state if seed is not None else nullcontext():
            if seed is not None:
                torch.manual_seed(seed)
            return self.model.generate(
                tokens,
                attention_mask=mask,
                max_new_tokens=max_new_tokens,
                pad_token_id=self.tokenizer.pad_token_id,
                **options,
            )

    def _check_lengths(self, prompt_tokens: int, max_new_tokens: int) -> None:
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1; got {max_new_tokens}")
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
    device = torch.device(wanted or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"the kernels run on cpu and cuda; got {device}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda was asked for, but PyTorch sees no GPU")
    return device


def run(arguments: Sequence[str] | None, attention: str, description: str) -> None:
    """The command line of inference and inference_ref."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--model", default="gpt2", help=f"{', '.join((*HUB_MODELS, TINY))}, or a folder"
    )
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument(
        "--sample", action="store_true", help="draw tokens at random instead of greedy decoding"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=50)
    parser.add_argument("--device", help="cpu or cuda; default: the GPU if there is one")
    parser.add_argument(
        "--download", action="store_true", help="fetch the model if it is not in the cache"
    )
    args = parser.parse_args(arguments)
    try:
        folder, says = find_model(args.model, download=args.download)
        print(says, flush=True)
        model = ModelWithCustomAttention(folder, device=args.device, attention=attention)
        text = model.generate(
            args.prompt,
            args.max_new_tokens,
            args.temperature,
            args.top_k,
            do_sample=args.sample,
            seed=args.seed,
        )
    except (ValueError, BuildError, KernelError) as error:
        sys.exit(f"error: {error}")
    except NotImplementedError as error:
        sys.exit(f"error: task 7 runs on the kernels of tasks 4 and 5: {error}")
    print(f"\n{text}\n")
    print(
        f"{model.device}, attention {attention}: our prefill kernel was called "
        f"{kernel_calls['prefill']} times and our decode kernel {kernel_calls['decode']} times"
    )


if __name__ == "__main__":
    run(None, NAME, "Write text with GPT-2 through our kernels.")
