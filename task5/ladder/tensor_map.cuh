// Tensor maps of five dimensions in boxes of 128-byte rows, swizzled, as task 4's make_tensor_map(), and loads of
// boxes. Hopper and later.
#pragma once
#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "../../task4/ladder/hopper.cuh"
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

// tma_load_box() of what is read once: L2 drops it first, not what others read again.
DEVICE void load_box_once(void* tile, const CUtensorMap* map, uint64_t* barrier, int c1, int c2, int c3, int c4) {
#ifdef __CUDACC__
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(shared_address(tile)),
      "l"(map), "r"(shared_address(barrier)), "r"(0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(EVICT_FIRST) : "memory");
#else
  tma_load_box(tile, map, barrier, c1, c2, c3, c4);
#endif
}
