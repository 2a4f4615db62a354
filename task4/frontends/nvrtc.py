"""Task 4's own kernel, compiled inside Python by NVRTC, CUDA's compiler as a library, through cuda.core. No nvcc.

NVRTC compiles device code, and of a template only the instantiations that are named. It has no header of the C++
library. So it gets ``attention_kernel.cu`` up to its launchers, with the headers of common/include in place of their
#includes. The launchers are this module. See https://nvidia.github.io/cuda-python/cuda-core/latest/.
"""

import ctypes
import io
import math
import re
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from cuda import pathfinder
from cuda.bindings import driver
from cuda.core import Kernel, ObjectCode, Program, ProgramOptions
from torch import Tensor

from common.build.toolchain import BuildError, arch_of
from common.inputs import check_attention, check_lengths, describe
from common.paths import ROOT
from task4.attention import TILES

KERNEL = ROOT / "task4/attention_kernel.cu"
INCLUDE = ROOT / "common/include"
HOST_ONLY = "launch.cuh"
LANES = 16  # a block has 16 x 16 threads
TYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
# Of <cstdint> and <cmath>, what the kernel uses.
PROLOGUE = """
using int64_t = long long;
#define INFINITY __int_as_float(0x7f800000)
"""


class Strides(ctypes.Structure):
    """``struct Strides`` of tensor.cuh."""

    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "row", "head")]


class Attention(ctypes.Structure):
    """``struct Attention<T>`` of attention_kernel.cu, the kernel's only argument."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out")),
        *((name, Strides) for name in ("q_strides", "k_strides", "v_strides", "out_strides")),
        *((name, ctypes.c_void_p) for name in ("seqlens_k", "leftpad_k")),
        *((n, ctypes.c_int) for n in ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim")),
        ("scale", ctypes.c_float),
        ("causal", ctypes.c_bool),
    ]


@dataclass(frozen=True)
class Variant:
    """An instantiation of the kernel.

    Attributes:
        B_r, B_c: queries and keys of a tile.
        head_dim: 64 or 128, the one that the kernel is compiled for.
        dtype: of q, k, v and the output.
        blocks: of them at least, an SM must have registers for: ``__launch_bounds__``'s second argument.
    """

    B_r: int
    B_c: int
    head_dim: int
    dtype: torch.dtype = torch.float32
    blocks: int = 1

    @property
    def name(self) -> str:
        """In C++."""
        return (
            f"flashattention_kernel<{self.B_r}, {self.B_c}, {self.head_dim}, {TYPES[self.dtype]}>"
        )

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: Q_i, K_j with 4 floats more per row, V_j and P, all in float32."""
        B_r, B_c, d = self.B_r, self.B_c, self.head_dim
        return 4 * (B_r * d + B_c * (d + 4) + B_c * d + B_r * B_c)

    @property
    def source(self) -> str:
        """What NVRTC compiles. It fails if the sizes above are not those of the .cu."""
        bounds = "__launch_bounds__(LANES* LANES)"
        kernel = _inlined(KERNEL).partition("// Launchers")[0]
        if kernel.count(bounds) != 1:
            raise BuildError(f"{KERNEL.name} must have one {bounds}; it has {kernel.count(bounds)}")
        if self.blocks > 1:
            kernel = kernel.replace(bounds, f"__launch_bounds__(LANES* LANES, {self.blocks})")
        size = f"sizeof(float) * make_tiles({self.B_r}, {self.B_c}, {self.head_dim}).size"
        return f"""{PROLOGUE}{kernel}
static_assert(sizeof(Attention<float>) == {ctypes.sizeof(Attention)}, "nvrtc.Attention");
static_assert({size} == {self.shared_bytes}, "nvrtc.Variant.shared_bytes");
"""


@dataclass(frozen=True)
class Compiled:
    """What NVRTC made of a variant.

    Attributes:
        code: the cubin.
        seconds: that NVRTC took.
        registers: of a thread.
        spill_stores, spill_loads: bytes of registers that a thread moves to local memory and back, by the code's text.
    """

    variant: Variant
    code: ObjectCode
    seconds: float
    registers: int
    spill_stores: int
    spill_loads: int


def _inlined(path: Path) -> str:
    """A source with our headers in place of their #includes, CUDA's left as they are, and no others."""

    def include(line: re.Match[str]) -> str:
        if line[1].startswith("cuda_"):
            return line[0]
        ours = INCLUDE / line[1]
        return _inlined(ours) if ours.is_file() and ours.name != HOST_ONLY else ""

    text = path.read_text(encoding="utf-8").replace("#pragma once", "")
    return re.sub(r'^#include [<"](.+)[>"]$', include, text, flags=re.MULTILINE)


@cache
def compile_variant(variant: Variant, arch: str) -> Compiled:
    """Compile for ``sm_90a`` or the like; needs no GPU.

    Raises:
        BuildError: CUDA's headers are not installed.
        NVRTCError: of cuda.core; it does not compile, with NVRTC's words.
    """
    headers = pathfinder.find_nvidia_header_directory("cudart")
    if headers is None:
        raise BuildError("NVRTC needs cuda_fp16.h and cuda_bf16.h: pip install nvidia-cuda-runtime")
    options = ProgramOptions(
        arch=arch,
        std="c++17",
        include_path=headers,
        device_as_default_execution_space=True,  # NVRTC has no host functions: strides_of is one
        ptxas_options=["-v"],
    )
    began, log = time.perf_counter(), io.StringIO()
    code = Program(variant.source, "c++", options).compile("cubin", [variant.name], logs=log)
    seconds = time.perf_counter() - began
    found = [
        re.search(rf"(\d+) {what}", log.getvalue())
        for what in ("registers,", "bytes spill stores", "bytes spill loads")
    ]
    if None in found:
        raise BuildError(f"ptxas did not say what the kernel takes:\n{log.getvalue()}")
    return Compiled(variant, code, seconds, *(int(number[1]) for number in found))


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    seqlens_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
) -> Tensor:
    """softmax(scale q k^T) v by task 4's kernel, compiled by NVRTC. [FA2] arXiv:2307.08691, Algorithm 1.

    Args, returns, raises:
        As :func:`task4.attention.flash_attention`, with tensors on a GPU.
    """
    _, _, _, q_len, _, head_dim = check_attention(q, k, v)
    if not q.is_cuda:
        raise ValueError(f"this attention runs on a GPU alone; got q {describe(q)}")
    check_lengths("seqlens_k", seqlens_k, q)
    check_lengths("leftpad_k", leftpad_k, q)
    compiled_for = 64 if head_dim <= 64 else 128
    limit = torch.cuda.get_device_properties(q.device).shared_memory_per_block_optin
    variants = (Variant(*tile, compiled_for, q.dtype) for tile in TILES[compiled_for])
    fits = [v for v in variants if v.shared_bytes <= limit]
    return launch(
        fits[-1] if q_len <= 32 else fits[0], q, k, v, causal, scale, seqlens_k, leftpad_k
    )


def launch(
    variant: Variant,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    scale: float | None = None,
    seqlens_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
) -> Tensor:
    """:func:`flash_attention` by one variant, on the current stream. Checks nothing.

    Raises:
        RuntimeError: CUDA's error.
    """
    batch, q_len, heads, head_dim = q.shape
    out = torch.empty((batch, q_len, heads, head_dim), dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    tensors = (q, k, v, out)
    a = Attention(
        *(t.data_ptr() for t in tensors),
        *(Strides(*t.stride()[:3]) for t in tensors),
        *(None if t is None else t.data_ptr() for t in (seqlens_k, leftpad_k)),
        *(batch, heads, k.shape[2], q_len, k.shape[1], head_dim),
        1 / math.sqrt(head_dim) if scale is None else scale,
        causal,
    )
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(a))
    grid, block = (-(-q_len // variant.B_r), heads, batch), (LANES, LANES, 1)
    with torch.cuda.device(q.device):
        kernel = loaded(variant, q.device.index)
        stream = torch.cuda.current_stream().cuda_stream
        # cuda.core's own launch takes scalars and addresses, and no struct by value.
        _expect_success(
            driver.cuLaunchKernel(
                driver.CUfunction(int(kernel.handle)), *grid, *block, variant.shared_bytes,
                driver.CUstream(stream), ctypes.addressof(arguments), 0,
            )
        )  # fmt: skip
    return out


@cache
def loaded(variant: Variant, gpu: int) -> Kernel:
    """The variant on the current GPU, which has this number, allowed the shared memory that it takes."""
    compiled = compile_variant(variant, arch_of(torch.cuda.get_device_capability(gpu)))
    kernel = compiled.code.get_kernel(variant.name)
    most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _expect_success(
        driver.cuKernelSetAttribute(most, variant.shared_bytes, kernel.handle, driver.CUdevice(gpu))
    )
    return kernel


def _expect_success(result: tuple[driver.CUresult]) -> None:
    if result[0] != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{KERNEL.name} by NVRTC: {result[0].name}")
