// The barrier of a persistent step's blocks, which are all resident. The warps that load have no part in it.
#pragma once
#include <cuda_runtime.h>

#include "stream.cuh"

#ifdef __CUDACC__
template <bool FENCED>
DEVICE int load_counter(const int* from) {
  int value;
  if (FENCED) {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  } else {
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  }
  return value;
}

template <bool FENCED>
DEVICE void add_to_counter(int* to, int value) {
  if (FENCED) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
  } else {
    asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
  }
}
#else
template <bool FENCED>
DEVICE int load_counter(const int* from) {
  cuda_on_cpu::yield();  // to the threads that it waits for
  const int value = __atomic_load_n(from, __ATOMIC_ACQUIRE);
  if (FENCED) __threadfence();
  return value;
}
template <bool FENCED>
DEVICE void add_to_counter(int* to, int value) {
  if (FENCED) __threadfence();
  atomicAdd(to, value);
}
#endif

// FENCED: what a block wrote before it came is visible to all that have met.
template <bool FENCED>
struct Grid {
  int* came;        // blocks, to all meetings
  int64_t* clocks;  // of this thread, or null
  unsigned before;  // phases of all steps before
  int phases = 0, meetings = 0;

  // Of what the phase before has left, and of what this one leaves.
  DEVICE unsigned tag_read() const { return before + phases; }
  DEVICE unsigned tag_written() const { return before + phases + 1; }

  // From a phase to the next one, which looks for the results by itself.
  DEVICE void go_on() {
    meet();
    ++phases;
    look_at_the_clock();
  }
  DEVICE void come() {
    meet();
    ++phases, ++meetings;
    if (threadIdx.x == 0) add_to_counter<FENCED>(came, 1);
  }
  DEVICE void wait_for_all() {
    if (threadIdx.x == 0) {
      while (load_counter<FENCED>(came) < meetings * int(gridDim.x)) {
      }
    }
    meet();
    look_at_the_clock();
  }
  DEVICE void look_at_the_clock() {
    if (clocks) clocks[phases] = cycles();
  }
};
