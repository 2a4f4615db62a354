// Results that blocks leave for each other within a launch, with no fence. Who needs one looks at its place until it is
// there, and knows so
//   by a tag    beside the value, in the same word, which its place did not have before: a word comes as a whole. The
//               place may be another GPU's memory
//   by value    as places are emptied: all bits set are a NaN that no result is. It takes no room, but a fence between
//               emptying and the next results
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#ifndef DEVICE
#define DEVICE __device__ __forceinline__
#endif

enum class Arrival { FENCED,  // by a meeting, or a launch, that makes all results visible
                     BY_VALUE,
                     BY_TAG };

template <typename T>
using Word = std::conditional_t<sizeof(T) == 2, uint32_t, uint64_t>;  // the value in the lower half

template <typename T>
union Bits {
  T value;
  std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t> bits;
};

template <typename T>
DEVICE void put_word(Word<T>* to, T value, unsigned tag) {
  const Bits<T> x = {value};
  const Word<T> word = Word<T>(tag) << 8 * sizeof(T) | x.bits;
#ifdef __CUDACC__
  if constexpr (sizeof(word) == 4) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
  } else {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
  }
#else
  __atomic_store_n(to, word, __ATOMIC_RELAXED);
#endif
}

// To a place that is empty.
template <typename T>
DEVICE void put_value(T* to, T value) {
  Bits<T> x = {value};
  using Whole = decltype(x.bits);
  if (x.bits == Whole(~0u)) x.bits ^= 1;  // another NaN
#ifdef __CUDACC__
  if constexpr (sizeof(T) == 2) {
    asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(to), "h"(x.bits) : "memory");
  } else {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(x.bits) : "memory");
  }
#else
  __atomic_store_n(reinterpret_cast<Whole*>(to), x.bits, __ATOMIC_RELAXED);
#endif
}
// Whether one of these results is not there yet.
template <typename T>
DEVICE bool some_empty(const uint4& x) {
  const auto most = [](uint32_t a, uint32_t b) { return sizeof(T) == 2 ? __vmaxu2(a, b) : max(a, b); };
  const uint32_t all = most(most(x.x, x.y), most(x.z, x.w));
  return sizeof(T) == 2 ? all >= 0xffff0000 || all << 16 >= 0xffff0000 : all == ~0u;
}
// 16 bytes of results as they are now; each of them comes as a whole.
DEVICE uint4 look_at(const void* from) {
  uint4 x;
#ifdef __CUDACC__
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from) : "memory");
#else
  cuda_on_cpu::yield();  // to the threads that it waits for
  const auto* words = static_cast<const uint32_t*>(from);
  x.x = __atomic_load_n(words, __ATOMIC_RELAXED), x.y = __atomic_load_n(words + 1, __ATOMIC_RELAXED);
  x.z = __atomic_load_n(words + 2, __ATOMIC_RELAXED), x.w = __atomic_load_n(words + 3, __ATOMIC_RELAXED);
#endif
  return x;
}

// A result, for those who know of it as ARRIVAL says.
template <Arrival ARRIVAL, typename T>
DEVICE void leave(void* to, int64_t i, T value, unsigned tag) {
  if constexpr (ARRIVAL == Arrival::BY_TAG) {
    put_word(static_cast<Word<T>*>(to) + i, value, tag);
  } else if constexpr (ARRIVAL == Arrival::BY_VALUE) {
    put_value(static_cast<T*>(to) + i, value);
  } else {
    static_cast<T*>(to)[i] = value;
  }
}

// N neighbouring values, as they were when they were asked for, or without tags N plain ones: one word, or as many as
// are a multiple of 16 bytes.
template <typename T, int N, bool TAGGED = true>
struct Values {
  using Source = Word<T>;
  static_assert(N * sizeof(Source) % 16 == 0 || N == 1);
  Source words[N];

  DEVICE void ask(const Source* from) {
#ifdef __CUDACC__
    if constexpr (N == 1 && sizeof(T) == 2) {
      asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(words[0]) : "l"(from) : "memory");
    } else if constexpr (N == 1) {
      asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(words[0]) : "l"(from) : "memory");
    } else if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int i = 0; i < N; i += 4)
        asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words[i]), "=r"(words[i + 1]), "=r"(words[i + 2]), "=r"(words[i + 3]) : "l"(from + i)
                     : "memory");
    } else {
#pragma unroll
      for (int i = 0; i < N; i += 2)
        asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(words[i]), "=l"(words[i + 1]) : "l"(from + i)
                     : "memory");
    }
#else
    cuda_on_cpu::yield();  // to the threads that it waits for
    for (int i = 0; i < N; ++i) words[i] = __atomic_load_n(from + i, __ATOMIC_RELAXED);
#endif
  }
  DEVICE bool have(unsigned tag) const {
    const Source expected = Source(tag) << 8 * sizeof(T);
    Source wrong = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) wrong |= words[i] ^ expected;
    return wrong >> 8 * sizeof(T) == 0;
  }
  // Until all of what was asked for is there.
  DEVICE void wait(const Source* from, unsigned tag) {
    while (!have(tag)) ask(from);
  }
  DEVICE T operator[](int i) const {
    Bits<T> x;
    x.bits = words[i];
    return x.value;
  }
};
template <typename T, int N>
struct alignas(N * sizeof(T)) Values<T, N, false> {
  using Source = T;
  T values[N];

  DEVICE void ask(const T* from) { *this = *reinterpret_cast<const Values*>(from); }
  DEVICE void wait(const T*, unsigned) {}
  DEVICE T operator[](int i) const { return values[i]; }
};
