// The kernel around the arithmetic: a warp computes with a tile while later ones are on their way (loader.cuh).
//
// Every warp has a pipeline of its own. The warps meet only at the end of a segment, or of a chunk, where their parts
// are merged, but for rung 7's, which do at each tile. The pipeline runs on.
// `Math` is what a warp does with keys and with values: tensor_cores.cuh, fp32.cuh. `Sharing` says which tiles are a
// warp's, whether a tile is of one warp or of all, and how the parts of a pair's blocks are merged: equal_shares.cuh,
// cluster.cuh.
#pragma once
#include <cuda_runtime.h>

#include "loader.cuh"

// Whether a block's warps begin each tile together. A rung may say so.
#ifndef IN_STEP
#define IN_STEP false
#endif

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

template <typename Math, typename Sharing, bool PAGED, bool FILLS = false>
__global__ void __launch_bounds__(THREADS, fewest_on_an_sm<Math, Sharing>()) decode_kernel(Decode a) {
  using T = typename Math::T;
  using Memory = Shared<Math, Sharing>;
  constexpr int D = Math::D, ROWS = Math::ROWS, KEYS = Math::KEYS, STAGES = Memory::STAGES;
  using Load = Loader<Math, Sharing, PAGED, FILLS>;
  // Whether a warp loads a tile before it computes with one, not while it does. With pages that is faster where warps
  // have a scheduler to themselves; without, by 3 % with head_dim 128, but slower by up to 4 % with 64.
  constexpr bool LOADS_FIRST = PAGED && WARPS == 4 && !Sharing::SEVERAL_SEGMENTS;
  // Groups of copies: of a tile, and of the tiles that are on their way when one is waited for.
  constexpr int COPY_GROUPS = Load::SHORT_LOOP ? 1 : 2, STARTED = COPY_GROUPS * (LOADS_FIRST ? STAGES : STAGES - 1);
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
  bool early = DEPENDENT && Sharing::can_be_found_early(a);
  if (DEPENDENT && !early) wait_for_the_launch_before();
  if constexpr (Sharing::BY_LENGTH) share.place.read_lengths(a, mem.lengths);
  while (true) {  // one item; by length, a cluster may take further ones
    int keys_first;
    for (bool again = !early;; again = true) {
      share.find(a, PAGED, loader.walk);
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
      if constexpr (Sharing::BY_LENGTH) {  // whether it holds is for all threads of the block to say
        queries.store(mem.Q[0]);
        if (__syncthreads_and(again || (loader.holds() && share.holds(a)))) break;  // Q complete
        share.place.read_lengths(a, mem.lengths);
      } else if (again || (share.holds(a) && loader.holds())) {
        break;
      }
    }
    if (share.has_nothing(walk)) return;
    if constexpr (!Sharing::BY_LENGTH) {
      queries.store(mem.Q[0]);
      __syncthreads();  // Q complete
    }
    if (!PAGED && (keys_first || (loader.done() && share.any(walk)))) begin_the_next_launch();

    Math math;
    math.load_queries(mem.Q[0]);
    const float scale = a.scale * LOG2_E;
    int stage = first_stage();
    bool filled = FILLS;
    // The warp's tiles up to `end`, as one part.
    auto add_tiles = [&](int end) {
      math.start();
      // In step, of the warp that has most tiles.
      const int rounds = ((IN_STEP ? end : end - walk.tile) + (1 << walk.step_bits) - 1) >> walk.step_bits;
      // All rows see all of a tile that begins at one of these keys.
      int from = walk.s.begin + (a.window ? a.q_len - 1 : 0), to = walk.s.len - a.q_len + 1 - KEYS;
      compute_here(from), compute_here(to);
      const auto add_tile = [&] {
        if (LOADS_FIRST) {
          __syncwarp();  // the stage that is loaded now has been read
          loader.load(a, stage == 0 ? STAGES - 1 : stage - 1);
        }
        filled ? cp_async_wait<STARTED + COPY_GROUPS - 1>() : cp_async_wait<STARTED - 1>();
        if (IN_STEP) __syncthreads();
        if (IN_STEP && walk.tile >= end) return;
        __syncwarp();  // K_j complete, and the stage that is loaded now has been read
        const int key_0 = ((walk.s.first + walk.tile) << a.tile_bits) + Sharing::first_key(KEYS);
        const unsigned exists = loader.existing(stage);
        const bool all_seen = loader.all_exist() && key_0 >= from && key_0 <= to;
        math.scores(mem.Q[0], mem.KV[stage][0][warp][0]);
        // while the products are computed
        if (!LOADS_FIRST && !filled) loader.load(a, stage == 0 ? STAGES - 1 : stage - 1);
        filled = false;
        if (!all_seen)
          math.mask({key_0, walk.s.begin, walk.s.len, a.q_len, a.window, walk.row_0 * ROWS, a.group, exists});
        math.softmax(scale);
        if constexpr (COPY_GROUPS == 2) {
          cp_async_wait<2 * STAGES - 2>();
          __syncwarp();  // V_j complete
        }
        math.add_values(mem.KV[stage][1][warp][0], mem.KV[stage][0][warp][0]);  // K_j has been read
        stage = stage == STAGES - 1 ? 0 : stage + 1;
      };
      if constexpr (Load::SHORT_LOOP) {
#pragma unroll 1
        for (int i = 0; i < rounds; loader.find_places(a)) {
          const int stop = i + min(rounds - i, loader.places_left());
#pragma unroll 1
          for (; i < stop; ++i, walk.tile += 1 << walk.step_bits) add_tile();
        }
      } else {
#pragma unroll 1
        for (int i = 0; IN_STEP ? i < rounds : walk.tile < end; ++i, walk.tile += 1 << walk.step_bits) add_tile();
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
        // Subtrees whose right neighbour is not complete yet, of 1 << i leaves: small ones, which are many, in
        // registers.
        constexpr int FIT = Math::template STATES_THAT_FIT<PAGED>;
        typename Math::State waiting[Sharing::LEVELS], in_registers[FIT ? FIT : 1];
#pragma unroll 1
        for (int i = 0; i < max(1, leaves); ++i) {
          if (i > 0) walk.tile = reversed(walk.leaf + i, walk.step_bits);
          add_tiles(walk.end);
          if (leaves <= 1) break;
#pragma unroll
          for (int level = 0; level < FIT; ++level) {
            const int half = 1 << level, of_subtree = i & (2 * half - 1);
            if (of_subtree == half - 1 && i < leaves - 1) {
              by_a_branch();  // not a select of each number, taken or not
              in_registers[level] = math;
            }
            if (of_subtree == 2 * half - 1) math.merge_into(in_registers[level]);
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
      if (!share.next(a, mem.buffer)) return;
      early = false;
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
}

template <typename Math, typename Sharing, bool PAGED, bool FILLS = false>
static cudaError_t launch(const Decode& a, int blocks, cudaStream_t stream) {
  constexpr auto kernel = decode_kernel<Math, Sharing, PAGED, FILLS>;
  if (cudaError_t error = allow_shared_memory<kernel, sizeof(Shared<Math, Sharing>)>()) return error;
  if (cudaError_t error = prefer_shared_memory<kernel>()) return error;
  const int bytes = Shared<Math, Sharing>::bytes(Sharing::most_tiles(a, blocks));
  return Sharing::launch(kernel, a, blocks, bytes, stream);
}
template <typename Math, typename Sharing>
static cudaError_t launch(Decode a, int blocks, cudaStream_t stream) {
  while (1 << a.tile_bits < Sharing::TILE_WARPS * Math::KEYS) ++a.tile_bits;
  a.row_tiles = Divisor(ceil_div(a.rows, Math::ROWS)), a.pairs = Divisor(a.kv_heads * a.row_tiles.d);
  if (!a.block_table) return launch<Math, Sharing, false>(a, blocks, stream);
  // Eight warps find a tile's place when the tile before has been asked for. Of so many tiles all that there is room
  // for are asked for ahead: meanwhile the memory has more to deliver.
  if constexpr (WARPS == 8 && !IN_STEP && Math::ROWS == 8 && sizeof(typename Math::T) == 2) {
    const auto tiles = Sharing::most_tiles(a, blocks);
    if (tiles >= 7 && tiles < 24) return launch<Math, Sharing, true, true>(a, blocks, stream);
  }
  return launch<Math, Sharing, true>(a, blocks, stream);
}
