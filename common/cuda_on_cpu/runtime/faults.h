// Faults in a kernel (a wild pointer, a stack overflow, a division by zero) become errors of the launch
// instead of the end of the process.
#pragma once

#include <csignal>
#include <memory>

namespace cuda_on_cpu {

constexpr int kDivisionFault = SIGFPE;

/// While this exists, faults in fibers are caught. For the launching thread, under the launch lock.
class FaultHandlers {
 public:
  FaultHandlers();
  ~FaultHandlers();
  FaultHandlers(const FaultHandlers&) = delete;
};

/// A stack for the handler, since the fiber's own may be what overflowed. One for each worker.
class FaultStack {
 public:
  FaultStack();
  ~FaultStack();
  FaultStack(const FaultStack&) = delete;

 private:
  stack_t previous_;
};

}  // namespace cuda_on_cpu
