// Tensor maps of five dimensions in boxes of 128-byte rows, swizzled, as task 4's make_tensor_map(). Hopper and later.
#pragma once
#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

// sizes, box: in values, the first 64 in each. pitches: of the other four dimensions, in bytes.
template <typename T>
inline cudaError_t make_box_map(CUtensorMap* map, const void* data, const cuuint64_t (&sizes)[5],
                                const cuuint64_t (&pitches)[4], const cuuint32_t (&box)[5]) {
  static const auto encode = [] {  // the driver's function, looked up through the runtime: libcuda is not linked
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  if (!encode) return cudaErrorNotSupported;
  constexpr auto type =
      std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  const CUresult result =
      encode(map, type, 5, const_cast<void*>(data), sizes, pitches, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// What a dimension of size 1 has as its stride does not matter, but it has to be one that TMA takes.
template <typename T>
inline cuuint64_t pitch_of(int64_t stride, int size) { return size > 1 ? cuuint64_t(stride) * sizeof(T) : 16; }
