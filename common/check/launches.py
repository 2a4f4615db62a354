"""A kernel gives the same bits in each launch, on any stream and inside a CUDA graph."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from common.check.compare import CheckFailed
from common.check.rng import Rng

Run = Callable[..., Tensor]


def assert_repeat(run: Run, inputs: Sequence[Tensor], launches: int = 1000) -> None:
    """CheckFailed if one of so many launches on the same inputs gives other bits than the first."""
    first = _bits(run(*inputs))
    different = torch.zeros((), dtype=torch.int64, device=first.device)
    for _ in range(launches):
        different += (_bits(run(*inputs)) != first).any()
    if different:
        raise CheckFailed(
            f"{int(different)} of {launches} launches gave another result than the first"
        )


def assert_ordered_by_stream(run: Run, inputs: Sequence[Tensor]) -> None:
    """CheckFailed if a launch on another stream, behind work of that stream, gives other bits; on a GPU."""
    x, *others = inputs
    expected = run(x, *others)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)  # a launch on another stream than this one comes too early
        got = run(x + 0.0, *others)
    torch.cuda.synchronize()
    _expect_same(got, expected, "on another stream")


def assert_same_in_graph(run: Run, inputs: Sequence[Tensor], rng: Rng) -> None:
    """CheckFailed if a captured launch gives other bits when it is replayed on new inputs; on a GPU.

    The new numbers are written into ``inputs``.
    """
    run(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(*inputs)
    for t in inputs:
        t.copy_(rng.randn(*t.shape, dtype=t.dtype))
    expected = run(*inputs)
    for _ in range(2):
        got.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        _expect_same(got, expected, "when a CUDA graph is replayed on new inputs")


def _expect_same(got: Tensor, expected: Tensor, when: str) -> None:
    if not torch.equal(_bits(got), _bits(expected)):
        raise CheckFailed(f"{when} the result differs from a launch's on the default stream")


def _bits(t: Tensor) -> Tensor:
    return t.view({2: torch.int16, 4: torch.int32}[t.element_size()])
