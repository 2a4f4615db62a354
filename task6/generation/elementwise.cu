// What stands between the matrix products of a decoder layer: x += delta with RMSNorm, and SwiGLU. Each reads its input
// once and computes in fp32. A decode step has one row per sequence, so these launches are short.
#include <cuda_runtime.h>

#include "dtype.cuh"
#include "tensor.cuh"

constexpr int THREADS = 256;

// x += delta, out = x / sqrt(mean(x^2) + eps) * weight            [RMSNorm] arXiv:1910.07467, equation 4
//   grid (rows), block (THREADS); x, delta, out (rows, n), rows of any stride; delta may be null
template <typename T>
__global__ void add_rms_norm_kernel(T* x, int64_t x_stride, const T* delta, int64_t delta_stride, const T* weight,
                                    T* out, int64_t out_stride, int n, float eps) {
  __shared__ float sums[THREADS / 32];
  x += blockIdx.x * x_stride, out += blockIdx.x * out_stride;
  if (delta) delta += blockIdx.x * delta_stride;
  float sum = 0.0f;
  for (int i = threadIdx.x; i < n; i += THREADS) {
    float value = to_float(x[i]);
    if (delta) {
      x[i] = from_float<T>(value + to_float(delta[i]));
      value = to_float(x[i]);  // as rounded: what the next layer adds to
    }
    sum += value * value;
  }
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0.0f;
  for (int warp = 0; warp < THREADS / 32; ++warp) sum += sums[warp];
  const float factor = 1.0f / sqrtf(sum / n + eps);
  for (int i = threadIdx.x; i < n; i += THREADS) out[i] = from_float<T>(to_float(x[i]) * factor * to_float(weight[i]));
}

// out = gate / (1 + exp(-gate)) * up, gate and up side by side in x            [Shazeer] arXiv:2002.05202, equation 6
//   grid (ceil(n / THREADS), rows), block (THREADS); x (rows, 2 n), out (rows, n)
template <typename T>
__global__ void swiglu_kernel(const T* x, int64_t x_stride, T* out, int64_t out_stride, int n) {
  const int i = blockIdx.x * THREADS + threadIdx.x;
  if (i >= n) return;
  x += blockIdx.y * x_stride;
  const float gate = to_float(x[i]), up = to_float(x[n + i]);
  out[blockIdx.y * out_stride + i] = from_float<T>(gate / (1.0f + expf(-gate)) * up);
}

extern "C" cudaError_t add_rms_norm(View x, View delta, int has_delta, View weight, View out, float eps, int dtype,
                                    cudaStream_t stream) {
  return with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    add_rms_norm_kernel<T><<<int(x.sizes[0]), THREADS, 0, stream>>>(
        x.as<T>(), x.strides[0], has_delta ? delta.as<T>() : nullptr, delta.strides[0], weight.as<T>(), out.as<T>(),
        out.strides[0], x.sizes[1], eps);
    return cudaGetLastError();
  });
}

extern "C" cudaError_t swiglu(View x, View out, int dtype, cudaStream_t stream) {
  return with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    const dim3 grid(ceil_div(out.sizes[1], THREADS), out.sizes[0]);
    swiglu_kernel<T><<<grid, THREADS, 0, stream>>>(x.as<T>(), x.strides[0], out.as<T>(), out.strides[0],
                                                   out.sizes[1]);
    return cudaGetLastError();
  });
}
