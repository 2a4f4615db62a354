// fp32 matrices as pairs of fp16 ones, so that tensor cores for fp16 multiply them with fp32's accuracy.
//
// A float x becomes two fp16 values: with t = 2^n x, hi = fp16(t) and lo = fp16(t - hi), 22 bits together. Then
//   x y = 2^-(n + n') (lo hi' + hi lo' + hi hi')       lo lo' is below the last bit kept
// is three products of fp16, each exact in the tensor core, accumulated there in fp32. 3xTF32 does the same at half the
// speed. fp16 lacks range, so each row of Q, each K_j and each V_j has its own power of two, which brings its largest
// |x| to 2^14 ... 2^15. Values down to 2^-17 of the largest keep all 22 bits (lo is a multiple of 2^-24, the smallest
// fp16); smaller ones have an error of 2^-40 of the largest.
//
//   split_kernel   one block per K_j and per V_j: the largest |x|, then hi and lo as they will lie in shared memory
//   workspace      batch * kv_heads * ceil(kv_len / B_c) * 2 Records, K_1 V_1 K_2 V_2 ... of each head; 128-byte
//                  aligned, not initialised
#pragma once
#include <cuda_fp16.h>

#include "attention.cuh"
#include "hopper.cuh"

constexpr int TILE_VALUES = 8192, TILE_BYTES = 4 * TILE_VALUES, LO = 2 * TILE_VALUES;  // from byte LO on: lo
constexpr int SPLIT_THREADS = 256;
constexpr float P_FACTOR = 32768;  // of P, whose largest value is 1

// K_j or V_j: B_c = TILE_VALUES / head_dim keys.
struct alignas(128) Record {
  uint8_t tile[TILE_BYTES];
  float4 unit;      // .x: what S or P V_j is to be multiplied by. A bulk copy is at least 16 bytes
  int tiles_taken;  // in the first record: how many tiles of rows the blocks have taken, besides their first ones
};

// Where (row, column) is, in bytes, in a tile [columns / 64][rows][64] of fp16 with swizzled rows.
DEVICE int place(int row, int column, int rows) {
  return (column / 64 * rows + row) * 128 + ((column % 64 * 2) ^ (row % 8 * 16));
}

// The power of two that brings `largest` to 2^14 ... 2^15; at most 2^127, where the smallest float is 2^-22.
DEVICE float factor_for(float largest) {
  return __uint_as_float(min(127 + 14 + 127 - (__float_as_uint(largest) >> 23), 127 + 127) << 23);
}

// lo of both: what hi leaves of x and y.
DEVICE __half2 remainder(float x, float y, __half2 hi) {
  const float2 back = __half22float2(hi);
  return __floats2half2_rn(x - back.x, y - back.y);
}

DEVICE uint32_t bits(__half2 pair) { return reinterpret_cast<const uint32_t&>(pair); }

// hi of both. That of an infinity is finite, the largest fp16, so that only lo is infinite: of two infinite products,
// lo' hi and hi' lo, the sum could be NaN.
DEVICE __half2 finite_hi(float x, float y) {
#ifdef __CUDACC__
  uint32_t hi;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(hi) : "f"(y), "f"(x));
  return reinterpret_cast<const __half2&>(hi);
#else
  const auto finite = [](float z) { return z < -65504.0f ? -65504.0f : z > 65504.0f ? 65504.0f
                                                                                    : z; };
  return __floats2half2_rn(finite(x), finite(y));
#endif
}

// The largest of all threads' values, of which none is negative. of_warp: shared memory.
template <int WARPS>
DEVICE float largest_of_block(float largest, uint32_t (&of_warp)[WARPS]) {
  const uint32_t own = __reduce_max_sync(~0u, __float_as_uint(largest));
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = own;
  __syncthreads();  // all warps have written theirs
  for (const uint32_t warp : of_warp) largest = fmaxf(largest, __uint_as_float(warp));
  return largest;
}

DEVICE void store_split(uint8_t* hi, uint8_t* lo, float4 x, float factor) {
  x = {x.x * factor, x.y * factor, x.z * factor, x.w * factor};
  const __half2 left = finite_hi(x.x, x.y), right = finite_hi(x.z, x.w);
  *reinterpret_cast<uint2*>(hi) = {bits(left), bits(right)};
  *reinterpret_cast<uint2*>(lo) = {bits(remainder(x.x, x.y, left)), bits(remainder(x.z, x.w, right))};
}

template <int D>
__global__ void __launch_bounds__(SPLIT_THREADS) split_kernel(const Attention a, int kv_tiles) {
  constexpr int B_c = TILE_VALUES / D, N = TILE_VALUES / 4 / SPLIT_THREADS;
  const bool is_v = blockIdx.x % 2;  // blocks in the order of the records
  const int j = blockIdx.x / 2 % kv_tiles, kv_head = blockIdx.x / 2 / kv_tiles % a.kv_heads;
  const int b = blockIdx.x / 2 / kv_tiles / a.kv_heads, head = kv_head * (a.heads / a.kv_heads);
  const float* rows = is_v ? a.v_head<float>(b, head) : a.k_head<float>(b, head);
  const int64_t stride = is_v ? a.v_strides.row : a.k_strides.row;
  float4 x[N];
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int e = 4 * (n * SPLIT_THREADS + threadIdx.x), key = j * B_c + e / D;
    x[n] = key < a.kv_len ? *reinterpret_cast<const float4*>(rows + key * stride + e % D) : make_float4(0, 0, 0, 0);
  }
  float largest = 0;  // finite |x|: an infinity must not scale its neighbours to 0
#pragma unroll
  for (int n = 0; n < N; ++n)
    for (const float y : {x[n].x, x[n].y, x[n].z, x[n].w})
      if (fabsf(y) < INFINITY) largest = fmaxf(largest, fabsf(y));
  __shared__ uint32_t of_warp[SPLIT_THREADS / 32];
  largest = largest_of_block(largest, of_warp);

  const float factor = factor_for(largest);
  Record& record = static_cast<Record*>(a.workspace)[blockIdx.x];
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int e = 4 * (n * SPLIT_THREADS + threadIdx.x), at = place(e / D, e % D, B_c);
    store_split(record.tile + at, record.tile + LO + at, x[n], factor);
  }
  if (threadIdx.x == 0) record.unit = {1 / factor / (is_v ? P_FACTOR : 1), 0, 0, 0};
  if (threadIdx.x == 0) record.tiles_taken = 0;
}
