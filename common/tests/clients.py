"""What the tests of task 7's page share: a client of its server, and tokens in place of the model's."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from starlette.testclient import TestClient  # its httpx comes with transformers

from task7 import web
from task7.inference import TINY, ModelWithCustomAttention

LOCAL = "http://127.0.0.1"
PATHS = ["generate", "loop", "reference"]
ONCE = "Once upon a time"
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def model() -> ModelWithCustomAttention:
    return ModelWithCustomAttention(TINY)


@pytest.fixture
def comparison(model: ModelWithCustomAttention) -> web.Comparison:
    return web.Comparison(model, "model: tiny", most_new_tokens=1000)


@pytest.fixture
def client(comparison: web.Comparison) -> TestClient:
    return TestClient(web.make_app(comparison), base_url=LOCAL)


class Steps:
    """In place of ``stream_tokens``: these tokens, each after ``go``; it counts what was asked of it."""

    def __init__(self, tokens: Iterator[int] | list[int]) -> None:
        self.tokens, self.calls, self.closed = tokens, 0, threading.Event()
        self.began, self.go = threading.Event(), threading.Event()
        self.go.set()

    def __call__(self, *_: object, **__: object) -> Iterator[torch.Tensor]:
        self.calls += 1
        return self.steps()

    def steps(self) -> Iterator[torch.Tensor]:
        self.began.set()
        try:
            for token in self.tokens:
                assert self.go.wait(20)
                yield torch.tensor([token])
        finally:
            self.closed.set()


def endless() -> Iterator[int]:
    while True:
        time.sleep(0.01)
        yield 5


@pytest.fixture
def stand_in(model: ModelWithCustomAttention, monkeypatch: pytest.MonkeyPatch):
    def put(tokens: Iterator[int] | list[int]) -> Steps:
        steps = Steps(tokens)
        monkeypatch.setattr(model, "stream_tokens", steps)
        monkeypatch.setattr(model, "device", torch.device("cpu"))  # no warming up
        return steps

    return put
