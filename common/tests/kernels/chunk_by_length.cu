// Which tile is each block's, or each cluster's, where lengths decide how many clusters a tile has.
// architectures: sm_90a cpu
constexpr bool GAPS = false, BATCH_INVARIANT = false;
#include "../../../task5/ladder/chunk_by_length.cuh"

__global__ void find_items(Chunk c, int* found) {
  __shared__ Item item;
  find_item_by_length(c, item);
  __syncwarp();
  int* to = found + 4 * blockIdx.x;
  if (threadIdx.x == 0) to[0] = item.b, to[1] = item.kv_head, to[2] = item.cluster, to[3] = item.clusters;
}

// found: (blocks, 4); the last number is 0 where a block has nothing to do.
extern "C" cudaError_t find(const int* seqlens, int batch, int kv_heads, int kv_len, int splits, int at_once,
                            int blocks, int* found, cudaStream_t stream) {
  Chunk c{};
  c.a.batch = batch, c.a.kv_heads = kv_heads, c.a.kv_len = kv_len, c.seqlens_k = seqlens;
  c.tiles = 1, c.splits = splits, c.clusters = 1, c.at_once = at_once;
  find_items<<<blocks, 32, 0, stream>>>(c, found);
  return cudaGetLastError();
}
