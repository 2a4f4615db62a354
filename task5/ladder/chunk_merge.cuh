// How the parts of a chunk's tile become its rows of the output: in a block, in its cluster, and of several clusters.
#pragma once
#include <type_traits>

#include "chunk_leaves.cuh"
#include "chunk_tile.cuh"
#include "cluster_memory.cuh"
#include "count.cuh"

// What a thread has of some keys' part of a row.
template <int QUADS>
struct PartOfRow {
  float m, l;
  float4 O[QUADS];

  DEVICE void add(float weight, float of_right, const PartOfRow& right) {
    l = fmaf(of_right, right.l, weight * l);
#pragma unroll
    for (int u = 0; u < QUADS; ++u) {
      O[u].x = fmaf(of_right, right.O[u].x, weight * O[u].x), O[u].y = fmaf(of_right, right.O[u].y, weight * O[u].y);
      O[u].z = fmaf(of_right, right.O[u].z, weight * O[u].z), O[u].w = fmaf(of_right, right.O[u].w, weight * O[u].w);
    }
  }
};

// All parts of a row become the first one. BATCH_INVARIANT: as the leaves of a tree. N is a power of two.
template <int N, int QUADS>
DEVICE void merge(PartOfRow<QUADS> (&part)[N], float scale) {
  if constexpr (BATCH_INVARIANT) {
#pragma unroll
    for (int size = 1; size < N; size *= 2) {
#pragma unroll
      for (int n = 0; n < N; n += 2 * size) {
        float weight, of_right;
        part[n].m = merge_maxima(part[n].m, part[n + size].m, scale, weight, of_right);
        part[n].add(weight, of_right, part[n + size]);
      }
    }
  } else if constexpr (N > 1) {
    float m = part[0].m;
#pragma unroll
    for (int n = 1; n < N; ++n) m = fmaxf(m, part[n].m);
    const float shift = m == -INFINITY ? 0.0f : m * scale;
    float weight = fast_exp2(fmaf(part[0].m, scale, -shift));
    part[0].m = m;
#pragma unroll
    for (int n = 1; n < N; ++n, weight = 1.0f)
      part[0].add(weight, fast_exp2(fmaf(part[n].m, scale, -shift)), part[n]);
  }
}

// use(N) with the least power of two N that is at least `parts`, which are at most MOST.
template <int MOST, typename Use>
DEVICE void with_room_for(int parts, Use use) {
  if constexpr (MOST > 2) {
    if (parts <= MOST / 2) return with_room_for<MOST / 2>(parts, use);
  }
  use(std::integral_constant<int, MOST>{});
}

// All parts of this block are in its shared memory. By its consumers.
template <typename T, int D, int B_r>
DEVICE void merge_parts(const Tile<Shared<D, B_r>::B_c>& tile, Shared<D, B_r>& s) {
  constexpr int SHARES = Shared<D, B_r>::SHARES, PITCH = Shared<D, B_r>::PITCH;
  constexpr int CONSUMERS = Shared<D, B_r>::CONSUMERS;
  const Chunk& c = tile.c;
  const Item& item = tile.item;
  const Attention& a = c.a;
  const int splits = c.splits, thread = threadIdx.x - WARPGROUP;
  const int own_0 = tile.split * tile.each;  // of the rows that this block merges
  const float scale = a.scale * LOG2_E;

  // Merges `parts` parts of `rows` rows, at most N. m and l are ml_of(n, r), columns e to e + 3 O_of(n, r, e): nothing,
  // if the last argument is false. LANES threads share a row, so that each loads some `at_once` quads at once.
  // use(r, e, merged) gets a thread's columns e + 4 LANES u and the three behind each.
  const auto merge_rows = [&](auto room, auto at_once, int rows, int parts, auto ml_of, auto O_of, auto use) {
    constexpr int N = decltype(room)::value, EACH = decltype(at_once)::value / (N > 1 ? N : 2), MOST = D / 32;
    constexpr int WANTED = EACH < 1 ? 1 : EACH, QUADS = WANTED > MOST ? MOST : WANTED, LANES = D / 4 / QUADS;
    const int e = 4 * (thread % LANES);
#pragma unroll 1
    for (int r_0 = 0; r_0 < rows; r_0 += CONSUMERS * WARPGROUP / LANES) {
      const int r = r_0 + thread / LANES;
      PartOfRow<QUADS> part[N];
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const bool inside = r < rows && n < parts;
        const float2 ml = ml_of(n, r, inside);
        part[n].m = ml.x, part[n].l = ml.y;
#pragma unroll
        for (int u = 0; u < QUADS; ++u) part[n].O[u] = O_of(n, r, e + 4 * LANES * u, inside);
      }
      __syncwarp();  // the whole row has been read, which use() may write
      merge(part, scale);
      if (r < rows) use(r, e, part[0]);
    }
  };
  const auto write = [&](int r, int e, const auto& x) {
    constexpr int QUADS = sizeof(x.O) / sizeof(float4);
    const int r_of_tile = own_0 + r, token = r_of_tile / c.group, head = r_of_tile - token * c.group;
    T* out = a.out_head<T>(item.b, item.kv_head * c.group + head) + int64_t(tile.token_0 + token) * a.out_strides.row;
    const float factor = x.l == 0.0f ? 0.0f : __fdividef(1.0f, x.l);
    // Plus 0: whether -0 has met a part that has nothing depends on how many there are.
    const auto of = [&](float O) { return fmaf(O, factor, 0.0f); };
#pragma unroll
    for (int u = 0; u < QUADS; ++u)
      *reinterpret_cast<uint2*>(out + e + D / QUADS * u) =
          make_uint2(pack<T>(of(x.O[u].x), of(x.O[u].y)), pack<T>(of(x.O[u].z), of(x.O[u].w)));
  };
  // In global memory: [part][row of the tile][column], and behind all of them m, l.
  const auto slot = [&](int n, int r) { return (item.first_part + n) * B_r + own_0 + r; };
  float2* global_ml = reinterpret_cast<float2*>(c.partial + c.parts * B_r * D);
  const auto store = [&](float* O, float2* ml, int e, const auto& x) {
    constexpr int QUADS = sizeof(x.O) / sizeof(float4);
#pragma unroll
    for (int u = 0; u < QUADS; ++u) *reinterpret_cast<float4*>(O + e + D / QUADS * u) = x.O[u];
    if (e == 0) *ml = make_float2(x.m, x.l);
  };
  // Of this block's rows, all that the cluster has.
  const auto complete = [&](int r, int e, const auto& x) {
    if (item.clusters == 1) return write(r, e, x);
    const int64_t at = slot(item.cluster, r);
    store(&c.partial[at * D], &global_ml[at], e, x);
  };
  const auto nothing = [] { return make_float2(-INFINITY, 0.0f); };
  const auto own_ml = [&](int share, int r, bool inside) { return inside ? s.parts.ml[share * B_r + r] : nothing(); };
  const auto own_O = [&](int share, int r, int e, bool inside) {
    const float4* O = reinterpret_cast<const float4*>(&s.parts.O[(share * B_r + r) * PITCH + e]);
    return inside ? *O : float4{};
  };
  constexpr std::integral_constant<int, SHARES> shares;
  constexpr std::integral_constant<int, D / 16> some;
  constexpr std::integral_constant<int, D / 4> many;  // global memory takes longer
  if (splits == 1 || SHARES > 1) barrier_sync(COMPLETE, CONSUMERS * WARPGROUP);
  if (splits == 1) {
    merge_rows(shares, some, tile.rows, SHARES, own_ml, own_O, complete);
  } else {
    if (SHARES > 1)
      merge_rows(shares, some, tile.rows, SHARES, own_ml, own_O, [&](int r, int e, const auto& x) {
        store(&s.parts.O[r * PITCH], &s.parts.ml[r], e, x);
      });
    __syncwarp();
    arrive_in_cluster(), wait_for_cluster();  // all blocks' parts are complete
    const auto ml_of = [&](int n, int r, bool inside) {
      return load_from(n, &s.parts.ml[own_0 + r], inside, nothing());
    };
    const auto O_of = [&](int n, int r, int e, bool inside) {
      return load_from(n, reinterpret_cast<const float4*>(&s.parts.O[(own_0 + r) * PITCH + e]), inside);
    };
    with_room_for<MOST_SPLITS>(splits, [&](auto room) {
      merge_rows(room, some, tile.own, splits, ml_of, O_of, complete);
    });
    __syncwarp();
    start_in_cluster();  // the other blocks' parts have been read
  }
  if (item.clusters > 1) {
    barrier_sync(MERGE, CONSUMERS * WARPGROUP);
    if (thread == 0) {
      int* counter = &c.counters[item.first_part * splits + tile.split];
      s.last = add_acquire_release(counter, 1) == item.clusters - 1;
      if (s.last) *counter = 0;  // for the next launch
    }
    barrier_sync(MERGE, CONSUMERS * WARPGROUP);
    if (s.last) {
      const auto ml_of = [&](int n, int r, bool inside) { return inside ? __ldcg(&global_ml[slot(n, r)]) : nothing(); };
      const auto O_of = [&](int n, int r, int e, bool inside) {
        const float4* O = reinterpret_cast<const float4*>(&c.partial[slot(n, r) * D + e]);
        return inside ? __ldcg(O) : float4{};
      };
      with_room_for<MOST_CLUSTERS>(item.clusters, [&](auto room) {
        merge_rows(room, many, tile.own, item.clusters, ml_of, O_of, write);
      });
    }
  }
  __syncwarp();
  if (splits > 1) wait_for_cluster();  // a block's memory is there until the others have read it
}
