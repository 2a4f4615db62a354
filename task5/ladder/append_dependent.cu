// append.cu for Hopper: the launch begins while the one before it ends, and lets the one after it begin.
// architectures: sm_90a cpu
//
// Compared with append.cu, the launch, its wait and the next launch's start differ: dependent_launch.cuh.
#include "dependent_launch.cuh"

#include "append.cuh"

extern "C" cudaError_t append(View q, View k, View v, View k_cache, View v_cache, const int* seqlens_k,
                              const int* block_table, int max_pages, const float* cos, const float* sin, int positions,
                              int dtype, cudaStream_t stream) {
  return launch_append(q, k, v, k_cache, v_cache, seqlens_k, block_table, max_pages, cos, sin, positions, dtype,
                       stream);
}
