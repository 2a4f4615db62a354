// The arithmetic of a warp on tensor cores, fp16 or bf16, sums in fp32.
#pragma once
#include <cuda_runtime.h>

#include "pipeline.cuh"

// What a lane knows of some keys: of row lane / 4 of each half (8 rows) of M products, two columns of each eight.
template <int M, int H, int D>
struct RowsOfProducts {
  float O_i[M][D / 8][2 * H], m_i[M][H], l_i[M][H];

  DEVICE void start() {
#pragma unroll
    for (int r = 0; r < M; ++r) {
#pragma unroll
      for (int h = 0; h < H; ++h) m_i[r][h] = -INFINITY, l_i[r][h] = 0.0f;
#pragma unroll
      for (int e = 0; e < D / 8; ++e)
#pragma unroll
        for (int i = 0; i < 2 * H; ++i) O_i[r][e][i] = 0.0f;
    }
  }
  // Becomes what merge() of decode.cuh makes of the keys before, and these.
  DEVICE void merge_into(const RowsOfProducts& before) {
#pragma unroll
    for (int r = 0; r < M; ++r) {
#pragma unroll
      for (int h = 0; h < H; ++h) {
        const float m = fmaxf(before.m_i[r][h], m_i[r][h]), shift = m == -INFINITY ? 0.0f : m;
        const float rescale = fast_exp2(before.m_i[r][h] - shift), factor = fast_exp2(m_i[r][h] - shift);
        m_i[r][h] = m, l_i[r][h] = fmaf(factor, l_i[r][h], before.l_i[r][h] * rescale);
#pragma unroll
        for (int e = 0; e < D / 8; ++e)
#pragma unroll
          for (int i = 2 * h; i < 2 * h + 2; ++i)
            O_i[r][e][i] = fmaf(factor, O_i[r][e][i], before.O_i[r][e][i] * rescale);
      }
    }
  }
};

// ROWS is 8, 16 or 32. The products are of 16 rows: of 8, the other half is zero, and takes no register.
template <typename Element, int HEAD_DIM, int ROWS_>
struct TensorCores : RowsOfProducts<(ROWS_ + 15) / 16, (ROWS_ < 16 ? 1 : 2), HEAD_DIM> {
  using T = Element;
  static constexpr int D = HEAD_DIM, ROWS = ROWS_;
  static constexpr int M = (ROWS + 15) / 16, H = ROWS < 16 ? 1 : 2;          // products, halves (8 rows) of each
  static constexpr bool STATES_FIT = D <= 128 && ROWS == 8;                  // some more of them in registers
  using State = RowsOfProducts<M, H, D>;
  using State::O_i, State::m_i, State::l_i;
  static constexpr int N = D == 64 && M == 1 ? 2 : 1, KEYS = 16 * N;  // of a tile, by one warp
  // What a lane has of a product: of row lane / 4 of each half, two columns.
  float S[M][N][2][2 * H];
  uint32_t P[M][N][2][H];
  static constexpr bool KEEPS_Q = M * H * D <= 256 && D <= 128;  // in registers, up to 32
  uint32_t Q[KEEPS_Q ? D / 16 : 1][M][2][H];

  // Where a row's 16 bytes (8 elements) number `piece` are in shared memory.
  static DEVICE int offset(int row, int piece) { return row * D + 8 * (piece ^ row % 8); }
  static DEVICE int lane() { return threadIdx.x % 32; }

  DEVICE void load_queries(const T* Q_i) {
    if constexpr (KEEPS_Q) {
#pragma unroll
      for (int e = 0; e < D / 16; ++e)
#pragma unroll
        for (int r = 0; r < M; ++r) load_rows(Q[e][r], Q_i, r, e);
    }
  }

  DEVICE void scores(const T* Q_i, const T* K_j) {
    const int b_lane = offset(lane() / 16 * 8 + lane() % 8, lane() / 8 % 2);
    float other[M][N][2][2 * H];  // S is the sum of two: products that wait for each other take longest
#pragma unroll
    for (int r = 0; r < M; ++r)
#pragma unroll
      for (int n = 0; n < 2 * N; ++n)
#pragma unroll
        for (int i = 0; i < 2 * H; ++i) S[r][n / 2][n % 2][i] = other[r][n / 2][n % 2][i] = 0.0f;
#pragma unroll
    for (int e = 0; e < D / 16; ++e) {
      if constexpr (!KEEPS_Q) {
#pragma unroll
        for (int r = 0; r < M; ++r) load_rows(Q[0][r], Q_i, r, e);
      }
#pragma unroll
      for (int n = 0; n < N; ++n) {
        uint32_t K[4];
        ldmatrix_x4(K, K_j + 16 * n * D + (b_lane ^ 16 * e));
#pragma unroll
        for (int r = 0; r < M; ++r) {
          auto& to = e % 2 ? other[r][n] : S[r][n];
          mma(to[0], to[1], Q[KEEPS_Q ? e : 0][r], K);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < M; ++r)
#pragma unroll
      for (int n = 0; n < 2 * N; ++n)
#pragma unroll
        for (int i = 0; i < 2 * H; ++i) S[r][n / 2][n % 2][i] += other[r][n / 2][n % 2][i];
  }

  DEVICE void mask(const Mask& sees) {
#pragma unroll
    for (int r = 0; r < M; ++r) {
#pragma unroll
      for (int h = 0; h < H; ++h) {
        const int p = sees.position(16 * r + 8 * h + lane() / 4);
#pragma unroll
        for (int n = 0; n < 2 * N; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if (!sees(p, 8 * n + lane() % 4 * 2 + i)) S[r][n / 2][n % 2][2 * h + i] = -INFINITY;
          }
        }
      }
    }
  }

  // P = exp2(scale S - m_i). The parts so far are rescaled where m_i grows.
  DEVICE void softmax(float scale) {
#pragma unroll
    for (int r = 0; r < M; ++r) {
#pragma unroll
      for (int h = 0; h < H; ++h) {
        float m = m_i[r][h];
#pragma unroll
        for (int n = 0; n < 2 * N; ++n) {
#pragma unroll
          for (int i = 2 * h; i < 2 * h + 2; ++i) {
            float& s = S[r][n / 2][n % 2][i];
            s *= scale;
            m = fmaxf(m, s);
          }
        }
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
        const float shift = m == -INFINITY ? 0.0f : m;
        if (__any_sync(~0u, m > m_i[r][h])) {
          const float rescale = fast_exp2(m_i[r][h] - shift);
          m_i[r][h] = m;
          l_i[r][h] *= rescale;
#pragma unroll
          for (int e = 0; e < D / 8; ++e) O_i[r][e][2 * h] *= rescale, O_i[r][e][2 * h + 1] *= rescale;
        }
#pragma unroll
        for (int n = 0; n < 2 * N; ++n) {
          float (&s)[2 * H] = S[r][n / 2][n % 2];
          s[2 * h] = fast_exp2(s[2 * h] - shift), s[2 * h + 1] = fast_exp2(s[2 * h + 1] - shift);
          l_i[r][h] += s[2 * h] + s[2 * h + 1];
          P[r][n / 2][n % 2][h] = pack<T>(s[2 * h], s[2 * h + 1]);
        }
      }
    }
  }

  DEVICE void add_values(const T* V_j, T*) {
    const int lane_0 = offset(lane() % 16, lane() / 16);
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int e = 0; e < D / 16; ++e) {
        uint32_t V[4];
        ldmatrix_x4_trans(V, V_j + 16 * n * D + (lane_0 ^ 16 * e));
#pragma unroll
        for (int r = 0; r < M; ++r) mma(O_i[r][2 * e], O_i[r][2 * e + 1], P[r][n], V);
      }
    }
  }

  // Whether this lane has one of the first `rows` rows.
  static DEVICE bool has_some_of(int rows) { return lane() / 4 < rows; }
  // Behind the last of some keys.
  DEVICE void complete() {
#pragma unroll
    for (int r = 0; r < M; ++r) {
#pragma unroll
      for (float& l : l_i[r]) l += __shfl_xor_sync(~0u, l, 1), l += __shfl_xor_sync(~0u, l, 2);
    }
  }

  // Columns [e_0, e_0 + width) of the first `rows` rows.
  DEVICE void put(float* O, int e_0, int width, int rows) const {
#pragma unroll
    for (int r = 0; r < M; ++r) {
#pragma unroll
      for (int h = 0; h < H; ++h) {
        const int row = 16 * r + 8 * h + lane() / 4;
        if (row >= rows) continue;
#pragma unroll
        for (int e = 0; e < D / 8; ++e) {
          if (8 * e >= e_0 && 8 * e < e_0 + width)
            *reinterpret_cast<float2*>(&O[row * width + 8 * e - e_0 + lane() % 4 * 2]) =
                make_float2(O_i[r][e][2 * h], O_i[r][e][2 * h + 1]);
        }
      }
    }
  }
  DEVICE void put_ml(float* m, float* l, int rows) const {
#pragma unroll
    for (int r = 0; r < M; ++r) {
#pragma unroll
      for (int h = 0; h < H; ++h) {
        const int row = 16 * r + 8 * h + lane() / 4;
        if (row < rows && lane() % 4 == 0) m[row] = m_i[r][h], l[row] = l_i[r][h];
      }
    }
  }

 private:
  // Of rows 16 r and on, columns 16 e to 16 e + 15.
  static DEVICE void load_rows(uint32_t (&rows)[2][H], const T* Q_i, int r, int e) {
    const T* from = Q_i + 16 * r * D;
    if constexpr (H == 2) {
      uint32_t x[4];
      ldmatrix_x4(x, from + (offset(lane() % 16, lane() / 16) ^ 16 * e));
      rows[0][0] = x[0], rows[0][1] = x[1], rows[1][0] = x[2], rows[1][1] = x[3];
    } else {
      uint32_t x[2];
      ldmatrix_x2(x, from + (offset(lane() % 8, lane() / 8 % 2) ^ 16 * e));
      rows[0][0] = x[0], rows[1][0] = x[1];
    }
  }
  // c += a b for 16 columns of b. a: [half in k][half of the rows].
  static DEVICE void mma(float (&left)[2 * H], float (&right)[2 * H], const uint32_t (&a)[2][H],
                         const uint32_t (&b)[4]) {
    mma(left, a, {b[0], b[1]});
    mma(right, a, {b[2], b[3]});
  }
  static DEVICE void mma(float (&c)[2 * H], const uint32_t (&a)[2][H], const uint32_t (&b)[2]) {
    float d[4] = {c[0], c[1], H == 2 ? c[2 * H - 2] : 0.0f, H == 2 ? c[2 * H - 1] : 0.0f};
    mma_m16n8k16<T>(d, {a[0][0], H == 2 ? a[0][H - 1] : 0, a[1][0], H == 2 ? a[1][H - 1] : 0}, b, d);
    c[0] = d[0], c[1] = d[1];
    if (H == 2) c[2 * H - 2] = d[2], c[2 * H - 1] = d[3];
  }
};
