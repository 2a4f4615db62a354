// Rung 9, FlashAttention-2: Q and P stay in registers, and the softmax has fewer instructions.
// FlashAttention-2 forward [FA2] arXiv:2307.08691, Algorithm 1.
//
//   q, out (batch, q_len, heads, head_dim)      k, v (batch, kv_len, kv_heads, head_dim)     fp16 or bf16, sums in fp32
//   grid  (ceil(q_len / B_r), heads, batch)     one block for each Q_i; those of one head run together: K and V from L2
//   block (32 WARPS)                            warp w: the rows of Q_i from 16 R w on, R pieces of 16; all columns
//   tile  B_r = 128, B_c = 64 (48 at head_dim 128), WARPS = 4, so R = 2;  32 and 56 KiB of shared memory
//   The caller has checked: head_dim 64 or 128, scale above 0, pointers and strides multiples of 16 bytes
//
//   line  8    S   = Q_i K_j^T                  in pieces of 16 x 8 x 16, from fragments that ldmatrix loads
//   line  9    m'  = max(m_i, rowmax(S))        four lanes share a row: two shuffles
//              P   = exp(S - m'),  l_i = exp(m_i - m') l_i + rowsum(P)
//   line 10    O_i = diag(exp(m_i - m')) O_i + P V_j     (printed with ^-1 in the paper: a known typo)
//   line 12    O_i = diag(l_i)^-1 O_i           once, at the end
//
// Compared with rung 8:
//   P     two neighbouring 16 x 8 pieces of sums are, element by element, a 16 x 16 left operand: pairs of floats
//         become pairs of T, and that is all. P_s is gone, and its __syncwarp()
//   Q_i   is loaded from shared memory once, not once per tile: 32 registers at head_dim 64. At 128 it would take 64,
//         for which O_i's 128 and the scores leave no room: it is loaded per tile, as in FlashAttention-2 itself
//   exp   exp(scale S - m) is exp2(S (scale log2 e) - m), m in that unit: one FFMA, and the exp2 instruction itself.
//         Rung 8 takes an FMUL, an FADD, and in exp2f() three more for results below 2^-126, which are 0 here
//   l_i   is each thread's own part of the sum; the four parts are added once, at the end. The maximum cannot wait
//   mask  only in tiles that the diagonal or the end of the keys cuts
// An element of S takes 4.5 instructions besides the products (max, FFMA, exp2, sum, half a conversion) instead of 11;
// 64 keys take 640 wavefronts of shared memory instead of 1,024 at head_dim 64, 1,621 instead of 1,792 at 128.
// What limits it now: a block waits for its tile, then computes, then loads the next. Only the SM's other block fills
// the gaps (two fit: a thread has up to 255 registers).
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

// 2^x by the one instruction that the GPU has for it: results below 2^-126 are 0.
__device__ __forceinline__ float fast_exp2(float x) {
#ifdef __CUDACC__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
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
  constexpr bool Q_STAYS = D == 64;  // in 32 registers. At 128 it would take 64, beside O_i's 128
  extern __shared__ __align__(128) uint4 shared[];
  T* Q_s = reinterpret_cast<T*>(shared);  // [B_r][D]
  T* K_s = Q_s + B_r * D;                 // [B_c][D]
  T* V_s = K_s + B_c * D;                 // [B_c][D]

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int head = blockIdx.y, b = blockIdx.z;
  const int row_0 = (gridDim.x - 1 - blockIdx.x) * B_r;  // causal: the longest rows start first
  const int row_w = row_0 + 16 * R * warp;               // the warp's first row
  T* Q_w = Q_s + 16 * R * warp * D;                      // and its place in shared memory
  const T* k = a.k_head<T>(b, head);
  const T* v = a.v_head<T>(b, head);
  const float scale = a.scale * LOG2_E;

  // ldmatrix takes a 16 x 16 piece as four 8 x 8 matrices; each lane points at a row of one. a_lane: top left, bottom
  // left, top right, bottom right, as a left operand wants them, and V too, transposed on its way. b_lane: top left,
  // top right, bottom left, bottom right, for K, whose rows are the columns of the right operand K^T.
  const int a_lane = offset<D>(lane % 16, lane / 16);
  const int b_lane = offset<D>(lane / 16 * 8 + lane % 8, lane / 8 % 2);

  load_tile<B_r, D, THREADS>(Q_s, a.q_head<T>(b, head) + row_0 * a.q_strides.row, a.q_strides.row, a.q_len - row_0);
  __syncthreads();  // Q_i complete
  uint32_t Q_i[R][Q_STAYS ? D / 16 : 1][4];
#pragma unroll
  for (int e = 0; e < D / 16 && Q_STAYS; ++e) {
#pragma unroll
    for (int r = 0; r < R; ++r) ldmatrix_x4(Q_i[r][e], Q_w + 16 * r * D + (a_lane ^ 16 * e));
  }

  float O_i[R][D / 8][4] = {};      // rows g and g + 8 of each 16, columns 8 e + 2t and the next
  float m_i[R][2], l_i[R][2] = {};  // of those two rows; l_i: this thread's columns only
  for (int r = 0; r < R; ++r) m_i[r][0] = m_i[r][1] = -INFINITY;

  const int whole = a.visible(row_0);                        // all rows of the block see the keys before this one,
  const int end = a.visible(min(row_0 + B_r, a.q_len) - 1);  // none those from this one on: their tiles are skipped
  for (int col_0 = 0; col_0 < end; col_0 += B_c) {           // line 6
    load_tile<B_c, D, THREADS>(K_s, k, a.k_strides.row, a.kv_len - col_0);  // line 7
    load_tile<B_c, D, THREADS>(V_s, v, a.v_strides.row, a.kv_len - col_0);
    k += B_c * a.k_strides.row;
    v += B_c * a.v_strides.row;
    __syncthreads();  // K_j and V_j complete

    float S[R][B_c / 8][4] = {};  // line 8
#pragma unroll
    for (int e = 0; e < D / 16; ++e) {
#pragma unroll
      for (int r = 0; r < R && !Q_STAYS; ++r) ldmatrix_x4(Q_i[r][0], Q_w + 16 * r * D + (a_lane ^ 16 * e));
#pragma unroll
      for (int c = 0; c < B_c / 16; ++c) {
        uint32_t K[4];
        ldmatrix_x4(K, K_s + 16 * c * D + (b_lane ^ 16 * e));
#pragma unroll
        for (int r = 0; r < R; ++r) mma_16x16<T>(S[r][2 * c], S[r][2 * c + 1], Q_i[r][Q_STAYS ? e : 0], K);
      }
    }

    if (col_0 + B_c > whole) {  // the diagonal or the end of the keys cuts this tile
#pragma unroll
      for (int r = 0; r < R; ++r) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int seen = a.visible(row_w + 16 * r + g + i / 2 * 8) - col_0 - 2 * t - i % 2;
#pragma unroll
          for (int c = 0; c < B_c / 8; ++c) S[r][c][i] = 8 * c < seen ? S[r][c][i] : -INFINITY;
        }
      }
    }

#pragma unroll
    for (int r = 0; r < R; ++r) {  // line 9
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float m_new = S[r][0][2 * h];
#pragma unroll
        for (int c = 0; c < B_c / 8; ++c) m_new = fmaxf(m_new, fmaxf(S[r][c][2 * h], S[r][c][2 * h + 1]));
        m_new = fmaxf(m_new, __shfl_xor_sync(~0u, m_new, 1));
        m_new = fmaxf(m_new, __shfl_xor_sync(~0u, m_new, 2));
        m_new = fmaxf(m_i[r][h], scale * m_new);
        const float shift = m_new == -INFINITY ? 0.0f : m_new;  // no key so far: -inf - -inf would be NaN
        const float rescale = fast_exp2(m_i[r][h] - shift);
        m_i[r][h] = m_new;
        l_i[r][h] *= rescale;
#pragma unroll
        for (int c = 0; c < B_c / 8; ++c) {
#pragma unroll
          for (int i = 2 * h; i < 2 * h + 2; ++i) {
            S[r][c][i] = fast_exp2(fmaf(scale, S[r][c][i], -shift));  // P
            l_i[r][h] += S[r][c][i];
          }
        }
#pragma unroll
        for (int e = 0; e < D / 8; ++e) {
          O_i[r][e][2 * h] *= rescale;
          O_i[r][e][2 * h + 1] *= rescale;
        }
      }
    }

#pragma unroll
    for (int c = 0; c < B_c / 16; ++c) {  // line 10
      uint32_t P[R][4];
#pragma unroll
      for (int r = 0; r < R; ++r) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          P[r][i] = pack<T>(S[r][2 * c + i / 2][i % 2 * 2], S[r][2 * c + i / 2][i % 2 * 2 + 1]);
      }
#pragma unroll
      for (int e = 0; e < D / 16; ++e) {
        uint32_t V[4];
        ldmatrix_x4_trans(V, V_s + 16 * c * D + (a_lane ^ 16 * e));
#pragma unroll
        for (int r = 0; r < R; ++r) mma_16x16<T>(O_i[r][2 * e], O_i[r][2 * e + 1], P[r], V);
      }
    }
    __syncthreads();  // K_j and V_j consumed
  }

  T* out = a.out_head<T>(b, head) + row_w * a.out_strides.row;
#pragma unroll
  for (int r = 0; r < R; ++r) {  // line 12
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      l_i[r][h] += __shfl_xor_sync(~0u, l_i[r][h], 1);
      l_i[r][h] += __shfl_xor_sync(~0u, l_i[r][h], 2);
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
  constexpr int B_r = 128, B_c = HEAD_DIM == 64 ? 64 : 48, WARPS = 4;  // 64 would spill registers
  constexpr int bytes = (B_r + 2 * B_c) * HEAD_DIM * sizeof(T);  // Q_i, K_j, V_j
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
