// x += delta, out = x / sqrt(mean(x^2) + eps) * weight            [RMSNorm] arXiv:1910.07467, equation 4
//   grid (rows), block (THREADS); x, delta, out (rows, n), rows of any stride; delta may be null
#pragma once
#include <cuda_runtime.h>

#include <initializer_list>

#include "../../task5/ladder/plain_launch.cuh"
#include "product.cuh"

constexpr int THREADS = 256;

template <typename T>
struct Single {
  T values[1];
};

struct RMSNorm {
  void* x;
  const void *delta, *weight;
  void* out;
  int64_t x_stride, delta_stride, out_stride;
  int n;
  float eps;
};

template <typename T, typename Some>
__global__ void add_rms_norm_kernel(RMSNorm a) {
  constexpr int N = sizeof(Some) / sizeof(T);
  __shared__ float sums[THREADS / 32];
  T* x = static_cast<T*>(a.x) + blockIdx.x * a.x_stride;
  T* out = static_cast<T*>(a.out) + blockIdx.x * a.out_stride;
  const T* delta = a.delta ? static_cast<const T*>(a.delta) + blockIdx.x * a.delta_stride : nullptr;
  const T* weight = static_cast<const T*>(a.weight);
  begin_the_next_launch();
  wait_for_the_launch_before();
  float sum = 0.0f;
  for (int i = threadIdx.x * N; i < a.n; i += THREADS * N) {
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
  const float factor = 1.0f / sqrtf(sum / a.n + a.eps);
  for (int i = threadIdx.x * N; i < a.n; i += THREADS * N) {
    Some own = *reinterpret_cast<const Some*>(x + i);
    const Some by = *reinterpret_cast<const Some*>(weight + i);
    for (int e = 0; e < N; ++e)
      own.values[e] = from_float<T>(to_float(own.values[e]) * factor * to_float(by.values[e]));
    *reinterpret_cast<Some*>(out + i) = own;
  }
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

inline cudaError_t launch_add_rms_norm(const View& x, const View& delta, int has_delta, const View& weight,
                                       const View& out, float eps, int dtype, cudaStream_t stream) {
  const RMSNorm a = {x.data, has_delta ? delta.data : nullptr, weight.data, out.data, x.strides[0],
                     delta.strides[0], out.strides[0], int(x.sizes[1]), eps};
  return with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return with_width<T>(a.n, a.weight, {x, delta, out}, [&](auto some) {
      return launch_kernel(add_rms_norm_kernel<T, decltype(some)>, dim3(x.sizes[0]), THREADS, 0, stream, a);
    });
  });
}
