// The warp of rung 5 that loads: K_j, V_j, K_j+1, ... of the block's tiles, by TMA, as far ahead as there are buffers.
#pragma once
#include "keys_as_rows.cuh"

template <int D, int N>
struct Producer {
  using Memory = Shared<D, N>;
  static constexpr int PARTS = D / 64, AHEAD = 3, HELD = 32 * 16 / Memory::KEYS;
  const Arguments& c;
  Memory& mem;
  Item item;
  int boxes, key, part;  // of a tile; this lane's: its first key and its 64 columns
  int index = 0, parity = 0;  // of the ring
  // Each lane has the number of a page: of tiles `held` and on, and of the HELD tiles behind them.
  int held = 0, now = 0, next = 0;

  DEVICE Producer(const Arguments& c, Memory& mem) : c(c), mem(mem), item(c, blockIdx.x, N) {
    const int lane = threadIdx.x % 32;
    boxes = (Memory::KEYS >> c.box_bits) * PARTS;
    key = (lane / PARTS) << c.box_bits, part = lane % PARTS;
  }
  DEVICE bool loads() const { return threadIdx.x % 32 < boxes; }

  // Where this lane's keys of a tile are. A page outside of the tensor is loaded as zeros.
  struct Place {
    int row, page;
  };
  DEVICE Place place(const Sequence& s, int tile) {
    const int j = (s.first + tile) * Memory::KEYS + key;
    if (!c.a.block_table) return {j, item.b};
    if (tile - held == HELD) held = tile, now = next, next = number(page_of(s, held + HELD));
    const int page = __shfl_sync(~0u, now, (tile - held) * (Memory::KEYS / 16) + key / 16);
    return {c.a.page_size.remainder(j), page};
  }
  // Where the number is of the page of the 16 keys number threadIdx.x % 32 from a tile on; null past the end.
  DEVICE const int* page_of(const Sequence& s, int tile) const {
    const int j = (s.first + tile) * Memory::KEYS + threadIdx.x % 32 * 16;
    if (!c.a.block_table || j >= s.len) return nullptr;
    return c.a.block_table + item.b * c.a.table_stride + c.a.page_size.quotient(j);
  }
  static DEVICE int number(const int* page) { return page ? __ldcg(page) : -1; }
  DEVICE void find_pages(const Sequence& s, int tile) {
    held = tile, now = number(page_of(s, held)), next = number(page_of(s, held + HELD));
  }

  DEVICE void prefetch(const Place& at) const {
    if (!loads()) return;
    tma_prefetch_box(&c.k_map, at.row, part, item.kv_head, at.page);
    tma_prefetch_box(&c.v_map, at.row, part, item.kv_head, at.page);
  }
  DEVICE void load(const CUtensorMap& map, const Place& at) {
    mbarrier_wait(&mem.empty[index], parity ^ 1);
    const unsigned missing = __ballot_sync(~0u, loads() && unsigned(at.page) >= unsigned(c.a.pages));
    if (threadIdx.x % 32 == 0) {
      mem.missing[index] = missing;
      mbarrier_arrive_expect(&mem.full[index], Memory::TILE);
    }
    __syncwarp();
    if (loads())
      load_box_once(mem.KV + index * Memory::TILE + (part * Memory::KEYS + key) * 128, &map, &mem.full[index], at.row,
                    part, item.kv_head, at.page);
    if (++index == c.buffers) index = 0, parity ^= 1;
  }
  DEVICE void load_tile(const Place& at) { load(c.k_map, at), load(c.v_map, at); }

  DEVICE void find_share(const Sequence& s, int& tile, int& end) const {
    const int bits = part_bits(c, s);
    tile = first_tile(s, bits, first_part(c, bits, item.share));
    end = first_tile(s, bits, first_part(c, bits, item.share + 1));
  }
  DEVICE void load_tiles(const Sequence& s, int tile, int end) {
    for (; tile < end; ++tile) load_tile(place(s, tile));
  }

  // Loads the tiles of the block's first item, then those of the others. What is found before the launch ahead of this
  // one is complete may have changed then: it is read again while the first tiles are on their way, and these are
  // loaded once more if it has. Keys that the launch ahead does not write are loaded before it is complete.
  DEVICE void run() {
    barrier_arrive(START, THREADS + 32);
    const Decode& a = c.a;
    int2 known = lengths(a, item.b);
    known = make_int2(__shfl_sync(~0u, known.x, 0), __shfl_sync(~0u, known.y, 0));
    Sequence s = sequence(a, known);
    int tile, end;
    find_share(s, tile, end);
    const int* page = page_of(s, tile);
    held = tile, now = number(page);
    const int ahead = min(end - tile, min(c.buffers / 2, AHEAD));
    Place first[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      if (i < ahead) first[i] = place(s, tile + i);
    }
    // Of the first tiles the launch ahead of this one writes none.
    const int keys_first = ahead > 0 && (s.first + tile + ahead) * Memory::KEYS <= s.len - a.new_keys;
    int2 then;
    int page_then;
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      if (i < ahead && !keys_first) prefetch(first[i]);  // L2 is never wrong
    }
#pragma unroll 1
    for (int turn = keys_first; turn < keys_first + 2; ++turn) {  // loads and wait, or wait and loads
      if (turn == 0 || turn == 2) {
        wait_for_the_launch_before();
        then = lengths(a, item.b), page_then = number(page);
        continue;
      }
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        if (i < ahead) load_tile(first[i]);
      }
    }
    if (keys_first) begin_the_next_launch();
    const bool same = __all_sync(~0u, page_then == now && then.x == known.x && then.y == known.y);
    if (same) {
      tile += ahead;
      next = number(page_of(s, held + HELD));
    } else {
      s = sequence(a, then);
      find_share(s, tile, end);
      find_pages(s, tile);
    }
    if (threadIdx.x % 32 == 0) {
      mem.sequence = s, mem.skipped = same ? 0 : 2 * ahead;
      mbarrier_arrive(&mem.known);
    }

    for (int n = blockIdx.x; n < c.items;) {
      n += gridDim.x;
      const Item following(c, min(n, c.items - 1), N);
      const int2 lengths_of_next = lengths(a, following.b);  // arrive while this item is loaded
      load_tiles(s, tile, end);
      item = following, s = sequence(a, lengths_of_next);
      find_share(s, tile, end);
      find_pages(s, tile);
    }
    begin_the_next_launch();
  }
};
