// Rung 2, coalesced: a two-dimensional block loads tiles of K and V once, side by side, into shared memory.
// FlashAttention-2 forward [FA2] arXiv:2307.08691, Algorithm 1.
//
//   q, out (batch, q_len, heads, head_dim)      k, v (batch, kv_len, kv_heads, head_dim)      fp32, fp16 or bf16
//   grid  (ceil(q_len / B_r), heads, batch)     one block for each Q_i: the outer loop of the paper is the grid
//   block (32, B_r)                             one warp per row of Q_i; lane x computes column x of S and P, and the
//                                               columns x, x + 32, ... of O
//   line  8    S   = Q_i K_j^T                  from shared memory
//   line  9    m'  = max(m_i, rowmax(S))        a row is a warp, so shuffles suffice
//              P   = exp(S - m'),  l_i = exp(m_i - m') l_i + rowsum(P)
//   line 10    O_i = diag(exp(m_i - m')) O_i + P V_j     (printed with ^-1 in the paper: a known typo)
//   line 12    O_i = diag(l_i)^-1 O_i           once, at the end
//
// Compared with rung 1: 32 neighbouring threads load 32 neighbouring numbers, one segment of memory instead of 32; each
// number of k and v that is loaded from there serves B_r rows; O_i is in registers, because the compiler knows head_dim
// and with it every index of O_i; and O_i is rescaled once per tile of keys, not once per key.
// What limits it now: each product of lines 8 and 10 reads one or two numbers from shared memory, which delivers 32 per
// clock to an SM that can multiply 128.
#include "attention.cuh"

constexpr int B_r = 16, B_c = 32;  // rows of Q_i, and of K_j and V_j

// tile[r][e] = rows[first + r][e]; zeros where the row is past the end
template <int ROWS, int HEAD_DIM, int PADDED, typename T>
__device__ __forceinline__ void load_tile(float (&tile)[ROWS][PADDED], const T* rows, int64_t row_stride, int first,
                                          int end) {
  for (int r = threadIdx.y; r < ROWS; r += B_r) {
#pragma unroll
    for (int e = threadIdx.x; e < HEAD_DIM; e += 32)
      tile[r][e] = first + r < end ? to_float(rows[(first + r) * row_stride + e]) : 0.0f;
  }
}

template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(32 * B_r, 2) attention_kernel(Attention a) {
  __shared__ float Q_i[B_r][HEAD_DIM], K_j[B_c][HEAD_DIM + 1], V_j[B_c][HEAD_DIM];  // + 1: a column of K_j, 32 banks

  const int tx = threadIdx.x, ty = threadIdx.y, head = blockIdx.y, b = blockIdx.z;
  const int row_0 = blockIdx.x * B_r, row = row_0 + ty, visible = a.visible(row);
  const float scale = a.scale * LOG2_E;  // of S in base 2
  const T* k = a.k_head<T>(b, head);
  const T* v = a.v_head<T>(b, head);

  float O_i[HEAD_DIM / 32] = {};      // O[row][tx + 32 n]
  float m_i = -INFINITY, l_i = 0.0f;  // l_i: this lane's columns only; the 32 parts are added at the end

  load_tile<B_r, HEAD_DIM>(Q_i, a.q_head<T>(b, head), a.q_strides.row, row_0, a.q_len);
  const int end = a.visible(min(row_0 + B_r, a.q_len) - 1);  // tiles past the last row's diagonal are skipped
  for (int col_0 = 0; col_0 < end; col_0 += B_c) {           // line 6
    load_tile<B_c, HEAD_DIM>(K_j, k, a.k_strides.row, col_0, a.kv_len);  // line 7
    load_tile<B_c, HEAD_DIM>(V_j, v, a.v_strides.row, col_0, a.kv_len);
    __syncthreads();  // the tile (and Q_i) complete before any thread reads it

    float S = 0.0f;
    for (int e = 0; e < HEAD_DIM; ++e) S = fmaf(Q_i[ty][e], K_j[tx][e], S);  // line 8
    S = col_0 + tx < visible ? S * scale : -INFINITY;

    float m_new = fmaxf(m_i, S);  // line 9
    for (int lane = 16; lane > 0; lane /= 2) m_new = fmaxf(m_new, __shfl_xor_sync(~0u, m_new, lane));
    const float shift = m_new == -INFINITY ? 0.0f : m_new;  // no key so far: -inf - -inf would be NaN
    const float rescale = exp2f(m_i - shift), P = exp2f(S - shift);
    m_i = m_new;
    l_i = rescale * l_i + P;
    for (int n = 0; n < HEAD_DIM / 32; ++n) O_i[n] *= rescale;

    for (int c = 0; c < B_c; ++c) {  // line 10
      const float P_c = __shfl_sync(~0u, P, c);
      for (int n = 0; n < HEAD_DIM / 32; ++n) O_i[n] = fmaf(P_c, V_j[c][tx + 32 * n], O_i[n]);
    }
    __syncthreads();  // the tile consumed before it is overwritten
  }

  for (int lane = 16; lane > 0; lane /= 2) l_i += __shfl_xor_sync(~0u, l_i, lane);
  const float inverse = l_i == 0.0f ? 0.0f : 1.0f / l_i;  // no key seen: 0, not 0 / 0
  if (row >= a.q_len) return;
  T* out = a.out_head<T>(b, head) + row * a.out_strides.row;
  for (int n = 0; n < HEAD_DIM / 32; ++n) out[tx + 32 * n] = from_float<T>(O_i[n] * inverse);  // line 12
}

template <typename T, int HEAD_DIM>
static cudaError_t launch(const Attention& a, cudaStream_t stream) {
  const dim3 grid(ceil_div(a.q_len, B_r), a.heads, a.batch), block(32, B_r);
  attention_kernel<T, HEAD_DIM><<<grid, block, 0, stream>>>(a);
  return cudaGetLastError();
}

extern "C" cudaError_t attention(View q, View k, View v, View out, void* workspace, float scale, int causal, int dtype,
                                 cudaStream_t stream) {
  const Attention a = make_attention(q, k, v, out, workspace, scale, causal);
  return with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return a.head_dim == 64 ? launch<T, 64>(a, stream) : launch<T, 128>(a, stream);
  });
}
