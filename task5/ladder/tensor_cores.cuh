// The arithmetic of a warp on tensor cores, fp16 or bf16, sums in fp32.
//
//   S^T = K_j Q^T       16 keys x 8 rows of q, summed over 16 columns of K by each product (m16n8k16)
//   O^T = V_j^T P^T     16 columns of V x 8 rows, over 16 keys
//
// A product has 16 rows and 8 columns, and decode has mostly 1 to 8 rows of q for a kv head. So keys, of which there
// are enough, are the products' rows, and rows of q their columns: half as many products as the other way round.
#pragma once
#include <cuda_runtime.h>

#include "pipeline.cuh"

// What a lane knows of some keys, with t = lane % 4 and g = lane / 4: m and l of rows 8 r + 2 t and 8 r + 2 t + 1 of q,
// and of these rows columns g and g + 8 of each 16: [row % 2] and [2 + row % 2] of O_i.
template <int R, int D>
struct ColumnsOfProducts {
  float O_i[D / 16][R][4], m_i[R][2], l_i[R][2];

  DEVICE void start() {
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int i = 0; i < 2; ++i) m_i[r][i] = -INFINITY, l_i[r][i] = 0.0f;
#pragma unroll
      for (auto& of_16 : O_i) {
#pragma unroll
        for (float& x : of_16[r]) x = 0.0f;
      }
    }
  }
  // Becomes what merge() of decode.cuh makes of the keys before, and these.
  DEVICE void merge_into(const ColumnsOfProducts& before) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float m = fmaxf(before.m_i[r][i], m_i[r][i]), shift = m == -INFINITY ? 0.0f : m;
        const float rescale = fast_exp2(before.m_i[r][i] - shift), factor = fast_exp2(m_i[r][i] - shift);
        m_i[r][i] = m, l_i[r][i] = fmaf(factor, l_i[r][i], before.l_i[r][i] * rescale);
#pragma unroll
        for (int e = 0; e < D / 16; ++e) {
#pragma unroll
          for (int j = i; j < 4; j += 2)
            O_i[e][r][j] = fmaf(factor, O_i[e][r][j], before.O_i[e][r][j] * rescale);
        }
      }
    }
  }
};

// The 8x8 matrix of 16-bit values of which each lane has elements 2 t and 2 t + 1 of row g, transposed.
DEVICE uint32_t transposed(uint32_t x) {
#ifdef __CUDACC__
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
#else
  const int lane = threadIdx.x % 32, from = lane % 4 * 8 + lane / 8, half = lane / 4 % 2 * 16;
  return (__shfl_sync(~0u, x, from) >> half & 0xffff) | (__shfl_sync(~0u, x, from + 4) >> half & 0xffff) << 16;
#endif
}

// ROWS is 8, 16 or 32.
template <typename Element, int HEAD_DIM, int ROWS_>
struct TensorCores : ColumnsOfProducts<ROWS_ / 8, HEAD_DIM> {
  using T = Element;
  static constexpr int D = HEAD_DIM, ROWS = ROWS_, R = ROWS / 8;
  // In registers, beside this one. Of 16 rows of head_dim 128 ptxas would spill it with pages.
  template <bool PAGED>
  static constexpr int STATES_THAT_FIT = R * D <= 128 ? 2 : int(R == 1 || (R == 2 && D == 128 && !PAGED));
  // Up to 1 << so many leaves have one tile, or two: merging states that are not in registers takes longer.
  static constexpr int ONE_TILE_BITS = 3, TWO_TILE_BITS = R * D <= 128 ? 9 : R == 1 ? 7
                                                                                    : 5;
  using State = ColumnsOfProducts<R, D>;
  using State::O_i, State::m_i, State::l_i;
  static constexpr int N = D == 64 && R <= 2 ? 2 : 1, KEYS = 16 * N;  // of a tile, by one warp
  // Of keys g (0, 1) and g + 8 (2, 3) of each 16: rows 2 t and 2 t + 1.
  float S[N][R][4];
  uint32_t P[N][R][2];  // keys 2 t, 2 t + 1 of each 8, of row g
  static constexpr bool KEEPS_Q = R * D <= 256 && D <= 128;  // in registers, up to 32
  uint32_t Q[KEEPS_Q ? D / 16 : 1][R][2];

  // Where a row's 16 bytes (8 elements) number `piece` are in shared memory.
  static DEVICE int offset(int row, int piece) { return row * D + 8 * (piece ^ row % 8); }
  static DEVICE int lane() { return threadIdx.x % 32; }
  static DEVICE int g() { return threadIdx.x % 32 / 4; }
  static DEVICE int t() { return threadIdx.x % 4; }

  DEVICE void load_queries(const T* Q_i) {
    if constexpr (KEEPS_Q) {
#pragma unroll
      for (int e = 0; e < D / 16; ++e) load_columns(Q[e], Q_i, e);
    }
  }

  DEVICE void scores(const T* Q_i, const T* K_j) {
    const int of_lane = offset(lane() % 16, lane() / 16);
    float other[N][R][4];  // S is the sum of two: products that wait for each other take longest
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int r = 0; r < R; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i) S[n][r][i] = other[n][r][i] = 0.0f;
#pragma unroll
    for (int e = 0; e < D / 16; ++e) {
      auto& columns = Q[KEEPS_Q ? e : 0];
      if constexpr (!KEEPS_Q) load_columns(columns, Q_i, e);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        uint32_t K[4];
        ldmatrix_x4(K, K_j + 16 * n * D + (of_lane ^ 16 * e));
#pragma unroll
        for (int r = 0; r < R; ++r) {
          auto& to = e % 2 ? other[n][r] : S[n][r];
          mma_m16n8k16<T>(to, K, columns[r], to);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int r = 0; r < R; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i) S[n][r][i] += other[n][r][i];
  }

  DEVICE void mask(const Mask& sees) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int p = sees.position(8 * r + 2 * t() + i % 2);
#pragma unroll
        for (int n = 0; n < N; ++n) {
          if (!sees(p, 16 * n + g() + i / 2 * 8)) S[n][r][i] = -INFINITY;
        }
      }
    }
  }

  // P = exp2(scale S - m_i). The parts so far are rescaled where m_i moves.
  DEVICE void softmax(float scale) {
    float top[R][2];
    bool moves = false;
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        top[r][i] = fmaxf(S[0][r][i], S[0][r][i + 2]);
#pragma unroll
        for (int n = 1; n < N; ++n) top[r][i] = fmaxf(top[r][i], fmaxf(S[n][r][i], S[n][r][i + 2]));
        top[r][i] *= scale;
        moves |= top[r][i] > m_i[r][i];
      }
    }
    if (__any_sync(~0u, moves)) {  // in the first tiles, and ever less often
#pragma unroll
      for (int r = 0; r < R; ++r) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float m = fmaxf(m_i[r][i], top[r][i]);
#pragma unroll
          for (int step = 4; step < 32; step *= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, step));
          const float rescale = fast_exp2(m_i[r][i] - (m == -INFINITY ? 0.0f : m));
          m_i[r][i] = m;
          l_i[r][i] *= rescale;
#pragma unroll
          for (auto& of_16 : O_i) of_16[r][i] *= rescale, of_16[r][i + 2] *= rescale;
        }
      }
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const float shift[2] = {m_i[r][0] == -INFINITY ? 0.0f : m_i[r][0], m_i[r][1] == -INFINITY ? 0.0f : m_i[r][1]};
#pragma unroll
      for (int n = 0; n < N; ++n) {
        float (&s)[4] = S[n][r];
#pragma unroll
        for (int i = 0; i < 4; ++i) s[i] = fast_exp2(__fmul_rn(s[i], scale) - shift[i % 2]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          l_i[r][i] += s[i] + s[i + 2];
          P[n][r][i] = transposed(pack<T>(s[2 * i], s[2 * i + 1]));
        }
      }
    }
  }

  DEVICE void add_values(const T* V_j, T*) {
    const int of_lane = offset(lane() / 16 * 8 + lane() % 8, lane() / 8 % 2);
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int e = 0; e < D / 16; ++e) {
        uint32_t V[4];
        ldmatrix_x4_trans(V, V_j + 16 * n * D + (of_lane ^ 16 * e));
#pragma unroll
        for (int r = 0; r < R; ++r) mma_m16n8k16<T>(O_i[e][r], V, P[n][r], O_i[e][r]);
      }
    }
  }

  // Whether this lane has one of the first `rows` rows.
  static DEVICE bool has_some_of(int rows) { return 2 * t() < rows; }
  // Behind the last of some keys.
  DEVICE void complete() {
#pragma unroll
    for (auto& of_rows : l_i) {
#pragma unroll
      for (float& l : of_rows) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2) l += __shfl_xor_sync(~0u, l, step);
      }
    }
  }

  // Columns [e_0, e_0 + width) of the first `rows` rows.
  DEVICE void put(float* O, int e_0, int width, int rows) const {
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 8 * r + 2 * t() + i % 2;
        if (row >= rows) continue;
#pragma unroll
        for (int e = 0; e < D / 16; ++e) {
          const int column = 16 * e + i / 2 * 8;  // of eight lanes
          if (column >= e_0 && column < e_0 + width) O[place(row, column - e_0 + g(), width)] = O_i[e][r][i];
        }
      }
    }
  }
  DEVICE void put_ml(float* m, float* l, int rows) const {
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = 8 * r + 2 * t() + i;
        if (row < rows && g() == 0) m[row] = m_i[r][i], l[row] = l_i[r][i];
      }
    }
  }

 private:
  // Columns 16 e to 16 e + 15 of q, of all rows.
  static DEVICE void load_columns(uint32_t (&columns)[R][2], const T* Q_i, int e) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int of_lane = offset(lane() % 8, lane() / 8 % 2);
      ldmatrix_x2(columns[r], Q_i + 8 * r * D + (of_lane ^ 16 * e));
    }
  }
};
