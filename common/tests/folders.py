"""What the tests of building share: a task's folder, with a kernel that compiles."""

from pathlib import Path

KERNEL = """\
#include <cuda_runtime.h>
#include <cstdint>
#include "factor.cuh"

__global__ void scale_kernel(const float* inp, float* out, int64_t n, float by) {
  int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
  if (i < n) out[i] = FACTOR * by * inp[i];
}

extern "C" cudaError_t scale(const float* inp, float* out, int rows, int64_t n, float by,
                             cudaStream_t stream) {
  scale_kernel<<<(n + 255) / 256, 256, 0, stream>>>(inp, out, n, by);
  return cudaGetLastError();
}
"""
COMPILE = 'from common.build import compile_main\ncompile_main(__file__, "kernel.cu")\n'


def write_kernel(folder: Path, kernel: str = KERNEL) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "factor.cuh").write_text("#pragma once\n#define FACTOR 1.0f\n")
    (folder / "kernel.cu").write_text(kernel)
    (folder / "compile.py").write_text(COMPILE)
    return folder / "kernel.cu"
