"""What a call does besides computing its result: which kernels it launches, what PyTorch computes, memory it takes.

    with Watch() as did:
        out = softmax(x)
    assert_close(out, ...)
    did.expect({"task2 batched_softmax": 1}, memory=out.nbytes)

A result can be right and still not come from the kernel that the stage is about.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from common.build import Arguments, Kernels, library, observing
from common.check.compare import CheckFailed
from common.check.frames import own_line
from common.check.poison import is_poison

# Operations that give memory or set it to a constant. Views compute nothing either.
_HARMLESS = ("empty", "new_empty", "zero", "fill", "unsafe_view", "lift_fresh", "detach")
_COPIES = ("clone", "copy", "contiguous", "to_copy", "repeat", "cat", "stack")
# What a layer around attention kernels computes: projections, and rotations written out.
_PROJECTIONS = (
    *("addmm", "baddbmm", "bmm", "linear", "matmul", "mm"),
    *("add", "div", "mul", "neg", "rsub", "sub", "arange"),
)
_ROOM = 1024  # bytes that nobody minds: lengths, flags


class Watch(TorchDispatchMode):
    """A context; afterwards :meth:`expect` says whether what happened in it is as it should be.

    Attributes:
        launches: ``{"task5 flash_attention_decode": 2}``, by folder and launcher.
        computed: PyTorch's operations that compute or copy, as ``clone (task5/attention.py:57)``.
        idle: launchers that have launched no kernel. (Seen on the CPU only.)
        memory: bytes of all tensors that were made, even if they have been freed since; on the CPU also of cudaMalloc.
        largest: the bytes of the largest of them, and what made it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.computed: list[str] = []
        self.idle: list[str] = []
        self.memory = 0
        self._unwritten = False
        self.largest = (0, "")
        self._stack = ExitStack()

    def __enter__(self) -> "Watch":
        self._stack.enter_context(observing(self._launch))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def add(self, computed: list[str], memory: int, largest: tuple[int, str]) -> None:
        """What a call did in another process. Its launches are seen when they are repeated here."""
        self.computed += computed
        self.memory += memory
        self.largest = max(self.largest, largest)

    def _launch(self, kernels: Kernels, name: str, arguments: Arguments, launch: Any) -> None:
        self.launches[f"{kernels.source.parent.name} {name}"] += 1
        launch(arguments)
        tensors = [t for t in arguments.values() if isinstance(t, Tensor)]
        with _disable_current_modes():
            self._unwritten |= any(map(_as_allocated, tensors))
        if all(t.is_cpu for t in tensors):
            if not library.launched():
                self.idle.append(f"{name} of {kernels.source.name}")
            size = library.allocated()
            self.memory += size
            self.largest = max(self.largest, (size, f"cudaMalloc in {kernels.source.name}"))

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        name = function.name().removeprefix("aten::").partition(".")[0]
        given = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for made in tree_leaves(out):
            if isinstance(made, Tensor) and _storage(made) not in given:
                size = made.untyped_storage().nbytes()
                self.memory += size
                text = f"{name} made {_shape(made)}, {size:,} bytes, at {own_line(sys._getframe())}"
                self.largest = max(self.largest, (size, text))
        if not (function.is_view or name.strip("_").startswith(_HARMLESS)):
            self.computed.append(f"{name} ({own_line(sys._getframe())})")
        return out

    def expect_written(self) -> None:
        """CheckFailed if a launch has left a tensor as it was allocated. Of a product with it, only NaN remains."""
        if self._unwritten:
            raise CheckFailed("nothing was written", not_written=True)

    def expect_small(self, size: int) -> None:
        """CheckFailed if a tensor of more than ``size`` bytes was made: a copy of what should be read in place."""
        if self.largest[0] > size:
            raise CheckFailed(
                f"the result is right, but nothing over {size:,} bytes is needed, and {self.largest[1]}"
            )

    def expect_projections_only(self, file: str) -> None:
        """CheckFailed if this file has computed more with PyTorch than products and sums, such as an exponential.

        With a launch whose result is not used and an attention of PyTorch's, launches and result would be right.
        """
        names = [name for name in self.computed if f"({file}:" in name]
        more = [n for n in names if n.partition(" ")[0].strip("_") not in _PROJECTIONS]
        more = [name for name in more if not name.strip("_").startswith(_COPIES)]
        if more:
            raise CheckFailed(
                f"the result is right, but PyTorch computed {', '.join(dict.fromkeys(more))};"
                " here the kernels compute the attention"
            )

    def expect(
        self, launches: Mapping[str, int], *, memory: int | None, torch_computes: bool = False
    ) -> None:
        """CheckFailed unless these launches were made and no others.

        Args:
            launches: how often, by folder and launcher.
            memory: how many bytes of tensors may be made: outputs and scratch. None: any.
            torch_computes: whether PyTorch may compute too, as in a layer with projections.
        """
        wanted = {name: n for name, n in launches.items() if n}
        if self.launches != wanted:
            raise CheckFailed(
                f"the result is right, but not by these kernels: expected {_list(wanted)};"
                f" launched {_list(self.launches)}"
            )
        if self.idle:
            raise CheckFailed(
                f"the result is right, but {', '.join(self.idle)} has launched no kernel"
            )
        if self.computed and not torch_computes:
            names = list(dict.fromkeys(self.computed))
            copies = all(name.strip("_").startswith(_COPIES) for name in names)
            what = "copied tensors" if copies else "computed"
            why = (
                "the kernels read tensors where they are, with any strides"
                if copies
                else "here the kernels compute everything"
            )
            raise CheckFailed(
                f"the result is right, but PyTorch {what}: {', '.join(names[:6])}; {why}"
            )
        if memory is not None and self.memory > memory + _ROOM:
            raise CheckFailed(
                f"the result is right, but tensors of {self.memory:,} bytes in all were made, and {memory:,} are"
                f" needed; the largest: {self.largest[1]}"
            )


@contextmanager
def written_out() -> Iterator[None]:
    """A context that raises CheckFailed at its end if the attention in it was PyTorch's own."""
    found: list[str] = []
    with attention_calls(found):
        yield
    if found:
        raise CheckFailed(
            f"this is PyTorch's attention: {', '.join(dict.fromkeys(found))}; here its steps are to be written out"
        )


class attention_calls(TorchFunctionMode):
    """Collects calls of PyTorch's attention; what they are made of is all that a dispatch mode sees."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if "scaled_dot_product" in name or "multi_head_attention" in name:
            self.found.append(f"{name} ({own_line(sys._getframe())})")
        return function(*args, **(kwargs or {}))


def _as_allocated(t: Tensor) -> bool:
    if not t.is_floating_point() or t.numel() == 0:
        return False
    first = t[(0,) * t.dim()]  # mostly it says so already
    return bool(is_poison(first)) and bool(is_poison(t).all())


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def _shape(t: Tensor) -> str:
    return f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}"


def _list(launches: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {n} x" for name, n in launches.items()) or "nothing"
