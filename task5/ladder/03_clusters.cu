// Rung 3. The blocks that share a pair are a cluster, and send their parts to each other's shared memory.
// architectures: sm_90a cpu
//
//   grid   (blocks of a pair, pairs of a sequence, batch)
//
// Compared with rung 2, no part goes through global memory and no block is counted, but for long caches of few pairs;
// and a block has one segment: its code is less than half as long. Where a launch takes 4 microseconds, fetching
// instructions is a good part of them.
//
// A read of K and V serves 16 rows of q (MOST_ROWS), not 32: of 17 to 32 rows a second pair reads the keys again, on
// SMs that would be idle otherwise, and half of the rows are half of a warp's work for a tile.
constexpr int WARPS = 4, KV_BYTES = 64 * 1024, MOST_ROWS = 16;
#include "dependent_launch.cuh"

#include "cluster.cuh"
#include "dispatch.cuh"

extern "C" int rows_of_a_pair(int dtype, int head_dim, int rows) {
  return with_math(dtype, head_dim, rows, [](auto is) { return decltype(is)::Math::ROWS; });
}

extern "C" int keys_of_a_tile(int dtype, int head_dim, int rows) {
  return with_math(dtype, head_dim, rows, [](auto is) { return WARPS * decltype(is)::Math::KEYS; });
}

// How many clusters of so many blocks the GPU holds at once, where each block has so many tiles at most.
extern "C" int clusters_at_once(int dtype, int head_dim, int rows, int blocks, int tiles) {
  return with_math(dtype, head_dim, rows, [=](auto is) {
    return clusters_at_once<typename decltype(is)::Math>(blocks, tiles);
  });
}

extern "C" cudaError_t decode(View q, View k, View v, View out, const int* seqlens_k, const int* leftpad_k,
                              const int* block_table, int max_pages, int window, int new_keys, int chunks,
                              float scale, float* partial, int slots, int* counters, int blocks, int dtype,
                              cudaStream_t stream) {
  const Decode a = make_decode(q, k, v, out, seqlens_k, leftpad_k, block_table, max_pages, window, new_keys, chunks,
                               scale, partial, slots, counters);
  return cudaError_t(with_math(dtype, q.sizes[3], a.rows, [&](auto is) {
    return int(launch_clusters<typename decltype(is)::Math>(a, blocks, stream));
  }));
}
