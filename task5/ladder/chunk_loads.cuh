// The loads of a chunk: K and V of a block's share, in the order in which they are read, as far ahead as there are
// buffers.
#pragma once
#include "chunk_tile.cuh"

// By one thread, blocks of keys as they lie in the cache.
template <typename T, int D, int B_r>
DEVICE void load_blocks(const Tile& tile, Shared<D, B_r>& s) {
  constexpr int STAGES = Shared<D, B_r>::STAGES, SHARES = Shared<D, B_r>::SHARES;
  const Chunk& c = tile.c;
  Ring<STAGES> k, v;
  mbarrier_arrive_expect(&s.q_full, c.tokens * c.group * D * sizeof(T));
  for (int part = 0; part < D / 64; ++part)
    tma_load_box(s.Q + part * B_r * 64, &c.q_map, &s.q_full, tile.kv_head * c.group, tile.token_0, part, tile.b);
  const uint64_t policy = c.tiles == 1 ? EVICT_FIRST : EVICT_NORMAL;
  // In the order of use: K, K V, K V, ..., V; where consumers share the keys, K, K, K V, ..., V, V
  for (int j = tile.end - 1; j >= tile.first - SHARES; --j) {
    if (j >= tile.first) {
      mbarrier_wait(&s.k_empty[k.index], k.parity ^ 1);
      mbarrier_arrive_expect(&s.k_full[k.index], B_c * D * sizeof(T));
      tma_load(s.K[k.index], &c.k_map, &s.k_full[k.index], j * B_c, tile.kv_head, tile.b, policy);
      k.next();
    }
    if (j < tile.end - SHARES) {
      mbarrier_wait(&s.v_empty[v.index], v.parity ^ 1);
      mbarrier_arrive_expect(&s.v_full[v.index], B_c * D * sizeof(T));
      tma_load(s.V[v.index], &c.v_map, &s.v_full[v.index], (j + SHARES) * B_c, tile.kv_head, tile.b, policy);
      v.next();
    }
  }
  begin_the_next_launch();
}

// The same with GAPS, by a warp whose lanes each load a box: some keys of a page, 64 columns.
template <typename T, int D, int B_r>
DEVICE void load_boxes(const Tile& tile, Shared<D, B_r>& s) {
  constexpr int STAGES = Shared<D, B_r>::STAGES, SHARES = Shared<D, B_r>::SHARES;
  const Chunk& c = tile.c;
  Ring<STAGES> k, v;
  constexpr int PARTS = D / 64, OF_BLOCK = B_c / 16, HELD = 32 / OF_BLOCK;
  const int lane = threadIdx.x, part = lane % PARTS, key = lane / PARTS << c.box_bits;  // of a block, its first one
  // Each lane has the number of a page: of 16 keys of HELD blocks from j down, and of the HELD next ones.
  const auto number = [&](int j) {
    const int block = j - lane / OF_BLOCK, n = block * B_c + lane % OF_BLOCK * 16;
    if (!c.block_table) return tile.b;
    if (block < tile.first || n >= tile.keys) return -1;
    return __ldcg(c.block_table + int64_t(tile.b) * c.max_pages + n / c.page_size);
  };
  int now = 0, next = number(tile.end - 1);
  const bool loads = key < B_c;
  struct Place {
    int row, page;  // a page outside of the pool is loaded as zeros
  } at[SHARES + 1] = {};  // of this lane's keys of blocks j + SHARES to j
  const auto load = [&](uint16_t* block, const CUtensorMap& map, uint64_t* full, Place from) {
    if (lane == 0) mbarrier_arrive_expect(full, B_c * D * sizeof(T));
    __syncwarp();
    if (!loads) return;
    uint16_t* to = block + (part * B_c + key) * 64;
    if (c.tiles == 1) return load_box_once(to, &map, full, from.row, part, tile.kv_head, from.page);
    tma_load_box(to, &map, full, from.row, part, tile.kv_head, from.page);
  };
  if (lane == 0) {
    mbarrier_arrive_expect(&s.q_full, c.tokens * c.group * D * sizeof(T));
    for (int i = 0; i < PARTS; ++i)
      tma_load_box(s.Q + i * B_r * 64, &c.q_map, &s.q_full, tile.kv_head * c.group, tile.token_0, i, tile.b);
  }
#pragma unroll 1
  for (int j = tile.end - 1; j >= tile.first - SHARES; --j) {
    const int of_held = (tile.end - 1 - j) % HELD, row = j * B_c + key;
    if (of_held == 0) now = next, next = number(j - HELD);
    const int page = __shfl_sync(~0u, now, of_held * OF_BLOCK + key / 16);
    at[SHARES] = {c.block_table ? row % c.page_size : row, page};
    if (j >= tile.first) {
      mbarrier_wait(&s.k_empty[k.index], k.parity ^ 1);
      const unsigned missing = __ballot_sync(~0u, loads && unsigned(page) >= unsigned(c.pages));
      if (lane == 0) s.missing[k.index] = missing;
      load(s.K[k.index], c.k_map, &s.k_full[k.index], at[SHARES]);
      k.next();
    }
    if (j < tile.end - SHARES) {
      mbarrier_wait(&s.v_empty[v.index], v.parity ^ 1);
      load(s.V[v.index], c.v_map, &s.v_full[v.index], at[0]);
      v.next();
    }
#pragma unroll
    for (int i = 0; i < SHARES; ++i) at[i] = at[i + 1];
  }
  begin_the_next_launch();
}
