// K and V on their way to shared memory: every warp has cp.async bring its KEYS keys of a tile and their values, a few
// tiles ahead of where they are used.
#pragma once
#include <cuda_runtime.h>

#include "decode.cuh"
#include "ptx.cuh"

#ifdef __CUDACC__
// An address in shared memory. ptxas of CUDA 13.0 must not know that lanes have a base in common: it would take that as
// a second operand of a copy with a policy, and overwrite half of the policy with it.
using SharedAddress = uint32_t;
DEVICE SharedAddress shared_address_of_lane(void* place) {
  return __shfl_sync(~0u, uint32_t(__cvta_generic_to_shared(place)), threadIdx.x % 32);
}
// The first stage, of which ptxas must not know either that all lanes have it: for sm_120 it would then do the same.
DEVICE int first_stage() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  return __shfl_sync(~0u, threadIdx.x % 32, threadIdx.x % 32) - threadIdx.x % 32;
#else
  return 0;
#endif
}
// A copy of what is read once: L2 drops it first. Writes zeros and reads nothing where `inside` is 0.
DEVICE void copy_once(SharedAddress to, const void* from, unsigned inside, uint64_t policy) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  cp_async<16>(__cvta_shared_to_generic(to), from, inside);
#else
  asm volatile(
      "{\n.reg .pred outside;\nsetp.eq.u32 outside, %2, 0;\n"
      "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, outside, %3;\n}" ::"r"(to),
      "l"(from), "r"(inside), "l"(policy) : "memory");
#endif
}
DEVICE uint64_t policy_once() {
  uint64_t policy = 0;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}
// Has it computed here: not behind a wait.
template <typename X>
DEVICE void compute_here(const X*& pointer) {
  asm volatile("" : "+l"(pointer));
}
DEVICE void compute_here(int& x) { asm volatile("" : "+r"(x)); }
// Has the condition that this is under be a branch.
DEVICE void by_a_branch() { asm volatile(""); }
#else
using SharedAddress = uintptr_t;
DEVICE SharedAddress shared_address_of_lane(void* place) { return reinterpret_cast<SharedAddress>(place); }
DEVICE void copy_once(SharedAddress to, const void* from, unsigned inside, uint64_t, CUDA_ON_CPU_CALLER) {
  cp_async<16>(reinterpret_cast<void*>(to), from, inside != 0, file, line);
}
DEVICE int first_stage() { return 0; }
DEVICE uint64_t policy_once() { return 0; }
template <typename X>
DEVICE void compute_here(X&) {}
DEVICE void by_a_branch() {}
#endif

template <typename Math, typename Sharing>
struct Shared {
  using T = typename Math::T;
  static constexpr int STAGE = 2 * WARPS * Math::KEYS * Math::D * sizeof(T);  // a tile of each warp: keys and values
  // With head_dim 256 blocks are alone on an SM anyway.
  static constexpr int BYTES = Math::D == 256 ? 2 * KV_BYTES : KV_BYTES;
  static constexpr int STAGES = BYTES / STAGE > 2 ? BYTES / STAGE : 2;
  float m[WARPS][Math::ROWS], l[WARPS][Math::ROWS];  // the warps' parts
  alignas(16) typename Sharing::template Buffer<Math::ROWS, Math::D> buffer;
  union {
    alignas(128) T Q[Math::ROWS][Math::D];
    int2 lengths[Sharing::SEQUENCES];  // before, by length
  };
  alignas(128) T KV[STAGES][2][WARPS][Math::KEYS][Math::D];  // in the end the warps' O_i

  static constexpr int O_BYTES = WARPS * Math::ROWS * Math::D * sizeof(float);
  static_assert(O_BYTES <= STAGES * STAGE, "room for the warps' O_i");
  // Of a block whose warps have so many tiles at most.
  static int bytes(int64_t tiles) {
    const int64_t stages = max(tiles, int64_t(O_BYTES + STAGE - 1) / STAGE);
    return sizeof(Shared) - (STAGES - min(stages, int64_t(STAGES))) * STAGE;
  }
};

// A warp's tiles, a few ahead of where they are used. If it FILLS all stages ahead of the wait, not all but one, no
// tile is loaded with the first one.
template <typename Math, typename Sharing, bool PAGED, bool FILLS>
struct Loader {
  using T = typename Math::T;
  static constexpr int PIECE = 16 / sizeof(T), PIECES = Math::D / PIECE;  // a row is copied in pieces of 16 bytes
  static constexpr int LANES = PIECES < 32 ? PIECES : 32, AT_ONCE = 32 / LANES;  // rows that the warp copies at once
  static constexpr int GROUPS = (Math::KEYS + 15) / 16;  // 16 keys are never on two pages
  static constexpr int ROWS = Math::KEYS / GROUPS, OF_LANE = ROWS / AT_ONCE;  // rows of a group; of a lane
  static constexpr int HELD = 32 / GROUPS;  // tiles whose places are in the warp's registers, where there are pages
  static constexpr unsigned ALL = (1u << GROUPS) - 1, NOWHERE = ~0u;
  // The first tiles are found before the wait: with pages, to find a tile takes longer than to load it. But a block of
  // eight warps is alone on its SM, and loads the first tile before it finds the next.
  static constexpr bool FINDS_AHEAD = PAGED && !Sharing::SEVERAL_SEGMENTS && WARPS == 4;
  static constexpr int AHEAD = Shared<Math, Sharing>::STAGES - !FILLS;
  // Warps that share a scheduler and compute much with each tile take least time with few instructions in the loop over
  // tiles: a tile is one group of copies, and new places are found outside of the loop. Others take less time if keys
  // do not wait for values.
  static constexpr bool SHORT_LOOP = PAGED && WARPS == 8 && Math::ROWS == 16 && sizeof(T) == 2;

  // Where a tile is: this lane's piece of each group's first row, that row's place among the keys that are seen by some
  // row of q, and which of the lane's rows are.
  struct Tile {
    bool any;  // or there is none
    const T *k[GROUPS], *v[GROUPS];
    int place[GROUPS];
    unsigned seen[GROUPS];  // bit i: row i * AT_ONCE behind the first
    unsigned missing;       // bit n: group n is on no page
  };
  Walk walk;
  uint64_t policy;
  Tile first[FINDS_AHEAD ? AHEAD : 1], next;
  unsigned missing;          // of the stages: bits GROUPS * i and on of stage i
  const T *k_head, *v_head;  // this lane's piece of the kv head's first rows
  int keys;                  // that some row sees
  SharedAddress to;          // where, in the first stage, this lane's piece of the warp's first row goes
  // With pages, each lane has the place of a group, in pieces from k_head and v_head on, NOWHERE on no page: together
  // those of HELD tiles, of which `used` have been asked for. And of as many tiles behind them the number of a page:
  // its group is of tile_of_lane.
  unsigned k_place[GROUPS], v_place[GROUPS];  // of the tile behind the next one
  int used, tile_of_lane, leaf_of_lane, next_number;
  bool found_next;  // next_number is of these; or of none, where no tile is so far behind
  unsigned k_of_lane, v_of_lane;
  const int* table;  // of the sequence's pages
  int page;          // where in it the number of this lane's first page is, or -1
  int found, then;   // that number before and after the launch ahead of this one is complete

  // Finds the first tile of a share, if it has one, or the first tiles. They stay in registers.
  DEVICE void start(const Decode& a, T* stages, bool any) {
    const int lane = threadIdx.x % 32;
    const int own = threadIdx.x / 32 * (Math::KEYS * Math::D) + Math::offset(lane / LANES, lane % LANES);
    to = shared_address_of_lane(stages + own);
    next.any = any, missing = next.missing = 0;
    if constexpr (PAGED) {
      hold_from_here();
      table = a.block_table + walk.b * a.table_stride;
      page = any ? page_of(a) : -1;
      found = number(page);
      compute_here(page);
    }
    begin(a, PAGED ? found : 0);
    find_here(next);
    if constexpr (FINDS_AHEAD) {
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        if (i > 0) {
          const int before = walk.tile;
          walk.template advance<Sharing::TREE>();
          next.any = next.any && walk.tile < walk.end;
          go_further(a, walk.tile - before), find_here(next);
        }
        first[i] = next;
      }
    }
  }
  // The numbers of the first tiles' pages as they are now, and whether they are what they were.
  DEVICE void read_again() {
    if constexpr (PAGED) then = number(page);
  }
  DEVICE bool holds() const { return !PAGED || __all_sync(~0u, then == found); }
  DEVICE void find_next_pages(const Decode& a) {
    if constexpr (PAGED) {
      // They may have been found with a segment that begins among the first tiles.
      if (Sharing::SEVERAL_SEGMENTS && found_next) return;
      found_next = true;
      const bool any = Sharing::TREE || walk.tile + ((HELD + 1 - used) << walk.step_bits) < walk.end;
      if (next.any && any) {
        skip(tile_of_lane, leaf_of_lane, HELD);
        // This is behind the wait, so a plain load will do. ptxas has a loop with one that goes past L1 begin with
        // YIELD, as if it polled. That takes 45 cycles.
        const int page = page_of(a);
        next_number = page < 0 ? -1 : table[page];
      }
    }
  }

  // Whether the launch ahead of this one writes none of the keys of a share's first tiles.
  static DEVICE bool may_be_early(const Decode& a, const Walk& w) {
    int end = w.tile + (min(AHEAD - 1, (w.end - 1 - w.tile) >> w.step_bits) << w.step_bits) + 1;
    if constexpr (Sharing::TREE) {
      Walk ahead = w;
      for (int i = 1; i < AHEAD; ++i) {
        ahead.advance<Sharing::TREE>();
        if (ahead.tile < w.end) end = max(end, ahead.tile + 1);
      }
    }
    if (Sharing::SEVERAL_SEGMENTS && end == w.end) return false;  // the next segment is found with the last tile
    return (w.s.first + end) << a.tile_bits <= w.s.len - a.new_keys;
  }
  // Starts copying the first tiles to stages 0 and on.
  DEVICE void load_first(const Decode& a) {
    if constexpr (FINDS_AHEAD) {
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) copy_tile(a, first[i], i);
      if (next.any) move_on(a);
    } else {
#pragma unroll 1  // instructions that run once have to be fetched
      for (int stage = 0; stage < AHEAD; ++stage) {
        copy_tile(a, next, stage);
        if (next.any) move_on(a);
      }
    }
  }
  // With pages: finds the places of the next tiles, if none are left; and of how many there are.
  DEVICE void find_places(const Decode& a) {
    if (used == HELD) {
      used = 0, found_next = false;
      locate(a, next_number), find_next_pages(a);
    }
  }
  DEVICE int places_left() const { return HELD - used; }
  // Whether there is nothing to load any more.
  DEVICE bool done() const { return !next.any; }
  // Starts copying the next tile, if there is one, to stage `stage`.
  DEVICE void load(const Decode& a, int stage) {
    if (next.any && is_last()) begin_the_next_launch();
    copy_tile(a, next, stage);
    if (next.any) move_on(a);
  }
  // Whether all keys on the way have a page; bit n: keys 16 n to 16 n + 15 of a stage have.
  DEVICE bool all_exist() const { return !PAGED || !missing; }
  DEVICE unsigned existing(int stage) const { return PAGED ? ~missing >> GROUPS * stage : ~0u; }

  // Has L2 fetch the first tile.
  DEVICE void prefetch(const Decode& a) const {
    constexpr int LINE = 128, LINES = Math::D * sizeof(T) / LINE;  // of a row
    const int lane = threadIdx.x % 32;
    const Tile& tile = FINDS_AHEAD ? first[0] : next;
#pragma unroll
    for (int n = 0; n < GROUPS; ++n) {
#pragma unroll
      for (int i = lane; i < ROWS * LINES; i += 32) {
        const int row = i / LINES - lane / LANES, column = i % LINES * (LINE / int(sizeof(T))) - lane % LANES * PIECE;
        if (!tile.seen[n] || unsigned(tile.place[n] + row) >= unsigned(keys)) continue;
        prefetch_L2(tile.k[n] + row * a.k_strides.row + column);
        prefetch_L2(tile.v[n] + row * a.v_strides.row + column);
      }
    }
  }

 private:
  static DEVICE void find_here(Tile& tile) {
#pragma unroll
    for (int n = 0; n < GROUPS; ++n) compute_here(tile.k[n]), compute_here(tile.v[n]);
  }
  // Whether no tile comes behind `next`.
  DEVICE bool is_last() const {
    return walk.tile + (1 << walk.step_bits) >= walk.end && !(Sharing::TREE && walk.leaf + 1 < walk.leaf_end) &&
           !(Sharing::SEVERAL_SEGMENTS && walk.more());
  }
  DEVICE int key_of(const Decode& a, int tile, int group) const {
    return ((walk.s.first + tile) << a.tile_bits) + Sharing::first_key(Math::KEYS) + group * ROWS;
  }
  // So many of the warp's tiles further; behind the end if there are none.
  DEVICE void skip(int& tile, int& leaf, int tiles) const {
    if constexpr (Sharing::TREE) {
      for (; leaf < walk.leaf_end; tile = reversed(++leaf, walk.step_bits)) {
        const int left = ((walk.end - 1 - tile) >> walk.step_bits) + 1;  // of the leaf
        if (tiles < left) break;
        tiles -= left;
      }
      if (leaf >= walk.leaf_end) tile = walk.end;
    }
    tile += tiles << walk.step_bits;
  }
  // The first tiles whose places are held: from the next one on.
  DEVICE void hold_from_here() {
    used = 0, found_next = false, tile_of_lane = walk.tile, leaf_of_lane = walk.leaf;
    skip(tile_of_lane, leaf_of_lane, threadIdx.x % 32 / GROUPS);
  }
  DEVICE int key_of_lane(const Decode& a) const { return key_of(a, tile_of_lane, threadIdx.x % GROUPS); }
  // Where in the table the number is of the page of this lane's group.
  DEVICE int page_of(const Decode& a) const {
    const int key = key_of_lane(a);
    return tile_of_lane < walk.end && key < walk.s.len ? a.page_size.quotient(key) : -1;
  }
  DEVICE int number(int page) const { return page < 0 ? -1 : __ldcg(table + page); }

  // The first tile of a segment; with pages, of those whose numbers are given.
  DEVICE void begin(const Decode& a, int number) {
    const int lane = threadIdx.x % 32, row = lane / LANES, column = lane % LANES * PIECE;
    k_head = static_cast<const T*>(a.k) + walk.kv_head * a.k_strides.head + row * a.k_strides.row + column;
    v_head = static_cast<const T*>(a.v) + walk.kv_head * a.v_strides.head + row * a.v_strides.row + column;
    keys = max(walk.s.len - walk.s.begin, 0);
    if constexpr (PAGED) compute_here(k_head), compute_here(v_head), compute_here(keys);
#pragma unroll
    for (int n = 0; n < GROUPS; ++n) {
      const int key = key_of(a, walk.tile, n);
      next.place[n] = key + row - walk.s.begin;
      if constexpr (!PAGED) {
        next.k[n] = k_head + walk.b * a.k_strides.batch + key * a.k_strides.row;
        next.v[n] = v_head + walk.b * a.v_strides.batch + key * a.v_strides.row;
      }
    }
    if constexpr (PAGED) locate(a, number), ask(a);
    find(a);
  }
  // In 32 bits, as far as what is added up from it is below NOWHERE, or nothing.
  static DEVICE unsigned pieces(int64_t stride) { return unsigned(uint64_t(stride) / PIECE); }
  // Where this lane's group is, on the page of this number.
  DEVICE void locate(const Decode& a, int number) {
    const int row = a.page_size.remainder(key_of_lane(a));
    const bool inside = unsigned(number) < unsigned(a.pages);
    k_of_lane = inside ? number * pieces(a.k_strides.batch) + row * pieces(a.k_strides.row) : NOWHERE;
    v_of_lane = inside ? number * pieces(a.v_strides.batch) + row * pieces(a.v_strides.row) : NOWHERE;
  }
  DEVICE void find(const Decode& a) {
    next.missing = 0;
#pragma unroll
    for (int n = 0; n < GROUPS; ++n) {
      const int begin = ceil_div(min(max(-next.place[n], 0), ROWS), AT_ONCE);
      const int end = ceil_div(min(max(keys - next.place[n], 0), ROWS), AT_ONCE);
      next.seen[n] = ((1u << end) - 1) & (~0u << begin);
      if constexpr (PAGED) {
        next.k[n] = k_head + uint64_t(k_place[n]) * PIECE;
        next.v[n] = v_head + uint64_t(v_place[n]) * PIECE;
        if (k_place[n] == NOWHERE) next.seen[n] = 0, next.missing |= 1u << n;
      }
    }
    ask(a);
  }
  // For the place of the tile that is found next. Shuffles wait until the copies ahead of them have begun, so nothing
  // uses what they give before more copies have.
  DEVICE void ask(const Decode& a) {
    if constexpr (PAGED) {
      if (!SHORT_LOOP) find_places(a);
#pragma unroll
      for (int n = 0; n < GROUPS; ++n) {
        const int lane = used * GROUPS + n;
        k_place[n] = __shfl_sync(~0u, k_of_lane, lane), v_place[n] = __shfl_sync(~0u, v_of_lane, lane);
      }
      ++used;
    }
  }
  DEVICE void go_further(const Decode& a, int tiles) {
    const int step = tiles * (1 << a.tile_bits);
#pragma unroll
    for (int n = 0; n < GROUPS; ++n) {
      next.place[n] += step;
      if constexpr (!PAGED) next.k[n] += step * a.k_strides.row, next.v[n] += step * a.v_strides.row;
    }
    find(a);
  }
  DEVICE void move_on(const Decode& a) {
    const int before = walk.tile;
    walk.template advance<Sharing::TREE>();
    if (walk.tile < walk.end) {
      go_further(a, walk.tile - before);
    } else if (Sharing::SEVERAL_SEGMENTS && walk.more()) {
      walk.next_segment(a);
      if constexpr (PAGED) table = a.block_table + walk.b * a.table_stride, hold_from_here();
      begin(a, PAGED ? number(page_of(a)) : 0);
      find_next_pages(a);
    } else {
      next.any = false;
    }
  }
  // Zeros for what no row sees.
  DEVICE void copy_tile(const Decode& a, const Tile& tile, int stage) {
    if (tile.any) {
      if (PAGED && (missing | tile.missing))
        missing = (missing & ~(ALL << GROUPS * stage)) | tile.missing << GROUPS * stage;
      copy<true, SHORT_LOOP>(a, tile, stage);
    }
    cp_async_commit();
    if constexpr (!SHORT_LOOP) {
      if (tile.any) copy<false, true>(a, tile, stage);
      cp_async_commit();
    }
  }
  // Keys, values, or both. Where nothing is copied the address is not read.
  template <bool OF_K, bool OF_V>
  DEVICE void copy(const Decode& a, const Tile& tile, int stage) const {
    constexpr int ROW = Math::D * sizeof(T), VALUES = WARPS * Math::KEYS * ROW;  // bytes: of a row, from keys to values
#pragma unroll
    for (int n = 0; n < GROUPS; ++n) {
      int seen = int(tile.seen[n]);
      compute_here(seen);  // or ptxas has each of its bits in a register of its own, ahead of the first copy
      const SharedAddress start = to + 2 * stage * VALUES + n * ROWS * ROW;
#pragma unroll
      for (int i = 0; i < OF_LANE; ++i) {
        const int row = i * AT_ONCE, swizzle = (Math::offset(row, 0) - row * Math::D) * int(sizeof(T));
#pragma unroll
        for (int piece = 0; piece < PIECES; piece += LANES) {
          const SharedAddress place = (start ^ swizzle) + row * ROW + piece * 16;
          const unsigned inside = seen & 1u << i;
          if (OF_K) copy_once(place, tile.k[n] + row * a.k_strides.row + piece * PIECE, inside, policy);
          if (OF_V) copy_once(place + VALUES, tile.v[n] + row * a.v_strides.row + piece * PIECE, inside, policy);
        }
      }
    }
  }
};
