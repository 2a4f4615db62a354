// How a tensor's place in memory reaches a kernel: a pointer, sizes, and strides in elements.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

// Element (b, row, h, e) of a (batch, row, head, head_dim) tensor stands at
//   data[b * batch + row * row + h * head + e]            64-bit: batch 128 of 4096 x 4096 passes 2^31
struct Strides {
  int64_t batch, row, head;
};

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
