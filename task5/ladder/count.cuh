// Counting blocks: what those wrote that were counted before is visible to who counts.
#pragma once
#include <cuda_runtime.h>

#ifdef __CUDACC__
__device__ __forceinline__ int add_acquire_release(int* to, int value) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(to), "r"(value) : "memory");
  return before;
}
#else
inline int add_acquire_release(int* to, int value, CUDA_ON_CPU_CALLER) {
  __threadfence();
  const int before = atomicAdd(to, value);
  __threadfence();
  return before;
}
#endif
