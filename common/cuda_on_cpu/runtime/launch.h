// One launch of a kernel: what all workers that run its blocks share.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>

#include "../include/cuda_runtime.h"
#include "global_memory.h"
#include "settings.h"

namespace cuda_on_cpu {

struct Launch {
  const LaunchConfig& config;
  const LaunchSite& site;
  ThreadBody body;
  void* argument;
  Settings settings;
  const Architecture& arch;
  size_t max_shared_bytes;  // static and dynamic together

  uint64_t blocks = 0;
  std::atomic<uint64_t> next_block{0};
  GlobalMemory* global = nullptr;  // null unless this is a check build with registered tensors

  std::atomic<bool> failed{false};

  /// Keeps the first error of the launch; the blocks not yet begun will not run.
  void fail(cudaError_t code, std::string text);

  std::mutex error_lock;
  cudaError_t error = cudaSuccess;
  std::string error_text;
};

/// printf into a std::string.
std::string format(const char* pattern, ...) __attribute__((format(printf, 1, 2)));
std::string show(const uint3& index);

/// A code address as {library+0xoffset}; Python turns it into file:line with the debug information.
std::string show_place(const void* pc);

}  // namespace cuda_on_cpu
