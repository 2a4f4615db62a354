// The warps of rung 5 that compute. Of a product's 64 rows a warp has 16: lane g = lane / 4, t = lane % 4 has rows g
// and g + 8 of them, and columns 8 n + 2 t and 8 n + 2 t + 1 for each n.
#pragma once
#include "part_tree.cuh"

template <int COUNT>
DEVICE void shuffle_maximum(float2 (&x)[COUNT]) {  // over g
#pragma unroll
  for (int step = 4; step <= 16; step *= 2) {
#pragma unroll
    for (float2& y : x)
      y.x = fmaxf(y.x, __shfl_xor_sync(~0u, y.x, step)), y.y = fmaxf(y.y, __shfl_xor_sync(~0u, y.y, step));
  }
}
template <int COUNT>
DEVICE void shuffle_sum(float2 (&x)[COUNT]) {
#pragma unroll
  for (int step = 4; step <= 16; step *= 2) {
#pragma unroll
    for (float2& y : x) y.x += __shfl_xor_sync(~0u, y.x, step), y.y += __shfl_xor_sync(~0u, y.y, step);
  }
}

template <typename T, int D, int N>
struct Consumer {
  using Memory = Shared<D, N>;
  static constexpr int KEYS = Memory::KEYS;
  const Arguments& c;
  Memory& mem;
  State<D, N> now;
  Sequence s;
  int index = 0, parity = 0, odd = 0;

  DEVICE int warp() const { return threadIdx.x / 32; }
  DEVICE int g() const { return threadIdx.x % 32 / 4; }
  DEVICE int t() const { return threadIdx.x % 4; }
  DEVICE static void meet() { barrier_sync(COMPUTE, THREADS); }
  DEVICE void wait() { mbarrier_wait(&mem.full[index], parity); }
  DEVICE void next() {
    if (++index == c.buffers) index = 0, parity ^= 1;
  }
  DEVICE void release(int buffer) {
    __syncwarp();  // all lanes have read it, and what it lacks
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&mem.empty[buffer]);
  }

  // Q's rows, as wgmma's columns. Those past the end are 0.
  DEVICE void load_queries(const Item& item) {
    constexpr int PIECES = D / 8, EACH = N * PIECES / THREADS;  // of 16 bytes
    static_assert(EACH * THREADS == N * PIECES || N * PIECES < THREADS, "each thread has as many");
#pragma unroll
    for (int n = 0; n < max(1, EACH); ++n) {
      const int i = threadIdx.x + n * THREADS, r = i / PIECES, piece = i % PIECES;
      if (r >= N) break;
      const int64_t row = offset_of(c.a, c.a.q_strides, item.b, item.kv_head, item.row_0 + r);
      const T* q = static_cast<const T*>(c.a.q) + row + piece * 8;
      const uint4 x = item.row_0 + r < c.a.rows ? __ldcg(reinterpret_cast<const uint4*>(q)) : uint4{};
      *reinterpret_cast<uint4*>(&mem.Q[piece / 8][r][8 * (piece % 8 ^ r % 8)]) = x;
    }
    fence_async_proxy();
  }

  // Tiles [tile, end), as one part.
  DEVICE void add_tiles(int row_0, int tile, int end) {
    const float scale = c.a.scale * LOG2_E;
    now.start();
    float2(&m)[N / 8] = now.m, (&l)[N / 8] = now.l;
    int values = -1;  // the buffer of V of the tile before
#pragma unroll 1
    for (; tile < end; ++tile) {
      float S[KEYS / 64][N / 2];
      wait();
      const int key_0 = (s.first + tile) * KEYS;
      // Lane 0 alone, which gives the buffer back: so it has been read then.
      const unsigned missing = __shfl_sync(~0u, threadIdx.x % 32 == 0 ? mem.missing[index] : 0, 0);
      const bool all_seen = !missing && key_0 + KEYS <= s.len - c.a.q_len + 1 &&
                            key_0 >= s.begin + (c.a.window ? c.a.q_len - 1 : 0);
      const uint32_t k = wgmma_descriptor(mem.KV + index * Memory::TILE), q = wgmma_descriptor(mem.Q);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < KEYS / 64; ++i) {
#pragma unroll
        for (int e = 0; e < D / 16; ++e)
          Product<T, N, 0>::run(S[i], k + (e / 4 * KEYS + 64 * i) * (128 / 16) + e % 4 * 2,
                                q + e / 4 * N * (128 / 16) + e % 4 * 2, e > 0);
      }
      wgmma_commit();
      wgmma_wait<0>();  // S, and the product with V of the tile before
#pragma unroll
      for (auto& of_64 : S) keep_here(of_64);
      release(index);
      if (values >= 0) release(values);
      next();

#pragma unroll
      for (auto& of_64 : S) {
#pragma unroll
        for (float& x : of_64) x *= scale;
      }
      if (!all_seen) mask(S, row_0, key_0, missing);

      float2 top[N / 8];
#pragma unroll
      for (int n = 0; n < N / 8; ++n) {
        top[n] = make_float2(-INFINITY, -INFINITY);
#pragma unroll
        for (auto& of_64 : S)
          top[n].x = fmaxf(top[n].x, fmaxf(of_64[4 * n], of_64[4 * n + 2])),
          top[n].y = fmaxf(top[n].y, fmaxf(of_64[4 * n + 1], of_64[4 * n + 3]));
      }
      shuffle_maximum(top);
      if (g() == 0) {
#pragma unroll
        for (int n = 0; n < N / 8; ++n) mem.maximum[odd][warp()][4 * n + t()] = top[n];
      }
      meet();  // all maxima; all warps have waited for the tile before, whose P may be overwritten
#pragma unroll
      for (int n = 0; n < N / 8; ++n) {
        float2 m_new = m[n];
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
          const float2 of_warp = mem.maximum[odd][w][4 * n + t()];
          m_new.x = fmaxf(m_new.x, of_warp.x), m_new.y = fmaxf(m_new.y, of_warp.y);
        }
        const float shift[2] = {m_new.x == -INFINITY ? 0.0f : m_new.x, m_new.y == -INFINITY ? 0.0f : m_new.y};
        const float rescale[2] = {fast_exp2(m[n].x - shift[0]), fast_exp2(m[n].y - shift[1])};
        m[n] = m_new, l[n].x *= rescale[0], l[n].y *= rescale[1];
#pragma unroll
        for (auto& of_64 : now.O) {
#pragma unroll
          for (int i = 0; i < 4; ++i) of_64[4 * n + i] *= rescale[i % 2];
        }
#pragma unroll
        for (int i = 0; i < KEYS / 64; ++i) {
          float (&of_64)[N / 2] = S[i];
          const float p[4] = {fast_exp2(of_64[4 * n] - shift[0]), fast_exp2(of_64[4 * n + 1] - shift[1]),
                              fast_exp2(of_64[4 * n + 2] - shift[0]), fast_exp2(of_64[4 * n + 3] - shift[1])};
          l[n].x += p[0] + p[2], l[n].y += p[1] + p[3];
          // Columns of P^T are rows of memory, of 16 bytes for each 8 keys.
          const int column = threadIdx.x % 8, piece = 2 * warp() + threadIdx.x / 8 % 2;
          store_transposed(shared_address(&mem.P[i][8 * n + column][8 * (piece ^ column)]), pack<T>(p[0], p[1]),
                           pack<T>(p[2], p[3]));
        }
      }
      odd ^= 1;
      if (!all_seen) {
        wait();
        clear_values(key_0);
      }
      fence_async_proxy();
      meet();  // P complete
      wait();
      const uint32_t v = wgmma_descriptor(mem.KV + index * Memory::TILE), p = wgmma_descriptor(mem.P);
#pragma unroll
      for (auto& of_64 : now.O) keep_here(of_64);
      wgmma_fence();
#pragma unroll
      for (int e = 0; e < D / 64; ++e) {
#pragma unroll
        for (int k = 0; k < KEYS / 16; ++k)
          Product<T, N, 1>::run(now.O[e], v + (e * KEYS + 16 * k) * (128 / 16), p + k / 4 * N * (128 / 16) + k % 4 * 2,
                                1);
      }
      wgmma_commit();
      values = index;
      next();
    }
    wgmma_wait<0>();
#pragma unroll
    for (auto& of_64 : now.O) keep_here(of_64);
    if (values < 0) return;  // no tiles
    release(values);
    shuffle_sum(l);
    if (g() == 0) {
#pragma unroll
      for (int n = 0; n < N / 8; ++n) mem.sum[warp()][4 * n + t()] = l[n];
    }
    meet();
#pragma unroll
    for (int n = 0; n < N / 8; ++n) {
      l[n] = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        const float2 of_warp = mem.sum[w][4 * n + t()];
        l[n].x += of_warp.x, l[n].y += of_warp.y;
      }
    }
  }

  DEVICE void mask(float (&S)[KEYS / 64][N / 2], int row_0, int key_0, unsigned missing) const {
    const Decode& a = c.a;
#pragma unroll
    for (int n = 0; n < N / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int p = s.len - a.q_len + a.group.quotient(row_0 + 8 * n + 2 * t() + i % 2);  // of the row's token
#pragma unroll
        for (int part = 0; part < KEYS / 64; ++part) {
          const int key = 64 * part + 16 * warp() + g() + i / 2 * 8, j = key_0 + key;
          const bool seen = !(missing >> (key >> c.box_bits) * (D / 64) & 1) && j >= s.begin && j <= p &&
                            (!a.window || j > p - a.window);
          if (!seen) S[part][4 * n + i] = -INFINITY;
        }
      }
    }
  }
  // What no row sees may be anything, and 0 times that has to be 0.
  DEVICE void clear_values(int key_0) const {
    for (int i = threadIdx.x; i < KEYS * D / 8; i += THREADS) {
      const int j = key_0 + i / 8 % KEYS;  // [64 columns][key][piece]
      if (j < s.begin || j >= s.len) reinterpret_cast<uint4*>(mem.KV + index * Memory::TILE)[i] = uint4{};
    }
  }

  // An item's parts, and from them its part of the result.
  DEVICE void run(const Item& item) {
    const int bits = part_bits(c, s), first = first_part(c, bits, item.share);
    const int own = first_part(c, bits, item.share + 1) - first;  // 0, or a power of two
    State<D, N> waiting[7];  // subtrees whose right neighbour is not complete yet
    now.start();
#pragma unroll 1
    for (int i = 0; i < own; ++i) {
      add_tiles(item.row_0, first_tile(s, bits, first + i), first_tile(s, bits, first + i + 1));
      int level = 0;
#pragma unroll 1
      for (; i >> level & 1; ++level) {
        State<D, N> left = waiting[level];
        left.merge_with(now);
        now = left;
      }
      if (i < own - 1) waiting[level] = now;
    }
    Merging<T, D, N>{c, mem, item}.run(now);
  }

  DEVICE void run() {
    wait_for_the_launch_before();
    Item item(c, blockIdx.x, N);
    load_queries(item);
    barrier_sync(START, THREADS + 32);  // Q complete, mbarriers initialised
    mbarrier_wait(&mem.known, 0);
    s = mem.sequence;
    for (int i = mem.skipped; i > 0; --i) wait(), release(index), next();
#pragma unroll 1
    for (int n = blockIdx.x + gridDim.x;; n += gridDim.x) {
      const Item then(c, min(n, c.items - 1), N);
      const int2 lengths_of_next = lengths(c.a, then.b);  // arrive while this item is computed
      run(item);
      if (n >= c.items) return;
      item = then, s = sequence(c.a, lengths_of_next);
      meet();  // Q has been read
      load_queries(item);
      meet();  // Q complete
    }
  }
};
