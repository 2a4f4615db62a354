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

class Worker;

/// Blocks that reach each other's shared memory.
struct Cluster {
  std::atomic<Worker*> members[16] = {};  // null: not running
  // Threads that have not returned, in the upper half; in the lower, how often these have come to the barrier.
  std::atomic<uint64_t> threads{0};

  void begin(uint64_t count) { threads = count << 32; }
  void arrive() { ++threads; }
  void leave(unsigned arrivals) { threads -= (uint64_t(1) << 32) + arrivals; }
  bool have_all_arrived(uint64_t times) const {
    const uint64_t now = threads;
    return (now & 0xffffffff) >= (now >> 32) * times;
  }
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
  unsigned team = 1;  // blocks that have to run at once: those of a cluster, or all of a cooperative launch
  std::atomic<unsigned> running_blocks{0}, idle_blocks{0};  // idle: where all threads wait
  std::vector<Cluster> clusters{};  // empty if a cluster is one block
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
