// What launchers request from a GPU, once per GPU.
#pragma once
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

// Lets a kernel have BYTES of dynamic shared memory, which has to be requested above 48 KiB. Fails if a block on this
// GPU cannot have as much.
template <auto kernel, int BYTES>
inline cudaError_t allow_shared_memory() {
  static std::atomic<uint64_t> allowed{0};  // bit i: on GPU i
  int gpu;
  cudaError_t error = cudaGetDevice(&gpu);
  if (error != cudaSuccess || (allowed >> gpu & 1)) return error;
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
