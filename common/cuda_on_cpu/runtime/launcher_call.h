// One call of a launcher by Python: the stream that it was given, and what it did.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "../include/cuda_runtime.h"
#include "settings.h"

namespace cuda_on_cpu {

struct LauncherCall {
  cudaStream_t stream = nullptr;  // null: called without one, or no call
  double seconds = 0;  // that its kernels ran
  std::vector<const char*> kernels;  // as written before <<<; literals of its library
  size_t allocated_bytes = 0;
  std::string counts;  // see cuda_on_cpu_take_counts
};

/// The call that the calling thread is in or, until the next one begins, was in.
LauncherCall& launcher_call();

/// 90 while the calling thread calls functions of a source that is for sm_90a; 0: for any GPU.
int& arch_of_source();

/// The GPU whose limits hold for the calling thread. Under the launch lock.
const Architecture& current_architecture();

/// A handle that no other call was given.
cudaStream_t fresh_stream();

}  // namespace cuda_on_cpu
