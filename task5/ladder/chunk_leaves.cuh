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

// Where a block looks for a slot first, and as good as always finds it free: an SM has one block.
DEVICE int first_slot(int slots) {
#ifdef __CUDACC__
  unsigned sm;
  asm("mov.u32 %0, %%smid;" : "=r"(sm));
#else
  const unsigned sm = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
#endif
  return sm % slots;
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

// A slot for this block's states that find no room in its shared memory, until they have been read. By one thread, of
// the producer's, that nobody waits for.
template <int SHARES, int D, int B_c>
DEVICE void lend_slot(const Tile<B_c>& tile, Waiting<D>& waiting) {
  if (tile.bits_of_a_consumer(SHARES) <= Waiting<D>::LEVELS) return;
  const Chunk& c = tile.c;
  int slot = first_slot(c.slots);
  while (atomicCAS(&c.taken[slot], 0, 1) != 0) slot = (slot + 1) % c.slots;
  __threadfence();
  waiting.slot = slot;
  mbarrier_arrive(&waiting.lent);
  mbarrier_wait(&waiting.returned, 0);
  __threadfence();
  atomicExch(&c.taken[slot], 0);
}

// BATCH_INVARIANT: from the last leaf to the first. The state of one, or of a subtree, is a warp's O_i, m_i and l_i.
template <int D, int B_r>
struct OwnLeaves {
  static constexpr int SHARES = Shared<D, B_r>::SHARES, LEVELS = Waiting<D>::LEVELS;
  using TileOf = Tile<Shared<D, B_r>::B_c>;
  const TileOf& tile;
  Waiting<D>& waiting;
  int from, leaf, bits;  // the first one; the present one; 1 << bits leaves, or none if leaf < from
  int own, both;         // blocks of keys; of these, as many as the other consumer has

  DEVICE OwnLeaves(const TileOf& tile, Waiting<D>& waiting, int share) : tile(tile), waiting(waiting) {
    const Chunk& c = tile.c;
    const Item& item = tile.item;
    const int nth = (item.cluster * c.splits + tile.split) * SHARES + share, of = item.clusters * c.splits * SHARES;
    from = tile.first_leaf(nth, of), leaf = tile.first_leaf(nth + 1, of) - 1;
    bits = tile.bits_of_a_consumer(SHARES);
    const int of_first = tile.middle - tile.first, of_second = tile.end - tile.middle;
    own = share == 0 ? of_first : of_second, both = min(of_first, of_second);
  }
  DEVICE bool none() const { return leaf < from; }
  DEVICE int first() const { return tile.leaf_begin(leaf); }  // of the present leaf's blocks of keys
  DEVICE int last() const { return tile.leaf_begin(leaf + 1) - 1; }
  DEVICE int first_of_all() const { return tile.leaf_begin(from); }

  // Of each size, the subtree whose neighbour to the left is not complete yet.
  DEVICE State<D>& waits(int level) {
    const int warp = threadIdx.x / 32 - 4;
    if (level < LEVELS) return waiting.states[level][warp];
    mbarrier_wait(&waiting.lent, 0);
    const int nth = waiting.slot * tile.c.levels + level - LEVELS;
    return reinterpret_cast<State<D>*>(tile.c.waiting)[nth * WARPS + warp];
  }
  DEVICE void return_slot() {
    if (bits > LEVELS) arrive_as_warp(&waiting.returned);
  }

  // The state of the present leaf becomes that of the largest subtree that is complete with it. Returns its level.
  DEVICE int merge(float (&O_i)[D / 2], float (&m_i)[2], float (&l_i)[2], float scale) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (float& l : l_i) l = row_sum(l);
    int level = 0;
#pragma unroll 1
    for (; level < bits && (leaf >> level) % 2 == 0; ++level) {
      const State<D>& right = waits(level);
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
    const auto keep = [&](auto store) {
      State<D>& to = waits(level);
#pragma unroll
      for (int u = 0; u < D / 8; ++u)
        store(&to.O[u][lane], make_float4(O_i[4 * u], O_i[4 * u + 1], O_i[4 * u + 2], O_i[4 * u + 3]));
      if (lane % 4 == 0) store(&to.ml[lane / 4], make_float4(m_i[0], m_i[1], l_i[0], l_i[1]));
    };
    if (level < LEVELS) {
      keep([](float4* to, float4 x) { *to = x; });
    } else {
      keep(store_to_keep);
    }
    __syncwarp();
    --leaf;
#pragma unroll
    for (float& x : O_i) x = 0.0f;
  }
};
