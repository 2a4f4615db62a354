// Chunked prefill: see chunk.cuh.
// architectures: sm_90a cpu
constexpr bool GAPS = false, BATCH_INVARIANT = false;
#include "chunk.cuh"

// How many clusters of so many blocks the GPU holds at once. In each of the kernels a block takes an SM.
extern "C" int clusters_at_once(int splits) {
  constexpr auto kernel = chunk_kernel<__nv_bfloat16, 128, 128, false>;
  using Memory = Shared<128, 128>;
  if (allow_shared_memory<kernel, sizeof(Memory)>()) return 0;
  return most_clusters(kernel, Memory::THREADS, sizeof(Memory), splits);
}

extern "C" cudaError_t chunk(View q, View k, View v, View out, const int* seqlens_k, float scale, int causal, int rows,
                             int splits, int clusters, int at_once, int parts, float* partial, int* counters, int dtype,
                             cudaStream_t stream) {
  Chunk c;
  return launch(c, q, k, v, out, seqlens_k, scale, causal, rows, splits, clusters, at_once, parts, partial, counters,
                dtype, stream);
}
