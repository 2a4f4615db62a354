"""A decode step as a CUDA graph."""

from collections.abc import Callable

import torch
from torch import Tensor


def capture(step: Callable[[], None], *state: Tensor) -> torch.cuda.CUDAGraph:
    """The graph of a step that works on buffers which stay where they are.

    The step runs once before, so that whatever a first call compiles or allocates is there.

    Args:
        step: launches work on the current stream, and allocates nothing that it needs later.
        state: the tensors that a step advances; they are as before when this returns.
    """
    kept = [t.clone() for t in state]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    for t, before in zip(state, kept, strict=True):
        t.copy_(before)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph
