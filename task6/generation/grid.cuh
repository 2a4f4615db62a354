// The barrier of a persistent step's blocks, which are all resident. The warps that load have no part in it.
#pragma once
#include <cuda_runtime.h>

#include "stream.cuh"

#ifdef __CUDACC__
DEVICE int load_counter(const int* from, bool acquire) {
  int value;
  if (acquire) {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  } else {
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  }
  return value;
}
DEVICE void add_to_counter(int* to, int value, bool release) {
  if (release) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
  } else {
    asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
  }
}
#else
DEVICE int load_counter(const int* from, bool acquire) {
  cuda_on_cpu::yield();  // to the threads that it waits for
  const int value = __atomic_load_n(from, __ATOMIC_ACQUIRE);
  if (acquire) __threadfence();
  return value;
}
DEVICE void add_to_counter(int* to, int value, bool release) {
  if (release) __threadfence();
  atomicAdd(to, value);
}
#endif

struct Grid {
  int* came;        // blocks, at the ends of all phases
  int64_t* clocks;  // or null
  unsigned before;  // phases of all steps before
  int phases = 0;
  bool fenced = false;  // the meeting that comes next

  // Of what the phase before has left, and of what this one leaves.
  DEVICE unsigned tag_read() const { return before + phases; }
  DEVICE unsigned tag_written() const { return before + phases + 1; }

  // To the end of a phase. fence: who has waited for all sees what this block did before it.
  DEVICE void come(bool fence) {
    meet();
    ++phases, fenced = fence;
    if (threadIdx.x == 0) add_to_counter(came, 1, fence);
  }
  DEVICE void wait_for_all() {
    if (threadIdx.x == 0) {
      while (load_counter(came, fenced) < phases * int(gridDim.x)) {
      }
    }
    meet();
    look_at_the_clock();
  }
  DEVICE void look_at_the_clock() {
    if (clocks && blockIdx.x + threadIdx.x == 0) clocks[phases] = cycles();
  }
};
