// What the wgmma rungs have in common: a warpgroup's products, softmax and mask, and its rows of the output.
#pragma once
#include "hopper.cuh"

constexpr int WARPGROUP = 128;  // threads

// The next of a ring's N buffers, and the parity of its barrier's phase. Each user of a ring has its own.
template <int N>
struct Ring {
  int index = 0, parity = 0;
  DEVICE void next() {
    if (++index == N) index = 0, parity ^= 1;
  }
};

// One arrival per warp, after a wgmma_wait() or a __syncwarp(): all lanes are at this point.
DEVICE void arrive_as_warp(uint64_t* barrier) {
  if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
}

// 2^x in one instruction. Results below 2^-126 are 0.
DEVICE float fast_exp2(float x) {
#ifdef __CUDACC__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}

// Two 16-bit values in one register.
template <typename T>
DEVICE uint32_t pack(float low, float high) {
#ifdef __CUDACC__
  uint32_t bits;
  if constexpr (std::is_same_v<T, __half>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  }
  return bits;
#else
  const union {
    T pair[2];
    uint32_t bits;
  } u = {{T(low), T(high)}};
  return u.bits;
#endif
}

// Issues S = Q_i K_j^T, which runs until a wgmma_wait(). It multiplies only the first KEYS of the block's B_c keys; S
// is minus infinity for the others.
template <typename T, int D, int B_r, int B_c, int KEYS = B_c>
DEVICE void begin_S(float (&S)[B_c / 2], const uint16_t* Q_i, const uint16_t* K_j) {
#pragma unroll
  for (int i = KEYS / 2; i < B_c / 2; ++i) S[i] = -INFINITY;
  keep_here(S);
  wgmma_fence();
  auto& of_keys = reinterpret_cast<float (&)[KEYS / 2]>(S);
  const uint32_t q = wgmma_descriptor(Q_i), k = wgmma_descriptor(K_j);
#pragma unroll
  for (int e = 0; e < D / 16; ++e)  // 64 columns per swizzled part, 16 per instruction
    Wgmma<T, KEYS, 0>::run(of_keys, q + e / 4 * (B_r * 128 / 16) + e % 4 * 2,
                           k + e / 4 * (B_c * 128 / 16) + e % 4 * 2, e > 0);
  wgmma_commit();
}

// Issues O_i += P V_j, or O_i = P V_j if add is 0. It multiplies only the first KEYS keys: P is 0 for the others.
template <typename T, int D, int B_c, int KEYS = B_c>
DEVICE void begin_PV(float (&O_i)[D / 2], uint32_t (&P)[B_c / 4], const uint16_t* V_j, int add = 1) {
  keep_here(O_i);
  keep_here(P);
  wgmma_fence();
  const uint32_t v = wgmma_descriptor(V_j, B_c * 128);
#pragma unroll
  for (int c = 0; c < KEYS / 16; ++c) Wgmma<T, D, 1>::run(O_i, P + 4 * c, v + c * (16 * 128 / 16), c > 0 ? 1 : add);
  wgmma_commit();
}

// Waits until O_i is complete. The tensor cores read P's registers until then. The compiler takes them as read when
// P V_j is issued, and without keep_here() it would reuse them in between.
template <int N, int M>
DEVICE void finish_PV(float (&O_i)[N], uint32_t (&P)[M]) {
  wgmma_wait<0>();
  keep_here(O_i);
  keep_here(P);
}

// P of 16 bits, from S.
template <typename T, int B_c>
DEVICE void pack_P(uint32_t (&P)[B_c / 4], const float (&S)[B_c / 2]) {
#pragma unroll
  for (int i = 0; i < B_c / 4; ++i) P[i] = pack<T>(S[2 * i], S[2 * i + 1]);
}

// Line 10's product with diag(rescale).
template <int D>
DEVICE void rescale_O(float (&O_i)[D / 2], const float (&rescale)[2]) {
#pragma unroll
  for (int i = 0; i < D / 2; ++i) O_i[i] *= rescale[i / 2 % 2];
}

// Hides the keys from `end` on, counted from this thread's first column, from row g (h = 0) or g + 8.
template <int B_c>
DEVICE void mask(float (&S)[B_c / 2], int h, int end) {
#pragma unroll
  for (int i = 0; i < B_c / 4; ++i)
    if (i / 2 * 8 + i % 2 >= end) S[i / 2 * 4 + 2 * h + i % 2] = -INFINITY;
}

// The maximum of row g (h = 0) or g + 8, in all four threads that share it.
template <int B_c>
DEVICE float row_maximum(const float (&S)[B_c / 2], int h) {
  float top[2];  // two chains: in one, each step would wait for the step before
#pragma unroll
  for (int c = 0; c < B_c / 8; ++c) {
    const float of_pair = fmaxf(S[4 * c + 2 * h], S[4 * c + 2 * h + 1]);
    top[c % 2] = c < 2 ? of_pair : fmaxf(top[c % 2], of_pair);
  }
  const float of_thread = fmaxf(top[0], top[1]), of_two = fmaxf(of_thread, __shfl_xor_sync(~0u, of_thread, 1));
  return fmaxf(of_two, __shfl_xor_sync(~0u, of_two, 2));
}

// Line 9: S becomes P. rescale: the factor for O_i. end: as in mask(). m_i is in units of S. l_i is this thread's
// own part of the sum.
template <bool MASKED, int B_c>
DEVICE void softmax(float (&S)[B_c / 2], float (&m_i)[2], float (&l_i)[2], float (&rescale)[2], float scale,
                    const int (&end)[2]) {
  keep_here(S);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if constexpr (MASKED) mask<B_c>(S, h, end[h]);
    const float m_new = fmaxf(m_i[h], row_maximum<B_c>(S, h));
    const bool none = MASKED && m_new == -INFINITY;  // no key so far: -inf - -inf would be NaN
    const float shift = none ? 0.0f : m_new * scale;
    rescale[h] = none ? 1.0f : fast_exp2((m_i[h] - m_new) * scale);
    m_i[h] = m_new;
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < B_c / 4; ++i) {
      float& s = S[i / 2 * 4 + 2 * h + i % 2];
      s = fast_exp2(fmaf(s, scale, -shift));
      sum[i % 2] += s;
    }
    l_i[h] = l_i[h] * rescale[h] + sum[0] + sum[1];
  }
}

// 1 / l_i from the four threads' parts of it. 0 for rows that see no key.
DEVICE void invert(float (&l_i)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    l_i[h] += __shfl_xor_sync(~0u, l_i[h], 1);
    l_i[h] += __shfl_xor_sync(~0u, l_i[h], 2);
    l_i[h] = l_i[h] == 0.0f ? 0.0f : 1.0f / l_i[h];
  }
}

// Writes factor * O_i: this thread's part of rows g and g + 8 of the warp's 16. Rows from `inside` on are past the end.
// A thread has 2 of every 8 columns. For each 32 columns, the four threads of a row exchange pairs until thread t has
// the 8 columns from 8 t on. So a thread stores 16 bytes, and one instruction 64 bytes per row. out: row g, column 8 t.
template <int D, typename T, int N>
DEVICE void write_rows(T* out, int64_t row_stride, int inside, const float (&O_i)[N], const float (&factor)[2]) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int e = 0; e < D; e += 32) {
      uint32_t x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = O_i + (e + 8 * i) / 2 + 2 * h;
        x[i] = pack<T>(pair[0] * factor[h], pair[1] * factor[h]);
      }
#pragma unroll
      for (int bit = 1; bit <= 2; bit *= 2) {  // 4 x 4 transposition: swaps x[i] of thread t and x[t] of thread i
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (i & bit) continue;
          const uint32_t got = __shfl_xor_sync(~0u, t & bit ? x[i] : x[i + bit], bit);
          (t & bit ? x[i] : x[i + bit]) = got;
        }
      }
      if (8 * h < inside) *reinterpret_cast<uint4*>(out + 8 * h * row_stride + e) = make_uint4(x[0], x[1], x[2], x[3]);
    }
  }
}
