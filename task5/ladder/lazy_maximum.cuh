// The softmax of task 4's rung 15, for a tile whose keys several blocks share: once a block has seen some keys, m_i
// stays where it is while P is small enough. Why, and what the constants are, stands there.
#pragma once
#include <type_traits>

#include "../../task4/ladder/attention.cuh"
#include "../../task4/ladder/softmax.cuh"
#include "../../task4/ladder/warpgroup.cuh"

// What the warps of a consumer tell each other; 0 at first.
struct LazyFlags {
  int few_large;  // few large P make up these rows
  int unfit[2];   // a warp's m_i moves too often; one flag for even steps, one for odd steps
};

// A thread's rows g (h = 0) and g + 8 (h = 1) of its warp's 16. m_i is `shift`, in units of the exponent.
template <typename T, int D, int B_r, int B_c>
struct LazyMaximum {
  static constexpr int ENOUGH = 768 / B_c, EXACT = 384 / B_c, EXACT_CAUSAL = 256 / B_c, PATIENCE = 64;
  static constexpr float SHARE = 1.0f / 8, SHARE_CAUSAL = 1.0f / 6, TOP = std::is_same_v<T, __half> ? 64.0f : 1.0f;

  LazyFlags& flags;
  const int barrier, blocks;  // of the consumer's warps; of keys that this block has
  const float scale;
  float shift[2] = {};
  int moves = 0;  // of this warp's m_i

  // P may be as large as this, in units of the present m_i: a share of what l_i will be if all of the block's keys are
  // like the first `keys` of them.
  DEVICE void limit_P(float (&limit)[2], const float (&l_i)[2], const int (&keys)[2], bool causal) const {
    const float share = (causal ? SHARE_CAUSAL : SHARE) * rsqrtf(blocks * (B_c / 128.0f)) * blocks * B_c;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      limit[h] = __fdividef(share * l_i[h], keys[h]);
      limit[h] += __shfl_xor_sync(~0u, limit[h], 1);
      limit[h] += __shfl_xor_sync(~0u, limit[h], 2);
    }
  }

  // Whether the rows are fit for a lazy maximum: not if few large P make up the rows. If they are, moves m_i, which
  // new_maxima() has found, so that the limit is TOP.
  DEVICE bool decide(const float (&limit)[2], float (&rescale)[2]) {
    const int lane = threadIdx.x % 32;
    volatile int* few_large = &flags.few_large;
    const bool few = fminf(limit[0] * rescale[0], limit[1] * rescale[1]) < 2;
    if (__popc(__ballot_sync(~0u, few)) > 12 && lane == 0) *few_large = 1;
    barrier_sync(barrier, WARPGROUP);  // every warp has voted
    int found = 0;
    if (lane == 0) found = *few_large;
    if (__shfl_sync(~0u, found, 0)) return false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float top = fminf(fmaxf(limit[h] * rescale[h], 1.0f), 64.0f);
      shift[h] += __log2f(top / TOP);
      rescale[h] *= __fdividef(TOP, top);
    }
    return true;
  }

  // S becomes P, and l_i grows. computed(x) is called once x is computed, and returns when the P before is free.
  // recompute() gives S once more. Returns whether the next step, of block j - 1, may be lazy.
  template <typename Computed, typename Recompute>
  DEVICE bool step(float (&S)[B_c / 2], uint32_t (&P)[B_c / 4], float (&O_i)[D / 2], float (&l_i)[2], int j,
                   Computed computed, Recompute recompute) {
    keep_here(S);
    constexpr int BEFORE = Order<D>::LAZY_BEFORE;
    float sum[2] = {};
    int top = 0;
    checked_exponentials<0, BEFORE, B_c>(S, sum, top, shift, scale);
    computed(sum[BEFORE > B_c / 4]);
    // Written in the previous step. A turn's barrier lies in between, and another one before it is written again
    volatile int* unfit = flags.unfit;
    const int leave = unfit[(j + 1) % 2];
    checked_exponentials<BEFORE, B_c / 2, B_c>(S, sum, top, shift, scale);
    pack_P<T, B_c>(P, S);
    if (__any_sync(~0u, top > __float_as_int(TOP))) {
      move_maximum(S, P, O_i, l_i, sum, recompute);
      if (++moves > 1 + blocks / PATIENCE && threadIdx.x % 32 == 0) unfit[j % 2] = 1;
    }
    for (int h = 0; h < 2; ++h) l_i[h] += sum[h];
    return !__shfl_sync(~0u, leave, 0);
  }

 private:
  // Moves m_i up so that this step's P is at most TOP, and rescales l_i, O_i and P.
  template <typename Recompute>
  DEVICE void move_maximum(float (&S)[B_c / 2], uint32_t (&P)[B_c / 4], float (&O_i)[D / 2], float (&l_i)[2],
                           float (&sum)[2], Recompute recompute) {
    bool overflow = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float largest = row_maximum_of_three<B_c>(S, h);
      if (!__any_sync(~0u, largest > TOP)) continue;
      if (__any_sync(~0u, largest > 1e30f)) {  // __fdividef() takes up to 2^126
        overflow = true;
        break;
      }
      const float grown = fmaxf(largest, TOP), factor = __fdividef(TOP, grown);
      shift[h] += __log2f(grown / TOP);
      sum[h] *= factor, l_i[h] *= factor;
#pragma unroll
      for (int i = 0; i < D / 4; ++i) O_i[i / 2 * 4 + 2 * h + i % 2] *= factor;
#pragma unroll
      for (int i = h; i < B_c / 4; i += 2) P[i] = pack<T>(S[2 * i] * factor, S[2 * i + 1] * factor);
    }
    if (!overflow) return;
    // From S once more. A row whose m_i has moved already does not move it again.
    recompute();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float needed = fmaxf(shift[h], fmaf(row_maximum<B_c>(S, h), scale, -__log2f(TOP)));
      const float factor = fast_exp2(shift[h] - needed);
      shift[h] = needed;
      l_i[h] *= factor;
#pragma unroll
      for (int i = 0; i < D / 4; ++i) O_i[i / 2 * 4 + 2 * h + i % 2] *= factor;
    }
    float halves[2][2] = {};
    exponentials<0, B_c / 2, B_c>(S, halves, shift, scale);
    for (int h = 0; h < 2; ++h) sum[h] = halves[h][0] + halves[h][1];
    pack_P<T, B_c>(P, S);
  }
};
