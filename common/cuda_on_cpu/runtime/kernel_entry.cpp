// What kernels call in the runtime, except for warps, copies and tensor cores.
#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "worker.h"

namespace cuda_on_cpu {
namespace {

/// For what goes wrong in host code, where there is no launch to report it.
[[noreturn]] void end_process(const std::string& what, const char* file, int line) {
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
  std::abort();
}

}  // namespace

void* Worker::shared_variable(int site, const SharedDeclaration& declaration, const char* file,
                              int line) {
  void* address = shared.variable(site, declaration, file, line);
  size_t static_bytes = shared.static_bytes(), dynamic_bytes = block.dynamic_shared_bytes;
  if (address && static_bytes <= kSharedWithoutAsking &&
      static_bytes + dynamic_bytes <= launch->max_shared_bytes) {
    return address;
  }
  std::string what;
  if (!address || static_bytes > kSharedWithoutAsking) {
    what = format("with '%s' (%zu bytes) the kernel declares %zu bytes, and static shared memory is "
                  "at most %zu; use extern __shared__ for more",
                  declaration.name, declaration.bytes, static_bytes, kSharedWithoutAsking);
  } else {
    what = format("%zu bytes static and %zu dynamic, and a block has at most %zu%s", static_bytes,
                  dynamic_bytes, launch->max_shared_bytes,
                  launch->max_shared_bytes == kSharedWithoutAsking
                      ? " (more with cudaFuncAttributeMaxDynamicSharedMemorySize)"
                      : format(" on sm_%d", launch->arch.number).c_str());
  }
  fail(cudaErrorInvalidConfiguration, "too much shared memory: " + what,
       format("%s:%d", file, line));
}

int barrier(BarrierResult wanted, bool predicate, const char* file, int line) {
  return this_worker->barrier(wanted, predicate, file, line);
}

void named_barrier(int id, int threads, bool waits, const char* file, int line) {
  this_worker->named_barrier(id, threads, waits, file, line);
}

void yield() {
  if (current_thread) this_worker->yield(__builtin_return_address(0));
}

void fence() {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  if (current_thread && this_worker->launch->global) this_worker->launch->global->fence();
}

void fail(const char* what, const char* file, int line) { this_worker->fail(what, file, line); }

void assertion_failed(const char* condition, const char* file, int line) {
  std::string what = format("assertion failed: %s", condition);
  if (current_thread) this_worker->fail(cudaErrorAssert, what, format("%s:%d", file, line));
  end_process(what, file, line);
}

void gpu_only(const char* instruction, const char* file, int line) {
  std::string what = format("%s is for a GPU only", instruction);
  if (current_thread) this_worker->fail(cudaErrorNotSupported, what, format("%s:%d", file, line));
  end_process(what, file, line);
}

void* shared_variable(int* site, const SharedDeclaration& declaration, const char* file, int line) {
  static std::atomic<int> sites{0};
  int number = __atomic_load_n(site, __ATOMIC_RELAXED);
  if (number == 0) {
    int expected = 0, fresh = ++sites;
    bool first = __atomic_compare_exchange_n(site, &expected, fresh, false, __ATOMIC_RELAXED,
                                             __ATOMIC_RELAXED);
    number = first ? fresh : expected;
  }
  return this_worker->shared_variable(number, declaration, file, line);
}

void name_shared_part(const char* name, const void* first, size_t element_bytes, const size_t* extents, size_t count) {
  this_worker->shared.name_part(name, first, element_bytes, extents, count);
}

void name_dynamic_shared(const char* name, size_t element_bytes) {
  this_worker->shared.name_dynamic(name, element_bytes);
}

}  // namespace cuda_on_cpu
