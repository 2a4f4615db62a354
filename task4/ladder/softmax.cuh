// Line 9 in parts, which rungs 14 and 15 place around the wait for P V_j.
//
// P V_j completes while the softmax computes its exponentials. An earlier wait is idle time; after a later one, O_i and
// P are too late for the gaps between exponentials. ptxas moves the wait to the front unless a dependency keeps it
// back: arrive_after() is one. How well ptxas interleaves these 400 instructions is up to 5 % of the speed. Order has
// the best of the variants tried with nvcc 13.0 on an H200, per head_dim (NOTES.md).
#pragma once
#include "ptx.cuh"
#include "warpgroup.cuh"

// How maxima are computed: of two floats or of three integers per instruction.
enum class Maxima { FLOATS,
                    INTEGERS };

template <int D>
struct Order;
template <>
struct Order<64> {
  static constexpr int BEFORE = 8;         // how many of a thread's B_c / 2 exponentials precede the wait for P V_j
  static constexpr int FIRST_BEFORE = 24;  // the same in a tile's first step
  static constexpr int LAZY_BEFORE = 16;   // the same with a lazy maximum (rung 15)
  static constexpr bool L_FIRST = true;    // the sum starts with the old l_i instead of ending with it
  static constexpr Maxima MAXIMA = Maxima::INTEGERS;
};
template <>
struct Order<128> {
  static constexpr int BEFORE = 52, FIRST_BEFORE = 20, LAZY_BEFORE = 32;
  static constexpr bool L_FIRST = true;
  static constexpr Maxima MAXIMA = Maxima::INTEGERS;
};
template <>
struct Order<256> {
  static constexpr int BEFORE = 20, FIRST_BEFORE = 20, LAZY_BEFORE = 16;
  static constexpr bool L_FIRST = false;
  static constexpr Maxima MAXIMA = Maxima::FLOATS;
};

// Arrives once `computed` is there, and keeps what follows behind that: ptxas cannot know that it is never this NaN.
DEVICE void arrive_after(uint64_t* barrier, float computed) {
  if (threadIdx.x % 32 == 0 && __float_as_uint(computed) != 0xfffffffe) mbarrier_arrive(barrier);
}

// row_maximum() in half the instructions: Hopper has a maximum of three integers. The bits of floats, as signed
// integers, have the floats' order unless both are negative. In a row without any score of 0 or above the result is one
// of the scores, but not the largest.
template <int B_c>
DEVICE float row_maximum_of_three(const float (&S)[B_c / 2], int h) {
  int top[2] = {__float_as_int(S[2 * h]), __float_as_int(S[2 * h + 1])};
#pragma unroll
  for (int c = 1; c < B_c / 8; ++c)
    top[c % 2] = __vimax3_s32(top[c % 2], __float_as_int(S[4 * c + 2 * h]), __float_as_int(S[4 * c + 2 * h + 1]));
  const float of_thread = __int_as_float(max(top[0], top[1]));
  const float of_two = fmaxf(of_thread, __shfl_xor_sync(~0u, of_thread, 1));
  return fmaxf(of_two, __shfl_xor_sync(~0u, of_two, 2));
}

// Whether the maximum of any of the warp's rows is below 0, so that integers do not find it.
DEVICE bool some_negative(const float (&m)[2]) { return __any_sync(~0u, fminf(m[0], m[1]) < 0.0f); }

// mask() for both rows at a diagonal, with half of the comparisons: row g + 8 sees 8 keys more than row g.
template <int B_c>
DEVICE void mask_diagonal(float (&S)[B_c / 2], int end) {
#pragma unroll
  for (int c = -1; c < B_c / 8; ++c) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const bool unseen = 8 * c + e >= end;
      if (c >= 0 && unseen) S[4 * c + e] = -INFINITY;
      if (c + 1 < B_c / 8 && unseen) S[4 * (c + 1) + 2 + e] = -INFINITY;
    }
  }
}

// The new maxima. rescale: the factor for O_i. shift: what an exponential subtracts. negative: some_negative(m_i),
// computed before S is complete.
template <Maxima MAXIMA, int B_c>
DEVICE void new_maxima(float (&S)[B_c / 2], float (&m_i)[2], float (&rescale)[2], float (&shift)[2], float scale,
                       bool negative) {
  keep_here(S);
  float m_new[2];
  const auto find = [&](auto maximum) {
#pragma unroll
    for (int h = 0; h < 2; ++h) m_new[h] = fmaxf(m_i[h], maximum(h));
  };
  const auto in_floats = [&](int h) { return row_maximum<B_c>(S, h); };
  const auto in_integers = [&](int h) { return row_maximum_of_three<B_c>(S, h); };
  if (MAXIMA == Maxima::FLOATS || negative) {
    find(in_floats);
  } else {
    find(in_integers);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    shift[h] = m_new[h] * scale;
    rescale[h] = fast_exp2((m_i[h] - m_new[h]) * scale);
    m_i[h] = m_new[h];
  }
}

// The exponentials FROM ... TO - 1 of both rows, row g's first, and their sums: two per row, so that no addition waits
// for the previous one.
template <int FROM, int TO, int B_c>
DEVICE void exponentials(float (&S)[B_c / 2], float (&sum)[2][2], const float (&shift)[2], float scale) {
#pragma unroll
  for (int n = FROM; n < TO; ++n) {
    const int h = n / (B_c / 4), i = n % (B_c / 4);
    float& s = S[i / 2 * 4 + 2 * h + i % 2];
    s = fast_exp2(fmaf(s, scale, -shift[h]));
    sum[h][i % 2] += s;
  }
}

// invert() with an approximate division: an exact one is a function call, which has no place beside a wgmma.
DEVICE void invert_fast(float (&inverse)[2], const float (&l_i)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float l = l_i[h];
    l += __shfl_xor_sync(~0u, l, 1), l += __shfl_xor_sync(~0u, l, 2);
    inverse[h] = l == 0.0f ? 0.0f : __fdividef(1.0f, l);
  }
}

// ---- For rung 15

// exponentials() with one sum per row, and the largest sum of four of them in `top`, as bits: no sum is negative.
template <int FROM, int TO, int B_c>
DEVICE void checked_exponentials(float (&S)[B_c / 2], float (&sum)[2], int& top, const float (&shift)[2], float scale) {
  static_assert(FROM % 8 == 0 && TO % 8 == 0);
#pragma unroll
  for (int n = FROM; n < TO; n += 8) {
    float four[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int h = (n / 4 + e) / (B_c / 16), c = (n / 4 + e) % (B_c / 16);
      float* s = &S[8 * c + 2 * h];
#pragma unroll
      for (int i : {0, 1, 4, 5}) s[i] = fast_exp2(fmaf(s[i], scale, -shift[h]));
      four[e] = (s[0] + s[1]) + (s[4] + s[5]);
      sum[h] += four[e];
    }
    top = __vimax3_s32(top, __float_as_int(four[0]), __float_as_int(four[1]));
  }
}

// S = Q_i K_j^T for one warp by mma.sync, with K_j from global memory. Q_i: row g of the warp in its swizzled tile. The
// columns are summed in an order that is the same for both operands: a thread takes 8 neighbours of each 32.
template <typename T, int D, int B_r, int B_c>
DEVICE void recompute_S(float (&S)[B_c / 2], const uint16_t* Q_i, const T* K_j, int64_t k_row_stride) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int c = 0; c < B_c / 8; ++c) {
    float S_c[4] = {};
#pragma unroll 4
    for (int e = 0; e < D / 32; ++e) {
      const uint16_t* q = Q_i + e / 2 * (B_r * 64) + ((e % 2 * 4 + t) ^ g) * 8;
      const uint4 q_0 = *reinterpret_cast<const uint4*>(q), q_8 = *reinterpret_cast<const uint4*>(q + 8 * 64);
      const uint4 key = *reinterpret_cast<const uint4*>(K_j + (8 * c + g) * k_row_stride + 32 * e + 8 * t);
      mma_m16n8k16<T>(S_c, {q_0.x, q_8.x, q_0.y, q_8.y}, {key.x, key.y}, S_c);
      mma_m16n8k16<T>(S_c, {q_0.z, q_8.z, q_0.w, q_8.w}, {key.z, key.w}, S_c);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) S[4 * c + i] = S_c[i];
  }
}
