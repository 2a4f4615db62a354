// Looks at one memory access of a kernel in the check build.
#pragma once

#include <cstddef>

#include "race_check.h"

namespace cuda_on_cpu {

/// Reports what is wrong with the access, if anything; then it does not return. `pc` is the return
/// address of the call-back. Accesses of host code, and to a thread's own stack, are let through.
void check_access(const void* address, size_t bytes, Access access, const void* pc);

}  // namespace cuda_on_cpu
