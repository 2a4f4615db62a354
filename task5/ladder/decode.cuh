// What every rung of decode computes, its arguments, and how parts of a result are merged.
//
//   out = softmax(scale q k^T) v      for the newest q_len tokens of each sequence, against its cache
//   q, out (batch, q_len, heads, head_dim)
//   k, v   (batch, max_seq, kv_heads, head_dim), or pages (pages, page_size, kv_heads, head_dim): key j of sequence b
//          is then row j % page_size of page block_table[b, j / page_size]
//
// Token i of sequence b stands at position p = seqlens_k[b] - q_len + i and sees the keys
//   max(leftpad_k[b], p - window + 1) <= j <= p          (window 0: no limit)
// A key on a page outside of the pool is not read and not seen. A row that sees no key gives 0.
//
// A pair is a kv head of a sequence with ROWS of the q_len * group rows that read it; row r is token r / group, head
// r % group of the group. All keys of a pair are cut into tiles of B_c.
#pragma once
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "dtype.cuh"
#include "launch.cuh"
#include "tensor.cuh"

#define DEVICE __device__ __forceinline__

// A rung has said: WARPS of a block; KV_BYTES of shared memory for K and V, twice as many with head_dim 256, or two
// tiles where these take more.
constexpr int THREADS = 32 * WARPS, WARP_BITS = WARPS == 4 ? 2 : 3;
static_assert(1 << WARP_BITS == WARPS);
constexpr float LOG2_E = 1.44269504f;

// Division by a number that the host knows, of n with n * d < 2^32: a product instead of some 30 instructions. Decode
// takes a few microseconds, in which instructions that run once have to be fetched, too.
struct Divisor {
  unsigned d, reciprocal;  // 2^32 / d, rounded up

  explicit Divisor(unsigned d = 1) : d(d), reciprocal(d == 1 ? 0 : unsigned(((uint64_t(1) << 32) + d - 1) / d)) {}
  DEVICE int quotient(int n) const { return d == 1 ? n : int(uint64_t(unsigned(n)) * reciprocal >> 32); }
  DEVICE int remainder(int n) const { return n - quotient(n) * int(d); }
};

struct Decode {
  const void *q, *k, *v;
  void* out;
  Strides q_strides, k_strides, v_strides, out_strides;  // of k and v, batch: from page to page where there are pages
  const int *seqlens_k, *leftpad_k, *block_table;        // block_table: null without pages
  int64_t table_stride;
  int batch, kv_heads, q_len, kv_len;  // kv_len: keys for which there is room
  int pages, window;
  int new_keys;  // of each sequence, its newest: the launch ahead of this one may write them, and no others
  int rows;      // of a kv head
  Divisor group, page_size, row_tiles;  // row_tiles: pairs that share a kv head's rows
  Divisor pairs;                        // of a sequence
  int tile_bits = 0;                    // B_c = 1 << tile_bits
  // 0, or in a batch-invariant call into how many chunks the keys of a pair are cut at most, in any batch (rungs 1 and
  // 2); or how many warps could share those of a sequence (3, 4, 6 to 10). Rung 5 finds that number itself.
  int chunks;
  int one_tile_bits = 0, two_tile_bits = 0;  // up to 1 << so many leaves of a pair have one tile, or two
  // In rungs with clusters: 1 << block_bits blocks of one; 1 << cluster_bits of a pair, if its length does not say it.
  int block_bits = 0, cluster_bits = 0;
  int clusters_at_once = 0;  // on the GPU, in rungs 8 to 10
  int clusters_of_each = 1;  // pair, of these
  float scale;
  float* partial;  // [slot][rows of a pair][head_dim], and behind all of them m, l: [slot][rows of a pair][2]
  int64_t slots;  // in rungs 3 to 7 of all clusters, where several share a pair; in 8 to 10 clusters_at_once
  // 0 between launches: of each pair, [batch * kv_heads * row_tiles], there times the blocks of a cluster; by length
  // one of the items behind them, and those of groups of parts.
  int* counters;

  DEVICE int all_pairs() const { return batch * int(pairs.d); }
};

// The keys of one sequence.
struct Sequence {
  int len, begin;    // keys [begin, len) are seen by some row
  int first, tiles;  // tiles [first, first + tiles) have them; one that sees nothing if there are none
};

// A sequence's lengths as the device holds them. __ldcg: past L1, as the launch before this one may have written them
// after this one has read them already.
DEVICE int2 lengths(const Decode& a, int b) {
  return make_int2(a.seqlens_k ? __ldcg(a.seqlens_k + b) : a.kv_len, a.leftpad_k ? __ldcg(a.leftpad_k + b) : 0);
}

DEVICE Sequence sequence(const Decode& a, int2 lengths) {
  Sequence s;
  s.len = min(max(lengths.x, 0), a.kv_len);
  s.begin = max(lengths.y, 0);
  if (a.window) s.begin = max(s.begin, s.len - a.q_len - a.window + 1);
  s.first = min(s.begin, s.len) >> a.tile_bits;
  s.tiles = max(1, ((s.len + (1 << a.tile_bits) - 1) >> a.tile_bits) - s.first);
  return s;
}

// The bits of n < 1 << bits from the last one to the first.
DEVICE int reversed(int n, int bits) { return bits == 0 ? 0 : int(__brev(unsigned(n)) >> (32 - bits)); }

// Where a warp is in its block's share of the tiles: in a segment, some tiles of one pair.
struct Walk {
  int b, pair;          // of the sequence's pairs
  int kv_head, row_0;   // of the pair; its first row
  int tile, end;        // the tile, and the segment's end
  Sequence s;
  // In rungs with clusters: a warp's tiles are 1 << step_bits apart. In a batch-invariant call those of a leaf are, and
  // it has leaves [leaf, leaf_end).
  int step_bits = 0, leaf = 0, leaf_end = 0;
  // Where a share may have several segments, and is counted in units: tiles, or chunks of them.
  int chunk, pair_units;  // tiles of a unit, units of the pair
  int unit, units;        // the segment's first unit and how many it has
  int left, first_unit;   // units of the share behind this segment; of the whole work before this pair

  DEVICE void at(const Decode& a, int new_pair) {
    pair = new_pair;
    kv_head = a.row_tiles.quotient(pair);
    row_0 = pair - kv_head * int(a.row_tiles.d);  // times ROWS
  }
  DEVICE void cut(const Decode& a) {
    chunk = a.chunks ? ceil_div(s.tiles, a.chunks) : 1;
    pair_units = a.chunks ? ceil_div(s.tiles, chunk) : s.tiles;
  }
  DEVICE void segment(int u) {
    unit = u;
    units = min(left, pair_units - u);
    left -= units;
    tile = u * chunk;
    end = min((u + units) * chunk, s.tiles);
  }
  // The warp's next tile; behind the end if there is none. LEAVES: it may be of the next leaf.
  template <bool LEAVES>
  DEVICE void advance() {
    tile += 1 << step_bits;
    if (LEAVES && tile >= end && leaf + 1 < leaf_end) tile = reversed(++leaf, step_bits);
  }
  DEVICE bool more() const { return left > 0; }
  DEVICE void next_segment(const Decode& a) {
    first_unit += pair_units;
    if (pair + 1 < int(a.pairs.d)) {
      at(a, pair + 1);
    } else {
      at(a, 0);
      b = min(b + 1, a.batch - 1);  // not past the end, even where lengths change while they are read
      s = sequence(a, lengths(a, b));
      cut(a);
    }
    segment(0);
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// What is known of a row after some of its keys: O = sum P V, l = sum P with P = exp2(S - m). Two of them are merged as
// two tiles of FlashAttention are.
// ---------------------------------------------------------------------------------------------------------------------
DEVICE float fast_exp2(float x) {
#ifdef __CUDACC__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}

struct Part {
  float m = -INFINITY, l = 0.0f;
  float4 O = make_float4(0.0f, 0.0f, 0.0f, 0.0f);  // four columns
};

// Merges N parts into p.
template <int N>
DEVICE void merge(Part& p, const Part (&parts)[N]) {
  float m = p.m;
#pragma unroll
  for (int n = 0; n < N; ++n) m = fmaxf(m, parts[n].m);
  const float shift = m == -INFINITY ? 0.0f : m, rescale = fast_exp2(p.m - shift);
  p.m = m, p.l *= rescale, p.O.x *= rescale, p.O.y *= rescale, p.O.z *= rescale, p.O.w *= rescale;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float factor = fast_exp2(parts[n].m - shift);
    p.l = fmaf(factor, parts[n].l, p.l);
    p.O.x = fmaf(factor, parts[n].O.x, p.O.x), p.O.y = fmaf(factor, parts[n].O.y, p.O.y);
    p.O.z = fmaf(factor, parts[n].O.z, p.O.z), p.O.w = fmaf(factor, parts[n].O.w, p.O.w);
  }
}

// Merges parts get(begin) to get(end - 1), a few at a time: their loads are on the way together.
template <typename Get>
DEVICE Part merge_parts(int begin, int end, Get get) {
  constexpr int AT_ONCE = 8;
  Part p;
#pragma unroll 1
  for (int n = begin; n < end; n += AT_ONCE) {
    Part parts[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      if (n + i < end) parts[i] = get(n + i);
    }
    merge(p, parts);
  }
  return p;
}

// Merges N parts, a power of two, as the leaves of a tree: get(first) is its leftmost one.
template <int N, typename Get>
DEVICE Part merge_tree(Get get, int first = 0) {
  Part p[N];
#pragma unroll
  for (int i = 0; i < N; ++i) p[i] = get(first + i);
#pragma unroll
  for (int step = 1; step < N; step *= 2) {
#pragma unroll
    for (int i = 0; i < N; i += 2 * step) merge(p[i], {p[i + step]});
  }
  return p[0];
}
// The same of 1 << bits parts, at most 16. What is behind them is nothing.
template <typename Get>
DEVICE Part merge_tree_of(int bits, Get get) {
  if (bits <= 1) return merge_tree<2>(get);
  Part p = merge_tree<8>(get);
  if (bits == 4) merge(p, {merge_tree<8>(get, 8)});
  return p;
}

// Two 16-bit values in one register.
template <typename T>
DEVICE uint32_t pack(float low, float high) {
  const union {
    T pair[2];
    uint32_t bits;
  } u = {{from_float<T>(low), from_float<T>(high)}};
  return u.bits;
}
template <typename T>
DEVICE void store4(T* to, float4 x, float factor) {
  *reinterpret_cast<uint2*>(to) = make_uint2(pack<T>(x.x * factor, x.y * factor), pack<T>(x.z * factor, x.w * factor));
}
DEVICE void store4(float* to, float4 x, float factor) {
  *reinterpret_cast<float4*>(to) = make_float4(x.x * factor, x.y * factor, x.z * factor, x.w * factor);
}

// Where row `row` of a kv head is, in q or in out.
DEVICE int64_t offset_of(const Decode& a, const Strides& strides, int b, int kv_head, int row) {
  const int token = a.group.quotient(row), head = row - token * int(a.group.d);
  return b * strides.batch + token * strides.row + int64_t(kv_head * int(a.group.d) + head) * strides.head;
}

template <typename T>
DEVICE void write_out(const Decode& a, const Walk& w, int row, int e, const Part& p) {
  T* out = static_cast<T*>(a.out) + offset_of(a, a.out_strides, w.b, w.kv_head, row);
  store4(out + e, p.O, p.l == 0.0f ? 0.0f : 1.0f / p.l);
}

// As much of an SM's memory as there is becomes shared memory, so that two blocks fit.
template <auto kernel>
inline cudaError_t prefer_shared_memory() {
  static std::atomic<uint64_t> done{0};  // bit i: on GPU i
  int gpu;
  cudaError_t error = cudaGetDevice(&gpu);
  if (error != cudaSuccess || (done >> gpu & 1)) return error;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100);  // percent
  if (error == cudaSuccess) done |= uint64_t(1) << gpu;
  return error;
}

#ifndef DEPENDENT_LAUNCH
constexpr bool DEPENDENT = false;
DEVICE void wait_for_the_launch_before() {}
DEVICE void begin_the_next_launch() {}
DEVICE void prefetch_L2(const void*) {}

template <typename Arguments>
inline cudaError_t launch_kernel(void (*kernel)(Arguments), dim3 grid, int threads, int bytes, cudaStream_t stream,
                                 const Arguments& a) {
  kernel<<<grid, threads, bytes, stream>>>(a);
  return cudaGetLastError();
}
#endif

inline Decode make_decode(const View& q, const View& k, const View& v, const View& out, const int* seqlens_k,
                          const int* leftpad_k, const int* block_table, int max_pages, int window, int new_keys,
                          int chunks, float scale, float* partial, int slots, int* counters) {
  Decode a;
  a.q = q.data, a.q_strides = strides_of(q);
  a.k = k.data, a.k_strides = strides_of(k);
  a.v = v.data, a.v_strides = strides_of(v);
  a.out = out.data, a.out_strides = strides_of(out);
  a.seqlens_k = seqlens_k, a.leftpad_k = leftpad_k;
  a.block_table = block_table, a.table_stride = max_pages;
  a.batch = q.sizes[0], a.q_len = q.sizes[1], a.kv_heads = k.sizes[2];
  a.pages = k.sizes[0];
  a.page_size = Divisor(k.sizes[1]);
  a.kv_len = block_table ? max_pages * k.sizes[1] : k.sizes[1];
  a.group = Divisor(q.sizes[2] / k.sizes[2]);
  a.rows = a.q_len * (q.sizes[2] / k.sizes[2]);
  a.window = window, a.new_keys = new_keys, a.chunks = chunks;
  a.scale = scale;
  a.partial = partial, a.slots = slots, a.counters = counters;
  return a;
}
