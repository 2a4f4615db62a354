// One launch of a kernel: what all workers that run its blocks share.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "errors.h"
#include "global_memory.h"
#include "settings.h"

namespace cuda_on_cpu {

/// Where the instructions of a library are.
struct MachineCode {
  uintptr_t begin = 0, end = 0;
  bool contains(uintptr_t pc) const { return pc - begin < end - begin; }
};

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

  // For the time limit. Once overdue, every worker leaves its kernel as soon as it can.
  std::atomic<bool> overdue{false};
  MachineCode kernel_code{};  // of the kernel's library; known once overdue
  std::mutex workers_lock{};
  std::vector<pthread_t> workers{};  // that run blocks now

  /// Keeps the first error of the launch; the blocks not yet begun will not run.
  void fail(cudaError_t code, std::string text);

  std::mutex counts_lock{};
  std::string counts{};  // if settings.count; see cuda_on_cpu_take_counts

  std::mutex error_lock{};
  cudaError_t error = cudaSuccess;
  std::string error_text{};
};

/// Held while a kernel runs: one launch at a time, and it has all cores. Guards the settings too.
std::mutex& launch_lock();

/// cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes). Under the
/// lock.
void grant_dynamic_shared(const void* kernel, int bytes);

}  // namespace cuda_on_cpu
