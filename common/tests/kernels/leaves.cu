// Into how many leaves a batch-invariant call cuts so many keys.
// architectures: sm_90a cpu
constexpr int WARPS = 4, KV_BYTES = 96 * 1024, MOST_ROWS = 16;
#include "../../../task5/ladder/dependent_launch.cuh"

#include "../../../task5/ladder/cluster.cuh"
#include "../../../task5/ladder/dispatch.cuh"

extern "C" int leaves(int dtype, int head_dim, int rows, int chunks, int kv_len) {
  return with_math(dtype, head_dim, rows, [=](auto is) {
    using Math = typename decltype(is)::Math;
    Decode a{};
    a.chunks = chunks;
    Cluster<true>::cut<Math>(a);
    return Cluster<true>::leaves_of(a, ceil_div(kv_len, Math::KEYS));
  });
}
