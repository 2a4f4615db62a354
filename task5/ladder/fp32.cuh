// The arithmetic of a warp in fp32, on CUDA cores: the memory takes longer than it.
#pragma once
#include <cuda_runtime.h>

#include "pipeline.cuh"

// What a lane knows of some keys: of each row m, l, and QUADS times four columns.
template <int ROWS, int QUADS>
struct RowsOfQuads {
  float m_i[ROWS], l_i[ROWS];
  float4 O_i[ROWS][QUADS];

  DEVICE void start() {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      m_i[r] = -INFINITY, l_i[r] = 0.0f;
#pragma unroll
      for (float4& O : O_i[r]) O = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }
  // Becomes what merge() of decode.cuh makes of the keys before, and these.
  DEVICE void merge_into(const RowsOfQuads& before) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int i = 0; i < QUADS; ++i) {
        Part p = {before.m_i[r], before.l_i[r], before.O_i[r][i]};
        merge(p, {Part{m_i[r], l_i[r], O_i[r][i]}});
        O_i[r][i] = p.O;
        if (i == QUADS - 1) m_i[r] = p.m, l_i[r] = p.l;
      }
    }
  }
};

template <int HEAD_DIM, int ROWS_>
struct Fp32 : RowsOfQuads<ROWS_, HEAD_DIM <= 128 ? 1 : HEAD_DIM / 128> {
  using T = float;
  static constexpr int D = HEAD_DIM, ROWS = ROWS_;
  static constexpr int LANES = D / 32, KEYS = 32 / LANES;    // so many lanes share a key, 32 of its columns each
  static constexpr int QUADS = D <= 128 ? 1 : D / 128;       // four columns of O_i each, of a lane
  static constexpr int SIDES = D < 128 ? 128 / D : 1;        // groups of lanes that take turns with the values
  // A tile's values are summed by themselves, where there are registers for it: a sum of a thousand terms one after the
  // other would round a thousand times.
  static constexpr bool BY_TILES = ROWS * QUADS <= 8;
  template <bool PAGED>
  static constexpr int STATES_THAT_FIT = ROWS * QUADS <= 4 ? 2 : 0;  // in registers, beside this one
  static constexpr int ONE_TILE_BITS = 4, TWO_TILE_BITS = 6;  // up to 1 << so many leaves have one tile, or two
  using State = RowsOfQuads<ROWS, QUADS>;
  using State::O_i, State::m_i, State::l_i;
  float S[ROWS];        // of key lane / LANES
  float rescale[ROWS];  // what the parts so far take, where it is not applied yet

  static DEVICE int offset(int row, int piece) { return row * D + 4 * (piece ^ row * LANES % 8); }
  static DEVICE int lane() { return threadIdx.x % 32; }

  DEVICE void load_queries(const float*) {}

  DEVICE void scores(const float* Q_i, const float* K_j) {
    const int key = lane() / LANES;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) S[r] = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int piece = i * LANES + lane() % LANES;
      const float4 K = *reinterpret_cast<const float4*>(K_j + offset(key, piece));
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const float4 Q = *reinterpret_cast<const float4*>(Q_i + offset(r, piece));
        S[r] = fmaf(Q.x, K.x, fmaf(Q.y, K.y, fmaf(Q.z, K.z, fmaf(Q.w, K.w, S[r]))));
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int step = 1; step < LANES; step *= 2) S[r] += __shfl_xor_sync(~0u, S[r], step);
    }
  }

  DEVICE void mask(const Mask& sees) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (!sees(sees.position(r), lane() / LANES)) S[r] = -INFINITY;
    }
  }

  // S becomes P = exp2(scale S - m_i). The parts so far are rescaled where m_i grows.
  DEVICE void softmax(float scale) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      S[r] *= scale;
      float m = fmaxf(m_i[r], S[r]);
#pragma unroll
      for (int step = LANES; step < 32; step *= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, step));
      const float shift = m == -INFINITY ? 0.0f : m;
      rescale[r] = fast_exp2(m_i[r] - shift);
      m_i[r] = m;
      S[r] = fast_exp2(S[r] - shift);
      l_i[r] = fmaf(l_i[r], rescale[r], S[r]);
    }
  }

  // P, which every lane needs of all keys, goes through `room`: [key][row].
  DEVICE void add_values(const float* V_j, float* room) {
    if (lane() % LANES == 0) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) room[lane() / LANES * ROWS + r] = S[r];
    }
    __syncwarp();
    float4 of_tile[BY_TILES ? ROWS : 1][QUADS] = {};
    if constexpr (!BY_TILES) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (float4& O : O_i[r]) O.x *= rescale[r], O.y *= rescale[r], O.z *= rescale[r], O.w *= rescale[r];
      }
    }
#pragma unroll
    for (int j = 0; j < KEYS; j += SIDES) {
      const int key = j + lane() / (32 / SIDES);
      float4 V[QUADS];
#pragma unroll
      for (int i = 0; i < QUADS; ++i)
        V[i] = *reinterpret_cast<const float4*>(V_j + offset(key, 32 * i + lane() % (32 / SIDES)));
      float P[ROWS];
#pragma unroll
      for (int r = 0; r < ROWS; r += ROWS < 4 ? 1 : 4) {
        if constexpr (ROWS < 4) {
          P[r] = room[key * ROWS + r];
        } else {
          const float4 four = *reinterpret_cast<const float4*>(room + key * ROWS + r);
          P[r] = four.x, P[r + 1] = four.y, P[r + 2] = four.z, P[r + 3] = four.w;
        }
      }
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int i = 0; i < QUADS; ++i) {
          float4& O = BY_TILES ? of_tile[BY_TILES ? r : 0][i] : O_i[r][i];
          O.x = fmaf(P[r], V[i].x, O.x), O.y = fmaf(P[r], V[i].y, O.y);
          O.z = fmaf(P[r], V[i].z, O.z), O.w = fmaf(P[r], V[i].w, O.w);
        }
      }
    }
    if constexpr (BY_TILES) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int i = 0; i < QUADS; ++i) {
          float4& O = O_i[r][i];
          const float4 x = of_tile[r][i];
          O.x = fmaf(O.x, rescale[r], x.x), O.y = fmaf(O.y, rescale[r], x.y);
          O.z = fmaf(O.z, rescale[r], x.z), O.w = fmaf(O.w, rescale[r], x.w);
        }
      }
    }
  }

  static DEVICE bool has_some_of(int) { return true; }
  // Behind the last of some keys.
  DEVICE void complete() {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int step = LANES; step < 32; step *= 2) l_i[r] += __shfl_xor_sync(~0u, l_i[r], step);
#pragma unroll
      for (int step = 32 / SIDES; step < 32; step *= 2) {
#pragma unroll
        for (float4& x : O_i[r]) {
          x.x += __shfl_xor_sync(~0u, x.x, step), x.y += __shfl_xor_sync(~0u, x.y, step);
          x.z += __shfl_xor_sync(~0u, x.z, step), x.w += __shfl_xor_sync(~0u, x.w, step);
        }
      }
    }
  }

  // Columns [e_0, e_0 + width) of the first `rows` rows.
  DEVICE void put(float* O, int e_0, int width, int rows) const {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int i = 0; i < QUADS; ++i) {
        const float4 x = O_i[r][i];
        const int e = 4 * (32 * i + lane() % (32 / SIDES));
        if (r < rows && e >= e_0 && e < e_0 + width && lane() < 32 / SIDES)
          *reinterpret_cast<float4*>(&O[place(r, e - e_0, width)]) = x;
      }
    }
  }
  DEVICE void put_ml(float* m, float* l, int rows) const {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (r < rows && lane() == 0) m[r] = m_i[r], l[r] = l_i[r];
    }
  }
};
