// __nv_bfloat16, __nv_bfloat162 and the intrinsics that carry this format in their name.
#pragma once

#include "cuda_runtime.h"
//
#include "cuda_on_cpu/float16.h"

using __nv_bfloat16 = cuda_on_cpu::Float16<cuda_on_cpu::BFloat16>;
using __nv_bfloat162 = cuda_on_cpu::Float16x2<cuda_on_cpu::BFloat16>;
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

// ---- one value
static inline float __bfloat162float(__nv_bfloat16 h) { return float(h); }
static inline __nv_bfloat16 __float2bfloat16(float x) { return x; }
static inline __nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
static inline __nv_bfloat16 __float2bfloat16_rz(float x) {
  return __nv_bfloat16::of_bits(cuda_on_cpu::BFloat16::encode_toward_zero(x));
}
static inline __nv_bfloat16 __double2bfloat16(double x) { return x; }
static inline __nv_bfloat16 __int2bfloat16_rn(int x) { return x; }
static inline __nv_bfloat16 __uint2bfloat16_rn(unsigned x) { return x; }
static inline int __bfloat162int_rn(__nv_bfloat16 h) { return __float2int_rn(float(h)); }
static inline int __bfloat162int_rz(__nv_bfloat16 h) { return __float2int_rz(float(h)); }
static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 h) { return h.bits; }
static inline short __bfloat16_as_short(__nv_bfloat16 h) { return short(h.bits); }
static inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
  return __nv_bfloat16::of_bits(bits);
}
static inline __nv_bfloat16 __short_as_bfloat16(short bits) {
  return __nv_bfloat16::of_bits(uint16_t(bits));
}

// ---- two values
static inline __nv_bfloat162 make_bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
static inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {x, y}; }
static inline __nv_bfloat162 __float22bfloat162_rn(float2 v) { return {v.x, v.y}; }
static inline __nv_bfloat162 __float2bfloat162_rn(float x) { return {x, x}; }
static inline float2 __bfloat1622float2(__nv_bfloat162 h) {
  return make_float2(float(h.x), float(h.y));
}
static inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
static inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 x) { return {x, x}; }
static inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 h) { return h.x; }
static inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 h) { return h.y; }
static inline __nv_bfloat162 __low2bfloat162(__nv_bfloat162 h) { return {h.x, h.x}; }
static inline __nv_bfloat162 __high2bfloat162(__nv_bfloat162 h) { return {h.y, h.y}; }
static inline __nv_bfloat162 __lows2bfloat162(__nv_bfloat162 a, __nv_bfloat162 b) {
  return {a.x, b.x};
}
static inline __nv_bfloat162 __highs2bfloat162(__nv_bfloat162 a, __nv_bfloat162 b) {
  return {a.y, b.y};
}
static inline __nv_bfloat162 __lowhigh2highlow(__nv_bfloat162 h) { return {h.y, h.x}; }
