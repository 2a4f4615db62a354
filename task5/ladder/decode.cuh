// What every rung of decode computes, its arguments, and how the work is shared.
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

#include <cstdint>

#include "dtype.cuh"
#include "launch.cuh"
#include "tensor.cuh"

#define DEVICE __device__ __forceinline__

constexpr float LOG2_E = 1.44269504f;
constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr int KEYS = 16;           // of a tile that one warp computes
constexpr int B_c = WARPS * KEYS;  // keys of a tile

struct Decode {
  const void *q, *k, *v;
  void* out;
  Strides q_strides, k_strides, v_strides, out_strides;  // of k and v, batch: from page to page where there are pages
  const int *seqlens_k, *leftpad_k, *block_table;        // block_table: null without pages
  int64_t table_stride;
  int batch, heads, kv_heads, group, q_len, kv_len;  // kv_len: keys for which there is room
  int page_size, pages, window;
  int rows, row_tiles;     // rows of a kv head; pairs that share them
  int chunks;              // 0, or about how many chunks the keys of a pair are cut into, whatever the batch is
  float scale;
  float* partial;          // [slot][rows of a pair][head_dim], and behind all of them m, l: [slot][rows of a pair][2]
  int64_t slots;
  int* counters;           // [batch * kv_heads * row_tiles], 0 between launches
};

// The keys of one sequence.
struct Sequence {
  int len, begin;   // keys [begin, len) are seen by some row
  int first, tiles; // tiles [first, first + tiles) have them; one that sees nothing if there are none
  int chunk, units; // tiles of a unit of work, and how many of them
};

DEVICE Sequence sequence(const Decode& a, int b) {
  Sequence s;
  s.len = a.seqlens_k ? min(max(a.seqlens_k[b], 0), a.kv_len) : a.kv_len;
  s.begin = a.leftpad_k ? max(a.leftpad_k[b], 0) : 0;
  if (a.window) s.begin = max(s.begin, s.len - a.q_len - a.window + 1);
  s.first = min(s.begin, s.len) / B_c;
  s.tiles = max(1, ceil_div(s.len, B_c) - s.first);
  s.chunk = a.chunks ? ceil_div(s.tiles, a.chunks) : 1;
  s.units = ceil_div(s.tiles, s.chunk);
  return s;
}

// A block's share of the units, which are counted over chunks, then pairs, then sequences. All shares are as large, but
// for one unit, whatever lengths the sequences have: all blocks finish together.
struct Share {
  int total, blocks, size, larger;  // no more blocks than units; `larger` blocks have one more than `size`
  int begin, end;

  DEVICE explicit Share(int total) : total(total), blocks(min(total, int(gridDim.x))) {
    size = total / blocks, larger = total - size * blocks;
    begin = begin_of(blockIdx.x), end = begin_of(blockIdx.x + 1);
  }
  DEVICE int begin_of(int block) const { return block < blocks ? block * size + min(block, larger) : total; }
  DEVICE int owner(int unit) const {
    const int first = larger * (size + 1);  // of those of `size`
    return unit < first ? unit / (size + 1) : larger + (unit - first) / size;
  }
};

// Walks over the tiles of a block's share.
struct Walk {
  int b, pair, tile, end;     // the tile, and the end of this segment: a part of one pair's tiles
  int unit, units;            // the segment's first unit and how many it has
  int left, first_unit;       // units of the share behind this segment; of the whole work before this pair
  Sequence s;

  DEVICE void segment(int u) {
    unit = u;
    units = min(left, s.units - u);
    left -= units;
    tile = u * s.chunk;
    end = min((u + units) * s.chunk, s.tiles);
  }
  DEVICE bool more() const { return left > 0; }
  DEVICE void next_segment(const Decode& a) {
    first_unit += s.units;
    if (++pair == a.kv_heads * a.row_tiles) {
      pair = 0;
      s = sequence(a, ++b);
    }
    segment(0);
  }
  DEVICE bool whole() const { return units == s.units; }
};

// Finds a block's share, and its first tile. Every warp does so for itself.
DEVICE Share share_of(const Decode& a, Walk& w) {
  const int lane = threadIdx.x % 32, pairs = a.kv_heads * a.row_tiles;
  const bool alike = !a.seqlens_k && !a.leftpad_k;
  int total = 0;
  if (alike) {
    w.s = sequence(a, 0);
    total = w.s.units * a.batch;
  } else {
    for (int b = lane; b < a.batch; b += 32) total += sequence(a, b).units;
    for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(~0u, total, step);
  }
  const Share share(total * pairs);
  if (alike) {
    w.b = share.begin / (w.s.units * pairs);
    w.first_unit = w.b * w.s.units * pairs;
  } else {
    w.b = 0, w.first_unit = 0;
    for (int first = 0; first < a.batch; first += 32) {
      const int units = first + lane < a.batch ? sequence(a, first + lane).units * pairs : 0;
      int sum = units;  // up to this lane's sequence
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
      }
      const int before = __popc(__ballot_sync(~0u, w.first_unit + sum <= share.begin && first + lane < a.batch));
      const int skipped = __shfl_sync(~0u, sum, before > 0 ? before - 1 : 0);
      if (before > 0) w.b += before, w.first_unit += skipped;
      if (before < 32) break;
    }
    w.s = sequence(a, min(w.b, a.batch - 1));
  }
  w.pair = (share.begin - w.first_unit) / w.s.units;
  w.first_unit += w.pair * w.s.units;
  w.left = share.end - share.begin;
  w.segment(share.begin - w.first_unit);
  return share;
}

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
  float m, l;
  float4 O;

  DEVICE void merge(const Part& p) {
    const float m_new = fmaxf(m, p.m), shift = m_new == -INFINITY ? 0.0f : m_new;
    const float x = fast_exp2(m - shift), y = fast_exp2(p.m - shift);
    m = m_new;
    l = fmaf(x, l, y * p.l);
    O.x = fmaf(x, O.x, y * p.O.x), O.y = fmaf(x, O.y, y * p.O.y);
    O.z = fmaf(x, O.z, y * p.O.z), O.w = fmaf(x, O.w, y * p.O.w);
  }
};

// What the warps of a block exchange at the end of a chunk, in shared memory, a few columns at a time.
template <int ROWS, int HEAD_DIM>
struct Exchange {
  static constexpr int COLUMNS = HEAD_DIM < 2048 / ROWS ? HEAD_DIM : 2048 / ROWS;
  float O[WARPS][ROWS][COLUMNS];
  float m[WARPS][ROWS], l[WARPS][ROWS];
  float4 before_O[ROWS * HEAD_DIM / 4];  // of the chunks before; each thread has its own of them
  float2 before_ml[ROWS * HEAD_DIM / 4];
  bool last;
};

template <typename T>
DEVICE void store4(T* to, float4 x, float factor) {
  const union {
    T values[4];
    uint2 bits;
  } u = {{from_float<T>(x.x * factor), from_float<T>(x.y * factor), from_float<T>(x.z * factor),
          from_float<T>(x.w * factor)}};
  *reinterpret_cast<uint2*>(to) = u.bits;
}
DEVICE void store4(float* to, float4 x, float factor) {
  *reinterpret_cast<float4*>(to) = make_float4(x.x * factor, x.y * factor, x.z * factor, x.w * factor);
}

template <typename T, int HEAD_DIM>
DEVICE void write_out(const Decode& a, int b, int pair, int row, int e, const Part& p) {
  T* out = static_cast<T*>(a.out) + b * a.out_strides.batch + row / a.group * a.out_strides.row +
           (int64_t(pair / a.row_tiles) * a.group + row % a.group) * a.out_strides.head;
  store4(out + e, p.O, p.l == 0.0f ? 0.0f : 1.0f / p.l);
}

// The end of a chunk. Merges the warps' parts of columns [e_0, e_0 + COLUMNS), which are in x, then with the chunks
// before; writes them to out where the pair is done, else to the part's slot.
template <typename T, int ROWS, int HEAD_DIM>
DEVICE void merge_warps(const Decode& a, const Walk& w, Exchange<ROWS, HEAD_DIM>& x, int e_0, bool first_chunk,
                        bool segment_ends, int chunk) {
  constexpr int COLUMNS = Exchange<ROWS, HEAD_DIM>::COLUMNS, QUADS = COLUMNS / 4;
  const int row_0 = w.pair % a.row_tiles * ROWS, rows = min(ROWS, a.rows - row_0);
  const bool from_0 = w.unit == 0, fold = a.chunks && from_0;  // chunks of a later segment have to stay apart
  const bool done = segment_ends && w.whole();
  const int64_t slot = !a.chunks ? 2 * blockIdx.x + from_0 : w.first_unit + (from_0 ? 0 : chunk);
  for (int i = threadIdx.x; i < rows * QUADS; i += THREADS) {
    const int row = i / QUADS, e = 4 * (i % QUADS), own = i + e_0 / COLUMNS * ROWS * QUADS;
    Part p = {-INFINITY, 0.0f, make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp)
      p.merge({x.m[warp][row], x.l[warp][row], *reinterpret_cast<const float4*>(&x.O[warp][row][e])});
    if (fold && !first_chunk) {
      Part before = {x.before_ml[own].x, x.before_ml[own].y, x.before_O[own]};
      before.merge(p);
      p = before;
    }
    if (done) {
      write_out<T, HEAD_DIM>(a, w.b, w.pair, row_0 + row, e_0 + e, p);
    } else if (fold && !segment_ends) {
      x.before_O[own] = p.O, x.before_ml[own] = make_float2(p.m, p.l);
    } else {
      float4* O = reinterpret_cast<float4*>(a.partial + (slot * ROWS + row) * HEAD_DIM + e_0 + e);
      float2* ml = reinterpret_cast<float2*>(a.partial + a.slots * ROWS * HEAD_DIM + (slot * ROWS + row) * 2);
      __stcg(O, p.O);
      if (e_0 + e == 0) __stcg(ml, make_float2(p.m, p.l));
    }
  }
}

// The end of a segment that is not the whole pair. The last of the pair's blocks to come merges the parts, in order.
template <typename T, int ROWS, int HEAD_DIM>
DEVICE void merge_blocks(const Decode& a, const Share& share, const Walk& w, Exchange<ROWS, HEAD_DIM>& x) {
  constexpr int QUADS = HEAD_DIM / 4;
  const int row_0 = w.pair % a.row_tiles * ROWS, rows = min(ROWS, a.rows - row_0);
  const int first = share.owner(w.first_unit), last = share.owner(w.first_unit + w.s.units - 1);
  __threadfence();  // this thread's part is visible to all blocks before the block is counted
  __syncthreads();  // all of the block's are
  if (threadIdx.x == 0) {
    int* counter = &a.counters[w.b * a.kv_heads * a.row_tiles + w.pair];
    x.last = atomicAdd(counter, 1) == last - first;
    if (x.last) *counter = 0;  // for the next launch
    __threadfence();           // the other blocks' parts are read after the count
  }
  __syncthreads();
  if (!x.last) return;
  const int own = share.begin_of(first + 1) - w.first_unit;  // units that the first block has merged
  const int parts = a.chunks ? 1 + w.s.units - own : last - first + 1;
  for (int i = threadIdx.x; i < rows * QUADS; i += THREADS) {
    const int row = i / QUADS, e = 4 * (i % QUADS);
    Part p = {-INFINITY, 0.0f, make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
#pragma unroll 4
    for (int n = 0; n < parts; ++n) {
      const int64_t from = !a.chunks ? 2 * (first + n) + (n == 0) : w.first_unit + (n == 0 ? 0 : own + n - 1);
      const float* O = a.partial + (from * ROWS + row) * HEAD_DIM + e;
      const float* ml = a.partial + a.slots * ROWS * HEAD_DIM + (from * ROWS + row) * 2;
      const float2 m_l = __ldcg(reinterpret_cast<const float2*>(ml));
      p.merge({m_l.x, m_l.y, __ldcg(reinterpret_cast<const float4*>(O))});
    }
    write_out<T, HEAD_DIM>(a, w.b, w.pair, row_0 + row, e, p);
  }
}

// Rows of a pair: one read of K and V serves as many. At head_dim 256 O_i leaves no registers for more than 16.
inline int rows_of_a_pair(int rows, int head_dim) { return rows > 16 && head_dim <= 128 ? 32 : 16; }

#ifndef DEPENDENT_LAUNCH
DEVICE void wait_for_the_launch_before() {}

template <typename Kernel, typename Arguments>
inline cudaError_t launch_kernel(Kernel kernel, int blocks, int threads, int bytes, cudaStream_t stream,
                                 const Arguments& a) {
  kernel<<<blocks, threads, bytes, stream>>>(a);
  return cudaGetLastError();
}
#endif

inline Decode make_decode(const View& q, const View& k, const View& v, const View& out, const int* seqlens_k,
                          const int* leftpad_k, const int* block_table, int max_pages, int window, int chunks,
                          float scale, float* partial, int slots, int* counters) {
  Decode a;
  a.q = q.data, a.q_strides = strides_of(q);
  a.k = k.data, a.k_strides = strides_of(k);
  a.v = v.data, a.v_strides = strides_of(v);
  a.out = out.data, a.out_strides = strides_of(out);
  a.seqlens_k = seqlens_k, a.leftpad_k = leftpad_k;
  a.block_table = block_table, a.table_stride = max_pages;
  a.batch = q.sizes[0], a.q_len = q.sizes[1], a.heads = q.sizes[2], a.kv_heads = k.sizes[2];
  a.page_size = k.sizes[1], a.pages = k.sizes[0];
  a.kv_len = block_table ? max_pages * a.page_size : a.page_size;
  a.group = a.heads / a.kv_heads, a.rows = a.group * a.q_len;
  a.row_tiles = ceil_div(a.rows, rows_of_a_pair(a.rows, int(q.sizes[3])));
  a.window = window, a.chunks = chunks;
  a.scale = scale;
  a.partial = partial, a.slots = slots, a.counters = counters;
  return a;
}
