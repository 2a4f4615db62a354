// Chunked prefill against pages, in a window, or behind padding: see chunk.cuh.
// architectures: sm_90a cpu
constexpr bool GAPS = true;
#include "chunk.cuh"

extern "C" cudaError_t chunk(View q, View k, View v, View out, const int* seqlens_k, const int* leftpad_k,
                             const int* block_table, int max_pages, int window, float scale, int causal, int rows,
                             int splits, int clusters, float* partial, int* counters, int dtype, cudaStream_t stream) {
  Chunk c;
  c.leftpad_k = leftpad_k, c.block_table = block_table, c.max_pages = max_pages, c.window = window;
  c.pages = k.sizes[0], c.page_size = k.sizes[1];
  while (block_table && c.page_size % (1 << c.box_bits)) --c.box_bits;
  return launch(c, q, k, v, out, seqlens_k, scale, causal, rows, splits, clusters, partial, counters, dtype, stream);
}
