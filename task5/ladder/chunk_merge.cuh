// How the parts of a chunk's tile become its rows of the output: in a block, in its cluster, and of several clusters.
#pragma once
#include "chunk_leaves.cuh"
#include "chunk_tile.cuh"
#include "cluster_memory.cuh"
#include "count.cuh"

// BATCH_INVARIANT: what a thread has of some keys' part of a row.
template <int QUADS>
struct PartOfRow {
  float m, l;
  float4 O[QUADS];

  DEVICE void merge_with(const PartOfRow& right, float scale) {
    float weight, of_right;
    m = merge_maxima(m, right.m, scale, weight, of_right);
    l = fmaf(of_right, right.l, weight * l);
#pragma unroll
    for (int u = 0; u < QUADS; ++u) {
      O[u].x = fmaf(of_right, right.O[u].x, weight * O[u].x), O[u].y = fmaf(of_right, right.O[u].y, weight * O[u].y);
      O[u].z = fmaf(of_right, right.O[u].z, weight * O[u].z), O[u].w = fmaf(of_right, right.O[u].w, weight * O[u].w);
    }
  }
};

// Merges 1 to MOST_PARTS parts, a power of two, as the leaves of a tree: get(n) is also called for n behind them, which
// gives nothing.
template <int QUADS, typename Get>
DEVICE PartOfRow<QUADS> merge_tree(int parts, float scale, Get get) {
  const auto four = [&](int n) {
    PartOfRow<QUADS> part[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) part[i] = get(n + i);
    part[0].merge_with(part[1], scale), part[2].merge_with(part[3], scale);
    part[0].merge_with(part[2], scale);
    return part[0];
  };
  PartOfRow<QUADS> p = four(0);
  if (parts > 4) p.merge_with(four(4), scale);
  if (parts > 8) {
    PartOfRow<QUADS> second = four(8);
    second.merge_with(four(12), scale), p.merge_with(second, scale);
  }
  return p;
}

// All parts of this block are in its shared memory. By its consumers.
template <typename T, int D, int B_r>
DEVICE void merge_parts(const Tile& tile, Shared<D, B_r>& s) {
  constexpr int SHARES = Shared<D, B_r>::SHARES, PITCH = Shared<D, B_r>::PITCH;
  constexpr int MERGERS = Shared<D, B_r>::CONSUMERS * WARPGROUP;
  const Chunk& c = tile.c;
  const Attention& a = c.a;
  const int splits = c.splits, thread = threadIdx.x - WARPGROUP;
  const int own_0 = tile.split * tile.each;  // of the rows that this block merges
  const float scale = a.scale * LOG2_E;

  // Merges `parts` parts of `rows` rows, whose m and l are ml_of(n, r), and columns e to e + 3 O_of(n, r, e): zeros, or
  // any part's, for the few n from `parts` on. Eight threads share a row; use(r, m and l, O) gets column
  // 4 (thread % 8 + 8 u) and the three behind it in O[u].
  constexpr int OF_ROW = 8, QUADS = D / 4 / OF_ROW, AT_ONCE = 4;  // AT_ONCE: parts whose loads are on the way together
  const auto merge = [&](int rows, int parts, auto ml_of, auto O_of, auto use) {
    const int lane_of_row = thread % OF_ROW;
#pragma unroll 1
    for (int r_0 = thread / 32 * 4; r_0 < rows; r_0 += MERGERS / OF_ROW) {
      const int r_of_thread = r_0 + thread % 32 / OF_ROW, r = min(r_of_thread, rows - 1);
      if constexpr (BATCH_INVARIANT) {
        const PartOfRow<QUADS> p = merge_tree<QUADS>(parts, scale, [&](int n) {
          PartOfRow<QUADS> part;
          const float2 ml = n < parts ? ml_of(n, r) : make_float2(-INFINITY, 0.0f);
          part.m = ml.x, part.l = ml.y;
#pragma unroll
          for (int u = 0; u < QUADS; ++u) {  // what is no part may be infinite, and 0 times that is no 0
            part.O[u] = O_of(n, r, 4 * (lane_of_row + OF_ROW * u));
            if (n >= parts) part.O[u] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          }
          return part;
        });
        __syncwarp();
        if (r_of_thread < rows) use(r, make_float2(p.m, p.l), p.O);
        continue;
      }
      float m = -INFINITY, l = 0.0f;
      float weight[MOST_PARTS / OF_ROW], l_of[MOST_PARTS / OF_ROW];  // of parts lane_of_row and lane_of_row + 8
#pragma unroll
      for (int i = 0; i < MOST_PARTS / OF_ROW; ++i) {
        const int n = lane_of_row + i * OF_ROW;
        const float2 ml = n < parts ? ml_of(n, r) : make_float2(-INFINITY, 0.0f);
        m = fmaxf(m, ml.x), weight[i] = ml.x, l_of[i] = ml.y;
      }
      for (int lane = 1; lane < OF_ROW; lane *= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, lane));
      const float shift = m == -INFINITY ? 0.0f : m * scale;
#pragma unroll
      for (int i = 0; i < MOST_PARTS / OF_ROW; ++i) {
        weight[i] = fast_exp2(fmaf(weight[i], scale, -shift));
        l = fmaf(weight[i], l_of[i], l);
      }
      for (int lane = 1; lane < OF_ROW; lane *= 2) l += __shfl_xor_sync(~0u, l, lane);
      float4 O[QUADS] = {};
#pragma unroll 1
      for (int n_0 = 0; n_0 < parts; n_0 += AT_ONCE) {
        float4 part[AT_ONCE][QUADS];
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
#pragma unroll
          for (int u = 0; u < QUADS; ++u)
            part[n][u] = O_of(n_0 + n, r, 4 * (lane_of_row + OF_ROW * u));
        }
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
          const float w = __shfl_sync(~0u, n_0 < OF_ROW ? weight[0] : weight[1], (n_0 + n) % OF_ROW, OF_ROW);
          if (n_0 + n >= parts) continue;
#pragma unroll
          for (int u = 0; u < QUADS; ++u) {
            O[u].x = fmaf(w, part[n][u].x, O[u].x), O[u].y = fmaf(w, part[n][u].y, O[u].y);
            O[u].z = fmaf(w, part[n][u].z, O[u].z), O[u].w = fmaf(w, part[n][u].w, O[u].w);
          }
        }
      }
      __syncwarp();  // threads past the last row have read it, which use() may write
      if (r_of_thread < rows) use(r, make_float2(m, l), O);
    }
  };
  const int e_0 = 4 * (thread % OF_ROW);
  const auto write = [&](int r, float2 ml, const float4(&O)[QUADS]) {
    const int r_of_tile = own_0 + r, token = r_of_tile / c.group, head = r_of_tile - token * c.group;
    T* out = a.out_head<T>(tile.b, tile.kv_head * c.group + head) + e_0;
    out += int64_t(tile.token_0 + token) * a.out_strides.row;
    const float factor = ml.y == 0.0f ? 0.0f : 1.0f / ml.y;
#pragma unroll
    for (int u = 0; u < QUADS; ++u)
      *reinterpret_cast<uint2*>(out + 4 * OF_ROW * u) =
          make_uint2(pack<T>(O[u].x * factor, O[u].y * factor), pack<T>(O[u].z * factor, O[u].w * factor));
  };
  // In global memory: [tile][cluster][row of the tile][column], and behind all of them m, l.
  const int64_t nth = (int64_t(tile.b) * tile.kv_heads + tile.kv_head) * c.tiles + tile.of_head;
  const auto slot = [&](int n, int r) { return (nth * c.clusters + n) * B_r + own_0 + r; };
  float2* global_ml = reinterpret_cast<float2*>(c.partial + int64_t(gridDim.z) * gridDim.y * c.tiles * B_r * D);
  // Of this block's rows, all that the cluster has.
  const auto complete = [&](int r, float2 ml, const float4(&O)[QUADS]) {
    if (c.clusters == 1) return write(r, ml, O);
    float4* to = reinterpret_cast<float4*>(&c.partial[slot(tile.cluster, r) * D + e_0]);
#pragma unroll
    for (int u = 0; u < QUADS; ++u) __stcg(to + OF_ROW * u, O[u]);
    if (e_0 == 0) __stcg(&global_ml[slot(tile.cluster, r)], ml);
  };
  const auto own_ml = [&](int share, int r) { return s.parts.ml[share * B_r + r]; };
  const auto own_O = [&](int share, int r, int e) {
    return *reinterpret_cast<const float4*>(&s.parts.O[(share % SHARES * B_r + r) * PITCH + e]);
  };
  if (splits == 1 || SHARES > 1) barrier_sync(COMPLETE, MERGERS);
  if (splits == 1) {
    merge(tile.rows, SHARES, own_ml, own_O, complete);
  } else {
    if (SHARES > 1)
      merge(tile.rows, SHARES, own_ml, own_O, [&](int r, float2 ml, const float4(&O)[QUADS]) {
#pragma unroll
        for (int u = 0; u < QUADS; ++u)
          *reinterpret_cast<float4*>(&s.parts.O[r * PITCH + e_0 + 4 * OF_ROW * u]) = O[u];
        if (e_0 == 0) s.parts.ml[r] = ml;
      });
    __syncwarp();
    arrive_in_cluster(), wait_for_cluster();  // all blocks' parts are complete
    const auto ml_of = [&](int n, int r) { return load_from(n, &s.parts.ml[own_0 + r]); };
    const auto O_of = [&](int n, int r, int e) {
      return load_from(n, reinterpret_cast<const float4*>(&s.parts.O[(own_0 + r) * PITCH + e]), n < splits);
    };
    merge(tile.own, splits, ml_of, O_of, complete);
    __syncwarp();
    start_in_cluster();  // the other blocks' parts have been read
  }
  if (c.clusters > 1) {
    barrier_sync(MERGE, MERGERS);
    if (thread == 0) {
      int* counter = &c.counters[nth * splits + tile.split];
      s.last = add_acquire_release(counter, 1) == c.clusters - 1;
      if (s.last) *counter = 0;  // for the next launch
    }
    barrier_sync(MERGE, MERGERS);
    if (s.last) {
      const auto ml_of = [&](int n, int r) { return __ldcg(&global_ml[slot(n, r)]); };
      const auto O_of = [&](int n, int r, int e) {
        return __ldcg(reinterpret_cast<const float4*>(&c.partial[slot(min(n, c.clusters - 1), r) * D + e]));
      };
      merge(tile.own, c.clusters, ml_of, O_of, write);
    }
  }
  __syncwarp();
  if (splits > 1) wait_for_cluster();  // a block's memory is there until the others have read it
}
