// Rotary positions and the cache's new rows, in one launch: append.cuh.
#include "append.cuh"

extern "C" cudaError_t append(View q, View k, View v, View k_cache, View v_cache, const int* seqlens_k,
                              const int* block_table, int max_pages, const float* cos, const float* sin, int positions,
                              int dtype, cudaStream_t stream) {
  return launch_append(q, k, v, k_cache, v_cache, seqlens_k, block_table, max_pages, cos, sin, positions, dtype,
                       stream);
}
