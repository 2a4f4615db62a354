// A persistent step's attention. Keys and values come through the ring, tile by tile, like weights: they are on their
// way before q is. A block has some keys of a sequence, and all query heads of a group that share a read of them.
#pragma once
#include <cuda_runtime.h>

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
};

template <typename T, int X_ROWS, int D>
DEVICE void load_keys(const Model& m, const int* lengths, int layer, Shared<X_ROWS>& mem, Stage& stage) {
  // One warp keys, one values.
  static_assert(LOADERS == 2 && 2 * TILE<T, D> <= SLOT);
  const int loader = threadIdx.x / 32 % LOADERS;
  stage.in_flight = IN_FLIGHT * (SLOT / (2 * TILE<T, D>));
  for (int i = blockIdx.x; i < m.items(); i += gridDim.x) {
    const Item<T, D> item(m, lengths, i);
    for (int key = item.begin; key < item.end; key += KEYS<T, D>) {
      if (threadIdx.x % 32 == 0) {
        wait_until_free(mem, stage);
        mbarrier_arrive_expect(&mem.full[stage.index], TILE<T, D>);
        tma_load(stage.at(mem.stages) + loader * TILE<T, D>, loader ? &m.v_map : &m.k_map, &mem.full[stage.index], key,
                 item.kv_head, layer * m.layer_stride + item.b, EVICT_FIRST);
      }
      stage.next();
    }
  }
  stage.in_flight = IN_FLIGHT;
}

// The newest token comes to shared memory, once for all warps: words do not stay in L1. cos and sin do not wait for it.
template <bool TAGGED, typename T, int D>
DEVICE void load_newest(const Model& m, const Item<T, D>& item, Newest<T, D>& newest, unsigned tag) {
  constexpr int VECTOR = 16 / sizeof(T), VECTORS = D / VECTOR, FOURS = D / 8;
  using Vector = Values<T, VECTOR, TAGGED>;
  const int vectors = (item.heads + 2) * VECTORS, angles = m.cos ? 2 * FOURS : 0;
  for (int n = threadIdx.x; n < vectors + angles; n += COMPUTE) {
    if (n >= vectors) {
      const int four = (n - vectors) % FOURS;
      const bool is_cos = n - vectors < FOURS;
      const float* from = (is_cos ? m.cos : m.sin) + int64_t(item.len - 1) * (D / 2);
      reinterpret_cast<float4*>(is_cos ? newest.cos : newest.sin)[four] = reinterpret_cast<const float4*>(from)[four];
      continue;
    }
    const int head = n / VECTORS, e = n % VECTORS * VECTOR, which = head - item.heads;
    const int at = which < 0 ? item.head + head : m.heads + which * m.kv_heads + item.kv_head;
    const auto* from = static_cast<const typename Vector::Source*>(m.qkv) +
                       (int64_t(item.b) * (m.heads + 2 * m.kv_heads) + at) * D + e;
    Vector x;
    x.ask(from), x.wait(from, tag);
    T* to = which < 0 ? newest.q[head] : newest.k;
    if (which == 1) to = newest.v;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) to[e + i] = x[i];
  }
}

// The last block of a pair to come merges its parts, which are words: the others are written, or on their way.
template <bool TAGGED, typename T, int D>
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
    for (int e = 0; e < 4; ++e) leave<TAGGED>(m.o, out + e, from_float<T>(all.O[e] / all.l), tag);
  }
}

// tag_read: of q, k and v; tag_written: of o, and of the parts of those items that are merged, of any number of rows.
template <typename T, int X_ROWS, int D>
DEVICE void attend(const Model& m, int layer, Item<T, D> item, Memory<T, X_ROWS, D>& mem, Stage& stage,
                   unsigned tag_read, unsigned tag_written) {
  constexpr bool WORDS = TAGGED<X_ROWS>;
  constexpr int VECTORS = D * sizeof(T) / 16;
  using Attention = AttentionOf<T, D>;

  for (int i = blockIdx.x; i < m.items(); i += gridDim.x) {
    if (i != blockIdx.x) item = Item<T, D>(m, mem.lengths, i);
    if (item.split >= item.splits) continue;
    const bool newest = item.end == item.len;
    load_newest<WORDS>(m, item, mem.parts.newest, tag_read);
    meet();
    Attention attention(mem.parts, item.heads, newest, m.cos != nullptr, m.scale * 1.44269504f);  // log2(e)
    meet();  // consumed
#pragma unroll 1
    for (int first = item.begin; first < item.end; first += KEYS<T, D>) {
      mbarrier_wait(&mem.ring.full[stage.index], stage.parity);
      attention.add(stage.at(mem.ring.stages), first, min(item.end, item.len - 1));
      __syncwarp();
      if (threadIdx.x % 32 == 0) mbarrier_arrive(&mem.ring.empty[stage.index]);
      stage.next();
    }
    attention.put(mem.parts, item.heads);
    meet();  // the warps' parts complete
    if (newest && item.set == m.sets - 1 && threadIdx.x < 2 * VECTORS) {  // to a place that is masked for all others
      const int64_t row = (int64_t(layer) * m.layer_stride + item.b) * m.max_seq + item.len - 1;
      const int64_t place = (row * m.kv_heads + item.kv_head) * VECTORS + threadIdx.x % VECTORS;
      const bool key = threadIdx.x < VECTORS;
      static_cast<uint4*>(key ? m.k_cache : m.v_cache)[place] =
          reinterpret_cast<const uint4*>(key ? mem.parts.k : mem.parts.v)[threadIdx.x % VECTORS];
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
        leave<WORDS>(m.o, (int64_t(item.b) * m.heads + item.head) * D + n, from_float<T>(all.O[0] / all.l),
                     tag_written);
      } else {
        const int64_t slot = int64_t(i) * m.shared_by + h;
        put_word(&m.partial[slot * D + column], all.O[0], tag_written);
        if (column < 2) put_word(m.partial_ml<D>() + 2 * slot + column, column == 0 ? all.m : all.l, tag_written);
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
    if (mem.last) merge<WORDS>(m, item, tag_written);
  }
}
