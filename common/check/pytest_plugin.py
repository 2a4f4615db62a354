"""Suites under pytest: items as tests, ``--seed``, failures without a traceback. conftest.py loads it."""

import inspect
from collections.abc import Callable

import pytest

from common.check.case import Item, default_targets
from common.check.failure import failure_of
from common.check.rng import new_seed


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seed", type=int, default=None, help="repeat the random inputs of an earlier run"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--seed") is None:
        config.option.seed = new_seed()


def pytest_report_header(config: pytest.Config) -> str:
    return f"check inputs: --seed {config.getoption('--seed')}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    suite = getattr(metafunc.function, "suite", None)
    if suite is not None and "item" in metafunc.fixturenames:
        items = list(suite.items(default_targets()))
        metafunc.parametrize("item", items, ids=[item.id for item in items])


def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> list | None:
    """Only functions that a module defines are its tests: it may import task2's test_batched_softmax."""
    module = getattr(collector, "module", None)
    imported = inspect.isfunction(obj) and module is not None and obj.__module__ != module.__name__
    return [] if imported and not hasattr(obj, "suite") else None


@pytest.fixture
def run_item(request: pytest.FixtureRequest) -> Callable[[Item], None]:
    """Runs an item as a test, with the run's seed; a failure shows its explanation alone."""
    seed = request.config.getoption("--seed")

    def run(item: Item) -> None:
        try:
            item.run(seed)
        except Exception as error:
            failure = failure_of(error, item, seed)
            if failure.category == "bug":
                raise
            pytest.fail(failure.text, pytrace=False)

    return run
