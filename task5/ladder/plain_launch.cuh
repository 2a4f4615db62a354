// dependent_launch.cuh's functions for any GPU: launches run one after the other.
#pragma once
#include <cuda_runtime.h>

#ifndef DEPENDENT_LAUNCH
__device__ __forceinline__ void wait_for_the_launch_before() {}
__device__ __forceinline__ void begin_the_next_launch() {}

template <typename Kernel, typename Arguments>
inline cudaError_t launch_kernel(Kernel kernel, dim3 grid, int threads, int bytes, cudaStream_t stream,
                                 const Arguments& a) {
  kernel<<<grid, threads, bytes, stream>>>(a);
  return cudaGetLastError();
}
#endif
