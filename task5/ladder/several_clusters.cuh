// A pair whose keys several clusters share, or single blocks: their parts go through global memory, and the last one to
// finish merges them. Block r of each cluster has the same quads (four columns of a row), and a counter of its own.
#pragma once
#include "count.cuh"
#include "decode.cuh"

// ANY_NUMBER of clusters, and not a power of two up to MOST_AT_ONCE, which takes fewer registers.
template <int ROWS, int D, bool ANY_NUMBER = false>
struct SeveralClusters {
  static constexpr int QUADS = D / 4, FLOATS = 6;  // of a row; of a quad: O, and behind all of them m, l
  static constexpr int GROUP = 8, MOST_AT_ONCE = 16;
  const Decode& a;
  int pair, cluster, rank;   // of all pairs, of the pair, of the cluster
  int clusters, block_bits;  // of the pair; 1 << block_bits blocks of a cluster
  int64_t first;             // of the pair's clusters, among all that share one

  DEVICE float* slot(int cluster, int quad) const {
    return a.partial + (first + cluster) * (ROWS * QUADS * FLOATS) + quad * 4;
  }
  DEVICE void put(int quad, const Part& p) const { put(cluster, quad, p); }

  // Block r of the last cluster merges what the blocks r have. Of many clusters the last one of each group does first,
  // whose parts become one, in the place of the group's first: so several SMs share that work. meet() is a barrier of
  // `threads` threads, which share `last`; use(quad, part) takes what comes out of the quads below `quads`.
  template <typename Meet, typename Use>
  DEVICE void merge(bool& last, int threads, int quads, Meet meet, Use use) const {
    int parts = clusters, apart = 1;  // parts that are left, and the places from one to the next
    if (ANY_NUMBER && clusters > MOST_AT_ONCE) {
      const int begin = cluster & ~(GROUP - 1), of_group = min(GROUP, clusters - begin);
      int* counters = a.counters + (a.all_pairs() << block_bits) + 1;  // behind those of pairs and of items
      if (!is_last(last, counters + ((first + begin) << block_bits), of_group, meet)) return;
      merge_parts(begin, 1, of_group, threads, quads, [&](int quad, const Part& p) { put(begin, quad, p); });
      parts = ceil_div(clusters, GROUP), apart = GROUP;
    }
    if (!is_last(last, a.counters + (pair << block_bits), parts, meet)) return;
    merge_parts(0, apart, parts, threads, quads, use);
  }

 private:
  DEVICE void put(int of, int quad, const Part& p) const {
    float* to = slot(of, quad);
    __stcg(reinterpret_cast<float4*>(to), p.O);
    __stcg(reinterpret_cast<float2*>(to + ROWS * D - quad * 2), make_float2(p.m, p.l));
  }
  // Whether of so many clusters' blocks r this one is the last to come.
  template <typename Meet>
  DEVICE bool is_last(bool& last, int* counters, int of, Meet meet) const {
    meet();
    if (threadIdx.x == 0) {
      last = add_acquire_release(counters + rank, 1) == of - 1;
      if (last) counters[rank] = 0;  // for the next launch
    }
    meet();
    return last;
  }
  template <typename Use>
  DEVICE void merge_parts(int begin, int apart, int parts, int threads, int quads, Use use) const {
    const int bits = 32 - __clz(parts - 1);
    for (int quad = rank + (threadIdx.x << block_bits); quad < quads; quad += threads << block_bits) {
      use(quad, merge_tree_of(bits, [&](int n) -> Part {
            if (ANY_NUMBER ? n >= parts : n >> bits) return {};
            const float* from = slot(begin + n * apart, quad);
            const float2 ml = __ldcg(reinterpret_cast<const float2*>(from + ROWS * D - quad * 2));
            return {ml.x, ml.y, __ldcg(reinterpret_cast<const float4*>(from))};
          }));
    }
  }
};
