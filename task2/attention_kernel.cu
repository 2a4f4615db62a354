// Task 2. Naive attention in four launches, fp32:
//
//   S = Q K^T             GEMM_NT_kernel_batched          (batch, heads, q_len, kv_len), in global memory
//   S = scale S, masked   scale_and_causal_mask_batched   given
//   P = softmax(S)        softmax_kernel_batched          in place
//   O = P V               GEMM_NN_kernel_batched
//
// q, k, v and out are (batch, heads, seq, head_dim) views of (batch, seq, heads * head_dim) tensors. They are read in
// place: a View has strides, so no head has to be copied out of its row.
#include <cuda_runtime.h>

#include "tensor.cuh"

constexpr int SOFTMAX_THREADS = 256;  // a power of two, for the tree
constexpr int TILE = 32;              // 32 x 32 threads: a warp reads 128 consecutive bytes

// ---------------------------------------------------------------------------------------------------------------------
// out[b, row] = softmax(inp[b, row]) for inp and out (batch, rows, n), any sizes and strides. May run in place.
//   grid (batch * rows), block (SOFTMAX_THREADS)
//   Each block computes one row; its element i is x[i * x_stride]. A row that is -inf throughout has nothing to attend
//   to and becomes 0 (dividing by its sum would give NaN).
// ---------------------------------------------------------------------------------------------------------------------
__global__ void softmax_kernel_batched(View inp, View out) {
  __shared__ float partial[SOFTMAX_THREADS];  // one value per thread, reduced as a tree
  const int rows = inp.sizes[1], n = inp.sizes[2], b = blockIdx.x / rows, row = blockIdx.x % rows;
  const float* x = inp.as<float>() + b * inp.strides[0] + row * inp.strides[1];
  float* y = out.as<float>() + b * out.strides[0] + row * out.strides[1];
  const int64_t x_stride = inp.strides[2], y_stride = out.strides[2];
  const int t = threadIdx.x;
  // BEGIN SOLUTION
  float m = -INFINITY;
  for (int64_t i = t; i < n; i += SOFTMAX_THREADS) m = fmaxf(m, x[i * x_stride]);
  partial[t] = m;
  __syncthreads();  // every thread's maximum is there before they are combined
  for (int half = SOFTMAX_THREADS / 2; half > 0; half /= 2) {
    if (t < half) partial[t] = fmaxf(partial[t], partial[t + half]);
    __syncthreads();  // this level is complete before the next reads it
  }
  m = partial[0];
  __syncthreads();  // every thread has the maximum before the sums overwrite it

  const float shift = m == -INFINITY ? 0.0f : m;  // -inf - -inf would be NaN
  float sum = 0.0f;
  for (int64_t i = t; i < n; i += SOFTMAX_THREADS) sum += expf(x[i * x_stride] - shift);
  partial[t] = sum;
  __syncthreads();
  for (int half = SOFTMAX_THREADS / 2; half > 0; half /= 2) {
    if (t < half) partial[t] += partial[t + half];
    __syncthreads();
  }
  sum = partial[0];

  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  for (int64_t i = t; i < n; i += SOFTMAX_THREADS) y[i * y_stride] = expf(x[i * x_stride] - shift) * inverse;
  // END SOLUTION
}

// ---------------------------------------------------------------------------------------------------------------------
// C = A B^T for each A of As (batch, heads, M, K), B of Bs (batch, heads, N, K) and C of Cs (batch, heads, M, N), any
// sizes and strides. A(row, k) is one element of A.
//   grid (ceil(N / TILE_SIZE), ceil(M / TILE_SIZE), batch * heads), block (TILE_SIZE, TILE_SIZE)
//   Each block computes one TILE_SIZE x TILE_SIZE tile of C, each thread one element of it.
// ---------------------------------------------------------------------------------------------------------------------
template <int TILE_SIZE>
__global__ void GEMM_NT_kernel_batched(View As, View Bs, View Cs) {
  __shared__ float A_tile[TILE_SIZE][TILE_SIZE];
  __shared__ float B_tile[TILE_SIZE][TILE_SIZE + 1];  // + 1: the threads of a warp read a column, 32 different banks
  const int heads = Cs.sizes[1], M = Cs.sizes[2], N = Cs.sizes[3], K = As.sizes[3];
  const int batch = blockIdx.z / heads, head = blockIdx.z % heads;
  const Matrix A = matrix_of(As, batch, head), B = matrix_of(Bs, batch, head), C = matrix_of(Cs, batch, head);
  const int tx = threadIdx.x, ty = threadIdx.y;
  const int row = blockIdx.y * TILE_SIZE + ty, col = blockIdx.x * TILE_SIZE + tx;
  // BEGIN SOLUTION
  const int B_row = blockIdx.x * TILE_SIZE + ty;  // neighbouring threads load neighbouring k: coalesced
  float sum = 0.0f;
  for (int k0 = 0; k0 < K; k0 += TILE_SIZE) {
    A_tile[ty][tx] = row < M && k0 + tx < K ? A(row, k0 + tx) : 0.0f;
    B_tile[ty][tx] = B_row < N && k0 + tx < K ? B(B_row, k0 + tx) : 0.0f;
    __syncthreads();  // both tiles complete before any thread reads them
#pragma unroll
    for (int k = 0; k < TILE_SIZE; ++k) sum += A_tile[ty][k] * B_tile[tx][k];
    __syncthreads();  // both tiles consumed before they are overwritten
  }
  if (row < M && col < N) C(row, col) = sum;
  // END SOLUTION
}

// ---------------------------------------------------------------------------------------------------------------------
// C = A B for each A of As (batch, heads, M, K), B of Bs (batch, heads, K, N) and C of Cs (batch, heads, M, N).
// Grid and block as for GEMM_NT.
// ---------------------------------------------------------------------------------------------------------------------
template <int TILE_SIZE>
__global__ void GEMM_NN_kernel_batched(View As, View Bs, View Cs) {
  __shared__ float A_tile[TILE_SIZE][TILE_SIZE];
  __shared__ float B_tile[TILE_SIZE][TILE_SIZE];
  const int heads = Cs.sizes[1], M = Cs.sizes[2], N = Cs.sizes[3], K = As.sizes[3];
  const int batch = blockIdx.z / heads, head = blockIdx.z % heads;
  const Matrix A = matrix_of(As, batch, head), B = matrix_of(Bs, batch, head), C = matrix_of(Cs, batch, head);
  const int tx = threadIdx.x, ty = threadIdx.y;
  const int row = blockIdx.y * TILE_SIZE + ty, col = blockIdx.x * TILE_SIZE + tx;
  // BEGIN SOLUTION
  float sum = 0.0f;
  for (int k0 = 0; k0 < K; k0 += TILE_SIZE) {
    A_tile[ty][tx] = row < M && k0 + tx < K ? A(row, k0 + tx) : 0.0f;
    B_tile[ty][tx] = k0 + ty < K && col < N ? B(k0 + ty, col) : 0.0f;
    __syncthreads();  // both tiles complete before any thread reads them
#pragma unroll
    for (int k = 0; k < TILE_SIZE; ++k) sum += A_tile[ty][k] * B_tile[k][tx];
    __syncthreads();  // both tiles consumed before they are overwritten
  }
  if (row < M && col < N) C(row, col) = sum;
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
static dim3 gemm_grid(const View& C) {
  return dim3(ceil_div(C.sizes[3], TILE), ceil_div(C.sizes[2], TILE), C.sizes[0] * C.sizes[1]);
}

// inp, out (batch, rows, n)
extern "C" cudaError_t batched_softmax(View inp, View out, cudaStream_t stream) {
  softmax_kernel_batched<<<inp.sizes[0] * inp.sizes[1], SOFTMAX_THREADS, 0, stream>>>(inp, out);
  return cudaGetLastError();
}

// A (batch, heads, M, K)   B (batch, heads, N, K)   C (batch, heads, M, N)
extern "C" cudaError_t batched_GEMM_NT(View A, View B, View C, cudaStream_t stream) {
  GEMM_NT_kernel_batched<TILE><<<gemm_grid(C), dim3(TILE, TILE), 0, stream>>>(A, B, C);
  return cudaGetLastError();
}

// A (batch, heads, M, K)   B (batch, heads, K, N)   C (batch, heads, M, N)
extern "C" cudaError_t batched_GEMM_NN(View A, View B, View C, cudaStream_t stream) {
  GEMM_NN_kernel_batched<TILE><<<gemm_grid(C), dim3(TILE, TILE), 0, stream>>>(A, B, C);
  return cudaGetLastError();
}

// q, out (batch, heads, q_len, head_dim)   k, v (batch, heads, kv_len, head_dim)
// scores: scratch for S and P, (batch, heads, q_len, kv_len), contiguous
extern "C" cudaError_t custom_attention(View q, View k, View v, View scores, View out, float scale, int causal,
                                        cudaStream_t stream) {
  const int batch_heads = scores.sizes[0] * scores.sizes[1], q_len = scores.sizes[2], kv_len = scores.sizes[3];
  float* S = scores.as<float>();
  // BEGIN SOLUTION
  const dim3 block(TILE, TILE);
  const View rows = {S, {batch_heads, q_len, kv_len, 1}, {int64_t(q_len) * kv_len, kv_len, 1, 0}};
  GEMM_NT_kernel_batched<TILE><<<gemm_grid(scores), block, 0, stream>>>(q, k, scores);
  scale_and_causal_mask_batched<<<dim3(q_len, batch_heads), 256, 0, stream>>>(S, q_len, kv_len, scale, causal);
  softmax_kernel_batched<<<int64_t(batch_heads) * q_len, SOFTMAX_THREADS, 0, stream>>>(rows, rows);
  GEMM_NN_kernel_batched<TILE><<<gemm_grid(out), block, 0, stream>>>(scores, v, out);
  // END SOLUTION
  return cudaGetLastError();
}
