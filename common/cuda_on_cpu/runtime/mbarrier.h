// What copies and stores to a cluster tell an mbarrier.
#pragma once

#include "worker.h"

namespace cuda_on_cpu {

/// Bytes have landed, or were sent by another block of the cluster. Returns what is wrong, or null.
const char* count_bytes(uint64_t* barrier, unsigned bytes);

/// Fails unless `barrier` is an mbarrier of the running block that is initialised; in the check build also if nothing
/// orders the init and the running thread's operation, which is at `pc`.
void check_mbarrier(const uint64_t* barrier, const char* operation, const void* pc, const char* file, int line);

/// What it waits for, such as "phase 1 misses 0 of 1 arrivals and 512 bytes".
std::string show_mbarrier(const uint64_t* barrier);

}  // namespace cuda_on_cpu
