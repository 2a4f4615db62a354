"""What compiling task 4's kernel takes by NVRTC and by nvcc, and what its tiles take of an SM.

A thread has at most 255 registers, and an SM 65,536. Values for which there are none left are spilled to local memory,
which is DRAM behind the caches.
"""

import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from common.build import builder, planner
from common.build.toolchain import BuildError, find_gpu
from common.timing import all_alike, measure
from task4.frontends.nvrtc import KERNEL, LANES, Compiled, Variant, compile_variant, launch, loaded

SHAPE = (4, 4096, 16, 64)  # of q, k and v where variants are timed; float32, not causal
VARIANTS = (
    Variant(128, 64, 64),  # task 4's; the others are compared with it
    Variant(32, 32, 64),
    Variant(64, 64, 64),
    Variant(128, 64, 64, blocks=2),  # half of its registers are taken away: 128 are left
    Variant(128, 64, 64, blocks=4),  # 64 are left, for no gain: shared memory suffices for 2 blocks
    Variant(128, 128, 64),  # S in registers is twice as large
    Variant(256, 64, 64),  # S and O_i are
)


@dataclass(frozen=True)
class CompileTimes:
    """Seconds.

    Attributes:
        nvrtc: for the one instantiation that a call needs.
        nvcc: for all of attention_kernel.cu, 12 instantiations and their launchers; None without nvcc.
    """

    nvrtc: float
    nvcc: float | None


@dataclass(frozen=True)
class Taken:
    """What a variant takes. Without a GPU the last three are None; so they are if a block does not fit in an SM.

    Attributes:
        blocks_per_sm: that run at the same time.
        ms: the median time at ``SHAPE``.
        ratio: by the time of the first variant.
    """

    compiled: Compiled
    blocks_per_sm: int | None = None
    ms: float | None = None
    ratio: float | None = None


def _arch() -> str:
    gpu = find_gpu()
    return gpu.arch if gpu else "sm_90a"


def compile_times() -> CompileTimes:
    """What a person waits for after an edit. Call it first: the first compilation loads NVRTC, too."""
    nvrtc = compile_variant(VARIANTS[0], _arch()).seconds
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(planner, "BUILD", Path(folder)):
        try:
            target = planner.plan(KERNEL, "cuda", arch=_arch())
        except BuildError:  # there is no nvcc
            return CompileTimes(nvrtc, None)
        return CompileTimes(nvrtc, builder.make([target])[0].seconds)


def register_report() -> list[Taken]:
    """Registers, shared memory, spills, and on a GPU the time, of ``VARIANTS``, in their order.

    Raises:
        AssertionError: two of them give different results.
    """
    found = [compile_variant(variant, _arch()) for variant in VARIANTS]
    if not torch.cuda.is_available():
        return [Taken(compiled) for compiled in found]
    limit = torch.cuda.get_device_properties().shared_memory_per_block_optin
    q, k, v = torch.randn(3, *SHAPE, device="cuda")
    fits = [variant for variant in VARIANTS if variant.shared_bytes <= limit]
    times = measure({str(n): partial(launch, n, q, k, v) for n in fits}, check=all_alike)
    first = times[str(VARIANTS[0])].median_ms
    return [
        Taken(
            compiled,
            loaded(n, q.device.index).occupancy.max_active_blocks_per_multiprocessor(
                LANES * LANES, n.shared_bytes
            ),
            times[str(n)].median_ms,
            times[str(n)].median_ms / first,
        )
        if (n := compiled.variant) in fits
        else Taken(compiled)
        for compiled in found
    ]
