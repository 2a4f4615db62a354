// Device math. The C library's functions come with <math.h>; here is what only CUDA has.
//
// The fast intrinsics (__expf, ...) give the exactly rounded or C-library result: a GPU's differ
// from it in the last bits. A kernel that depends on those bits is wrong on both.
#pragma once

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime_abi.h"

// ---- float
// glibc has functions of these names for itself; hence macros.
#define __expf expf
#define __logf logf
#define __log2f log2f
#define __log10f log10f
#define __powf powf
#define __sinf sinf
#define __cosf cosf
#define __tanf tanf
#define __tanhf tanhf
#define __exp10f cuda_on_cpu_exp10f
#define __sincosf cuda_on_cpu_sincosf
static inline float cuda_on_cpu_exp10f(float x) { return powf(10.0f, x); }
static inline void cuda_on_cpu_sincosf(float x, float* sine, float* cosine) {
  *sine = sinf(x);
  *cosine = cosf(x);
}
static inline float __fdividef(float x, float y) { return x / y; }
static inline float fdividef(float x, float y) { return x / y; }
static inline float rsqrtf(float x) { return float(1.0 / sqrt(double(x))); }
static inline double rsqrt(double x) { return 1.0 / sqrt(x); }
static inline float rsqrt(float x) { return rsqrtf(x); }
static inline float __saturatef(float x) {
  return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f;
}  // NaN: 0
static inline float normcdff(float x) { return 0.5f * erfcf(-0.70710678118654752f * x); }
static inline float sinpif(float x) {
  return float(sin(3.14159265358979323846 * fmod(double(x), 2.0)));
}
static inline float cospif(float x) {
  return float(cos(3.14159265358979323846 * fmod(double(x), 2.0)));
}

static inline float __fadd_rn(float x, float y) { return x + y; }
static inline float __fsub_rn(float x, float y) { return x - y; }
static inline float __fmul_rn(float x, float y) { return x * y; }
static inline float __fdiv_rn(float x, float y) { return x / y; }
static inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
static inline float __frcp_rn(float x) { return 1.0f / x; }
static inline float __fsqrt_rn(float x) { return sqrtf(x); }
static inline float __frsqrt_rn(float x) { return rsqrtf(x); }
static inline double __dadd_rn(double x, double y) { return x + y; }
static inline double __dmul_rn(double x, double y) { return x * y; }
static inline double __fma_rn(double x, double y, double z) { return fma(x, y, z); }

// ---- min and max: unlike fminf, an integer overload for every pair that CUDA has
#define CUDA_ON_CPU_MIN_MAX(T)                                      \
  static inline constexpr T min(T x, T y) { return y < x ? y : x; } \
  static inline constexpr T max(T x, T y) { return x < y ? y : x; }
#define CUDA_ON_CPU_MIN_MAX_MIXED(T, S, U)                                                \
  static inline constexpr U min(T x, S y) {                                               \
    return static_cast<U>(y) < static_cast<U>(x) ? static_cast<U>(y) : static_cast<U>(x); \
  }                                                                                       \
  static inline constexpr U max(T x, S y) {                                               \
    return static_cast<U>(x) < static_cast<U>(y) ? static_cast<U>(y) : static_cast<U>(x); \
  }                                                                                       \
  static inline constexpr U min(S x, T y) {                                               \
    return static_cast<U>(y) < static_cast<U>(x) ? static_cast<U>(y) : static_cast<U>(x); \
  }                                                                                       \
  static inline constexpr U max(S x, T y) {                                               \
    return static_cast<U>(x) < static_cast<U>(y) ? static_cast<U>(y) : static_cast<U>(x); \
  }
CUDA_ON_CPU_MIN_MAX(int)
CUDA_ON_CPU_MIN_MAX(unsigned)
CUDA_ON_CPU_MIN_MAX(long)
CUDA_ON_CPU_MIN_MAX(unsigned long)
CUDA_ON_CPU_MIN_MAX(long long)
CUDA_ON_CPU_MIN_MAX(unsigned long long)
CUDA_ON_CPU_MIN_MAX_MIXED(int, unsigned, unsigned)
CUDA_ON_CPU_MIN_MAX_MIXED(long, unsigned long, unsigned long)
CUDA_ON_CPU_MIN_MAX_MIXED(long long, unsigned long long, unsigned long long)
#undef CUDA_ON_CPU_MIN_MAX
#undef CUDA_ON_CPU_MIN_MAX_MIXED
static inline float min(float x, float y) { return fminf(x, y); }
static inline float max(float x, float y) { return fmaxf(x, y); }
static inline double min(double x, double y) { return fmin(x, y); }
static inline double max(double x, double y) { return fmax(x, y); }
static inline double min(float x, double y) { return fmin(x, y); }
static inline double max(float x, double y) { return fmax(x, y); }
static inline double min(double x, float y) { return fmin(x, y); }
static inline double max(double x, float y) { return fmax(x, y); }

static inline int __vimax3_s32(int x, int y, int z) { return max(max(x, y), z); }
static inline int __vimin3_s32(int x, int y, int z) { return min(min(x, y), z); }
static inline unsigned __vimax3_u32(unsigned x, unsigned y, unsigned z) { return max(max(x, y), z); }
static inline unsigned __vimin3_u32(unsigned x, unsigned y, unsigned z) { return min(min(x, y), z); }
/// Of each half.
static inline unsigned __vmaxu2(unsigned x, unsigned y) {
  return max(x & 0xffff0000u, y & 0xffff0000u) | max(x & 0xffffu, y & 0xffffu);
}

// ---- bits
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __ffsll(long long x) { return __builtin_ffsll(x); }
static inline unsigned __brev(unsigned x) {
  x = __builtin_bswap32(x);
  x = (x >> 4 & 0x0f0f0f0fu) | (x & 0x0f0f0f0fu) << 4;
  x = (x >> 2 & 0x33333333u) | (x & 0x33333333u) << 2;
  return (x >> 1 & 0x55555555u) | (x & 0x55555555u) << 1;
}
static inline unsigned long long __brevll(unsigned long long x) {
  return (unsigned long long)__brev(unsigned(x)) << 32 | __brev(unsigned(x >> 32));
}
/// Picks four of the eight bytes of y:x, one by each nibble of `selector`.
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  uint64_t bytes = uint64_t(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    unsigned pick = selector >> 4 * i & 0xf, byte = unsigned(bytes >> 8 * (pick & 7)) & 0xff;
    if (pick & 8) byte = byte & 0x80 ? 0xff : 0;  // the nibble's top bit selects the sign
    result |= byte << 8 * i;
  }
  return result;
}
static inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return unsigned((uint64_t(high) << 32 | low) << (shift & 31) >> 32);
}
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return unsigned((uint64_t(high) << 32 | low) >> (shift & 31));
}
static inline int __mul24(int x, int y) { return ((x << 8) >> 8) * ((y << 8) >> 8); }
static inline int __mulhi(int x, int y) { return int(int64_t(x) * y >> 32); }
static inline unsigned __umulhi(unsigned x, unsigned y) { return unsigned(uint64_t(x) * y >> 32); }

// ---- the same bits as another type
#define CUDA_ON_CPU_BIT_CAST(name, From, To)  \
  static inline To name(From from) {          \
    To to;                                    \
    __builtin_memcpy(&to, &from, sizeof(to)); \
    return to;                                \
  }
CUDA_ON_CPU_BIT_CAST(__float_as_int, float, int)
CUDA_ON_CPU_BIT_CAST(__float_as_uint, float, unsigned)
CUDA_ON_CPU_BIT_CAST(__int_as_float, int, float)
CUDA_ON_CPU_BIT_CAST(__uint_as_float, unsigned, float)
CUDA_ON_CPU_BIT_CAST(__double_as_longlong, double, long long)
CUDA_ON_CPU_BIT_CAST(__longlong_as_double, long long, double)
#undef CUDA_ON_CPU_BIT_CAST

// ---- conversions; _rn rounds half to even, _rz towards zero
static inline int __float2int_rn(float x) { return int(nearbyintf(x)); }
static inline int __float2int_rz(float x) { return int(x); }
static inline int __float2int_rd(float x) { return int(floorf(x)); }
static inline int __float2int_ru(float x) { return int(ceilf(x)); }
static inline unsigned __float2uint_rn(float x) { return unsigned(nearbyintf(x)); }
static inline unsigned __float2uint_rz(float x) { return unsigned(x); }
static inline float __int2float_rn(int x) { return float(x); }
static inline float __uint2float_rn(unsigned x) { return float(x); }
static inline float __ll2float_rn(long long x) { return float(x); }
static inline float __double2float_rn(double x) { return float(x); }

// ---- loads and stores with cache hints
template <class T>
inline T __ldg(const T* address) {
  return *address;
}
template <class T>
inline T __ldcg(const T* address) {
  return *address;
}
template <class T>
inline T __ldcs(const T* address) {
  return *address;
}
template <class T>
inline void __stcg(T* address, T value) {
  *address = value;
}
template <class T>
inline void __stcs(T* address, T value) {
  *address = value;
}
