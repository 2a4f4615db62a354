"""The libraries' attention kernels, which ours are compared with: PyTorch's by backend, and FlashAttention-3."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any

from torch import Tensor

from common.timing.sdpa import Backend, sdpa

FA3_MODULE = "flash_attn_interface"


@dataclass(frozen=True)
class Peer:
    """A library's kernel: ``attention(q, k, v, causal=...)`` on ``(batch, seq, heads, head_dim)``."""

    label: str
    attention: Callable[..., Tensor]
    split = False  # none multiplies float32 in 16-bit parts


def import_peer(name: str) -> Any:
    """A library that may not be here.

    Raises:
        ImportError: it is not there, or not for this torch; in a line.
    """
    try:
        return importlib.import_module(name)
    except Exception as error:  # libraries raise all kinds of errors where they do not fit
        raise ImportError(f"{name} cannot be imported ({type(error).__name__})") from error


def _fa3(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    out = import_peer(FA3_MODULE).flash_attn_func(q, k, v, causal=causal)
    return out[0] if isinstance(out, tuple) else out


def fa3_version() -> str:
    """FlashAttention-3's version, or that it cannot be imported."""
    try:
        module = import_peer(FA3_MODULE)
        return metadata.version("flash_attn_3")
    except metadata.PackageNotFoundError:
        return getattr(module, "__version__", "of unknown version")
    except ImportError as error:
        return str(error)


MATH, EFFICIENT, FLASH, CUDNN = (Peer(b.value, partial(sdpa, backend=b)) for b in Backend)
FA3 = Peer("FlashAttention-3", _fa3)
PEERS = (MATH, EFFICIENT, FLASH, CUDNN, FA3)
