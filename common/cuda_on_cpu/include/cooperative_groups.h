#error \
    "cooperative_groups.h is not available on the CPU: use the built-ins and the wrappers in ptx.cuh"
