"""Which GPT-2 a name means: one of the Hugging Face hub's, the bundled one, or a folder."""

import http.client
import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

HUB_MODELS = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
TINY = "tiny"
TINY_FOLDER = Path(__file__).parent / "tiny_gpt2"

# A model on disk has all files of one of these sets.
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")  # in one file, or in several
_TOKENIZERS = (("vocab.json", "merges.txt"), ("tokenizer.json",))
_FILE_SETS = tuple(
    ("config.json", weights, *files) for weights in _WEIGHTS for files in _TOKENIZERS
)
_JSON_FILES = (
    "config.json", "generation_config.json", "model.safetensors.index.json",
    "tokenizer.json", "vocab.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json",
)  # fmt: skip
_CONNECT_SECONDS = 5


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
        return _folder(name), f"model: {Path(name)}"
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


def _folder(name: str | Path) -> Path:
    folder = Path(name)
    if not str(name) or not os.path.isdir(folder):  # Path.is_dir fails for a name that is too long
        known = ", ".join((*HUB_MODELS, TINY))
        shown = str(name) if len(str(name)) <= 200 else f"{str(name)[:197]}..."
        raise ValueError(
            f"unknown model {shown!r}: known are {known}, or a folder with a GPT-2 in it"
        )
    if not any(all((folder / file).is_file() for file in files) for files in _FILE_SETS):
        tokenizers = ", or ".join(map(" and ".join, _TOKENIZERS))
        raise ValueError(
            f"{folder} has no GPT-2 in it: expected config.json; {' or '.join(_WEIGHTS)}; and {tokenizers}"
        )
    contents = {file: _object(folder / file) for file in _JSON_FILES if (folder / file).exists()}
    model_type = contents["config.json"].get("model_type")
    if model_type != "gpt2":
        raise ValueError(f"task 7 runs GPT-2; the model in {folder} is of type {model_type!r}")
    return folder


def _object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; transformers does not name the file in which something else is."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot read {file} as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must be a JSON object; got {type(content).__name__}")
    return content


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
        return Path(
            snapshot_download(repo, allow_patterns=list(_FILE_SETS[0]), cache_dir=cache_dir)
        )
    except urllib.error.HTTPError as error:
        raise ValueError(
            f"cannot download {repo}: {url} answers {error.code} {error.reason}"
        ) from error
    except (OSError, RuntimeError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise ValueError(f"cannot download {repo} from {url}: {reason}") from error
