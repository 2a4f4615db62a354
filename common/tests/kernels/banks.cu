#pragma GCC optimize("no-tree-sra")  // a float4 is accessed as a whole, and its bank conflicts are known
// Accesses to shared memory whose bank conflicts are known.
#include <cuda_runtime.h>

#include "tensor.cuh"

constexpr int WORDS = 1 << 12;

// Lane t accesses element t * stride. The threads of a second warp do the same.
template <typename T>
__global__ void strided(float* out, int stride) {
  __shared__ __align__(16) float words[WORDS];
  for (int i = threadIdx.x; i < WORDS; i += blockDim.x) words[i] = 1.0f;
  __syncthreads();
  T* elements = reinterpret_cast<T*>(words);
  const T mine = elements[threadIdx.x % 32 * stride];  // @read
  out[threadIdx.x] = reinterpret_cast<const float*>(&mine)[0];
  __syncthreads();
  elements[threadIdx.x] = mine;  // @write
}

// Level by level, as in a reduction: fewer threads are active each time.
__global__ void tree(float* out) {
  __shared__ float partial[64];
  partial[threadIdx.x] = 1.0f;
  __syncthreads();
  for (int half = 32; half > 0; half /= 2) {
    if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];  // @tree
    __syncthreads();
  }
  out[(blockIdx.y * 2 + blockIdx.x) * 64 + threadIdx.x] = partial[0];
}

extern "C" cudaError_t run_strided(float* out, int floats, int stride, cudaStream_t stream) {
  if (floats == 1) strided<float><<<1, 64, 0, stream>>>(out, stride);
  if (floats == 2) strided<float2><<<1, 64, 0, stream>>>(out, stride);
  if (floats == 4) strided<float4><<<1, 64, 0, stream>>>(out, stride);
  return cudaGetLastError();
}

extern "C" cudaError_t run_tree(float* out, cudaStream_t stream) {
  tree<<<dim3(2, 2), 64, 0, stream>>>(out);
  return cudaGetLastError();
}
