// What every rung of the ladder computes, and its arguments.
//
//   out = softmax(scale q k^T) v
//   q, out (batch, q_len, heads, head_dim)     k, v (batch, kv_len, kv_heads, head_dim)     read in place, any strides
//
// heads / kv_heads neighbouring query heads share one head of k and v (GQA). Causal is aligned to the end: query i sees
// the keys j <= i + kv_len - q_len. A row that sees no key gives 0. The caller has checked shapes, dtype and head_dim,
// and that nothing is empty. It allocates out, and for a rung that exports
//   extern "C" int64_t workspace_bytes(View q, View k)
// a workspace of that size.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "dtype.cuh"
#include "launch.cuh"
#include "tensor.cuh"

constexpr float LOG2_E = 1.44269504f;  // exp(x) = exp2(x log2(e)), and exp2 is one instruction

struct Attention {
  const void *q, *k, *v;
  void *out, *workspace;
  int batch, heads, kv_heads, q_len, kv_len, head_dim;
  Strides q_strides, k_strides, v_strides, out_strides;
  float scale;
  bool causal;

  // Row 0 of one head.
  template <typename T>
  __host__ __device__ const T* q_head(int b, int head) const {
    return static_cast<const T*>(q) + b * q_strides.batch + head * q_strides.head;
  }
  template <typename T>
  __host__ __device__ const T* k_head(int b, int head) const {
    return static_cast<const T*>(k) + b * k_strides.batch + head / (heads / kv_heads) * k_strides.head;
  }
  template <typename T>
  __host__ __device__ const T* v_head(int b, int head) const {
    return static_cast<const T*>(v) + b * v_strides.batch + head / (heads / kv_heads) * v_strides.head;
  }
  template <typename T>
  __host__ __device__ T* out_head(int b, int head) const {
    return static_cast<T*>(out) + b * out_strides.batch + head * out_strides.head;
  }

  // Row i sees the keys j < visible(i): all of them, or those up to the diagonal.
  __host__ __device__ int visible(int i) const {
    const int diagonal = i + kv_len - q_len + 1;
    return !causal || diagonal > kv_len ? kv_len : diagonal < 0 ? 0
                                                                : diagonal;
  }
};

inline Attention make_attention(const View& q, const View& k, const View& v, const View& out, void* workspace,
                                float scale, int causal) {
  Attention a;
  a.q = q.data, a.q_strides = strides_of(q);
  a.k = k.data, a.k_strides = strides_of(k);
  a.v = v.data, a.v_strides = strides_of(v);
  a.out = out.data, a.out_strides = strides_of(out);
  a.workspace = workspace;
  a.batch = q.sizes[0], a.q_len = q.sizes[1], a.heads = q.sizes[2], a.head_dim = q.sizes[3];
  a.kv_len = k.sizes[1], a.kv_heads = k.sizes[2];
  a.scale = scale, a.causal = causal != 0;
  return a;
}
