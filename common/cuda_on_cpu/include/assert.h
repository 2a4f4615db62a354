// assert() in a kernel is an error of the launch, with file and line; in host code it ends the
// process. Like the C library's, this header may be included again after NDEBUG has changed: no
// guard.
#include "cuda_on_cpu/runtime_abi.h"

#undef assert
#ifdef NDEBUG
#define assert(condition) ((void)0)
#else
#define assert(condition)                 \
  (static_cast<bool>(condition) ? (void)0 \
                                : ::cuda_on_cpu::assertion_failed(#condition, __FILE__, __LINE__))
#endif
