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
//   split keys     the blocks of a cluster have a tile's rows and each its share of the keys. Each sends the others
//                  their part of its O_i, m_i and l_i, through shared memory, and merges the rows that it gets. Of a
//                  tile with several clusters the last one to come merges theirs, through global memory
#include <cuda_runtime.h>

#include "../../task4/ladder/attention.cuh"
#include "../../task4/ladder/hopper.cuh"
#include "../../task4/ladder/warpgroup.cuh"
#include "cluster_memory.cuh"
#include "dependent_launch.cuh"
#include "tensor_map.cuh"

constexpr int CONSUMERS = 2, B_r = 64 * CONSUMERS, B_c = 128, STAGES = 2;
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

template <int D>
struct Shared {
  static constexpr int PITCH = D + 8;  // of a row of parts: 8 rows' pairs are in different banks
  alignas(1024) uint16_t Q[B_r * D];
  union {
    struct {
      alignas(1024) uint16_t K[STAGES][B_c * D], V[STAGES][B_c * D];
    };
    struct {  // when all blocks of the cluster have read their last K_j and V_j
      float O[(B_r + MOST_SPLITS) * PITCH];  // [split][rows of this block][PITCH]
      float2 ml[B_r + MOST_SPLITS];          // [split][rows of this block]
    } parts;
  };
  // full: the buffer's contents have arrived. empty: all its readers are done
  uint64_t q_full, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
  bool last;  // of the tile's clusters
};

template <typename T, int D>
__global__ void __launch_bounds__((1 + CONSUMERS) * WARPGROUP, 1) chunk_kernel(const __grid_constant__ Chunk c) {
  const Attention& a = c.a;
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& s = *reinterpret_cast<Shared<D>*>(raw);

  const int warpgroup = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);  // shuffled: the compiler sees it as warp-uniform
  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&c.q_map, &c.k_map, &c.v_map}) tma_prefetch(map);
    const int held = c.tokens * c.group;  // rows; a tile has room for a few more than heads divide
    for (int part = 0; part < D / 64; ++part) may_be_anything(s.Q + (part * B_r + held) * 64, (B_r - held) * 128);
    mbarrier_init(&s.q_full, 1);
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(&s.k_full[i], 1), mbarrier_init(&s.k_empty[i], 4 * CONSUMERS);  // the consumers' warps
      mbarrier_init(&s.v_full[i], 1), mbarrier_init(&s.v_empty[i], 4 * CONSUMERS);
    }
    mbarrier_init_fence();
  }
  __syncthreads();  // barriers initialised before any thread uses them

  const int cluster = blockIdx.x / c.splits, split = blockIdx.x - cluster * c.splits, splits = c.splits;
  const int kv_head = blockIdx.y / c.tiles, b = blockIdx.z;
  const int token_0 = (c.tiles - 1 - blockIdx.y % c.tiles) * c.tokens;  // causal: the longest rows first
  const int rows = min(c.tokens, a.q_len - token_0) * c.group;          // of the tile that exist
  const int all = ceil_div(a.visible(token_0 + rows / c.group - 1), B_c);  // blocks of K and V that some row sees
  const int first = int64_t(all) * blockIdx.x / gridDim.x, end = int64_t(all) * (blockIdx.x + 1) / gridDim.x;
  Ring<STAGES> k, v;
  wait_for_the_launch_before();

  if (warpgroup == 0) {
    registers_give<24>();
    if (threadIdx.x == 0 && first < end) {  // the producer
      mbarrier_arrive_expect(&s.q_full, c.tokens * c.group * D * sizeof(T));
      for (int part = 0; part < D / 64; ++part)
        tma_load_box(s.Q + part * B_r * 64, &c.q_map, &s.q_full, kv_head * c.group, token_0, part, b);
      for (int j = end - 1; j >= first - 1; --j) {  // in the order of use: K, K V, K V, ..., V
        if (j >= first) {
          mbarrier_wait(&s.k_empty[k.index], k.parity ^ 1);
          mbarrier_arrive_expect(&s.k_full[k.index], B_c * D * sizeof(T));
          tma_load(s.K[k.index], &c.k_map, &s.k_full[k.index], j * B_c, kv_head, b);
          k.next();
        }
        if (j < end - 1) {
          mbarrier_wait(&s.v_empty[v.index], v.parity ^ 1);
          mbarrier_arrive_expect(&s.v_full[v.index], B_c * D * sizeof(T));
          tma_load(s.V[v.index], &c.v_map, &s.v_full[v.index], (j + 1) * B_c, kv_head, b);
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
  const int row = wg * 64 + warp * 16 + g;  // of the tile
  const float scale = a.scale * LOG2_E;

  // Consumers alternate. While a consumer's products run, it computes its softmax, and the next consumer's products
  // queue behind them.
  const auto wait_for_turn = [&] { barrier_sync(TURN + wg, 2 * WARPGROUP); };
  const auto pass_turn = [&] { barrier_arrive(TURN + (wg + 1) % CONSUMERS, 2 * WARPGROUP); };
  if (wg == CONSUMERS - 1) pass_turn();  // consumer 0 begins

  float S[B_c / 2], O_i[D / 2] = {}, l_i[2] = {}, rescale[2];  // row g: h = 0, row g + 8: h = 1
  float m_i[2] = {-INFINITY, -INFINITY};
  uint32_t P[B_c / 4];

  if (first < end) {
    const auto sees = [&](int row) { return a.visible(token_0 + row / c.group); };
    const int seen[2] = {sees(row) - 2 * t, sees(row + 8) - 2 * t};  // from this thread's first column on
    const int whole = max(first, sees(wg * 64) / B_c);               // all rows see all blocks before it

    int j = end - 1;  // the first S has no P V_j beside it
    mbarrier_wait(&s.q_full, 0);
    mbarrier_wait(&s.k_full[k.index], k.parity);
    wait_for_turn();
    begin_S<T, D, B_r, B_c>(S, s.Q + wg * 64 * 64, s.K[k.index]);
    pass_turn();
    wgmma_wait<0>();
    arrive_as_warp(&s.k_empty[k.index]);  // S is complete: K_j has been read
    k.next();
    softmax<true, B_c>(S, m_i, l_i, rescale, scale, {seen[0] - j * B_c, seen[1] - j * B_c});
    pack_P<T, B_c>(P, S);

    // Each further S beside the P V_j of the previous block: S is complete first, and its softmax runs beside P V_j
    const auto step = [&](auto masked) {
      mbarrier_wait(&s.k_full[k.index], k.parity);
      wait_for_turn();
      begin_S<T, D, B_r, B_c>(S, s.Q + wg * 64 * 64, s.K[k.index]);
      mbarrier_wait(&s.v_full[v.index], v.parity);
      begin_PV<T, D, B_c>(O_i, P, s.V[v.index]);
      pass_turn();
      wgmma_wait<1>();
      arrive_as_warp(&s.k_empty[k.index]);
      k.next();
      softmax<masked.value, B_c>(S, m_i, l_i, rescale, scale, {seen[0] - j * B_c, seen[1] - j * B_c});
      finish_PV(O_i, P);
      arrive_as_warp(&s.v_empty[v.index]);  // O_i is complete: V_j has been read
      v.next();
      rescale_O<D>(O_i, rescale);
      pack_P<T, B_c>(P, S);
    };
    for (--j; j >= whole; --j) step(std::true_type{});
#pragma unroll 1
    for (; j >= first; --j) step(std::false_type{});

    mbarrier_wait(&s.v_full[v.index], v.parity);
    begin_PV<T, D, B_c>(O_i, P, s.V[v.index]);
    finish_PV(O_i, P);
  }
  if (wg == 0) wait_for_turn();  // the last consumer's last pass_turn(): no barrier is left with arrivals

  // ---- The parts: block r of the cluster merges rows [each r, each (r + 1)) of the tile
  constexpr int PITCH = Shared<D>::PITCH;
  const int each = ceil_div(B_r, splits);
  arrive_in_cluster();
  wait_for_cluster();  // all blocks have read their last K_j and V_j
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int r = row + 8 * h, to = r / each, slot = split * each + r - to * each;
    float l = l_i[h];
    l += __shfl_xor_sync(~0u, l, 1), l += __shfl_xor_sync(~0u, l, 2);
    if (r >= rows) continue;
    if (t == 0) store_to(to, &s.parts.ml[slot], make_float2(m_i[h], l));
#pragma unroll
    for (int i = 0; i < D / 8; ++i)
      store_to(to, reinterpret_cast<float2*>(&s.parts.O[slot * PITCH + 8 * i + 2 * t]),
               make_float2(O_i[4 * i + 2 * h], O_i[4 * i + 2 * h + 1]));
  }
  arrive_in_cluster();
  wait_for_cluster();  // all parts are here

  // merged(m, l, O) of `parts` parts of this block's row r, columns e to e + 3
  const int own = min(each, rows - split * each);
  const auto merge = [&](int parts, auto ml_of, auto O_of, auto use) {
    for (int i = threadIdx.x - WARPGROUP; i < own * (D / 4); i += CONSUMERS * WARPGROUP) {
      const int r = i / (D / 4), e = i % (D / 4) * 4;
      float m = -INFINITY, l = 0.0f;
      for (int n = 0; n < parts; ++n) m = fmaxf(m, ml_of(n, r).x);
      const float shift = m == -INFINITY ? 0.0f : m * scale;
      float4 O = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
      for (int n = 0; n < parts; ++n) {
        const float2 ml = ml_of(n, r);
        const float factor = fast_exp2(fmaf(ml.x, scale, -shift));
        const float4 part = O_of(n, r, e);
        l = fmaf(factor, ml.y, l);
        O.x = fmaf(factor, part.x, O.x), O.y = fmaf(factor, part.y, O.y);
        O.z = fmaf(factor, part.z, O.z), O.w = fmaf(factor, part.w, O.w);
      }
      use(r, e, make_float2(m, l), O);
    }
  };
  const auto write = [&](int r, int e, float2 ml, float4 O) {
    const float inverse = ml.y == 0.0f ? 0.0f : 1.0f / ml.y;
    const int token = token_0 + (split * each + r) / c.group, head = kv_head * c.group + (split * each + r) % c.group;
    T* out = a.out_head<T>(b, head) + int64_t(token) * a.out_strides.row + e;
    *reinterpret_cast<uint2*>(out) =
        make_uint2(pack<T>(O.x * inverse, O.y * inverse), pack<T>(O.z * inverse, O.w * inverse));
  };
  const auto ml_here = [&](int n, int r) { return s.parts.ml[n * each + r]; };
  const auto O_here = [&](int n, int r, int e) {
    return *reinterpret_cast<const float4*>(&s.parts.O[(n * each + r) * PITCH + e]);
  };
  if (c.clusters == 1) return merge(splits, ml_here, O_here, write);

  const int64_t tile = int64_t(blockIdx.z) * gridDim.y + blockIdx.y;
  const int64_t slots = int64_t(gridDim.z) * gridDim.y * c.clusters;
  const auto slot = [&](int n, int r) { return (tile * c.clusters + n) * B_r + split * each + r; };
  float2* global_ml = reinterpret_cast<float2*>(c.partial + slots * B_r * D);
  merge(splits, ml_here, O_here, [&](int r, int e, float2 ml, float4 O) {
    __stcg(reinterpret_cast<float4*>(&c.partial[slot(cluster, r) * D + e]), O);
    if (e == 0) __stcg(&global_ml[slot(cluster, r)], ml);
  });
  __threadfence();  // this thread's parts are visible to all blocks before the block is counted
  barrier_sync(MERGE, CONSUMERS * WARPGROUP);
  if (threadIdx.x == WARPGROUP) {
    int* counter = &c.counters[tile * splits + split];
    s.last = atomicAdd(counter, 1) == c.clusters - 1;
    if (s.last) *counter = 0;  // for the next launch
    __threadfence();           // the other clusters' parts are read after the count
  }
  barrier_sync(MERGE, CONSUMERS * WARPGROUP);
  if (!s.last) return;
  merge(
      c.clusters, [&](int n, int r) { return __ldcg(&global_ml[slot(n, r)]); },
      [&](int n, int r, int e) { return __ldcg(reinterpret_cast<const float4*>(&c.partial[slot(n, r) * D + e])); },
      write);
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

template <typename T, int D>
static cudaError_t launch(Chunk& c, cudaStream_t stream) {
  const Attention& a = c.a;
  constexpr auto kernel = chunk_kernel<T, D>;
  constexpr int bytes = sizeof(Shared<D>);
  static_assert(bytes <= 227 * 1024, "a block has at most 227 KiB of shared memory");
  c.group = a.heads / a.kv_heads;
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

template <typename T>
static cudaError_t launch(Chunk& c, cudaStream_t stream) {
  if (c.a.head_dim == 64) return launch<T, 64>(c, stream);
  if (c.a.head_dim == 128) return launch<T, 128>(c, stream);
  return cudaErrorInvalidValue;
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
