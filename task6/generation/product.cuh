// What stands before and behind a product of few rows, x @ w.T: its arguments, norms, activations and the residual.
#pragma once
#include <cuda_runtime.h>

#include "dtype.cuh"
#include "tensor.cuh"

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
DEVICE float2 two(uint32_t bits) {
  const union {
    uint32_t bits;
    T values[2];
  } u = {bits};
  return make_float2(to_float(u.values[0]), to_float(u.values[1]));
}
template <typename T>
DEVICE uint32_t scaled(uint32_t pair, uint32_t by) {  // both products, rounded as the plain model rounds x * norm
  const float2 x = two<T>(pair), y = two<T>(by);
  const union {
    T values[2];
    uint32_t bits;
  } u = {{from_float<T>(x.x * y.x), from_float<T>(x.y * y.y)}};
  return u.bits;
}

// The sums of a row of x and of its squares.
struct Moments {
  float sum, squares;

  DEVICE void add(float2 x) { sum += x.x + x.y, squares += x.x * x.x + x.y * x.y; }
  DEVICE void add(float4 x) { add(make_float2(x.x, x.y)), add(make_float2(x.z, x.w)); }
  template <typename T>
  DEVICE void add(uint4 x) { add(two<T>(x.x)), add(two<T>(x.y)), add(two<T>(x.z)), add(two<T>(x.w)); }
  DEVICE void add(const Moments& other) { sum += other.sum, squares += other.squares; }
  DEVICE void add_lanes(int step) {
    sum += __shfl_xor_sync(~0u, sum, step), squares += __shfl_xor_sync(~0u, squares, step);
  }
};

// What column n of a row of out takes beside the sum over k.
struct Beside {
  float row_sum, bias, residual;
};
template <typename T>
DEVICE Beside load_beside(const Arguments& p, int row, int n) {
  Beside found = {};
  if (p.row_sums) found.row_sum = to_float(static_cast<const T*>(p.row_sums)[n]);
  if (p.bias) found.bias = to_float(static_cast<const T*>(p.bias)[n]);
  if (p.residual) found.residual = to_float(static_cast<const T*>(p.residual)[row * p.residual_stride + n]);
  return found;
}

// Column n of a row of out, from the sum over k; with SwiGLU of gate, and `up` of up. The norm's factor is applied
// here, so that its mean is of values that are read for the product anyway. What is rounded is what the plain model
// rounds. Returns what was written.
template <typename T>
DEVICE float write(const Arguments& p, int row, int n, float sum, float up, const Moments& moments,
                   const Beside& beside) {
  if (p.norm) {
    const float mean = p.row_sums ? moments.sum / p.K : 0.0f;
    const float factor = 1.0f / sqrtf(moments.squares / p.K - mean * mean + p.eps);
    sum -= mean * beside.row_sum;
    sum *= factor, up *= factor;
  }
  sum += beside.bias;
  if (p.activation == SWIGLU) {
    sum = to_float(from_float<T>(sum));
    sum = sum / (1.0f + expf(-sum)) * to_float(from_float<T>(up));
  } else if (p.activation == GELU) {
    sum = to_float(from_float<T>(sum));
    sum = 0.5f * sum * (1.0f + tanhf(0.7978845608f * (sum + 0.044715f * sum * sum * sum)));  // sqrt(2 / pi)
  }
  if (p.residual) sum = to_float(from_float<T>(sum)) + beside.residual;
  const T rounded = from_float<T>(sum);
  static_cast<T*>(p.out)[row * p.out_stride + n] = rounded;
  return to_float(rounded);
}
