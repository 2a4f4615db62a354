// Chunked prefill: a chunk of a prompt against a long cache, few rows and many keys. fp16 or bf16, sums in fp32.
// architectures: sm_90a cpu
//
//   q, out (batch, q_len, heads, head_dim)     k, v (batch, kv_len, kv_heads, head_dim)
//   grid  (splits, tiles kv_heads, batch)      the splits of a tile are clusters of up to 8
//   block (384)                                a producer and two consumers, as in task 4's rung 13
//
// Rung 13 has a block per 128 rows of one head and all of their keys: 64 rows of 8 heads are 8 blocks, for 132 SMs, and
// the heads of a group all read the same keys. Against it,
//   packed heads   a tile has `tokens` rows of all heads of a group, by one TMA load: row r is token r / group, head
//                  r % group. A key is read once for all of them, and no row of a tile is empty while others wait
//   few rows       of 64 or fewer each consumer has all, and every other block of keys
//   split keys     the blocks of a cluster have a tile's rows and each its share of the keys. Each sends the others
//                  their rows of its O_i, m_i and l_i, and merges the rows that it gets. Of a tile with several
//                  clusters the last one to come merges theirs, through global memory
#include <cuda_runtime.h>

#include "../../task4/ladder/attention.cuh"
#include "../../task4/ladder/hopper.cuh"
#include "../../task4/ladder/warpgroup.cuh"
#include "cluster_memory.cuh"
#include "count.cuh"
#include "dependent_launch.cuh"
#include "tensor_map.cuh"

constexpr int CONSUMERS = 2, B_c = 128;
constexpr int MOST_SPLITS = 8;

enum NamedBarrier { MERGE = 1,
                    TURN = 2 };  // TURN + w: consumer w may issue its products

struct Chunk {
  CUtensorMap q_map, k_map, v_map;
  Attention a;
  int group, tokens, tiles;  // heads of a kv head, tokens of a tile, tiles of a kv head
  int splits, clusters;      // blocks of a cluster, clusters of a tile
  float* partial;            // [tile][cluster][B_r][head_dim], and behind all of them m, l: [tile][cluster][B_r][2]
  int* counters;             // [tile][splits], 0 between launches
};

// B_r: 64 rows for each consumer; or 64 altogether, whose blocks of keys the consumers share.
template <int D, int B_r>
struct Shared {
  static constexpr int STAGES = D == 64 ? 6 : 3, SHARES = 64 * CONSUMERS / B_r;
  static constexpr int PITCH = D + 8;  // of a row of parts: 8 rows' pairs are in different banks
  alignas(1024) uint16_t Q[B_r * D];
  union {
    struct {
      alignas(1024) uint16_t K[STAGES][B_c * D], V[STAGES][B_c * D];
    };
    struct {                            // when the last K_j and V_j have been read
      float O[SHARES * B_r * PITCH];    // [share][row][PITCH], of this block
      float2 ml[SHARES * B_r];          // [share][row]
      float O_of[(B_r + MOST_SPLITS) * PITCH];  // [split][own row][PITCH], of the cluster's blocks
      float2 ml_of[B_r + MOST_SPLITS];          // [split][own row]
    } parts;
  };
  // full: the buffer's contents have arrived. empty: all its readers are done
  uint64_t q_full, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
  uint64_t received;  // counts what the cluster's blocks send
  bool last;  // of the tile's clusters
};

template <typename T, int D, int B_r>
__global__ void __launch_bounds__((1 + CONSUMERS) * WARPGROUP, 1) chunk_kernel(const __grid_constant__ Chunk c) {
  using Memory = Shared<D, B_r>;
  constexpr int STAGES = Memory::STAGES, SHARES = Memory::SHARES;
  const Attention& a = c.a;
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& s = *reinterpret_cast<Memory*>(raw);

  const int cluster = blockIdx.x / c.splits, split = blockIdx.x - cluster * c.splits, splits = c.splits;
  const int kv_head = blockIdx.y / c.tiles, b = blockIdx.z;
  const int token_0 = (c.tiles - 1 - blockIdx.y % c.tiles) * c.tokens;  // causal: the longest rows first
  const int rows = min(c.tokens, a.q_len - token_0) * c.group;          // of the tile that exist
  const int all = ceil_div(a.visible(token_0 + rows / c.group - 1), B_c);  // blocks of K and V that some row sees
  const int first = int64_t(all) * blockIdx.x / gridDim.x, end = int64_t(all) * (blockIdx.x + 1) / gridDim.x;
  const int each = ceil_div(B_r, splits), own = max(0, min(each, rows - split * each));  // rows that this block merges

  const int warpgroup = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);  // shuffled: the compiler sees it as warp-uniform
  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&c.q_map, &c.k_map, &c.v_map}) tma_prefetch(map);
    const int held = c.tokens * c.group;  // rows; a tile has room for a few more than heads divide
    for (int part = 0; part < D / 64; ++part) may_be_anything(s.Q + (part * B_r + held) * 64, (B_r - held) * 128);
    mbarrier_init(&s.q_full, 1), mbarrier_init(&s.received, 1);
    constexpr int READERS = 4 * CONSUMERS / SHARES;  // warps
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(&s.k_full[i], 1), mbarrier_init(&s.k_empty[i], READERS);
      mbarrier_init(&s.v_full[i], 1), mbarrier_init(&s.v_empty[i], READERS);
    }
    mbarrier_init_fence();
    mbarrier_arrive_expect(&s.received, (splits - 1) * own * (D * sizeof(float) + sizeof(float2)));
  }
  __syncthreads();  // barriers initialised before any thread uses them

  Ring<STAGES> k, v;
  wait_for_the_launch_before();

  if (warpgroup == 0) {
    registers_give<24>();
    if (threadIdx.x == 0 && first < end) {  // the producer
      mbarrier_arrive_expect(&s.q_full, c.tokens * c.group * D * sizeof(T));
      for (int part = 0; part < D / 64; ++part)
        tma_load_box(s.Q + part * B_r * 64, &c.q_map, &s.q_full, kv_head * c.group, token_0, part, b);
      const uint64_t policy = c.tiles == 1 ? EVICT_FIRST : EVICT_NORMAL;
      // In the order of use: K, K V, K V, ..., V; where consumers share the keys, K, K, K V, ..., V, V
      for (int j = end - 1; j >= first - SHARES; --j) {
        if (j >= first) {
          mbarrier_wait(&s.k_empty[k.index], k.parity ^ 1);
          mbarrier_arrive_expect(&s.k_full[k.index], B_c * D * sizeof(T));
          tma_load(s.K[k.index], &c.k_map, &s.k_full[k.index], j * B_c, kv_head, b, policy);
          k.next();
        }
        if (j < end - SHARES) {
          mbarrier_wait(&s.v_empty[v.index], v.parity ^ 1);
          mbarrier_arrive_expect(&s.v_full[v.index], B_c * D * sizeof(T));
          tma_load(s.V[v.index], &c.v_map, &s.v_full[v.index], (j + SHARES) * B_c, kv_head, b, policy);
          v.next();
        }
      }
      begin_the_next_launch();
    }
    return;
  }

  // ---- A consumer
  registers_take<240>();
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

  const auto go_on = [](Ring<STAGES>& ring) {
    for (int i = 0; i < SHARES; ++i) ring.next();
  };
  if (share == 1) k.next(), v.next();

  int j = end - 1 - share;  // the first S has no P V_j beside it
  if (j >= first) {
    const auto sees = [&](int row) { return a.visible(token_0 + row / c.group); };
    const int seen[2] = {sees(row) - 2 * t, sees(row + 8) - 2 * t};  // from this thread's first column on
    const int whole = max(first, sees(row_w) / B_c);                 // all rows see all blocks before it

    mbarrier_wait(&s.q_full, 0);
    mbarrier_wait(&s.k_full[k.index], k.parity);
    wait_for_turn();
    begin_S<T, D, B_r, B_c>(S, s.Q + row_w * 64, s.K[k.index]);
    pass_turn();
    wgmma_wait<0>();
    arrive_as_warp(&s.k_empty[k.index]);  // S is complete: K_j has been read
    go_on(k);
    softmax<true, B_c>(S, m_i, l_i, rescale, scale, {seen[0] - j * B_c, seen[1] - j * B_c});
    pack_P<T, B_c>(P, S);

    // Each further S beside the P V_j of the previous block: S is complete first, and its softmax runs beside P V_j
    const auto step = [&](auto masked) {
      mbarrier_wait(&s.k_full[k.index], k.parity);
      wait_for_turn();
      begin_S<T, D, B_r, B_c>(S, s.Q + row_w * 64, s.K[k.index]);
      mbarrier_wait(&s.v_full[v.index], v.parity);
      begin_PV<T, D, B_c>(O_i, P, s.V[v.index]);
      pass_turn();
      wgmma_wait<1>();
      arrive_as_warp(&s.k_empty[k.index]);
      go_on(k);
      softmax<masked.value, B_c>(S, m_i, l_i, rescale, scale, {seen[0] - j * B_c, seen[1] - j * B_c});
      finish_PV(O_i, P);
      arrive_as_warp(&s.v_empty[v.index]);  // O_i is complete: V_j has been read
      go_on(v);
      rescale_O<D>(O_i, rescale);
      pack_P<T, B_c>(P, S);
    };
    for (j -= SHARES; j >= whole; j -= SHARES) step(std::true_type{});
#pragma unroll 1
    for (; j >= first; j -= SHARES) step(std::false_type{});

    mbarrier_wait(&s.v_full[v.index], v.parity);
    begin_PV<T, D, B_c>(O_i, P, s.V[v.index]);
    finish_PV(O_i, P);
  }
  if (share == 1 && (end - first) % 2 == 1) wait_for_turn(), pass_turn();  // the other has had one turn more
  if (wg == 0) wait_for_turn();  // the last consumer's last pass_turn(): no barrier is left with arrivals

  // ---- The parts. Rows [each r, each (r + 1)) of the tile go to block r of the cluster
  constexpr int PITCH = Memory::PITCH, QUADS = D / 4, MERGERS = CONSUMERS * WARPGROUP;
  const int thread = threadIdx.x - WARPGROUP;
  const bool direct = SHARES == 1 && splits > 1;  // from registers: only this consumer has these rows
  const auto put = [&](int to, auto* there, auto x) {
    to == split ? void(*there = x) : send_to(to, there, x, &s.received);
  };
  const auto send = [&](int r, int e, auto x) {  // columns e and on of row r
    const int to = r / each, there = (split - to) * each + r;
    put(to, reinterpret_cast<decltype(x)*>(&s.parts.O_of[there * PITCH + e]), x);
  };
  const auto send_ml = [&](int r, float2 ml) {
    const int to = r / each;
    put(to, &s.parts.ml_of[(split - to) * each + r], ml);
  };
  arrive_in_cluster();           // K_j and V_j have been read: what the others send may overwrite them,
  barrier_sync(MERGE, MERGERS);  // and so may this block's parts
  if (direct) wait_for_cluster();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int r = row + 8 * h;
    float l = l_i[h];
    l += __shfl_xor_sync(~0u, l, 1), l += __shfl_xor_sync(~0u, l, 2);
    const float2 ml = make_float2(m_i[h], l);
    if (r >= rows) continue;
    if (t == 0) direct ? send_ml(r, ml) : void(s.parts.ml[share * B_r + r] = ml);
#pragma unroll
    for (int i = 0; i < D / 8; ++i) {
      const int e = 8 * i + 2 * t;
      const float2 pair = make_float2(O_i[4 * i + 2 * h], O_i[4 * i + 2 * h + 1]);
      if (direct) {
        send(r, e, pair);
      } else {
        *reinterpret_cast<float2*>(&s.parts.O[(share * B_r + r) * PITCH + e]) = pair;
      }
    }
  }
  if (!direct) barrier_sync(MERGE, MERGERS), wait_for_cluster();

  const auto write = [&](int r, int e, float4 O, float factor) {
    const int token = token_0 + (split * each + r) / c.group, head = kv_head * c.group + (split * each + r) % c.group;
    T* out = a.out_head<T>(b, head) + int64_t(token) * a.out_strides.row + e;
    *reinterpret_cast<uint2*>(out) =
        make_uint2(pack<T>(O.x * factor, O.y * factor), pack<T>(O.z * factor, O.w * factor));
  };
  const auto add = [](float4& O, float factor, float4 part) {
    O.x = fmaf(factor, part.x, O.x), O.y = fmaf(factor, part.y, O.y);
    O.z = fmaf(factor, part.z, O.z), O.w = fmaf(factor, part.w, O.w);
  };
  const int64_t tile = int64_t(blockIdx.z) * gridDim.y + blockIdx.y;
  const int64_t slots = int64_t(gridDim.z) * gridDim.y * c.clusters;
  const auto slot = [&](int n, int r) { return (tile * c.clusters + n) * B_r + split * each + r; };
  float2* global_ml = reinterpret_cast<float2*>(c.partial + slots * B_r * D);
  // Of this block's row r, columns e to e + 3, all that the cluster has.
  const auto complete = [&](int r, int e, float2 ml, float4 O) {
    if (c.clusters == 1) return write(r, e, O, ml.y == 0.0f ? 0.0f : 1.0f / ml.y);
    __stcg(reinterpret_cast<float4*>(&c.partial[slot(cluster, r) * D + e]), O);
    if (e == 0) __stcg(&global_ml[slot(cluster, r)], ml);
  };
  // use(r, e, m and l, O) gets `parts` parts merged, of each of these rows: part n of row r is row n * pitch + r there.
  const auto merge = [&](int rows, int parts, int pitch, const float2* ml, const float* O_of, auto use) {
    for (int i = thread; i < rows * QUADS; i += MERGERS) {
      const int r = i / QUADS, e = i % QUADS * 4;
      float m = -INFINITY, l = 0.0f;
      for (int n = 0; n < parts; ++n) m = fmaxf(m, ml[n * pitch + r].x);
      const float shift = m == -INFINITY ? 0.0f : m * scale;
      float4 O = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
      for (int n = 0; n < parts; ++n) {
        const float2 part = ml[n * pitch + r];
        const float factor = fast_exp2(fmaf(part.x, scale, -shift));
        l = fmaf(factor, part.y, l);
        add(O, factor, *reinterpret_cast<const float4*>(&O_of[(n * pitch + r) * PITCH + e]));
      }
      use(r, e, make_float2(m, l), O);
    }
  };
  if (splits == 1) {
    merge(rows, SHARES, B_r, s.parts.ml, s.parts.O, complete);
  } else {
    if (!direct)
      merge(rows, SHARES, B_r, s.parts.ml, s.parts.O, [&](int r, int e, float2 ml, float4 O) {
        send(r, e, O);
        if (e == 0) send_ml(r, ml);
      });
    barrier_sync(MERGE, MERGERS);  // this block's own part is complete
    mbarrier_wait(&s.received, 0);
    merge(own, splits, each, s.parts.ml_of, s.parts.O_of, complete);
  }
  if (c.clusters == 1) return;

  barrier_sync(MERGE, MERGERS);
  if (thread == 0) {
    int* counter = &c.counters[tile * splits + split];
    s.last = add_acquire_release(counter, 1) == c.clusters - 1;
    if (s.last) *counter = 0;  // for the next launch
  }
  barrier_sync(MERGE, MERGERS);
  if (!s.last) return;
  // Several quads of several clusters at once: their loads are on the way together.
  constexpr int AT_ONCE = 4, PARTS = 4;
  for (int i_0 = thread; i_0 < own * QUADS; i_0 += AT_ONCE * MERGERS) {
    const auto quad = [&](int u) { return min(i_0 + u * MERGERS, own * QUADS - 1); };
    float m[AT_ONCE], l[AT_ONCE] = {};
    float4 O[AT_ONCE] = {};
    for (float& m_u : m) m_u = -INFINITY;
#pragma unroll 1
    for (int n_0 = 0; n_0 < c.clusters; n_0 += PARTS) {
      float2 ml[AT_ONCE][PARTS];
      float4 part[AT_ONCE][PARTS];
#pragma unroll
      for (int u = 0; u < AT_ONCE; ++u) {
#pragma unroll
        for (int n = 0; n < PARTS; ++n) {
          const int64_t from = slot(min(n_0 + n, c.clusters - 1), quad(u) / QUADS);
          ml[u][n] = __ldcg(&global_ml[from]);
          part[u][n] = __ldcg(reinterpret_cast<const float4*>(&c.partial[from * D + quad(u) % QUADS * 4]));
          if (n_0 + n >= c.clusters) ml[u][n].x = -INFINITY;
        }
      }
#pragma unroll
      for (int u = 0; u < AT_ONCE; ++u) {
        float m_new = m[u];
        for (const float2& of_part : ml[u]) m_new = fmaxf(m_new, of_part.x);
        const float shift = m_new == -INFINITY ? 0.0f : m_new * scale, rescale = fast_exp2(fmaf(m[u], scale, -shift));
        m[u] = m_new, l[u] *= rescale, O[u].x *= rescale, O[u].y *= rescale, O[u].z *= rescale, O[u].w *= rescale;
#pragma unroll
        for (int n = 0; n < PARTS; ++n) {
          const float factor = fast_exp2(fmaf(ml[u][n].x, scale, -shift));
          l[u] = fmaf(factor, ml[u][n].y, l[u]);
          add(O[u], factor, part[u][n]);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u) {
      if (i_0 + u * MERGERS < own * QUADS)
        write(quad(u) / QUADS, quad(u) % QUADS * 4, O[u], l[u] == 0.0f ? 0.0f : 1.0f / l[u]);
    }
  }
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

template <typename T, int D, int B_r>
static cudaError_t launch(Chunk& c, cudaStream_t stream) {
  const Attention& a = c.a;
  constexpr auto kernel = chunk_kernel<T, D, B_r>;
  constexpr int bytes = sizeof(Shared<D, B_r>);
  static_assert(bytes <= 227 * 1024, "a block has at most 227 KiB of shared memory");
  c.tokens = B_r / c.group;
  c.tiles = ceil_div(a.q_len, c.tokens);
  cudaError_t error;
  if ((error = make_packed_map<T>(&c.q_map, a, c.group, c.tokens))) return error;
  if ((error = make_tensor_map<T>(&c.k_map, a.k, a.k_strides, a.batch, a.kv_len, a.kv_heads, D, B_c))) return error;
  if ((error = make_tensor_map<T>(&c.v_map, a.v, a.v_strides, a.batch, a.kv_len, a.kv_heads, D, B_c))) return error;
  if ((error = allow_shared_memory<kernel, bytes>())) return error;
  const dim3 grid(c.splits * c.clusters, c.tiles * a.kv_heads, a.batch);
  return launch_kernel<Chunk>(kernel, grid, (1 + CONSUMERS) * WARPGROUP, bytes, stream, c, c.splits);
}

template <typename T, int D>
static cudaError_t launch(Chunk& c, cudaStream_t stream) {
  c.group = c.a.heads / c.a.kv_heads;
  if (c.a.q_len * c.group <= 64) return launch<T, D, 64>(c, stream);
  return launch<T, D, 128>(c, stream);
}

template <typename T>
static cudaError_t launch(Chunk& c, cudaStream_t stream) {
  if (c.a.head_dim == 64) return launch<T, 64>(c, stream);
  if (c.a.head_dim == 128) return launch<T, 128>(c, stream);
  return cudaErrorInvalidValue;
}

// How many clusters of so many blocks the GPU holds at once. In each of the kernels a block takes an SM.
extern "C" int clusters_at_once(int splits) {
  constexpr auto kernel = chunk_kernel<__nv_bfloat16, 128, 128>;
  constexpr int bytes = sizeof(Shared<128, 128>);
  if (allow_shared_memory<kernel, bytes>()) return 0;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {unsigned(splits), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(splits), config.blockDim = dim3((1 + CONSUMERS) * WARPGROUP), config.dynamicSmemBytes = bytes;
  config.attrs = &attribute, config.numAttrs = 1;
  int clusters = 0;
  return cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) ? 0 : clusters;
}

extern "C" cudaError_t chunk(View q, View k, View v, View out, float scale, int causal, int splits, int clusters,
                             float* partial, int* counters, int dtype, cudaStream_t stream) {
  Chunk c;
  c.a = make_attention(q, k, v, out, nullptr, scale, causal);
  c.splits = splits, c.clusters = clusters, c.partial = partial, c.counters = counters;
  if (dtype == FLOAT16) return launch<__half>(c, stream);
  if (dtype == BFLOAT16) return launch<__nv_bfloat16>(c, stream);
  return cudaErrorInvalidValue;
}
