"""Our kernels and Hugging Face's own attention side by side in the browser: ``python -m task7.web``.

It needs the extra ``web``, which ``make web`` installs. A page on this machine sends a prompt, and each way of
continuing it runs, one after the other and never two requests at once: two runs would share the device, and neither
speed would be right. Weights, options and seed are the same for all, so the texts should be too.

    GET  /            the page, web.html
    GET  /model       what runs here, and the numbers that a request may ask for
    POST /generate    a prompt and numbers as JSON; a line of JSON for each new token, and a last one that compares

What is wrong with a request that reaches the application is a status from 400 on and ``{"error": "a sentence"}``,
before anything runs; uvicorn itself refuses what is not HTTP.
"""

import argparse
import asyncio
import json
import logging
import os
import socket
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Generator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from common.build import BuildError, KernelError
from common.dtypes import dtype_name
from common.memory import NotEnoughMemory
from task7.comparison import TITLES, Comparison, short
from task7.find import HUB_MODELS, TINY, find_model
from task7.model import ModelWithCustomAttention

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.datastructures import Headers
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
    from starlette.routing import Route
    from starlette.types import ASGIApp, Receive, Scope, Send
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    sys.exit(f"error: {error.name} is not installed; make web installs what the page needs")

HOST = "127.0.0.1"  # no other machine can reach it
HOSTS = (HOST, "localhost")  # what a browser on this machine may call it
PORT = 8007
PAGE = Path(__file__).with_suffix(".html")
DTYPES = {dtype_name(d): d for d in (torch.float32, torch.float16, torch.bfloat16)}
MOST_BYTES = 64 * 1024  # of a request; GPT-2's 1,024 tokens are some 5 KB of English
SECONDS = 2  # that a step, or a request that is half here, may take after Ctrl-C
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
    """The page and what it calls. ``app.state.busy`` is locked while a text is generated.

    Besides HTTP's own, ``/generate`` has the statuses 400 for a body or numbers that do not fit, 409 while another text
    is generated, 413 for a body that is too long and 415 for one that is not JSON by its type.
    """
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
        middleware=[Middleware(_OwnHost)],
        exception_handlers={HTTPException: _error, ClientDisconnect: _gone, Exception: _failure},
    )
    app.state.busy, app.state.generation = busy, None
    return app


class _OwnHost:
    """Lets through what is for this machine: a page elsewhere whose name was made to mean it gets nothing."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] != "lifespan":
            host = Headers(scope=scope).get("host", "")
            if host.lower().partition(":")[0] not in HOSTS:
                app = _refusal(400, f"expected the host {' or '.join(HOSTS)}; got {short(host)}")
        await app(scope, receive, send)


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


def _refusal(status: int, says: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": says}, status, {**HEADERS, **(headers or {})})


async def _error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    says = error.detail
    if error.status_code in (404, 405):  # Starlette's own
        got = f"{request.method} {short(request.url.path)}"
        says = f"expected GET /, GET /model or POST /generate; got {got}"
    return _refusal(error.status_code, says, error.headers)


async def _failure(request: Request, error: Exception) -> Response:
    return _refusal(500, f"{type(error).__name__}: {error}")  # its traceback is printed


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=400)  # the client went away while it sent: this is not read


class Server(uvicorn.Server):
    """Ends the generation when a signal ends the server, which would wait for its last token otherwise."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by the signal."""
        if generation := self.config.app.state.generation:
            generation.end()
        # A request that it cuts off now is no error.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
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
            config = uvicorn.Config(
                app, log_level="error", lifespan="off", timeout_graceful_shutdown=SECONDS
            )
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
        model = ModelWithCustomAttention(folder, device=options.device, dtype=DTYPES[options.dtype])
        comparison = Comparison(model, says, options.max_new_tokens)
        for path, why in comparison.left_out.items():
            print(f"without {TITLES[path]}: {why}", flush=True)
        comparison.warm_up()
    except (ValueError, NotEnoughMemory, BuildError, KernelError, torch.OutOfMemoryError) as error:
        sys.exit(f"error: {error}")
    except NotImplementedError as error:
        sys.exit(f"error: task 7 runs on the kernels of tasks 4 and 5: {error}")
    return comparison


if __name__ == "__main__":
    sys.exit(main())
