// How a tensor reaches a launcher, and where its elements are for a kernel.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

// A tensor of up to four dimensions, passed to a launcher by value. Sizes and strides count elements. A dimension that
// the tensor does not have has size 1, and a dimension of size 1 has stride 0. Every size fits an int. In Python:
// common.build.View.
struct View {
  void* data;
  int64_t sizes[4], strides[4];

  template <typename T>
  __host__ __device__ T* as() const { return static_cast<T*>(data); }
};

// Element (b, row, h, e) of a (batch, row, head, head_dim) tensor is
//   data[b * batch + row * row + h * head + e]            64-bit: batch 128 of 4096 x 4096 exceeds 2^31
struct Strides {
  int64_t batch, row, head;
};

inline Strides strides_of(const View& tensor) { return {tensor.strides[0], tensor.strides[1], tensor.strides[2]}; }

// One matrix of a (batch, heads, rows, columns) tensor of floats with any strides. matrix(r, c) is element (r, c).
struct Matrix {
  float* data;
  int64_t row_stride, column_stride;

  __device__ __forceinline__ float& operator()(int64_t r, int64_t c) const {
    return data[r * row_stride + c * column_stride];
  }
};

__device__ __forceinline__ Matrix matrix_of(const View& tensor, int batch, int head) {
  float* data = tensor.as<float>() + batch * tensor.strides[0] + head * tensor.strides[1];
  return {data, tensor.strides[2], tensor.strides[3]};
}

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
