// Which tile, or which part of one, is a cluster's where lengths differ: a tile of a much longer sequence has several
// clusters. Lengths are known on the GPU alone, so each block looks at all of them.
#pragma once
#include "chunk_tile.cuh"
#include "longest_first.cuh"

// In blocks of so many keys: what a block takes to begin and end; what a part has at least.
constexpr int COUNTED = 128, START = 4, LEAST = 4;

// Of all tiles' keys, and starts, each of `at_once` clusters would have the same share. A tile has a cluster for each
// share; where there are fewer tiles than clusters not for a part of one, so that of tiles as long as each other no
// part waits for another one. Parts come first, then the longest tiles. By one warp.
DEVICE void find_item_by_length(const Chunk& c, Item& item) {
  const Attention& a = c.a;
  const int lane = threadIdx.x % 32, tiles = a.kv_heads * c.tiles;  // of a sequence
  int2 lengths[HELD];
  int blocks[HELD];
  unsigned sum = 0;
#pragma unroll
  for (int i = 0; i < HELD; ++i) lengths[i] = lengths_of(c, min(lane + 32 * i, a.batch - 1));
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    int keys = max(0, lengths[i].x - lengths[i].y);
    if (GAPS && c.window) keys = min(keys, c.window + a.q_len - 1);
    blocks[i] = keys / COUNTED;
    if (lane + 32 * i < a.batch) sum += blocks[i] + START;
  }
  sum = __reduce_add_sync(~0u, sum);
  const float of_a_block = __fdividef(c.at_once, float(sum) * tiles);
  const float rounding = tiles * a.batch < c.at_once ? 0.001f : 0.5f;
  int parts[HELD], items[HELD], group[HELD], of_lane = 0;
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    const float shares = (blocks[i] + START) * of_a_block;
    parts[i] = max(1, min(min(int(shares + rounding), MOST_CLUSTERS), blocks[i] / LEAST));
    if (BATCH_INVARIANT) parts[i] = 1 << (31 - __clz(parts[i]));
    group[i] = group_of(shares, parts[i] > 1);
    items[i] = lane + 32 * i < a.batch ? parts[i] * tiles : 0, of_lane += items[i];
  }
  const int nth = c.splits == 1 ? one_of_two(blockIdx.x, c.at_once) : blockIdx.x / c.splits;
  if (nth >= __reduce_add_sync(~0u, of_lane)) {
    if (lane == 0) item.clusters = 0;
    return;
  }
  const Place place = place_of(nth, items, group);
  if (lane != place.lane) return;
  int2 own;
  int clusters;
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    if (place.i == i) own = lengths[i], clusters = parts[i];
  }
  const int tile = (nth - place.first) / clusters, part = nth - place.first - tile * clusters;
  const int kv_head = tile / c.tiles;
  item.b = place.lane + 32 * place.i, item.kv_head = kv_head, item.of_head = tile - kv_head * c.tiles;
  item.cluster = part, item.clusters = clusters, item.first_part = nth - part, item.lengths = own;
}
