// Task 4. FlashAttention-2 forward as one launch; fp32, fp16 or bf16 in and out, fp32 inside. [FA2] arXiv:2307.08691,
// Algorithm 1.
//
//   q, out (batch, q_len, heads, head_dim)      k, v (batch, kv_len, kv_heads, head_dim)     read in place, any strides
//   grid  (ceil(q_len / B_r), heads, batch)     one block for each Q_i: the outer loop of the paper is the grid
//   block (16, 16)                              thread (tx, ty) computes rows ty, ty + 16, ... of the tile: columns
//                                               tx, tx + 16, ... of S and P, and its share of O
//
//   line  8    S   = Q_i K_j^T                           Q_i and K_j from shared memory, S in registers
//   line  9    m'  = max(m_i, rowmax(S))                 16 threads share a row: half a warp, so shuffles suffice
//              P   = exp(S - m'),  l_i = exp(m_i - m') l_i + rowsum(P)
//   line 10    O_i = diag(exp(m_i - m')) O_i + P V_j     (printed with ^-1 in the paper: a known typo)
//   line 12    O_i = diag(l_i)^-1 O_i                    once, at the end
//
// Query row i of sequence b attends the keys  leftpad_k[b] <= j < seqlens_k[b],  and if causal also
// j <= i + seqlens_k[b] - q_len: the last query sees the last key, whatever the lengths. A row with no key gives 0.
#include <cuda_runtime.h>

#include "dtype.cuh"
#include "launch.cuh"
#include "tensor.cuh"

constexpr int LANES = 16;              // threads along a row, and rows side by side: a block has 16 x 16 threads
constexpr float LOG2_E = 1.44269504f;  // exp(x) = exp2(x log2(e)), and exp2 is one instruction

template <typename T>
struct Attention {
  const T *q, *k, *v;
  T* out;
  Strides q_strides, k_strides, v_strides, out_strides;
  const int *seqlens_k, *leftpad_k;  // (batch), or null: all kv_len keys, no padding
  int batch, heads, kv_heads, q_len, kv_len, head_dim;
  float scale;
  bool causal;
};

// Where each tile begins in a block's shared memory, the length of a row of K_j, and the size of all, in floats.
// Neighbouring threads read neighbouring rows of K_j, so these are 4 floats longer than their contents: 16-byte reads
// of 8 consecutive rows then fall into 32 different banks.
struct Tiles {
  int Q, K, V, P, K_row, size;
};
__host__ __device__ constexpr Tiles make_tiles(int B_r, int B_c, int HEAD_DIM) {
  const int K_row = HEAD_DIM + 4, K = B_r * HEAD_DIM, V = K + B_c * K_row, P = V + B_c * HEAD_DIM;
  return {0, K, V, P, K_row, P + B_r * B_c};
}

__device__ __forceinline__ float4 load4(const float* p) { return *reinterpret_cast<const float4*>(p); }

__device__ __forceinline__ float dot4(float4 a, float4 b, float sum) {
  sum = fmaf(a.x, b.x, sum);
  sum = fmaf(a.y, b.y, sum);
  sum = fmaf(a.z, b.z, sum);
  return fmaf(a.w, b.w, sum);
}

// tile[r][e] = factor * rows[first + r][e]; zeros where the row is not in [0, end) or e is past head_dim
template <int ROWS, int HEAD_DIM, typename T>
__device__ __forceinline__ void load_tile(float* tile, const T* rows, int64_t row_stride, int first, int end,
                                          int head_dim, float factor) {
  for (int i = threadIdx.y * LANES + threadIdx.x; i < ROWS * HEAD_DIM; i += LANES * LANES) {
    const int r = i / HEAD_DIM, e = i % HEAD_DIM;
    const bool inside = first + r < end && e < head_dim;
    tile[i] = inside ? factor * to_float(rows[(first + r) * row_stride + e]) : 0.0f;
  }
}

// The same in two halves, for a tile of B_c rows that is loaded while the block computes: fetch() starts the loads into
// registers, store() waits for them. 16-bit values are converted by store(), because converting waits too.
template <int B_c, int HEAD_DIM, typename T>
struct Prefetch {
  static constexpr int N = B_c * HEAD_DIM / (LANES * LANES);
  T x[N];

  __device__ __forceinline__ void fetch(const T* rows, int64_t row_stride, int first, int end, int head_dim) {
    const int t = threadIdx.y * LANES + threadIdx.x;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const int r = (t + n * LANES * LANES) / HEAD_DIM, e = t % HEAD_DIM;
      x[n] = first + r < end && e < head_dim ? rows[(first + r) * row_stride + e] : from_float<T>(0.0f);
    }
  }

  template <int ROW>
  __device__ __forceinline__ void store(float* tile) const {
    const int t = threadIdx.y * LANES + threadIdx.x;
#pragma unroll
    for (int n = 0; n < N; ++n) tile[(t + n * LANES * LANES) / HEAD_DIM * ROW + t % HEAD_DIM] = to_float(x[n]);
  }
};

template <int B_r, int B_c, int HEAD_DIM, typename T>
__global__ void __launch_bounds__(LANES* LANES) flashattention_kernel(Attention<T> a) {
  static_assert(B_r % LANES == 0 && B_c % LANES == 0, "B_r and B_c must be multiples of 16");
  static_assert(HEAD_DIM % 64 == 0, "a row of V must be a whole number of 16 x float4");
  constexpr Tiles tiles = make_tiles(B_r, B_c, HEAD_DIM);
  extern __shared__ __align__(16) float shared[];
  float* Q_i = shared + tiles.Q;  // [B_r][HEAD_DIM], times scale log2(e)
  float* K_j = shared + tiles.K;  // [B_c][tiles.K_row], of which HEAD_DIM are used
  float* V_j = shared + tiles.V;  // [B_c][HEAD_DIM]
  float* P_s = shared + tiles.P;  // [B_r][B_c]

  const int tx = threadIdx.x, ty = threadIdx.y, head = blockIdx.y, b = blockIdx.z;
  const int kv_head = head / (a.heads / a.kv_heads);
  const int row_0 = (gridDim.x - 1 - blockIdx.x) * B_r;  // causal: the longest rows start first
  const T* q = a.q + b * a.q_strides.batch + head * a.q_strides.head;
  const T* k = a.k + b * a.k_strides.batch + kv_head * a.k_strides.head;
  const T* v = a.v + b * a.v_strides.batch + kv_head * a.v_strides.head;
  T* out = a.out + b * a.out_strides.batch + head * a.out_strides.head;
  const int seqlen = a.seqlens_k ? min(a.seqlens_k[b], a.kv_len) : a.kv_len;
  const int leftpad = a.leftpad_k ? max(a.leftpad_k[b], 0) : 0;
  const int diagonal = seqlen - a.q_len;  // causal: row i sees the keys j <= i + diagonal
  // BEGIN SOLUTION
  constexpr int ROWS = B_r / LANES, COLS = B_c / LANES, QUADS = HEAD_DIM / (4 * LANES);
  float4 O_i[ROWS][QUADS] = {};       // O[row][4 * (tx + 16 * quad) ...]
  float m_i[ROWS], l_i[ROWS] = {};    // l_i: this thread's columns only; the 16 parts are added at the end
  for (int r = 0; r < ROWS; ++r) m_i[r] = -INFINITY;

  load_tile<B_r, HEAD_DIM>(Q_i, q, a.q_strides.row, row_0, a.q_len, a.head_dim, a.scale * LOG2_E);

  const int end = a.causal ? min(seqlen, min(row_0 + B_r, a.q_len) + diagonal) : seqlen;  // tiles past it are skipped
  Prefetch<B_c, HEAD_DIM, T> next;
  next.fetch(k, a.k_strides.row, leftpad, seqlen, a.head_dim);
  for (int col_0 = leftpad; col_0 < end; col_0 += B_c) {  // line 6; keys in the padding are not even read
    next.template store<tiles.K_row>(K_j);
    __syncthreads();  // K_j (and Q_i) complete; V_j and P of the last round consumed
    next.fetch(v, a.v_strides.row, col_0, seqlen, a.head_dim);  // line 7: V_j is loaded while S is computed

    float S[ROWS][COLS] = {};
#pragma unroll 4
    for (int e = 0; e < HEAD_DIM; e += 4) {  // line 8
      float4 key[COLS];
#pragma unroll
      for (int c = 0; c < COLS; ++c) key[c] = load4(&K_j[(tx + LANES * c) * tiles.K_row + e]);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const float4 query = load4(&Q_i[(ty + LANES * r) * HEAD_DIM + e]);
#pragma unroll
        for (int c = 0; c < COLS; ++c) S[r][c] = dot4(query, key[c], S[r][c]);
      }
    }

#pragma unroll
    for (int r = 0; r < ROWS; ++r) {  // line 9
      const int row = row_0 + ty + LANES * r;
      float m_new = m_i[r];
#pragma unroll
      for (int c = 0; c < COLS; ++c) {
        const int col = col_0 + tx + LANES * c;
        const bool seen = col < seqlen && (!a.causal || col <= row + diagonal);
        S[r][c] = seen ? S[r][c] : -INFINITY;
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
        P_s[(ty + LANES * r) * B_c + tx + LANES * c] = P;
      }
#pragma unroll
      for (int quad = 0; quad < QUADS; ++quad) {
        float4& o = O_i[r][quad];
        o = make_float4(rescale * o.x, rescale * o.y, rescale * o.z, rescale * o.w);
      }
    }
    next.template store<HEAD_DIM>(V_j);
    __syncthreads();  // V_j and P complete, K_j consumed
    if (col_0 + B_c < end) next.fetch(k, a.k_strides.row, col_0 + B_c, seqlen, a.head_dim);  // while P V_j is computed

#pragma unroll 4
    for (int c = 0; c < B_c; c += 4) {  // line 10
      float P[ROWS][4];
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
        *reinterpret_cast<float4*>(P[r]) = load4(&P_s[(ty + LANES * r) * B_c + c]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int quad = 0; quad < QUADS; ++quad) {
          const float4 value = load4(&V_j[(c + i) * HEAD_DIM + 4 * (tx + LANES * quad)]);
#pragma unroll
          for (int r = 0; r < ROWS; ++r) {
            float4& o = O_i[r][quad];
            o.x = fmaf(P[r][i], value.x, o.x);
            o.y = fmaf(P[r][i], value.y, o.y);
            o.z = fmaf(P[r][i], value.z, o.z);
            o.w = fmaf(P[r][i], value.w, o.w);
          }
        }
      }
    }
  }

#pragma unroll
  for (int r = 0; r < ROWS; ++r) {  // line 12
    for (int lane = LANES / 2; lane > 0; lane /= 2) l_i[r] += __shfl_xor_sync(~0u, l_i[r], lane);
    const float inverse = l_i[r] == 0.0f ? 0.0f : 1.0f / l_i[r];
    const int row = row_0 + ty + LANES * r;
    if (row >= a.q_len) continue;
#pragma unroll
    for (int quad = 0; quad < QUADS; ++quad) {
      const float4 o = O_i[r][quad];
      const float values[4] = {o.x, o.y, o.z, o.w};
      for (int i = 0; i < 4; ++i) {
        const int e = 4 * (tx + LANES * quad) + i;
        if (e < a.head_dim) out[row * a.out_strides.row + e] = from_float<T>(values[i] * inverse);
      }
    }
  }
  // END SOLUTION
}

// ---------------------------------------------------------------------------------------------------------------------
// Launchers
// ---------------------------------------------------------------------------------------------------------------------
template <int B_r, int B_c, int HEAD_DIM, typename T>
static cudaError_t launch_tile(const Attention<T>& a, cudaStream_t stream) {
  constexpr int bytes = sizeof(float) * make_tiles(B_r, B_c, HEAD_DIM).size;
  if (cudaError_t error = allow_shared_memory<flashattention_kernel<B_r, B_c, HEAD_DIM, T>, bytes>()) return error;
  const dim3 grid(ceil_div(a.q_len, B_r), a.heads, a.batch), block(LANES, LANES);
  flashattention_kernel<B_r, B_c, HEAD_DIM, T><<<grid, block, bytes, stream>>>(a);
  return cudaGetLastError();
}

// Bytes of shared memory that a block takes. attention.py picks a tile by it.
extern "C" int shared_memory_bytes(int B_r, int B_c, int head_dim) {
  return sizeof(float) * make_tiles(B_r, B_c, head_dim <= 64 ? 64 : 128).size;
}

// The tiles that are compiled. attention.py picks one of them; to try another, add it here and in its TILES.
template <int HEAD_DIM, typename T>
static cudaError_t launch(int B_r, int B_c, const Attention<T>& a, cudaStream_t stream) {
  if (B_r == 128 && B_c == 64) return launch_tile<128, 64, HEAD_DIM>(a, stream);
  if (B_r == 32 && B_c == 32) return launch_tile<32, 32, HEAD_DIM>(a, stream);
  return cudaErrorInvalidValue;
}

// q, out (batch, q_len, heads, head_dim)   k, v (batch, kv_len, kv_heads, head_dim)
// seqlens_k, leftpad_k (batch), or null
extern "C" cudaError_t flash_attention(View q, View k, View v, View out, const int* seqlens_k, const int* leftpad_k,
                                       float scale, int causal, int dtype, int B_r, int B_c, cudaStream_t stream) {
  return with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    Attention<T> a;
    a.q = q.as<T>(), a.q_strides = strides_of(q);
    a.k = k.as<T>(), a.k_strides = strides_of(k);
    a.v = v.as<T>(), a.v_strides = strides_of(v);
    a.out = out.as<T>(), a.out_strides = strides_of(out);
    a.seqlens_k = seqlens_k, a.leftpad_k = leftpad_k;
    a.batch = q.sizes[0], a.q_len = q.sizes[1], a.heads = q.sizes[2], a.head_dim = q.sizes[3];
    a.kv_len = k.sizes[1], a.kv_heads = k.sizes[2];
    a.scale = scale, a.causal = causal != 0;
    return a.head_dim <= 64 ? launch<64>(B_r, B_c, a, stream) : launch<128>(B_r, B_c, a, stream);
  });
}
