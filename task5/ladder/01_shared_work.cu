// Rung 1. One read of K and V for all query heads of a group, and equal shares of the keys for all blocks.
//
//   grid   as many blocks as the GPU holds at once; each walks over its share of all tiles (decode.cuh: Share, Walk)
//   block  4 warps; each loads and computes 16 of a tile's 64 keys, by itself (tensor_cores.cuh)
//
// The rows of a group are the rows of a product on tensor cores: 16 of them, or 32, of which a single token of MHA uses
// one. That wastes arithmetic, of which there is plenty; what counts is that each key is read once.
#include "tensor_cores.cuh"

extern "C" int shared_memory_bytes(int rows, int head_dim) {
  const bool two = rows_of_a_pair(rows, head_dim) == 32;
  if (head_dim == 64) return two ? sizeof(Shared<__half, 64, 2>) : sizeof(Shared<__half, 64, 1>);
  if (head_dim == 128) return two ? sizeof(Shared<__half, 128, 2>) : sizeof(Shared<__half, 128, 1>);
  return sizeof(Shared<__half, 256, 1>);
}

extern "C" cudaError_t decode(View q, View k, View v, View out, const int* seqlens_k, const int* leftpad_k,
                              const int* block_table, int max_pages, int window, int chunks, float scale,
                              float* partial, int slots, int* counters, int blocks, int dtype, cudaStream_t stream) {
  Decode a = make_decode(q, k, v, out, seqlens_k, leftpad_k, block_table, max_pages, window, chunks, scale, partial,
                         slots, counters);
  if (dtype == FLOAT16) return launch<__half>(a, q.sizes[3], blocks, stream);
  if (dtype == BFLOAT16) return launch<__nv_bfloat16>(a, q.sizes[3], blocks, stream);
  return cudaErrorInvalidValue;
}
