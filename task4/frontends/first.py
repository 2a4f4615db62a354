"""From an edit to a first result: ``python -m task4.frontends.first NAME DEVICE FOLDER``.

Compiles into FOLDER, where nothing is compiled yet, and computes an attention of one tile.
"""

import os
import sys
from pathlib import Path

import torch

from common.build import planner
from task4.frontends.frontends import FRONT_ENDS, OURS


def main(name: str, device: str, folder: str) -> None:
    """Compute once."""
    planner.BUILD = Path(folder)
    for package in ("TRITON", "NUMBA", "CUDA_TILE"):
        os.environ[f"{package}_CACHE_DIR"] = folder
    (front_end,) = (f for f in (*FRONT_ENDS, OURS) if f.name == name)
    q, k, v = torch.randn(3, 1, 32, 1, 64, device=device)
    front_end.attention(q, k, v, causal=True).sum().item()


if __name__ == "__main__":
    main(*sys.argv[1:])
