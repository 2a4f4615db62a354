// Task 2. Naive attention in four launches, fp32:
//
//   S = Q K^T             GEMM_NT_kernel_batched          (batch, heads, q_len, kv_len), in global memory
//   S = scale S, masked   scale_and_causal_mask_batched   given
//   P = softmax(S)        softmax_kernel_batched          in place
//   O = P V               GEMM_NN_kernel_batched
//
// q, k, v and out are (batch, seq, heads * head_dim) and are read where they lie: Strides say how far apart batches,
// rows and heads are, so no head is ever copied out of its row.
#include <cuda_runtime.h>

#include "tensor.cuh"

constexpr int SOFTMAX_THREADS = 256;  // a power of two, for the tree
constexpr int TILE = 32;              // 32 x 32 threads: a warp reads 128 consecutive bytes

// ---------------------------------------------------------------------------------------------------------------------
// out[row] = softmax(inp[row]), one block per row, any length n. May run in place.
//   grid (rows), block (SOFTMAX_THREADS).   Element (row, i) stands at inp[row * row_stride + i * col_stride].
//   A row that is -inf throughout has nothing to attend to and becomes 0 (dividing by its sum would give NaN).
// ---------------------------------------------------------------------------------------------------------------------
__global__ void softmax_kernel_batched(const float* inp, float* out, int64_t n, int64_t row_stride, int64_t col_stride,
                                       int64_t out_row_stride, int64_t out_col_stride) {
  __shared__ float partial[SOFTMAX_THREADS];  // one value per thread, reduced as a tree
  const float* x = inp + blockIdx.x * row_stride;
  float* y = out + blockIdx.x * out_row_stride;
  const int t = threadIdx.x;
  // BEGIN SOLUTION
  float m = -INFINITY;
  for (int64_t i = t; i < n; i += SOFTMAX_THREADS) m = fmaxf(m, x[i * col_stride]);
  partial[t] = m;
  __syncthreads();  // every thread's maximum is there before any is combined
  for (int half = SOFTMAX_THREADS / 2; half > 0; half /= 2) {
    if (t < half) partial[t] = fmaxf(partial[t], partial[t + half]);
    __syncthreads();  // this level is complete before the next reads it
  }
  m = partial[0];
  __syncthreads();  // everyone has the maximum before the sums overwrite it

  const float shift = m == -INFINITY ? 0.0f : m;  // -inf - -inf would be NaN
  float sum = 0.0f;
  for (int64_t i = t; i < n; i += SOFTMAX_THREADS) sum += expf(x[i * col_stride] - shift);
  partial[t] = sum;
  __syncthreads();
  for (int half = SOFTMAX_THREADS / 2; half > 0; half /= 2) {
    if (t < half) partial[t] += partial[t + half];
    __syncthreads();
  }
  sum = partial[0];

  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  for (int64_t i = t; i < n; i += SOFTMAX_THREADS) y[i * out_col_stride] = expf(x[i * col_stride] - shift) * inverse;
  // END SOLUTION
}

// ---------------------------------------------------------------------------------------------------------------------
// C = A B^T for each (batch, head): A (M, K), B (N, K), C (M, N), row-major, any sizes.
//   grid (ceil(N / TILE_SIZE), ceil(M / TILE_SIZE), batch * heads), block (TILE_SIZE, TILE_SIZE)
//   Each block computes one TILE_SIZE x TILE_SIZE tile of C, each thread one element of it.
// ---------------------------------------------------------------------------------------------------------------------
template <int TILE_SIZE>
__global__ void GEMM_NT_kernel_batched(const float* A, const float* B, float* C, int M, int N, int K, int heads,
                                       Strides a, Strides b, Strides c) {
  __shared__ float A_tile[TILE_SIZE][TILE_SIZE];
  __shared__ float B_tile[TILE_SIZE][TILE_SIZE + 1];  // + 1: the threads of a warp read a column, 32 different banks
  const int batch = blockIdx.z / heads, head = blockIdx.z % heads;
  A += batch * a.batch + head * a.head;
  B += batch * b.batch + head * b.head;
  C += batch * c.batch + head * c.head;
  const int tx = threadIdx.x, ty = threadIdx.y;
  const int row = blockIdx.y * TILE_SIZE + ty, col = blockIdx.x * TILE_SIZE + tx;
  // BEGIN SOLUTION
  const int B_row = blockIdx.x * TILE_SIZE + ty;  // neighbouring threads load neighbouring k: coalesced
  float sum = 0.0f;
  for (int k0 = 0; k0 < K; k0 += TILE_SIZE) {
    A_tile[ty][tx] = row < M && k0 + tx < K ? A[row * a.row + k0 + tx] : 0.0f;
    B_tile[ty][tx] = B_row < N && k0 + tx < K ? B[B_row * b.row + k0 + tx] : 0.0f;
    __syncthreads();  // both tiles complete before anyone reads them
#pragma unroll
    for (int k = 0; k < TILE_SIZE; ++k) sum += A_tile[ty][k] * B_tile[tx][k];
    __syncthreads();  // both tiles consumed before they are overwritten
  }
  if (row < M && col < N) C[row * c.row + col] = sum;
  // END SOLUTION
}

// ---------------------------------------------------------------------------------------------------------------------
// C = A B for each (batch, head): A (M, K), B (K, N), C (M, N). Grid and block as for GEMM_NT.
// ---------------------------------------------------------------------------------------------------------------------
template <int TILE_SIZE>
__global__ void GEMM_NN_kernel_batched(const float* A, const float* B, float* C, int M, int N, int K, int heads,
                                       Strides a, Strides b, Strides c) {
  __shared__ float A_tile[TILE_SIZE][TILE_SIZE];
  __shared__ float B_tile[TILE_SIZE][TILE_SIZE];
  const int batch = blockIdx.z / heads, head = blockIdx.z % heads;
  A += batch * a.batch + head * a.head;
  B += batch * b.batch + head * b.head;
  C += batch * c.batch + head * c.head;
  const int tx = threadIdx.x, ty = threadIdx.y;
  const int row = blockIdx.y * TILE_SIZE + ty, col = blockIdx.x * TILE_SIZE + tx;
  // BEGIN SOLUTION
  float sum = 0.0f;
  for (int k0 = 0; k0 < K; k0 += TILE_SIZE) {
    A_tile[ty][tx] = row < M && k0 + tx < K ? A[row * a.row + k0 + tx] : 0.0f;
    B_tile[ty][tx] = k0 + ty < K && col < N ? B[(k0 + ty) * b.row + col] : 0.0f;
    __syncthreads();  // both tiles complete before anyone reads them
#pragma unroll
    for (int k = 0; k < TILE_SIZE; ++k) sum += A_tile[ty][k] * B_tile[k][tx];
    __syncthreads();  // both tiles consumed before they are overwritten
  }
  if (row < M && col < N) C[row * c.row + col] = sum;
  // END SOLUTION
}

// ---------------------------------------------------------------------------------------------------------------------
// S *= scale, and -inf where a query must not look: query i sees the keys j <= i + kv_len - q_len, so that the last
// query sees every key. S is (batch * heads, q_len, kv_len), contiguous.     grid (q_len, batch * heads), block (256)
// ---------------------------------------------------------------------------------------------------------------------
__global__ void scale_and_causal_mask_batched(float* S, int q_len, int kv_len, float scale, bool causal) {
  const int i = blockIdx.x;
  float* row = S + (int64_t(blockIdx.y) * q_len + i) * kv_len;
  for (int j = threadIdx.x; j < kv_len; j += blockDim.x)
    row[j] = causal && j > i + kv_len - q_len ? -INFINITY : row[j] * scale;
}

// ---------------------------------------------------------------------------------------------------------------------
// Launchers, called from attention.py
// ---------------------------------------------------------------------------------------------------------------------
static dim3 gemm_grid(int M, int N, int batch_heads) { return dim3(ceil_div(N, TILE), ceil_div(M, TILE), batch_heads); }

extern "C" cudaError_t batched_softmax(const float* inp, float* out, int64_t rows, int64_t n, int64_t row_stride,
                                       int64_t col_stride, int64_t out_row_stride, int64_t out_col_stride,
                                       cudaStream_t stream) {
  softmax_kernel_batched<<<rows, SOFTMAX_THREADS, 0, stream>>>(inp, out, n, row_stride, col_stride, out_row_stride,
                                                               out_col_stride);
  return cudaGetLastError();
}

extern "C" cudaError_t batched_GEMM_NT(const float* A, const float* B, float* C, int batch, int M, int N, int K,
                                       Strides a, Strides b, Strides c, cudaStream_t stream) {
  GEMM_NT_kernel_batched<TILE>
      <<<gemm_grid(M, N, batch), dim3(TILE, TILE), 0, stream>>>(A, B, C, M, N, K, 1, a, b, c);
  return cudaGetLastError();
}

extern "C" cudaError_t batched_GEMM_NN(const float* A, const float* B, float* C, int batch, int M, int N, int K,
                                       Strides a, Strides b, Strides c, cudaStream_t stream) {
  GEMM_NN_kernel_batched<TILE>
      <<<gemm_grid(M, N, batch), dim3(TILE, TILE), 0, stream>>>(A, B, C, M, N, K, 1, a, b, c);
  return cudaGetLastError();
}

// scores: scratch for S and P, (batch, heads, q_len, kv_len)
extern "C" cudaError_t custom_attention(const float* q, const float* k, const float* v, float* scores, float* out,
                                        int batch, int heads, int q_len, int kv_len, int head_dim, Strides q_strides,
                                        Strides k_strides, Strides v_strides, Strides out_strides, float scale,
                                        int causal, cudaStream_t stream) {
  const int batch_heads = batch * heads;
  const Strides s_strides = {int64_t(heads) * q_len * kv_len, kv_len, int64_t(q_len) * kv_len};
  // BEGIN SOLUTION
  const dim3 block(TILE, TILE);
  GEMM_NT_kernel_batched<TILE><<<gemm_grid(q_len, kv_len, batch_heads), block, 0, stream>>>(
      q, k, scores, q_len, kv_len, head_dim, heads, q_strides, k_strides, s_strides);
  scale_and_causal_mask_batched<<<dim3(q_len, batch_heads), 256, 0, stream>>>(scores, q_len, kv_len, scale, causal);
  softmax_kernel_batched<<<int64_t(batch_heads) * q_len, SOFTMAX_THREADS, 0, stream>>>(scores, scores, kv_len, kv_len,
                                                                                       1, kv_len, 1);
  GEMM_NN_kernel_batched<TILE><<<gemm_grid(q_len, head_dim, batch_heads), block, 0, stream>>>(
      scores, v, out, q_len, head_dim, kv_len, heads, s_strides, v_strides, out_strides);
  // END SOLUTION
  return cudaGetLastError();
}
