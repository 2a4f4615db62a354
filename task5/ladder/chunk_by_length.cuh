// Which tile, or which part of one, is a cluster's where lengths differ: a tile of a much longer sequence has several
// clusters. Lengths are known on the GPU alone, so each block looks at all of them.
#pragma once
#include "chunk_tile.cuh"

constexpr int HELD = 4;  // sequences of a lane
// A block begins and ends in the time of so many keys; a part has so many at least.
constexpr int KEYS_OF_A_START = 1024, LEAST_KEYS = 512;

// Of all tiles' keys, and starts, each of `at_once` clusters would have the same share. A tile has a cluster for each
// share; where there are fewer tiles than clusters not for a part of one, so that of tiles as long as each other no
// part waits for another one. Parts come first, then tiles of more than a share, then the rest. By one warp.
DEVICE void find_item_by_length(const Chunk& c, Item& item) {
  const Attention& a = c.a;
  const int lane = threadIdx.x % 32, tiles = a.kv_heads * c.tiles;  // of a sequence
  int2 lengths[HELD];
  int keys[HELD], sum = 0;
#pragma unroll
  for (int i = 0; i < HELD; ++i) lengths[i] = lengths_of(c, min(lane + 32 * i, a.batch - 1));
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    keys[i] = max(0, lengths[i].x - lengths[i].y);
    if (GAPS && c.window) keys[i] = min(keys[i], c.window + a.q_len - 1);
    if (lane + 32 * i < a.batch) sum += keys[i] + KEYS_OF_A_START;
  }
  const float all = __reduce_add_sync(~0u, sum), share = all * tiles / c.at_once;
  const float rounding = tiles * a.batch < c.at_once ? 0.001f : 0.5f;
  int parts[HELD], group[HELD];
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    const float shares = (keys[i] + KEYS_OF_A_START) / share;
    parts[i] = max(1, min(min(int(shares + rounding), MOST_CLUSTERS), keys[i] / LEAST_KEYS));
    if (BATCH_INVARIANT) parts[i] = 1 << (31 - __clz(parts[i]));
    group[i] = parts[i] > 1 ? 0 : shares > 1.0f ? 1
                                                : 2;
    if (lane + 32 * i >= a.batch) group[i] = -1;
  }
  // The 32 sequences whose items of a group this one is among.
  const int nth = blockIdx.x / c.splits;
  int before = 0, first = 0, first_b = -1, items = 0, clusters = 1;
  int2 own = make_int2(0, 0);
#pragma unroll 1
  for (int now = 0; now < 3; ++now) {
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      if (32 * i >= a.batch) continue;
      const int of_lane = group[i] == now ? parts[i] * tiles : 0, up_to = before + __reduce_add_sync(~0u, of_lane);
      const bool among = before <= nth && nth < up_to;
      if (among) first = before, first_b = 32 * i, items = of_lane, clusters = parts[i], own = lengths[i];
      before = up_to;
    }
  }
  if (first_b < 0) {
    if (lane == 0) item.clusters = 0;
    return;
  }
  int up_to = items;  // this lane's
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, up_to, step);
    if (lane >= step) up_to += other;
  }
  const int from = __popc(__ballot_sync(~0u, first + up_to <= nth));  // its lane
  first += __shfl_sync(~0u, up_to - items, from), clusters = __shfl_sync(~0u, clusters, from);
  own = make_int2(__shfl_sync(~0u, own.x, from), __shfl_sync(~0u, own.y, from));
  if (lane > 0) return;
  const int tile = (nth - first) / clusters, part = nth - first - tile * clusters, kv_head = tile / c.tiles;
  item.b = first_b + from, item.kv_head = kv_head, item.of_head = tile - kv_head * c.tiles;
  item.cluster = part, item.clusters = clusters, item.first_part = nth - part, item.lengths = own;
}
