// One kernel for float32, float16 and bfloat16 tensors: read as float, computed in float, rounded once when written.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

constexpr int FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2;  // common.build.dtype_code

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) { return x; }
template <>
__device__ __forceinline__ __half from_float<__half>(float x) { return __float2half_rn(x); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

// run(T{}), where T is the C++ type of this dtype.
template <typename Run>
inline cudaError_t with_dtype(int dtype, Run run) {
  if (dtype == FLOAT16) return run(__half{});
  if (dtype == BFLOAT16) return run(__nv_bfloat16{});
  return run(float{});
}
