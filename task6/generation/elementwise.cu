// What stands between the matrix products of a decoder layer: x += delta with RMSNorm, and SwiGLU. Each reads its input
// once and computes in fp32. For a prompt's rows that is the memory's time, if it is 16 bytes at a time: where all rows
// begin at such places.
#include <cuda_runtime.h>

#include <initializer_list>

#include "product.cuh"

constexpr int THREADS = 256;

template <typename T>
struct Single {
  T values[1];
};

// x += delta, out = x / sqrt(mean(x^2) + eps) * weight            [RMSNorm] arXiv:1910.07467, equation 4
//   grid (rows), block (THREADS); x, delta, out (rows, n), rows of any stride; delta may be null
template <typename T, typename Some>
__global__ void add_rms_norm_kernel(T* x, int64_t x_stride, const T* delta, int64_t delta_stride, const T* weight,
                                    T* out, int64_t out_stride, int n, float eps) {
  constexpr int N = sizeof(Some) / sizeof(T);
  __shared__ float sums[THREADS / 32];
  x += blockIdx.x * x_stride, out += blockIdx.x * out_stride;
  if (delta) delta += blockIdx.x * delta_stride;
  float sum = 0.0f;
  for (int i = threadIdx.x * N; i < n; i += THREADS * N) {
    Some own = *reinterpret_cast<const Some*>(x + i);
    if (delta) {
      const Some more = *reinterpret_cast<const Some*>(delta + i);
      for (int e = 0; e < N; ++e) own.values[e] = from_float<T>(to_float(own.values[e]) + to_float(more.values[e]));
      *reinterpret_cast<Some*>(x + i) = own;
    }
    // As rounded: what the next layer adds to.
    for (int e = 0; e < N; ++e) sum += to_float(own.values[e]) * to_float(own.values[e]);
  }
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0.0f;
  for (int warp = 0; warp < THREADS / 32; ++warp) sum += sums[warp];
  const float factor = 1.0f / sqrtf(sum / n + eps);
  for (int i = threadIdx.x * N; i < n; i += THREADS * N) {
    Some own = *reinterpret_cast<const Some*>(x + i);
    const Some by = *reinterpret_cast<const Some*>(weight + i);
    for (int e = 0; e < N; ++e)
      own.values[e] = from_float<T>(to_float(own.values[e]) * factor * to_float(by.values[e]));
    *reinterpret_cast<Some*>(out + i) = own;
  }
}

// out = gate / (1 + exp(-gate)) * up, gate and up side by side in x            [Shazeer] arXiv:2002.05202, equation 6
//   grid (ceil(n / (N THREADS)), rows), block (THREADS); x (rows, 2 n), out (rows, n)
template <typename T, typename Some>
__global__ void swiglu_kernel(const T* x, int64_t x_stride, T* out, int64_t out_stride, int n) {
  constexpr int N = sizeof(Some) / sizeof(T);
  const int i = (blockIdx.x * THREADS + threadIdx.x) * N;
  if (i >= n) return;
  x += blockIdx.y * x_stride + i, out += blockIdx.y * out_stride + i;
  Some gate = *reinterpret_cast<const Some*>(x);
  const Some up = *reinterpret_cast<const Some*>(x + n);
  for (int e = 0; e < N; ++e) {
    const float value = to_float(gate.values[e]);
    gate.values[e] = from_float<T>(value / (1.0f + expf(-value)) * to_float(up.values[e]));
  }
  *reinterpret_cast<Some*>(out) = gate;
}

// run(what a thread takes at a time): the values of 16 bytes, or one where a row of n of them, or one of these, begins
// elsewhere.
template <typename T, typename Run>
static cudaError_t with_width(int64_t n, const void* weight, std::initializer_list<View> rows, Run run) {
  constexpr int WIDE = 16 / sizeof(T);
  bool wide = n % WIDE == 0 && uintptr_t(weight) % 16 == 0;
  for (const View& x : rows) wide = wide && (uintptr_t(x.data) | x.strides[0] * sizeof(T)) % 16 == 0;
  return wide ? run(Vector16<T>{}) : run(Single<T>{});
}

extern "C" cudaError_t add_rms_norm(View x, View delta, int has_delta, View weight, View out, float eps, int dtype,
                                    cudaStream_t stream) {
  return with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return with_width<T>(x.sizes[1], weight.data, {x, delta, out}, [&](auto some) {
      add_rms_norm_kernel<T, decltype(some)><<<int(x.sizes[0]), THREADS, 0, stream>>>(
          x.as<T>(), x.strides[0], has_delta ? delta.as<T>() : nullptr, delta.strides[0], weight.as<T>(), out.as<T>(),
          out.strides[0], x.sizes[1], eps);
      return cudaGetLastError();
    });
  });
}

extern "C" cudaError_t swiglu(View x, View out, int dtype, cudaStream_t stream) {
  return with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return with_width<T>(out.sizes[1], nullptr, {x, out}, [&](auto some) {
      constexpr int N = sizeof(some) / sizeof(T);
      const dim3 grid(ceil_div(out.sizes[1], int64_t(N * THREADS)), out.sizes[0]);
      swiglu_kernel<T, decltype(some)><<<grid, THREADS, 0, stream>>>(x.as<T>(), x.strides[0], out.as<T>(),
                                                                     out.strides[0], out.sizes[1]);
      return cudaGetLastError();
    });
  });
}
