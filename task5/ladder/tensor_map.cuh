// Tensor maps of five dimensions in boxes of 128-byte rows, swizzled, as task 4's make_tensor_map(). Hopper and later.
#pragma once
#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "tensor.cuh"

// sizes, box: in values, the first 128 bytes in each. pitches: of the other four dimensions, in bytes. L2 fetches what
// a box has and no more: with a promotion to 256 bytes, what is read once comes 10 % slower.
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
  constexpr auto type = std::is_same_v<T, float>    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                        : std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                    : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  const CUresult result =
      encode(map, type, 5, const_cast<void*>(data), sizes, pitches, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// What a dimension of size 1 has as its stride does not matter, but it has to be one that TMA takes.
template <typename T>
inline cuuint64_t pitch_of(int64_t stride, int size) { return size > 1 ? cuuint64_t(stride) * sizeof(T) : 16; }

// A (batch or page, row, head, head_dim) tensor in boxes of rows and columns of a head: in 16 bits
// [columns / 64][rows][64].
template <typename T>
inline cudaError_t make_rows_map(CUtensorMap* map, const View& x, int rows, int columns) {
  constexpr cuuint32_t WIDTH = 128 / sizeof(T);
  const cuuint64_t sizes[5] = {WIDTH, cuuint64_t(x.sizes[1]), cuuint64_t(x.sizes[3] / WIDTH), cuuint64_t(x.sizes[2]),
                               cuuint64_t(x.sizes[0])};
  const cuuint64_t pitches[4] = {pitch_of<T>(x.strides[1], x.sizes[1]), 128, pitch_of<T>(x.strides[2], x.sizes[2]),
                                 pitch_of<T>(x.strides[0], x.sizes[0])};
  return make_box_map<T>(map, x.data, sizes, pitches, {WIDTH, cuuint32_t(rows), cuuint32_t(columns / WIDTH), 1, 1});
}
