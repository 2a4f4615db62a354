// Chunked prefill: a chunk of a prompt against a long cache, few rows and many keys. fp16 or bf16, sums in fp32.
//
//   q, out (batch, q_len, heads, head_dim)             k, v (batch, kv_len, kv_heads, head_dim), or pages of these
//   grid  (splits tiles, clusters kv_heads, batch)     of the splits of a tile each `splits` are a cluster, of up to 8
//   block (384, or 512)                                a producer and two consumers, or three, as in task 4's rung 13
//
// Rung 13 has a block per 128 rows of one head and all of their keys: 64 rows of 8 heads are 8 blocks, for 132 SMs, and
// the heads of a group all read the same keys. Against it,
//   packed heads   a tile has `tokens` rows of all heads of a group, by one TMA load: row r is token r / group, head
//                  r % group. A key is read once for all of them, and no row of a tile is empty while others wait
//   few rows       of 64 or fewer each consumer has all, and every other block of keys
//   many rows      of head_dim 64 a third consumer has 64 more: they read K and V less often
//   split keys     the blocks of a cluster have a tile's rows and each its share of the keys. Each leaves O_i, m_i and
//                  l_i in its shared memory, and merges some rows of all blocks. Of a tile with several clusters the
//                  last one to come merges theirs, through global memory
//   softmax        rung 14's steps, and in long rows rung 15's lazy maximum
//   lengths        how many keys a sequence has may be known in device memory alone. The last block of keys is whatever
//                  the cache has behind them, too: such rows of V become zeros
//   by length      where lengths differ, tiles of long sequences have more clusters than those of short ones
//   gaps           a row may not see all keys before its own: not those ahead of a window, nor padding, nor those whose
//                  page is not in the pool. The first of a tile's blocks is masked as its last one is
//   batch-invariant  keys are cut into the leaves of a tree, in a way that follows from their number alone. A consumer
//                  has one or several, and merges them as it goes: the tree is the same however many share it
#pragma once
#include <cuda_runtime.h>

#include "../../task4/ladder/softmax.cuh"
#include "../../task4/ladder/warpgroup.cuh"
#include "chunk_by_length.cuh"
#include "chunk_leaves.cuh"
#include "chunk_loads.cuh"
#include "chunk_merge.cuh"
#include "chunk_tile.cuh"

// A consumer's share of a tile: its rows, or its keys. What it has of them is left in shared memory.
template <typename T, int D, int B_r>
DEVICE void consume(const Tile<Shared<D, B_r>::B_c>& tile, Shared<D, B_r>& s) {
  using Memory = Shared<D, B_r>;
  constexpr int CONSUMERS = Memory::CONSUMERS, STAGES = Memory::STAGES, SHARES = Memory::SHARES, B_c = Memory::B_c;
  const Chunk& c = tile.c;
  const Attention& a = c.a;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);  // shuffled: the compiler sees it as warp-uniform
  int first = tile.first;
  const int end = tile.end, keys = tile.keys;
  Ring<STAGES> k;
  Ring<Memory::V_STAGES> v;
  const int wg = warpgroup - 1, warp = threadIdx.x % WARPGROUP / 32;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int share = SHARES == 1 ? 0 : wg, row_w = SHARES == 1 ? wg * 64 : 0;  // of the keys; the first row
  const int row = row_w + warp * 16 + g;                                      // of the tile
  const float scale = a.scale * LOG2_E;

  // Consumers alternate. While a consumer's products run, it computes its softmax, and the next consumer's products
  // queue behind them.
  const auto wait_for_turn = [&] { barrier_sync(TURN + wg, 2 * WARPGROUP); };
  const auto pass_turn = [&] { barrier_arrive(TURN + (wg + 1) % CONSUMERS, 2 * WARPGROUP); };
  if (wg == CONSUMERS - 1) pass_turn();  // consumer 0 begins

  float S[B_c / 2], O_i[D / 2] = {}, l_i[2] = {}, rescale[2];  // row g: h = 0, row g + 8: h = 1
  float m_i[2] = {-INFINITY, -INFINITY};
  uint32_t P[B_c / 4];

  // Consumers that share the keys read them in turns; or leaves, and what one has more of on its own: Tile::read().
  OwnLeaves<D, B_r> leaves(tile, reinterpret_cast<Waiting<D>&>(s.waiting), share);
  constexpr bool IN_HALVES = BATCH_INVARIANT && SHARES == 2;
  constexpr int STEP = BATCH_INVARIANT ? 1 : SHARES;
  int k_nth = 0, v_nth = 0;
  const auto go_on = [&](auto& ring, int nth) {  // past the nth block of its own
    const int steps = !IN_HALVES || nth + 1 < leaves.both ? SHARES : nth + 1 == leaves.both ? 2 - share
                                                                                            : 1;
    for (int i = 0; i < steps; ++i) ring.next();
  };
  if (share == 1 && (!IN_HALVES || leaves.both > 0)) k.next(), v.next();

  int j = end - 1 - share;  // the first S has no P V_j beside it
  if constexpr (BATCH_INVARIANT) {
    first = leaves.first_of_all(), j = leaves.none() ? first - 1 : leaves.last();
  }
  if (j >= first) {
    const auto sees = [&](int row) { return tile.visible(tile.token_0 + row / c.group); };
    const int seen[2] = {sees(row) - 2 * t, sees(row + 8) - 2 * t};  // from this thread's first column on
    const int whole = max(first, sees(row_w) / B_c);                 // all rows see all blocks before it
    // And where the keys begin: of each row, from this thread's first column on; of all
    const auto row_begins = [&](int row) { return tile.begins(tile.token_0 + row / c.group); };
    const int unseen[2] = {row_begins(row) - 2 * t, row_begins(row + 8) - 2 * t};
    const int gapless = ceil_div(tile.begins(tile.last_token()), B_c);  // all rows see all keys from this block on
    // Of the block in k's buffer. Each lane has read it before one of them may give the buffer back.
    const auto missing_boxes = [&] {
      const unsigned missing = s.missing[k.index];
      __syncwarp();
      return missing;
    };
    // S of block j without keys that a row before `seen` does not see.
    const auto mask_gaps = [&](int j) {
      keep_here(S);
      const unsigned missing = missing_boxes();  // again: registers are few
#pragma unroll
      for (int i = 0; i < B_c / 2; ++i) {
        const int column = i / 4 * 8 + i % 2, h = i / 2 % 2;
        if (column < unseen[h] - j * B_c || missing >> (column >> c.box_bits) * (D / 64) & 1) S[i] = -INFINITY;
      }
    };
    // Ahead of the first key that a row sees, and behind the last, V may be anything, and 0 times that has to be 0.
    const auto clear_V = [&](int j) {
      const int ahead = GAPS ? max(0, tile.begin - j * B_c) : 0, keys_until = min(B_c, keys - j * B_c);
      if (!(c.seqlens_k && keys_until < B_c) && ahead == 0) return;
      mbarrier_wait(&s.v_full[v.index], v.parity);
      constexpr int READERS = SHARES == 1 ? CONSUMERS * WARPGROUP : WARPGROUP, OF_ROW = 8;  // pieces of 16 bytes
      const auto clear = [&](int from, int to) {
        const int pieces = (to - from) * OF_ROW;
        for (int i = (threadIdx.x - WARPGROUP) % READERS; i < pieces * (D / 64); i += READERS)
          reinterpret_cast<uint4*>(s.V[v.index] + (i / pieces * B_c + from) * 64)[i % pieces] = uint4{};
      };
      if (GAPS && ahead) clear(0, ahead);
      clear(keys_until, B_c);
      fence_async_proxy();
      barrier_sync(SHARES == 1 ? COMPLETE : DECISION + wg, READERS);
    };

    mbarrier_wait(&s.q_full, 0);
    mbarrier_wait(&s.k_full[k.index], k.parity);
    wait_for_turn();
    begin_S<T, D, B_r, B_c>(S, s.Q + row_w * 64, s.K[k.index]);
    pass_turn();
    wgmma_wait<0>();
    if (GAPS && (j < gapless || missing_boxes())) mask_gaps(j);
    arrive_as_warp(&s.k_empty[k.index]);  // S is complete: K_j has been read
    go_on(k, k_nth++);
    softmax<true, B_c>(S, m_i, l_i, rescale, scale, {seen[0] - j * B_c, seen[1] - j * B_c});
    pack_P<T, B_c>(P, S);
    clear_V(j);

    // Each further S beside the P V_j of the previous block: S is complete first, and its softmax runs beside P V_j
    const auto begin_step = [&] {
      mbarrier_wait(&s.k_full[k.index], k.parity);
      wait_for_turn();
      begin_S<T, D, B_r, B_c>(S, s.Q + row_w * 64, s.K[k.index]);
      mbarrier_wait(&s.v_full[v.index], v.parity);
      begin_PV<T, D, B_c>(O_i, P, s.V[v.index]);
      pass_turn();
      wgmma_wait<1>();
    };
    const auto end_PV = [&] {
      finish_PV(O_i, P);
      arrive_as_warp(&s.v_empty[v.index]);  // O_i is complete: V_j has been read
      go_on(v, v_nth++);
    };
    const auto masked_step = [&] {
      begin_step();
      arrive_as_warp(&s.k_empty[k.index]);
      go_on(k, k_nth++);
      softmax<true, B_c>(S, m_i, l_i, rescale, scale, {seen[0] - j * B_c, seen[1] - j * B_c});
      end_PV();
      rescale_O<D>(O_i, rescale);
      pack_P<T, B_c>(P, S);
    };
    j -= STEP;
    if (!GAPS) {
      for (; j >= whole; j -= STEP) masked_step();
    }
    // As in rung 14. change(shift) may move the new maxima. A leaf's first step is beside the last P V_j of the leaf
    // behind it.
    const auto step = [&](auto change) {
      using As = Order<D>;
      constexpr int BEFORE = As::BEFORE * B_c / 128;
      const bool of_next_leaf = BATCH_INVARIANT && j < leaves.first();
      const float m_before[2] = {m_i[0], m_i[1]}, l_before[2] = {l_i[0], l_i[1]};
      if (of_next_leaf)
        for (int h = 0; h < 2; ++h) m_i[h] = -INFINITY, l_i[h] = 0.0f;
      const bool negative = As::MAXIMA == Maxima::INTEGERS && some_negative(m_i);
      float sum[2][2] = {}, shift[2];
      constexpr bool AHEAD = GAPS && D * SHARES > 64;  // not of 128 rows of head_dim 64: they would take 2 % longer
      const unsigned missing_ahead = AHEAD ? s.missing[k.index] : 0;  // the products hide the wait for it
      begin_step();
      const unsigned missing = GAPS && !AHEAD ? missing_boxes() : missing_ahead;
      const bool masked = GAPS && (j >= whole || j < gapless || missing);
      if (masked) {
        keep_here(S);
        for (int h = 0; h < 2; ++h) mask<B_c>(S, h, seen[h] - j * B_c);
        mask_gaps(j);
      }
      new_maxima<As::MAXIMA, B_c>(S, m_i, rescale, shift, scale, negative);
      if (GAPS)
        for (int h = 0; h < 2; ++h)  // no key so far
          if (m_i[h] == -INFINITY) shift[h] = 0.0f, rescale[h] = 1.0f;
      change(shift);
      if (As::L_FIRST) sum[0][0] = l_i[0] * rescale[0], sum[1][0] = l_i[1] * rescale[1];
      exponentials<0, BEFORE, B_c>(S, sum, shift, scale);
      arrive_after(&s.k_empty[k.index], sum[BEFORE > B_c / 4][1]);
      go_on(k, k_nth++);
      end_PV();
      if (of_next_leaf) leaves.complete(O_i, m_before, l_before, scale);
      exponentials<BEFORE, B_c / 2, B_c>(S, sum, shift, scale);
      for (int h = 0; h < 2; ++h)
        l_i[h] = As::L_FIRST ? sum[h][0] + sum[h][1] : l_i[h] * rescale[h] + sum[h][0] + sum[h][1];
      rescale_O<D>(O_i, rescale);
      pack_P<T, B_c>(P, S);
      if (masked) clear_V(j);
    };
    const auto no_change = [](float (&)[2]) {};
    if constexpr (SHARES == 1 && !GAPS) {  // few rows wait for the memory
      using Lazy = LazyMaximum<T, D, B_r, B_c>;
      Lazy lazy{s.lazy[wg], DECISION + wg, end - first, scale};
      // The last step with maxima decides whether lazy ones follow.
      const int deciding = j + 1 - (a.causal ? Lazy::EXACT_CAUSAL : Lazy::EXACT);
      if (lazy.blocks >= Lazy::ENOUGH && deciding > first) {
#pragma unroll 1
        for (; j > deciding; --j) step(no_change);
        const auto keys_until = [&](int h) { return min(seen[h] + 2 * t, end * B_c) - (j + 1) * B_c; };
        float limit[2];
        lazy.limit_P(limit, l_i, {keys_until(0), keys_until(1)}, a.causal);
        bool on = false;
        step([&](float (&shift)[2]) {
          for (int h = 0; h < 2; ++h) lazy.shift[h] = shift[h];
          on = lazy.decide(limit, rescale);
          for (int h = 0; h < 2; ++h) shift[h] = lazy.shift[h];
        });
        --j;
#pragma unroll 1
        for (bool more = on; j >= first && more; --j) {
          begin_step();
          const auto computed = [&](float x) {
            arrive_after(&s.k_empty[k.index], x);
            go_on(k, k_nth++);
            end_PV();
          };
          more = lazy.step(S, P, O_i, l_i, j, computed, [&] {
            const T* K_j = a.k_head<T>(tile.item.b, tile.item.kv_head * c.group) + int64_t(j) * B_c * a.k_strides.row;
            recompute_S<T, D, B_r, B_c>(S, s.Q + row * 64, K_j, a.k_strides.row);
          });
        }
        if (on)
          for (int h = 0; h < 2; ++h) m_i[h] = __fdividef(lazy.shift[h], scale);
      }
    }
#pragma unroll 1
    for (; j >= first; j -= STEP) {
      if (GAPS) mbarrier_wait(&s.k_full[k.index], k.parity);  // then `missing` is known
      step(no_change);
    }

    mbarrier_wait(&s.v_full[v.index], v.parity);
    begin_PV<T, D, B_c>(O_i, P, s.V[v.index]);
    finish_PV(O_i, P);
    if (BATCH_INVARIANT) leaves.merge(O_i, m_i, l_i, scale);
  }
  if (IN_HALVES) {
    for (int n = leaves.own; n < end - tile.first - leaves.own; ++n) wait_for_turn(), pass_turn();  // the other's turns
  } else if (share == 1 && (end - first) % 2 == 1) {
    wait_for_turn(), pass_turn();  // the other has had one turn more
  }
  if (BATCH_INVARIANT) leaves.return_slot();
  if (wg == 0) wait_for_turn();  // the last consumer's last pass_turn(): no barrier is left with arrivals

  // ---- The parts
  constexpr int PITCH = Memory::PITCH;
  barrier_sync(MERGE, CONSUMERS * WARPGROUP);  // the parts take the place of K_j and V_j
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int r = share * B_r + row + 8 * h;
    const float l = BATCH_INVARIANT ? l_i[h] : row_sum(l_i[h]);  // of leaves they are summed already
    if (t == 0) s.parts.ml[r] = make_float2(m_i[h], l);
#pragma unroll
    for (int i = 0; i < D / 8; ++i)
      *reinterpret_cast<float2*>(&s.parts.O[r * PITCH + 8 * i + 2 * t]) =
          make_float2(O_i[4 * i + 2 * h], O_i[4 * i + 2 * h + 1]);
  }
}

template <typename T, int D, int B_r, bool BY_LENGTH>
__global__ void __launch_bounds__(Shared<D, B_r>::THREADS, 1) chunk_kernel(const __grid_constant__ Chunk c) {
  using Memory = Shared<D, B_r>;
  constexpr int CONSUMERS = Memory::CONSUMERS, STAGES = Memory::STAGES, SHARES = Memory::SHARES;
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& s = *reinterpret_cast<Memory*>(raw);

  Tile<Memory::B_c> tile(c, s.item);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);  // shuffled: the compiler sees it as warp-uniform
  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&c.q_map, &c.k_map, &c.v_map}) tma_prefetch(map);
    mbarrier_init(&s.q_full, 1);
    constexpr int READERS = 4 * CONSUMERS / SHARES;  // warps
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(&s.k_full[i], 1), mbarrier_init(&s.k_empty[i], READERS);
      s.missing[i] = 0;
    }
    for (int i = 0; i < Memory::V_STAGES; ++i) mbarrier_init(&s.v_full[i], 1), mbarrier_init(&s.v_empty[i], READERS);
    if constexpr (BATCH_INVARIANT) mbarrier_init(&s.waiting.lent, 1), mbarrier_init(&s.waiting.returned, WARPS);
    mbarrier_init_fence();
    for (LazyFlags& flags : s.lazy) flags = {};
  }
  // Where heads do not divide B_r a tile has rows that no query has. They are multiplied, so they are zeros.
  const int held = c.tokens * c.group, unused = (B_r - held) * 8;  // rows; pieces of 16 bytes in 64 columns
  for (int i = threadIdx.x; i < unused * (D / 64); i += blockDim.x) {
    reinterpret_cast<uint4*>(s.Q + (i / unused * B_r + held) * 64)[i % unused] = uint4{};
    fence_async_proxy();
  }
  if constexpr (BY_LENGTH) {
    if (threadIdx.x / 32 == 1) {
      wait_for_the_launch_before();
      find_item_by_length(c, s.item);
    }
  } else {
    if (threadIdx.x == 32) tile.write(s.item);
  }
  __syncthreads();  // barriers initialised before any thread uses them
  if constexpr (BY_LENGTH) {
    if (s.item.clusters == 0) return;
    tile.read_item();
  }

  if (warpgroup == 0) {
    registers_give<Memory::OF_PRODUCER>();
    // Lengths are mostly what they were before that launch. With these, numbers of pages are asked for beside them.
    const bool paged = GAPS && c.block_table;
    if (paged) tile.template find_keys<BY_LENGTH>();
    wait_for_the_launch_before();
    int page = -1;
    const int2 before = make_int2(tile.begin, tile.keys);
    if (paged && threadIdx.x < 64) page = page_number<SHARES>(tile, 0);
    tile.template find_keys<BY_LENGTH>();
    if (paged && threadIdx.x < 64 && (before.x != tile.begin || before.y != tile.keys))
      page = page_number<SHARES>(tile, 0);
    if (tile.first >= tile.end) return;
    if constexpr (BATCH_INVARIANT) {
      if (threadIdx.x == 64) lend_slot<SHARES>(tile, s.waiting);
    }
    if (paged) {
      if (threadIdx.x < 64) load_boxes<T>(tile, s, page);
    } else {
      if (threadIdx.x == 0) load_blocks<T>(tile, s);
    }
    return;
  }

  registers_take<Memory::OF_CONSUMER>();
  wait_for_the_launch_before();
  tile.template find_keys<BY_LENGTH>();
  consume<T>(tile, s);
  merge_parts<T>(tile, s);
}

// q in boxes of 64 columns of all heads of a group: [token][head][64].
template <typename T>
static cudaError_t make_packed_map(CUtensorMap* map, const Attention& a, int group, int tokens) {
  const cuuint64_t sizes[5] = {64, cuuint64_t(a.heads), cuuint64_t(a.q_len), cuuint64_t(a.head_dim / 64),
                               cuuint64_t(a.batch)};
  const cuuint64_t pitches[4] = {pitch_of<T>(a.q_strides.head, a.heads), pitch_of<T>(a.q_strides.row, a.q_len), 128,
                                 pitch_of<T>(a.q_strides.batch, a.batch)};
  return make_box_map<T>(map, a.q, sizes, pitches, {64, cuuint32_t(group), cuuint32_t(tokens), 1, 1});
}

template <typename T, int D, int B_r, bool BY_LENGTH>
static cudaError_t launch(Chunk& c, cudaStream_t stream) {
  const Attention& a = c.a;
  constexpr auto kernel = chunk_kernel<T, D, B_r, BY_LENGTH>;
  constexpr int bytes = sizeof(Shared<D, B_r>);
  static_assert(bytes <= 227 * 1024, "a block has at most 227 KiB of shared memory");
  c.tokens = B_r / c.group;
  c.tiles = ceil_div(a.q_len, c.tokens);
  c.waiting = c.partial + c.parts * B_r * (D + 2), c.taken = c.counters + c.parts * c.splits;
  cudaError_t error;
  if ((error = make_packed_map<T>(&c.q_map, a, c.group, c.tokens))) return error;
  if ((error = allow_shared_memory<kernel, bytes>())) return error;
  dim3 grid(c.splits * c.tiles, c.clusters * a.kv_heads, a.batch);
  if (BY_LENGTH) grid = c.splits * (c.tiles * a.kv_heads * a.batch + c.parts);
  return launch_kernel<Chunk>(kernel, grid, Shared<D, B_r>::THREADS, bytes, stream, c, c.splits);
}

template <typename T, int D, int B_r>
static cudaError_t launch(Chunk& c, cudaStream_t stream) {
  return c.at_once > 0 ? launch<T, D, B_r, true>(c, stream) : launch<T, D, B_r, false>(c, stream);
}

template <typename T, int D>
static cudaError_t launch(Chunk& c, int rows, cudaStream_t stream) {
  c.group = c.a.heads / c.a.kv_heads;
  if (rows == 64) return launch<T, D, 64>(c, stream);
  if (rows == 128) return launch<T, D, 128>(c, stream);
  if constexpr (D == 64 && !GAPS) {
    if (rows == 192) return launch<T, D, 192>(c, stream);
  }
  return cudaErrorInvalidValue;
}

template <typename T>
static cudaError_t launch(Chunk& c, int rows, const View& k, const View& v, cudaStream_t stream) {
  const int keys = 1 << c.box_bits, columns = c.block_table ? 64 : c.a.head_dim;  // of a box
  cudaError_t error;
  if ((error = make_rows_map<T>(&c.k_map, k, keys, columns))) return error;
  if ((error = make_rows_map<T>(&c.v_map, v, keys, columns))) return error;
  if (c.a.head_dim == 64) return launch<T, 64>(c, rows, stream);
  if (c.a.head_dim == 128) return launch<T, 128>(c, rows, stream);
  return cudaErrorInvalidValue;
}

// What a chunk with GAPS has beside the others.
static void set_gaps(Chunk& c, const View& k, const int* leftpad_k, const int* block_table, int max_pages, int window) {
  c.leftpad_k = leftpad_k, c.block_table = block_table, c.max_pages = max_pages, c.window = window;
  c.pages = k.sizes[0], c.page_size = k.sizes[1];
  if (block_table) c.pages_of_16_keys = ((1u << 31) + c.page_size / 16 - 1) / (c.page_size / 16);
}

// rows: of a tile; 64, 128, or with head_dim 64 and without GAPS 192. at_once: 0, or by length how many clusters are. c
// has what is not named here.
static cudaError_t launch(Chunk& c, View q, View k, View v, View out, const int* seqlens_k, float scale, int causal,
                          int rows, int splits, int clusters, int at_once, int parts, float* partial, int* counters,
                          int dtype, cudaStream_t stream) {
  c.a = make_attention(q, k, v, out, nullptr, scale, causal), c.seqlens_k = seqlens_k;
  if (c.block_table) c.a.kv_len = c.max_pages * c.page_size;
  c.box_bits = keys_of_a_block(c.a.head_dim, rows) == 64 ? 6 : 7;
  while (c.block_table && c.page_size % (1 << c.box_bits)) --c.box_bits;
  c.splits = splits, c.clusters = clusters, c.at_once = at_once;
  c.parts = parts, c.partial = partial, c.counters = counters;
  if (dtype == FLOAT16) return launch<__half>(c, rows, k, v, stream);
  if (dtype == BFLOAT16) return launch<__nv_bfloat16>(c, rows, k, v, stream);
  return cudaErrorInvalidValue;
}
