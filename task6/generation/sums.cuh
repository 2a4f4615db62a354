// Sums of products of a stage of weights and x. A warp has 128 bytes of each row's piece, in each step half of them,
// and its lane 4 g + t in each step the 16 bytes from 16 t on, of one row of each unit.
#pragma once
#include <cuda_runtime.h>

#include "dtype.cuh"
#include "ptx.cuh"
#include "weights.cuh"

// Which row. Eight lanes load together: rows g of even and odd g are 4 apart, so that the swizzle puts what they load
// into different banks.
DEVICE int row_of_lane() { return threadIdx.x / 4 % 2 * 4 + threadIdx.x % 32 / 8; }

// In 16 bits: m16n8k16, with weights as the 16 rows. A lane has 8 neighbours in k of one row where a fragment has 2 of
// rows g and g + 8, and 2 that are 8 apart: the sum over k has no order, so its first and third pair are those of row
// g, the others of g + 8. The 8 columns are 4 rows of x, twice: once as row g needs them, once as g + 8 does.
template <typename T, int X_ROWS>
struct TensorCores {
  static constexpr int UNITS = MOST_UNITS, GROUPS = ceil_div(X_ROWS, 4);
  float sum[UNITS][GROUPS][4];

  DEVICE void start() {
#pragma unroll
    for (auto& of_unit : sum)
#pragma unroll
      for (auto& s : of_unit) s[0] = s[1] = s[2] = s[3] = 0.0f;
  }
  // Units from FIRST to LAST; w: this lane's 16 bytes of each one's row.
  template <int FIRST, int LAST>
  DEVICE void add(const uint8_t (*x)[64], const uint4 (&w)[UNITS]) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {  // what is summed for no row of x is not put
      const uint4 b = *reinterpret_cast<const uint4*>(x[min(4 * i + g % 4, X_ROWS - 1)] + 16 * t);
      const uint32_t first = g < 4 ? b.x : b.y, second = g < 4 ? b.z : b.w;
#pragma unroll
      for (int u = FIRST; u < LAST; ++u)
        mma_m16n8k16<T>(sum[u][i], {w[u].x, w[u].y, w[u].z, w[u].w}, {first, second}, sum[u][i]);
    }
  }
  // What was summed as unit `from` is of unit `to`.
  DEVICE void move(int from, int to) {
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
#pragma unroll
      for (int n = 0; n < 4; ++n) sum[to][i][n] += sum[from][i][n];
    }
  }
  DEVICE void put(float (*part)[UNITS * UNIT + 1]) {
    const int r = row_of_lane(), t = threadIdx.x % 4;
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
#pragma unroll
      for (int i = 0; i < GROUPS; ++i) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const float whole = sum[u][i][n] + __shfl_xor_sync(~0u, sum[u][i][2 + n], 2);
          if (t < 2 && 4 * i + 2 * t + n < X_ROWS) part[4 * i + 2 * t + n][UNIT * u + r] = whole;
        }
      }
    }
  }
};

// Of 9 to 16 rows: x as the 16 rows, weights as the 8 columns. Half as many products as with weights as the rows, and
// half as many loads of x. Again a lane's neighbours in k stand where a fragment has those of two steps.
template <typename T>
struct TensorCores<T, 16> {
  static constexpr int UNITS = MOST_UNITS;
  float sum[UNITS][4];

  DEVICE void start() {
#pragma unroll
    for (auto& s : sum) s[0] = s[1] = s[2] = s[3] = 0.0f;
  }
  template <int FIRST, int LAST>
  DEVICE void add(const uint8_t (*x)[64], const uint4 (&w)[UNITS]) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const uint4 a = *reinterpret_cast<const uint4*>(x[g] + 16 * t);
    const uint4 b = *reinterpret_cast<const uint4*>(x[g + 8] + 16 * t);
#pragma unroll
    for (int u = FIRST; u < LAST; ++u) {
      mma_m16n8k16<T>(sum[u], {a.x, b.x, a.y, b.y}, {w[u].x, w[u].y}, sum[u]);
      mma_m16n8k16<T>(sum[u], {a.z, b.z, a.w, b.w}, {w[u].z, w[u].w}, sum[u]);
    }
  }
  DEVICE void move(int from, int to) {
#pragma unroll
    for (int n = 0; n < 4; ++n) sum[to][n] += sum[from][n];
  }
  // Column n is the row of the unit that row_of_lane() says of lane 4 n.
  DEVICE void put(float (*part)[UNITS * UNIT + 1]) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
#pragma unroll
      for (int n = 0; n < 4; ++n) part[g + n / 2 * 8][UNIT * u + n % 2 * 4 + t] = sum[u][n];
    }
  }
};

// In fp32, on CUDA cores: row g of each unit with all rows of x.
template <int X_ROWS, int UNITS_ = MOST_UNITS>
struct CudaCores {
  static constexpr int UNITS = UNITS_;
  float sum[UNITS][X_ROWS];

  DEVICE void start() {
#pragma unroll
    for (auto& of_unit : sum)
#pragma unroll
      for (float& s : of_unit) s = 0.0f;
  }
  template <int FIRST, int LAST>
  DEVICE void add(const uint8_t (*x)[64], const uint4 (&w)[UNITS]) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int row = 0; row < X_ROWS; ++row) {
      const float4 b = *reinterpret_cast<const float4*>(x[row] + 16 * t);
#pragma unroll
      for (int u = FIRST; u < LAST; ++u) {
        const Vector16<float> a = {w[u]};
        float& s = sum[u][row];
        s = fmaf(a.values[0], b.x, fmaf(a.values[1], b.y, fmaf(a.values[2], b.z, fmaf(a.values[3], b.w, s))));
      }
    }
  }
  DEVICE void move(int from, int to) {
#pragma unroll
    for (int row = 0; row < X_ROWS; ++row) sum[to][row] += sum[from][row];
  }
  DEVICE void put(float (*part)[MOST_UNITS * UNIT + 1]) {
    const int r = row_of_lane(), t = threadIdx.x % 4;
#pragma unroll
    for (int row = 0; row < X_ROWS; ++row) {
#pragma unroll
      for (int u = 0; u < UNITS; ++u) {
        float of_row = sum[u][row];
        of_row += __shfl_xor_sync(~0u, of_row, 1), of_row += __shfl_xor_sync(~0u, of_row, 2);
        if (t == 0) part[row][UNIT * u + r] = of_row;
      }
    }
  }
};
