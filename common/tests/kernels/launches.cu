// Kernels that do not end, and launchers that use another stream than the one they were given.
#include <cuda_runtime.h>
#include <math.h>

// clang-format off
enum Loop { NONE, VOLATILE, BARRIERS, LOCK, SHUFFLES, EXPF, NO_MEMORY, ONE_THREAD };
// clang-format on

__global__ void endless(volatile int* go, float* out, int loop, int rounds) {
  const int t = threadIdx.x;
  float sum = 0.0f;
  if (loop == VOLATILE)
    while (*go == 0) {}  // @VOLATILE
  if (loop == BARRIERS)
    while (*go == 0) __syncthreads();  // @BARRIERS
  if (loop == LOCK)
    while (atomicCAS(const_cast<int*>(go), 1, 2) != 1) __nanosleep(10);  // @LOCK
  if (loop == SHUFFLES)
    while (__shfl_sync(~0u, *go, 0) == 0) {}  // @SHUFFLES
  if (loop == EXPF)
    while (*go == 0) sum += expf(sum);  // @EXPF
  if (loop == NO_MEMORY)
    for (int i = 0; i != rounds; i = (i + 1) & 7) sum = sum * 0.5f + i;  // @NO_MEMORY
  if (loop == ONE_THREAD && t == 40)
    while (*go == 0) {}  // @ONE_THREAD
  out[blockIdx.x * blockDim.x + t] = t + sum;
}
extern "C" cudaError_t run_endless(int* go, float* out, int loop, int rounds, int blocks, cudaStream_t stream) {
  endless<<<blocks, 64, 0, stream>>>(go, out, loop, rounds);  // @launch
  return cudaGetLastError();
}

// ---- 2^31 - 1 short blocks
__global__ void short_block(int* out) {
  if (threadIdx.x + blockIdx.x == 0) out[0] = 1;
}
extern "C" cudaError_t run_many_blocks(int* out, cudaStream_t stream) {
  short_block<<<0x7fffffff, 1, 0, stream>>>(out);
  return cudaGetLastError();
}

// ---- a launcher whose kernels take their time one after the other
__global__ void rounds_of(volatile int* go, int rounds) {
  for (int i = 0; i < rounds; ++i)
    if (*go != 0) return;
}
extern "C" cudaError_t run_one_after_the_other(int* go, int kernels, int rounds, cudaStream_t stream) {
  for (int i = 0; i < kernels; ++i) rounds_of<<<1, 1, 0, stream>>>(go, rounds);
  return cudaGetLastError();
}

// ---- streams
template <int N>
__global__ void add(float* x, float y) {
  x[threadIdx.x] += N * y;
}
// clang-format off
enum Wrong { RIGHT, KERNEL, LEGACY, OTHER, MEMSET, MEMCPY, MEMSET_ASYNC, MEMCPY_ASYNC, MALLOC_ASYNC, TO_SYMBOL,
             SYNCHRONIZE };
// clang-format on
__constant__ float factor;

extern "C" cudaError_t run_streams(float* x, int wrong, cudaStream_t stream) {
  const float y = 2.0f;
  float* scratch = nullptr;
  if (wrong == KERNEL) add<1><<<1, 4>>>(x, y);  // @KERNEL
  if (wrong == LEGACY) add<1><<<1, 4, 0, cudaStreamLegacy>>>(x, y);  // @LEGACY
  if (wrong == OTHER) add<1><<<1, 4, 0, cudaStream_t(0x50)>>>(x, y);  // @OTHER
  if (wrong == MEMSET) cudaMemset(x, 0, 4);  // @MEMSET
  if (wrong == MEMCPY) cudaMemcpy(x, x + 1, 4, cudaMemcpyDeviceToDevice);  // @MEMCPY
  if (wrong == MEMSET_ASYNC) cudaMemsetAsync(x, 0, 4);  // @MEMSET_ASYNC
  if (wrong == MEMCPY_ASYNC) cudaMemcpyAsync(x, x + 1, 4, cudaMemcpyDeviceToDevice);  // @MEMCPY_ASYNC
  if (wrong == MALLOC_ASYNC) cudaMallocAsync(&scratch, 4, 0);  // @MALLOC_ASYNC
  if (wrong == TO_SYMBOL) cudaMemcpyToSymbol(factor, &y, sizeof y);  // @TO_SYMBOL
  if (wrong == SYNCHRONIZE) cudaDeviceSynchronize();  // @SYNCHRONIZE

  if (cudaError_t error = cudaMalloc(&scratch, 100)) return error;
  if (cudaError_t error = cudaFree(scratch)) return error;
  if (cudaError_t error = cudaMallocAsync(&scratch, 16, stream)) return error;
  cudaMemsetAsync(scratch, 0, 16, stream);
  add<1><<<1, 4, 0, stream>>>(scratch, y);
  cudaMemcpyAsync(x, scratch, 16, cudaMemcpyDeviceToDevice, stream);
  auto kernel = add<2>;
  kernel<<<1, 4, 0, stream>>>(x, y);
  add<3><<<1, 2000, 0, stream>>>(x, y);  // refused: 2000 threads
  cudaStreamSynchronize(stream);
  return cudaFreeAsync(scratch, stream);
}
