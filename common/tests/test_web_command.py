"""The command of task 7's page: a process that ends as it should, and what keeps it from starting."""

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("starlette", reason="needs Starlette: the extra web")
pytest.importorskip("uvicorn", reason="needs uvicorn: the extra web")

from common.paths import ROOT
from common.tests.clients import JSON, ONCE
from task7 import decoder, web
from task7.inference import TINY


@contextmanager
def served(*arguments: str) -> Iterator[tuple[subprocess.Popen, int]]:
    """The command as a process, and its port."""
    command = [sys.executable, "-m", "task7.web", "--model", TINY, "--port", "0", *arguments]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        said = process.stdout.readline(), process.stdout.readline()
        found = re.fullmatch(
            r"open http://127\.0\.0\.1:(\d+) in a browser; Ctrl-C ends it\n", said[1]
        )
        assert said[0].startswith("model: the bundled tiny GPT-2") and found, said
        yield process, int(found[1])
    finally:
        process.kill()
        process.wait()


def test_a_connection_that_is_closed_and_ctrl_c():
    def begin(port: int) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        body = json.dumps({"prompt": ONCE, "max_new_tokens": 1000})
        connection.request("POST", "/generate", body, JSON)
        return connection

    with served("--max-new-tokens", "1000") as (process, port):
        connection = begin(port)
        assert json.loads(connection.getresponse().readline())["tokens"] == 1
        second = begin(port).getresponse()
        assert second.status == 409 and json.load(second)["error"] == web.BUSY
        connection.close()
        until = time.monotonic() + 10
        while (answer := begin(port).getresponse()).status == 409 and time.monotonic() < until:
            time.sleep(0.05)
        assert answer.status == 200 and json.loads(answer.readline())["tokens"] == 1
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        said, errors = process.communicate(timeout=20)
        assert (process.returncode, said, errors) == (130, "\ninterrupted\n", "")
        assert time.monotonic() - began < 5


def test_ctrl_c_while_a_client_sends():
    head = "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n"
    with served() as (process, port), socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(f'{head}{{"pro'.encode())
        time.sleep(0.5)  # the server has it
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=20)
        assert (process.returncode, said, errors) == (130, "\ninterrupted\n", "")


def test_a_model_that_does_not_fit_in_memory(monkeypatch):
    def fail(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(web, "ModelWithCustomAttention", fail)
    with pytest.raises(SystemExit, match="error: CUDA out of memory"):
        web.main(["--port", "0", "--model", TINY])


def test_a_way_that_is_left_out_is_said(capsys, monkeypatch):
    def refuse(config):
        raise ValueError("n_inner must be a positive multiple of 8; got 100")

    monkeypatch.setattr(decoder, "check_model", refuse)
    comparison = web._comparison(web._parse(["--model", TINY, "--device", "cpu"]))
    assert comparison.paths == ["generate", "reference"]
    assert "without Our own loop: n_inner must be a positive mul" in capsys.readouterr().out


def test_what_keeps_the_server_from_starting(capsys):
    def ends(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            web.main(["--port", "0", *arguments])
        assert ended.value.code not in (0, None)
        return f"{ended.value.code} {capsys.readouterr().err}"

    assert "error: unknown model 'gpt5': known are gpt2" in ends("--model", "gpt5")
    assert "--port must be from 0 to 65535; got 70000" in ends("--port", "70000")
    assert "--max-new-tokens must be at least 1; got 0" in ends("--max-new-tokens", "0")
    assert "invalid choice: 'float64'" in ends("--dtype", "float64")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"error: port {port} of 127.0.0.1 cannot be used" in ends("--port", port)


def test_what_is_not_installed_is_said():
    without = "import runpy, sys; sys.modules['uvicorn'] = None; runpy.run_module('task7.web', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", without], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1 and not done.stdout
    assert done.stderr == "error: uvicorn is not installed; make web installs what the page needs\n"
