// Five kernels of the kind that the course builds, each with bugs that can be switched on.
//
// Every kernel is a template over Bug; NONE is correct. A comment `// @name` marks a line that a
// test expects an error to name. Sizes are those of the tests, so shapes are not checked here.
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <math.h>

#include "ptx.cuh"

enum Bug {
  NONE,
  GEMM_NO_BARRIER_AFTER_LOAD,
  GEMM_NO_BARRIER_AFTER_USE,
  GEMM_NARROW_TILE,
  GEMM_NO_ROW_CHECK,
  GEMM_DIVERGENT_BARRIER,
  SOFTMAX_NO_BARRIER_BEFORE_TREE,
  SOFTMAX_NO_BARRIER_IN_TREE,
  SOFTMAX_NO_BARRIER_AFTER_MAX,
  SOFTMAX_NO_BARRIER_BEFORE_SUM,
  SOFTMAX_SHORT_SHARED,
  SOFTMAX_UNINITIALISED,
  FLASH_NO_BARRIER_AFTER_LOAD,
  FLASH_NO_BARRIER_AFTER_USE,
  FLASH_EARLY_RETURN,
  MMA_NO_BARRIER_AFTER_WAIT,
  MMA_NO_BARRIER_AFTER_USE,
  MMA_LAST_WAIT_TOO_SHORT,
  MMA_NO_WAIT,
  DECODE_NO_BARRIER,
  DECODE_SHUFFLE_IN_BRANCH,
  BUGS
};

// ---- C = A B, tiles of T x T
template <Bug BUG, int T>
__global__ void gemm(const float* A, const float* B, float* C, int M, int N, int K) {
  constexpr int WIDTH = BUG == GEMM_NARROW_TILE ? T - 1 : T;
  __shared__ float A_tile[T][T], B_tile[T][WIDTH];
  int x = threadIdx.x, y = threadIdx.y, row = blockIdx.y * T + y, column = blockIdx.x * T + x;
  float sum = 0.0f;
  for (int k0 = 0; k0 < K; k0 += T) {
    bool a_inside = (BUG == GEMM_NO_ROW_CHECK || row < M) && k0 + x < K;
    bool b_inside = column < N && k0 + y < K;
    A_tile[y][x] = a_inside ? A[row * K + k0 + x] : 0.0f;       // @gemm-load-a
    B_tile[y][x] = b_inside ? B[(k0 + y) * N + column] : 0.0f;  // @gemm-load-b
    if (BUG == GEMM_DIVERGENT_BARRIER) {
      if (x < 8) __syncthreads();
    } else if (BUG != GEMM_NO_BARRIER_AFTER_LOAD) {
      __syncthreads();
    }
    for (int k = 0; k < T; ++k) sum += A_tile[y][k] * B_tile[k][x];  // @gemm-use
    if (BUG != GEMM_NO_BARRIER_AFTER_USE) __syncthreads();         // @gemm-second-barrier
  }
  if (row < M && column < N) C[row * N + column] = sum;
}

// ---- softmax of each row, one block per row, tree reductions in dynamic shared memory
template <Bug BUG>
__global__ void softmax(const float* x, float* y, int columns) {
  extern __shared__ float scratch[];
  const float* x_row = x + blockIdx.x * columns;
  float* y_row = y + blockIdx.x * columns;
  int t = threadIdx.x;
  float largest = -INFINITY;
  for (int i = t; i < columns; i += blockDim.x) largest = fmaxf(largest, x_row[i]);
  if (BUG != SOFTMAX_UNINITIALISED || t < 100) scratch[t] = largest;  // @softmax-store-max
  if (BUG != SOFTMAX_NO_BARRIER_BEFORE_TREE) __syncthreads();
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    if (t < half) scratch[t] = fmaxf(scratch[t], scratch[t + half]);  // @softmax-max-tree
    if (BUG != SOFTMAX_NO_BARRIER_IN_TREE) __syncthreads();
  }
  largest = scratch[0];  // @softmax-read-max
  if (BUG != SOFTMAX_NO_BARRIER_AFTER_MAX) __syncthreads();
  float sum = 0.0f;
  for (int i = t; i < columns; i += blockDim.x) sum += expf(x_row[i] - largest);
  scratch[t] = sum;  // @softmax-store-sum
  if (BUG != SOFTMAX_NO_BARRIER_BEFORE_SUM) __syncthreads();
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    if (t < half) scratch[t] += scratch[t + half];  // @softmax-sum-tree
    __syncthreads();
  }
  for (int i = t; i < columns; i += blockDim.x) y_row[i] = expf(x_row[i] - largest) / scratch[0];
}

// ---- FlashAttention-2, one thread per query row
template <Bug BUG, int B_r, int B_c, int D>
__global__ void flash(const float* Q, const float* K, const float* V, float* O, int S,
                      float scale) {
  __shared__ float K_j[B_c][D], V_j[B_c][D];
  int row = blockIdx.x * B_r + threadIdx.x;
  if (BUG == FLASH_EARLY_RETURN && row >= S) return;
  float q[D], o[D], m = -INFINITY, l = 0.0f;
  for (int d = 0; d < D; ++d) {
    q[d] = row < S ? Q[row * D + d] * scale : 0.0f;
    o[d] = 0.0f;
  }
  for (int j0 = 0; j0 < S; j0 += B_c) {
    for (int e = threadIdx.x; e < B_c * D; e += B_r) {
      bool inside = j0 + e / D < S;
      K_j[e / D][e % D] = inside ? K[j0 * D + e] : 0.0f;  // @flash-load-k
      V_j[e / D][e % D] = inside ? V[j0 * D + e] : 0.0f;
    }
    if (BUG != FLASH_NO_BARRIER_AFTER_LOAD) __syncthreads();
    float s[B_c], m_new = m;
    for (int j = 0; j < B_c; ++j) {
      s[j] = 0.0f;
      for (int d = 0; d < D; ++d) s[j] += q[d] * K_j[j][d];  // @flash-use-k
      if (j0 + j >= S) s[j] = -INFINITY;
      m_new = fmaxf(m_new, s[j]);
    }
    float correction = __expf(m - m_new);
    l *= correction;
    for (int d = 0; d < D; ++d) o[d] *= correction;
    for (int j = 0; j < B_c; ++j) {
      float p = __expf(s[j] - m_new);
      l += p;
      for (int d = 0; d < D; ++d) o[d] += p * V_j[j][d];
    }
    m = m_new;
    if (BUG != FLASH_NO_BARRIER_AFTER_USE) __syncthreads();
  }
  if (row < S) {
    for (int d = 0; d < D; ++d) O[row * D + d] = o[d] / l;
  }
}

// ---- FlashAttention-2 with tensor cores: 4 warps of 16 rows, keys double-buffered by cp_async
template <Bug BUG, int D>
__global__ void flash_mma(const __nv_bfloat16* Q, const __nv_bfloat16* K, const __nv_bfloat16* V,
                          float* O, int S, float scale) {
  constexpr int B_r = 64, B_c = 64, PITCH = D + 8;  // + 8: ldmatrix without bank conflicts
  extern __shared__ __align__(16) __nv_bfloat16 tiles[];
  __nv_bfloat16 *Q_i = tiles, *K_j = Q_i + B_r * PITCH, *V_j = K_j + 2 * B_c * PITCH;
  int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, row0 = blockIdx.x * B_r;

  auto load = [&](__nv_bfloat16* tile, const __nv_bfloat16* matrix, int first_row) {
    for (int e = thread; e < 64 * D / 8; e += blockDim.x) {
      int row = e / (D / 8), column = e % (D / 8) * 8;
      bool inside = first_row + row < S;
      const __nv_bfloat16* from = matrix + (inside ? (first_row + row) * D : 0) + column;
      cp_async<16>(tile + row * PITCH + column, from, inside);  // @mma-copy
    }
  };
  load(Q_i, Q, row0);
  load(K_j, K, 0);
  load(V_j, V, 0);
  cp_async_commit();

  float o[D / 8][4] = {}, m[2] = {-INFINITY, -INFINITY}, l[2] = {0.0f, 0.0f};
  uint32_t q[D / 16][4];
  int tiles_of_keys = (S + B_c - 1) / B_c;
  for (int j = 0; j < tiles_of_keys; ++j) {
    int now = j % 2, next = 1 - now;
    if (j + 1 < tiles_of_keys) {
      load(K_j + next * B_c * PITCH, K, (j + 1) * B_c);
      load(V_j + next * B_c * PITCH, V, (j + 1) * B_c);
      cp_async_commit();
      if (BUG != MMA_NO_WAIT) cp_async_wait<1>();
    } else if (BUG == MMA_LAST_WAIT_TOO_SHORT) {
      cp_async_wait<1>();
    } else if (BUG != MMA_NO_WAIT) {
      cp_async_wait<0>();
    }
    if (BUG != MMA_NO_BARRIER_AFTER_WAIT) __syncthreads();

    if (j == 0) {
      for (int k = 0; k < D / 16; ++k) {
        const __nv_bfloat16* row = Q_i + (warp * 16 + lane % 16) * PITCH + k * 16 + lane / 16 * 8;
        ldmatrix_x4(q[k], row);  // @mma-read-q
      }
    }
    const __nv_bfloat16 *K_now = K_j + now * B_c * PITCH, *V_now = V_j + now * B_c * PITCH;
    float s[B_c / 8][4];
    for (int n = 0; n < B_c / 8; ++n) {
      for (int e = 0; e < 4; ++e) s[n][e] = 0.0f;
      for (int k = 0; k < D / 16; ++k) {
        uint32_t b[2];
        const __nv_bfloat16* row = K_now + (n * 8 + lane % 8) * PITCH + k * 16 + lane / 8 % 2 * 8;
        ldmatrix_x2(b, row);  // @mma-read-k
        mma_m16n8k16<__nv_bfloat16>(s[n], q[k], b, s[n]);
      }
      for (int e = 0; e < 4; ++e) {
        int column = j * B_c + n * 8 + lane % 4 * 2 + e % 2;
        s[n][e] = column < S ? s[n][e] * scale : -INFINITY;
      }
    }
    for (int h = 0; h < 2; ++h) {  // the two rows of this lane
      float m_new = m[h];
      for (int n = 0; n < B_c / 8; ++n) m_new = fmaxf(m_new, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
      m_new = fmaxf(m_new, __shfl_xor_sync(0xffffffffu, m_new, 1));
      m_new = fmaxf(m_new, __shfl_xor_sync(0xffffffffu, m_new, 2));
      float correction = __expf(m[h] - m_new);
      l[h] *= correction;
      for (int n = 0; n < D / 8; ++n) o[n][2 * h] *= correction, o[n][2 * h + 1] *= correction;
      m[h] = m_new;
    }
    for (int k = 0; k < B_c / 16; ++k) {
      uint32_t p[4];
      for (int i = 0; i < 4; ++i) {
        int n = 2 * k + i / 2, h = i % 2;
        float p0 = __expf(s[n][2 * h] - m[h]), p1 = __expf(s[n][2 * h + 1] - m[h]);
        l[h] += p0 + p1;
        __nv_bfloat162 pair = __floats2bfloat162_rn(p0, p1);
        p[i] = *reinterpret_cast<uint32_t*>(&pair);
      }
      for (int n = 0; n < D / 8; ++n) {
        uint32_t b[2];
        ldmatrix_x2_trans(b, V_now + (k * 16 + lane % 16) * PITCH + n * 8);
        mma_m16n8k16<__nv_bfloat16>(o[n], p, b, o[n]);
      }
    }
    if (BUG != MMA_NO_BARRIER_AFTER_USE) __syncthreads();
  }
  for (int h = 0; h < 2; ++h) {
    l[h] += __shfl_xor_sync(0xffffffffu, l[h], 1);
    l[h] += __shfl_xor_sync(0xffffffffu, l[h], 2);
    int row = row0 + warp * 16 + lane / 4 + 8 * h;
    if (row >= S) continue;
    for (int n = 0; n < D / 8; ++n) {
      for (int e = 0; e < 2; ++e) O[row * D + n * 8 + lane % 4 * 2 + e] = o[n][2 * h + e] / l[h];
    }
  }
}

// ---- one query against S keys: 4 warps, one warp per key, combined in shared memory
template <Bug BUG>
__global__ void decode(const float* Q, const float* K, const float* V, float* O, int S,
                       float scale) {
  constexpr int D = 64, WARPS = 4, EACH = D / 32;
  __shared__ float m_of[WARPS], l_of[WARPS], o_of[WARPS][D];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float o[EACH] = {}, m = -INFINITY, l = 0.0f;
  for (int j = warp; j < S; j += WARPS) {
    float s = 0.0f;
    for (int e = 0; e < EACH; ++e) s += Q[lane + 32 * e] * K[j * D + lane + 32 * e];
    if (BUG != DECODE_SHUFFLE_IN_BRANCH || lane < 16) {
      for (int d = 16; d > 0; d /= 2) s += __shfl_xor_sync(0xffffffffu, s, d);  // @decode-shuffle
    }
    float m_new = fmaxf(m, s * scale), correction = __expf(m - m_new),
          p = __expf(s * scale - m_new);
    l = l * correction + p;
    for (int e = 0; e < EACH; ++e) o[e] = o[e] * correction + p * V[j * D + lane + 32 * e];
    m = m_new;
  }
  if (lane == 0) m_of[warp] = m, l_of[warp] = l;
  for (int e = 0; e < EACH; ++e) o_of[warp][lane + 32 * e] = o[e];
  if (BUG != DECODE_NO_BARRIER) __syncthreads();
  if (warp != 0) return;
  float m_all = -INFINITY, l_all = 0.0f;
  for (int w = 0; w < WARPS; ++w) m_all = fmaxf(m_all, m_of[w]);  // @decode-combine
  for (int w = 0; w < WARPS; ++w) l_all += l_of[w] * __expf(m_of[w] - m_all);
  for (int e = 0; e < EACH; ++e) {
    float value = 0.0f;
    for (int w = 0; w < WARPS; ++w) value += o_of[w][lane + 32 * e] * __expf(m_of[w] - m_all);
    O[lane + 32 * e] = value / l_all;
  }
}

// ---- launchers: `bug` chooses among the variants of its kernel, anything else is the correct one
template <Bug BUG>
static void launch_gemm(const float* A, const float* B, float* C, int M, int N, int K,
                        cudaStream_t stream) {
  gemm<BUG, 16><<<dim3((N + 15) / 16, (M + 15) / 16), dim3(16, 16), 0, stream>>>(A, B, C, M, N, K);
}

extern "C" cudaError_t run_gemm(int bug, const float* A, const float* B, float* C, int M, int N,
                                int K, cudaStream_t stream) {
  auto launch = launch_gemm<NONE>;
  if (bug == GEMM_NO_BARRIER_AFTER_LOAD) launch = launch_gemm<GEMM_NO_BARRIER_AFTER_LOAD>;
  if (bug == GEMM_NO_BARRIER_AFTER_USE) launch = launch_gemm<GEMM_NO_BARRIER_AFTER_USE>;
  if (bug == GEMM_NARROW_TILE) launch = launch_gemm<GEMM_NARROW_TILE>;
  if (bug == GEMM_NO_ROW_CHECK) launch = launch_gemm<GEMM_NO_ROW_CHECK>;
  if (bug == GEMM_DIVERGENT_BARRIER) launch = launch_gemm<GEMM_DIVERGENT_BARRIER>;
  launch(A, B, C, M, N, K, stream);
  return cudaGetLastError();
}

extern "C" cudaError_t run_softmax(int bug, const float* x, float* y, int rows, int columns,
                                   cudaStream_t stream) {
  auto kernel = softmax<NONE>;
  if (bug == SOFTMAX_NO_BARRIER_BEFORE_TREE) kernel = softmax<SOFTMAX_NO_BARRIER_BEFORE_TREE>;
  if (bug == SOFTMAX_NO_BARRIER_IN_TREE) kernel = softmax<SOFTMAX_NO_BARRIER_IN_TREE>;
  if (bug == SOFTMAX_NO_BARRIER_AFTER_MAX) kernel = softmax<SOFTMAX_NO_BARRIER_AFTER_MAX>;
  if (bug == SOFTMAX_NO_BARRIER_BEFORE_SUM) kernel = softmax<SOFTMAX_NO_BARRIER_BEFORE_SUM>;
  if (bug == SOFTMAX_UNINITIALISED) kernel = softmax<SOFTMAX_UNINITIALISED>;
  int threads = 128, scratch = (bug == SOFTMAX_SHORT_SHARED ? 64 : threads) * sizeof(float);
  kernel<<<rows, threads, scratch, stream>>>(x, y, columns);
  return cudaGetLastError();
}

template <Bug BUG>
static void launch_flash(const float* Q, const float* K, const float* V, float* O, int S,
                         float scale, cudaStream_t stream) {
  flash<BUG, 32, 32, 16><<<(S + 31) / 32, 32, 0, stream>>>(Q, K, V, O, S, scale);
}

extern "C" cudaError_t run_flash(int bug, const float* Q, const float* K, const float* V, float* O,
                                 int S, float scale, cudaStream_t stream) {
  auto launch = launch_flash<NONE>;
  if (bug == FLASH_NO_BARRIER_AFTER_LOAD) launch = launch_flash<FLASH_NO_BARRIER_AFTER_LOAD>;
  if (bug == FLASH_NO_BARRIER_AFTER_USE) launch = launch_flash<FLASH_NO_BARRIER_AFTER_USE>;
  if (bug == FLASH_EARLY_RETURN) launch = launch_flash<FLASH_EARLY_RETURN>;
  launch(Q, K, V, O, S, scale, stream);
  return cudaGetLastError();
}

template <Bug BUG>
static void launch_mma(const __nv_bfloat16* Q, const __nv_bfloat16* K, const __nv_bfloat16* V,
                       float* O, int S, float scale, cudaStream_t stream) {
  constexpr int D = 64, bytes = 5 * 64 * (D + 8) * sizeof(__nv_bfloat16);
  if (cudaFuncSetAttribute(flash_mma<BUG, D>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
    return;
  flash_mma<BUG, D><<<(S + 63) / 64, 128, bytes, stream>>>(Q, K, V, O, S, scale);
}

extern "C" cudaError_t run_mma(int bug, const __nv_bfloat16* Q, const __nv_bfloat16* K,
                               const __nv_bfloat16* V, float* O, int S, float scale,
                               cudaStream_t stream) {
  auto launch = launch_mma<NONE>;
  if (bug == MMA_NO_BARRIER_AFTER_WAIT) launch = launch_mma<MMA_NO_BARRIER_AFTER_WAIT>;
  if (bug == MMA_NO_BARRIER_AFTER_USE) launch = launch_mma<MMA_NO_BARRIER_AFTER_USE>;
  if (bug == MMA_LAST_WAIT_TOO_SHORT) launch = launch_mma<MMA_LAST_WAIT_TOO_SHORT>;
  if (bug == MMA_NO_WAIT) launch = launch_mma<MMA_NO_WAIT>;
  launch(Q, K, V, O, S, scale, stream);
  return cudaGetLastError();
}

extern "C" cudaError_t run_decode(int bug, const float* Q, const float* K, const float* V, float* O,
                                  int S, float scale, cudaStream_t stream) {
  auto kernel = decode<NONE>;
  if (bug == DECODE_NO_BARRIER) kernel = decode<DECODE_NO_BARRIER>;
  if (bug == DECODE_SHUFFLE_IN_BRANCH) kernel = decode<DECODE_SHUFFLE_IN_BRANCH>;
  kernel<<<1, 128, 0, stream>>>(Q, K, V, O, S, scale);
  return cudaGetLastError();
}
