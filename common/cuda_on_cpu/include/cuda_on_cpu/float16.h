// The two 16-bit floating-point formats, in one template: __half and __nv_bfloat16.
//
// Rounding is the hardware's: to nearest even, subnormals kept, overflow to infinity, and every NaN
// that a conversion makes is 0x7fff. +, -, *, / in float and one rounding to 16 bits are exact
// enough to equal a single rounding (float has more than twice the bits); fused multiply-add needs
// more care.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <type_traits>

#include "atomics.h"
#include "vector_types.h"

namespace cuda_on_cpu {

inline uint32_t bits_of(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float float_of(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}

struct Binary16 {  // 1 sign, 5 exponent, 10 mantissa bits
  static float decode(uint16_t h) {
    uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = h >> 10 & 0x1f, mantissa = h & 0x3ff;
    if (exponent == 31) return float_of(sign | 0x7f800000 | mantissa << 13);
    if (exponent == 0) return float_of(sign | bits_of(float(mantissa) * 0x1p-24f));
    return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
  }
  static uint16_t encode(float x) {
    uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return 0x7fff;
    if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);  // 65520 and above: infinity
    if (magnitude < 0x38800000) {  // below 2^-14: subnormal
      // Adding 0.5 leaves the value in units of 2^-24 in the low bits, rounded by the adder.
      return uint16_t(sign | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f)));
    }
    magnitude += 0xfff + (magnitude >> 13 & 1);
    return uint16_t(sign | (magnitude - (112u << 23)) >> 13);
  }
  static uint16_t encode_toward_zero(float x) {
    uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return 0x7fff;
    if (magnitude == 0x7f800000) return uint16_t(sign | 0x7c00);
    if (magnitude >= 0x47800000) return uint16_t(sign | 0x7bff);  // remains the largest finite number
    if (magnitude < 0x38800000) return uint16_t(sign | uint32_t(float_of(magnitude) * 0x1p24f));
    return uint16_t(sign | (magnitude - (112u << 23)) >> 13);
  }
};

struct BFloat16 {  // the upper half of a float: 1 sign, 8 exponent, 7 mantissa bits
  static float decode(uint16_t h) { return float_of(uint32_t(h) << 16); }
  static uint16_t encode(float x) {
    uint32_t bits = bits_of(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
  static uint16_t encode_toward_zero(float x) {
    uint32_t bits = bits_of(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return uint16_t(bits >> 16);
  }
};

/// `x` + `error` as a float rounded to odd: inexact results get an odd last bit, so that rounding
/// them once more, to 16 bits, gives what one rounding of the exact value would.
inline float round_to_odd(double x, double error = 0) {
  float nearest = float(x);
  double rest = (x - double(nearest)) + error;  // what is missing; only its sign matters
  uint32_t bits = bits_of(nearest);
  if (!(rest != 0) || (bits & 1) || isinf(nearest)) return nearest;
  if (nearest == 0) return rest > 0 ? float_of(1) : float_of(0x80000001);
  return float_of(bits + ((rest > 0) == (nearest > 0) ? 1 : -1));
}

/// x * y + z, rounded once for any 16-bit format. The product is exact in double; the sum's
/// rounding error is recovered (Knuth's two-sum).
inline float fused_multiply_add(float x, float y, float z) {
  double product = double(x) * double(y), sum = product + double(z);
  if (isnan(sum) || isinf(sum)) return float(sum);
  double part = sum - product;
  double error = (product - (sum - part)) + (double(z) - part);
  return round_to_odd(sum, error);
}

template <class Format>
struct Float16 {
  uint16_t bits;

  Float16() = default;
  Float16(float x) : bits(Format::encode(x)) {}
  Float16(double x) : bits(Format::encode(isfinite(x) ? round_to_odd(x) : float(x))) {}
  template <class Integer, std::enable_if_t<std::is_integral_v<Integer>, int> = 0>
  Float16(Integer x) : Float16(double(x)) {}
  operator float() const { return Format::decode(bits); }

  static Float16 of_bits(uint16_t bits) {
    Float16 h;
    h.bits = bits;
    return h;
  }

  friend Float16 operator+(Float16 x, Float16 y) { return Float16(float(x) + float(y)); }
  friend Float16 operator-(Float16 x, Float16 y) { return Float16(float(x) - float(y)); }
  friend Float16 operator*(Float16 x, Float16 y) { return Float16(float(x) * float(y)); }
  friend Float16 operator/(Float16 x, Float16 y) { return Float16(float(x) / float(y)); }
  friend Float16& operator+=(Float16& x, Float16 y) { return x = x + y; }
  friend Float16& operator-=(Float16& x, Float16 y) { return x = x - y; }
  friend Float16& operator*=(Float16& x, Float16 y) { return x = x * y; }
  friend Float16& operator/=(Float16& x, Float16 y) { return x = x / y; }
  friend Float16 operator-(Float16 x) { return of_bits(x.bits ^ 0x8000); }
  friend Float16 operator+(Float16 x) { return x; }
  friend bool operator==(Float16 x, Float16 y) { return float(x) == float(y); }
  friend bool operator!=(Float16 x, Float16 y) { return float(x) != float(y); }
  friend bool operator<(Float16 x, Float16 y) { return float(x) < float(y); }
  friend bool operator>(Float16 x, Float16 y) { return float(x) > float(y); }
  friend bool operator<=(Float16 x, Float16 y) { return float(x) <= float(y); }
  friend bool operator>=(Float16 x, Float16 y) { return float(x) >= float(y); }
};

/// Two of them in one 32-bit register.
template <class Format>
struct alignas(4) Float16x2 {
  using Scalar = Float16<Format>;
  Scalar x, y;

  Float16x2() = default;
  Float16x2(Scalar x_, Scalar y_) : x(x_), y(y_) {}

  friend Float16x2 operator+(Float16x2 a, Float16x2 b) { return {a.x + b.x, a.y + b.y}; }
  friend Float16x2 operator-(Float16x2 a, Float16x2 b) { return {a.x - b.x, a.y - b.y}; }
  friend Float16x2 operator*(Float16x2 a, Float16x2 b) { return {a.x * b.x, a.y * b.y}; }
  friend Float16x2 operator/(Float16x2 a, Float16x2 b) { return {a.x / b.x, a.y / b.y}; }
  friend Float16x2& operator+=(Float16x2& a, Float16x2 b) { return a = a + b; }
  friend Float16x2& operator-=(Float16x2& a, Float16x2 b) { return a = a - b; }
  friend Float16x2& operator*=(Float16x2& a, Float16x2 b) { return a = a * b; }
  friend Float16x2& operator/=(Float16x2& a, Float16x2 b) { return a = a / b; }
  friend Float16x2 operator-(Float16x2 a) { return {-a.x, -a.y}; }
  friend bool operator==(Float16x2 a, Float16x2 b) { return a.x == b.x && a.y == b.y; }
  friend bool operator!=(Float16x2 a, Float16x2 b) { return !(a == b); }
};

template <class Format>
inline constexpr bool is_half<Float16<Format>> = true;
template <class Format>
inline constexpr bool is_half<Float16x2<Format>> = true;

}  // namespace cuda_on_cpu

// ---- intrinsics that both formats share. `Format` is deduced, so they take halves and nothing
// else.
#define CUDA_ON_CPU_UNARY(name, expression)                                          \
  template <class Format>                                                            \
  inline cuda_on_cpu::Float16<Format> h##name(cuda_on_cpu::Float16<Format> h) {      \
    float x = float(h);                                                              \
    return cuda_on_cpu::Float16<Format>(expression);                                 \
  }                                                                                  \
  template <class Format>                                                            \
  inline cuda_on_cpu::Float16x2<Format> h2##name(cuda_on_cpu::Float16x2<Format> h) { \
    return {h##name(h.x), h##name(h.y)};                                             \
  }
CUDA_ON_CPU_UNARY(exp, expf(x))
CUDA_ON_CPU_UNARY(exp2, exp2f(x))
CUDA_ON_CPU_UNARY(exp10, powf(10.0f, x))
CUDA_ON_CPU_UNARY(log, logf(x))
CUDA_ON_CPU_UNARY(log2, log2f(x))
CUDA_ON_CPU_UNARY(log10, log10f(x))
CUDA_ON_CPU_UNARY(sin, sinf(x))
CUDA_ON_CPU_UNARY(cos, cosf(x))
CUDA_ON_CPU_UNARY(tanh, tanhf(x))
CUDA_ON_CPU_UNARY(sqrt, sqrtf(x))
CUDA_ON_CPU_UNARY(rsqrt, 1.0f / sqrtf(x))
CUDA_ON_CPU_UNARY(rcp, 1.0f / x)
CUDA_ON_CPU_UNARY(floor, floorf(x))
CUDA_ON_CPU_UNARY(ceil, ceilf(x))
CUDA_ON_CPU_UNARY(trunc, truncf(x))
CUDA_ON_CPU_UNARY(rint, nearbyintf(x))
#undef CUDA_ON_CPU_UNARY

// One name for the scalar and one for the pair: CUDA says __hadd2, but __h2div.
#define CUDA_ON_CPU_BINARY(scalar, pair, expression)                             \
  template <class Format>                                                        \
  inline cuda_on_cpu::Float16<Format> scalar(cuda_on_cpu::Float16<Format> a,     \
                                             cuda_on_cpu::Float16<Format> b) {   \
    return expression;                                                           \
  }                                                                              \
  template <class Format>                                                        \
  inline cuda_on_cpu::Float16x2<Format> pair(cuda_on_cpu::Float16x2<Format> a,   \
                                             cuda_on_cpu::Float16x2<Format> b) { \
    return {scalar(a.x, b.x), scalar(a.y, b.y)};                                 \
  }
CUDA_ON_CPU_BINARY(__hadd, __hadd2, a + b)
CUDA_ON_CPU_BINARY(__hsub, __hsub2, a - b)
CUDA_ON_CPU_BINARY(__hmul, __hmul2, a* b)
CUDA_ON_CPU_BINARY(__hdiv, __h2div, a / b)
CUDA_ON_CPU_BINARY(__hadd_rn, __hadd2_rn, a + b)
CUDA_ON_CPU_BINARY(__hsub_rn, __hsub2_rn, a - b)
CUDA_ON_CPU_BINARY(__hmul_rn, __hmul2_rn, a* b)
// A NaN loses, even a signalling one (with which fmaxf would answer NaN).
CUDA_ON_CPU_BINARY(__hmax, __hmax2, a != a ? b : b != b || a > b ? a
                                                                 : b)
CUDA_ON_CPU_BINARY(__hmin, __hmin2, a != a ? b : b != b || a < b ? a
                                                                 : b)
#undef CUDA_ON_CPU_BINARY

template <class Format>
inline cuda_on_cpu::Float16<Format> __hfma(cuda_on_cpu::Float16<Format> x,
                                           cuda_on_cpu::Float16<Format> y,
                                           cuda_on_cpu::Float16<Format> z) {
  return cuda_on_cpu::fused_multiply_add(float(x), float(y), float(z));
}
template <class Format>
inline cuda_on_cpu::Float16x2<Format> __hfma2(cuda_on_cpu::Float16x2<Format> x,
                                              cuda_on_cpu::Float16x2<Format> y,
                                              cuda_on_cpu::Float16x2<Format> z) {
  return {__hfma(x.x, y.x, z.x), __hfma(x.y, y.y, z.y)};
}
template <class Format>
inline cuda_on_cpu::Float16<Format> __hneg(cuda_on_cpu::Float16<Format> x) {
  return -x;
}
template <class Format>
inline cuda_on_cpu::Float16x2<Format> __hneg2(cuda_on_cpu::Float16x2<Format> x) {
  return -x;
}
template <class Format>
inline cuda_on_cpu::Float16<Format> __habs(cuda_on_cpu::Float16<Format> x) {
  return cuda_on_cpu::Float16<Format>::of_bits(x.bits & 0x7fff);
}
template <class Format>
inline cuda_on_cpu::Float16x2<Format> __habs2(cuda_on_cpu::Float16x2<Format> x) {
  return {__habs(x.x), __habs(x.y)};
}

#define CUDA_ON_CPU_TEST(name, expression)                                           \
  template <class Format>                                                            \
  inline bool name(cuda_on_cpu::Float16<Format> a, cuda_on_cpu::Float16<Format> b) { \
    return expression;                                                               \
  }
CUDA_ON_CPU_TEST(__heq, a == b)
CUDA_ON_CPU_TEST(__hne, a<b || a> b)  // false with a NaN; the unordered __hneu is true
CUDA_ON_CPU_TEST(__hlt, a < b)
CUDA_ON_CPU_TEST(__hle, a <= b)
CUDA_ON_CPU_TEST(__hgt, a > b)
CUDA_ON_CPU_TEST(__hge, a >= b)
CUDA_ON_CPU_TEST(__hneu, a != b)
#undef CUDA_ON_CPU_TEST

template <class Format>
inline bool __hisnan(cuda_on_cpu::Float16<Format> x) {
  return float(x) != float(x);
}
template <class Format>
inline int __hisinf(cuda_on_cpu::Float16<Format> x) {
  return float(x) == INFINITY ? 1 : float(x) == -INFINITY ? -1
                                                          : 0;
}

template <class Format>
inline float __low2float(cuda_on_cpu::Float16x2<Format> h) {
  return float(h.x);
}
template <class Format>
inline float __high2float(cuda_on_cpu::Float16x2<Format> h) {
  return float(h.y);
}
