// What the lanes of a warp do together: shuffles, votes, reductions.
//
// As in CUDA, these exchange registers and order no memory. Only __syncwarp orders memory.
#pragma once

#include "runtime_abi.h"

static inline void __syncwarp(unsigned mask = 0xffffffffu, CUDA_ON_CPU_CALLER) {
  cuda_on_cpu::warp_sync(mask, file, line);
}

namespace cuda_on_cpu {

template <class T>
inline T shuffle(unsigned mask, T value, unsigned source_lane, const char* file, int line) {
  static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  bits = warp_shuffle(mask, bits, source_lane, file, line);
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}

/// First and last lane of the segment of `width` lanes that `lane` is in.
inline unsigned first_of_segment(unsigned lane, int width) { return lane & ~(unsigned(width) - 1); }
inline unsigned last_of_segment(unsigned lane, int width) { return lane | (unsigned(width) - 1); }

}  // namespace cuda_on_cpu

template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, CUDA_ON_CPU_CALLER) {
  unsigned lane = cuda_on_cpu::current_thread->lane;
  unsigned from =
      cuda_on_cpu::first_of_segment(lane, width) | (unsigned(source) & (unsigned(width) - 1));
  return cuda_on_cpu::shuffle(mask, value, from, file, line);
}

template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                        CUDA_ON_CPU_CALLER) {
  unsigned lane = cuda_on_cpu::current_thread->lane;
  bool inside = delta <= lane - cuda_on_cpu::first_of_segment(lane, width);
  return cuda_on_cpu::shuffle(mask, value, inside ? lane - delta : lane, file, line);
}

template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                          CUDA_ON_CPU_CALLER) {
  unsigned lane = cuda_on_cpu::current_thread->lane;
  bool inside = delta <= cuda_on_cpu::last_of_segment(lane, width) - lane;
  return cuda_on_cpu::shuffle(mask, value, inside ? lane + delta : lane, file, line);
}

template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32,
                         CUDA_ON_CPU_CALLER) {
  unsigned lane = cuda_on_cpu::current_thread->lane;
  unsigned from = lane ^ unsigned(lane_mask);
  bool inside = from <= cuda_on_cpu::last_of_segment(lane, width);
  return cuda_on_cpu::shuffle(mask, value, inside ? from : lane, file, line);
}

static inline unsigned __ballot_sync(unsigned mask, int predicate, CUDA_ON_CPU_CALLER) {
  return cuda_on_cpu::warp_ballot(mask, predicate != 0, file, line);
}
static inline int __any_sync(unsigned mask, int predicate, CUDA_ON_CPU_CALLER) {
  return cuda_on_cpu::warp_ballot(mask, predicate != 0, file, line) != 0;
}
static inline int __all_sync(unsigned mask, int predicate, CUDA_ON_CPU_CALLER) {
  return cuda_on_cpu::warp_ballot(mask, predicate == 0, file, line) == 0;
}
/// Lanes of the warp that have not returned; a GPU gives those that happen to run together.
static inline unsigned __activemask() { return cuda_on_cpu::warp_active_mask(); }

template <class T>
inline unsigned __match_any_sync(unsigned mask, T value, CUDA_ON_CPU_CALLER) {
  static_assert(sizeof(T) <= 8, "__match_any_sync compares at most 8 bytes");
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  return cuda_on_cpu::warp_match(mask, bits, file, line);
}

#define CUDA_ON_CPU_WARP_REDUCTION(name, T, op)                                                  \
  static inline T name(unsigned mask, T value, CUDA_ON_CPU_CALLER) {                             \
    return T(                                                                                    \
        cuda_on_cpu::warp_reduce(mask, cuda_on_cpu::ReduceOp::op, unsigned(value), file, line)); \
  }
CUDA_ON_CPU_WARP_REDUCTION(__reduce_add_sync, unsigned, add)
CUDA_ON_CPU_WARP_REDUCTION(__reduce_add_sync, int, add)
CUDA_ON_CPU_WARP_REDUCTION(__reduce_min_sync, unsigned, min_unsigned)
CUDA_ON_CPU_WARP_REDUCTION(__reduce_min_sync, int, min_signed)
CUDA_ON_CPU_WARP_REDUCTION(__reduce_max_sync, unsigned, max_unsigned)
CUDA_ON_CPU_WARP_REDUCTION(__reduce_max_sync, int, max_signed)
CUDA_ON_CPU_WARP_REDUCTION(__reduce_and_sync, unsigned, bit_and)
CUDA_ON_CPU_WARP_REDUCTION(__reduce_or_sync, unsigned, bit_or)
CUDA_ON_CPU_WARP_REDUCTION(__reduce_xor_sync, unsigned, bit_xor)
#undef CUDA_ON_CPU_WARP_REDUCTION
