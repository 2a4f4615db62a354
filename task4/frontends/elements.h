// What the C++ attentions need of tensors: common/include for a host without CUDA's types.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

// A tensor of up to four dimensions: common.build.View.
struct View {
  void* data;
  int64_t sizes[4], strides[4];
};

template <typename T>
static inline T* at(const View& x, int64_t i, int64_t j, int64_t k, int64_t l) {
  return static_cast<T*>(x.data) + i * x.strides[0] + j * x.strides[1] + k * x.strides[2] + l * x.strides[3];
}

struct Half {
  uint16_t bits;
};
struct BFloat {
  uint16_t bits;
};

static inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
static inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

static inline float to_float(float x) { return x; }
static inline float to_float(BFloat x) { return float_of(uint32_t(x.bits) << 16); }
static inline float to_float(Half x) {
  const uint32_t rest = (x.bits & 0x7fffu) << 13;
  const float magnitude = float_of(rest) * 0x1p112f;  // the exponents' difference; right for subnormal numbers, too
  return float_of((x.bits & 0x8000u) << 16 | (rest >= 0x0f800000u ? rest | 0x7f800000u : bits_of(magnitude)));
}

// Rounded to the nearest, or to the even one of two.
static inline void from_float(float x, float& y) { y = x; }
static inline void from_float(float x, BFloat& y) {
  const uint32_t bits = bits_of(x);
  y.bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static inline void from_float(float x, Half& y) {
  const uint32_t sign = bits_of(x) >> 16 & 0x8000, rest = bits_of(x) & 0x7fffffff;
  uint32_t half;
  if (rest > 0x7f800000u)
    half = 0x7e00;
  else if (rest >= 0x477ff000u)
    half = 0x7c00;  // 65520 and more
  else if (rest < 0x38800000u)
    half = bits_of(float_of(rest) + 0.5f) - 0x3f000000u;  // subnormal: the sum rounds
  else
    half = (rest - 0x38000000u + 0xfff + (rest >> 13 & 1)) >> 13;
  y.bits = uint16_t(sign | half);
}

// Rows as floats: where they are, or converted into `buffer`; `stride` is then that of the buffer.
static inline const float* as_floats(const float* rows, int, int, int64_t&, float*) { return rows; }
template <typename T>
static inline const float* as_floats(const T* rows, int number, int length, int64_t& stride, float* buffer) {
  for (int r = 0; r < number; ++r)
    for (int e = 0; e < length; ++e) buffer[r * length + e] = to_float(rows[r * stride + e]);
  stride = length;
  return buffer;
}

template <typename Run>
static inline void with_dtype(int dtype, Run run) {  // common.build.dtype_code
  if (dtype == 1)
    run(Half{});
  else if (dtype == 2)
    run(BFloat{});
  else
    run(float{});
}
