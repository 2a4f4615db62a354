// The kernel around the arithmetic: K and V on their way to shared memory while earlier ones are computed with.
//
// Every warp has a pipeline of its own: cp.async brings its KEYS keys of a tile and their values, a few tiles ahead.
// The warps meet only at the end of a segment, or of a chunk, where their parts are merged. The pipeline runs on.
// `Math` is what a warp does with keys and with values: tensor_cores.cuh, fp32.cuh. `Sharing` says which tiles are a
// block's, and how the parts of a pair's blocks are merged: equal_shares.cuh, cluster.cuh.
#pragma once
#include <cuda_runtime.h>

#include "decode.cuh"
#include "ptx.cuh"

template <typename Math, typename Sharing>
struct Shared {
  using T = typename Math::T;
  static constexpr int STAGE = 2 * WARPS * Math::KEYS * Math::D * sizeof(T);  // keys of a tile and their values
  static constexpr int STAGES = KV_BYTES / STAGE > 2 ? KV_BYTES / STAGE : 2;
  float m[WARPS][Math::ROWS], l[WARPS][Math::ROWS];  // the warps' parts
  alignas(16) typename Sharing::template Buffer<Math::ROWS, Math::D> buffer;
  alignas(128) T Q[Math::ROWS][Math::D];
  alignas(128) T KV[STAGES][2][WARPS][Math::KEYS][Math::D];  // in the end the warps' O_i

  static constexpr int O_BYTES = WARPS * Math::ROWS * Math::D * sizeof(float);
  static_assert(O_BYTES <= STAGES * STAGE, "room for the warps' O_i");
  // Of a block that has so many tiles at most.
  static int bytes(int64_t tiles) {
    const int64_t stages = max(tiles, int64_t(O_BYTES + STAGE - 1) / STAGE);
    return sizeof(Shared) - (STAGES - min(stages, int64_t(STAGES))) * STAGE;
  }
};

// A warp's keys of the tiles of its block's share, a few tiles ahead of where they are used.
template <typename Math, typename Sharing, bool PAGED>
struct Loader {
  using T = typename Math::T;
  static constexpr int PIECE = 16 / sizeof(T), PIECES = Math::D / PIECE;  // a row is copied in pieces of 16 bytes
  static constexpr int LANES = PIECES < 32 ? PIECES : 32, AT_ONCE = 32 / LANES;  // rows that the warp copies at once
  static constexpr int GROUPS = (Math::KEYS + 15) / 16;  // 16 keys are never on two pages
  static constexpr int ROWS = Math::KEYS / GROUPS;
  Walk walk;
  Pages pages;
  bool loading;
  unsigned exists;  // bits GROUPS * i and on: which groups of keys of stage i have a page

  DEVICE int key_of(const Decode& a, int group) const {
    return ((walk.s.first + walk.tile) << a.tile_bits) + threadIdx.x / 32 * Math::KEYS + group * ROWS;
  }
  // The pages of the tile's keys. Numbers that are not known yet are on their way until load() needs them.
  DEVICE void find_pages(const Decode& a) {
    if constexpr (PAGED) pages.reach(a, walk.b, walk.s.len, a.page_size.quotient(key_of(a, 0)));
  }

  // Starts copying the next tile, if there is one, to stage `stage`; zeros for what no row sees. Keys and values are a
  // group of copies each, in any case.
  DEVICE void load(const Decode& a, T (*stages)[2][WARPS][Math::KEYS][Math::D], int stage) {
    constexpr unsigned ALL = (1u << GROUPS) - 1;
    const int warp = threadIdx.x / 32;
    const T *k[GROUPS], *v[GROUPS];
    int seen_from[GROUPS], seen_to[GROUPS];  // rows
    if (loading) {
      exists &= ~(ALL << GROUPS * stage);
#pragma unroll
      for (int n = 0; n < GROUPS; ++n) {
        const int key = key_of(a, n);
        const bool inside = find(a, key, k[n], v[n]);
        exists |= unsigned(inside) << (GROUPS * stage + n);
        seen_from[n] = walk.s.begin - key, seen_to[n] = inside ? walk.s.len - key : 0;
        copy(stages[stage][0][warp][n * ROWS], k[n], a.k_strides.row, seen_from[n], seen_to[n]);
      }
    }
    cp_async_commit();
    if (loading) {
#pragma unroll
      for (int n = 0; n < GROUPS; ++n)
        copy(stages[stage][1][warp][n * ROWS], v[n], a.v_strides.row, seen_from[n], seen_to[n]);
      loading = next(a);
      loading ? find_pages(a) : begin_the_next_launch();
    }
    cp_async_commit();
  }

  // Has L2 fetch the next tile.
  DEVICE void prefetch(const Decode& a) const {
    constexpr int LINE = 128, LINES = Math::D * sizeof(T) / LINE;  // of a row
#pragma unroll
    for (int n = 0; n < GROUPS; ++n) {
      const T *k, *v;
      const int key = key_of(a, n);
      if (!find(a, key, k, v)) continue;
#pragma unroll
      for (int i = threadIdx.x % 32; i < ROWS * LINES; i += 32) {
        const int row = i / LINES, byte = i % LINES * LINE;
        if (key + row < walk.s.begin || key + row >= walk.s.len) continue;
        prefetch_L2(reinterpret_cast<const char*>(k + row * a.k_strides.row) + byte);
        prefetch_L2(reinterpret_cast<const char*>(v + row * a.v_strides.row) + byte);
      }
    }
  }

 private:
  // Where 16 keys (or fewer) and their values are; whether their page is inside of the pool.
  DEVICE bool find(const Decode& a, int key, const T*& k, const T*& v) const {
    int b = walk.b, row = key;
    if constexpr (PAGED) b = key < walk.s.len ? pages(a.page_size.quotient(key)) : -1, row = a.page_size.remainder(key);
    k = static_cast<const T*>(a.k) + b * a.k_strides.batch + walk.kv_head * a.k_strides.head + row * a.k_strides.row;
    v = static_cast<const T*>(a.v) + b * a.v_strides.batch + walk.kv_head * a.v_strides.head + row * a.v_strides.row;
    return !PAGED || unsigned(b) < unsigned(a.pages);
  }
  // Where nothing is copied the address is not read.
  static DEVICE void copy(T* to, const T* from, int64_t stride, int seen_from, int seen_to) {
    const int lane = threadIdx.x % 32;
    from += lane / LANES * stride + lane % LANES * PIECE;
#pragma unroll
    for (int i = 0; i < ROWS; i += AT_ONCE) {
      const int row = i + lane / LANES;
#pragma unroll
      for (int piece = 0; piece < PIECES; piece += LANES)
        cp_async<16>(to + Math::offset(row, piece + lane % LANES), from + i * stride + piece * PIECE,
                     row >= seen_from && row < seen_to);
    }
  }
  DEVICE bool next(const Decode& a) {  // whether there is one
    if (++walk.tile < walk.end) return true;
    if constexpr (Sharing::SEVERAL_SEGMENTS) {
      if (walk.more()) {
        walk.next_segment(a);
        return true;
      }
    }
    return false;
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

// Merges the warps' parts of columns [e_0, e_0 + width): row r of a warp's O is at O[warp * stride + r * width].
// use(row, e, part) takes what comes out.
template <typename Memory, typename Use>
DEVICE void merge_warps(const Memory& mem, const float* O, int stride, int rows, int e_0, int width, Use use) {
  const int quads = width / 4;
#pragma unroll 1
  for (int i = threadIdx.x; i < rows * quads; i += THREADS) {
    const int row = i / quads, e = 4 * (i - row * quads);
    Part p, parts[WARPS];
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp)
      parts[warp] = {mem.m[warp][row], mem.l[warp][row],
                     *reinterpret_cast<const float4*>(&O[warp * stride + row * width + e])};
    merge(p, parts);
    use(row, e_0 + e, p);
  }
}

// Three of a cluster's blocks are on an SM where that is said; ptxas would go on to a fourth, which spills.
template <typename Math, typename Sharing>
constexpr int FEWEST_ON_AN_SM = !Sharing::SEVERAL_SEGMENTS && Math::D == 64 && sizeof(typename Math::T) == 2 ? 3 : 0;

template <typename Math, typename Sharing, bool PAGED>
__global__ void __launch_bounds__(THREADS, (FEWEST_ON_AN_SM<Math, Sharing>)) decode_kernel(Decode a) {
  using T = typename Math::T;
  using Memory = Shared<Math, Sharing>;
  constexpr int D = Math::D, ROWS = Math::ROWS, KEYS = Math::KEYS, STAGES = Memory::STAGES;
  constexpr int GROUPS = Loader<Math, Sharing, PAGED>::GROUPS;
  extern __shared__ __align__(128) uint4 shared[];
  Memory& mem = *reinterpret_cast<Memory*>(shared);
  const int warp = threadIdx.x / 32;

  Loader<Math, Sharing, PAGED> loader;
  Queries<Math> queries;
  Sharing share;
  share.start();
  Walk walk;
  // What is found before the launch ahead of this one is complete may have changed then: once more, in that case.
  for (bool again = !DEPENDENT;; again = true) {
    share.find(a, loader.walk);
    queries.find(a, loader.walk);
    if (again) {
      cp_async_wait<0>();
    } else {
      if (AHEAD && share.any()) {  // what was read may be old, but L2 is never wrong
        loader.find_pages(a);
        loader.prefetch(a);
      }
      wait_for_the_launch_before();
    }
    queries.load();
    share.read_again(a, loader.walk);
    if (again || !AHEAD || !share.any()) loader.pages.forget();
    const Pages found = loader.pages, then = PAGED ? found.read_again(a, loader.walk.s.len) : found;
    loader.find_pages(a);
    walk = loader.walk;
    loader.loading = share.any(), loader.exists = 0;
#pragma unroll 1
    for (int stage = 0; stage < STAGES - 1; ++stage) loader.load(a, mem.KV, stage);
    if (again || (share.holds(a, walk) && found.hold(then))) break;
  }
  if (!share.takes_part()) return;
  queries.store(mem.Q[0]);
  __syncthreads();  // Q complete

  Math math;
  math.load_queries(mem.Q[0]);
  const float scale = a.scale * LOG2_E;
  int stage = 0;
#pragma unroll 1
  while (true) {  // segments, and chunks of them
    int end = walk.end;
    if constexpr (Sharing::SEVERAL_SEGMENTS) {
      if (a.chunks) end = min((walk.tile / walk.chunk + 1) * walk.chunk, end);
    }
    math.start();
#pragma unroll 1
    for (; walk.tile < end; ++walk.tile) {
      cp_async_wait<2 * STAGES - 3>();
      __syncwarp();  // K_j complete, and the stage that is loaded now has been read
      const int key_0 = ((walk.s.first + walk.tile) << a.tile_bits) + warp * KEYS;
      const unsigned all = (1u << GROUPS) - 1, exists = loader.exists >> GROUPS * stage & all;
      const bool all_seen = exists == all && key_0 + KEYS <= walk.s.len - a.q_len + 1 &&
                            key_0 >= walk.s.begin + (a.window ? a.q_len - 1 : 0);
      math.scores(mem.Q[0], mem.KV[stage][0][warp][0]);
      loader.load(a, mem.KV, stage == 0 ? STAGES - 1 : stage - 1);  // while the products are computed
      if (!all_seen)
        math.mask({key_0, walk.s.begin, walk.s.len, a.q_len, a.window, walk.row_0 * ROWS, a.group, exists});
      math.softmax(scale);
      cp_async_wait<2 * STAGES - 2>();
      __syncwarp();  // V_j complete
      math.add_values(mem.KV[stage][1][warp][0]);
      stage = stage == STAGES - 1 ? 0 : stage + 1;
    }

    const int row_0 = walk.row_0 * ROWS, rows = min(ROWS, a.rows - row_0);
    float* O = reinterpret_cast<float*>(mem.KV);
    if constexpr (!Sharing::SEVERAL_SEGMENTS) {
      __syncthreads();  // the stages have been read: now they are the warps' O_i
      math.put(O + warp * ROWS * D, 0, D, rows);
      math.put_ml(mem.m[warp], mem.l[warp], rows);
      share.meet();
      __syncthreads();  // the warps' parts complete
      merge_warps(mem, O, ROWS * D, rows, 0, D, [&](int row, int e, const Part& p) {
        share.put(mem.buffer, row, e, p);
      });
      share.template merge_blocks<T>(a, walk, mem.buffer);
      return;
    } else {
      const bool segment_ends = walk.tile == walk.end, more = walk.more(), last = segment_ends && !more;
      const bool done = segment_ends && walk.pair_units == (a.chunks ? 1 : walk.units);
      Walk next = walk;
      if (segment_ends && more) {
        next.next_segment(a);
        queries.find(a, next);
        queries.load();  // arrives while the parts are merged
      }
      // At the end of the share the stages are free, and have room for all columns.
      if (!last) O = mem.buffer.O[0];
      const int stride = last ? ROWS * D : mem.buffer.FLOATS, columns = last ? D : min(D, stride / rows / 8 * 8);
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

template <typename Math, typename Sharing, bool PAGED>
static cudaError_t launch(Decode a, int blocks, cudaStream_t stream) {
  constexpr auto kernel = decode_kernel<Math, Sharing, PAGED>;
  constexpr int B_c = WARPS * Math::KEYS;
  while (1 << a.tile_bits < B_c) ++a.tile_bits;
  a.row_tiles = Divisor(ceil_div(a.rows, Math::ROWS));
  if (cudaError_t error = allow_shared_memory<kernel, sizeof(Shared<Math, Sharing>)>()) return error;
  if (cudaError_t error = prefer_shared_memory<kernel>()) return error;
  const int tiles = ceil_div(a.kv_len, B_c), of_a_unit = a.chunks ? ceil_div(tiles, a.chunks) : 1;
  const int64_t units = int64_t(a.chunks ? a.chunks : tiles) * a.batch * a.kv_heads * a.row_tiles.d;
  const int bytes = Shared<Math, Sharing>::bytes((units + blocks - 1) / blocks * of_a_unit);
  return Sharing::launch(kernel, a, blocks, bytes, stream);
}
template <typename Math, typename Sharing>
static cudaError_t launch(const Decode& a, int blocks, cudaStream_t stream) {
  if (a.block_table) return launch<Math, Sharing, true>(a, blocks, stream);
  return launch<Math, Sharing, false>(a, blocks, stream);
}
