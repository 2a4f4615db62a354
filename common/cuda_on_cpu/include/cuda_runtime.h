// CUDA on the CPU: what nvcc declares without an #include. Every rewritten .cu includes this first.
//
// The threads of a block are fibers on one OS thread; blocks spread over the cores. The parts:
//   types.h          qualifiers, dim3, error codes, streams      vector_types.h  float4 and its kin
//   runtime_abi.h    what compiled kernels call in the runtime   launch.h        k<<<...>>>(...)
//   launch_ex.h      clusters and cooperative launches
//   shared.h         __shared__ variables                        sync.h          barriers, fences
//   warp.h           shuffles, votes, reductions                 atomics.h       atomicAdd, ...
//   math.h           device math and bit functions               host_api.h      cudaMemcpy, ...
//   float16.h        __half and __nv_bfloat16 (through cuda_fp16.h, cuda_bf16.h)
#pragma once

#include "cuda_on_cpu/types.h"
#include "cuda_on_cpu/vector_types.h"
//
#include "cuda_on_cpu/checked_memory.h"
#include "cuda_on_cpu/runtime_abi.h"
//
#include "cuda_on_cpu/atomics.h"
#include "cuda_on_cpu/host_api.h"
#include "cuda_on_cpu/launch.h"
#include "cuda_on_cpu/launch_ex.h"
#include "cuda_on_cpu/math.h"
#include "cuda_on_cpu/shared.h"
#include "cuda_on_cpu/sync.h"
#include "cuda_on_cpu/warp.h"
