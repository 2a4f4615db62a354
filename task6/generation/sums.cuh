// Sums of products of a stage of weights and x. A warp has 128 bytes of each row's piece, and a lane in each step 16 of
// them, of a row of each unit.
#pragma once
#include <cuda_runtime.h>

#include "dtype.cuh"
#include "ptx.cuh"
#include "weights.cuh"

template <int X_ROWS>
using XPiece = uint8_t[X_ROWS * 128];  // of a warp: its 128 bytes of each row of x

// Four lanes have half of a row's 128 bytes in each step. Eight have all of them, in the other step another row's: what
// they load of x serves both.
template <int LANES>
struct LanesOfARow {
  static_assert(STEPS == 2 && (LANES == 4 || LANES == 8));
  static DEVICE int lane() { return threadIdx.x % LANES; }
  // Of a unit. Lanes load in groups of eight: if those have two rows, such as the swizzle puts into different banks.
  static DEVICE int row(int step) {
    const int group = threadIdx.x % 32 / 8;
    return LANES == 4 ? threadIdx.x / 4 % 2 * 4 + group : 4 * step + group;
  }
  // Which 16 bytes of the row.
  static DEVICE int vector(int step) { return LANES == 4 ? 4 * step + lane() : lane(); }

  // Where a half of a row of x is: a group loads halves of two rows, or a whole one.
  template <int X_ROWS>
  static DEVICE int half_at(int row, int half) {
    return LANES == 4 ? (half * X_ROWS + row) * 64 : row * 128 + half * 64;
  }
  // What this lane multiplies by in a step.
  template <int X_ROWS>
  static DEVICE const uint4& of(const XPiece<X_ROWS>& x, int row, int step) {
    const int half = LANES == 4 ? step : lane() / 4;
    return reinterpret_cast<const uint4*>(x + half_at<X_ROWS>(row, half))[lane() % 4];
  }
};

// In 16 bits: m16n8k16, with weights as the 16 rows. Lane 4 g + t has 8 neighbours in k of one row where a fragment has
// 2 of rows g and g + 8, and 2 that are 8 apart: the sum over k has no order, so its first and third pair are those of
// row g, the others of g + 8. The 8 columns are 4 rows of x, twice: once as row g needs them, once as g + 8 does.
template <typename T, int X_ROWS>
struct TensorCores {
  using Lanes = LanesOfARow<4>;
  static constexpr int UNITS = MOST_UNITS, GROUPS = ceil_div(X_ROWS, 4);
  float sum[UNITS][GROUPS][4];

  DEVICE void start() {
#pragma unroll
    for (auto& of_unit : sum)
#pragma unroll
      for (auto& s : of_unit) s[0] = s[1] = s[2] = s[3] = 0.0f;
  }
  // Units from FIRST to LAST; w: this lane's 16 bytes of each one's rows.
  template <int FIRST, int LAST>
  DEVICE void add(const XPiece<X_ROWS>& x, const uint4 (&w)[STEPS][UNITS]) {
    const int g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
      for (int i = 0; i < GROUPS; ++i) {  // what is summed for no row of x is not put
        const uint4 b = Lanes::template of<X_ROWS>(x, min(4 * i + g % 4, X_ROWS - 1), step);
        const uint32_t first = g < 4 ? b.x : b.y, second = g < 4 ? b.z : b.w;
#pragma unroll
        for (int u = FIRST; u < LAST; ++u) {
          const uint4& a = w[step][u];
          mma_m16n8k16<T>(sum[u][i], {a.x, a.y, a.z, a.w}, {first, second}, sum[u][i]);
        }
      }
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
    const int r = Lanes::row(0), t = threadIdx.x % 4;
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
  using Lanes = LanesOfARow<4>;
  static constexpr int UNITS = MOST_UNITS;
  float sum[UNITS][4];

  DEVICE void start() {
#pragma unroll
    for (auto& s : sum) s[0] = s[1] = s[2] = s[3] = 0.0f;
  }
  template <int FIRST, int LAST>
  DEVICE void add(const XPiece<16>& x, const uint4 (&w)[STEPS][UNITS]) {
    const int g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const uint4 a = Lanes::of<16>(x, g, step), b = Lanes::of<16>(x, g + 8, step);
#pragma unroll
      for (int u = FIRST; u < LAST; ++u) {
        const uint4& c = w[step][u];
        mma_m16n8k16<T>(sum[u], {a.x, b.x, a.y, b.y}, {c.x, c.y}, sum[u]);
        mma_m16n8k16<T>(sum[u], {a.z, b.z, a.w, b.w}, {c.z, c.w}, sum[u]);
      }
    }
  }
  DEVICE void move(int from, int to) {
#pragma unroll
    for (int n = 0; n < 4; ++n) sum[to][n] += sum[from][n];
  }
  // Column n is the row of the unit that lane 4 n has.
  DEVICE void put(float (*part)[UNITS * UNIT + 1]) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
#pragma unroll
      for (int n = 0; n < 4; ++n) part[g + n / 2 * 8][UNIT * u + n % 2 * 4 + t] = sum[u][n];
    }
  }
};

// In fp32, on CUDA cores. Of up to four rows of x eight lanes have a row of weights; of more there are no registers for
// the sums of two rows of each unit.
template <int X_ROWS, int UNITS_ = MOST_UNITS>
struct CudaCores {
  static constexpr int UNITS = UNITS_, LANES = X_ROWS <= 4 ? 8 : 4, ROWS = LANES / 4;  // of a unit, in a lane
  using Lanes = LanesOfARow<LANES>;
  float sum[UNITS][ROWS][X_ROWS];

  DEVICE void start() {
#pragma unroll
    for (auto& of_unit : sum)
#pragma unroll
      for (auto& of_row : of_unit)
#pragma unroll
        for (float& s : of_row) s = 0.0f;
  }
  template <int FIRST, int LAST>
  DEVICE void add(const XPiece<X_ROWS>& x, const uint4 (&w)[STEPS][UNITS]) {
#pragma unroll
    for (int row = 0; row < X_ROWS; ++row) {
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const Vector16<float> b = {Lanes::template of<X_ROWS>(x, row, step)};
#pragma unroll
        for (int u = FIRST; u < LAST; ++u) {
          const Vector16<float> a = {w[step][u]};
          float& s = sum[u][step % ROWS][row];
#pragma unroll
          for (int i = 3; i >= 0; --i) s = fmaf(a.values[i], b.values[i], s);
        }
      }
    }
  }
  DEVICE void move(int from, int to) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int row = 0; row < X_ROWS; ++row) sum[to][r][row] += sum[from][r][row];
    }
  }
  // The lanes of a row have a part of as many sums each. Of each pair of lanes one goes on with half of them, the other
  // one with the other half, until a lane has one.
  DEVICE void put(float (*part)[MOST_UNITS * UNIT + 1]) {
    constexpr int COUNT = UNITS * ROWS;
    const int lane = Lanes::lane();
#pragma unroll
    for (int row = 0; row < X_ROWS; ++row) {
      float s[COUNT];
#pragma unroll
      for (int n = 0; n < COUNT; ++n) s[n] = sum[n / ROWS][n % ROWS][row];
#pragma unroll
      for (int half = LANES / 2; half > 0; half /= 2) {
        if (half >= COUNT) {
#pragma unroll
          for (float& x : s) x += __shfl_xor_sync(~0u, x, half);
        } else {
#pragma unroll
          for (int n = 0; n < half; ++n) {
            const bool upper = lane & half;
            const float own = upper ? s[n + half] : s[n], others = upper ? s[n] : s[n + half];
            s[n] = own + __shfl_xor_sync(~0u, others, half);
          }
        }
      }
      if (lane < COUNT) part[row][UNIT * (lane / ROWS) + Lanes::row(lane % ROWS)] = s[0];
    }
  }
};
