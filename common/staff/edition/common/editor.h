// What an editor reads before a .cu file where no CUDA is installed; .clangd names it. It is part of no build.
//
// clangd knows CUDA's language, but it has none of CUDA's headers. Those of common/cuda_on_cpu stand in for them. They
// are made for a C++ compiler, so the words of the language, which are macros there, get clang's own meaning back.
#pragma once
#ifndef __CUDACC__

#pragma clang force_cuda_host_device begin  // a kernel may call what these declare
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <mma.h>

#include <cmath>
#include <cstdint>
#include <type_traits>
#pragma clang force_cuda_host_device end

#undef __global__
#undef __device__
#undef __host__
#undef __constant__
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __host__ __attribute__((host))
#define __constant__ __attribute__((constant))
#define __shared__ __attribute__((shared))

// What clang calls for kernel<<<grid, block, bytes, stream>>>: the first where it knows CUDA's version.
extern "C" unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t bytes = 0, cudaStream_t stream = nullptr);
extern "C" cudaError_t cudaConfigureCall(dim3 grid, dim3 block, size_t bytes = 0, cudaStream_t stream = nullptr);

#endif
