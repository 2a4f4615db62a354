// Which part of which pair is each item's, where lengths decide how many parts a pair has.
// architectures: sm_90a cpu
constexpr int WARPS = 4, KV_BYTES = 96 * 1024, MOST_ROWS = 16;
#include "../../../task5/ladder/by_length.cuh"

__global__ void find_items(Decode a, int items, int* found) {
  __shared__ int2 lengths[ByLength::SEQUENCES];
  const int clusters = gridDim.y * gridDim.z;
  for (int item = blockIdx.z * gridDim.y + blockIdx.y; item < items; item += clusters) {
    ByLength place;
    place.start(a);
    place.go_on(item);
    place.read_lengths(a, lengths);
    place.find(a);
    if (place.none()) return;
    if (threadIdx.x > 0) continue;
    int* to = found + 4 * item;
    to[0] = place.b(), to[1] = place.pair(), to[2] = place.cluster(0), to[3] = place.clusters(a);
  }
}

// Which of all pairs each single block has, or -1.
__global__ void find_pairs(Decode a, int* pairs) {
  __shared__ int2 lengths[ByLength::SEQUENCES];
  ByLength place;
  place.start(a);
  place.read_lengths(a, lengths);
  place.find(a);
  const int pair = place.none() ? -1 : place.b() * int(a.pairs.d) + place.pair();
  if (threadIdx.x == 0) pairs[blockIdx.z * gridDim.y + blockIdx.y] = pair;
}

static Decode of(const int* seqlens, int batch, int kv_heads, int kv_len, int at_once, int chunks) {
  Decode a;
  a.seqlens_k = seqlens, a.leftpad_k = nullptr, a.window = 0, a.q_len = 1;
  a.batch = batch, a.kv_heads = kv_heads, a.pairs = Divisor(kv_heads), a.kv_len = kv_len;
  a.clusters_at_once = at_once, a.clusters_of_each = at_once / (batch * kv_heads), a.chunks = chunks;
  return a;
}

// found: (items, 4), a row of -1 where there is no such item. chunks: not 0 for a batch-invariant call.
extern "C" cudaError_t find(const int* seqlens, int batch, int kv_heads, int kv_len, int sequences, int at_once,
                            int chunks, int items, int* found, cudaStream_t stream) {
  const Decode a = of(seqlens, batch, kv_heads, kv_len, at_once, chunks);
  find_items<<<dim3(1, kv_heads, sequences), THREADS, 0, stream>>>(a, items, found);
  return cudaGetLastError();
}
extern "C" cudaError_t pairs(const int* seqlens, int batch, int kv_heads, int kv_len, int sequences, int* pairs,
                             cudaStream_t stream) {
  const Decode a = of(seqlens, batch, kv_heads, kv_len, kv_heads * sequences, 0);
  find_pairs<<<dim3(1, kv_heads, sequences), THREADS, 0, stream>>>(a, pairs);
  return cudaGetLastError();
}
