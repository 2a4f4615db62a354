// A block that counts itself sees what blocks that were counted before it have written.
#pragma once
#include <cuda_runtime.h>

#ifdef __CUDACC__
__device__ __forceinline__ int add_acquire_release(int* to, int value) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(to), "r"(value) : "memory");
  return before;
}
#else
inline int add_acquire_release(int* to, int value) {
  __threadfence();
  const int before = atomicAdd(to, value);
  __threadfence();
  return before;
}
#endif
