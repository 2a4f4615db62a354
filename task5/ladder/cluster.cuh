// A pair's blocks are a cluster: they are on SMs near each other, and send their parts to each other's shared memory.
// Hopper and later.
//
// The keys of a pair are cut into the leaves of a tree. Each warp has one, or several that are neighbours, and merges
// its own as it goes; then a block merges its warps', and the cluster its blocks'. Long caches of few pairs have
// several clusters, since one lies in one GPC, or single blocks, since clusters do not fill all SMs: the last to come
// of a pair's merges their parts, from global memory. In a batch-invariant call the number of leaves follows from the
// sequence's length, so the tree is the same however many warps share it.
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
constexpr int MOST_LEAF_BITS = 9;  // of a tree

// Which cluster has which pair, where all pairs have as many: the grid says it.
struct ByGrid {
  static constexpr bool BY_LENGTH = false;
  static constexpr int SEQUENCES = 1;
  int2 own, now;  // the sequence's lengths, before and after the launch ahead of this one is complete

  DEVICE void start(const Decode&) {}
  DEVICE void find(const Decode& a) { own = lengths(a, b()); }
  DEVICE void read_again(const Decode& a) { now = lengths(a, b()); }
  DEVICE bool holds(const Decode&) const { return now.x == own.x && now.y == own.y; }
  DEVICE int b() const { return blockIdx.z; }
  DEVICE int pair() const { return blockIdx.y; }  // of the sequence's
  DEVICE int cluster(int block_bits) const { return blockIdx.x >> block_bits; }  // of the pair's
  DEVICE int clusters(const Decode& a) const { return 1 << a.cluster_bits; }
  DEVICE bool none() const { return false; }
  DEVICE bool more() const { return false; }
  DEVICE int ask(const Decode&) const { return 0; }
  DEVICE int further(const Decode&, int) const { return -1; }
  DEVICE void go_on(int) {}
  DEVICE int64_t first(const Decode& a) const { return int64_t(b() * int(a.pairs.d) + pair()) << a.cluster_bits; }
};

// A rung may say another: by_length.cuh.
#ifndef PLACE
#define PLACE ByGrid
#endif

// TREE: a warp may have several leaves. That is a batch-invariant call's with more leaves than warps.
template <bool TREE_>
struct Cluster {
  static constexpr bool SEVERAL_SEGMENTS = false, TREE = TREE_, BY_LENGTH = PLACE::BY_LENGTH;
  static constexpr int SEQUENCES = PLACE::SEQUENCES;
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
    float2 further;     // an item
  };
  PLACE place;
  int rank, bits;  // 1 << bits blocks
  int parity = 0;  // of what the blocks send each other
  int asked;       // a further item, of block 0's first thread

  template <typename Buffer>
  DEVICE void start(const Decode& a, Buffer& buffer) {
    bits = a.block_bits, rank = blockIdx.x & ((1 << bits) - 1);
    place.start(a);
    if (threadIdx.x == 0) {
      mbarrier_init(&buffer.received, 1);
      mbarrier_init_fence();
      if (!BY_LENGTH) expect(a, buffer, blockIdx.y);  // else the pair is not known yet
    }
    __syncwarp();
    start_in_cluster();
  }
  DEVICE void find(const Decode& a, bool paged, Walk& w) {
    place.find(a);
    w.b = place.b();
    w.at(a, place.pair());
    w.s = sequence(a, place.own);
    // In a batch-invariant call a pair has a power of two of clusters, as always if the grid says how many. If lengths
    // do, each cluster has neighbouring tiles.
    const bool apart = BY_LENGTH && !TREE && !a.chunks;
    const int clusters = place.clusters(a), cluster = place.cluster(bits);
    const int warps = bits + (apart ? 0 : 31 - __clz(clusters)) + WARP_BITS;
    const int warp = ((((apart ? 0 : cluster) << bits) + rank) << WARP_BITS) + threadIdx.x / 32;
    w.end = w.s.tiles;
    if (TREE || a.chunks) {
      w.step_bits = bits_of_leaves(a, 31 - __clz(a.chunks), 31 - __clz(rounded(w.s.tiles)));
      w.leaf = first_leaf(warp, warps, w.step_bits), w.leaf_end = first_leaf(warp + 1, warps, w.step_bits);
      w.tile = w.leaf < w.leaf_end ? reversed(w.leaf, w.step_bits) : w.end;
    } else {  // with pages not where a warp's would be far apart, or more; by selects, as a branch takes 0.1 us
      const bool in_order = !paged || IN_STEP || (warps <= 4 && w.s.tiles >= 4 << warps);
      w.step_bits = in_order ? warps : 0, w.tile = in_order ? warp : w.s.tiles * warp >> warps;
      w.end = in_order ? w.s.tiles : w.s.tiles * (warp + 1) >> warps;
      if (apart && clusters > 1) {
        const int each = w.s.tiles / clusters, more = w.s.tiles - each * clusters;
        const int first = each * cluster + min(cluster, more), tiles = each + (cluster < more);
        w.tile = first + (in_order ? warp : tiles * warp >> warps);
        w.end = first + (in_order ? tiles : tiles * (warp + 1) >> warps);
      }
    }
    if (place.none()) w.tile = w.end;
  }
  DEVICE bool has_nothing(const Walk&) const { return place.none(); }  // so that nothing waits for this block
  DEVICE bool any(const Walk& w) const { return w.tile < w.end; }
  DEVICE void read_again(const Decode& a) { place.read_again(a); }
  DEVICE static bool can_be_found_early(const Decode&) { return true; }
  DEVICE bool holds(const Decode& a) const { return place.holds(a); }
  // Whether the cluster takes a further item, for which all of its blocks have to be done with this one.
  template <typename Buffer>
  DEVICE bool next(const Decode& a, Buffer& buffer) {
    if (!place.more()) return false;
    if (rank == 0 && threadIdx.x == 0) {
      const float2 item = make_float2(__int_as_float(place.further(a, asked)), 0.0f);
      for (int to = 0; to < 1 << bits; ++to) store_to(to, &buffer.further, item);
    }
    __syncwarp();
    arrive_in_cluster(), wait_for_cluster();
    const int item = __float_as_int(buffer.further.x);
    if (item < 0) return false;
    __syncwarp();
    start_in_cluster();  // as start() does
    place.go_on(item), parity ^= 1;
    return true;
  }
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
  DEVICE void merge_blocks(const Decode& a, const Walk& w, Buffer<ROWS, D>& buffer) {
    const int quads = min(ROWS, a.rows - w.row_0 * ROWS) * D / 4;
    if (place.more() && rank == 0 && threadIdx.x == 0) asked = place.ask(a);
    if (bits > 0) {
      if (BY_LENGTH && threadIdx.x == 0) expect(a, buffer, w.pair);
      mbarrier_wait(&buffer.received, parity);
      for (int quad = rank + (threadIdx.x << bits); quad < quads; quad += THREADS << bits) {
        const int row = quad * 4 / D;
        finish<T, ROWS, D>(a, w, quad, merge_tree_of(bits, [&](int n) -> Part {
                             if (n >> bits) return {};
                             return {buffer.ml[n][row].x, buffer.ml[n][row].y,
                                     buffer.O[(n * (ROWS * D / 4) + quad) >> bits]};
                           }));
      }
    }
    if (place.clusters(a) == 1) return;
    clusters<ROWS, D>(a, w).merge(
        buffer.last, THREADS, quads, [] { __syncthreads(); },
        [&](int quad, const Part& p) { write<T, ROWS, D>(a, w, quad, p); });
  }

  // How long leaves are. Blocks of head_dim 256 are alone on an SM, so half of the warps that are counted share a pair.
  template <typename Math>
  static void cut(Decode& a) {
    constexpr bool alone = Math::D == 256 && sizeof(typename Math::T) == 2;
    a.one_tile_bits = Math::ONE_TILE_BITS;
    a.two_tile_bits = alone ? min(Math::TWO_TILE_BITS, log2(a.chunks) - 3) : Math::TWO_TILE_BITS;
  }
  static int leaves_of(const Decode& a, int tiles) {
    return 1 << bits_of_leaves(a, log2(a.chunks), log2(rounded(tiles)));
  }
  // Whether a sequence that fills its cache has more leaves than warps.
  template <typename Math>
  static bool needs_tree(const Decode& a, int blocks) {
    if (a.chunks == 0) return false;
    const int warps = of_a_whole_pair(a, blocks, a.kv_heads * ceil_div(a.rows, Math::ROWS)) * WARPS;
    return leaves_of(a, ceil_div(a.kv_len, Math::KEYS)) > warps;
  }
  // Of a warp, in a sequence of any length.
  static int64_t most_tiles(const Decode& a, int blocks) {
    const int tiles = ceil_div(a.kv_len, 1 << a.tile_bits), warps = of_a_whole_pair(a, blocks, pairs_of(a)) * WARPS;
    int most = ceil_div(tiles, warps);
    for (int longest = 2, some = 0; a.chunks && some < tiles; longest = 2 * longest + 1) {  // of as many leaves
      some = min(longest, tiles);
      most = max(most, ceil_div(some, min(warps, leaves_of(a, some))));
    }
    return most;
  }
  static cudaError_t launch(void (*kernel)(Decode), Decode a, int blocks, int bytes, cudaStream_t stream) {
    const int pairs = pairs_of(a), of_a_pair = of_a_whole_pair(a, blocks, pairs);
    while (!BY_LENGTH && int64_t(a.batch) * pairs << (a.cluster_bits + 1) <= a.slots) ++a.cluster_bits;
    const int of_a_cluster = of_a_pair >> a.cluster_bits;
    while (2 << a.block_bits <= of_a_cluster) ++a.block_bits;
    a.clusters_at_once = a.slots, a.clusters_of_each = a.slots / (a.batch * pairs);
    if (of_a_cluster > 8) {
      cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
      if (error) return error;
    }
    return launch_kernel(kernel, dim3(of_a_pair, pairs, sequences(a, pairs)), THREADS, bytes, stream, a, of_a_cluster);
  }

 private:
  template <int ROWS, int D>
  DEVICE SeveralClusters<ROWS, D, BY_LENGTH> clusters(const Decode& a, const Walk& w) const {
    const int pair = w.b * int(a.pairs.d) + w.pair;
    return {a, pair, place.cluster(bits), rank, place.clusters(a), bits, place.first(a)};
  }
  template <typename T, int ROWS, int D>
  DEVICE void write(const Decode& a, const Walk& w, int quad, const Part& p) const {
    write_out<T>(a, w, w.row_0 * ROWS + quad * 4 / D, quad * 4 % D, p);
  }
  // Of all keys, or of a cluster's.
  template <typename T, int ROWS, int D>
  DEVICE void finish(const Decode& a, const Walk& w, int quad, const Part& p) const {
    place.clusters(a) == 1 ? write<T, ROWS, D>(a, w, quad, p) : clusters<ROWS, D>(a, w).put(quad, p);
  }
  // What the blocks of a cluster send to this one.
  template <typename Buffer>
  DEVICE void expect(const Decode& a, Buffer& buffer, int pair) const {
    const int rows = min(Buffer::ROWS, a.rows - a.row_tiles.remainder(pair) * Buffer::ROWS);
    mbarrier_arrive_expect(&buffer.received, received_bytes(rows, Buffer::D, bits, rank));
  }
  // In a grid: by length as many as its clusters would be of, where these are more than pairs.
  static int sequences(const Decode& a, int pairs) { return BY_LENGTH ? max(a.batch, int(a.slots / pairs)) : a.batch; }
  // Blocks of a pair that is not cut.
  static int of_a_whole_pair(const Decode& a, int blocks, int pairs) { return blocks / (pairs * sequences(a, pairs)); }
  static int pairs_of(const Decode& a) { return a.kv_heads * a.row_tiles.d; }
  // Of the tree of a sequence that 1 << most warps could share, with 1 << tile_bits tiles, rounded: a leaf has one of
  // them or two where leaves are few, and four where these are more. Half as many leaves as warps are enough, or a
  // quarter where these are many, but for sequences with 16 tiles for each leaf, and all of them for those with 64.
  static __host__ DEVICE int bits_of_leaves(const Decode& a, int most, int tile_bits) {
    const int small = max(min(tile_bits, a.one_tile_bits), min(tile_bits - 1, a.two_tile_bits));
    const int few = min(max(small, tile_bits - 2), min(most - 1, max(most - 2, 5)));
    const int many = max(min(tile_bits - 4, most - 1), min(tile_bits - 6, most));
    return max(0, min(max(few, many), MOST_LEAF_BITS));
  }
  // To be taken as a power of two: the next one from three quarters of it on.
  static __host__ DEVICE int rounded(int tiles) { return tiles + tiles / 3; }
  static int log2(int n) {
    int bits = 0;
    while (2 << bits <= n) ++bits;
    return bits;
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
static cudaError_t launch_clusters(Decode a, int blocks, cudaStream_t stream) {
  Cluster<true>::cut<Math>(a);
  const bool tree = Cluster<true>::needs_tree<Math>(a, blocks);
  return tree ? launch<Math, Cluster<true>>(a, blocks, stream) : launch<Math, Cluster<false>>(a, blocks, stream);
}
