"""Task 7's page: what its server answers, and what it refuses."""

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("starlette", reason="needs Starlette: the extra web")
pytest.importorskip("uvicorn", reason="needs uvicorn: the extra web")

from starlette.testclient import TestClient

from common.tests import clients
from common.tests.clients import JSON, LOCAL, ONCE, PATHS, endless
from task7 import decoder, web
from task7.attention import kernel_calls

AGREED = {"generate": None, "loop": None}

model, comparison = clients.model, clients.comparison  # fixtures
client, stand_in = clients.client, clients.stand_in


def generate(client: TestClient, **request: object) -> list[dict]:
    answer = client.post("/generate", json={"prompt": ONCE, "max_new_tokens": 8} | request)
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def text(events: list[dict], path: str) -> str:
    return "".join(e["text"] for e in events if e.get("path") == path)


def is_free(client: TestClient, seconds: float = 10) -> bool:
    """Whether the next request can begin, at once or after these seconds."""
    busy = client.app.state.busy
    if free := busy.acquire(timeout=seconds):
        busy.release()
    return free


# What it answers ----------------------------------------------------------------------------------


def test_the_page_is_one_file_without_html_from_texts(client):
    page = client.get("/")
    assert page.status_code == 200 and "text/html" in page.headers["content-type"]
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not re.search(
        r"https?:|//\w|@import|innerHTML|insertAdjacent|document\.write", page.text
    )


def test_the_page_learns_what_runs(client, comparison):
    about = client.get("/model").json()
    assert about["title"] == "tiny" and about["dtype"] == "float32"
    assert about["positions"] == 1024 and set(about["numbers"]) == set(comparison.numbers)
    assert list(about["paths"]) == PATHS and about["paths"]["loop"] == "Our own loop"
    for number in about["numbers"].values():
        assert number["least"] <= number["default"] <= number["most"]


@pytest.mark.parametrize(
    "options", [{}, {"do_sample": True, "seed": 3, "temperature": 1.5, "top_k": 0, "top_p": 0.9}]
)
def test_each_path_writes_what_the_command_writes(client, model, options):
    request = {"sample" if k == "do_sample" else k: v for k, v in options.items()}
    *events, last = generate(client, max_new_tokens=30, **request)
    for path in PATHS:
        model.use(path)
        assert ONCE + text(events, path) == model.generate(ONCE, 30, **options)
        own = [e for e in events if e["path"] == path]
        assert [e["tokens"] for e in own] == list(range(1, len(own) + 1))
        assert own[0]["rate"] is None and all(e["rate"] > 0 for e in own[1:])
        assert own[0]["first"] > 0
    assert list(dict.fromkeys(e["path"] for e in events)) == PATHS
    for path, differs in last["differs"].items():
        assert (differs is None) == (text(events, path) == text(events, "reference"))
    for title in ("Our kernels", "Our own loop"):
        assert re.search(title + r": [\d.]+ x the reference's tokens/s\.", last["says"])
    if not options:
        assert last["says"].startswith("The texts agree, token by token.")


def test_only_generate_with_our_attention_calls_its_kernels(comparison):
    comparison.warm_up()
    calls = {}
    before = kernel_calls.total()
    arguments = comparison.checked({"prompt": ONCE, "max_new_tokens": 4})
    for event in comparison.events(**arguments):
        if "path" in event:
            calls[event["path"], event["tokens"]] = kernel_calls.total() - before
    layers = comparison.model.model.config.n_layer
    assert calls["generate", 4] >= 4 * layers
    assert {calls[path, n] for path in ("loop", "reference") for n in (1, 4)} == {
        calls["generate", 4]
    }


def test_the_first_token_that_differs(client, model, stand_in):
    one, other, common = (model.tokenizer.encode(t)[0] for t in ("he", "she", " the"))
    texts = iter([[common, one, common], [common, other, common], [common, other, common]])
    steps = stand_in([])
    steps.steps = lambda: (torch.tensor([token]) for token in next(texts))
    last = generate(client)[-1]
    assert last["differs"] == {"generate": 2, "loop": None}
    said = [repr(model.tokenizer.decode([token])) for token in (one, other)]
    assert last["says"].startswith(
        f"Our kernels: another text from new token 2 on, {said[0]} where the reference has {said[1]}. Our kernels: "
    )


def test_a_model_that_the_loop_cannot_run_goes_without_it(model, monkeypatch):
    def refuse(config):
        raise ValueError("head_dim must be 64, 128 or 256; got 32")

    monkeypatch.setattr(decoder, "check_model", refuse)
    monkeypatch.setattr(model, "_loop", None)
    comparison = web.Comparison(model, "model: tiny")
    assert comparison.paths == ["generate", "reference"]
    assert comparison.left_out == {"loop": "head_dim must be 64, 128 or 256; got 32"}
    *events, last = comparison.events(**comparison.checked({"prompt": ONCE, "max_new_tokens": 3}))
    assert len(events) == 6 and last["differs"] == {"generate": None}


def test_a_character_of_several_tokens_comes_whole(client, model, stand_in):
    words = "a🙂é€"
    tokens = model.tokenizer.encode(words)
    assert len(tokens) > len(words)
    stand_in(tokens)
    *events, _ = generate(client)
    assert text(events, "generate") == words and "\ufffd" not in str(events)
    stand_in(tokens[:2])  # ends in the middle of the second
    *events, _ = generate(client)
    assert text(events, "generate") == "a\ufffd" and events[-1]["tokens"] == 2


def test_a_prompt_may_fill_all_positions_but_one(client, model):
    words = " the" * 2000
    prompt = model.tokenizer.decode(model.tokenizer.encode(words)[:1023])
    assert model.encode([prompt])[0].shape[1] == 1023
    assert len(generate(client, prompt=prompt, max_new_tokens=1)) == 4


# What it refuses ----------------------------------------------------------------------------------

BAD = [
    ("not JSON", b"{", 400, "expected JSON"),
    ("nothing", b"", 400, "expected JSON"),
    ("not UTF-8", b'{"prompt": "\xff"}', 400, "expected JSON"),
    ("nested", b"[" * 60_000, 400, "expected JSON"),
    ("no object", b'["a"]', 400, 'expected a JSON object with a prompt; got ["a"]'),
    ("too large", json.dumps({"prompt": "a" * 70_000}).encode(), 413, "expected at most 65,536 bytes; got 70,014"),
    ("no prompt", {}, 400, 'prompt must be a text with something besides spaces; got ""'),
    ("empty", {"prompt": ""}, 400, "prompt must be a text"),
    ("spaces", {"prompt": " \n"}, 400, "prompt must be a text"),
    ("prompt of another type", {"prompt": ["a"]}, 400, 'got ["a"]'),
    ("half a character", b'{"prompt": "a\\ud800"}', 400, "half of a surrogate pair at 1"),
    ("too long", {"prompt": " the" * 1100}, 400, "1,100 tokens and 60 new ones are asked for; the model has room for 1,024"),
    ("no room", {"prompt": " the" * 1000, "max_new_tokens": 25}, 400, "1,000 tokens and 25 new ones"),
    ("no new tokens", {"prompt": "a", "max_new_tokens": 0}, 400, "max_new_tokens must be a whole number from 1 to 1000; got 0"),
    ("too many", {"prompt": "a", "max_new_tokens": 1001}, 400, "from 1 to 1000; got 1001"),
    ("half a token", {"prompt": "a", "max_new_tokens": 1.5}, 400, "whole number"),
    ("a bool", {"prompt": "a", "seed": True}, 400, "seed must be a whole number from 0 to 4294967295; got true"),
    ("null", {"prompt": "a", "top_k": None}, 400, "top_k must be a whole number"),
    ("top_k", {"prompt": "a", "top_k": -1}, 400, "got -1"),
    ("top_p", {"prompt": "a", "top_p": 1.01}, 400, "top_p must be a number from 0.01 to 1; got 1.01"),
    ("temperature", {"prompt": "a", "temperature": 0}, 400, "temperature must be a number from 0.05 to 5; got 0"),
    ("long", b'{"prompt": "a", "seed": 1%s}' % (b"0" * 400), 400, "got 1000"),
    ("NaN", b'{"prompt": "a", "temperature": NaN}', 400, "got NaN"),
    ("infinite", b'{"prompt": "a", "top_p": 1e999}', 400, "got Infinity"),
    ("sample", {"prompt": "a", "sample": "yes"}, 400, 'sample must be true or false; got "yes"'),
    ("unknown field", {"prompt": "a", "tempreature": 1}, 400, 'unknown field "tempreature"; known are prompt'),
]  # fmt: skip


@pytest.mark.parametrize("body, status, says", [row[1:] for row in BAD], ids=[r[0] for r in BAD])
def test_a_bad_request_is_refused_before_anything_runs(client, stand_in, body, status, says):
    steps = stand_in([])
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = client.post("/generate", content=content, headers=JSON)
    assert answer.status_code == status and says in answer.json()["error"], answer.text
    assert len(answer.json()["error"]) < 250
    assert steps.calls == 0 and is_free(client, 0)


@pytest.mark.parametrize(
    "method, path, headers, status, says",
    [
        ("POST", "/generate", {"content-type": "text/plain"}, 415, "got text/plain"),  # what another site's page can send
        ("POST", "/generate", {}, 415, "expected application/json; got no content type"),
        ("POST", "/generate", JSON | {"host": "elsewhere.example"}, 400, 'got "elsewhere.example"'),
        ("GET", "/model", {"host": "elsewhere.example"}, 400, "expected the host 127.0.0.1 or localhost; got"),
        ("GET", "/model", {"host": "localhost.elsewhere.example:80"}, 400, 'got "localhost.elsewhere.example:80"'),
        ("GET", "/model", {"host": ""}, 400, 'got ""'),
        ("GET", "/generate", {}, 405, 'expected GET /, GET /model or POST /generate; got GET "/generate"'),
        ("GET", "/web.py", {}, 404, 'expected GET /, GET /model or POST /generate; got GET "/web.py"'),
        ("GET", "/" + 900 * "x", {}, 404, "xxx..."),
    ],
)  # fmt: skip
def test_what_is_not_the_page_is_refused(client, stand_in, method, path, headers, status, says):
    steps = stand_in([])
    answer = client.request(method, path, content=b'{"prompt": "a"}', headers=headers)
    assert answer.status_code == status and steps.calls == 0 and is_free(client, 0)
    assert says in answer.json()["error"] and len(answer.json()["error"]) < 250
    assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8007", "127.0.0.1:1"])
def test_the_names_of_this_machine(client, host):
    assert client.get("/model", headers={"host": host}).status_code == 200


def test_a_failure_before_the_first_token_is_json(comparison, monkeypatch):
    def fail(*_):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(comparison, "checked", fail)
    client = TestClient(web.make_app(comparison), base_url=LOCAL, raise_server_exceptions=False)
    answer = client.post("/generate", json={"prompt": "a"})
    assert answer.status_code == 500 and is_free(client, 0)
    assert answer.json() == {"error": "RuntimeError: the device is gone"}


def test_a_second_request_is_refused_while_one_runs(client, stand_in):
    steps = stand_in([5, 5])
    steps.go.clear()
    with TestClient(client.app, base_url=LOCAL) as other:
        first: list[list[dict]] = []
        thread = threading.Thread(target=lambda: first.append(generate(client)))
        thread.start()
        assert steps.began.wait(20)
        for prompt in (ONCE, ""):  # a bad one, too: it may not disturb the measurement
            answer = other.post("/generate", json={"prompt": prompt})
            assert answer.status_code == 409 and answer.json()["error"] == web.BUSY
        assert other.get("/").status_code == other.get("/model").status_code == 200
        steps.go.set()
        thread.join(20)
        assert len(first[0]) == 7 and generate(other)[-1]["differs"] == AGREED


def test_a_failure_is_said_and_the_next_request_runs(client, model, monkeypatch, capsys):
    def fails(*_: object, **__: object) -> Iterator[torch.Tensor]:
        yield torch.tensor([5])
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(model, "stream_tokens", fails)
        patch.setattr(model, "device", torch.device("cpu"))
        events = generate(client)
    assert events[-1] == {"error": "RuntimeError: the device is gone"}
    assert "Traceback" in capsys.readouterr().err
    assert generate(client)[-1]["differs"] == AGREED


def test_a_client_that_goes_away_ends_its_generation(client, stand_in):
    steps = stand_in(endless())
    assert asyncio.run(until_gone(client.app)) < 5
    assert steps.closed.wait(5) and is_free(client)
    stand_in([5])
    assert generate(client)[-1]["differs"] == AGREED


def test_a_client_that_goes_away_while_it_sends(client, stand_in):
    steps = stand_in([])
    messages = iter([{"type": "http.request", "body": b'{"pro', "more_body": True}])

    async def receive():
        return next(messages, {"type": "http.disconnect"})

    async def send(message):
        pass

    asyncio.run(client.app(SCOPE, receive, send))
    assert steps.calls == 0 and is_free(client, 0)


SCOPE = {
    "type": "http",
    "asgi": {"version": "3.0", "spec_version": "2.3"},
    "method": "POST",
    "path": "/generate",
    "query_string": b"",
    "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
}


async def until_gone(app) -> float:
    """A client that goes away after the first token: the seconds that the server then takes."""
    body = json.dumps({"prompt": ONCE}).encode()
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])
    token = asyncio.Event()

    async def receive():
        if message := next(messages, None):
            return message
        await token.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        if message.get("body"):
            token.set()

    await asyncio.wait_for(app(SCOPE, receive, send), 20)
    assert token.is_set()
    began = time.monotonic()
    while app.state.busy.locked() and time.monotonic() < began + 10:
        await asyncio.sleep(0.01)
    return time.monotonic() - began
