// The runtime API that launchers use (cudaFuncSetAttribute, ...). Errors are in errors.cpp, memory
// in global_memory.cpp.
#include <algorithm>

#include "launch.h"
#include "launcher_call.h"

namespace cuda_on_cpu {

cudaError_t set_max_dynamic_shared(const void* kernel, int bytes) {
  std::lock_guard<std::mutex> guard(launch_lock());
  const Architecture& arch = current_architecture();
  if (bytes < 0 || size_t(bytes) > arch.shared_per_block) {
    set_host_error(cudaErrorInvalidValue,
                   format("too much shared memory: cudaFuncSetAttribute asks for %d bytes, and a "
                          "block on sm_%d has at most %zu",
                          bytes, arch.number, arch.shared_per_block));
    return cudaErrorInvalidValue;
  }
  grant_dynamic_shared(kernel, bytes);
  return cudaSuccess;
}

cudaError_t device_attribute(int* value, cudaDeviceAttr attribute) {
  std::lock_guard<std::mutex> guard(launch_lock());
  const Architecture& arch = current_architecture();
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
      *value = kMaxThreads;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = int(kSharedWithoutAsking);
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = int(arch.shared_per_block);
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = int(arch.shared_per_multiprocessor);
      break;
    case cudaDevAttrReservedSharedMemoryPerBlock:
      *value = arch.number >= 80 ? 1024 : 0;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = arch.threads_per_multiprocessor;
      break;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      *value = arch.blocks_per_multiprocessor;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = arch.multiprocessors;
      break;
    case cudaDevAttrMaxRegistersPerBlock:
      *value = 65536;
      break;
    case cudaDevAttrWarpSize:
      *value = 32;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = arch.number / 10;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = arch.number % 10;
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaSuccess;
}

int blocks_per_multiprocessor(int threads, size_t dynamic_shared_bytes) {
  std::lock_guard<std::mutex> guard(launch_lock());
  const Architecture& arch = current_architecture();
  if (threads <= 0 || threads > int(kMaxThreads)) return 0;
  size_t reserved = arch.number >= 80 ? 1024 : 0;
  size_t by_shared =
      arch.shared_per_multiprocessor / std::max<size_t>(dynamic_shared_bytes + reserved, 1);
  int by_threads = arch.threads_per_multiprocessor / ((threads + 31) / 32 * 32);
  return int(
      std::min<size_t>(by_shared, size_t(std::min(by_threads, arch.blocks_per_multiprocessor))));
}

}  // namespace cuda_on_cpu
