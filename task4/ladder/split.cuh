// fp32 matrices as pairs of fp16 ones, so that tensor cores for fp16 multiply them with fp32's accuracy.
//
// A float x becomes two fp16 values: with t = 2^n x, hi = fp16(t) and lo = fp16(t - hi), 22 bits together. Then
//   x y = 2^-(n + n') (lo hi' + hi lo' + hi hi')       lo lo' is below the last bit kept
// is three products of fp16, each exact in the tensor core, accumulated there in fp32. 3xTF32 does the same at half the
// speed. fp16 lacks range, so each row of Q, each K_j and each column of V_j has its own power of two, which brings its
// largest |x| to 2^14 ... 2^15. Values down to 2^-17 of the largest keep all 22 bits (lo is a multiple of 2^-24, the
// smallest fp16); smaller ones have an error of 2^-40 of the largest. A score sums over a whole row of Q and of K_j,
// where only the largest values count. Columns of V_j are summed apart, so that each needs its own.
//
//   split_kernel   one block per K_j and per V_j: the largest |x|, then hi and lo as they will lie in shared memory
//   workspace      batch * kv_heads * ceil(kv_len / B_c) * 2 Records, K_1 V_1 K_2 V_2 ... of each head; 128-byte
//                  aligned, not initialised
#pragma once
#include <cuda_fp16.h>

#include "attention.cuh"
#include "hopper.cuh"

constexpr int TILE_BYTES = 32768, LO = 16384;  // K_j or V_j: 8192 values hi, and from byte LO on lo
constexpr int SPLIT_THREADS = 256;
constexpr float P_FACTOR = 32768;  // of P, whose largest value is 1

template <int D>
struct alignas(128) Record {
  static constexpr int B_c = 8192 / D;  // keys of a K_j or V_j
  uint8_t tile[TILE_BYTES];
  float units[D];   // of V_j: by column, what P V_j is to be multiplied by. Of K_j: what S is, D times the same
  int tiles_taken;  // in the first record: how many tiles of rows the blocks have taken, besides their first ones
};

// Where (row, column) is, in bytes, in a tile [columns / 64][rows][64] of fp16 with swizzled rows.
DEVICE int place(int row, int column, int rows) {
  return (column / 64 * rows + row) * 128 + ((column % 64 * 2) ^ (row % 8 * 16));
}

DEVICE float finite_or_0(float x) { return fabsf(x) < INFINITY ? x : 0.0f; }

// A non-finite value does not count: it must not scale its neighbours to 0.
DEVICE float larger(float largest, float x) { return fmaxf(largest, fabsf(finite_or_0(x))); }

// The power of two that brings `largest` to 2^14 ... 2^15; at most 2^127, where the smallest float is 2^-22.
DEVICE float factor_for(float largest) {
  return __uint_as_float(min(127 + 14 + 127 - (__float_as_uint(largest) >> 23), 127 + 127) << 23);
}

// lo of both: what hi leaves of x and y
DEVICE __half2 remainder(float x, float y, __half2 hi) {
  const float2 back = __half22float2(hi);
  return __floats2half2_rn(x - back.x, y - back.y);
}

DEVICE uint32_t bits(__half2 pair) { return reinterpret_cast<const uint32_t&>(pair); }

// Non-finite values are in lo alone, and hi is 0: the other factor's lo, which hi is multiplied by, has any sign.
DEVICE void store_split(uint8_t* hi, uint8_t* lo, const float (&x)[4], float4 factor) {
  const float y[4] = {x[0] * factor.x, x[1] * factor.y, x[2] * factor.z, x[3] * factor.w};
  const __half2 left = __floats2half2_rn(finite_or_0(y[0]), finite_or_0(y[1]));
  const __half2 right = __floats2half2_rn(finite_or_0(y[2]), finite_or_0(y[3]));
  *reinterpret_cast<uint2*>(hi) = {bits(left), bits(right)};
  *reinterpret_cast<uint2*>(lo) = {bits(remainder(y[0], y[1], left)), bits(remainder(y[2], y[3], right))};
}

template <int D>
__global__ void __launch_bounds__(SPLIT_THREADS) split_kernel(const Attention a, int kv_tiles) {
  constexpr int B_c = Record<D>::B_c, N = B_c * D / 4 / SPLIT_THREADS, STEP = B_c / N;
  const bool is_v = blockIdx.x % 2;  // blocks in the order of the records
  const int j = blockIdx.x / 2 % kv_tiles, kv_head = blockIdx.x / 2 / kv_tiles % a.kv_heads;
  const int b = blockIdx.x / 2 / kv_tiles / a.kv_heads, head = kv_head * (a.heads / a.kv_heads);
  const float* rows = is_v ? a.v_head<float>(b, head) : a.k_head<float>(b, head);
  const int64_t stride = is_v ? a.v_strides.row : a.k_strides.row;
  const int row = threadIdx.x / (D / 4), column = threadIdx.x % (D / 4) * 4;  // of x[0]; x[n] is n * STEP rows below
  __shared__ uint32_t largest[D];  // of a column's |x|, as bits, which have the order of the floats; K_j has [0] alone
  if (threadIdx.x < D) largest[threadIdx.x] = 0;
  alignas(16) float x[N][4];
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int key = j * B_c + row + n * STEP;
    reinterpret_cast<float4&>(x[n]) =
        key < a.kv_len ? *reinterpret_cast<const float4*>(rows + key * stride + column) : make_float4(0, 0, 0, 0);
  }
  float of_column[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    for (int n = 0; n < N; ++n) of_column[i] = larger(of_column[i], x[n][i]);
  __syncthreads();  // largest is 0
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t found = __float_as_uint(of_column[i]), of_warp = __reduce_max_sync(~0u, found);
    if (is_v) atomicMax(&largest[column + i], found);
    if (!is_v && threadIdx.x % 32 == 0) atomicMax(&largest[0], of_warp);
  }
  __syncthreads();  // largest is that of all threads

  const auto factor_of = [&](int i) { return factor_for(__uint_as_float(largest[is_v ? column + i : 0])); };
  const float4 factor = {factor_of(0), factor_of(1), factor_of(2), factor_of(3)};
  Record<D>& record = static_cast<Record<D>*>(a.workspace)[blockIdx.x];
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int at = place(row + n * STEP, column, B_c);
    store_split(record.tile + at, record.tile + LO + at, x[n], factor);
  }
  const float unit = is_v ? 1 / P_FACTOR : 1;
  const float4 units = {unit / factor.x, unit / factor.y, unit / factor.z, unit / factor.w};
  if (row == 0) *reinterpret_cast<float4*>(record.units + column) = units;
  if (threadIdx.x == 0) record.tiles_taken = 0;
}
