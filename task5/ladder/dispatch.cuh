// The arithmetic that a call takes. A rung has said MOST_ROWS of q that share one read of the keys, in 16 bits.
#pragma once
#include <cuda_runtime.h>

#include "fp32.cuh"
#include "tensor_cores.cuh"

// Whether a rung has no arithmetic for fewer rows, nor for float32. It may say so.
#ifndef ALWAYS_MOST_ROWS
#define ALWAYS_MOST_ROWS false
#endif

template <typename M>
struct Is {
  using Math = M;
};

template <typename T, int D, typename Use>
static int with_tensor_cores(int rows, Use use) {
  if constexpr (ALWAYS_MOST_ROWS) {
    return use(Is<TensorCores<T, D, MOST_ROWS>>{});
  } else {
    if (rows <= 8) return use(Is<TensorCores<T, D, 8>>{});
    if constexpr (MOST_ROWS == 32 && D <= 128) {  // at head_dim 256 O_i leaves no registers for 32 rows
      if (rows > 16) return use(Is<TensorCores<T, D, 32>>{});
    }
    return use(Is<TensorCores<T, D, 16>>{});
  }
}

template <int D, typename Use>
static int with_fp32(int rows, Use use) {
  return rows == 1 ? use(Is<Fp32<D, 1>>{}) : rows <= 4 ? use(Is<Fp32<D, 4>>{})
                                                       : use(Is<Fp32<D, 16>>{});
}

template <int D, typename Use>
static int with_head_dim(int dtype, int rows, Use use) {
  if (dtype == FLOAT16) return with_tensor_cores<__half, D>(rows, use);
  if (ALWAYS_MOST_ROWS || dtype == BFLOAT16) return with_tensor_cores<__nv_bfloat16, D>(rows, use);
  if constexpr (!ALWAYS_MOST_ROWS) return with_fp32<D>(rows, use);
}

// use(Is<Math>{}) for a dtype, a head_dim, and the rows that read a kv head.
template <typename Use>
static int with_math(int dtype, int head_dim, int rows, Use use) {
  if (head_dim == 64) return with_head_dim<64>(dtype, rows, use);
  if constexpr (WARPS == 4) {  // of eight, two tiles of head_dim 256 do not fit in an SM's memory
    if (head_dim == 256) return with_head_dim<256>(dtype, rows, use);
  }
  return with_head_dim<128>(dtype, rows, use);
}
