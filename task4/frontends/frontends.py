"""Which front ends there are, and which of them can run here."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class FrontEnd:
    """One way to write the attention.

    Attributes:
        name: of its module, of its checks, on the command line, and of the extra in pyproject.toml with its packages.
        title: what it is, in a few words.
        files: what a person writes, in this folder.
        devices: whose tensors it takes.
        packages: that it needs besides torch, as pip names them.
        simulator: what runs it on CPU tensors where there is no GPU.
        module: that has its ``flash_attention``; the one of its name in this folder if "".
    """

    name: str
    title: str
    files: tuple[str, ...]
    devices: tuple[str, ...]
    packages: tuple[str, ...] = ()
    simulator: str = ""
    module: str = ""

    @property
    def attention(self) -> Callable[..., Tensor]:
        """Its ``flash_attention(q, k, v, *, causal, scale, seqlens_k, leftpad_k)``."""
        module: Any = importlib.import_module(self.module or f"{__package__}.{self.name}")
        return module.flash_attention

    @property
    def lines(self) -> int:
        """Lines of code, without those that are empty or only comments."""
        texts = ((FOLDER / file).read_text(encoding="utf-8") for file in self.files)
        lines = (line.strip() for text in texts for line in text.splitlines())
        return sum(bool(line) and not line.startswith(("//", "#")) for line in lines)

    @property
    def versions(self) -> str:
        """Of its packages, where they are installed."""
        installed = [(name, _version(name)) for name in self.packages]
        return ", ".join(f"{name} {version}" for name, version in installed if version)

    def why_not(self, device: str) -> str | None:
        """Why it does not run on such a device here, and how to get what it lacks; None if it does."""
        lacks = [name for name in self.packages if not _version(name)]
        if lacks:
            return f"{self.name} needs {', '.join(lacks)}: make frontends, or pip install '.[{self.name}]'"
        if device in self.devices or (
            device == "cpu" and self.simulator and not torch.cuda.is_available()
        ):
            try:
                self.attention  # noqa: B018
            except ImportError as error:
                return f"{self.name}: {error}"
            return None
        on = f"{self.name} runs on {' and '.join(self.devices)} tensors"
        simulated = f", and in {self.simulator} where there is no GPU" if self.simulator else ""
        return f"{on}{simulated}; here they are on {device}"


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


FRONT_ENDS = (
    FrontEnd("cpp", "C++ on the CPU", ("host.cpp", "elements.h", "cpp.py"), ("cpu",)),
    FrontEnd(
        "numba", "Python, a thread at a time", ("numba.py",), ("cuda",), packages=("numba-cuda",),
        simulator="Numba's simulator",
    ),
    FrontEnd(
        "nvrtc", "task 4's .cu, compiled inside Python", ("../attention_kernel.cu", "nvrtc.py"), ("cuda",),
        packages=("cuda-core",),
    ),
    FrontEnd(
        "triton", "Python, a tile at a time", ("triton.py",), ("cuda",), packages=("triton",),
        simulator="Triton's interpreter",
    ),
    FrontEnd(
        "cutile", "Python, a tile at a time", ("cutile.py",), ("cuda",), packages=("cuda-tile",)
    ),
    FrontEnd(
        "operators", "the fastest kernel, in PyTorch's library", ("operators.py",), ("cpu", "cuda")
    ),
    FrontEnd(
        "thunder", "the same in lightning-thunder", ("thunder.py",), ("cpu", "cuda"),
        packages=("lightning-thunder",),
    ),
)  # fmt: skip
OURS = FrontEnd(
    "nvcc", "task 4's kernel itself", ("../attention_kernel.cu", "../attention.py"), ("cuda",),
    module="task4.attention",
)  # fmt: skip
