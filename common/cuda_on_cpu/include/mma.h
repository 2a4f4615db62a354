// nvcuda::wmma: matrix products by whole warps, on fragments that the lanes of a warp hold together.
//
//   fragment<matrix_a | matrix_b | accumulator, m, n, k, T, row_major | col_major>
//     16x16x16, 32x8x16, 8x32x16    T = __half or __nv_bfloat16, accumulators float (or __half for __half)
//     16x16x8                       T = precision::tf32, accumulators float
//   fill_fragment  load_matrix_sync  mma_sync  store_matrix_sync  __float_to_tf32
//
// CUDA does not specify which lane has which element, nor in which x[i], and GPUs differ. The mapping here is like that
// of no GPU, and differs between the types of fragments. A kernel may rely on one thing: fragments of one type have the
// same mapping, so what is done to every x[i] is done to every element of the matrix. A new fragment is NaN.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

namespace nvcuda {
namespace wmma {

struct row_major;
struct col_major;
struct matrix_a;
struct matrix_b;
struct accumulator;
namespace precision {
struct tf32;
}
enum layout_t { mem_row_major,
                mem_col_major };

template <class Use, int m, int n, int k, class T, class Layout = void>
class fragment {
  template <class A, class B>
  static constexpr bool same = std::is_same<A, B>::value;
  static constexpr bool is_c = same<Use, accumulator>, is_a = same<Use, matrix_a>;
  static constexpr bool is_tf32 = same<T, precision::tf32>, is_f32 = same<T, float>, is_f16 = same<T, __half>;
  static constexpr bool is_bf16 = same<T, __nv_bfloat16>, by_columns = same<Layout, col_major>;
  static constexpr bool deep = (m == 16 && n == 16 && k == 16) || (m == 32 && n == 8 && k == 16) ||
                               (m == 8 && n == 32 && k == 16);
  static constexpr bool shallow = m == 16 && n == 16 && k == 8;
  static_assert(is_c || is_a || same<Use, matrix_b>, "a fragment is a matrix_a, a matrix_b or an accumulator");
  static_assert(is_c ? same<Layout, void> : by_columns || same<Layout, row_major>,
                "matrix_a and matrix_b are row_major or col_major; an accumulator is neither");
  static_assert(is_c ? (is_f32 && (deep || shallow)) || (is_f16 && deep)
                     : ((is_f16 || is_bf16) && deep) || (is_tf32 && shallow),
                "on the CPU there are fragments of __half and __nv_bfloat16 (16x16x16, 32x8x16, 8x32x16), of "
                "precision::tf32 (16x16x8), and accumulators of float or, for __half, __half");

 public:
  using element_type = T;
  using storage_element_type = std::conditional_t<is_tf32, float, T>;
  static constexpr cuda_on_cpu::WmmaTile tile = {
      is_f16    ? cuda_on_cpu::WmmaType::f16
      : is_bf16 ? cuda_on_cpu::WmmaType::bf16
      : is_tf32 ? cuda_on_cpu::WmmaType::tf32
                : cuda_on_cpu::WmmaType::f32,
      is_c || is_a ? m : k, is_c || !is_a ? n : k,
      is_c   ? (is_f32 ? 5 : 9)
      : is_a ? (by_columns ? 7 : 3)
             : (by_columns ? 13 : 11)};
  static constexpr int num_elements = tile.rows * tile.columns / 32, num_storage_elements = num_elements;

  storage_element_type x[num_storage_elements];
  fragment() { __builtin_memset(static_cast<void*>(x), 0xff, sizeof x); }
};

template <class Use, int m, int n, int k, class T, class Layout>
inline void fill_fragment(fragment<Use, m, n, k, T, Layout>& f,
                          const typename fragment<Use, m, n, k, T, Layout>::storage_element_type& value) {
  for (auto& element : f.x) element = value;
}

template <class Use, int m, int n, int k, class T, class Layout>
__forceinline__ void load_matrix_sync(
    fragment<Use, m, n, k, T, Layout>& f,
    const typename fragment<Use, m, n, k, T, Layout>::storage_element_type* matrix, unsigned ldm, CUDA_ON_CPU_CALLER) {
  static_assert(!std::is_same<Use, accumulator>::value, "to load an accumulator, say mem_row_major or mem_col_major");
  cuda_on_cpu::wmma_load(f.tile, f.x, matrix, ldm, std::is_same<Layout, col_major>::value, file, line);
}
template <int m, int n, int k, class T>
__forceinline__ void load_matrix_sync(fragment<accumulator, m, n, k, T>& f, const T* matrix, unsigned ldm,
                                      layout_t layout, CUDA_ON_CPU_CALLER) {
  cuda_on_cpu::wmma_load(f.tile, f.x, matrix, ldm, layout == mem_col_major, file, line);
}
template <int m, int n, int k, class T>
__forceinline__ void store_matrix_sync(T* matrix, const fragment<accumulator, m, n, k, T>& f, unsigned ldm,
                                       layout_t layout, CUDA_ON_CPU_CALLER) {
  cuda_on_cpu::wmma_store(f.tile, f.x, matrix, ldm, layout == mem_col_major, file, line);
}

template <int m, int n, int k, class D, class T, class LayoutA, class LayoutB, class C>
inline void mma_sync(fragment<accumulator, m, n, k, D>& d, const fragment<matrix_a, m, n, k, T, LayoutA>& a,
                     const fragment<matrix_b, m, n, k, T, LayoutB>& b, const fragment<accumulator, m, n, k, C>& c,
                     CUDA_ON_CPU_CALLER) {
  static_assert(std::is_same<T, __half>::value || (std::is_same<C, float>::value && std::is_same<D, float>::value),
                "only products of __half can be summed in __half");
  static constexpr cuda_on_cpu::WmmaShapes shapes = {
      fragment<matrix_a, m, n, k, T, LayoutA>::tile, fragment<matrix_b, m, n, k, T, LayoutB>::tile,
      fragment<accumulator, m, n, k, C>::tile, fragment<accumulator, m, n, k, D>::tile};
  cuda_on_cpu::wmma_multiply(shapes, d.x, a.x, b.x, c.x, file, line);
}

/// 10 bits of mantissa, ties away from zero.
static inline float __float_to_tf32(float x) {
  const uint32_t bits = cuda_on_cpu::bits_of(x);
  return (bits & 0x7f800000) == 0x7f800000 ? x : cuda_on_cpu::float_of((bits + 0x1000) & ~0x1fffu);
}

}  // namespace wmma
}  // namespace nvcuda
