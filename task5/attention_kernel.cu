// Task 5. Generating with a KV cache: append the new keys and values, then let one query per sequence read the cache.
//
//   update_cache_kernel             copies new rows into (batch, max_seq_len, hidden) caches, in place
//   flash_attention_decode_kernel   FlashAttention-2 with one query row: the loop over Q_i is gone, what is left reads
//                                   every key and value once, so its speed is the memory's
//   combine_splits_kernel           optional part: FlashDecoding. With few sequences and heads the blocks above cannot
//                                   fill a GPU; then the keys are split over several blocks, and their partial results
//                                   are merged as two tiles of FlashAttention are, by their maxima and sums.
//
// fp32, fp16 or bf16 in memory, fp32 inside. Caches are read in place, up to seqlens_k[b] keys.
#include <cuda_runtime.h>

#include "dtype.cuh"
#include "tensor.cuh"

constexpr int THREADS = 128;
constexpr float LOG2_E = 1.44269504f;

// ---------------------------------------------------------------------------------------------------------------------
// k_cache[b, pos + i] = k[b, i] and the same for v, for i < n and pos = positions[b], or current_pos where positions is
// null. A row outside the cache is not written.     grid (n, batch), block (THREADS)
// ---------------------------------------------------------------------------------------------------------------------
template <typename T>
__global__ void update_cache_kernel(T* k_cache, T* v_cache, const T* k, const T* v, const int* positions,
                                    int current_pos, int max_seq_len, int hidden, Strides k_cache_strides,
                                    Strides v_cache_strides, Strides k_strides, Strides v_strides) {
  const int i = blockIdx.x, b = blockIdx.y;
  // BEGIN SOLUTION
  const int pos = (positions ? positions[b] : current_pos) + i;
  if (pos < 0 || pos >= max_seq_len) return;
  k_cache += b * k_cache_strides.batch + pos * k_cache_strides.row;
  v_cache += b * v_cache_strides.batch + pos * v_cache_strides.row;
  k += b * k_strides.batch + i * k_strides.row;
  v += b * v_strides.batch + i * v_strides.row;
  for (int e = threadIdx.x; e < hidden; e += THREADS) {
    k_cache[e] = k[e];
    v_cache[e] = v[e];
  }
  // END SOLUTION
}

// ---------------------------------------------------------------------------------------------------------------------
// One query row per (batch, head) against keys leftpad_k[b] <= j < seqlens_k[b].
//
//   q, out (batch, 1, heads, head_dim)    k, v (batch, kv_len, kv_heads, head_dim)
//   grid (num_splits, heads, batch), block (THREADS).  Split s reads the keys [s, s + 1) * keys_per_split.
//   With one split the block writes out; with several it writes its part of them, normalised, to
//   partial_out (batch, heads, num_splits, head_dim) and log2 of its sum of exponentials to
//   partial_lse (batch, heads, num_splits), which combine_splits_kernel merges.
//
// A key is read by GROUP = HEAD_DIM / 4 neighbouring threads, 4 elements each: a warp reads 512 consecutive bytes of
// fp32. Every group keeps its own m, l and O, and has B_c of its keys in flight; the groups are merged at the end.
// ---------------------------------------------------------------------------------------------------------------------
template <typename T>
struct Decode {
  const T *q, *k, *v;
  T* out;
  float *partial_out, *partial_lse;
  Strides q_strides, k_strides, v_strides, out_strides;
  const int *seqlens_k, *leftpad_k;
  int heads, kv_heads, kv_len, head_dim, keys_per_split;
  float scale;
  bool vectors;  // every row starts at a multiple of 4 elements, and head_dim is one: 4 elements in one load
};

// One load of 4 elements: 16 bytes of fp32, 8 of the 16-bit types.
template <typename T>
struct Load4 {
  using Word = uint2;
};
template <>
struct Load4<float> {
  using Word = uint4;
};

__device__ __forceinline__ float dot4(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }

// row[first ... first + 3], zeros past head_dim; not converted yet, because that would wait for the load.
template <typename T>
__device__ __forceinline__ typename Load4<T>::Word read4(const T* row, int first, int head_dim, bool vectors) {
  using Word = typename Load4<T>::Word;
  if (vectors && first < head_dim) return *reinterpret_cast<const Word*>(row + first);
  Word word = {};
  for (int i = 0; i < 4; ++i)
    if (first + i < head_dim) reinterpret_cast<T*>(&word)[i] = row[first + i];
  return word;
}

template <typename T>
__device__ __forceinline__ float4 convert4(typename Load4<T>::Word word) {
  const T* x = reinterpret_cast<const T*>(&word);
  return make_float4(to_float(x[0]), to_float(x[1]), to_float(x[2]), to_float(x[3]));
}

template <int B_c, int HEAD_DIM, typename T>
__global__ void __launch_bounds__(THREADS) flash_attention_decode_kernel(Decode<T> a) {
  constexpr int GROUP = HEAD_DIM / 4, GROUPS = THREADS / GROUP;
  __shared__ float m_s[GROUPS], l_s[GROUPS];
  __shared__ float O_s[GROUPS][HEAD_DIM];

  const int split = blockIdx.x, head = blockIdx.y, b = blockIdx.z;
  const int kv_head = head / (a.heads / a.kv_heads);
  const int group = threadIdx.x / GROUP, first = 4 * (threadIdx.x % GROUP);  // this thread's 4 of the head_dim elements
  const T* q = a.q + b * a.q_strides.batch + head * a.q_strides.head;
  const T* k = a.k + b * a.k_strides.batch + kv_head * a.k_strides.head;
  const T* v = a.v + b * a.v_strides.batch + kv_head * a.v_strides.head;
  T* out = a.out + b * a.out_strides.batch + head * a.out_strides.head;
  const int seqlen = a.seqlens_k ? min(a.seqlens_k[b], a.kv_len) : a.kv_len;
  const int leftpad = a.leftpad_k ? max(a.leftpad_k[b], 0) : 0;
  const int begin = max(leftpad, split * a.keys_per_split);
  const int end = min(seqlen, (split + 1) * a.keys_per_split);
  const int64_t part = (int64_t(b) * a.heads + head) * gridDim.x + split;
  // BEGIN SOLUTION
  const float factor = a.scale * LOG2_E;
  float4 query = convert4<T>(read4(q, first, a.head_dim, a.vectors));
  query = make_float4(factor * query.x, factor * query.y, factor * query.z, factor * query.w);
  float m_i = -INFINITY, l_i = 0.0f;
  float4 O_i = {};

  for (int col_0 = begin; col_0 < end; col_0 += GROUPS * B_c) {  // as often for each thread: the shuffles need all
    float S[B_c];
    typename Load4<T>::Word key[B_c], value[B_c];
#pragma unroll
    for (int c = 0; c < B_c; ++c) {  // all loads are in flight before the first is used
      const int j = min(col_0 + c * GROUPS + group, end - 1);
      key[c] = read4(k + j * a.k_strides.row, first, a.head_dim, a.vectors);
      value[c] = read4(v + j * a.v_strides.row, first, a.head_dim, a.vectors);
    }
    float m_new = m_i;
#pragma unroll
    for (int c = 0; c < B_c; ++c) {
      S[c] = dot4(query, convert4<T>(key[c]));
      for (int lane = GROUP / 2; lane > 0; lane /= 2) S[c] += __shfl_xor_sync(~0u, S[c], lane);
      if (col_0 + c * GROUPS + group >= end) S[c] = -INFINITY;
      m_new = fmaxf(m_new, S[c]);
    }
    const float shift = m_new == -INFINITY ? 0.0f : m_new;
    const float rescale = exp2f(m_i - shift);
    m_i = m_new;
    l_i *= rescale;
    O_i = make_float4(rescale * O_i.x, rescale * O_i.y, rescale * O_i.z, rescale * O_i.w);
#pragma unroll
    for (int c = 0; c < B_c; ++c) {
      const float P = exp2f(S[c] - shift);
      const float4 v_c = convert4<T>(value[c]);
      l_i += P;
      O_i = make_float4(fmaf(P, v_c.x, O_i.x), fmaf(P, v_c.y, O_i.y), fmaf(P, v_c.z, O_i.z), fmaf(P, v_c.w, O_i.w));
    }
  }

  if (first == 0) {
    m_s[group] = m_i;
    l_s[group] = l_i;
  }
  *reinterpret_cast<float4*>(&O_s[group][first]) = O_i;
  __syncthreads();  // every group's part is there

  float m = -INFINITY, l = 0.0f;
  for (int g = 0; g < GROUPS; ++g) m = fmaxf(m, m_s[g]);
  const float shift = m == -INFINITY ? 0.0f : m;
  for (int g = 0; g < GROUPS; ++g) l += exp2f(m_s[g] - shift) * l_s[g];
  const float inverse = l == 0.0f ? 0.0f : 1.0f / l;  // a sequence, or a split, without keys gives 0
  for (int e = threadIdx.x; e < a.head_dim; e += THREADS) {
    float o = 0.0f;
    for (int g = 0; g < GROUPS; ++g) o += exp2f(m_s[g] - shift) * O_s[g][e];
    if (a.partial_out)
      a.partial_out[part * a.head_dim + e] = o * inverse;
    else
      out[e] = from_float<T>(o * inverse);
  }
  if (a.partial_out && threadIdx.x == 0) a.partial_lse[part] = m + log2f(l);  // -inf where there was no key
  // END SOLUTION
}

// ---------------------------------------------------------------------------------------------------------------------
// out = sum_s 2^(lse_s - lse) partial_out_s  with  2^lse = sum_s 2^lse_s.       grid (heads, batch), block (THREADS)
// ---------------------------------------------------------------------------------------------------------------------
template <typename T>
__global__ void combine_splits_kernel(const float* partial_out, const float* partial_lse, T* out, int num_splits,
                                      int heads, int head_dim, Strides out_strides) {
  const int head = blockIdx.x, b = blockIdx.y;
  const int64_t part = (int64_t(b) * heads + head) * num_splits;
  out += b * out_strides.batch + head * out_strides.head;
  // BEGIN SOLUTION
  float m = -INFINITY, sum = 0.0f;
  for (int s = 0; s < num_splits; ++s) m = fmaxf(m, partial_lse[part + s]);
  const float shift = m == -INFINITY ? 0.0f : m;
  for (int s = 0; s < num_splits; ++s) sum += exp2f(partial_lse[part + s] - shift);
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  for (int e = threadIdx.x; e < head_dim; e += THREADS) {
    float o = 0.0f;
    for (int s = 0; s < num_splits; ++s)
      o += exp2f(partial_lse[part + s] - shift) * partial_out[(part + s) * head_dim + e];
    out[e] = from_float<T>(o * inverse);
  }
  // END SOLUTION
}

// ---------------------------------------------------------------------------------------------------------------------
// Launchers, called from attention.py
// ---------------------------------------------------------------------------------------------------------------------
// k_cache, v_cache (batch, max_seq_len, hidden)   k, v (batch, n, hidden)   positions (batch), or null
extern "C" cudaError_t update_kv_cache(View k_cache, View v_cache, View k, View v, const int* positions,
                                       int current_pos, int dtype, cudaStream_t stream) {
  const int batch = k.sizes[0], n = k.sizes[1], hidden = k.sizes[2], max_seq_len = k_cache.sizes[1];
  return with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    update_cache_kernel<T><<<dim3(n, batch), THREADS, 0, stream>>>(
        k_cache.as<T>(), v_cache.as<T>(), k.as<T>(), v.as<T>(), positions, current_pos, max_seq_len, hidden,
        strides_of(k_cache), strides_of(v_cache), strides_of(k), strides_of(v));
    return cudaGetLastError();
  });
}

constexpr int B_C = 4;  // keys that a group of threads has in flight, to be tuned

// Whether every row of every head starts at a multiple of 4 elements and has a multiple of 4 of them.
static bool in_fours(const View& tensor, int element_size) {
  const uint64_t offsets = tensor.strides[0] | tensor.strides[1] | tensor.strides[2] | tensor.sizes[3];
  return offsets % 4 == 0 && reinterpret_cast<uintptr_t>(tensor.data) % (4 * element_size) == 0;
}

// q, out (batch, 1, heads, head_dim)   k, v (batch, kv_len, kv_heads, head_dim)   seqlens_k, leftpad_k (batch), or null
// partial_out, partial_lse: scratch for num_splits > 1, else null
extern "C" cudaError_t flash_attention_decode(View q, View k, View v, View out, float* partial_out, float* partial_lse,
                                              const int* seqlens_k, const int* leftpad_k, int num_splits, float scale,
                                              int dtype, cudaStream_t stream) {
  const int batch = q.sizes[0], heads = q.sizes[2], head_dim = q.sizes[3], kv_len = k.sizes[1];
  return with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    Decode<T> a;
    a.q = q.as<T>(), a.q_strides = strides_of(q);
    a.k = k.as<T>(), a.k_strides = strides_of(k);
    a.v = v.as<T>(), a.v_strides = strides_of(v);
    a.out = out.as<T>(), a.out_strides = strides_of(out);
    a.partial_out = partial_out, a.partial_lse = partial_lse;
    a.seqlens_k = seqlens_k, a.leftpad_k = leftpad_k;
    a.heads = heads, a.kv_heads = k.sizes[2], a.kv_len = kv_len, a.head_dim = head_dim;
    a.keys_per_split = ceil_div(kv_len, num_splits);
    a.scale = scale;
    a.vectors = in_fours(q, sizeof(T)) && in_fours(k, sizeof(T)) && in_fours(v, sizeof(T));
    const dim3 grid(num_splits, heads, batch);
    if (head_dim <= 64)
      flash_attention_decode_kernel<B_C, 64><<<grid, THREADS, 0, stream>>>(a);
    else
      flash_attention_decode_kernel<B_C, 128><<<grid, THREADS, 0, stream>>>(a);
    if (num_splits > 1)
      combine_splits_kernel<<<dim3(heads, batch), THREADS, 0, stream>>>(partial_out, partial_lse, a.out, num_splits,
                                                                        heads, head_dim, a.out_strides);
    return cudaGetLastError();
  });
}
