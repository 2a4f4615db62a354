// What launchers need to know of a GPU or ask of it, asked once for each GPU.
#pragma once
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

// Lets a kernel have this many bytes of dynamic shared memory, which above 48 KiB has to be asked for. An error: a block
// on this GPU cannot have as many.
template <auto kernel, int BYTES>
inline cudaError_t allow_shared_memory() {
  static std::atomic<uint64_t> allowed{0};  // bit i: on GPU i
  int gpu;
  cudaError_t error = cudaGetDevice(&gpu);
  if (error != cudaSuccess || (allowed.load() >> gpu & 1)) return error;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES);
  if (error == cudaSuccess) allowed |= uint64_t(1) << gpu;
  return error;
}

// How many SMs the current GPU has.
inline cudaError_t count_sms(int* sms) {
  static std::atomic<int> known[64];  // by GPU; 0: not asked yet
  int gpu;
  cudaError_t error = cudaGetDevice(&gpu);
  if (error != cudaSuccess) return error;
  if (!(*sms = known[gpu].load())) {
    error = cudaDeviceGetAttribute(sms, cudaDevAttrMultiProcessorCount, gpu);
    if (error == cudaSuccess) known[gpu] = *sms;
  }
  return error;
}
