// CUDA's vector types: one to four components, with CUDA's alignment, and their make_ functions.
#pragma once

#include "types.h"

#define CUDA_ON_CPU_VECTOR_TYPES(T, name, align2, align4) \
  struct name##1 { T x; };                                \
  struct alignas(align2) name##2 { T x, y; };             \
  struct name##3 { T x, y, z; };                          \
  struct alignas(align4) name##4 { T x, y, z, w; };       \
  CUDA_ON_CPU_VECTOR_MAKERS(T, name)

#define CUDA_ON_CPU_VECTOR_MAKERS(T, name)                                                    \
  static inline constexpr name##1 make_##name##1(T x) { return name##1 {x}; }                 \
  static inline constexpr name##2 make_##name##2(T x, T y) { return name##2 {x, y}; }         \
  static inline constexpr name##3 make_##name##3(T x, T y, T z) { return name##3 {x, y, z}; } \
  static inline constexpr name##4 make_##name##4(T x, T y, T z, T w) {                        \
    return name##4 {x, y, z, w};                                                              \
  }

CUDA_ON_CPU_VECTOR_TYPES(signed char, char, 2, 4)
CUDA_ON_CPU_VECTOR_TYPES(unsigned char, uchar, 2, 4)
CUDA_ON_CPU_VECTOR_TYPES(short, short, 4, 8)
CUDA_ON_CPU_VECTOR_TYPES(unsigned short, ushort, 4, 8)
CUDA_ON_CPU_VECTOR_TYPES(int, int, 8, 16)
CUDA_ON_CPU_VECTOR_TYPES(long long, longlong, 16, 16)
CUDA_ON_CPU_VECTOR_TYPES(unsigned long long, ulonglong, 16, 16)
CUDA_ON_CPU_VECTOR_TYPES(float, float, 8, 16)
CUDA_ON_CPU_VECTOR_TYPES(double, double, 16, 16)

// uint3 is in types.h already, because dim3 needs it.
struct uint1 {
  unsigned x;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
CUDA_ON_CPU_VECTOR_MAKERS(unsigned, uint)

#undef CUDA_ON_CPU_VECTOR_TYPES
#undef CUDA_ON_CPU_VECTOR_MAKERS
