// What stands before and behind a product of few rows, x @ w.T: its arguments, norms, activations and the residual.
#pragma once
#include <cuda_runtime.h>

#include "dtype.cuh"
#include "tensor.cuh"
#include "words.cuh"

#ifndef DEVICE
#define DEVICE __device__ __forceinline__
#endif

enum Activation { NONE,
                  SWIGLU,
                  GELU };

struct Arguments {
  const void *x, *w;                   // (rows, K), (N, K)
  const void *norm, *row_sums, *bias;  // (K), (N), (N); or null
  const void* residual;                // as out, or null
  void* out;
  int64_t x_stride, w_stride, residual_stride, out_stride;
  int rows, N, K;
  int activation;
  float eps;
};

inline Arguments make_arguments(const View& x, const View& w, const void* norm, const void* row_sums, const void* bias,
                                const View& residual, int has_residual, const View& out, int activation, float eps) {
  return {x.data, w.data, norm, row_sums, bias, has_residual ? residual.data : nullptr, out.data, x.strides[0],
          w.strides[0], residual.strides[0], out.strides[0], int(x.sizes[0]), int(w.sizes[0]), int(x.sizes[1]),
          activation, eps};
}

template <typename T>
union Vector16 {  // 16 bytes
  uint4 bits;
  T values[16 / sizeof(T)];
};
// x * norm, rounded. What all of a row have in common, the factor of the norm, comes after the sum.
template <typename T>
DEVICE uint4 scaled(const uint4& x, const uint4& by) {
  Vector16<T> a = {x};
  const Vector16<T> b = {by};
#pragma unroll
  for (int i = 0; i < int(16 / sizeof(T)); ++i)
    a.values[i] = from_float<T>(to_float(a.values[i]) * to_float(b.values[i]));
  return a.bits;
}

// The sums of a row of x and of its squares.
struct Moments {
  float sum, squares;

  DEVICE void add(float2 x) { sum += x.x + x.y, squares += x.x * x.x + x.y * x.y; }
  DEVICE void add(float4 x) { add(make_float2(x.x, x.y)), add(make_float2(x.z, x.w)); }
  template <typename T>
  DEVICE void add(const uint4& x) {
    const Vector16<T> v = {x};
#pragma unroll
    for (int i = 0; i < int(16 / sizeof(T)); i += 2) add(make_float2(to_float(v.values[i]), to_float(v.values[i + 1])));
  }
  DEVICE void add(const Moments& other) { sum += other.sum, squares += other.squares; }
  DEVICE void add_lanes(int step) {
    sum += __shfl_xor_sync(~0u, sum, step), squares += __shfl_xor_sync(~0u, squares, step);
  }
};

// What column n of a row of out takes beside the sum over k.
template <typename T>
struct Beside {
  T row_sum, bias, residual;  // as loaded: nothing waits for them yet
};
// TAGGED: the residual is words, which this block has written itself.
template <typename T, bool TAGGED = false>
DEVICE Beside<T> load_beside(const Arguments& p, int row, int n) {
  const T zero = from_float<T>(0.0f);
  const auto residual = [&] {
    Values<T, 1, TAGGED> x;
    x.ask(static_cast<const typename Values<T, 1, TAGGED>::Source*>(p.residual) + row * p.residual_stride + n);
    return x[0];
  };
  return {p.row_sums ? static_cast<const T*>(p.row_sums)[n] : zero, p.bias ? static_cast<const T*>(p.bias)[n] : zero,
          p.residual ? residual() : zero};
}

// A value of out, from its sum over k; with SwiGLU of gate, and `up` of up. The norm's factor is applied here, so that
// its mean is of values that are read for the product anyway. What is rounded is what the plain model rounds.
template <typename T>
DEVICE T finished(const Arguments& p, float sum, float up, const Moments& moments, const Beside<T>& beside) {
  if (p.norm) {
    const float mean = p.row_sums ? moments.sum / p.K : 0.0f;
    const float factor = 1.0f / sqrtf(moments.squares / p.K - mean * mean + p.eps);
    sum -= mean * to_float(beside.row_sum);
    sum *= factor, up *= factor;
  }
  sum += to_float(beside.bias);
  if (p.activation == SWIGLU) {
    sum = to_float(from_float<T>(sum));
    sum = sum / (1.0f + expf(-sum)) * to_float(from_float<T>(up));
  } else if (p.activation == GELU) {
    sum = to_float(from_float<T>(sum));
    sum = 0.5f * sum * (1.0f + tanhf(0.7978845608f * (sum + 0.044715f * sum * sum * sum)));  // sqrt(2 / pi)
  }
  if (p.residual) sum = to_float(from_float<T>(sum)) + to_float(beside.residual);
  return from_float<T>(sum);
}
template <typename T>
DEVICE void put(const Arguments& p, int row, int n, T value) { static_cast<T*>(p.out)[row * p.out_stride + n] = value; }
