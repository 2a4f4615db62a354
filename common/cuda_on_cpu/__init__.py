"""Running CUDA kernels without a GPU.

A `.cu` file is rewritten a little (`rewrite`), compiled by g++ or clang against the headers in
`INCLUDE`, and linked with a runtime library that is built once from `RUNTIME_SOURCES`. The threads
of a block are fibers on one OS thread; barriers, warp collectives, tensor-core and asynchronous-copy
wrappers behave as on a GPU, and mistakes become errors that name kernel, block, thread, file, line.

    fast build    compile with FAST_FLAGS:  right results; errors of launches, streams, barriers,
                  collectives, stack overflows, wild pointers, time limits
    check build   compile with CHECK_FLAGS: also races; uninitialised, out-of-range and misaligned accesses

The check build uses the call-backs that the compiler inserts for its thread and alignment sanitizers.
The runtime implements them, so the sanitizers' own libraries must not be linked (compile first, then link without
-fsanitize=thread).

What it cannot do:

* textures, cooperative groups, launches from kernels; of Hopper, fences are not checked;
* a kernel that spins on a plain or volatile variable until another thread writes it never ends, or
  fails at its time limit (spinning with atomicCAS is fine);
* registers are not counted, so neither __launch_bounds__ nor occupancy limits them;
* races between blocks are not detected after the first __threadfence() of a launch, nor in tensors
  over 4 MiB. Threads that write the same value to one place are reported as a race too.
"""

from common.cuda_on_cpu.rewriter import RewriteError, rewrite
from common.cuda_on_cpu.runtime import (
    CHECK_FLAGS,
    FAST_FLAGS,
    INCLUDE,
    RUNTIME_FLAGS,
    RUNTIME_SOURCES,
    Runtime,
)

__all__ = [
    "CHECK_FLAGS",
    "FAST_FLAGS",
    "INCLUDE",
    "RUNTIME_FLAGS",
    "RUNTIME_SOURCES",
    "RewriteError",
    "Runtime",
    "rewrite",
]
