"""What the tests of the checker share: a right answer, and a suite to run."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from common.check import Rng, Suite
from common.record import Worth

HEADS = ("batch", "head", "row", "column")


def good(seed: int = 3, shape: tuple[int, ...] = (2, 3, 70, 16)) -> tuple[Tensor, Tensor, Tensor]:
    """A right answer, the truth, PyTorch's own."""
    x = Rng(seed, "cpu", "good").randn(*shape)
    truth = torch.softmax(x.double(), -1)
    return torch.softmax(x, -1), truth, torch.softmax(x, -1)


def make_suite(**options: object) -> Suite:
    sources = ("task9/attention.py", "task9/attention_kernel.cu")
    suite = Suite("task9", title="a stage", sources=sources, **options)
    suite.stage = replace(suite.stage, worth=Worth(3))
    return suite


def run(suite: Suite, *arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        suite.main(["--device", "cpu", *arguments])
    return end.value.code
