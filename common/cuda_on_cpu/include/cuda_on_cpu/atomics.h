// atomicAdd and its family. Only the types that CUDA accepts: what compiles here compiles with
// nvcc.
#pragma once

#include <type_traits>

#include "runtime_abi.h"

namespace cuda_on_cpu {

template <class T, class... Allowed>
inline constexpr bool is_one_of = (std::is_same_v<T, Allowed> || ...);

/// Set to true by float16.h for the half types, which atomicAdd takes too.
template <class T>
inline constexpr bool is_half = false;

/// Keeps a parameter out of template deduction: in atomicAdd(&x, 1) only x says the type.
template <class T>
struct TypeOf {
  using type = T;
};
template <class T>
using Value = typename TypeOf<T>::type;

/// *address = update(*address) in one indivisible step; returns what was there before.
template <class T, class Update>
inline T atomic_update(T* address, Update update) {
  using Bits = std::conditional_t<sizeof(T) == 2, uint16_t,
                                  std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;
  Bits* target = reinterpret_cast<Bits*>(address);
  Bits before = __atomic_load_n(target, __ATOMIC_RELAXED), after;
  T value, updated;
  do {
    __builtin_memcpy(static_cast<void*>(&value), &before, sizeof(T));
    updated = update(value);
    __builtin_memcpy(&after, static_cast<void*>(&updated), sizeof(T));
  } while (!__atomic_compare_exchange_n(target, &before, after, false, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED));
  return value;
}

template <class T>
inline constexpr bool is_atomic_integer =
    is_one_of<T, int, unsigned, long long, unsigned long long>;

}  // namespace cuda_on_cpu

template <class T>
inline T atomicAdd(T* address, cuda_on_cpu::Value<T> value) {
  using namespace cuda_on_cpu;
  static_assert(is_one_of<T, int, unsigned, unsigned long long, float, double> || is_half<T>,
                "CUDA has no atomicAdd for this type");
  if constexpr (std::is_integral_v<T>) {
    return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
  } else {
    return atomic_update(address, [value](T old) { return T(old + value); });
  }
}

template <class T>
inline T atomicSub(T* address, cuda_on_cpu::Value<T> value) {
  static_assert(cuda_on_cpu::is_one_of<T, int, unsigned>, "CUDA has no atomicSub for this type");
  return __atomic_fetch_sub(address, value, __ATOMIC_RELAXED);
}

template <class T>
inline T atomicExch(T* address, cuda_on_cpu::Value<T> value) {
  static_assert(cuda_on_cpu::is_one_of<T, int, unsigned, unsigned long long, float>,
                "CUDA has no atomicExch for this type");
  return cuda_on_cpu::atomic_update(address, [value](T) { return value; });
}

template <class T>
inline T atomicCAS(T* address, cuda_on_cpu::Value<T> expected, cuda_on_cpu::Value<T> desired) {
  static_assert(cuda_on_cpu::is_one_of<T, int, unsigned, unsigned long long, unsigned short>,
                "CUDA has no atomicCAS for this type");
  T found = expected;
  bool swapped = __atomic_compare_exchange_n(address, &found, desired, false, __ATOMIC_RELAXED,
                                             __ATOMIC_RELAXED);
  if (!swapped) cuda_on_cpu::yield();  // a lock is taken: let the thread that holds it run
  return found;
}

template <class T>
inline T atomicMin(T* address, cuda_on_cpu::Value<T> value) {
  static_assert(cuda_on_cpu::is_atomic_integer<T>, "CUDA has no atomicMin for this type");
  return cuda_on_cpu::atomic_update(address, [value](T old) { return value < old ? value : old; });
}

template <class T>
inline T atomicMax(T* address, cuda_on_cpu::Value<T> value) {
  static_assert(cuda_on_cpu::is_atomic_integer<T>, "CUDA has no atomicMax for this type");
  return cuda_on_cpu::atomic_update(address, [value](T old) { return value > old ? value : old; });
}

template <class T>
inline T atomicAnd(T* address, cuda_on_cpu::Value<T> value) {
  static_assert(cuda_on_cpu::is_atomic_integer<T>, "CUDA has no atomicAnd for this type");
  return __atomic_fetch_and(address, value, __ATOMIC_RELAXED);
}

template <class T>
inline T atomicOr(T* address, cuda_on_cpu::Value<T> value) {
  static_assert(cuda_on_cpu::is_atomic_integer<T>, "CUDA has no atomicOr for this type");
  return __atomic_fetch_or(address, value, __ATOMIC_RELAXED);
}

template <class T>
inline T atomicXor(T* address, cuda_on_cpu::Value<T> value) {
  static_assert(cuda_on_cpu::is_atomic_integer<T>, "CUDA has no atomicXor for this type");
  return __atomic_fetch_xor(address, value, __ATOMIC_RELAXED);
}

/// Counts 0, 1, ..., limit, 0, ...
static inline unsigned atomicInc(unsigned* address, unsigned limit) {
  return cuda_on_cpu::atomic_update(address,
                                    [limit](unsigned old) { return old >= limit ? 0 : old + 1; });
}

/// Counts limit, ..., 1, 0, limit, ...
static inline unsigned atomicDec(unsigned* address, unsigned limit) {
  return cuda_on_cpu::atomic_update(
      address, [limit](unsigned old) { return old == 0 || old > limit ? limit : old - 1; });
}
