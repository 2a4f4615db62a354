// The kernel around the arithmetic: K and V on their way to shared memory while earlier ones are computed with.
//
// Every warp has a pipeline of its own: cp.async brings its KEYS keys of a tile and their values, a few tiles ahead.
// The warps meet only at the end of a segment, or of a chunk, where their parts are merged, but for rung 7's, which do at
// each tile. The pipeline runs on.
// `Math` is what a warp does with keys and with values: tensor_cores.cuh, fp32.cuh. `Sharing` says which tiles are a
// warp's, whether a tile is of one warp or of all, and how the parts of a pair's blocks are merged: equal_shares.cuh,
// cluster.cuh.
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
#else
using SharedAddress = uintptr_t;
DEVICE SharedAddress shared_address_of_lane(void* place) { return reinterpret_cast<SharedAddress>(place); }
DEVICE void copy_once(SharedAddress to, const void* from, unsigned inside, uint64_t, CUDA_ON_CPU_CALLER) {
  cp_async<16>(reinterpret_cast<void*>(to), from, inside != 0, file, line);
}
DEVICE uint64_t policy_once() { return 0; }
template <typename X>
DEVICE void compute_here(X&) {}
#endif

// Whether a block's warps begin each tile together. A rung may say so.
#ifndef IN_STEP
#define IN_STEP false
#endif

template <typename Math, typename Sharing>
struct Shared {
  using T = typename Math::T;
  static constexpr int STAGE = 2 * WARPS * Math::KEYS * Math::D * sizeof(T);  // a tile of each warp: keys and values
  static constexpr int STAGES = KV_BYTES / STAGE > 2 ? KV_BYTES / STAGE : 2;
  float m[WARPS][Math::ROWS], l[WARPS][Math::ROWS];  // the warps' parts
  alignas(16) typename Sharing::template Buffer<Math::ROWS, Math::D> buffer;
  alignas(128) T Q[Math::ROWS][Math::D];
  alignas(128) T KV[STAGES][2][WARPS][Math::KEYS][Math::D];  // in the end the warps' O_i

  static constexpr int O_BYTES = WARPS * Math::ROWS * Math::D * sizeof(float);
  static_assert(O_BYTES <= STAGES * STAGE, "room for the warps' O_i");
  // Of a block whose warps have so many tiles at most.
  static int bytes(int64_t tiles) {
    const int64_t stages = max(tiles, int64_t(O_BYTES + STAGE - 1) / STAGE);
    return sizeof(Shared) - (STAGES - min(stages, int64_t(STAGES))) * STAGE;
  }
};

// A warp's tiles, a few ahead of where they are used.
template <typename Math, typename Sharing, bool PAGED>
struct Loader {
  using T = typename Math::T;
  static constexpr int PIECE = 16 / sizeof(T), PIECES = Math::D / PIECE;  // a row is copied in pieces of 16 bytes
  static constexpr int LANES = PIECES < 32 ? PIECES : 32, AT_ONCE = 32 / LANES;  // rows that the warp copies at once
  static constexpr int GROUPS = (Math::KEYS + 15) / 16;  // 16 keys are never on two pages
  static constexpr int ROWS = Math::KEYS / GROUPS, OF_LANE = ROWS / AT_ONCE;  // rows of a group; of a lane
  static constexpr int HELD = 32 / GROUPS;  // tiles whose places are in the warp's registers, where there are pages
  static constexpr unsigned ALL = (1u << GROUPS) - 1, NOWHERE = ~0u;
  // The first tiles are found before the wait: with pages, to find a tile takes longer than to load it.
  static constexpr bool FINDS_AHEAD = PAGED && !Sharing::SEVERAL_SEGMENTS;
  static constexpr int AHEAD = Shared<Math, Sharing>::STAGES - 1;
  static constexpr bool LEAVES = Sharing::TREE;  // a warp may have several

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
  // those of HELD tiles, of which `used` are behind this warp. And of as many tiles behind them the number of a page:
  // its group is of tile_of_lane.
  int used, tile_of_lane, leaf_of_lane, next_number;
  unsigned k_of_lane, v_of_lane;
  const int* page;  // where the number of this lane's first page is
  int found, then;  // that number before and after the launch ahead of this one is complete

  // Finds the first tile of a share, if it has one, or the first tiles. They stay in registers.
  DEVICE void start(const Decode& a, T* stages, bool any) {
    const int lane = threadIdx.x % 32;
    const int own = threadIdx.x / 32 * (Math::KEYS * Math::D) + Math::offset(lane / LANES, lane % LANES);
    to = shared_address_of_lane(stages + own);
    next.any = any, missing = next.missing = 0;
    if constexpr (PAGED) {
      hold_from_here();
      page = any ? page_of(a) : nullptr;
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
          walk.template advance<LEAVES>(), ++used;
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
      const bool any = LEAVES || walk.tile + ((HELD - used) << walk.step_bits) < walk.end;
      if (next.any && any) skip(tile_of_lane, leaf_of_lane, HELD), next_number = number(page_of(a));
    }
  }

  // Whether the launch ahead of this one writes none of the keys of a share's first tiles.
  static DEVICE bool may_be_early(const Decode& a, const Walk& w) {
    int end = w.tile + (min(AHEAD - 1, (w.end - 1 - w.tile) >> w.step_bits) << w.step_bits) + 1;
    if constexpr (LEAVES) {
      Walk ahead = w;
      for (int i = 1; i < AHEAD; ++i) {
        ahead.advance<LEAVES>();
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
    return walk.tile + (1 << walk.step_bits) >= walk.end && !(LEAVES && walk.leaf + 1 < walk.leaf_end) &&
           !(Sharing::SEVERAL_SEGMENTS && walk.more());
  }
  DEVICE int key_of(const Decode& a, int tile, int group) const {
    return ((walk.s.first + tile) << a.tile_bits) + Sharing::first_key(Math::KEYS) + group * ROWS;
  }
  // So many of the warp's tiles further; behind the end if there are none.
  DEVICE void skip(int& tile, int& leaf, int tiles) const {
    if constexpr (LEAVES) {
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
    used = 0, tile_of_lane = walk.tile, leaf_of_lane = walk.leaf;
    skip(tile_of_lane, leaf_of_lane, threadIdx.x % 32 / GROUPS);
  }
  DEVICE int key_of_lane(const Decode& a) const { return key_of(a, tile_of_lane, threadIdx.x % GROUPS); }
  // Where the number is of the page of this lane's group.
  DEVICE const int* page_of(const Decode& a) const {
    const int key = key_of_lane(a);
    if (tile_of_lane >= walk.end || key >= walk.s.len) return nullptr;
    return a.block_table + walk.b * a.table_stride + a.page_size.quotient(key);
  }
  static DEVICE int number(const int* page) { return page ? __ldcg(page) : -1; }

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
    if constexpr (PAGED) locate(a, number);
    find();
  }
  // Where this lane's group is, on the page of this number.
  DEVICE void locate(const Decode& a, int number) {
    const int row = a.page_size.remainder(key_of_lane(a));
    const bool inside = unsigned(number) < unsigned(a.pages);
    k_of_lane = inside ? (number * a.k_strides.batch + row * a.k_strides.row) / unsigned(PIECE) : NOWHERE;
    v_of_lane = inside ? (number * a.v_strides.batch + row * a.v_strides.row) / unsigned(PIECE) : NOWHERE;
  }
  DEVICE void find() {
    next.missing = 0;
#pragma unroll
    for (int n = 0; n < GROUPS; ++n) {
      const int begin = ceil_div(min(max(-next.place[n], 0), ROWS), AT_ONCE);
      const int end = ceil_div(min(max(keys - next.place[n], 0), ROWS), AT_ONCE);
      next.seen[n] = ((1u << end) - 1) & (~0u << begin);
      if constexpr (PAGED) {
        const int lane = used * GROUPS + n;
        const unsigned from = __shfl_sync(~0u, k_of_lane, lane);
        next.k[n] = k_head + uint64_t(from) * PIECE;
        next.v[n] = v_head + uint64_t(__shfl_sync(~0u, v_of_lane, lane)) * PIECE;
        if (from == NOWHERE) next.seen[n] = 0, next.missing |= 1u << n;
      }
    }
  }
  DEVICE void go_further(const Decode& a, int tiles) {
    const int step = tiles * (1 << a.tile_bits);
#pragma unroll
    for (int n = 0; n < GROUPS; ++n) {
      next.place[n] += step;
      if constexpr (!PAGED) next.k[n] += step * a.k_strides.row, next.v[n] += step * a.v_strides.row;
    }
    find();
  }
  DEVICE void move_on(const Decode& a) {
    const int before = walk.tile;
    walk.template advance<LEAVES>();
    if (walk.tile < walk.end) {
      if (PAGED && ++used == HELD) used = 0, locate(a, next_number), find_next_pages(a);
      go_further(a, walk.tile - before);
    } else if (Sharing::SEVERAL_SEGMENTS && walk.more()) {
      walk.next_segment(a);
      if constexpr (PAGED) hold_from_here();
      begin(a, PAGED ? number(page_of(a)) : 0);
      find_next_pages(a);
    } else {
      next.any = false;
    }
  }
  // Zeros for what no row sees. Keys and values are a group of copies each, in any case.
  DEVICE void copy_tile(const Decode& a, const Tile& tile, int stage) {
    if (tile.any) {
      if (PAGED && (missing | tile.missing))
        missing = (missing & ~(ALL << GROUPS * stage)) | tile.missing << GROUPS * stage;
#pragma unroll
      for (int n = 0; n < GROUPS; ++n) copy(2 * stage, n, tile.k[n], a.k_strides.row, tile.seen[n]);
    }
    cp_async_commit();
    if (tile.any) {
#pragma unroll
      for (int n = 0; n < GROUPS; ++n) copy(2 * stage + 1, n, tile.v[n], a.v_strides.row, tile.seen[n]);
    }
    cp_async_commit();
  }
  // To a half of a stage: keys, or values. Where nothing is copied the address is not read.
  DEVICE void copy(int half, int group, const T* from, int64_t stride, unsigned seen) const {
    constexpr int ROW = Math::D * sizeof(T);  // bytes
    const SharedAddress start = to + (half * WARPS * Math::KEYS + group * ROWS) * ROW;
#pragma unroll
    for (int i = 0; i < OF_LANE; ++i) {
      const int row = i * AT_ONCE, swizzle = (Math::offset(row, 0) - row * Math::D) * int(sizeof(T));
#pragma unroll
      for (int piece = 0; piece < PIECES; piece += LANES)
        copy_once((start ^ swizzle) + row * ROW + piece * 16, from + row * stride + piece * PIECE, seen & 1u << i,
                  policy);
    }
  }
};

// Rows of q of a pair, this thread's pieces of them, on their way to shared memory.
template <typename Math>
struct Queries {
  using T = typename Math::T;
  static constexpr int PIECE = 16 / sizeof(T), PIECES = Math::D / PIECE, ALL = Math::ROWS * PIECES;
  static constexpr int EACH = (ALL + THREADS - 1) / THREADS;
  const T* from[EACH];
  uint4 x[EACH];

  DEVICE void find(const Decode& a, const Walk& w) {
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const int i = threadIdx.x + n * THREADS, row = w.row_0 * Math::ROWS + i / PIECES;
      const T* q = static_cast<const T*>(a.q) + offset_of(a, a.q_strides, w.b, w.kv_head, row);
      from[n] = i < ALL && row < a.rows ? q + i % PIECES * PIECE : nullptr;
    }
  }
  DEVICE void find_here() {
#pragma unroll
    for (int n = 0; n < EACH; ++n) compute_here(from[n]);
  }
  DEVICE void load() {
#pragma unroll
    for (int n = 0; n < EACH; ++n) x[n] = from[n] ? __ldcg(reinterpret_cast<const uint4*>(from[n])) : uint4{};
  }
  DEVICE void store(T* Q) const {
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const int i = threadIdx.x + n * THREADS;
      if (i < ALL) *reinterpret_cast<uint4*>(Q + Math::offset(i / PIECES, i % PIECES)) = x[n];
    }
  }
};

// Which keys of a stage a row sees.
struct Mask {
  int key_0, from, len, q_len, window, row_0;
  Divisor group;
  unsigned exists;  // bit n: the page of keys 16 n to 16 n + 15 is inside of the pool

  DEVICE int position(int row) const { return len - q_len + group.quotient(row_0 + row); }  // of the row's token
  DEVICE bool operator()(int p, int key) const {
    const int j = key_0 + key;
    return (exists >> key / 16 & 1) && j >= from && j <= p && (!window || j > p - window);
  }
};

// Where column e of a row is among `width`, a multiple of 32, in shared memory: pairs of rows begin in other banks.
DEVICE int place(int row, int e, int width) { return row * width + (e ^ row / 2 % 4 * 8); }

// Merges the warps' parts of columns [e_0, e_0 + width), which are `stride` floats apart.
// use(row, e, part) takes what comes out.
template <typename Memory, typename Use>
DEVICE void merge_warps(const Memory& mem, const float* O, int stride, int rows, int e_0, int width, Use use) {
  const int quads = width / 4;
#pragma unroll 1
  for (int i = threadIdx.x; i < rows * quads; i += THREADS) {
    const int row = i / quads, e = 4 * (i - row * quads);
    use(row, e_0 + e, merge_tree<WARPS>([&](int warp) -> Part {
          return {mem.m[warp][row], mem.l[warp][row],
                  *reinterpret_cast<const float4*>(&O[warp * stride + place(row, e, width)])};
        }));
  }
}

// At least so many blocks on an SM, or 0. Without it ptxas saves registers for one more, and has each value loaded just
// before it is used.
template <typename Math, typename Sharing>
constexpr int fewest_on_an_sm() {
  if (Sharing::SEVERAL_SEGMENTS) return 0;
  if (WARPS > 4) return 1;
  const bool few_registers = sizeof(typename Math::T) == 2 && Math::ROWS <= 8 && Math::D <= 128 && !Sharing::TREE;
  return KV_BYTES <= 64 * 1024 && few_registers ? 3 : 2;
}

template <typename Math, typename Sharing, bool PAGED>
__global__ void __launch_bounds__(THREADS, fewest_on_an_sm<Math, Sharing>()) decode_kernel(Decode a) {
  using T = typename Math::T;
  using Memory = Shared<Math, Sharing>;
  constexpr int D = Math::D, ROWS = Math::ROWS, KEYS = Math::KEYS, STAGES = Memory::STAGES;
  using Load = Loader<Math, Sharing, PAGED>;
  extern __shared__ __align__(128) uint4 shared[];
  Memory& mem = *reinterpret_cast<Memory*>(shared);
  const int warp = threadIdx.x / 32;

  Load loader;
  loader.policy = policy_once();
  Queries<Math> queries;
  Sharing share;
  share.start(a, mem.buffer);
  Walk walk;
  // What is found before the launch ahead of this one is complete may have changed then: once more, in that case. Of
  // what has to follow it, only loads and copies do.
  const bool early = DEPENDENT && Sharing::can_be_found_early(a);
  if (DEPENDENT && !early) wait_for_the_launch_before();
  int keys_first;
  for (bool again = !early;; again = true) {
    share.template find<PAGED>(a, loader.walk);
    queries.find(a, loader.walk);
    walk = loader.walk;
    loader.start(a, mem.KV[0][0][0][0], share.any(loader.walk));
    queries.find_here();
    keys_first = !again && share.any(walk) && Load::may_be_early(a, walk);
    if (again) {
      cp_async_wait<0>();
    } else if (!keys_first && share.any(walk)) {
      loader.prefetch(a);  // what was read may be old, but L2 is never wrong
    }
    // Ahead of the wait these loads read what may change; but behind it their instructions have been fetched then.
#pragma unroll 1
    for (bool waited = !keys_first;; waited = true) {
      if (waited && !again) wait_for_the_launch_before();
      share.read_again(a);
      loader.read_again();
      queries.load();
      __syncwarp();  // the copies, and the page translations that they may wait for, come behind these loads
      if (!waited || !keys_first) loader.load_first(a);
      if (waited) break;
    }
    const bool ready = keys_first || (loader.done() && share.any(walk));
    if (PAGED && ready) begin_the_next_launch();  // which has to find its pages before it can load
    loader.find_next_pages(a);
    if (again || (share.holds() && loader.holds())) break;
  }
  if (!share.takes_part()) return;
  queries.store(mem.Q[0]);
  __syncthreads();  // Q complete
  if (!PAGED && (keys_first || (loader.done() && share.any(walk)))) begin_the_next_launch();

  Math math;
  math.load_queries(mem.Q[0]);
  const float scale = a.scale * LOG2_E;
  int stage = 0;
  // The warp's tiles up to `end`, as one part.
  auto add_tiles = [&](int end) {
    math.start();
    const int rounds = ceil_div(end, 1 << walk.step_bits);  // of the warp that has most tiles
    // All rows see all of a tile that begins at one of these keys.
    int from = walk.s.begin + (a.window ? a.q_len - 1 : 0), to = walk.s.len - a.q_len + 1 - KEYS;
    compute_here(from), compute_here(to);
#pragma unroll 1
    for (int i = 0; IN_STEP ? i < rounds : walk.tile < end; ++i, walk.tile += 1 << walk.step_bits) {
      cp_async_wait<2 * STAGES - 3>();
      if (IN_STEP) __syncthreads();
      if (IN_STEP && walk.tile >= end) continue;
      __syncwarp();  // K_j complete, and the stage that is loaded now has been read
      const int key_0 = ((walk.s.first + walk.tile) << a.tile_bits) + Sharing::first_key(KEYS);
      const unsigned exists = loader.existing(stage);
      const bool all_seen = loader.all_exist() && key_0 >= from && key_0 <= to;
      math.scores(mem.Q[0], mem.KV[stage][0][warp][0]);
      loader.load(a, stage == 0 ? STAGES - 1 : stage - 1);  // while the products are computed
      if (!all_seen)
        math.mask({key_0, walk.s.begin, walk.s.len, a.q_len, a.window, walk.row_0 * ROWS, a.group, exists});
      math.softmax(scale);
      cp_async_wait<2 * STAGES - 2>();
      __syncwarp();  // V_j complete
      math.add_values(mem.KV[stage][1][warp][0], mem.KV[stage][0][warp][0]);  // K_j has been read
      stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    math.complete();
  };
  float* O = reinterpret_cast<float*>(mem.KV);
  if constexpr (!Sharing::SEVERAL_SEGMENTS) {
    const int row_0 = walk.row_0 * ROWS, rows = min(ROWS, a.rows - row_0);
    if constexpr (!Sharing::TREE) {
      add_tiles(walk.end);
    } else {  // the warp's leaves of the pair's tree
      const int leaves = walk.leaf_end - walk.leaf;  // 0, or a power of two
      // Subtrees whose right neighbour is not complete yet, of 1 << i leaves: small ones, which are many, in registers.
      constexpr int FIT = Math::STATES_FIT ? 2 : 0;
      typename Math::State waiting[Sharing::LEVELS], of_one, of_two;
#pragma unroll 1
      for (int i = 0; i < max(1, leaves); ++i) {
        if (i > 0) walk.tile = reversed(walk.leaf + i, walk.step_bits);
        add_tiles(walk.end);
        if (leaves <= 1) break;
        if constexpr (FIT > 0) {
          if ((i & 1) == 0) of_one = math;
          if ((i & 1) == 1) math.merge_into(of_one);
          if ((i & 3) == 1) of_two = math;
          if ((i & 3) == 3) math.merge_into(of_two);
        }
        int level = FIT;
        if (((i + 1) & ((1 << FIT) - 1)) != 0 || leaves <= 1 << FIT || !Math::has_some_of(rows)) continue;
#pragma unroll 1
        for (; i >> level & 1; ++level) math.merge_into(waiting[level]);
        if (i < leaves - 1) waiting[level] = math;
      }
    }
    __syncthreads();  // the stages have been read: now they are the warps' O_i
    math.put(O + warp * ROWS * D, 0, D, rows);
    math.put_ml(mem.m[warp], mem.l[warp], rows);
    share.meet();
    __syncthreads();  // the warps' parts complete
    merge_warps(mem, O, ROWS * D, rows, 0, D, [&](int row, int e, const Part& p) {
      share.template put<T>(a, walk, mem.buffer, row, e, p);
    });
    share.template merge_blocks<T>(a, walk, mem.buffer);
  } else {
#pragma unroll 1
    while (true) {  // segments, and chunks of them
      add_tiles(a.chunks ? min((walk.tile / walk.chunk + 1) * walk.chunk, walk.end) : walk.end);
      const int row_0 = walk.row_0 * ROWS, rows = min(ROWS, a.rows - row_0);
      const bool segment_ends = walk.tile == walk.end, more = walk.more(), last = segment_ends && !more;
      const bool done = segment_ends && walk.pair_units == (a.chunks ? 1 : walk.units);
      Walk next = walk;
      if (segment_ends && more) {
        next.next_segment(a);
        queries.find(a, next);
        queries.load();  // arrives while the parts are merged
      }
      // At the end of the share the stages are free, and have room for all columns.
      O = last ? reinterpret_cast<float*>(mem.KV) : mem.buffer.O[0];
      const int stride = last ? ROWS * D : mem.buffer.FLOATS, columns = last ? D : min(D, stride / rows / 32 * 32);
      if (last) __syncthreads();  // the stages have been read
      for (int e_0 = 0; e_0 < D; e_0 += columns) {
        if (e_0) __syncthreads();  // the columns before have been merged
        const int width = min(columns, D - e_0);
        math.put(O + warp * stride, e_0, width, rows);
        if (e_0 == 0) math.put_ml(mem.m[warp], mem.l[warp], rows);
        __syncthreads();  // the warps' parts complete, Q consumed
        merge_warps(mem, O, stride, rows, e_0, width, [&](int row, int e, const Part& p) {
          done ? write_out<T>(a, walk, row_0 + row, e, p) : share.put(a, walk, mem.buffer, row, e, p);
        });
      }
      if (segment_ends && !done) share.template merge_blocks<T>(a, walk, mem.buffer);
      if (last) return;
      if (segment_ends) queries.store(mem.Q[0]);
      walk = next;
      __syncthreads();  // the parts consumed, the next Q complete
      if (segment_ends) math.load_queries(mem.Q[0]);
    }
  }
}

// Where states that wait are not in registers, merging takes longer, so it is done less often.
template <typename Math>
constexpr int leaf_tile_bits() { return Math::STATES_FIT ? 2 : 3; }

template <typename Math, typename Sharing, bool PAGED>
static cudaError_t launch(Decode a, int blocks, cudaStream_t stream) {
  constexpr auto kernel = decode_kernel<Math, Sharing, PAGED>;
  while (1 << a.tile_bits < Sharing::TILE_WARPS * Math::KEYS) ++a.tile_bits;
  a.row_tiles = Divisor(ceil_div(a.rows, Math::ROWS)), a.leaf_tile_bits = leaf_tile_bits<Math>();
  if (cudaError_t error = allow_shared_memory<kernel, sizeof(Shared<Math, Sharing>)>()) return error;
  if (cudaError_t error = prefer_shared_memory<kernel>()) return error;
  const int bytes = Shared<Math, Sharing>::bytes(Sharing::most_tiles(a, blocks));
  return Sharing::launch(kernel, a, blocks, bytes, stream);
}
template <typename Math, typename Sharing>
static cudaError_t launch(const Decode& a, int blocks, cudaStream_t stream) {
  if (a.block_table) return launch<Math, Sharing, true>(a, blocks, stream);
  return launch<Math, Sharing, false>(a, blocks, stream);
}
