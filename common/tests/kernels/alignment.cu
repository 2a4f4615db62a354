// Vector accesses at addresses that are not multiples of their alignment. Each is right for offset 0.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "ptx.cuh"

// clang-format off
enum Access { READ_FLOAT4, WRITE_FLOAT4, COPY_FLOAT4, READ_FLOAT2, READ_INT4, READ_UINT4, READ_HALF2, WRITE_BFLOAT162,
              MEMBER, READ_SHARED, WRITE_SHARED, COPY_TO_SHARED, COPY_FROM_TENSOR, OWN_VARIABLE };
// clang-format on

__global__ void vectors(float* x, __half* h, float* out, int access, int offset) {
  __shared__ __align__(16) float tile[4][36];
  for (int i = threadIdx.x; i < 4 * 36; i += 32) tile[i / 36][i % 36] = 0.0f;
  __syncthreads();
  if (threadIdx.x != 0) return;
  float4 sum = {};
  if (access == READ_FLOAT4) sum = *reinterpret_cast<const float4*>(x + offset);  // @READ_FLOAT4
  if (access == WRITE_FLOAT4) *reinterpret_cast<float4*>(x + offset) = make_float4(1, 2, 3, 4);  // @WRITE_FLOAT4
  if (access == COPY_FLOAT4) *reinterpret_cast<float4*>(x) = *reinterpret_cast<float4*>(x + offset);  // @COPY_FLOAT4
  if (access == READ_FLOAT2) sum.x = reinterpret_cast<float2*>(x + offset)[1].y;  // @READ_FLOAT2
  if (access == READ_INT4) {
    const int4 i = reinterpret_cast<const int4*>(x + offset)[0];  // @READ_INT4
    sum.x = i.x + i.w;
  }
  if (access == READ_UINT4) {
    const uint4 u = *reinterpret_cast<const uint4*>(h + offset);  // @READ_UINT4
    sum.x = u.x;
  }
  if (access == READ_HALF2) {
    const __half2 pair = *reinterpret_cast<const __half2*>(h + offset);  // @READ_HALF2
    sum.x = __high2float(pair);
  }
  if (access == WRITE_BFLOAT162) {
    *reinterpret_cast<__nv_bfloat162*>(h + offset) = __floats2bfloat162_rn(1.0f, 2.0f);  // @WRITE_BFLOAT162
  }
  if (access == MEMBER) sum.x = reinterpret_cast<const float4*>(x + offset)->w;  // @MEMBER
  if (access == READ_SHARED) sum = *reinterpret_cast<const float4*>(&tile[1][offset]);  // @READ_SHARED
  if (access == WRITE_SHARED) *reinterpret_cast<int4*>(&tile[1][offset]) = make_int4(1, 2, 3, 4);  // @WRITE_SHARED
  if (access == COPY_TO_SHARED) cp_async<16>(&tile[1][offset], x);  // @COPY_TO_SHARED
  if (access == COPY_FROM_TENSOR) cp_async<16>(&tile[1][0], x + offset);  // @COPY_FROM_TENSOR
  if (access == OWN_VARIABLE) {  // in registers on a GPU
    float own[8] = {};
    own[offset + 1] = x[0];
    sum = *reinterpret_cast<const float4*>(own + offset);
  }
  out[0] = sum.x + sum.y + sum.z + sum.w;
}
extern "C" cudaError_t run_vectors(float* x, void* h, float* out, int access, int offset, cudaStream_t stream) {
  vectors<<<1, 32, 0, stream>>>(x, static_cast<__half*>(h), out, access, offset);
  return cudaGetLastError();
}
