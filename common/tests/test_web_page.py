"""Task 7's page in a browser, where there is a Chromium."""

import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

pytest.importorskip("starlette", reason="needs Starlette: the extra web")
pytest.importorskip("uvicorn", reason="needs uvicorn: the extra web")

from common.tests import clients
from common.tests.clients import LOCAL, PATHS, Steps, endless
from task7 import comparison as comparisons
from task7 import web

model, comparison = clients.model, clients.comparison  # fixtures
client, stand_in = clients.client, clients.stand_in


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium of this machine, driven by Playwright; neither is in an extra."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs Chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def server(app) -> Iterator[str]:
    """The page's address, served in this process."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        running = web.Server(web.uvicorn.Config(app, log_level="error", lifespan="off"))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"{LOCAL}:{listener.getsockname()[1]}/"
        finally:
            running.should_exit = True
            thread.join(20)


@pytest.fixture
def opened(browser, client):
    """Opens the page at a width and a colour scheme; at the end, what went wrong in it must be what the test says."""
    with server(client.app) as address, ExitStack() as stack:

        def open_page(width: int, scheme: str = "light"):
            view = {"viewport": {"width": width, "height": 900}, "color_scheme": scheme}
            page = stack.enter_context(browser.new_context(**view)).new_page()
            page.problems, page.asked = [], []
            page.on("pageerror", lambda error: page.problems.append(str(error)))
            page.on(
                "console",
                lambda said: page.problems.append(said.text) if said.type == "error" else None,
            )
            page.on("request", lambda request: page.asked.append(request.url.partition(address)[0]))
            page.goto(address)
            page.wait_for_selector("#generate:enabled")
            return page

        yield open_page


@pytest.mark.parametrize(
    "width, scheme", [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")]
)
def test_the_page_shows_both_texts_and_speeds(opened, width, scheme, request, tmp_path):
    page = opened(width, scheme)
    prompt = "<b>Once</b> upon a time"  # markup stays text
    page.fill("[name=prompt]", prompt)
    page.click("#generate")
    page.wait_for_selector("#says:not(:empty)")
    assert "The texts agree" in page.inner_text("#says")
    outs = [page.inner_text(f"#pane-{path} .out") for path in PATHS]
    assert len(set(outs)) == 1
    assert outs[0].startswith(prompt) and len(outs[0]) > len(prompt) + 60
    for path in PATHS:
        assert float(page.inner_text(f"#pane-{path} .rate")) > 0
        assert page.inner_text(f"#pane-{path} .tokens") == "60"
        assert page.inner_text(f"#pane-{path} .state") == "done"
    titles = [comparisons.TITLES[path] for path in PATHS]
    assert page.locator("section h2").all_inner_texts() == titles
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert not page.problems and set(page.asked) <= {"", "data:,"}
    folder = request.config.getoption("basetemp") or tmp_path
    page.screenshot(path=Path(folder) / f"{width}-{scheme}.png", full_page=True)


def test_the_page_marks_where_the_texts_differ(opened, model, stand_in):
    tokens = [model.tokenizer.encode(words) for words in ("a b c d", "a b d d", "a b d d")]
    steps = stand_in([])
    texts = iter(tokens)
    steps.steps = lambda: (torch.tensor([token]) for token in next(texts))
    page = opened(1280)
    page.click("#generate")
    page.wait_for_selector("#says:not(:empty)")
    marked = {path: page.locator(f"#pane-{path} mark").all_inner_texts() for path in PATHS}
    assert marked == {"generate": [" c d"], "loop": [], "reference": [" d d"]}


def test_stop_and_a_second_page(opened, model, monkeypatch):
    page, other = opened(1280), opened(390)
    with monkeypatch.context() as patch:
        patch.setattr(model, "stream_tokens", Steps(endless()))
        patch.setattr(model, "device", torch.device("cpu"))
        page.click("#generate")
        page.wait_for_selector('#pane-generate .state:text-is("running")')
        other.click("#generate")
        other.wait_for_selector("#error:not(:empty)")
        assert other.text_content("#error") == web.BUSY
        page.click("#stop")
        page.wait_for_selector("#generate:enabled")
        assert page.inner_text("#says") == "Stopped."
        assert page.inner_text("#pane-generate .state") == "stopped"
        assert page.inner_text("#pane-generate .out").startswith(page.input_value("[name=prompt]"))
    other.wait_for_timeout(500)
    other.click("#generate")
    other.wait_for_selector("#says:not(:empty)")
    assert "The texts agree" in other.inner_text("#says") and not other.inner_text("#error")
    assert [said for said in other.problems + page.problems if "409" not in said] == []


def test_the_page_shows_what_the_server_refuses(opened):
    page = opened(390)
    page.fill("[name=prompt]", "the " * 1100)
    page.click("#generate")
    page.wait_for_selector("#error:not(:empty)")
    assert "the model has room for 1,024 in all" in page.inner_text("#error")
    assert page.is_enabled("#generate")
