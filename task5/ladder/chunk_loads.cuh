// The loads of a chunk: K and V of a block's share, in the order in which they are read, as far ahead as there are
// buffers.
#pragma once
#include "chunk_tile.cuh"

// By one thread, blocks of keys as they lie in the cache.
template <typename T, int D, int B_r>
DEVICE void load_blocks(const Tile<Shared<D, B_r>::B_c>& tile, Shared<D, B_r>& s) {
  constexpr int SHARES = Shared<D, B_r>::SHARES, B_c = Shared<D, B_r>::B_c;
  const Chunk& c = tile.c;
  Ring<Shared<D, B_r>::STAGES> k;
  Ring<Shared<D, B_r>::V_STAGES> v;
  mbarrier_arrive_expect(&s.q_full, c.tokens * c.group * D * sizeof(T));
  for (int part = 0; part < D / 64; ++part)
    tma_load_box(s.Q + part * B_r * 64, &c.q_map, &s.q_full, tile.kv_head * c.group, tile.token_0, part, tile.b);
  const uint64_t policy = c.tiles == 1 ? EVICT_FIRST : EVICT_NORMAL;
  // In the order of use: K, K V, K V, ..., V; where consumers share the keys, K, K, K V, ..., V, V
  const int blocks = tile.end - tile.first;
  for (int nth = 0; nth < blocks + SHARES; ++nth) {
    if (nth < blocks) {
      const int row = tile.template read<SHARES>(nth) * B_c;
      mbarrier_wait(&s.k_empty[k.index], k.parity ^ 1);
      mbarrier_arrive_expect(&s.k_full[k.index], B_c * D * sizeof(T));
      tma_load(s.K[k.index], &c.k_map, &s.k_full[k.index], row, tile.kv_head, tile.b, policy);
      k.next();
    }
    if (nth >= SHARES) {
      const int row = tile.template read<SHARES>(nth - SHARES) * B_c;
      mbarrier_wait(&s.v_empty[v.index], v.parity ^ 1);
      mbarrier_arrive_expect(&s.v_full[v.index], B_c * D * sizeof(T));
      tma_load(s.V[v.index], &c.v_map, &s.v_full[v.index], row, tile.kv_head, tile.b, policy);
      v.next();
    }
  }
  begin_the_next_launch();
}

// Each lane of a warp has the number of a page: of 16 keys of some blocks from the nth on.
template <int SHARES, int B_c>
DEVICE int page_number(const Tile<B_c>& tile, int nth) {
  constexpr int OF_BLOCK = B_c / 16;
  const int lane = threadIdx.x % 32;
  nth += lane / OF_BLOCK;
  const int key = tile.template read<SHARES>(nth) * B_c + lane % OF_BLOCK * 16;
  if (nth >= tile.end - tile.first || key >= tile.keys) return -1;
  return __ldcg(tile.c.block_table + int64_t(tile.b) * tile.c.max_pages + tile.page_of(key));
}

// The same from pages, K by one warp and V by another, whose lanes each load a box: some keys of a page, 64 columns.
// `next` is page_number() of the first blocks.
template <typename T, int D, int B_r>
DEVICE void load_boxes(const Tile<Shared<D, B_r>::B_c>& tile, Shared<D, B_r>& s, int next) {
  constexpr int B_c = Shared<D, B_r>::B_c;
  constexpr int OF_BLOCK = B_c / 16, HELD = 32 / OF_BLOCK;  // page numbers of a block; blocks
  const Chunk& c = tile.c;
  const bool of_K = threadIdx.x < 32;
  const CUtensorMap& map = of_K ? c.k_map : c.v_map;
  uint64_t *full = of_K ? s.k_full : s.v_full, *empty = of_K ? s.k_empty : s.v_empty;
  constexpr int PARTS = D / 64, STAGES = Shared<D, B_r>::STAGES, SHARES = Shared<D, B_r>::SHARES;
  const int lane = threadIdx.x % 32, part = lane % PARTS;
  const int key = lane / PARTS << c.box_bits;  // of a block, this lane's first one
  const bool loads = key < B_c;
  const int blocks = tile.end - tile.first;
  int now = 0;
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect(&s.q_full, c.tokens * c.group * D * sizeof(T));
    for (int i = 0; i < PARTS; ++i)
      tma_load_box(s.Q + i * B_r * 64, &c.q_map, &s.q_full, tile.kv_head * c.group, tile.token_0, i, tile.b);
  }
  const int buffers = of_K ? STAGES : Shared<D, B_r>::V_STAGES;
  int index = 0, parity = 0;  // as of a Ring
  if (!of_K) {
    mbarrier_wait(&s.k_full[0], 0);  // the first K_j would come later if V_j were asked for beside them
    if (blocks > STAGES) barrier_arrive(ARRIVED, 64);
  }
#pragma unroll 1
  for (int nth = 0; nth < blocks; ++nth) {
    const int j = tile.template read<SHARES>(nth), of_held = nth % HELD;
    if (of_held == 0) now = next, next = page_number<SHARES>(tile, nth + HELD);
    // A page outside of the pool is loaded as zeros.
    const int page = __shfl_sync(~0u, now, of_held * OF_BLOCK + key / 16);
    const int row = j * B_c + key - tile.page_of(j * B_c + key) * c.page_size;
    const unsigned missing = __ballot_sync(~0u, loads && unsigned(page) >= unsigned(c.pages));
    if (of_K && nth == STAGES) barrier_sync(ARRIVED, 64);  // the other warp is done with the buffer's barrier
    mbarrier_wait(&empty[index], parity ^ 1);
    if (lane == 0) {
      if (of_K) s.missing[index] = missing;
      mbarrier_arrive_expect(&full[index], B_c * D * sizeof(T));
    }
    __syncwarp();
    if (loads) {
      uint16_t* to = (of_K ? s.K[index] : s.V[index]) + (part * B_c + key) * 64;
      if (c.tiles == 1) {
        load_box_once(to, &map, &full[index], row, part, tile.kv_head, page);
      } else {
        tma_load_box(to, &map, &full[index], row, part, tile.kv_head, page);
      }
    }
    if (++index == buffers) index = 0, parity ^= 1;
  }
  begin_the_next_launch();
}
