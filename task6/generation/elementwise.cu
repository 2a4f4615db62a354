// What stands between the matrix products of a decoder layer: x += delta with RMSNorm, and SwiGLU. Each reads its input
// once and computes in fp32. For a prompt's rows that is the memory's time, if it is 16 bytes at a time: where all rows
// begin at such places.
#include "rms_norm.cuh"

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

extern "C" cudaError_t add_rms_norm(View x, View delta, int has_delta, View weight, View out, float eps, int dtype,
                                    cudaStream_t stream) {
  return launch_add_rms_norm(x, delta, has_delta, weight, out, eps, dtype, stream);
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
