"""Our kernels and Hugging Face's own attention side by side in the browser: ``python -m task7.web``.

It needs the extra ``web``, which ``make web`` installs. A page on this machine sends a prompt, and both attentions
continue it, one after the other and never two requests at once: two runs would share the device, and neither speed
would be right. Weights, options and seed are the same for both, so the texts should be too.

    GET  /            the page, web.html
    GET  /model       what runs here, and the numbers that a request may ask for
    POST /generate    a prompt and numbers as JSON; a line of JSON for each new token, and a last one that compares

What is wrong with a request is a status from 400 on and ``{"error": "a sentence"}``, before anything runs.
"""

import argparse
import asyncio
import json
import os
import socket
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Generator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.build import BuildError, KernelError
from common.dtypes import dtype_name
from task7.attention import NAME
from task7.inference import HUB_MODELS, PROMPT, TINY, ModelWithCustomAttention, find_model

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
    from starlette.routing import Route
    from starlette.types import Receive, Scope, Send
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    sys.exit(f"error: {error.name} is not installed; make web installs what the page needs")

HOST = "127.0.0.1"  # no other machine can reach it
PORT = 8007
PAGE = Path(__file__).with_suffix(".html")
ATTENTIONS = {"ours": NAME, "reference": "sdpa"}  # in the order in which they run
DTYPES = {dtype_name(d): d for d in (torch.float32, torch.float16, torch.bfloat16)}
MOST_BYTES = 64 * 1024  # of a request; GPT-2's 1,024 tokens are some 5 KB of English
SECONDS = 2  # that a step may take after Ctrl-C
BUSY = (
    "another text is being generated. Only one runs at a time, so that the speeds are right: "
    "try again when it has ended"
)
# The page is one file: nothing in it may come from elsewhere.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; img-src data:; "
    "script-src 'unsafe-inline'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
}


class Number(NamedTuple):
    """A number that a request may have: from ``least`` to ``most``."""

    default: float
    least: float
    most: float
    whole: bool = True


class Comparison:
    """One GPT-2 that continues a prompt with our attention, then with Hugging Face's.

    transformers looks the attention up in the model's config at each call. Only one text is generated at a time, so one
    model serves both: its attention is switched in between, and its weights are in memory once.

    Args:
        model: with any attention.
        title: one line about it.
        most_new_tokens: the most that a request may ask for.
    """

    def __init__(
        self, model: ModelWithCustomAttention, title: str, most_new_tokens: int = 200
    ) -> None:
        self.model, self.title = model, title
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
            raise ValueError(f"expected a JSON object with a prompt; got {_short(request)}")
        known = ("prompt", "sample", *self.numbers)
        if unknown := [name for name in request if name not in known]:
            raise ValueError(f"unknown field {_short(unknown[0])}; known are {', '.join(known)}")
        prompt, sample = request.get("prompt", ""), request.get("sample", False)
        if not isinstance(prompt, str) or not prompt.strip():
            raise ValueError(
                f"prompt must be a text with something besides spaces; got {_short(prompt)}"
            )
        if not isinstance(sample, bool):
            raise ValueError(f"sample must be true or false; got {_short(sample)}")
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
        """One for each new token, and a last one that compares the two texts.

        A token's has ``attention`` ("ours" or "reference"), ``tokens`` so far, the new ``text``, ``first``, the seconds
        up to the first token, and ``rate``, the tokens per second after it (None for the first). The last one has
        ``differs``, the number of the first token that differs, from 1 (None if there is none), and ``says``.

        Args:
            tokens, mask: int64 (1, prompt), from ``encode``.
            options: of ``stream_tokens``.
        """
        if self.model.device.type == "cuda":  # this length may need kernels that are not loaded yet
            self._two_tokens(tokens, mask)
        new: dict[str, list[int]] = {name: [] for name in ATTENTIONS}
        rates: dict[str, float | None] = {}
        for name, ids in new.items():
            event: dict[str, Any] = {"attention": name, "first": 0.0, "rate": None}
            held: list[int] = []  # tokens whose bytes are not a whole character yet
            began = perf_counter()
            with closing(self._steps(name, tokens, mask, **options)) as steps:
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
            rates[name] = event["rate"]
        differs = first_difference(*new.values())
        yield {
            "differs": differs,
            "says": f"{self._agreement(differs, new)} {_speeds(rates)}".strip(),
        }

    def _steps(
        self, attention: str, tokens: Tensor, mask: Tensor, **options: Any
    ) -> Generator[Tensor]:
        self.model.model.set_attn_implementation(ATTENTIONS[attention])
        return self.model.stream_tokens(tokens, mask, **options)

    def _two_tokens(self, tokens: Tensor, mask: Tensor) -> None:
        """A prefill and a decode with each attention, if there is room for both."""
        new = min(2, self.model.max_seq_len - tokens.shape[1])
        for name in ATTENTIONS:
            list(self._steps(name, tokens, mask, max_new_tokens=new))

    def _agreement(self, differs: int | None, new: dict[str, list[int]]) -> str:
        if differs is None:
            return "The texts agree, token by token."
        ours, reference = (
            repr(self.model.tokenizer.decode([ids[differs - 1]])) for ids in new.values()
        )
        return f"The texts differ from new token {differs} on: ours has {ours}, the reference {reference}."


def first_difference(ours: Sequence[int], reference: Sequence[int]) -> int | None:
    """The number of the first token that differs, from 1; None if there is none.

    Equal tokens end at the same place, so neither of two texts is the beginning of the other.
    """
    pairs = zip(ours, reference, strict=False)
    return next((number for number, (a, b) in enumerate(pairs, start=1) if a != b), None)


def _speeds(rates: dict[str, float | None]) -> str:
    ours, reference = rates.values()
    if not ours or not reference:
        return ""
    return f"Our kernels: {ours / reference:.2f} x the reference's tokens/s."


def _in_range(name: str, value: Any, number: Number) -> float:
    kind = "a whole number" if number.whole else "a number"
    right = isinstance(value, int if number.whole else (int, float)) and not isinstance(value, bool)
    if not right or not number.least <= value <= number.most:  # NaN is nowhere in between
        raise ValueError(
            f"{name} must be {kind} from {number.least:g} to {number.most:.12g}; got {_short(value)}"
        )
    return value if number.whole else float(value)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# The server -------------------------------------------------------------------------------------------


class Generation(StreamingResponse):
    """Lines of JSON, one for each event, until the client goes away; then ``busy`` is released.

    The events are taken in a thread of their own, because they contain times: a client that is slow to read does not
    delay them.
    """

    def __init__(self, events: Generator[dict[str, Any]], busy: threading.Lock) -> None:
        super().__init__(self._lines(), media_type="application/x-ndjson", headers=HEADERS)
        self._events, self._busy = events, busy
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[str | None] = asyncio.Queue()
        self._ended = False
        threading.Thread(target=self._generate, daemon=True, name="generate").start()

    def end(self) -> None:
        """No more tokens after the one that is being generated."""
        self._ended = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the lines; returns early when the client goes away."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.end()

    async def _lines(self) -> AsyncIterator[str]:
        while (line := await self._queue.get()) is not None:
            yield line

    def _put(self, line: str | None) -> None:
        with suppress(RuntimeError):  # the server has ended, and with it its loop
            self._loop.call_soon_threadsafe(self._queue.put_nowait, line)

    def _generate(self) -> None:
        try:
            with closing(self._events) as events:
                for event in events:
                    self._put(json.dumps(event) + "\n")
                    if self._ended:
                        break
        except Exception as error:  # the page shows it, too
            traceback.print_exc()
            self._put(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        finally:
            self._busy.release()
            self._put(None)


def make_app(comparison: Comparison) -> Starlette:
    """The page and what it calls. ``app.state.busy`` is locked while a text is generated."""
    busy = threading.Lock()

    async def page(request: Request) -> Response:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers=HEADERS)

    async def model(request: Request) -> Response:
        return JSONResponse(comparison.about(), headers=HEADERS)

    async def generate(request: Request) -> Response:
        wanted = await _json(request)
        # Before the prompt is looked at: a tokenizer takes one thread at a time.
        if not busy.acquire(blocking=False):
            raise HTTPException(409, BUSY)
        try:
            arguments = comparison.checked(wanted)
            app.state.generation = Generation(comparison.events(**arguments), busy)
        except BaseException as error:
            busy.release()
            if isinstance(error, ValueError):
                raise HTTPException(400, str(error)) from error
            raise
        return app.state.generation

    app = Starlette(
        routes=[
            Route("/", page),
            Route("/model", model),
            Route("/generate", generate, methods=["POST"]),
        ],
        # A page elsewhere whose name was made to mean this machine gets nothing.
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])],
        exception_handlers={HTTPException: _error, ClientDisconnect: _nobody},
    )
    app.state.busy, app.state.generation = busy, None
    return app


async def _json(request: Request) -> Any:
    """The request's JSON; HTTPException if it is something else or too large."""
    # A page elsewhere cannot send this type without asking this server first, which it refuses.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, f"expected application/json; got {kind or 'no content type'}")
    body, size = bytearray(), 0
    async for piece in request.stream():  # read to its end, or the client would not see the answer
        size += len(piece)
        if size <= MOST_BYTES:
            body += piece
    if size > MOST_BYTES:
        raise HTTPException(413, f"expected at most {MOST_BYTES:,} bytes; got {size:,}")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"expected JSON; got something else ({error})") from error


async def _error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = {**HEADERS, **(error.headers or {})}
    return JSONResponse({"error": error.detail}, error.status_code, headers)


async def _nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=400)  # the client went away while it sent: nobody reads this


class Server(uvicorn.Server):
    """Ends the generation when a signal ends the server, which would wait for its last token otherwise."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by the signal."""
        if generation := self.config.app.state.generation:
            generation.end()
        super().handle_exit(sig, frame)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 130 when Ctrl-C ends it."""
    options = _parse(argv)
    app = None
    try:
        with _listener(options.port) as listener:
            app = make_app(_comparison(options))
            print(
                f"open http://{HOST}:{listener.getsockname()[1]} in a browser; Ctrl-C ends it",
                flush=True,
            )
            config = uvicorn.Config(app, log_level="error", lifespan="off")
            Server(config).run(sockets=[listener])
    except KeyboardInterrupt:
        pass
    print("\ninterrupted", flush=True)
    if app is not None and not app.state.busy.acquire(timeout=SECONDS):
        os._exit(130)  # in the middle of a kernel, which cannot be stopped
    return 130


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m task7.web",
        description="A web page on this machine with our kernels and Hugging Face's own attention side by side.",
    )
    add = parser.add_argument
    add("--model", default="gpt2", help=f"{', '.join((*HUB_MODELS, TINY))}, or a folder")
    add("--dtype", choices=DTYPES, default="float32", help="of weights and activations")
    add("--device", choices=("cpu", "cuda"), help="default: the GPU if there is one")
    add("--port", type=int, default=PORT, help=f"default: {PORT}; 0: any that is free")
    add("--max-new-tokens", type=int, default=200, help="the most that a request may ask for")
    add("--download", action="store_true", help="fetch the model if it is not in the cache")
    options = parser.parse_args(argv)
    if not 0 <= options.port < 2**16:
        parser.error(f"--port must be from 0 to {2**16 - 1}; got {options.port}")
    if options.max_new_tokens < 1:
        parser.error(f"--max-new-tokens must be at least 1; got {options.max_new_tokens}")
    return options


def _listener(port: int) -> socket.socket:
    """The server's socket; it is taken before a model is loaded."""
    try:
        return socket.create_server((HOST, port))
    except OSError as error:
        sys.exit(
            f"error: port {port} of {HOST} cannot be used ({error.strerror}); --port names another"
        )


def _comparison(options: argparse.Namespace) -> Comparison:
    try:
        folder, says = find_model(options.model, download=options.download)
        print(says, flush=True)
        model = ModelWithCustomAttention(
            folder, device=options.device, dtype=DTYPES[options.dtype], attention=NAME
        )
        comparison = Comparison(model, says, options.max_new_tokens)
        comparison.warm_up()
    except (ValueError, BuildError, KernelError) as error:
        sys.exit(f"error: {error}")
    except NotImplementedError as error:
        sys.exit(f"error: task 7 runs on the kernels of tasks 4 and 5: {error}")
    return comparison


if __name__ == "__main__":
    sys.exit(main())
