// Attention of a few query heads of a kv head to tiles of its keys: what eight warps do with a tile in shared memory,
// on tensor cores in 16 bits, on CUDA cores in fp32. Hopper and later, for the tiles are stored as TMA stores them.
#pragma once
#include <type_traits>

#include "stream.cuh"

constexpr int MOST_HEADS = 4;  // of a group, that share a read of its keys

// The newest token, with RoPE.
template <typename T, int D>
struct Newest {
  alignas(16) T q[MOST_HEADS][D], k[D], v[D];

  static constexpr int VECTORS = D * sizeof(T) / 16;  // of k, and of v
  DEVICE const uint4& vector(bool of_v, int i) const { return reinterpret_cast<const uint4*>(of_v ? v : k)[i]; }
};

// What the warps know of the heads in the end, each from its keys: sums of P V that are not yet divided by l.
template <typename T, int PARTS, int D>
struct Parts {
  Newest<T, D> newest;
  float O[PARTS][MOST_HEADS][D];
  float2 ml[PARTS][MOST_HEADS];
};

// 16 bytes of a tile, whose rows of 128 bytes are swizzled.
template <int KEYS>
DEVICE int place_in_tile(int key, int i) { return (i / 8 * KEYS + key) * 128 + (i % 8 ^ key % 8) * 16; }
template <int KEYS>
DEVICE const uint4* in_tile(const uint8_t* tile, int key, int i) {
  return reinterpret_cast<const uint4*>(tile + place_in_tile<KEYS>(key, i));
}
// The newest key and value take the place of what the cache had there.
template <int KEYS, typename T, int D>
DEVICE void put_into_tile(uint8_t* tile, int key, const Newest<T, D>& newest) {
  constexpr int VECTORS = Newest<T, D>::VECTORS, TILE = KEYS * D * sizeof(T);
  for (int n = threadIdx.x; n < 2 * VECTORS; n += COMPUTE) {
    const int i = n % VECTORS;
    const bool is_v = n >= VECTORS;
    *reinterpret_cast<uint4*>(tile + is_v * TILE + place_in_tile<KEYS>(key, i)) = newest.vector(is_v, i);
  }
  fence_async_proxy();  // TMA writes to this stage again
}

// Of several parts of a row.
template <int N>
struct Part {
  float m = -INFINITY, l = 0.0f, O[N] = {};

  DEVICE void add(float other_m, float other_l, const float (&other_O)[N]) {
    const float top = fmaxf(m, other_m), shift = top == -INFINITY ? 0.0f : top;
    const float rescale = exp2f(m - shift), factor = exp2f(other_m - shift);
    m = top, l = l * rescale + other_l * factor;
#pragma unroll
    for (int n = 0; n < N; ++n) O[n] = O[n] * rescale + other_O[n] * factor;
  }
  // And the part of the lane that is `step` away.
  DEVICE void add_lanes(int step) {
    float other[N];
#pragma unroll
    for (int n = 0; n < N; ++n) other[n] = __shfl_xor_sync(~0u, O[n], step);
    const float other_m = __shfl_xor_sync(~0u, m, step), other_l = __shfl_xor_sync(~0u, l, step);
    add(other_m, other_l, other);
  }
};

// ---- In 16 bits. A warp has 16 keys of a tile and half of the columns of V, so S = Q K^T is computed twice. Of the
// products' 16 rows the first ones are heads: lane 4 g + t has values of head g.
template <typename T, int D>
struct TensorCoreAttention {
  static constexpr int KEYS = 64, PARTS = KEYS / 16, COLUMNS = D * PARTS / WARPS;
  static constexpr int TILE = KEYS * D * int(sizeof(T));  // bytes

  union Pair {
    uint32_t bits;
    T values[2];
  };

  uint32_t q[D / 16][2];  // of the first operand: columns 16 e + 8 i + 2 t and the next one
  float O[COLUMNS / 8][4] = {}, m = -INFINITY, l = 0.0f, scale;

  static DEVICE int g() { return threadIdx.x % 32 / 4; }
  static DEVICE int t() { return threadIdx.x % 4; }
  static DEVICE int part() { return threadIdx.x / 32 % PARTS; }
  static DEVICE int first_column() { return threadIdx.x / 32 / PARTS * COLUMNS; }

  DEVICE TensorCoreAttention(const Newest<T, D>& newest, int heads, float scale) : scale(scale) {
    const T* from = newest.q[min(g(), MOST_HEADS - 1)] + 2 * t();
#pragma unroll
    for (int e = 0; e < D / 16; ++e) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        q[e][i] = g() < heads ? *reinterpret_cast<const uint32_t*>(from + 16 * e + 8 * i) : 0;
    }
  }

  // Keys from `first` to `end`: K, and V behind it.
  DEVICE void add(const uint8_t* tile, int first, int end) {
    const int lane = threadIdx.x % 32, key = 16 * part();
    float S[2][2][4] = {};  // of each eight keys the sum of two: products that wait for each other take longest
#pragma unroll
    for (int e = 0; e < D / 16; ++e) {
      uint32_t K[4];
      ldmatrix_x4(K, in_tile<KEYS>(tile, key + lane / 16 * 8 + lane % 8, 2 * e + lane / 8 % 2));
#pragma unroll
      for (int n = 0; n < 2; ++n)
        mma_m16n8k16<T>(S[n][e % 2], {q[e][0], 0, q[e][1], 0}, {K[2 * n], K[2 * n + 1]}, S[n][e % 2]);
    }
    float P[2][2], top = m;
    Pair seen[2];  // of V's values
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      seen[n].bits = 0;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool sees = first + key + 8 * n + 2 * t() + i < end;
        P[n][i] = sees ? (S[n][0][i] + S[n][1][i]) * scale : -INFINITY;
        seen[n].bits |= sees ? 0xffffu << 16 * i : 0;
        top = fmaxf(top, P[n][i]);
      }
    }
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1)), top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    const float shift = top == -INFINITY ? 0.0f : top, rescale = exp2f(m - shift);
    m = top, l *= rescale;
#pragma unroll
    for (int e = 0; e < COLUMNS / 8; ++e) O[e][0] *= rescale, O[e][1] *= rescale;
    Pair p[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float left = exp2f(P[n][0] - shift), right = exp2f(P[n][1] - shift);
      l += left + right;
      p[n].values[0] = from_float<T>(left), p[n].values[1] = from_float<T>(right);
    }
#pragma unroll
    for (int e = 0; e < COLUMNS / 16; ++e) {
      uint32_t V[4];
      ldmatrix_x4_trans(V, in_tile<KEYS>(tile + TILE, key + lane % 16, first_column() / 8 + 2 * e + lane / 16));
#pragma unroll
      for (int n = 0; n < 2; ++n)
        mma_m16n8k16<T>(O[2 * e + n], {p[0].bits, 0, p[1].bits, 0},
                        {V[2 * n] & seen[0].bits, V[2 * n + 1] & seen[1].bits}, O[2 * e + n]);
    }
  }

  DEVICE void put(Parts<T, PARTS, D>& parts, int heads) {
    l += __shfl_xor_sync(~0u, l, 1), l += __shfl_xor_sync(~0u, l, 2);
    if (g() >= heads) return;
    float* to = &parts.O[part()][g()][first_column() + 2 * t()];
#pragma unroll
    for (int e = 0; e < COLUMNS / 8; ++e) *reinterpret_cast<float2*>(to + 8 * e) = make_float2(O[e][0], O[e][1]);
    if (first_column() == 0 && t() == 0) parts.ml[part()][g()] = make_float2(m, l);
  }
};

// ---- In fp32. LANES lanes have four columns of a key each, and a warp has AT_ONCE keys in each of four steps.
template <int D>
struct CudaCoreAttention {
  static constexpr int LANES = D / 4, AT_ONCE = 32 / LANES, PARTS = WARPS, KEYS = 4 * PARTS * AT_ONCE;
  static constexpr int TILE = KEYS * D * int(sizeof(float));  // bytes

  float q[MOST_HEADS][4], scale;
  Part<4> part[MOST_HEADS];
  int heads;

  static DEVICE int column() { return threadIdx.x % LANES * 4; }

  DEVICE CudaCoreAttention(const Newest<float, D>& newest, int heads, float scale) : scale(scale), heads(heads) {
#pragma unroll
    for (int h = 0; h < MOST_HEADS; ++h) load(q[h], newest.q[min(h, heads - 1)] + column());
  }

  static DEVICE void load(float (&to)[4], const float* from) {
    const float4 x = *reinterpret_cast<const float4*>(from);
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
  }
  static DEVICE void store(float* to, const float (&x)[4]) {
    *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
  }
  static DEVICE float dot(const float (&x)[4], const float (&y)[4]) {
    return fmaf(x[0], y[0], fmaf(x[1], y[1], fmaf(x[2], y[2], x[3] * y[3])));
  }
  template <int N>
  static DEVICE void sum_of_lanes(float (&S)[N]) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) {
#pragma unroll
      for (float& s : S) s += __shfl_xor_sync(~0u, s, step);
    }
  }

  // Keys from `first` to `end`: K, and V behind it.
  DEVICE void add(const uint8_t* tile, int first, int end) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float k[4][4], v[4][4] = {};
    bool sees[4];
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      const int key = (s * WARPS + warp) * AT_ONCE + lane / LANES;
      sees[s] = first + key < end;
      load(k[s], reinterpret_cast<const float*>(in_tile<KEYS>(tile, key, column() / 4)));
      if (sees[s]) load(v[s], reinterpret_cast<const float*>(in_tile<KEYS>(tile + TILE, key, column() / 4)));
    }
#pragma unroll
    for (int h = 0; h < MOST_HEADS; ++h) {
      if (h >= heads) break;
      float S[4], top = part[h].m;
#pragma unroll
      for (int s = 0; s < 4; ++s) S[s] = dot(q[h], k[s]);
      sum_of_lanes(S);
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        S[s] = sees[s] ? S[s] * scale : -INFINITY;
        top = fmaxf(top, S[s]);
      }
      const float shift = top == -INFINITY ? 0.0f : top, rescale = exp2f(part[h].m - shift);
      part[h].m = top, part[h].l *= rescale;
#pragma unroll
      for (float& o : part[h].O) o *= rescale;
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        const float P = exp2f(S[s] - shift);
        part[h].l += P;
#pragma unroll
        for (int n = 0; n < 4; ++n) part[h].O[n] = fmaf(P, v[s][n], part[h].O[n]);
      }
    }
  }

  DEVICE void put(Parts<float, PARTS, D>& parts, int) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < MOST_HEADS; ++h) {
      if (h >= heads) break;
      Part<4>& own = part[h];
#pragma unroll
      for (int step = LANES; step < 32; step *= 2) own.add_lanes(step);
      if (lane < LANES) store(&parts.O[warp][h][column()], own.O);
      if (lane == 0) parts.ml[warp][h] = make_float2(own.m, own.l);
    }
  }
};

template <typename T, int D>
using AttentionOf = std::conditional_t<sizeof(T) == 2, TensorCoreAttention<T, D>, CudaCoreAttention<D>>;
