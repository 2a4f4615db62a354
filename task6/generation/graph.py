"""A decode step as a CUDA graph."""

from collections.abc import Callable

import torch
from torch import Tensor


class GraphedStep:
    """A step on buffers that stay where they are: on a GPU captured at the first call, and replayed at later ones.

    Args:
        tokens, lengths: what a step advances.
        positions: how many there are. Past the last one a step has nowhere to write.
    """

    def __init__(self, tokens: Tensor, lengths: Tensor, positions: int) -> None:
        self._state, self._positions = (tokens, lengths), positions
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, step: Callable[[], None], filled: int) -> None:
        """Advance.

        Args:
            step: the same at each call. It launches work on the current stream, and allocates nothing that it needs
                later. It is not kept: a decoder whose step it is would not be freed with its last reference.
            filled: positions of the longest sequence, known to the host.

        Raises:
            ValueError: no prompt yet, or no position left.
        """
        if not 1 <= filled < self._positions:
            raise ValueError(
                f"a step needs a prompt and a position that is left; {filled} of {self._positions} are filled"
            )
        if not self._state[0].is_cuda:
            return step()
        if self._graph is None:
            self._graph = self._captured(step)
        return self._graph.replay()

    def _captured(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        kept = [t.clone() for t in self._state]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()  # once before, so that whatever a first call compiles or allocates is there
        torch.cuda.current_stream().wait_stream(stream)
        for t, before in zip(self._state, kept, strict=True):
            t.copy_(before)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph
