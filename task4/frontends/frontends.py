"""Which front ends there are, and which of them can run here."""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class FrontEnd:
    """One way to write the attention.

    Attributes:
        name: of its module, of its checks and on the command line.
        title: what it is, in a few words.
        files: what a person writes, in this folder.
        devices: on which it runs.
        packages: what it imports besides torch; the extra of the same name in pyproject.toml has them.
    """

    name: str
    title: str
    files: tuple[str, ...]
    devices: tuple[str, ...]
    packages: tuple[str, ...] = ()

    @property
    def attention(self) -> Callable[..., Tensor]:
        """Its ``flash_attention(q, k, v, *, causal, scale, seqlens_k, leftpad_k)``."""
        module: Any = importlib.import_module(f"{__package__}.{self.name}")
        return module.flash_attention

    @property
    def lines(self) -> int:
        """Lines of code, without those that are empty or only comments."""
        texts = ((FOLDER / file).read_text(encoding="utf-8") for file in self.files)
        lines = (line.strip() for text in texts for line in text.splitlines())
        return sum(bool(line) and not line.startswith(("//", "#")) for line in lines)

    def why_not(self, device: str) -> str | None:
        """Why it does not run on such a device here, and how to get what it lacks; None if it does."""
        if device not in self.devices:
            return f"{self.name} runs on {' and '.join(self.devices)} tensors; here they are on {device}"
        lacks = [p for p in self.packages if importlib.util.find_spec(p) is None]
        if lacks:
            return f"{self.name} needs {', '.join(lacks)}: pip install '.[{self.name}]'"
        return None


FRONT_ENDS = (
    FrontEnd("cpp", "C++ on the CPU", ("host.cpp", "elements.h", "cpp.py"), ("cpu",)),
    FrontEnd(
        "operators", "task 4's kernel in PyTorch's library", ("operators.py",), ("cpu", "cuda")
    ),
)
