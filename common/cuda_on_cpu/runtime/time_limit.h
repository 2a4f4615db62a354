// The end of a kernel that does not end by itself.
#pragma once

#include "launch.h"
#include "launcher_call.h"

namespace cuda_on_cpu {

/// While this exists, the launch has what is left of the time that its settings give to all kernels of one call. After
/// that, it is overdue, and its workers get a signal every few milliseconds; faults.cpp has the handler. For the
/// launching thread, under the launch lock.
class TimeLimit {
 public:
  TimeLimit(Launch& launch, LauncherCall& call);
  ~TimeLimit();
  TimeLimit(const TimeLimit&) = delete;

 private:
  const bool limited_;
  LauncherCall& call_;
  double began_ = 0;
};

/// In the child of a fork the thread that watches does not exist; forget it.
void forget_watchdog();

}  // namespace cuda_on_cpu
