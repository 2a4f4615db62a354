// A pair whose keys several clusters share, or single blocks: their parts go through global memory, and the last one to
// finish merges them. Block r of each cluster has the same quads (four columns of a row), and a counter of its own.
#pragma once
#include "count.cuh"
#include "decode.cuh"

template <int ROWS, int D>
struct SeveralClusters {
  static constexpr int QUADS = D / 4, FLOATS = 6;  // of a row; of a quad: O, and behind all of them m, l
  const Decode& a;
  int pair, cluster, rank;   // of all pairs, of the pair, of the cluster
  int clusters, block_bits;  // of the pair; 1 << block_bits blocks of a cluster
  int64_t first;                 // of the pair's clusters, among all that share one

  DEVICE float* slot(int cluster, int quad) const {
    return a.partial + (first + cluster) * (ROWS * QUADS * FLOATS) + quad * 4;
  }
  DEVICE void put(int quad, const Part& p) const {
    float* to = slot(cluster, quad);
    __stcg(reinterpret_cast<float4*>(to), p.O);
    __stcg(reinterpret_cast<float2*>(to + ROWS * D - quad * 2), make_float2(p.m, p.l));
  }

  // Block r of the last cluster merges what the blocks r have. meet() is a barrier of `threads` threads, which share
  // `last`; use(quad, part) takes what comes out of the quads below `quads`.
  template <typename Meet, typename Use>
  DEVICE void merge(bool& last, int threads, int quads, Meet meet, Use use) const {
    meet();
    if (threadIdx.x == 0) {
      int* counter = &a.counters[(pair << block_bits) + rank];
      last = add_acquire_release(counter, 1) == clusters - 1;
      if (last) *counter = 0;  // for the next launch
    }
    meet();
    if (!last) return;
    for (int quad = rank + (threadIdx.x << block_bits); quad < quads; quad += threads << block_bits) {
      use(quad, merge_tree_of_many(clusters, [&](int n) -> Part {
            if (n >= clusters) return {};
            const float* from = slot(n, quad);
            const float2 ml = __ldcg(reinterpret_cast<const float2*>(from + ROWS * D - quad * 2));
            return {ml.x, ml.y, __ldcg(reinterpret_cast<const float4*>(from))};
          }));
    }
  }
};
