// The call-backs that gcc and clang insert with -fsanitize=thread, implemented here instead of by the
// sanitizer's library. Only the check builds of kernels call them.
//
// Each passes its return address, which is the place of the access in the kernel. Names that only
// one of the two compilers uses are marked.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "checker.h"
#include "worker.h"

using cuda_on_cpu::Access;
using cuda_on_cpu::check_access;

#define CALLBACK extern "C" __attribute__((visibility("default")))
#define CALLER __builtin_return_address(0)

// ---- plain accesses
#define ACCESSES(bytes)                                                                         \
  CALLBACK void __tsan_read##bytes(void* p) { check_access(p, bytes, Access::read, CALLER); }   \
  CALLBACK void __tsan_write##bytes(void* p) { check_access(p, bytes, Access::write, CALLER); } \
  CALLBACK void __tsan_unaligned_read##bytes(void* p) {                                         \
    check_access(p, bytes, Access::read, CALLER);                                               \
  }                                                                                             \
  CALLBACK void __tsan_unaligned_write##bytes(void* p) {                                        \
    check_access(p, bytes, Access::write, CALLER);                                              \
  }                                                                                             \
  CALLBACK void __tsan_volatile_read##bytes(void* p) {                                          \
    check_access(p, bytes, Access::read, CALLER);                                               \
  }                                                                                             \
  CALLBACK void __tsan_volatile_write##bytes(void* p) {                                         \
    check_access(p, bytes, Access::write, CALLER);                                              \
  }                                                                                             \
  CALLBACK void __tsan_unaligned_volatile_read##bytes(void* p) {                                \
    check_access(p, bytes, Access::read, CALLER);                                               \
  }                                                                                             \
  CALLBACK void __tsan_unaligned_volatile_write##bytes(void* p) {                               \
    check_access(p, bytes, Access::write, CALLER);                                              \
  }                                                                                             \
  CALLBACK void __tsan_read_write##bytes(void* p) { /* clang: x += 1 */                         \
    check_access(p, bytes, Access::read, CALLER);                                               \
    check_access(p, bytes, Access::write, CALLER);                                              \
  }                                                                                             \
  CALLBACK void __tsan_unaligned_read_write##bytes(void* p) {                                   \
    check_access(p, bytes, Access::read, CALLER);                                               \
    check_access(p, bytes, Access::write, CALLER);                                              \
  }
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)

CALLBACK void __tsan_read_range(void* p, size_t bytes) {
  check_access(p, bytes, Access::read, CALLER);
}  // gcc
CALLBACK void __tsan_write_range(void* p, size_t bytes) {
  check_access(p, bytes, Access::write, CALLER);
}  // gcc

#define COPY(name, function)                                      \
  CALLBACK void* name(void* to, const void* from, size_t bytes) { \
    check_access(from, bytes, Access::read, CALLER);              \
    check_access(to, bytes, Access::write, CALLER);               \
    return function(to, from, bytes);                             \
  }
#define FILL(name)                                        \
  CALLBACK void* name(void* to, int byte, size_t bytes) { \
    check_access(to, bytes, Access::write, CALLER);       \
    return std::memset(to, byte, bytes);                  \
  }
COPY(__tsan_memcpy, std::memcpy)  // newer clang
COPY(__tsan_memmove, std::memmove)
FILL(__tsan_memset)
COPY(cuda_on_cpu_memcpy, std::memcpy)  // through checked_memory.h
COPY(cuda_on_cpu_memmove, std::memmove)
FILL(cuda_on_cpu_memset)

// ---- functions that are not inlined: who called them
CALLBACK void __tsan_func_entry(void* return_address) {
  if (cuda_on_cpu::current_thread) cuda_on_cpu::this_worker->running().calls.push(return_address);
}
CALLBACK void __tsan_func_exit() {
  if (cuda_on_cpu::current_thread) cuda_on_cpu::this_worker->running().calls.pop();
}

// ---- bookkeeping of the sanitizer that means nothing here
CALLBACK void __tsan_init() {}
CALLBACK void __tsan_ignore_thread_begin() {}
CALLBACK void __tsan_ignore_thread_end() {}
CALLBACK void __tsan_vptr_read(void**) {}
CALLBACK void __tsan_vptr_update(void**, void*) {}
CALLBACK void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
CALLBACK void __tsan_atomic_signal_fence(int) {}

// ---- atomics: the memory order asked for is ignored and the strongest taken
#define ATOMIC_READ_MODIFY_WRITE(bits, T, name, function)                \
  CALLBACK T __tsan_atomic##bits##_##name(volatile T* p, T value, int) { \
    check_access(const_cast<T*>(p), sizeof(T), Access::atomic, CALLER);  \
    return function(p, value, __ATOMIC_SEQ_CST);                         \
  }
#define ATOMIC_COMPARE_EXCHANGE(bits, T, strength, weak)                                     \
  CALLBACK int __tsan_atomic##bits##_compare_exchange_##strength(volatile T* p, T* expected, \
                                                                 T desired, int, int) {      \
    check_access(const_cast<T*>(p), sizeof(T), Access::atomic, CALLER);                      \
    return __atomic_compare_exchange_n(p, expected, desired, weak, __ATOMIC_SEQ_CST,         \
                                       __ATOMIC_SEQ_CST);                                    \
  }
#define ATOMICS(bits, T)                                                                           \
  CALLBACK T __tsan_atomic##bits##_load(const volatile T* p, int) {                                \
    check_access(const_cast<T*>(p), sizeof(T), Access::atomic, CALLER);                            \
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                   \
  }                                                                                                \
  CALLBACK void __tsan_atomic##bits##_store(volatile T* p, T value, int) {                         \
    check_access(const_cast<T*>(p), sizeof(T), Access::atomic, CALLER);                            \
    __atomic_store_n(p, value, __ATOMIC_SEQ_CST);                                                  \
  }                                                                                                \
  ATOMIC_READ_MODIFY_WRITE(bits, T, exchange, __atomic_exchange_n)                                 \
  ATOMIC_READ_MODIFY_WRITE(bits, T, fetch_add, __atomic_fetch_add)                                 \
  ATOMIC_READ_MODIFY_WRITE(bits, T, fetch_sub, __atomic_fetch_sub)                                 \
  ATOMIC_READ_MODIFY_WRITE(bits, T, fetch_and, __atomic_fetch_and)                                 \
  ATOMIC_READ_MODIFY_WRITE(bits, T, fetch_or, __atomic_fetch_or)                                   \
  ATOMIC_READ_MODIFY_WRITE(bits, T, fetch_xor, __atomic_fetch_xor)                                 \
  ATOMIC_READ_MODIFY_WRITE(bits, T, fetch_nand, __atomic_fetch_nand)                               \
  ATOMIC_COMPARE_EXCHANGE(bits, T, strong, false)                                                  \
  ATOMIC_COMPARE_EXCHANGE(bits, T, weak, true)                                                     \
  CALLBACK T __tsan_atomic##bits##_compare_exchange_val(volatile T* p, T expected, T desired, int, \
                                                        int) {                                     \
    check_access(const_cast<T*>(p), sizeof(T), Access::atomic, CALLER);                            \
    __atomic_compare_exchange_n(p, &expected, desired, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
    return expected;                                                                               \
  }
ATOMICS(8, uint8_t)
ATOMICS(16, uint16_t)
ATOMICS(32, uint32_t)
ATOMICS(64, uint64_t)
