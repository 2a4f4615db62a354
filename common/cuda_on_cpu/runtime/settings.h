// How kernels run: what Python can configure, and the limits of the emulated GPU.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cuda_on_cpu {

enum class Order { forward,
                   reverse,
                   random };

struct Settings {
  Order order = Order::forward;
  uint64_t seed = 0;
  bool eager_copies = false;
  int threads = 0;  // OS threads; 0: one per core
  int arch = 80;    // compute capability, 80 for sm_80
  double limit = 0;  // seconds for the kernels of one call of a launcher; 0: for ever
  bool count = false;  // keep what launches of a check build took of shared memory, see Counts
};

/// Limits from the CUDA C++ programming guide, "Technical Specifications per Compute Capability".
struct Architecture {
  int number;
  size_t shared_per_block;  // with cudaFuncSetAttribute; without it, 48 KiB for every architecture
  size_t shared_per_multiprocessor;
  int threads_per_multiprocessor;
  int blocks_per_multiprocessor;
  int multiprocessors;  // of one GPU: T4, A100, RTX 3090, RTX 4090, H100, B200, RTX PRO 6000
};

constexpr size_t kSharedWithoutAsking = 48 * 1024;
constexpr unsigned kMaxThreads = 1024;

/// The settings that hold now. Read and changed only under the launch lock.
Settings& settings();

const Architecture& architecture(int number);

}  // namespace cuda_on_cpu
