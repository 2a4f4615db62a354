// Arithmetic of the 16-bit formats, tensor-core and copy instructions, for comparison with PyTorch.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "ptx.cuh"

// Both formats under names that templates can use.
struct Half {
  using T = __half;
  using T2 = __half2;
  static __device__ float to_float(T x) { return __half2float(x); }
  static __device__ T round(float x) { return __float2half_rn(x); }
  static __device__ T truncate(float x) { return __float2half_rz(x); }
  static __device__ T of_bits(unsigned short bits) { return __ushort_as_half(bits); }
  static __device__ T2 pair(float x, float y) { return __floats2half2_rn(x, y); }
  static __device__ float2 to_floats(T2 h) { return __half22float2(h); }
};
struct Bfloat {
  using T = __nv_bfloat16;
  using T2 = __nv_bfloat162;
  static __device__ float to_float(T x) { return __bfloat162float(x); }
  static __device__ T round(float x) { return __float2bfloat16_rn(x); }
  static __device__ T truncate(float x) { return __float2bfloat16_rz(x); }
  static __device__ T of_bits(unsigned short bits) { return __ushort_as_bfloat16(bits); }
  static __device__ T2 pair(float x, float y) { return __floats2bfloat162_rn(x, y); }
  static __device__ float2 to_floats(T2 h) { return __bfloat1622float2(h); }
};

template <class F>
__global__ void widen(float* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = F::to_float(F::of_bits(i));
}
template <class F>
__global__ void narrow(const float* x, typename F::T* nearest, typename F::T* truncated, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  nearest[i] = F::round(x[i]);
  truncated[i] = F::truncate(x[i]);
}
extern "C" cudaError_t run_widen(int bf16, float* out, cudaStream_t stream) {
  auto kernel = bf16 ? widen<Bfloat> : widen<Half>;
  kernel<<<256, 256, 0, stream>>>(out, 65536);
  return cudaGetLastError();
}
extern "C" cudaError_t run_narrow(int bf16, const float* x, void* nearest, void* truncated, int n,
                                  cudaStream_t stream) {
  int blocks = (n + 255) / 256;
  if (bf16) {
    narrow<Bfloat>
        <<<blocks, 256, 0, stream>>>(x, (__nv_bfloat16*)nearest, (__nv_bfloat16*)truncated, n);
  } else {
    narrow<Half><<<blocks, 256, 0, stream>>>(x, (__half*)nearest, (__half*)truncated, n);
  }
  return cudaGetLastError();
}

template <class F>
__global__ void arithmetic(const typename F::T* x, const typename F::T* y, const typename F::T* z,
                           typename F::T* out, int n) {
  using T = typename F::T;
  using T2 = typename F::T2;
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  T a = x[i], b = y[i], c = z[i];
  T row[12] = {a + b,
               a - b,
               a * b,
               a / b,
               __hfma(a, b, c),
               __hmax(a, b),
               __hmin(a, b),
               hexp(a),
               hsqrt(__habs(a)),
               -a};
  T2 v = T2(a, b);
  v = __hfma2(v, T2(c, c), T2(b, a));
  row[10] = v.x, row[11] = v.y;
  for (int k = 0; k < 12; ++k) out[i * 12 + k] = row[k];
}
extern "C" cudaError_t run_arithmetic(int bf16, const void* x, const void* y, const void* z,
                                      void* out, int n, cudaStream_t stream) {
  int blocks = (n + 255) / 256;
  using b = __nv_bfloat16;
  if (bf16) {
    arithmetic<Bfloat>
        <<<blocks, 256, 0, stream>>>((const b*)x, (const b*)y, (const b*)z, (b*)out, n);
  } else {
    arithmetic<Half>
        <<<blocks, 256, 0, stream>>>((const half*)x, (const half*)y, (const half*)z, (half*)out, n);
  }
  return cudaGetLastError();
}

// The many names, once each; and halves in shuffles and atomics.
template <class F>
__global__ void names(float* out) {
  using T = typename F::T;
  int t = threadIdx.x;
  auto pair = F::pair(1.5f, -2.0f);
  float2 f = F::to_floats(pair);
  T one = T(1.0f), total = __shfl_xor_sync(0xffffffffu, T(float(t)), 1);
  __shared__ T sum[2];
  if (t < 2) sum[t] = T(0);
  __syncthreads();
  atomicAdd(&sum[t % 2], one);
  __syncthreads();
  if (t > 0) return;
  out[0] = f.x, out[1] = f.y, out[2] = __low2float(pair), out[3] = __high2float(pair);
  out[4] = float(total), out[5] = float(sum[0]), out[6] = __hlt(one, total),
  out[7] = __heq(one, total);
  out[8] = __hisnan(T(NAN)), out[9] = one > T(0), out[10] = float(total += T(3)),
  out[11] = float(__hneg(one));
}
extern "C" cudaError_t run_names(int bf16, float* out, cudaStream_t stream) {
  auto kernel = bf16 ? names<Bfloat> : names<Half>;
  kernel<<<1, 32, 0, stream>>>(out);
  return cudaGetLastError();
}

// ---- tensor cores: one warp, c (16 x 8) += a (16 x k) b (k x 8), fragments loaded by ldmatrix

template <class T>
__global__ void mma_16(const T* a, const T* b, const float* c, float* d, int b_by_columns) {
  __shared__ T A[16][24], B[16][24];  // 24: rows are 16-byte aligned
  int lane = threadIdx.x;
  for (int i = lane; i < 256; i += 32) A[i / 16][i % 16] = a[i];
  for (int i = lane; i < 128; i += 32) {
    if (b_by_columns) {
      B[i / 16][i % 16] = b[i];  // given by columns: each row of B is a column of b
    } else {
      B[i / 8][i % 8] = b[i];
    }
  }
  __syncwarp();
  uint32_t a_frag[4], b_frag[2];
  float c_frag[4], d_frag[4];
  ldmatrix_x4(a_frag, &A[lane % 16][lane / 16 * 8]);
  if (b_by_columns) {
    ldmatrix_x2(b_frag, &B[lane % 8][lane / 8 % 2 * 8]);
  } else {
    ldmatrix_x2_trans(b_frag, &B[lane % 16][0]);
  }
  for (int i = 0; i < 4; ++i) c_frag[i] = c[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2];
  mma_m16n8k16<T>(d_frag, a_frag, b_frag, c_frag);
  for (int i = 0; i < 4; ++i) d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = d_frag[i];
}
__global__ void mma_tf32(const float* a, const float* b, const float* c, float* d) {
  int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  uint32_t a_frag[4], b_frag[2];
  float c_frag[4], d_frag[4];
  for (int i = 0; i < 4; ++i) a_frag[i] = to_tf32(a[(g + i % 2 * 8) * 8 + t + i / 2 * 4]);
  for (int i = 0; i < 2; ++i) b_frag[i] = to_tf32(b[(t + i * 4) * 8 + g]);
  for (int i = 0; i < 4; ++i) c_frag[i] = c[(g + i / 2 * 8) * 8 + t * 2 + i % 2];
  mma_m16n8k8_tf32(d_frag, a_frag, b_frag, c_frag);
  for (int i = 0; i < 4; ++i) d[(g + i / 2 * 8) * 8 + t * 2 + i % 2] = d_frag[i];
}
extern "C" cudaError_t run_mma(int type, const void* a, const void* b, const float* c, float* d,
                               int b_by_columns, cudaStream_t stream) {
  using bf = __nv_bfloat16;
  if (type == 0) mma_tf32<<<1, 32, 0, stream>>>((const float*)a, (const float*)b, c, d);
  if (type == 1) mma_16<<<1, 32, 0, stream>>>((const half*)a, (const half*)b, c, d, b_by_columns);
  if (type == 2) mma_16<<<1, 32, 0, stream>>>((const bf*)a, (const bf*)b, c, d, b_by_columns);
  return cudaGetLastError();
}

// ---- ldmatrix: four matrices inp, the registers of every lane out

__global__ void load_matrices(const uint16_t* inp, uint32_t* out, int misalign) {
  __shared__ __align__(16) uint16_t matrices[32 * 8 + 8];
  int lane = threadIdx.x;
  for (int i = lane; i < 256; i += 32) matrices[i] = inp[i];
  if (lane < 8) matrices[256 + lane] = 0;
  __syncwarp();
  uint32_t r1[1], r2[2], r4[4];
  const uint16_t* row = &matrices[lane * 8 + misalign];
  uint32_t* o = out + lane * 14;
  ldmatrix_x1(r1, row), o[0] = r1[0];  // @misaligned
  ldmatrix_x1_trans(r1, row), o[1] = r1[0];
  ldmatrix_x2(r2, row), o[2] = r2[0], o[3] = r2[1];
  ldmatrix_x2_trans(r2, row), o[4] = r2[0], o[5] = r2[1];
  ldmatrix_x4(r4, row);
  for (int i = 0; i < 4; ++i) o[6 + i] = r4[i];
  ldmatrix_x4_trans(r4, row);
  for (int i = 0; i < 4; ++i) o[10 + i] = r4[i];
}
extern "C" cudaError_t run_ldmatrix(const void* inp, void* out, int misalign, int threads,
                                    cudaStream_t stream) {
  load_matrices<<<1, threads, 0, stream>>>((const uint16_t*)inp, (uint32_t*)out, misalign);
  return cudaGetLastError();
}

// ---- cp_async: what is seen before and after each wait

__global__ void copies(const float* inp, float* out, int shift) {
  __shared__ __align__(16) float x[32];
  int t = threadIdx.x;
  if (t < 4) cp_async<16>(&x[t * 4], inp + t * 4);  // 0 .. 15
  cp_async_commit();
  if (t < 4) cp_async<8>(&x[16 + t * 2], inp + 16 + t * 2, t != 3);  // 16 .. 23, the last two zeros
  cp_async_commit();
  if (t < 8) cp_async<4>(&x[24 + t], inp + 24 + t + shift, t < 6);  // 24 .. 31, @cp-async
  cp_async_wait<1>();  // two groups have been committed: the first one has landed
  __syncthreads();
  if (t < 16) out[t] = x[t];
  cp_async_wait<0>();  // the second one; the third has not been committed
  __syncthreads();
  if (t >= 16 && t < 24) out[t] = x[t];
  cp_async_wait_all();
  __syncthreads();
  if (t >= 24) out[t] = x[t];
}
extern "C" cudaError_t run_copies(const float* inp, float* out, int shift, cudaStream_t stream) {
  copies<<<1, 32, 0, stream>>>(inp, out, shift);
  return cudaGetLastError();
}

// Reads in the fast build what has not been waited for.
__global__ void early_read(const float* inp, float* out) {
  __shared__ __align__(16) float x[4];
  if (threadIdx.x == 0) {
    cp_async<16>(x, inp);
    out[0] = x[0];
    cp_async_wait_all();
    out[1] = x[0];
  }
}
extern "C" cudaError_t run_early_read(const float* inp, float* out, cudaStream_t stream) {
  early_read<<<1, 1, 0, stream>>>(inp, out);
  return cudaGetLastError();
}
