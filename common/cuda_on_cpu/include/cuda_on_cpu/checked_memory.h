// In a check build, memcpy, memset and memmove have to be seen like every other access. clang calls
// __tsan_memcpy for them; g++ does not, so there these names are bound to the runtime's versions.
#pragma once

#include "runtime_abi.h"

#if CUDA_ON_CPU_CHECKED && defined(__GNUC__) && !defined(__clang__)
#include <string.h>

extern "C" {
extern decltype(memcpy) memcpy __asm__("cuda_on_cpu_memcpy");
extern decltype(memmove) memmove __asm__("cuda_on_cpu_memmove");
extern decltype(memset) memset __asm__("cuda_on_cpu_memset");
}
#endif
