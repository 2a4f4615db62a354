// Fragments of nvcuda::wmma, for comparison with PyTorch, and what a kernel may not do with them.
#include <mma.h>

#include "dtype.cuh"

using namespace nvcuda;

template <class T>
struct Element {
  using Type = T;
};
template <>
struct Element<float> {
  using Type = wmma::precision::tf32;
};
template <class T>
__device__ T rounded(float x) { return from_float<T>(x); }
template <>
__device__ float rounded<float>(float x) { return wmma::__float_to_tf32(x); }

// d (m x n) = factor * (a (m x k) b (k x n) + c). All are in shared memory, in rows or columns of LDM elements.
constexpr int LDM = 48;

template <int m, int n, int k, class T, class C, class LayoutA, class LayoutB>
__global__ void product(const float* a, const float* b, const float* c, float* d, float factor, wmma::layout_t layout) {
  __shared__ __align__(32) T A[32 * LDM], B[32 * LDM];
  __shared__ __align__(32) C sum[32 * LDM];
  constexpr bool a_by_columns = std::is_same<LayoutA, wmma::col_major>::value;
  constexpr bool b_by_columns = std::is_same<LayoutB, wmma::col_major>::value;
  const bool c_by_columns = layout == wmma::mem_col_major;
  const auto place = [](bool by_columns, int row, int column) {
    return by_columns ? column * LDM + row : row * LDM + column;
  };
  for (int i = threadIdx.x; i < m * k; i += 32) A[place(a_by_columns, i / k, i % k)] = rounded<T>(a[i]);
  for (int i = threadIdx.x; i < k * n; i += 32) B[place(b_by_columns, i / n, i % n)] = rounded<T>(b[i]);
  for (int i = threadIdx.x; i < m * n; i += 32) sum[place(c_by_columns, i / n, i % n)] = from_float<C>(c[i]);
  __syncwarp();
  wmma::fragment<wmma::matrix_a, m, n, k, typename Element<T>::Type, LayoutA> a_frag;
  wmma::fragment<wmma::matrix_b, m, n, k, typename Element<T>::Type, LayoutB> b_frag;
  wmma::fragment<wmma::accumulator, m, n, k, C> c_frag;
  wmma::load_matrix_sync(a_frag, A, LDM);
  wmma::load_matrix_sync(b_frag, B, LDM);
  wmma::load_matrix_sync(c_frag, sum, LDM, layout);
  wmma::mma_sync(c_frag, a_frag, b_frag, c_frag);
  for (int i = 0; i < c_frag.num_elements; ++i) c_frag.x[i] *= from_float<C>(factor);
  __syncwarp();
  wmma::store_matrix_sync(sum, c_frag, LDM, layout);
  __syncwarp();
  for (int i = threadIdx.x; i < m * n; i += 32) d[i] = to_float(sum[place(c_by_columns, i / n, i % n)]);
}

template <int m, int n, int k, class T, class C>
static void launch(const float* a, const float* b, const float* c, float* d, float factor, int columns,
                   cudaStream_t stream) {
  using wmma::row_major, wmma::col_major;
  const auto layout = columns & 4 ? wmma::mem_col_major : wmma::mem_row_major;
  const auto run = [&](auto kernel) { kernel<<<1, 32, 0, stream>>>(a, b, c, d, factor, layout); };
  if ((columns & 3) == 0) run(product<m, n, k, T, C, row_major, row_major>);
  if ((columns & 3) == 1) run(product<m, n, k, T, C, col_major, row_major>);
  if ((columns & 3) == 2) run(product<m, n, k, T, C, row_major, col_major>);
  if ((columns & 3) == 3) run(product<m, n, k, T, C, col_major, col_major>);
}

// columns: bits 0, 1 and 2 say that a, b and c are stored by columns.
extern "C" cudaError_t run_product(int dtype, int m, int sum_in_half, const float* a, const float* b, const float* c,
                                   float* d, float factor, int columns, cudaStream_t stream) {
  const auto run = [&](auto m16, auto m32, auto m8) {
    const auto of_this_shape = m == 8 ? m8 : (m == 32 ? m32 : m16);
    of_this_shape(a, b, c, d, factor, columns, stream);
  };
  using bf16 = __nv_bfloat16;
  if (dtype == FLOAT32) launch<16, 16, 8, float, float>(a, b, c, d, factor, columns, stream);
  if (dtype == BFLOAT16)
    run(launch<16, 16, 16, bf16, float>, launch<32, 8, 16, bf16, float>, launch<8, 32, 16, bf16, float>);
  if (dtype == FLOAT16 && !sum_in_half)
    run(launch<16, 16, 16, half, float>, launch<32, 8, 16, half, float>, launch<8, 32, 16, half, float>);
  if (dtype == FLOAT16 && sum_in_half)
    run(launch<16, 16, 16, half, half>, launch<32, 8, 16, half, half>, launch<8, 32, 16, half, half>);
  return cudaGetLastError();
}

// ---- matrices in global memory, and the elements of a fragment as the lanes hold them

__global__ void global_copy(const float* x, float* y, float* held, int rows_given) {
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> f;
  wmma::load_matrix_sync(f, x, 16, wmma::mem_row_major);  // @global load
  for (int i = 0; i < f.num_elements; ++i) held[threadIdx.x * f.num_elements + i] = f.x[i];
  wmma::store_matrix_sync(y, f, rows_given, wmma::mem_col_major);  // @global store
}
extern "C" cudaError_t run_global_copy(const float* x, float* y, float* held, int ldm, cudaStream_t stream) {
  global_copy<<<1, 32, 0, stream>>>(x, y, held, ldm);
  return cudaGetLastError();
}

// ---- mistakes

enum Mistake { NONE,
               MISALIGNED,
               ODD_LDM,
               SHORT_LDM,
               LANES_DIFFER,
               LANES_LEAVE,
               NOT_TF32,
               NO_SYNCWARP,
               UNWRITTEN,
               UNFILLED };

__global__ void mistakes(float* out, int mistake) {
  __shared__ __align__(32) float x[16 * 24];
  const int lane = threadIdx.x;
  for (int i = lane; i < 16 * 24; i += 32) {
    if (mistake != UNWRITTEN || i < 15 * 24) x[i] = mistake == NOT_TF32 ? 1.0f + 0x1p-20f : 1.0f;  // @write
  }
  if (mistake != NO_SYNCWARP) __syncwarp();
  if (mistake == LANES_LEAVE && lane == 31) return;
  const float* matrix = x;
  if (mistake == MISALIGNED) matrix += 4;
  if (mistake == LANES_DIFFER) matrix += lane / 16 * 8;
  int ldm = 24;
  if (mistake == ODD_LDM) ldm = 18;
  if (mistake == SHORT_LDM) ldm = 12;
  wmma::fragment<wmma::accumulator, 16, 16, 8, float> sum, start;
  wmma::load_matrix_sync(start, matrix, ldm, wmma::mem_row_major);  // @load
  wmma::fragment<wmma::matrix_a, 16, 16, 8, wmma::precision::tf32, wmma::row_major> a;
  wmma::fragment<wmma::matrix_b, 16, 16, 8, wmma::precision::tf32, wmma::row_major> b;
  wmma::load_matrix_sync(a, x, 24);
  wmma::load_matrix_sync(b, x, 24);
  if (mistake != UNFILLED) wmma::fill_fragment(sum, 0.0f);
  wmma::mma_sync(sum, a, b, sum);  // @mma
  for (int i = 0; i < sum.num_elements; ++i) out[lane * sum.num_elements + i] = sum.x[i];
}
extern "C" cudaError_t run_mistakes(float* out, int mistake, int threads, cudaStream_t stream) {
  mistakes<<<1, threads, 0, stream>>>(out, mistake);
  return cudaGetLastError();
}

// The lanes read back what others have stored.
__global__ void read_back(float* out, int wait) {
  __shared__ __align__(32) float x[256];
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> f;
  wmma::fill_fragment(f, 2.0f);
  wmma::store_matrix_sync(x, f, 16, wmma::mem_row_major);  // @store
  if (wait) __syncwarp();
  out[threadIdx.x] = x[threadIdx.x];  // @read back
}
extern "C" cudaError_t run_read_back(float* out, int wait, cudaStream_t stream) {
  read_back<<<1, 32, 0, stream>>>(out, wait);
  return cudaGetLastError();
}
