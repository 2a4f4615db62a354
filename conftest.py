# BEGIN STAFF
import os
from collections.abc import Generator

import pytest

import common  # noqa: F401  (before torch: see there)

# isort: split
import torch

if not torch.cuda.is_available():  # Triton reads it when it is imported, which torch.compile does
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator:
    """Under pytest-xdist several processes share a GPU, and some cases need much of it."""
    yield  # with that, all that a test has put in the place of PyTorch's functions is gone
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 1 << 30:
        torch.cuda.empty_cache()


# END STAFF
pytest_plugins = ["common.check.pytest_plugin"]
