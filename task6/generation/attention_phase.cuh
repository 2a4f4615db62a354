// A persistent step's attention. Keys and values come through the ring, tile by tile, like weights: they are on their
// way before q is. A block has some keys of a sequence, and all query heads of a group that share a read of them.
#pragma once
#include <cuda_runtime.h>

#include "grid.cuh"
#include "model.cuh"

template <typename T, int D>
constexpr int KEYS = AttentionOf<T, D>::KEYS;
template <typename T, int D>
constexpr int TILE = AttentionOf<T, D>::TILE;

// A share of a sequence's keys, for some query heads of a kv head.
template <typename T, int D>
struct Item {
  int pair, split, splits;            // the items of a pair are merged
  int b, kv_head, head, heads, set;   // heads from `head` on
  int len, begin, end;                // keys: with the new one, and this item's

  DEVICE Item(const Model& m, const int* lengths, int i) {
    pair = i / m.splits, split = i - pair * m.splits;
    const int kv_and_b = pair / m.sets, group = m.heads / m.kv_heads;
    set = pair - kv_and_b * m.sets, b = kv_and_b / m.kv_heads, kv_head = kv_and_b - b * m.kv_heads;
    head = kv_head * group + set * m.shared_by, heads = min(m.shared_by, group - set * m.shared_by);
    len = lengths[b] + 1;
    const int tiles = ceil_div(len, KEYS<T, D>);
    splits = min(m.splits, tiles);
    begin = tiles * split / splits * KEYS<T, D>;
    end = split < splits ? min(len, tiles * (split + 1) / splits * KEYS<T, D>) : begin;
  }
  DEVICE bool has_newest() const { return begin < end && end == len; }
};

// One thread.
template <typename T, int X_ROWS, int D>
DEVICE void load_keys(const Model& m, const int* lengths, int layer, int phase, Shared<X_ROWS>& mem, Stage& stage) {
  static_assert(2 * TILE<T, D> <= STAGE_BYTES);
  constexpr int of_later_ones = IN_FLIGHT * (STAGE_BYTES / (2 * TILE<T, D>));
  for (int i = blockIdx.x; i < m.items(); i += gridDim.x) {
    const Item<T, D> item(m, lengths, i);
    for (int key = item.begin; key < item.end; key += KEYS<T, D>) {
      wait_until_free(mem, stage, in_flight(mem, stage, phase, of_later_ones));
      uint64_t* full = &mem.full[stage.index];
      uint8_t* to = stage.at(mem.stages);
      mbarrier_arrive_expect(full, 2 * TILE<T, D>);
      const int b = layer * m.layer_stride + item.b;
      tma_load(to, &m.k_map, full, key, item.kv_head, b, EVICT_FIRST);
      tma_load(to + TILE<T, D>, &m.v_map, full, key, item.kv_head, b, EVICT_FIRST);
      stage.next();
    }
  }
}

// 16 bytes of each half of a head of the newest token, with RoPE unless it is of v.
template <typename T, int D>
struct Halves {
  static constexpr int VECTOR = 16 / sizeof(T), EACH = D / 2 / VECTOR;  // of a half
  Vector16<T> left, right;

  // head: of q, then k, then v; i: which 16 bytes.
  DEVICE Halves(const Model& m, int b, int head, int i, int position, unsigned tag) {
    using From = Values<T, VECTOR>;
    const bool rotated = m.cos && head < m.heads + m.kv_heads;
    float cos[VECTOR] = {}, sin[VECTOR] = {};
    if (rotated) {  // they do not wait for it
      const int64_t angles = int64_t(position) * (D / 2) + i * VECTOR;
      load(cos, m.cos + angles), load(sin, m.sin + angles);
    }
    const int64_t row = int64_t(b) * (m.heads + 2 * m.kv_heads) + head;
    const auto* from = static_cast<const typename From::Source*>(m.qkv) + row * D + i * VECTOR;
    From x, y;
    x.ask(from), y.ask(from + D / 2);
    x.wait(from, tag), y.wait(from + D / 2, tag);
#pragma unroll
    for (int n = 0; n < VECTOR; ++n) {
      const float a = to_float(x[n]), b = to_float(y[n]);
      left.values[n] = rotated ? from_float<T>(a * cos[n] - b * sin[n]) : x[n];
      right.values[n] = rotated ? from_float<T>(b * cos[n] + a * sin[n]) : y[n];
    }
  }
  static DEVICE void load(float (&to)[VECTOR], const float* from) {
#pragma unroll
    for (int n = 0; n < VECTOR; n += 4) {
      const float4 x = *reinterpret_cast<const float4*>(from + n);
      to[n] = x.x, to[n + 1] = x.y, to[n + 2] = x.z, to[n + 3] = x.w;
    }
  }
  DEVICE void put(void* to, int i) const {
    static_cast<uint4*>(to)[i] = left.bits, static_cast<uint4*>(to)[EACH + i] = right.bits;
  }
};

// The newest token comes to shared memory, once for all warps: words do not stay in L1.
template <typename T, int D>
DEVICE void load_newest(const Model& m, const Item<T, D>& item, Newest<T, D>& newest, unsigned tag) {
  using Two = Halves<T, D>;
  const int heads = item.heads + (item.has_newest() ? 2 : 0);
  for (int n = threadIdx.x; n < heads * Two::EACH; n += COMPUTE) {
    const int head = n / Two::EACH, which = head - item.heads;
    const int at = which < 0 ? item.head + head : m.heads + which * m.kv_heads + item.kv_head;
    T* to = which == 0 ? newest.k : newest.v;
    if (which < 0) to = newest.q[head];
    Two(m, item.b, at, n % Two::EACH, item.len - 1, tag).put(to, n % Two::EACH);
  }
}

// Where the newest key, or value, of an item is in a layer's cache.
template <typename T, int D>
DEVICE T* newest_place(const Model& m, int layer, const Item<T, D>& item, bool is_v) {
  const int64_t row = (int64_t(layer) * m.layer_stride + item.b) * m.max_seq + item.len - 1;
  return static_cast<T*>(is_v ? m.v_cache : m.k_cache) + (row * m.kv_heads + item.kv_head) * D;
}

// The newest keys and values into a layer's caches where several sets read them, by one warp, after all have done so.
template <typename T, int D>
DEVICE void append_later(const Model& m, const int* lengths, int layer, unsigned tag) {
  using Two = Halves<T, D>;
  static_assert(2 * Two::EACH <= 32);
  const int n = int(threadIdx.x) - (COMPUTE - 32);
  if (n < 0 || n >= 2 * Two::EACH) return;
  const bool is_v = n >= Two::EACH;
  for (int i = blockIdx.x; i < m.items(); i += gridDim.x) {
    const Item<T, D> item(m, lengths, i);
    if (!item.has_newest() || item.set < m.sets - 1) continue;
    const int head = m.heads + is_v * m.kv_heads + item.kv_head;
    const Two x(m, item.b, head, n % Two::EACH, item.len - 1, tag);
    x.put(newest_place(m, layer, item, is_v), n % Two::EACH);
  }
}

// The last block of a pair to come merges its parts, which are words: the others are written, or on their way.
template <Arrival ARRIVAL, typename T, int D>
DEVICE void merge(const Model& m, const Item<T, D>& item, unsigned tag) {
  constexpr int AT_A_TIME = 4;  // parts
  const Word<float>* partial_ml = m.partial_ml<D>();
  // Four lanes have the same four columns, each of every fourth split.
  for (int n = threadIdx.x / 4; n < item.heads * D / 4; n += COMPUTE / 4) {
    const int h = 4 * n / D, column = 4 * n % D;
    Part<4> all;
#pragma unroll 1
    for (int first = threadIdx.x % 4; first < item.splits; first += 4 * AT_A_TIME) {
      const auto slot = [&](int k) {
        const int split = min(first + 4 * k, item.splits - 1);
        return (int64_t(item.pair) * m.splits + split) * m.shared_by + h;
      };
      const auto ml_at = [&](int k) { return partial_ml + 2 * slot(k); };
      const auto O_at = [&](int k) { return m.partial + slot(k) * D + column; };
      Values<float, 2> ml[AT_A_TIME];
      Values<float, 4> O[AT_A_TIME];
#pragma unroll
      for (int k = 0; k < AT_A_TIME; ++k) ml[k].ask(ml_at(k)), O[k].ask(O_at(k));
#pragma unroll
      for (int k = 0; k < AT_A_TIME; ++k) ml[k].wait(ml_at(k), tag), O[k].wait(O_at(k), tag);
      float top = -INFINITY;
#pragma unroll
      for (int k = 0; k < AT_A_TIME; ++k) top = fmaxf(top, ml[k][0]);
      float l = 0.0f, sum[4] = {};
#pragma unroll
      for (int k = 0; k < AT_A_TIME; ++k) {
        const float factor = first + 4 * k < item.splits ? exp2f(ml[k][0] - top) : 0.0f;  // each has keys
        l += ml[k][1] * factor;
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[e] += O[k][e] * factor;
      }
      all.add(top, l, sum);
    }
#pragma unroll
    for (int step = 1; step <= 2; step *= 2) all.add_lanes(step);
    if (threadIdx.x % 4 > 0) continue;
    const int64_t out = (int64_t(item.b) * m.heads + item.head) * D + 4 * n;
#pragma unroll
    for (int e = 0; e < 4; ++e) leave<ARRIVAL>(m.o, out + e, from_float<T>(all.O[e] / all.l), tag);
  }
}

template <typename T, int X_ROWS, int D>
DEVICE void attend(const Model& m, int layer, Item<T, D> item, Memory<T, X_ROWS, D>& mem, Stage& stage,
                   const Grid& grid) {
  constexpr int VECTORS = Newest<T, D>::VECTORS;
  using Attention = AttentionOf<T, D>;

  for (int i = blockIdx.x; i < m.items(); i += gridDim.x) {
    if (i != blockIdx.x) item = Item<T, D>(m, mem.lengths, i);
    if (item.split >= item.splits) continue;
    load_newest(m, item, mem.parts.newest, grid.tag_read());
    meet();
    if (threadIdx.x == 0) atomicExch(&mem.ring.phase, grid.phases);
    Attention attention(mem.parts.newest, item.heads, m.scale * 1.44269504f);  // log2(e)
#pragma unroll 1
    for (int first = item.begin; first < item.end; first += KEYS<T, D>) {
      mbarrier_wait(&mem.ring.full[stage.index], stage.parity);
      uint8_t* tile = stage.at(mem.ring.stages);
      if (first + KEYS<T, D> >= item.len) {
        put_into_tile<KEYS<T, D>>(tile, item.len - 1 - first, mem.parts.newest);
        meet();
      }
      attention.add(tile, first, item.end);
      __syncwarp();
      if (threadIdx.x % 32 == 0) mbarrier_arrive(&mem.ring.empty[stage.index]);
      stage.next();
    }
    attention.put(mem.parts, item.heads);
    meet();  // the warps' parts complete
    if (m.sets == 1 && item.has_newest() && threadIdx.x < 2 * VECTORS) {
      const int i = threadIdx.x % VECTORS;
      const bool is_v = threadIdx.x >= VECTORS;
      reinterpret_cast<uint4*>(newest_place(m, layer, item, is_v))[i] = mem.parts.newest.vector(is_v, i);
    }
    for (int n = threadIdx.x; n < item.heads * D; n += COMPUTE) {
      const int h = n / D, column = n % D;
      Part<1> all;
#pragma unroll
      for (int part = 0; part < Attention::PARTS; ++part) {
        const float2 ml = mem.parts.ml[part][h];
        all.add(ml.x, ml.y, {mem.parts.O[part][h][column]});
      }
      if (item.splits == 1) {
        leave<ARRIVAL<X_ROWS>>(m.o, (int64_t(item.b) * m.heads + item.head) * D + n, from_float<T>(all.O[0] / all.l),
                               grid.tag_written());
      } else {
        const int64_t slot = int64_t(i) * m.shared_by + h;
        put_word(&m.partial[slot * D + column], all.O[0], grid.tag_written());
        if (column < 2)
          put_word(m.partial_ml<D>() + 2 * slot + column, column == 0 ? all.m : all.l, grid.tag_written());
      }
    }
    meet();  // the warps' parts consumed
    if (item.splits == 1) continue;
    if (threadIdx.x == 0) {
      int* counter = &m.counters[MERGED * APART + item.pair];
      mem.last = atomicAdd(counter, 1) == (layer + 1) * item.splits - 1;
      if (mem.last && layer == m.layer_count - 1) *counter = 0;  // for the next step
    }
    meet();
    if (mem.last) merge<ARRIVAL<X_ROWS>>(m, item, grid.tag_written());
  }
}
