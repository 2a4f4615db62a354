// What comes before attention in a decode step, in one launch: queries and new keys are rotated by their positions, and
// the rotated keys and the values are written to the cache. [RoFormer] arXiv:2104.09864, equation 34, with the pairs
// (e, e + head_dim / 2) of task 6.
//
//   q                  (batch, q_len, heads, head_dim), rotated in place
//   k, v               (batch, q_len, kv_heads, head_dim)
//   k_cache, v_cache   (batch, max_seq, kv_heads, head_dim), or pages as in decode.cuh
//   cos, sin           (positions, head_dim / 2), or null: nothing is rotated
//
// Token i of sequence b stands at position p = seqlens_k[b] - q_len + i.
//
//   grid   batch * q_len * blocks_per_token
//   block  THREADS; a thread has 16 bytes of a row of q, k or v, and the 16 bytes that they form pairs with
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "dtype.cuh"
#include "plain_launch.cuh"
#include "tensor.cuh"

constexpr int THREADS = 128;

struct Append {
  View q, k, v, k_cache, v_cache;
  const int *seqlens_k, *block_table;  // block_table: (batch, max_pages), or null: a sequence is one page
  const float *cos, *sin;
  int q_len, heads, kv_heads, head_dim;  // heads: of q, 0 where nothing is rotated
  int pages, page_size, max_pages, positions;
  int blocks_per_token;
};

template <typename T, int N>
struct alignas(16) Vector {
  T x[N];
};

template <typename T>
__device__ __forceinline__ T* row_of(const View& tensor, int64_t b, int64_t row, int64_t head) {
  return tensor.as<T>() + b * tensor.strides[0] + row * tensor.strides[1] + head * tensor.strides[2];
}

template <typename T>
__global__ void __launch_bounds__(THREADS) append_kernel(Append a) {
  constexpr int N = 16 / sizeof(T);
  const int half = a.head_dim / 2, threads_per_row = half / N;
  const int token = blockIdx.x / a.blocks_per_token, b = token / a.q_len, i = token % a.q_len;
  const int thread = blockIdx.x % a.blocks_per_token * THREADS + threadIdx.x;  // of the token
  const int row = thread / threads_per_row, e = thread % threads_per_row * N;  // rows of q, then of k, then of v
  const int kv_row = row - a.heads;
  const bool query = kv_row < 0, key = !query && kv_row < a.kv_heads;
  const int head = query ? row : kv_row % a.kv_heads;
  if (kv_row >= 2 * a.kv_heads) return;

  wait_for_the_launch_before();
  begin_the_next_launch();  // attention loads older keys meanwhile
  T* from = row_of<T>(query ? a.q : (key ? a.k : a.v), b, i, head) + e;
  Vector<T, N> left = *reinterpret_cast<const Vector<T, N>*>(from);  // in flight while the position is read
  Vector<T, N> right = *reinterpret_cast<const Vector<T, N>*>(from + half);

  const int len = a.seqlens_k[b], behind = a.q_len - i;  // this token and those after it
  if (len < behind || (a.cos && len - behind >= a.positions)) return;
  const int p = len - behind;
  const bool rotated = a.cos && (query || key);
  Vector<float, N> cos, sin;
  if (rotated) {  // before the page number, which they need not wait for
    cos = *reinterpret_cast<const Vector<float, N>*>(a.cos + int64_t(p) * half + e);
    sin = *reinterpret_cast<const Vector<float, N>*>(a.sin + int64_t(p) * half + e);
  }

  T* to = from;
  if (!query) {
    if (p / a.page_size >= a.max_pages) return;
    const int page = a.block_table ? a.block_table[int64_t(b) * a.max_pages + p / a.page_size] : b;
    if (page < 0 || page >= a.pages) return;
    to = row_of<T>(key ? a.k_cache : a.v_cache, page, p % a.page_size, head) + e;
  }
  if (rotated) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float x = to_float(left.x[n]), y = to_float(right.x[n]);
      left.x[n] = from_float<T>(x * cos.x[n] - y * sin.x[n]);
      right.x[n] = from_float<T>(y * cos.x[n] + x * sin.x[n]);
    }
  }
  *reinterpret_cast<Vector<T, N>*>(to) = left;
  *reinterpret_cast<Vector<T, N>*>(to + half) = right;
}

inline cudaError_t launch_append(const View& q, const View& k, const View& v, const View& k_cache, const View& v_cache,
                                 const int* seqlens_k, const int* block_table, int max_pages, const float* cos,
                                 const float* sin, int positions, int dtype, cudaStream_t stream) {
  const int batch = q.sizes[0], q_len = q.sizes[1], heads = cos ? q.sizes[2] : 0, kv_heads = k.sizes[2];
  return with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    Append a = {q, k, v, k_cache, v_cache, seqlens_k, block_table, cos, sin};
    a.q_len = q_len, a.heads = heads, a.kv_heads = kv_heads, a.head_dim = q.sizes[3];
    a.pages = k_cache.sizes[0], a.page_size = k_cache.sizes[1], a.max_pages = block_table ? max_pages : 1;
    a.positions = positions;
    a.blocks_per_token = ceil_div((heads + 2 * kv_heads) * a.head_dim * int(sizeof(T)), 32 * THREADS);
    return launch_kernel(append_kernel<T>, batch * q_len * a.blocks_per_token, THREADS, 0, stream, a);
  });
}
