"""One prompt continued in several ways, one after the other, and what the page shows of it."""

import json
from collections.abc import Generator, Sequence
from contextlib import closing
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.dtypes import dtype_name
from task7.inference import PROMPT
from task7.model import ModelWithCustomAttention

# The ways of task7.model.PATHS in the order in which they run, and what the page calls them.
TITLES = {
    "generate": "Our kernels",
    # BEGIN STAFF
    "loop": "Our own loop",
    # END STAFF
    "reference": "Hugging Face's own attention",
}


class Number(NamedTuple):
    """A number that a request may have: from ``least`` to ``most``."""

    default: float
    least: float
    most: float
    whole: bool = True


class Comparison:
    """One GPT-2 that continues a prompt in each way of ``TITLES``; the last of them is the reference.

    Only one text is generated at a time, so one model serves all: ``use`` switches it in between, and its weights are
    in memory once. A way that ``use`` refuses for this model is left out.

    Args:
        model: in any way.
        title: one line about it.
        most_new_tokens: the most that a request may ask for.

    Attributes:
        paths: the ways that there are, in the order in which they run.
        left_out: the others, and why.
    """

    def __init__(
        self, model: ModelWithCustomAttention, title: str, most_new_tokens: int = 200
    ) -> None:
        self.model, self.title = model, title
        self.left_out = {path: why for path in TITLES if (why := _why_not(model, path))}
        self.paths = [path for path in TITLES if path not in self.left_out]
        most_new_tokens = min(most_new_tokens, model.max_seq_len - 1)
        self.numbers = {
            "max_new_tokens": Number(min(60, most_new_tokens), 1, most_new_tokens),
            "temperature": Number(1.0, 0.05, 5.0, whole=False),
            "top_k": Number(50, 0, model.model.config.vocab_size),
            "top_p": Number(1.0, 0.01, 1.0, whole=False),
            "seed": Number(0, 0, 2**32 - 1),
        }

    def about(self) -> dict[str, Any]:
        """What the page shows before anything runs."""
        device = self.model.device
        return {
            "title": self.title.removeprefix("model: "),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
            "dtype": dtype_name(self.model.model.dtype),
            "positions": self.model.max_seq_len,
            "paths": {path: TITLES[path] for path in self.paths},
            "prompt": PROMPT,
            "numbers": {name: number._asdict() for name, number in self.numbers.items()},
        }

    def warm_up(self) -> None:
        """Build and load the kernels, which no measured time may contain."""
        self._two_tokens(*self.model.encode(["Once"]))

    def checked(self, request: Any) -> dict[str, Any]:
        """The arguments of ``events`` from a request's JSON; what it leaves out has its default.

        Raises:
            ValueError: no object, a field that is unknown, of another type or out of range, an empty prompt, or one
                that leaves no room for the new tokens.
        """
        if not isinstance(request, dict):
            raise ValueError(f"expected a JSON object with a prompt; got {short(request)}")
        known = ("prompt", "sample", *self.numbers)
        if unknown := [name for name in request if name not in known]:
            raise ValueError(f"unknown field {short(unknown[0])}; known are {', '.join(known)}")
        prompt, sample = request.get("prompt", ""), request.get("sample", False)
        if not isinstance(prompt, str) or not prompt.strip():
            raise ValueError(
                f"prompt must be a text with something besides spaces; got {short(prompt)}"
            )
        if not isinstance(sample, bool):
            raise ValueError(f"sample must be true or false; got {short(sample)}")
        values = {
            name: _in_range(name, request.get(name, number.default), number)
            for name, number in self.numbers.items()
        }
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"prompt must be text that UTF-8 can encode; got half of a surrogate pair at {error.start}"
            ) from error
        tokens, mask = self.model.encode([prompt])
        length, new, room = tokens.shape[1], values["max_new_tokens"], self.model.max_seq_len
        if length + new > room:
            raise ValueError(
                f"the prompt has {length:,} tokens and {new:,} new ones are asked for; "
                f"the model has room for {room:,} in all"
            )
        return {"tokens": tokens, "mask": mask, "do_sample": sample, **values}

    def events(self, tokens: Tensor, mask: Tensor, **options: Any) -> Generator[dict[str, Any]]:
        """One for each new token, and a last one that compares the texts.

        A token's has ``path``, ``tokens`` so far, the new ``text``, ``first``, the seconds up to the first token, and
        ``rate``, the tokens per second after it (None for the first). The last one has ``differs``, for each path that
        is not the reference the number of the first token that differs from the reference's, from 1 (None if there is
        none), and ``says``.

        Args:
            tokens, mask: int64 (1, prompt), from ``encode``.
            options: of ``stream_tokens``.
        """
        if self.model.device.type == "cuda":  # this length may need kernels that are not loaded yet
            self._two_tokens(tokens, mask)
        new: dict[str, list[int]] = {path: [] for path in self.paths}
        rates: dict[str, float | None] = {}
        for path, ids in new.items():
            event: dict[str, Any] = {"path": path, "first": 0.0, "rate": None}
            held: list[int] = []  # tokens whose bytes are not a whole character yet
            began = perf_counter()
            with closing(self._steps(path, tokens, mask, **options)) as steps:
                for step in steps:
                    seconds = perf_counter() - began
                    if ids:
                        event["rate"] = len(ids) / (seconds - event["first"])
                    else:
                        event["first"] = seconds
                    ids += step.tolist()
                    held.append(ids[-1])
                    text = self.model.decode(held)
                    if text.endswith("\N{REPLACEMENT CHARACTER}"):
                        text = ""
                    else:
                        held.clear()
                    yield {**event, "tokens": len(ids), "text": text}
            if held:
                yield {**event, "tokens": len(ids), "text": self.model.decode(held)}
            rates[path] = event["rate"]
        *ours, reference = self.paths
        differs = {path: first_difference(new[path], new[reference]) for path in ours}
        yield {
            "differs": differs,
            "says": f"{self._agreement(differs, new)} {_speeds(rates)}".strip(),
        }

    def _steps(self, path: str, tokens: Tensor, mask: Tensor, **options: Any) -> Generator[Tensor]:
        self.model.use(path)
        return self.model.stream_tokens(tokens, mask, **options)

    def _two_tokens(self, tokens: Tensor, mask: Tensor) -> None:
        """The prompt and a step in each way, if there is room for both."""
        new = min(2, self.model.max_seq_len - tokens.shape[1])
        for path in self.paths:
            list(self._steps(path, tokens, mask, max_new_tokens=new))

    def _agreement(self, differs: dict[str, int | None], new: dict[str, list[int]]) -> str:
        if not any(differs.values()):
            return "The texts agree, token by token."
        sentences = []
        for path, number in differs.items():
            if number is not None:
                ours, reference = (
                    repr(self.model.tokenizer.decode([new[p][number - 1]]))
                    for p in (path, self.paths[-1])
                )
                sentences.append(
                    f"{TITLES[path]}: another text from new token {number} on, "
                    f"{ours} where the reference has {reference}."
                )
        return " ".join(sentences)


def _why_not(model: ModelWithCustomAttention, path: str) -> str:
    """Why this way cannot run the model; "" if it can."""
    try:
        model.use(path)
    except ValueError as error:
        return str(error)
    return ""


def first_difference(ours: Sequence[int], reference: Sequence[int]) -> int | None:
    """The number of the first token that differs, from 1; None if there is none.

    Equal tokens end at the same place, so neither of two texts is the beginning of the other.
    """
    pairs = zip(ours, reference, strict=False)
    return next((number for number, (a, b) in enumerate(pairs, start=1) if a != b), None)


def _speeds(rates: dict[str, float | None]) -> str:
    *ours, reference = rates.values()
    if not reference or not all(ours):
        return ""
    return " ".join(
        f"{TITLES[path]}: {rate / reference:.2f} x the reference's tokens/s."
        for path, rate in zip(rates, ours, strict=False)
    )


def _in_range(name: str, value: Any, number: Number) -> float:
    kind = "a whole number" if number.whole else "a number"
    right = isinstance(value, int if number.whole else (int, float)) and not isinstance(value, bool)
    if not right or not number.least <= value <= number.most:  # NaN is nowhere in between
        raise ValueError(
            f"{name} must be {kind} from {number.least:g} to {number.most:.12g}; got {short(value)}"
        )
    return value if number.whole else float(value)


def short(value: Any) -> str:
    """At most 60 characters of JSON."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
