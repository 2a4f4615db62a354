// A consumer's leaves of a tile's tree, and how their states become one. See chunk.cuh.
#pragma once
#include "../../task4/ladder/warpgroup.cuh"
#include "chunk_tile.cuh"

// Of the four threads that have a row.
DEVICE float row_sum(float l) {
  l += __shfl_xor_sync(~0u, l, 1);
  return l + __shfl_xor_sync(~0u, l, 2);
}

// The larger of two m, and the factors for l and O of both: exactly 1 and 0 if one of them has seen no key.
DEVICE float merge_maxima(float left, float right, float scale, float& of_left, float& of_right) {
  const float m = fmaxf(left, right), shift = m == -INFINITY ? 0.0f : m;
  of_left = fast_exp2((left - shift) * scale), of_right = fast_exp2((right - shift) * scale);
  return m;
}

// Where a warp looks for a slot first, and as good as always finds one: an SM has one block.
DEVICE int first_slot(int slots, int warps, int warp) {
#ifdef __CUDACC__
  unsigned sm;
  asm("mov.u32 %0, %%smid;" : "=r"(sm));
#else
  const unsigned sm = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
#endif
  return (sm * warps + warp) % slots;
}

// A store that L2 should keep.
DEVICE void store_to_keep(float4* to, float4 x) {
#ifdef __CUDACC__
  asm volatile("st.global.L2::cache_hint.v4.f32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "f"(x.x), "f"(x.y), "f"(x.z),
               "f"(x.w), "l"(EVICT_LAST) : "memory");
#else
  *to = x;
#endif
}

// BATCH_INVARIANT: from the last leaf to the first. The state of one, or of a subtree, is a warp's O_i, m_i and l_i.
template <int D, int B_r>
struct OwnLeaves {
  static constexpr int SHARES = Shared<D, B_r>::SHARES, WARPS = 4 * Shared<D, B_r>::CONSUMERS;
  using TileOf = Tile<Shared<D, B_r>::B_c>;
  const TileOf& tile;
  int from, leaf, bits;  // the first one; the present one; 1 << bits leaves, or none if leaf < from
  int own, both;         // blocks of keys; of these, as many as the other consumer has
  // Of each size, the subtree whose neighbour to the left is not complete yet: of the smallest, and the others, in a
  // slot that the warp takes
  State<D>*in_shared, *in_global;
  int slot;

  DEVICE OwnLeaves(const TileOf& tile, Waiting<D>& waiting, int share) : tile(tile) {
    const Chunk& c = tile.c;
    const int nth = (tile.cluster * c.splits + tile.split) * SHARES + share, of = c.clusters * c.splits * SHARES;
    from = tile.first_leaf(nth, of), leaf = tile.first_leaf(nth + 1, of) - 1;
    bits = 31 - __clz(max(1, leaf + 1 - from));
    const int of_first = tile.middle - tile.first, of_second = tile.end - tile.middle;
    own = share == 0 ? of_first : of_second, both = min(of_first, of_second);
    in_shared = &waiting.states[threadIdx.x / 32 - 4];
  }
  DEVICE bool none() const { return leaf < from; }
  DEVICE int first() const { return tile.leaf_begin(leaf); }  // of the present leaf's blocks of keys
  DEVICE int last() const { return tile.leaf_begin(leaf + 1) - 1; }
  DEVICE int first_of_all() const { return tile.leaf_begin(from); }

  DEVICE void take_slot() {
    if (bits <= 1) return;
    const Chunk& c = tile.c;
    slot = first_slot(c.slots, WARPS, threadIdx.x / 32 - 4);
    if (threadIdx.x % 32 == 0) {
      while (atomicCAS(&c.taken[slot], 0, 1) != 0) slot = (slot + 1) % c.slots;
      __threadfence();
    }
    slot = __shfl_sync(~0u, slot, 0);
    in_global = reinterpret_cast<State<D>*>(c.waiting) + int64_t(slot) * c.levels;
  }
  // What the warp has left there has been read.
  DEVICE void give_slot() {
    if (bits <= 1) return;
    __syncwarp();
    if (threadIdx.x % 32 > 0) return;
    __threadfence();
    atomicExch(&tile.c.taken[slot], 0);
  }

  // The state of the present leaf becomes that of the largest subtree that is complete with it. Returns its level.
  DEVICE int merge(float (&O_i)[D / 2], float (&m_i)[2], float (&l_i)[2], float scale) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (float& l : l_i) l = row_sum(l);
    int level = 0;
#pragma unroll 1
    for (; level < bits && (leaf >> level) % 2 == 0; ++level) {
      const State<D>& right = level == 0 ? *in_shared : in_global[level - 1];
      const float4 ml = right.ml[lane / 4];
      float weight[2], of_right[2];
      m_i[0] = merge_maxima(m_i[0], ml.x, scale, weight[0], of_right[0]);
      m_i[1] = merge_maxima(m_i[1], ml.y, scale, weight[1], of_right[1]);
      l_i[0] = fmaf(of_right[0], ml.z, weight[0] * l_i[0]), l_i[1] = fmaf(of_right[1], ml.w, weight[1] * l_i[1]);
#pragma unroll
      for (int i = 0; i < D / 2; i += 4) {
        const float4 O = right.O[i / 4][lane];
        O_i[i] = fmaf(of_right[0], O.x, weight[0] * O_i[i]);
        O_i[i + 1] = fmaf(of_right[0], O.y, weight[0] * O_i[i + 1]);
        O_i[i + 2] = fmaf(of_right[1], O.z, weight[1] * O_i[i + 2]);
        O_i[i + 3] = fmaf(of_right[1], O.w, weight[1] * O_i[i + 3]);
      }
    }
    return level;
  }
  // Merged with what is complete, the present leaf waits for its neighbour, and the leaf before is the present one. O_i
  // becomes 0.
  DEVICE void complete(float (&O_i)[D / 2], const float (&m)[2], const float (&l)[2], float scale) {
    float m_i[2] = {m[0], m[1]}, l_i[2] = {l[0], l[1]};
    const int lane = threadIdx.x % 32, level = merge(O_i, m_i, l_i, scale);
    const float4 ml = make_float4(m_i[0], m_i[1], l_i[0], l_i[1]);
    const auto O = [&](int u) { return make_float4(O_i[4 * u], O_i[4 * u + 1], O_i[4 * u + 2], O_i[4 * u + 3]); };
    if (level == 0) {
#pragma unroll
      for (int u = 0; u < D / 8; ++u) in_shared->O[u][lane] = O(u);
      if (lane % 4 == 0) in_shared->ml[lane / 4] = ml;
    } else {
      State<D>& to = in_global[level - 1];
#pragma unroll
      for (int u = 0; u < D / 8; ++u) store_to_keep(&to.O[u][lane], O(u));
      if (lane % 4 == 0) store_to_keep(&to.ml[lane / 4], ml);
    }
    __syncwarp();
    --leaf;
#pragma unroll
    for (float& x : O_i) x = 0.0f;
  }
};
