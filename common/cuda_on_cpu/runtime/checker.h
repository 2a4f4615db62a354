// Looks at one memory access of a kernel in the check build.
#pragma once

#include <cstddef>
#include <string>

#include "race_check.h"

namespace cuda_on_cpu {

/// Reports what is wrong with the access, if anything; then it does not return. `pc` is the return
/// address of the call-back. Accesses of host code, and to a thread's own stack, are let through.
void check_access(const void* address, size_t bytes, Access access, const void* pc);

/// Reports a write of these bytes of shared memory that nothing orders before what the running thread does at `pc`.
void check_after_write(const void* address, size_t bytes, const void* pc);

/// Reports that a kernel `verb`s ("reads") an object of a type, named by the compiler, at an address of shared or
/// global memory that is not a multiple of `alignment`. A GPU faults there.
void check_alignment(const void* address, size_t alignment, const char* verb, const std::string& type, const void* pc);

/// Where in shared or global memory an address is, such as "tensor 'k' at byte 20"; "" if that is not known.
std::string show_address(const void* address);

}  // namespace cuda_on_cpu
