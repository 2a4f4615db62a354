// Results that blocks leave for each other within a launch, with no fence: beside each value is a tag, in the same
// word, which its place did not have before. A word comes as a whole, so who needs a value looks at its place until the
// tag is there.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#ifndef DEVICE
#define DEVICE __device__ __forceinline__
#endif

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
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
  } else {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
  }
#else
  __atomic_store_n(to, word, __ATOMIC_RELAXED);
#endif
}

// Neighbouring values, as they were when they were asked for: N words, or without tags N values, of 8 bytes together or
// of some 16.
template <typename T, int N, bool TAGGED = true>
struct Values {
  using Source = Word<T>;
  static constexpr bool SHORT = sizeof(T) == 2;
  static_assert(N * sizeof(Source) % 16 == 0 || N * sizeof(Source) == 8);
  Source words[N];

  DEVICE void ask(const Source* from) {
#ifdef __CUDACC__
    if constexpr (SHORT && N == 2) {
      asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(from)
                   : "memory");
    } else if constexpr (SHORT) {
#pragma unroll
      for (int i = 0; i < N; i += 4)
        asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words[i]), "=r"(words[i + 1]), "=r"(words[i + 2]), "=r"(words[i + 3]) : "l"(from + i)
                     : "memory");
    } else {
#pragma unroll
      for (int i = 0; i < N; i += 2)
        asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(words[i]), "=l"(words[i + 1]) : "l"(from + i)
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
  DEVICE bool have(unsigned) const { return true; }
  DEVICE T operator[](int i) const { return values[i]; }
};

// Several of them, from at(0), at(1) and so on. All are on their way together.
template <typename T, int N, int COUNT>
struct Scattered {
  Values<T, N> of[COUNT];

  template <typename At>
  DEVICE void ask(At at) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) of[i].ask(at(i));
  }
  // Until all are there.
  template <typename At>
  DEVICE void wait(At at, unsigned tag) {
    while (true) {
      bool all = true;
#pragma unroll
      for (int i = 0; i < COUNT; ++i) all = all && of[i].have(tag);
      if (all) return;
      ask(at);
    }
  }
};
