// Rung 1. One read of K and V for all query heads of a group, and equal shares of the keys for all blocks.
//
//   grid   as many blocks as the GPU holds at once; each walks over its share of all tiles (equal_shares.cuh)
//   block  4 warps; each loads and computes its own keys of a tile, by itself (pipeline.cuh)
//
// In 16 bits the rows of a group are the rows of a product on tensor cores, of which a single token of MHA uses one.
// That wastes arithmetic, of which there is plenty; what counts is that each key is read once.
constexpr int WARPS = 4, KV_BYTES = 64 * 1024, MOST_ROWS = 32;
#include "dispatch.cuh"
#include "equal_shares.cuh"

extern "C" int rows_of_a_pair(int dtype, int head_dim, int rows) {
  return with_math(dtype, head_dim, rows, [](auto is) { return decltype(is)::Math::ROWS; });
}

extern "C" int keys_of_a_tile(int dtype, int head_dim, int rows) {
  return with_math(dtype, head_dim, rows, [](auto is) { return WARPS * decltype(is)::Math::KEYS; });
}

extern "C" int shared_memory_bytes(int dtype, int head_dim, int rows) {
  return with_math(dtype, head_dim, rows, [](auto is) {
    return int(sizeof(Shared<typename decltype(is)::Math, EqualShares>));
  });
}

extern "C" cudaError_t decode(View q, View k, View v, View out, const int* seqlens_k, const int* leftpad_k,
                              const int* block_table, int max_pages, int window, int new_keys, int chunks,
                              float scale, float* partial, int slots, int* counters, int blocks, int dtype,
                              cudaStream_t stream) {
  const Decode a = make_decode(q, k, v, out, seqlens_k, leftpad_k, block_table, max_pages, window, new_keys, chunks,
                               scale, partial, slots, counters);
  return cudaError_t(with_math(dtype, q.sizes[3], a.rows, [&](auto is) {
    return int(launch<typename decltype(is)::Math, EqualShares>(a, blocks, stream));
  }));
}
