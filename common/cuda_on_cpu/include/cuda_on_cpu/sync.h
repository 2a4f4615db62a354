// Barriers of a block, fences, and the odd control instructions.
#pragma once

#include "runtime_abi.h"

static inline void __syncthreads(CUDA_ON_CPU_CALLER) {
  cuda_on_cpu::barrier(cuda_on_cpu::BarrierResult::none, false, file, line);
}
static inline int __syncthreads_or(int predicate, CUDA_ON_CPU_CALLER) {
  return cuda_on_cpu::barrier(cuda_on_cpu::BarrierResult::any, predicate != 0, file, line);
}
static inline int __syncthreads_and(int predicate, CUDA_ON_CPU_CALLER) {
  return cuda_on_cpu::barrier(cuda_on_cpu::BarrierResult::all, predicate != 0, file, line);
}
static inline int __syncthreads_count(int predicate, CUDA_ON_CPU_CALLER) {
  return cuda_on_cpu::barrier(cuda_on_cpu::BarrierResult::count, predicate != 0, file, line);
}

static inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __threadfence() { cuda_on_cpu::fence(); }
static inline void __threadfence_system() { cuda_on_cpu::fence(); }

static inline void __nanosleep(unsigned) { cuda_on_cpu::yield(); }
[[noreturn]] static inline void __trap(CUDA_ON_CPU_CALLER) {
  cuda_on_cpu::fail("__trap()", file, line);
}
