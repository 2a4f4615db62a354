// How parts of a pair become its result in rung 5. They are the leaves of a tree: a block merges its own as it goes,
// then a cluster its blocks', in shared memory, and the last cluster of the pair the clusters', through global memory.
#pragma once
#include "cluster_memory.cuh"
#include "keys_as_rows.cuh"
#include "several_clusters.cuh"

// What a thread knows of some keys: m, l of its columns, and its part of O^T.
template <int D, int N>
struct State {
  float2 m[N / 8], l[N / 8];
  float O[D / 64][N / 2];

  DEVICE void start() {
#pragma unroll
    for (int n = 0; n < N / 8; ++n) m[n] = make_float2(-INFINITY, -INFINITY), l[n] = make_float2(0.0f, 0.0f);
#pragma unroll
    for (auto& of_part : O) {
#pragma unroll
      for (float& x : of_part) x = 0.0f;
    }
  }
  // Exactly merge() of decode.cuh, of this and one other.
  DEVICE void merge_with(const State& other) {
#pragma unroll
    for (int n = 0; n < N / 8; ++n) {
      const float2 top = make_float2(fmaxf(m[n].x, other.m[n].x), fmaxf(m[n].y, other.m[n].y));
      const float2 shift = make_float2(top.x == -INFINITY ? 0.0f : top.x, top.y == -INFINITY ? 0.0f : top.y);
      const float rescale[2] = {fast_exp2(m[n].x - shift.x), fast_exp2(m[n].y - shift.y)};
      const float factor[2] = {fast_exp2(other.m[n].x - shift.x), fast_exp2(other.m[n].y - shift.y)};
      m[n] = top;
      l[n].x = fmaf(factor[0], other.l[n].x, l[n].x * rescale[0]);
      l[n].y = fmaf(factor[1], other.l[n].y, l[n].y * rescale[1]);
#pragma unroll
      for (int e = 0; e < D / 64; ++e) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          O[e][4 * n + i] = fmaf(factor[i % 2], other.O[e][4 * n + i], O[e][4 * n + i] * rescale[i % 2]);
      }
    }
  }
};

template <typename T, int D, int N>
struct Merging {
  using Memory = Shared<D, N>;
  const Arguments& c;
  Memory& mem;
  const Item& item;

  DEVICE int warp() const { return threadIdx.x / 32; }
  DEVICE int g() const { return threadIdx.x % 32 / 4; }
  DEVICE int t() const { return threadIdx.x % 4; }

  // Writes the result, where `now` is what the block has of its keys, and all of them have been read.
  DEVICE void run(const State<D, N>& now) {
    if (c.block_bits == 0) return run_alone(now);
    const int rows = min(N, c.a.rows - item.row_0), bits = c.block_bits, rank = item.share & ((1 << bits) - 1);
    constexpr int PITCH = Memory::PITCH;
    float* O = reinterpret_cast<float*>(mem.KV);
    barrier_sync(COMPUTE, THREADS);  // K and V have been read: now they are O
#pragma unroll
    for (int n = 0; n < N / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 8 * n + 2 * t() + i % 2;
#pragma unroll
        for (int e = 0; e < D / 64; ++e)
          O[row * PITCH + 64 * e + 16 * warp() + g() + i / 2 * 8] = now.O[e][4 * n + i];
      }
      if (threadIdx.x < 4) mem.m[4 * n + t()] = now.m[n], mem.l[4 * n + t()] = now.l[n];
    }
    wait_for_cluster();  // all blocks of the cluster have started
    barrier_sync(COMPUTE, THREADS);
    const float *m = &mem.m[0].x, *l = &mem.l[0].x;
    constexpr int QUADS = D / 4;  // of a row: four columns each
    for (int quad = threadIdx.x; quad < rows * QUADS; quad += THREADS) {
      const int row = quad / QUADS, e = quad % QUADS * 4, to = quad & ((1 << bits) - 1);
      const Part p = {m[row], l[row], *reinterpret_cast<const float4*>(&O[row * PITCH + e])};
      send_to(to, &mem.parts[(rank * (N * QUADS) + quad) >> bits], p.O, &mem.received);
      if (quad % QUADS >> bits == 0) send_to(to, &mem.ml[rank][row], make_float2(p.m, p.l), &mem.received);
    }
    mbarrier_wait(&mem.received, 0);
    for (int quad = rank + (threadIdx.x << bits); quad < rows * QUADS; quad += THREADS << bits) {
      const Part p = merge_tree_of(bits, [&](int n) -> Part {
        if (n >> bits) return {};
        const float2 ml = mem.ml[n][quad / QUADS];
        return {ml.x, ml.y, mem.parts[(n * (N * QUADS) + quad) >> bits]};
      });
      c.a.cluster_bits == 0 ? write(quad, p) : clusters().put(quad, p);
    }
    if (c.a.cluster_bits > 0) merge_clusters(rows);
  }

  // Of a block that is no cluster's: from registers to global memory, as K and V of the next item are in the buffers.
  DEVICE void run_alone(const State<D, N>& now) {
    const int rows = min(N, c.a.rows - item.row_0);
    float* part = clusters().slot(item.share, 0);
#pragma unroll
    for (int n = 0; n < N / 8; ++n) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const int row = 8 * n + 2 * t() + column;
        if (row >= rows) continue;
        const float m = column ? now.m[n].y : now.m[n].x, l = column ? now.l[n].y : now.l[n].x;
        const float scale = l == 0.0f ? 0.0f : 1.0f / l;
        T* out = row_of_out(row);
#pragma unroll
        for (int e = 0; e < D / 64; ++e) {
#pragma unroll
          for (int i = column; i < 4; i += 2) {
            const int d = 64 * e + 16 * warp() + g() + i / 2 * 8;
            const float O = now.O[e][4 * n + i];
            if (c.a.cluster_bits == 0)
              out[d] = from_float<T>(O * scale);
            else
              __stcg(&part[row * D + d], O);
          }
        }
        for (int quad = 8 * warp() + g(); c.a.cluster_bits > 0 && quad < D / 4; quad += THREADS / 4)
          __stcg(reinterpret_cast<float2*>(&part[N * D + (row * (D / 4) + quad) * 2]), make_float2(m, l));
      }
    }
    if (c.a.cluster_bits > 0) merge_clusters(rows);
  }

  DEVICE SeveralClusters<N, D> clusters() const {
    const int bits = c.block_bits, of_pair = c.a.cluster_bits;
    return {c.a, item.pair, item.share >> bits, item.share & ((1 << bits) - 1), 1 << of_pair,
            bits, int64_t(item.pair) << of_pair};
  }
  DEVICE void merge_clusters(int rows) {
    clusters().merge(
        mem.last, THREADS, rows * (D / 4), [] { barrier_sync(COMPUTE, THREADS); },
        [&](int quad, const Part& p) { write(quad, p); });
  }
  DEVICE T* row_of_out(int row) const {
    return static_cast<T*>(c.a.out) + offset_of(c.a, c.a.out_strides, item.b, item.kv_head, item.row_0 + row);
  }
  DEVICE void write(int quad, const Part& p) const {
    store4(row_of_out(quad / (D / 4)) + quad % (D / 4) * 4, p.O, p.l == 0.0f ? 0.0f : 1.0f / p.l);
  }
};
