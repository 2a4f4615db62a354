// Rung 3, register tile: each thread computes a block of S and a block of O from numbers in registers.
// FlashAttention-2 forward [FA2] arXiv:2307.08691, Algorithm 1.
//
//   q, out (batch, q_len, heads, head_dim)      k, v (batch, kv_len, kv_heads, head_dim)      fp32, fp16 or bf16
//   grid  (ceil(q_len / B_r), heads, batch)     one block for each Q_i: the outer loop of the paper is the grid
//   block (16, 16)                              thread (tx, ty) computes rows ty, ty + 16, ... of the tile: columns
//                                               tx, tx + 16, ... of S and P, and its share of O
//   line  8    S   = Q_i K_j^T                  Q_i and K_j from shared memory, S in registers
//   line  9    m'  = max(m_i, rowmax(S))        16 threads share a row: half a warp, so shuffles suffice
//              P   = exp(S - m'),  l_i = exp(m_i - m') l_i + rowsum(P)
//   line 10    O_i = diag(exp(m_i - m')) O_i + P V_j     (printed with ^-1 in the paper: a known typo)
//   line 12    O_i = diag(l_i)^-1 O_i           once, at the end
//
// Compared with rung 2: with 8 loads of 16 bytes, 4 numbers from each of 4 rows of Q_i and 4 rows of K_j (2 for
// head_dim 128), a thread does 64 multiplications, for which rung 2 loads 64 pairs of numbers. Each number of k and v
// that is loaded from global memory serves 64 rows instead of 16. K_j and V_j share one buffer, which costs two
// barriers per tile and lets a block fit in 64 KiB.
// What limits it now: the FP32 units themselves. The tensor cores beside them multiply many times faster.
#include "attention.cuh"

constexpr int B_r = 64, LANES = 16, ROWS = B_r / LANES;  // LANES: threads along a row, and rows side by side

template <int HEAD_DIM>
struct Tiles {  // shared memory
  static constexpr int B_c = 4096 / HEAD_DIM;
  float Q_i[B_r][HEAD_DIM];
  float KV_j[B_c][HEAD_DIM + 4];  // + 4: 16-byte reads of 8 neighbouring rows fall into 32 different banks
  float P[B_r][B_c];
};

__device__ __forceinline__ float4 load4(const float* p) { return *reinterpret_cast<const float4*>(p); }

__device__ __forceinline__ float dot4(float4 a, float4 b, float sum) {
  sum = fmaf(a.x, b.x, sum);
  sum = fmaf(a.y, b.y, sum);
  sum = fmaf(a.z, b.z, sum);
  return fmaf(a.w, b.w, sum);
}

// tile[r][e] = rows[first + r][e]; zeros where the row is past the end
template <int TILE_ROWS, int HEAD_DIM, int PADDED, typename T>
__device__ __forceinline__ void load_tile(float (&tile)[TILE_ROWS][PADDED], const T* rows, int64_t row_stride,
                                          int first, int end) {
#pragma unroll 4
  for (int i = threadIdx.y * LANES + threadIdx.x; i < TILE_ROWS * HEAD_DIM; i += LANES * LANES) {
    const int r = i / HEAD_DIM, e = i % HEAD_DIM;
    tile[r][e] = first + r < end ? to_float(rows[(first + r) * row_stride + e]) : 0.0f;
  }
}

template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(LANES* LANES) attention_kernel(Attention a) {
  constexpr int B_c = Tiles<HEAD_DIM>::B_c, COLS = B_c / LANES, QUADS = HEAD_DIM / (4 * LANES);
  extern __shared__ __align__(16) char shared[];
  auto& [Q_i, KV_j, P_s] = *reinterpret_cast<Tiles<HEAD_DIM>*>(shared);

  const int tx = threadIdx.x, ty = threadIdx.y, head = blockIdx.y, b = blockIdx.z;
  const int row_0 = blockIdx.x * B_r;
  const float scale = a.scale * LOG2_E;  // of S in base 2
  const T* k = a.k_head<T>(b, head);
  const T* v = a.v_head<T>(b, head);

  float O_i[ROWS][QUADS][4] = {};   // O[ty + 16 r][4 (tx + 16 quad) ...]
  float m_i[ROWS], l_i[ROWS] = {};  // l_i: this thread's columns only; the 16 parts are added at the end
  for (int r = 0; r < ROWS; ++r) m_i[r] = -INFINITY;

  load_tile<B_r, HEAD_DIM>(Q_i, a.q_head<T>(b, head), a.q_strides.row, row_0, a.q_len);
  const int end = a.visible(min(row_0 + B_r, a.q_len) - 1);  // tiles past the last row's diagonal are skipped
  for (int col_0 = 0; col_0 < end; col_0 += B_c) {           // line 6
    load_tile<B_c, HEAD_DIM>(KV_j, k, a.k_strides.row, col_0, a.kv_len);  // line 7
    __syncthreads();  // K_j (and Q_i) complete before any thread reads it

    float S[ROWS][COLS] = {};
#pragma unroll 4
    for (int e = 0; e < HEAD_DIM; e += 4) {  // line 8
      float4 key[COLS];
#pragma unroll
      for (int c = 0; c < COLS; ++c) key[c] = load4(&KV_j[tx + LANES * c][e]);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const float4 query = load4(&Q_i[ty + LANES * r][e]);
#pragma unroll
        for (int c = 0; c < COLS; ++c) S[r][c] = dot4(query, key[c], S[r][c]);
      }
    }

#pragma unroll
    for (int r = 0; r < ROWS; ++r) {  // line 9
      const int visible = a.visible(row_0 + ty + LANES * r);
      float m_new = m_i[r];
#pragma unroll
      for (int c = 0; c < COLS; ++c) {
        S[r][c] = col_0 + tx + LANES * c < visible ? S[r][c] * scale : -INFINITY;
        m_new = fmaxf(m_new, S[r][c]);
      }
      for (int lane = LANES / 2; lane > 0; lane /= 2) m_new = fmaxf(m_new, __shfl_xor_sync(~0u, m_new, lane));
      const float shift = m_new == -INFINITY ? 0.0f : m_new;  // no key so far: -inf - -inf would be NaN
      const float rescale = exp2f(m_i[r] - shift);
      m_i[r] = m_new;
      l_i[r] *= rescale;
#pragma unroll
      for (int c = 0; c < COLS; ++c) {
        const float P = exp2f(S[r][c] - shift);
        l_i[r] += P;
        P_s[ty + LANES * r][tx + LANES * c] = P;
      }
#pragma unroll
      for (int i = 0; i < 4 * QUADS; ++i) O_i[r][i / 4][i % 4] *= rescale;
    }
    __syncthreads();  // P complete, and K_j consumed before V_j takes its place

    load_tile<B_c, HEAD_DIM>(KV_j, v, a.v_strides.row, col_0, a.kv_len);
    __syncthreads();  // V_j complete before any thread reads it

#pragma unroll 2
    for (int c = 0; c < B_c; c += 4) {  // line 10
      float4 P[ROWS];
#pragma unroll
      for (int r = 0; r < ROWS; ++r) P[r] = load4(&P_s[ty + LANES * r][c]);
#pragma unroll
      for (int quad = 0; quad < QUADS; ++quad) {
        float4 V[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) V[i] = load4(&KV_j[c + i][4 * (tx + LANES * quad)]);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          float (&o)[4] = O_i[r][quad];
          o[0] = dot4(P[r], make_float4(V[0].x, V[1].x, V[2].x, V[3].x), o[0]);
          o[1] = dot4(P[r], make_float4(V[0].y, V[1].y, V[2].y, V[3].y), o[1]);
          o[2] = dot4(P[r], make_float4(V[0].z, V[1].z, V[2].z, V[3].z), o[2]);
          o[3] = dot4(P[r], make_float4(V[0].w, V[1].w, V[2].w, V[3].w), o[3]);
        }
      }
    }
    __syncthreads();  // V_j and P consumed before they are overwritten
  }

#pragma unroll
  for (int r = 0; r < ROWS; ++r) {  // line 12
    for (int lane = LANES / 2; lane > 0; lane /= 2) l_i[r] += __shfl_xor_sync(~0u, l_i[r], lane);
    const float inverse = l_i[r] == 0.0f ? 0.0f : 1.0f / l_i[r];  // no key seen: 0, not 0 / 0
    const int row = row_0 + ty + LANES * r;
    if (row >= a.q_len) continue;
    T* out = a.out_head<T>(b, head) + row * a.out_strides.row;
#pragma unroll
    for (int i = 0; i < 4 * QUADS; ++i)
      out[4 * (tx + LANES * (i / 4)) + i % 4] = from_float<T>(O_i[r][i / 4][i % 4] * inverse);
  }
}

template <typename T, int HEAD_DIM>
static cudaError_t launch(const Attention& a, cudaStream_t stream) {
  constexpr int bytes = sizeof(Tiles<HEAD_DIM>);
  if (cudaError_t error = allow_shared_memory<attention_kernel<T, HEAD_DIM>, bytes>()) return error;
  const dim3 grid(ceil_div(a.q_len, B_r), a.heads, a.batch), block(LANES, LANES);
  attention_kernel<T, HEAD_DIM><<<grid, block, bytes, stream>>>(a);
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
