// Attention of a few query heads of a kv head to tiles of its keys: what eight warps do with a tile in shared memory,
// on tensor cores in 16 bits, on CUDA cores in fp32. Hopper and later, for the tiles are stored as TMA stores them.
#pragma once
#include <type_traits>

#include "stream.cuh"

constexpr int MOST_HEADS = 4;  // of a group, that share a read of its keys

// The newest token, as a product has left it, and of its position cos and sin.
template <typename T, int D>
struct Newest {
  alignas(16) T q[MOST_HEADS][D], k[D], v[D];
  alignas(16) float cos[D / 2], sin[D / 2];
};

// The newest token. Then what the warps know of the heads in the end, each from its keys: sums of P V that are not yet
// divided by l. And the newest key, rotated, and value, as the cache gets them when the tile around their place is not
// needed any more.
template <typename T, int PARTS, int D>
struct Parts {
  union {
    float O[PARTS][MOST_HEADS][D];
    Newest<T, D> newest;
  };
  float2 ml[PARTS][MOST_HEADS];
  alignas(16) T k[D], v[D];
};

// 16 bytes of a tile, whose rows of 128 bytes are swizzled.
template <int KEYS>
DEVICE const uint4* in_tile(const uint8_t* tile, int key, int i) {
  return reinterpret_cast<const uint4*>(tile + (i / 8 * KEYS + key) * 128 + (i % 8 ^ key % 8) * 16);
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

    DEVICE float2 whole() const { return make_float2(to_float(values[0]), to_float(values[1])); }
    DEVICE void operator=(float2 x) { values[0] = from_float<T>(x.x), values[1] = from_float<T>(x.y); }
  };
  using Row = Pair[D / 16][2];  // a lane's part of the first operand: columns 16 e + 8 i + 2 t and the next one

  Row q;
  float O[COLUMNS / 8][4], m, l, scale;

  static DEVICE int g() { return threadIdx.x % 32 / 4; }
  static DEVICE int t() { return threadIdx.x % 4; }
  static DEVICE int part() { return threadIdx.x / 32 % PARTS; }
  static DEVICE int first_column() { return threadIdx.x / 32 / PARTS * COLUMNS; }

  // has_newest: whether the newest key is among this block's; rotated: whether there is RoPE.
  DEVICE TensorCoreAttention(Parts<T, PARTS, D>& parts, int heads, bool has_newest, bool rotated, float scale)
      : scale(scale) {
    const auto& newest = parts.newest;
    const bool own = has_newest && part() == 0;
    load(q, newest.q[min(g(), MOST_HEADS - 1)], g() < heads);
    Row k;
    load(k, newest.k, own);
    Pair v[COLUMNS / 8];
#pragma unroll
    for (int e = 0; e < COLUMNS / 8; ++e)
      v[e].bits = own ? *reinterpret_cast<const uint32_t*>(&newest.v[first_column() + 8 * e + 2 * t()]) : 0;
    if (rotated) rotate(q, k, newest);

    float S = 0.0f;  // the newest key comes first
#pragma unroll
    for (int e = 0; e < D / 16; ++e) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 a = q[e][i].whole(), b = k[e][i].whole();
        S = fmaf(a.x, b.x, fmaf(a.y, b.y, S));
      }
    }
    S += __shfl_xor_sync(~0u, S, 1), S += __shfl_xor_sync(~0u, S, 2);
    m = own ? S * scale : -INFINITY, l = own && t() == 0 ? 1.0f : 0.0f;
#pragma unroll
    for (int e = 0; e < COLUMNS / 8; ++e) {
      const float2 value = v[e].whole();
      O[e][0] = value.x, O[e][1] = value.y, O[e][2] = O[e][3] = 0.0f;
    }

    if (!own || g() > 0) return;
    auto *k_to = reinterpret_cast<uint32_t*>(parts.k) + t(), *v_to = reinterpret_cast<uint32_t*>(parts.v) + t();
#pragma unroll
    for (int e = 0; e < COLUMNS / 8; ++e) v_to[first_column() / 2 + 4 * e] = v[e].bits;
    if (first_column() > 0) return;
#pragma unroll
    for (int e = 0; e < D / 16; ++e) k_to[8 * e] = k[e][0].bits, k_to[8 * e + 4] = k[e][1].bits;
  }

  static DEVICE void load(Row& row, const T* from, bool any) {
#pragma unroll
    for (int e = 0; e < D / 16; ++e) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        row[e][i].bits = any ? *reinterpret_cast<const uint32_t*>(from + 16 * e + 8 * i + 2 * t()) : 0;
    }
  }
  static DEVICE void rotate(Row& q, Row& k, const Newest<T, D>& newest) {
#pragma unroll
    for (int e = 0; e < D / 32; ++e) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = 16 * e + 8 * i + 2 * t();
        const float2 cos = *reinterpret_cast<const float2*>(newest.cos + at);
        const float2 sin = *reinterpret_cast<const float2*>(newest.sin + at);
        rotate(q[e][i], q[e + D / 32][i], cos, sin), rotate(k[e][i], k[e + D / 32][i], cos, sin);
      }
    }
  }
  static DEVICE void rotate(Pair& left, Pair& right, float2 cos, float2 sin) {
    const float2 x = left.whole(), y = right.whole();
    left = make_float2(x.x * cos.x - y.x * sin.x, x.y * cos.y - y.y * sin.y);
    right = make_float2(y.x * cos.x + x.x * sin.x, y.y * cos.y + x.y * sin.y);
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
        mma_m16n8k16<T>(S[n][e % 2], {q[e][0].bits, 0, q[e][1].bits, 0}, {K[2 * n], K[2 * n + 1]}, S[n][e % 2]);
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
      const float2 of_keys = make_float2(exp2f(P[n][0] - shift), exp2f(P[n][1] - shift));
      l += of_keys.x + of_keys.y, p[n] = of_keys;
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

  DEVICE CudaCoreAttention(Parts<float, PARTS, D>& parts, int heads, bool has_newest, bool rotated, float scale)
      : scale(scale), heads(heads) {
    const auto& newest = parts.newest;
    const bool left = column() < D / 2, own = has_newest && threadIdx.x < LANES;
    const int other = left ? D / 2 : -D / 2;
    float k[4], v[4] = {}, other_q[MOST_HEADS][4], other_k[4], cos[4], sin[4];
#pragma unroll
    for (int h = 0; h < MOST_HEADS; ++h) {
      const float* from = newest.q[min(h, heads - 1)] + column();
      load(q[h], from), load(other_q[h], from + other);
    }
    load(k, newest.k + column()), load(other_k, newest.k + column() + other);
    if (own) load(v, newest.v + column());
    if (rotated) {
      load(cos, newest.cos + column() % (D / 2)), load(sin, newest.sin + column() % (D / 2));
#pragma unroll
      for (int h = 0; h < MOST_HEADS; ++h) rotate(q[h], other_q[h], cos, sin, left);
      rotate(k, other_k, cos, sin, left);
    }
#pragma unroll
    for (int h = 0; h < MOST_HEADS; ++h) {  // the newest key comes first
      float S[1] = {dot(q[h], k)};
      sum_of_lanes(S);
      part[h].add(own ? S[0] * scale : -INFINITY, 1.0f, v);
    }
    if (own) store(&parts.k[column()], k), store(&parts.v[column()], v);
  }

  static DEVICE void load(float (&to)[4], const float* from) {
    const float4 x = *reinterpret_cast<const float4*>(from);
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
  }
  static DEVICE void store(float* to, const float (&x)[4]) {
    *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
  }
  static DEVICE void rotate(float (&x)[4], const float (&other)[4], const float (&cos)[4], const float (&sin)[4],
                            bool left) {
#pragma unroll
    for (int n = 0; n < 4; ++n) x[n] = x[n] * cos[n] + (left ? -other[n] : other[n]) * sin[n];
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
