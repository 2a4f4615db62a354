// Launches that begin before the launch ahead of them is complete, and wait for that themselves. Hopper and later.
#pragma once
#include <cuda_runtime.h>

#define DEPENDENT_LAUNCH

__device__ __forceinline__ void wait_for_the_launch_before() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
}

template <typename Kernel, typename Arguments>
inline cudaError_t launch_kernel(Kernel kernel, int blocks, int threads, int bytes, cudaStream_t stream,
                                 const Arguments& a) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks), config.blockDim = dim3(threads), config.dynamicSmemBytes = bytes;
  config.stream = stream, config.attrs = &attribute, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, a);
}
