// Line 9 in parts, as rungs 14 and 15 place them around the wait for P V_j.
//
// The tensor cores are done with P V_j when the softmax is somewhere in its exponentials. Waiting earlier is idle time; later,
// O_i and P come too late for the gaps that the exponentials leave. ptxas moves the wait to the front unless something holds it
// back: arrive_after() does. How well ptxas fits these 400 instructions into each other's gaps is up to 5 % of the speed;
// Order has the best of those tried with nvcc 13.0 on an H200, for each head_dim (NOTES.md).
#pragma once
#include "warpgroup.cuh"

// How maxima are found: of two floats or of three integers at a time.
enum class Maxima { FLOATS,
                    INTEGERS };

template <int D>
struct Order;
template <>
struct Order<64> {
  static constexpr int BEFORE = 8;         // of a thread's B_c / 2 exponentials: those before the wait for P V_j
  static constexpr int FIRST_BEFORE = 24;  // the same in a tile's first step
  static constexpr int LAZY_BEFORE = 16;   // and in a step with a lazy maximum (rung 15)
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

// Arrives, and so does whatever comes after it, once `computed` is there. It is never this NaN, which ptxas cannot know.
DEVICE void arrive_after(uint64_t* barrier, float computed) {
  if (threadIdx.x % 32 == 0 && __float_as_uint(computed) != 0xfffffffe) mbarrier_arrive(barrier);
}

// The maximum of row g (h = 0) or g + 8 like row_maximum(), in half the instructions: Hopper compares three integers at once.
// The bits of floats, taken as signed integers, have the floats' order unless both are negative: of a row without any score
// of 0 or above the result is some score, and not the largest.
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

// Whether one of the warp's rows has no maximum of 0 or above: then integers will not do.
DEVICE bool some_negative(const float (&m)[2]) { return __any_sync(~0u, fminf(m[0], m[1]) < 0.0f); }

// mask() for both rows below a diagonal, of which row g + 8 sees 8 keys more: half of the comparisons.
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

// The new maxima: rescale is the factor that O_i is due, shift what an exponential subtracts. negative: some_negative(m_i),
// evaluated before S is there.
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

// The exponentials FROM ... TO - 1 of both rows, row g's first, and their sums: two per row, so that no addition waits for the
// previous one.
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

// invert() without a call for exact division, which has no place beside products.
DEVICE void invert_fast(float (&inverse)[2], const float (&l_i)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float l = l_i[h];
    l += __shfl_xor_sync(~0u, l, 1), l += __shfl_xor_sync(~0u, l, 2);
    inverse[h] = l == 0.0f ? 0.0f : __fdividef(1.0f, l);
  }
}
