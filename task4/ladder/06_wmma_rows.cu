// Rung 6, wmma over a row block: each warp computes 32 rows, and uses each fragment of K and V twice.
// FlashAttention-2 forward [FA2] arXiv:2307.08691, Algorithm 1.
//
//   q, out (batch, q_len, heads, head_dim)     k, v (batch, kv_len, kv_heads, head_dim)     fp16, bf16, or fp32 as tf32
//   grid  (ceil(q_len / B_r), heads, batch)     one block for each Q_i: the outer loop of the paper is the grid
//   block (32, WARPS)                           warp w: the rows of Q_i from 32 w on, two fragments high; its lane r
//                                               does the softmax of row r of them
//
//   line  8    S   = Q_i K_j^T                  fragments from shared memory; S goes back there
//   line  9    m'  = max(m_i, rowmax(S))        one lane per row
//              P   = exp(S - m'),  l_i = exp(m_i - m') l_i + rowsum(P)          P takes the place of S, rounded to T
//   line 10    O_i = diag(exp(m_i - m')) O_i + P V_j    (printed with ^-1 in the paper: a known typo), in fragments
//   line 12    O_i = diag(l_i)^-1 O_i           once, at the end
//
// Compared with rung 5: a fragment of K_j or V_j is loaded once for 32 rows instead of 16; k and v are loaded from
// global memory once for 128 rows (64 for fp32 with head_dim 128, which is twice as large). Each lane has a whole row,
// so line 9 needs no shuffle. The price is registers: at head_dim 128 O_i alone takes 128 of a lane's 255, and two
// blocks fill the register file of an SM.
// What limits it now: S goes through shared memory and P back only because CUDA does not say which lane holds what; and
// k and v are loaded from global memory one number at a time, while the tensor cores wait.
#include <mma.h>

#include "attention.cuh"

using namespace nvcuda;

constexpr int ROWS = 32, B_c = 32;  // rows of Q_i that a warp has, and rows of K_j and V_j
constexpr int S_ROW = B_c + 4;

template <typename T>
struct Product {
  using Element = T;
  static constexpr int DEPTH = 16;  // columns of the left matrix, rows of the right one
};
template <>
struct Product<float> {
  using Element = wmma::precision::tf32;
  static constexpr int DEPTH = 8;
};
template <typename T>
using Left =
    wmma::fragment<wmma::matrix_a, 16, 16, Product<T>::DEPTH, typename Product<T>::Element, wmma::row_major>;
template <typename T, typename Layout>
using Right = wmma::fragment<wmma::matrix_b, 16, 16, Product<T>::DEPTH, typename Product<T>::Element, Layout>;
template <typename T>
using Sum = wmma::fragment<wmma::accumulator, 16, 16, Product<T>::DEPTH, float>;

// What fragments are loaded from: T, but floats rounded to tf32, which has the 10 bits of mantissa of fp16.
template <typename T>
__device__ __forceinline__ T operand(T x) { return x; }
__device__ __forceinline__ float operand(float x) { return wmma::__float_to_tf32(x); }

template <typename T, int HEAD_DIM>
struct Tiles {  // shared memory; every part begins at a multiple of 32 bytes, as load_matrix_sync wants it
  static constexpr int WARPS = HEAD_DIM * sizeof(T) > 256 ? 2 : 4, B_r = ROWS * WARPS;
  static constexpr int ROW = HEAD_DIM + 16 / sizeof(T);
  T Q_i[B_r][ROW], K_j[B_c][ROW], V_j[B_c][ROW];
  float S[B_r][S_ROW];     // and then P, as T, each row in the place of the row of S
  float factors[B_r][16];  // of row r, 16 times
};

// tile[r][e] = rows[first + r][e]; zeros where the row is past the end
template <int TILE_ROWS, int HEAD_DIM, int WARPS, int PADDED, typename T>
__device__ __forceinline__ void load_tile(T (&tile)[TILE_ROWS][PADDED], const T* rows, int64_t row_stride, int first,
                                          int end) {
#pragma unroll 4
  for (int i = threadIdx.y * 32 + threadIdx.x; i < TILE_ROWS * HEAD_DIM; i += 32 * WARPS) {
    const int r = i / HEAD_DIM, e = i % HEAD_DIM;
    tile[r][e] = first + r < end ? operand(rows[(first + r) * row_stride + e]) : from_float<T>(0.0f);
  }
}

// N numbers between shared memory and a lane's registers, 16 bytes at a time
template <int N, typename T>
__device__ __forceinline__ void copy(T* to, const T* from) {
#pragma unroll
  for (int i = 0; i < N * int(sizeof(T)) / 16; ++i)
    reinterpret_cast<float4*>(to)[i] = reinterpret_cast<const float4*>(from)[i];
}

template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(32 * Tiles<T, HEAD_DIM>::WARPS, 2) attention_kernel(Attention a) {
  constexpr int WARPS = Tiles<T, HEAD_DIM>::WARPS, B_r = ROWS * WARPS;
  constexpr int DEPTH = Product<T>::DEPTH, ROW = Tiles<T, HEAD_DIM>::ROW, P_ROW = S_ROW * sizeof(float) / sizeof(T);
  extern __shared__ __align__(32) char shared[];
  auto& [Q_i, K_j, V_j, S, factors] = *reinterpret_cast<Tiles<T, HEAD_DIM>*>(shared);

  const int head = blockIdx.y, b = blockIdx.z, row_0 = blockIdx.x * B_r;
  const int r_0 = threadIdx.y * ROWS, r = r_0 + threadIdx.x;  // this warp's rows begin here; this lane's row of S
  const int visible = a.visible(row_0 + r);
  const float scale = a.scale * LOG2_E;  // of S in base 2
  const T* k = a.k_head<T>(b, head);
  const T* v = a.v_head<T>(b, head);

  Sum<T> O_i[ROWS / 16][HEAD_DIM / 16];
  for (auto& block : O_i) {
    for (auto& o : block) wmma::fill_fragment(o, 0.0f);
  }
  float m_i = -INFINITY, l_i = 0.0f;

  load_tile<B_r, HEAD_DIM, WARPS>(Q_i, a.q_head<T>(b, head), a.q_strides.row, row_0, a.q_len);
  const int end = a.visible(min(row_0 + B_r, a.q_len) - 1);  // tiles past the last row's diagonal are skipped
  for (int col_0 = 0; col_0 < end; col_0 += B_c) {           // line 6
    load_tile<B_c, HEAD_DIM, WARPS>(K_j, k, a.k_strides.row, col_0, a.kv_len);  // line 7
    load_tile<B_c, HEAD_DIM, WARPS>(V_j, v, a.v_strides.row, col_0, a.kv_len);
    __syncthreads();  // the tile (and Q_i) complete before any warp reads it

    Sum<T> S_sum[ROWS / 16][B_c / 16];
    for (auto& block : S_sum) {
      for (auto& sum : block) wmma::fill_fragment(sum, 0.0f);
    }
#pragma unroll 2  // no more: fragments that are loaded early take registers
    for (int e = 0; e < HEAD_DIM; e += DEPTH) {  // line 8
      Left<T> query[ROWS / 16];
#pragma unroll
      for (int i = 0; i < ROWS; i += 16) wmma::load_matrix_sync(query[i / 16], &Q_i[r_0 + i][e], ROW);
#pragma unroll
      for (int c = 0; c < B_c; c += 16) {
        Right<T, wmma::col_major> key;  // by columns: K_j transposed
        wmma::load_matrix_sync(key, &K_j[c][e], ROW);
#pragma unroll
        for (int i = 0; i < ROWS / 16; ++i) wmma::mma_sync(S_sum[i][c / 16], query[i], key, S_sum[i][c / 16]);
      }
    }
#pragma unroll
    for (int i = 0; i < ROWS; i += 16) {
#pragma unroll
      for (int c = 0; c < B_c; c += 16)
        wmma::store_matrix_sync(&S[r_0 + i][c], S_sum[i / 16][c / 16], S_ROW, wmma::mem_row_major);
    }
    __syncwarp();  // S complete

    __align__(16) float S_r[B_c];  // line 9
    copy<B_c>(S_r, S[r]);
    float m_new = m_i;
#pragma unroll
    for (int c = 0; c < B_c; ++c) {
      S_r[c] = col_0 + c < visible ? S_r[c] * scale : -INFINITY;
      m_new = fmaxf(m_new, S_r[c]);
    }
    const float shift = m_new == -INFINITY ? 0.0f : m_new;  // no key so far: -inf - -inf would be NaN
    const float rescale = exp2f(m_i - shift);
    m_i = m_new;
    l_i *= rescale;
    __align__(16) T P_r[B_c];
#pragma unroll
    for (int c = 0; c < B_c; ++c) {
      const float P = exp2f(S_r[c] - shift);
      l_i += P;
      P_r[c] = operand(from_float<T>(P));
    }
    copy<B_c>(reinterpret_cast<T*>(S[r]), P_r);  // no other lane reads this row of S
#pragma unroll
    for (int i = 0; i < 16; ++i) factors[r][i] = rescale;
    __syncwarp();  // P and the factors complete

#pragma unroll
    for (int i = 0; i < ROWS; i += 16) {
      Sum<T> factor;
      wmma::load_matrix_sync(factor, &factors[r_0 + i][0], 16, wmma::mem_row_major);
      for (auto& o : O_i[i / 16]) {
        for (int x = 0; x < o.num_elements; ++x) o.x[x] *= factor.x[x];
      }
    }
#pragma unroll 1
    for (int c = 0; c < B_c; c += DEPTH) {  // line 10
      Left<T> P[ROWS / 16];
#pragma unroll
      for (int i = 0; i < ROWS; i += 16)
        wmma::load_matrix_sync(P[i / 16], reinterpret_cast<T*>(S[r_0 + i]) + c, P_ROW);
#pragma unroll
      for (int e = 0; e < HEAD_DIM; e += 16) {
        Right<T, wmma::row_major> value;
        wmma::load_matrix_sync(value, &V_j[c][e], ROW);
#pragma unroll
        for (int i = 0; i < ROWS / 16; ++i) wmma::mma_sync(O_i[i][e / 16], P[i], value, O_i[i][e / 16]);
      }
    }
    __syncthreads();  // the tile, P and the factors consumed before they are overwritten
  }

  factors[r][0] = l_i == 0.0f ? 0.0f : 1.0f / l_i;  // no key seen: 0, not 0 / 0
  T* out = a.out_head<T>(b, head);
#pragma unroll
  for (int e = 0; e < HEAD_DIM; e += 16) {  // line 12, 16 columns at a time through the place of S
#pragma unroll
    for (int i = 0; i < ROWS; i += 16)
      wmma::store_matrix_sync(&S[r_0 + i][0], O_i[i / 16][e / 16], S_ROW, wmma::mem_row_major);
    __syncwarp();  // complete (and the factors)
#pragma unroll 1
    for (int i = threadIdx.x; i < ROWS * 16; i += 32) {
      const int r = r_0 + i / 16, row = row_0 + r;
      if (row < a.q_len) out[row * a.out_strides.row + e + i % 16] = from_float<T>(S[r][i % 16] * factors[r][0]);
    }
    __syncwarp();  // consumed
  }
}

template <typename T, int HEAD_DIM>
static cudaError_t launch(const Attention& a, cudaStream_t stream) {
  using Tile = Tiles<T, HEAD_DIM>;
  if (cudaError_t error = allow_shared_memory<attention_kernel<T, HEAD_DIM>, sizeof(Tile)>()) return error;
  const dim3 grid(ceil_div(a.q_len, Tile::B_r), a.heads, a.batch), block(32, Tile::WARPS);
  attention_kernel<T, HEAD_DIM><<<grid, block, sizeof(Tile), stream>>>(a);
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
