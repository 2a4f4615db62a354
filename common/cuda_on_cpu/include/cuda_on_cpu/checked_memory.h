// In a check build, memcpy, memset and memmove have to be seen like every other access. The
// compilers leave them to the sanitizer's library, so here these names are bound to the runtime's
// versions.
#pragma once

#include "runtime_abi.h"

#if CUDA_ON_CPU_CHECKED
#include <string.h>

#if defined(__APPLE__)
#define CUDA_ON_CPU_SYMBOL(name) __asm__("_" name)
#else
#define CUDA_ON_CPU_SYMBOL(name) __asm__(name)
#endif
extern "C" {
extern decltype(memcpy) memcpy CUDA_ON_CPU_SYMBOL("cuda_on_cpu_memcpy");
extern decltype(memmove) memmove CUDA_ON_CPU_SYMBOL("cuda_on_cpu_memmove");
extern decltype(memset) memset CUDA_ON_CPU_SYMBOL("cuda_on_cpu_memset");
}
#undef CUDA_ON_CPU_SYMBOL
#endif
