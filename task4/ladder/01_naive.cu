// Rung 1, naive: one thread per query row; every number is read from global memory when it is needed.
// FlashAttention-2 forward [FA2] arXiv:2307.08691, Algorithm 1, with tiles of one row and one key: B_r = B_c = 1.
//
//   q, out (batch, q_len, heads, head_dim)      k, v (batch, kv_len, kv_heads, head_dim)      fp32, fp16 or bf16
//   grid  (ceil(q_len / THREADS), heads, batch)      block (THREADS)      thread t of block i: row i * THREADS + t
//
//   line  8    S   = q_i k_j^T                            one number
//   line  9    m'  = max(m_i, S)      P = exp(S - m')     l_i = exp(m_i - m') l_i + P
//   line 10    O_i = exp(m_i - m') O_i + P v_j            (printed with ^-1 in the paper: a known typo)
//   line 12    O_i = O_i / l_i
//
// The algorithm is good: memory grows with S, not with S squared. Later rungs mend the rest:
//   - 32 threads read 32 different rows of q, and write as many of out: 32 sectors of memory per load;
//   - all threads read the same number of k or v at the same time. That is one load for the warp, but one load per
//     product: the chip multiplies far faster than it loads;
//   - O_i is an array with a run-time index, and registers cannot be indexed: it is in local memory, which is global
//     memory behind the L1 cache, and is read and written once per key.
#include "attention.cuh"

constexpr int THREADS = 128, MAX_HEAD_DIM = 128;

template <typename T>
__global__ void __launch_bounds__(THREADS) attention_kernel(Attention a) {
  const int row = blockIdx.x * THREADS + threadIdx.x, head = blockIdx.y, b = blockIdx.z, head_dim = a.head_dim;
  if (row >= a.q_len) return;  // no barrier below waits for this thread
  const T* q_i = a.q_head<T>(b, head) + row * a.q_strides.row;
  const T* k = a.k_head<T>(b, head);
  const T* v = a.v_head<T>(b, head);
  T* out = a.out_head<T>(b, head) + row * a.out_strides.row;

  float O_i[MAX_HEAD_DIM];
  float m_i = -INFINITY, l_i = 0.0f;
  for (int e = 0; e < head_dim; ++e) O_i[e] = 0.0f;

  const float scale = a.scale * LOG2_E;  // of S in base 2
  const int end = a.visible(row);
  for (int j = 0; j < end; ++j) {  // line 6
    const T* k_j = k + j * a.k_strides.row;
    const T* v_j = v + j * a.v_strides.row;
    float S = 0.0f;
    for (int e = 0; e < head_dim; ++e) S = fmaf(to_float(q_i[e]), to_float(k_j[e]), S);  // line 8
    S *= scale;

    const float m_new = fmaxf(m_i, S);  // line 9
    const float rescale = exp2f(m_i - m_new), P = exp2f(S - m_new);
    m_i = m_new;
    l_i = rescale * l_i + P;
    for (int e = 0; e < head_dim; ++e) O_i[e] = fmaf(P, to_float(v_j[e]), rescale * O_i[e]);  // line 10
  }

  const float inverse = l_i == 0.0f ? 0.0f : 1.0f / l_i;  // no key seen: 0, not 0 / 0
  for (int e = 0; e < head_dim; ++e) out[e] = from_float<T>(O_i[e] * inverse);  // line 12
}

template <typename T>
static cudaError_t launch(const Attention& a, cudaStream_t stream) {
  if (a.head_dim > MAX_HEAD_DIM) return cudaErrorInvalidValue;
  attention_kernel<T><<<dim3(ceil_div(a.q_len, THREADS), a.heads, a.batch), THREADS, 0, stream>>>(a);
  return cudaGetLastError();
}

extern "C" cudaError_t attention(View q, View k, View v, View out, void* workspace, float scale, int causal, int dtype,
                                 cudaStream_t stream) {
  const Attention a = make_attention(q, k, v, out, workspace, scale, causal);
  return with_dtype(dtype, [&](auto zero) { return launch<decltype(zero)>(a, stream); });
}
