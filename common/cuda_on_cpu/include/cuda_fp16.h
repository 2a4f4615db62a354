// __half, __half2 and the intrinsics that carry this format in their name.
#pragma once

#include "cuda_runtime.h"
//
#include "cuda_on_cpu/float16.h"

using __half = cuda_on_cpu::Float16<cuda_on_cpu::Binary16>;
using __half2 = cuda_on_cpu::Float16x2<cuda_on_cpu::Binary16>;
using half = __half;
using half2 = __half2;

// ---- one value
static inline float __half2float(__half h) { return float(h); }
static inline __half __float2half(float x) { return x; }
static inline __half __float2half_rn(float x) { return x; }
static inline __half __float2half_rz(float x) {
  return __half::of_bits(cuda_on_cpu::Binary16::encode_toward_zero(x));
}
static inline __half __double2half(double x) { return x; }
static inline __half __int2half_rn(int x) { return x; }
static inline __half __uint2half_rn(unsigned x) { return x; }
static inline int __half2int_rn(__half h) { return __float2int_rn(float(h)); }
static inline int __half2int_rz(__half h) { return __float2int_rz(float(h)); }
static inline unsigned short __half_as_ushort(__half h) { return h.bits; }
static inline short __half_as_short(__half h) { return short(h.bits); }
static inline __half __ushort_as_half(unsigned short bits) { return __half::of_bits(bits); }
static inline __half __short_as_half(short bits) { return __half::of_bits(uint16_t(bits)); }

// ---- two values
static inline __half2 make_half2(__half x, __half y) { return {x, y}; }
static inline __half2 __floats2half2_rn(float x, float y) { return {x, y}; }
static inline __half2 __float22half2_rn(float2 v) { return {v.x, v.y}; }
static inline __half2 __float2half2_rn(float x) { return {x, x}; }
static inline float2 __half22float2(__half2 h) { return make_float2(float(h.x), float(h.y)); }
static inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
static inline __half2 __half2half2(__half x) { return {x, x}; }
static inline __half __low2half(__half2 h) { return h.x; }
static inline __half __high2half(__half2 h) { return h.y; }
static inline __half2 __low2half2(__half2 h) { return {h.x, h.x}; }
static inline __half2 __high2half2(__half2 h) { return {h.y, h.y}; }
static inline __half2 __lows2half2(__half2 a, __half2 b) { return {a.x, b.x}; }
static inline __half2 __highs2half2(__half2 a, __half2 b) { return {a.y, b.y}; }
static inline __half2 __lowhigh2highlow(__half2 h) { return {h.y, h.x}; }
