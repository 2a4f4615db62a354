// Rung 8, swizzled shared memory: no bank conflicts.
// FlashAttention-2 forward [FA2] arXiv:2307.08691, Algorithm 1.
//
//   q, out (batch, q_len, heads, head_dim)      k, v (batch, kv_len, kv_heads, head_dim)     fp16 or bf16, sums in fp32
//   grid  (ceil(q_len / B_r), heads, batch)     one block for each Q_i; those of one head run together: K and V from L2
//   block (32 WARPS)                            warp w: the rows of Q_i from 16 R w on, R pieces of 16; all columns
//   tile  B_r = 128, B_c = 64, WARPS = 4, so R = 2;  48 and 80 KiB of shared memory at head_dim 64 and 128
//   The caller has checked: head_dim 64 or 128, scale above 0, pointers and strides multiples of 16 bytes
//
//   line  8    S   = Q_i K_j^T                  in pieces of 16 x 8 x 16, from fragments that ldmatrix loads
//   line  9    m'  = max(m_i, rowmax(S))        four lanes share a row: two shuffles
//              P   = exp(S - m'),  l_i = exp(m_i - m') l_i + rowsum(P)
//   line 10    O_i = diag(exp(m_i - m')) O_i + P V_j     (printed with ^-1 in the paper: a known typo)
//   line 12    O_i = diag(l_i)^-1 O_i           once, at the end
//
// Compared with rung 7: offset(), and + became ^ where a lane walks along its row. Row r keeps chunk c, its 16 bytes
// number c, at place c ^ r % 8. The chunks at places 0 ... 7:
//     row 0    0 1 2 3 4 5 6 7
//     row 1    1 0 3 2 5 4 7 6          Each row and each column has every number once. So 8 chunks of one row, which
//     row 2    2 3 0 1 6 7 4 5          load_tile stores, and one chunk of 8 rows, which ldmatrix loads, are both in
//     ...                               8 different groups of 4 banks.
//     row 7    7 6 5 4 3 2 1 0
// 2 e chunks further on in a row is ^ 16 e elements, because (2 e + c) ^ r = 2 e ^ (c ^ r) for c = 0 and 1.
//
// Wavefronts for one tile at head_dim 128, all warps together:                   rung 7    rung 8
//     ldmatrix of Q, K, P, V       16 + 32 + 8 + 32 times 4 matrices per warp    11,264     1,408
//     storing P                    32 stores per warp of 8 rows x 16 bytes        1,024       128
//     storing K and V              8 threads write 128 bytes of one row             256       256
// Rows padded by 16 bytes would do as much for 6 to 12 % more shared memory. The swizzle costs none, and one XOR per
// address. TMA and wgmma (rung 11) have the same one built in.
// What limits it now: instructions. Besides the products, the softmax takes 11 per element of S.
#include <cuda_runtime.h>

#include "attention.cuh"
#include "ptx.cuh"

// The offset in a tile of a row's 16 bytes (8 elements) number `chunk`.
template <int COLUMNS>
__device__ __forceinline__ int offset(int row, int chunk) {
  return row * COLUMNS + 8 * (chunk ^ row % 8);
}

// tile = rows [0, ROWS); zeros from row `inside` on, which is the end of the tensor
template <int ROWS, int HEAD_DIM, int THREADS, typename T>
__device__ __forceinline__ void load_tile(T* tile, const T* rows, int64_t row_stride, int inside) {
  constexpr int CHUNKS = HEAD_DIM / 8, STEP = THREADS / CHUNKS;
  static_assert(STEP % 8 == 0 && ROWS % STEP == 0, "each thread keeps its chunk, and its row % 8");
  const int row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
  const T* from = rows + row * row_stride + 8 * chunk;
  T* to = tile + offset<HEAD_DIM>(row, chunk);
  uint4 x[ROWS / STEP];  // all loads are in flight before the first is awaited
#pragma unroll
  for (int r = 0; r < ROWS; r += STEP, from += STEP * row_stride)
    x[r / STEP] = r < inside - row ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int r = 0; r < ROWS; r += STEP) *reinterpret_cast<uint4*>(to + r * HEAD_DIM) = x[r / STEP];
}

// Two 16-bit values in one register.
template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  const union {
    T pair[2];
    uint32_t bits;
  } u = {{from_float<T>(low), from_float<T>(high)}};
  return u.bits;
}

// (left right) += a b: a 16 x 16, b 16 x 16, left and right 16 x 8
template <typename T>
__device__ __forceinline__ void mma_16x16(float (&left)[4], float (&right)[4], const uint32_t (&a)[4],
                                          const uint32_t (&b)[4]) {
  mma_m16n8k16<T>(left, a, {b[0], b[1]}, left);
  mma_m16n8k16<T>(right, a, {b[2], b[3]}, right);
}

template <typename T, int HEAD_DIM, int B_r, int B_c, int WARPS>
__global__ void __launch_bounds__(32 * WARPS) attention_kernel(Attention a) {
  constexpr int D = HEAD_DIM, THREADS = 32 * WARPS, R = B_r / (16 * WARPS);
  static_assert(B_r == 16 * WARPS * R && B_c % 16 == 0, "products are made of 16 x 16 pieces");
  extern __shared__ __align__(128) uint4 shared[];
  T* Q_s = reinterpret_cast<T*>(shared);  // [B_r][D]
  T* K_s = Q_s + B_r * D;                 // [B_c][D]
  T* V_s = K_s + B_c * D;                 // [B_c][D]
  T* P_s = V_s + B_c * D;                 // [B_r][B_c]

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int head = blockIdx.y, b = blockIdx.z;
  const int row_0 = (gridDim.x - 1 - blockIdx.x) * B_r;  // causal: the longest rows start first
  const int row_w = row_0 + 16 * R * warp;               // the warp's first row
  const T* k = a.k_head<T>(b, head);
  const T* v = a.v_head<T>(b, head);
  const float scale = a.scale * LOG2_E;

  // ldmatrix takes a 16 x 16 piece as four 8 x 8 matrices; each lane points at a row of one. a_lane: top left, bottom
  // left, top right, bottom right, as a left operand wants them, and V too, transposed on its way. b_lane: top left,
  // top right, bottom left, bottom right, for K, whose rows are the columns of the right operand K^T.
  const int a_lane = offset<D>(lane % 16, lane / 16);
  const int b_lane = offset<D>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
  const int p_lane = offset<B_c>(lane % 16, lane / 16);  // as a_lane, in P

  load_tile<B_r, D, THREADS>(Q_s, a.q_head<T>(b, head) + row_0 * a.q_strides.row, a.q_strides.row, a.q_len - row_0);

  float O_i[R][D / 8][4] = {};      // rows g and g + 8 of each 16, columns 8 e + 2t and the next
  float m_i[R][2], l_i[R][2] = {};  // of those two rows
  for (int r = 0; r < R; ++r) m_i[r][0] = m_i[r][1] = -INFINITY;

  const int end = a.visible(min(row_0 + B_r, a.q_len) - 1);  // no row of the block sees keys from this one on
  for (int col_0 = 0; col_0 < end; col_0 += B_c) {           // line 6; tiles past end are skipped
    load_tile<B_c, D, THREADS>(K_s, k, a.k_strides.row, a.kv_len - col_0);  // line 7
    load_tile<B_c, D, THREADS>(V_s, v, a.v_strides.row, a.kv_len - col_0);
    k += B_c * a.k_strides.row;
    v += B_c * a.v_strides.row;
    __syncthreads();  // K_j and V_j (and Q_i) complete

    float S[R][B_c / 8][4] = {};  // line 8
#pragma unroll
    for (int e = 0; e < D / 16; ++e) {
      uint32_t Q[R][4];
#pragma unroll
      for (int r = 0; r < R; ++r) ldmatrix_x4(Q[r], Q_s + 16 * (R * warp + r) * D + (a_lane ^ 16 * e));
#pragma unroll
      for (int c = 0; c < B_c / 16; ++c) {
        uint32_t K[4];
        ldmatrix_x4(K, K_s + 16 * c * D + (b_lane ^ 16 * e));
#pragma unroll
        for (int r = 0; r < R; ++r) mma_16x16<T>(S[r][2 * c], S[r][2 * c + 1], Q[r], K);
      }
    }

#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int seen = a.visible(row_w + 16 * r + g + i / 2 * 8) - col_0 - 2 * t - i % 2;
#pragma unroll
        for (int c = 0; c < B_c / 8; ++c) S[r][c][i] = 8 * c < seen ? scale * S[r][c][i] : -INFINITY;
      }
    }

#pragma unroll
    for (int r = 0; r < R; ++r) {  // line 9
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float m_new = m_i[r][h], sum = 0.0f;
#pragma unroll
        for (int c = 0; c < B_c / 8; ++c) m_new = fmaxf(m_new, fmaxf(S[r][c][2 * h], S[r][c][2 * h + 1]));
        m_new = fmaxf(m_new, __shfl_xor_sync(~0u, m_new, 1));
        m_new = fmaxf(m_new, __shfl_xor_sync(~0u, m_new, 2));
        const float shift = m_new == -INFINITY ? 0.0f : m_new;  // no key so far: -inf - -inf would be NaN
        const float rescale = exp2f(m_i[r][h] - shift);
        m_i[r][h] = m_new;
#pragma unroll
        for (int c = 0; c < B_c / 8; ++c) {
#pragma unroll
          for (int i = 2 * h; i < 2 * h + 2; ++i) {
            S[r][c][i] = exp2f(S[r][c][i] - shift);  // P
            sum += S[r][c][i];
          }
          *reinterpret_cast<uint32_t*>(P_s + offset<B_c>(16 * (R * warp + r) + g + 8 * h, c) + 2 * t) =
              pack<T>(S[r][c][2 * h], S[r][c][2 * h + 1]);
        }
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        l_i[r][h] = rescale * l_i[r][h] + sum;
#pragma unroll
        for (int e = 0; e < D / 8; ++e) {
          O_i[r][e][2 * h] *= rescale;
          O_i[r][e][2 * h + 1] *= rescale;
        }
      }
    }

    __syncwarp();  // P complete; a warp reads none but its own rows
#pragma unroll
    for (int c = 0; c < B_c / 16; ++c) {  // line 10
      uint32_t P[R][4];
#pragma unroll
      for (int r = 0; r < R; ++r) ldmatrix_x4(P[r], P_s + 16 * (R * warp + r) * B_c + (p_lane ^ 16 * c));
#pragma unroll
      for (int e = 0; e < D / 16; ++e) {
        uint32_t V[4];
        ldmatrix_x4_trans(V, V_s + 16 * c * D + (a_lane ^ 16 * e));
#pragma unroll
        for (int r = 0; r < R; ++r) mma_16x16<T>(O_i[r][2 * e], O_i[r][2 * e + 1], P[r], V);
      }
    }
    __syncthreads();  // K_j, V_j and P consumed
  }

  T* out = a.out_head<T>(b, head) + row_w * a.out_strides.row;
#pragma unroll
  for (int r = 0; r < R; ++r) {  // line 12
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float inverse = l_i[r][h] == 0.0f ? 0.0f : 1.0f / l_i[r][h];
      const int row = 16 * r + g + 8 * h;
      if (row_w + row >= a.q_len) continue;
#pragma unroll
      for (int e = 0; e < D / 8; ++e)
        *reinterpret_cast<uint32_t*>(out + row * a.out_strides.row + 8 * e + 2 * t) =
            pack<T>(inverse * O_i[r][e][2 * h], inverse * O_i[r][e][2 * h + 1]);
    }
  }
}

template <typename T, int HEAD_DIM>
static cudaError_t launch(const Attention& a, cudaStream_t stream) {
  constexpr int B_r = 128, B_c = 64, WARPS = 4;
  constexpr int bytes = ((B_r + 2 * B_c) * HEAD_DIM + B_r * B_c) * sizeof(T);  // Q_i, K_j, V_j, P
  if (cudaError_t error = allow_shared_memory<attention_kernel<T, HEAD_DIM, B_r, B_c, WARPS>, bytes>()) return error;
  const dim3 grid(ceil_div(a.q_len, B_r), a.heads, a.batch);
  attention_kernel<T, HEAD_DIM, B_r, B_c, WARPS><<<grid, 32 * WARPS, bytes, stream>>>(a);
  return cudaGetLastError();
}

template <typename T>
static cudaError_t launch(const Attention& a, cudaStream_t stream) {
  if (a.head_dim == 64) return launch<T, 64>(a, stream);
  if (a.head_dim == 128) return launch<T, 128>(a, stream);
  return cudaErrorInvalidValue;
}

extern "C" cudaError_t attention(View q, View k, View v, View out, void* workspace, float scale, int causal, int dtype,
                                 cudaStream_t stream) {
  const Attention a = make_attention(q, k, v, out, workspace, scale, causal);
  if (dtype == FLOAT16) return launch<__half>(a, stream);
  if (dtype == BFLOAT16) return launch<__nv_bfloat16>(a, stream);
  return cudaErrorInvalidValue;
}
