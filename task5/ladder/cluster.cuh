// A pair's blocks are a cluster: they are on SMs near each other, and send their parts to each other's shared memory.
// Hopper and later.
//
// The keys of a pair are cut into the leaves of a tree. Each warp has one, or several that are neighbours, and merges
// its own as it goes; then a block merges its warps', and the cluster its blocks'. Long caches of few pairs have single
// blocks instead of a cluster, since clusters do not fill all SMs: the last of a pair's blocks merges their parts, from
// global memory. In a batch-invariant call the number of leaves follows from the sequence's length, so the tree is the
// same however many warps share it.
//
// Of n leaves each has every n-th tile, so that at any time a pair's warps read keys that are neighbours: memory is
// faster in order. With several leaves a warp, they are that for any number of warps if leaf i begins with the tile
// whose number has i's bits in reverse.
#pragma once
#include <cuda_runtime.h>

#include "../../task4/ladder/hopper.cuh"
#include "cluster_memory.cuh"
#include "pipeline.cuh"
#include "several_clusters.cuh"

constexpr int MOST_BLOCKS = 16;    // of a cluster
constexpr int MOST_LEAF_BITS = 7;  // of a tree
constexpr int WARP_BITS = WARPS == 4 ? 2 : 3;
static_assert(1 << WARP_BITS == WARPS);

// TREE: a warp may have several leaves. That is a batch-invariant call's with more leaves than warps.
template <bool TREE_>
struct Cluster {
  static constexpr bool SEVERAL_SEGMENTS = false, TREE = TREE_;
  static constexpr int TILE_WARPS = 1;  // a tile is of one warp
  static constexpr int LEVELS = MOST_LEAF_BITS - 2;  // of the tree, within one of four warps
  static DEVICE int first_key(int) { return 0; }

  // Of the quads (four columns of a row) each block merges every so manieth, of which it gets all blocks' parts.
  template <int ROWS_, int D_>
  struct Buffer {
    static constexpr int ROWS = ROWS_, D = D_;
    float4 O[ROWS * D / 4];  // [block][quads of this block]
    float2 ml[MOST_BLOCKS][ROWS];
    uint64_t received;  // counts what is sent here
    bool last;          // this block is the last of its pair
  };
  int rank, bits;   // 1 << bits blocks
  int2 known, now;  // the sequence's lengths, before and after the launch ahead of this one is complete

  template <typename Buffer>
  DEVICE void start(const Decode& a, Buffer& buffer) {
    bits = 31 - __clz(gridDim.x) - a.cluster_bits, rank = blockIdx.x & ((1 << bits) - 1);
    if (threadIdx.x == 0) {
      mbarrier_init(&buffer.received, 1);
      mbarrier_init_fence();
      const int rows = min(Buffer::ROWS, a.rows - a.row_tiles.remainder(blockIdx.y) * Buffer::ROWS);
      mbarrier_arrive_expect(&buffer.received, received_bytes(rows, Buffer::D, bits, rank));
    }
    __syncwarp();
    start_in_cluster();
  }
  DEVICE void find(const Decode& a, bool paged, Walk& w) {
    w.b = blockIdx.z;
    w.at(a, blockIdx.y);
    known = lengths(a, w.b);
    w.s = sequence(a, known);
    const int warps = bits + a.cluster_bits + WARP_BITS, warp = (blockIdx.x << WARP_BITS) + threadIdx.x / 32;
    w.end = w.s.tiles;
    if (TREE || a.chunks) {
      w.step_bits = bits_of_leaves(31 - __clz(a.chunks), 31 - __clz(w.s.tiles), a.leaf_tile_bits);
      w.leaf = first_leaf(warp, warps, w.step_bits), w.leaf_end = first_leaf(warp + 1, warps, w.step_bits);
      w.tile = w.leaf < w.leaf_end ? reversed(w.leaf, w.step_bits) : w.end;
    } else {  // with pages not where a warp's would be far apart, or more; by selects, as a branch takes 0.1 us
      const bool in_order = !paged || IN_STEP || (warps <= 4 && w.s.tiles >= 4 << warps);
      w.step_bits = in_order ? warps : 0, w.tile = in_order ? warp : w.s.tiles * warp >> warps;
      w.end = in_order ? w.s.tiles : w.s.tiles * (warp + 1) >> warps;
    }
  }
  DEVICE bool any(const Walk& w) const { return w.tile < w.end; }
  DEVICE bool takes_part() const { return true; }
  DEVICE void read_again(const Decode& a) { now = lengths(a, blockIdx.z); }
  DEVICE static bool can_be_found_early(const Decode&) { return true; }
  DEVICE bool holds() const { return now.x == known.x && now.y == known.y; }
  DEVICE void meet() const { wait_for_cluster(); }  // all blocks of the cluster have started
  // A part of a row's four columns, of the block's keys.
  template <typename T, int ROWS, int D>
  DEVICE void put(const Decode& a, const Walk& w, Buffer<ROWS, D>& buffer, int row, int e, const Part& p) const {
    const int quad = (row * D + e) / 4, to = quad & ((1 << bits) - 1);
    if (bits == 0) return finish<T, ROWS, D>(a, w, quad, p);
    send_to(to, &buffer.O[(rank * (ROWS * D / 4) + quad) >> bits], p.O, &buffer.received);
    if (e >> (bits + 2) == 0) send_to(to, &buffer.ml[rank][row], make_float2(p.m, p.l), &buffer.received);
  }

  template <typename T, int ROWS, int D>
  DEVICE void merge_blocks(const Decode& a, const Walk& w, Buffer<ROWS, D>& buffer) const {
    const int quads = min(ROWS, a.rows - w.row_0 * ROWS) * D / 4;
    if (bits > 0) {
      mbarrier_wait(&buffer.received, 0);
      for (int quad = rank + (threadIdx.x << bits); quad < quads; quad += THREADS << bits) {
        const int row = quad * 4 / D;
        finish<T, ROWS, D>(a, w, quad, merge_tree_of(bits, [&](int n) -> Part {
                             if (n >> bits) return {};
                             return {buffer.ml[n][row].x, buffer.ml[n][row].y,
                                     buffer.O[(n * (ROWS * D / 4) + quad) >> bits]};
                           }));
      }
    }
    if (a.cluster_bits == 0) return;
    clusters<ROWS, D>(a, w).merge(
        buffer.last, THREADS, quads, [] { __syncthreads(); },
        [&](int quad, const Part& p) { write<T, ROWS, D>(a, w, quad, p); });
  }

  // Whether a sequence that fills its cache has more leaves than warps.
  template <typename Math>
  static bool needs_tree(const Decode& a, int blocks) {
    if (a.chunks == 0) return false;
    const int warps = blocks / (a.batch * a.kv_heads * ceil_div(a.rows, Math::ROWS)) * WARPS;
    int most = 0, tile_bits = 0;
    while (2 << most <= a.chunks) ++most;
    while (2 << tile_bits <= ceil_div(a.kv_len, Math::KEYS)) ++tile_bits;
    return 1 << bits_of_leaves(most, tile_bits, leaf_tile_bits<Math>()) > warps;
  }
  // Of a warp.
  static int64_t most_tiles(const Decode& a, int blocks) {
    const int tiles = ceil_div(a.kv_len, 1 << a.tile_bits), warps = blocks / (a.batch * pairs_of(a)) * WARPS;
    return max(ceil_div(tiles, warps), a.chunks ? 8 : 1);  // fewer leaves than warps: of eight tiles, or long
  }
  static cudaError_t launch(void (*kernel)(Decode), Decode a, int blocks, int bytes, cudaStream_t stream) {
    const int pairs = pairs_of(a), of_a_pair = blocks / (a.batch * pairs);
    while (int64_t(a.batch) * pairs << (a.cluster_bits + 1) <= a.slots) ++a.cluster_bits;
    const int of_a_cluster = of_a_pair >> a.cluster_bits;
    if (of_a_cluster > 8) {
      cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
      if (error) return error;
    }
    return launch_kernel(kernel, dim3(of_a_pair, pairs, a.batch), THREADS, bytes, stream, a, of_a_cluster);
  }

 private:
  template <int ROWS, int D>
  DEVICE SeveralClusters<ROWS, D> clusters(const Decode& a, const Walk& w) const {
    return {a, w.b * a.pairs() + w.pair, int(blockIdx.x) >> bits, rank, bits};
  }
  template <typename T, int ROWS, int D>
  DEVICE void write(const Decode& a, const Walk& w, int quad, const Part& p) const {
    write_out<T>(a, w, w.row_0 * ROWS + quad * 4 / D, quad * 4 % D, p);
  }
  // Of all keys, or of a cluster's.
  template <typename T, int ROWS, int D>
  DEVICE void finish(const Decode& a, const Walk& w, int quad, const Part& p) const {
    a.cluster_bits == 0 ? write<T, ROWS, D>(a, w, quad, p) : clusters<ROWS, D>(a, w).put(quad, p);
  }
  static int pairs_of(const Decode& a) { return a.kv_heads * a.row_tiles.d; }
  // Of the tree of a sequence that 1 << most warps could share: half as many leaves, or a quarter where they are many;
  // all of them in the longest sequences. A leaf has two tiles, or 1 << leaf_tile_bits where there are many.
  static __host__ DEVICE int bits_of_leaves(int most, int tile_bits, int leaf_tile_bits) {
    const int few = min(min(most - 1, max(most - 2, 5)), max(min(tile_bits - 1, 5), tile_bits - leaf_tile_bits));
    return max(0, min(max(few, min(most, tile_bits - 6)), MOST_LEAF_BITS));
  }
  // Of 1 << leaves, where 1 << warps warps share them.
  static DEVICE int first_leaf(int warp, int warps, int leaves) {
    return ((warp << leaves) + (1 << warps) - 1) >> warps;
  }
};

// How many clusters the GPU holds at once; 0 if that cannot be said.
template <typename Math>
static int clusters_at_once(int blocks, int tiles) {
  constexpr auto kernel = decode_kernel<Math, Cluster<true>, false>;  // of the others, no fewer
  if (allow_shared_memory<kernel, sizeof(Shared<Math, Cluster<true>>)>() || prefer_shared_memory<kernel>() ||
      cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1))
    return 0;
  return most_clusters(kernel, THREADS, Shared<Math, Cluster<true>>::bytes(tiles), blocks);
}

template <typename Math>
static cudaError_t launch_clusters(const Decode& a, int blocks, cudaStream_t stream) {
  const bool tree = Cluster<true>::needs_tree<Math>(a, blocks);
  return tree ? launch<Math, Cluster<true>>(a, blocks, stream) : launch<Math, Cluster<false>>(a, blocks, stream);
}
