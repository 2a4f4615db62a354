// Rung 2. The launch begins while the one before it ends, and has L2 fetch its first keys meanwhile.
// architectures: sm_90a cpu
//
// Compared with rung 1, only the launch and its wait differ: dependent_launch.cuh.
constexpr int WARPS = 4, KV_BYTES = 64 * 1024, MOST_ROWS = 32;
#include "dependent_launch.cuh"

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
