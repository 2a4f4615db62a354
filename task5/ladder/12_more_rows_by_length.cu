// Rung 12. By length, with 32 rows for each read of K and V.
// architectures: sm_90a cpu
//
// Compared with rung 11, PLACE, as rung 10's.
#define ALWAYS_MOST_ROWS true
constexpr int WARPS = 8, KV_BYTES = 192 * 1024, MOST_ROWS = 32;
#include "dependent_launch.cuh"

#include "by_length.cuh"
#define PLACE ByLength
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
