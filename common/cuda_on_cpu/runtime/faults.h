// Faults in a kernel (a wild pointer, a stack overflow, a division by zero) become errors of the
// launch instead of the end of the process. So does a kernel that runs longer than it may.
#pragma once

#include <csignal>
#include <cstddef>

namespace cuda_on_cpu {

constexpr int kDivisionFault = SIGFPE;
constexpr int kInterrupt = SIGURG;  // ignored by default: one that comes too late does no harm

/// While this exists, faults in fibers are caught, and kInterrupt ends them if the launch is overdue. For the launching
/// thread, under the launch lock.
class FaultHandlers {
 public:
  FaultHandlers();
  ~FaultHandlers();
  FaultHandlers(const FaultHandlers&) = delete;
};

/// While this exists, the calling thread handles signals on `memory`: a fiber's own stack may be
/// what overflowed.
class SignalStack {
 public:
  static constexpr size_t kBytes = 64 * 1024;

  explicit SignalStack(char* memory);
  ~SignalStack();
  SignalStack(const SignalStack&) = delete;

 private:
  stack_t previous_;
};

}  // namespace cuda_on_cpu
