// A pair's blocks are a cluster: they are on SMs near each other, and send their parts to each other's shared memory.
// Hopper and later.
#pragma once
#include <cuda_runtime.h>

#include "cluster_memory.cuh"
#include "pipeline.cuh"

constexpr int MOST_BLOCKS = 16;  // of a cluster

struct Cluster {
  static constexpr bool SEVERAL_SEGMENTS = false;

  // Of the quads (four columns of a row) each block merges every so manieth, of which it gets all blocks' parts.
  template <int ROWS_, int D_>
  struct Buffer {
    static constexpr int ROWS = ROWS_, D = D_;
    float4 O[ROWS * D / 4];  // [block][quads of this block]
    float2 ml[MOST_BLOCKS][ROWS];
  };
  int rank, bits;  // 1 << bits blocks
  int begin, end;  // this block's tiles of the pair
  int2 known, now;  // the sequence's lengths, before and after the launch ahead of this one is complete

  DEVICE void find(const Decode& a, Walk& w) {
    rank = blockIdx.x, bits = 31 - __clz(gridDim.x);
    w.b = blockIdx.z;
    w.at(a, blockIdx.y);
    known = lengths(a, w.b);
    w.s = sequence(a, known);
    w.tile = begin = w.s.tiles * rank >> bits;
    w.end = end = w.s.tiles * (rank + 1) >> bits;
  }
  DEVICE bool any() const { return begin < end; }
  DEVICE bool takes_part() const { return true; }
  DEVICE void read_again(const Decode& a, const Walk& w) { now = lengths(a, w.b); }
  DEVICE bool holds(const Decode&, const Walk&) const { return now.x == known.x && now.y == known.y; }
  DEVICE void start() const { arrive_in_cluster(); }
  DEVICE void meet() const { wait_for_cluster(); }  // all blocks of the cluster have started

  template <int ROWS, int D>
  DEVICE void put(Buffer<ROWS, D>& buffer, int row, int e, const Part& p) const {
    const int quad = (row * D + e) / 4, to = quad & ((1 << bits) - 1);
    store_to(to, &buffer.O[(rank * (ROWS * D / 4) + quad) >> bits], p.O);
    if (e >> (bits + 2) == 0) store_to(to, &buffer.ml[rank][row], make_float2(p.m, p.l));
  }

  template <typename T, int ROWS, int D>
  DEVICE void merge_blocks(const Decode& a, const Walk& w, Buffer<ROWS, D>& buffer) const {
    const int row_0 = w.row_0 * ROWS, quads = min(ROWS, a.rows - row_0) * D / 4;
    arrive_in_cluster();
    wait_for_cluster();  // all parts are here
    for (int quad = rank + (threadIdx.x << bits); quad < quads; quad += THREADS << bits) {
      const int row = quad * 4 / D, e = quad * 4 % D;
      const Part p = merge_parts(0, 1 << bits, [&](int n) -> Part {
        return {buffer.ml[n][row].x, buffer.ml[n][row].y, buffer.O[(n * (ROWS * D / 4) + quad) >> bits]};
      });
      write_out<T>(a, w, row_0 + row, e, p);
    }
  }

  static cudaError_t launch(void (*kernel)(Decode), const Decode& a, int blocks, int bytes, cudaStream_t stream) {
    const int pairs = a.kv_heads * a.row_tiles.d, of_a_cluster = blocks / (a.batch * pairs);
    if (of_a_cluster > 8) {
      cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
      if (error) return error;
    }
    return launch_kernel(kernel, dim3(of_a_cluster, pairs, a.batch), THREADS, bytes, stream, a, of_a_cluster);
  }
};

// How many clusters the GPU holds at once; 0 if that cannot be said.
template <typename Math>
static int clusters_at_once(int blocks, int tiles) {
  constexpr auto kernel = decode_kernel<Math, Cluster, false>;  // with pages, as many
  if (allow_shared_memory<kernel, sizeof(Shared<Math, Cluster>)>() || prefer_shared_memory<kernel>() ||
      cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1))
    return 0;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {unsigned(blocks), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks), config.blockDim = dim3(THREADS);
  config.dynamicSmemBytes = Shared<Math, Cluster>::bytes(tiles);
  config.attrs = &attribute, config.numAttrs = 1;
  int clusters = 0;
  return cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) ? 0 : clusters;
}
