// Chunked prefill against pages, in a window, or behind padding: see chunk.cuh.
// architectures: sm_90a cpu
constexpr bool GAPS = true, BATCH_INVARIANT = false;
#include "chunk.cuh"

extern "C" cudaError_t chunk(View q, View k, View v, View out, const int* seqlens_k, const int* leftpad_k,
                             const int* block_table, int max_pages, int window, float scale, int causal, int rows,
                             int splits, int clusters, int at_once, int parts, float* partial, int* counters, int dtype,
                             cudaStream_t stream) {
  Chunk c;
  set_gaps(c, k, leftpad_k, block_table, max_pages, window);
  return launch(c, q, k, v, out, seqlens_k, scale, causal, rows, splits, clusters, at_once, parts, partial, counters,
                dtype, stream);
}
