// A decode step of a whole model in one launch.
// architectures: sm_90a cpu
//
//   grid  (SMs), all resident; block (288): eight warps that compute, and one of which one thread loads
//
// The thread that loads has the weights of all layers brought to shared memory, one matrix after the other, and never
// waits for a result; where there is no room, it has the next ones brought to L2. The others take the step's phases
// in turn, and meet all other blocks after each, but not after q, k and v:
//
//   embedding | norm, q k v | RoPE, append, attention | o, residual | norm, gate and up | down, residual | ... | logits
//
// Products are those of stream.cuh. Attention reads each key once for all query heads of its group: a block has some
// keys of a kv head, and the last block of a kv head to come merges their parts.
//
// What blocks leave for each other has to be visible when it is read. For a meeting that would be a fence in each,
// which takes longer while weights stream. So most meetings say only when to look (words.cuh). q, k and v are words
// with tags, of which a block needs those of a few others, and of one row all results are. Of more rows they would be
// twice as many bytes for all blocks to read, so x and inner are known by value. A layer empties their places first,
// when all blocks have read what the layer before left there; the meeting after attention is fenced, ahead of the next
// results.
//
// Several GPUs have heads and columns of the MLP each. o and down are sums over all of them then: each GPU sends its
// part of a value to the others as soon as it has it, and adds theirs.
#include <cuda_runtime.h>

#include <utility>

#include "attention_phase.cuh"
#include "grid.cuh"
#include "model.cuh"

// ---- The phases that are no products

// A block has those columns of x that it adds o and down to: it reads them again itself.
template <Arrival ARRIVAL, typename T>
DEVICE void embed(const Model& m, Units own, unsigned tag) {
  const int first = own.first * UNIT, last = min(own.last * UNIT, m.hidden);
  for (int row = 0; row < m.rows; ++row) {
    for (int n = first + threadIdx.x; n < last; n += COMPUTE) {
      float value = to_float(static_cast<const T*>(m.embedding)[m.tokens[row] * m.hidden + n]);
      if (m.positions) value += to_float(static_cast<const T*>(m.positions)[int64_t(m.lengths[row]) * m.hidden + n]);
      leave<ARRIVAL>(m.x[0], int64_t(row) * m.hidden + n, from_float<T>(value), tag);
    }
  }
}

// A key of a logit and its column, larger for larger logits and then for smaller columns.
DEVICE unsigned long long rank_of(float logit, int column) {
  const unsigned bits = __float_as_uint(logit);
  return uint64_t(bits >> 31 ? ~bits : bits | 0x80000000u) << 32 | ~unsigned(column);
}

// What layer i leaves after attention has these places: x within it, inner, and x behind it, which are neighbours.
template <typename T>
DEVICE void empty_places(const Model& m, int i) {
  const int vectors = m.rows * (2 * m.hidden + m.shapes[DOWN].K) / int(16 / sizeof(T));
  uint4* places = static_cast<uint4*>(i % 2 ? m.x[0] : m.within);  // m.x[1] is behind inner
  const int first = (threadIdx.x / 8 * gridDim.x + blockIdx.x) * 8 + threadIdx.x % 8;  // whole lines of each block
  for (int n = first; n < vectors; n += COMPUTE * gridDim.x) places[n] = make_uint4(~0u, ~0u, ~0u, ~0u);
}

template <typename T, int X_ROWS, int D, typename Math>
DEVICE void compute_step(const Model& m, Memory<T, X_ROWS, D>& mem, Stage stage) {
  constexpr bool BY_VALUE = ARRIVAL<X_ROWS> == Arrival::BY_VALUE;
  Grid grid = {&m.counters[CAME * APART], m.clocks,
               unsigned(m.counters[BEFORE * APART]) * (5 * m.layer_count + 1)};
  grid.look_at_the_clock();
  if (threadIdx.x < X_ROWS) mem.best[threadIdx.x] = 0;
  embed<ARRIVAL<X_ROWS>, T>(m, mem.own[O], grid.tag_written());
  grid.come(BY_VALUE);
  for (int i = 0, which = QKV;; which < DOWN ? ++which : (++i, which = i < m.layer_count ? QKV : HEAD)) {
    const Product p = m.product(mem.layers[i], i, which, mem.own[which], grid.tag_read());
    constexpr int PIECES = X_PIECES<T, X_ROWS, D>;
    Share<T, X_ROWS, Math, MOST_UNITS, PIECES, ARRIVAL<X_ROWS>> share(p, mem.ring, mem.x, stage);
    grid.wait_for_all();
    if (BY_VALUE && which == QKV) empty_places<T>(m, i);
    if (threadIdx.x == 0) atomicExch(&mem.ring.phase, grid.phases);
    share.compute(
        [&](int row, int column, float sum) {
          if (m.gpus == 1 || (which != O && which != DOWN)) return sum;
          return mem.inboxes.sum(i, which == DOWN, row, column, sum);
        },
        [&](int row, int column, T value) {
          const int64_t i = row * p.out_stride + column;
          if (which == QKV) return leave<Arrival::BY_TAG>(p.out, i, value, grid.tag_written());
          if (which < HEAD) return leave<ARRIVAL<X_ROWS>>(p.out, i, value, grid.tag_written());
          put(p, row, column, value);
          const unsigned long long rank = rank_of(to_float(value), m.rank * p.N + column);
          if (rank > peek(&mem.best[row])) atomicMax(&mem.best[row], rank);
        });
    if (which == HEAD) break;
    grid.come(false);
    // Since q, k and v were left, attention and o have been, and this phase.
    if (which == UP && m.sets > 1) append_later<T, D>(m, mem.lengths, i, grid.tag_read() - 3);
    if (which > QKV) continue;
    const Item<T, D> item(m, mem.lengths, min(int(blockIdx.x), m.items() - 1));
    grid.look_at_the_clock();  // q, k and v are looked for at once: a block needs those of a few others only
    attend<T>(m, i, item, mem, stage, grid);
    grid.come(BY_VALUE || m.sets > 1);  // several sets' tiles have the place where a block of one appends
  }
  meet();  // the block's best are known
  ++grid.phases, grid.look_at_the_clock();
  if (threadIdx.x < m.rows) atomicMax(&m.best[threadIdx.x], mem.best[threadIdx.x]);
  __threadfence();
  meet();
  if (threadIdx.x > 0 || atomicAdd(&m.counters[DONE * APART], 1) < int(gridDim.x) - 1) return;
  __threadfence();  // the last block: all others are done
  m.counters[CAME * APART] = m.counters[DONE * APART] = 0;
  ++m.counters[BEFORE * APART];
  for (int row = 0; row < m.rows; ++row) {
    const unsigned long long best = __ldcg(&m.best[row]);
    m.tokens[row] = ~unsigned(m.gpus > 1 ? mem.inboxes.largest(row, best) : best);
    m.best[row] = 0;
    ++m.lengths[row];
  }
}

// ---- The thread that loads

#ifdef __CUDACC__
DEVICE void to_L2(const void* line) { asm volatile("prefetch.global.L2 [%0];" ::"l"(line)); }
#else
DEVICE void to_L2(const void*) {}
#endif

// What else a product takes from memory is in L2 by then: the memory's queue is long while weights are read.
template <typename T>
DEVICE void prefetch_beside(const Product& p) {
  constexpr int LINE = 128 / sizeof(T);
  for (int k = blockIdx.x * LINE; p.norm && k < p.K; k += gridDim.x * LINE) to_L2(static_cast<const T*>(p.norm) + k);
  for (int n = p.own.first * UNIT; n < min(p.N, p.own.last * UNIT); n += LINE) {
    if (p.bias) to_L2(static_cast<const T*>(p.bias) + n);
    if (p.row_sums) to_L2(static_cast<const T*>(p.row_sums) + n);
  }
}

template <typename T, int X_ROWS, int D>
DEVICE void load_step(const Model& m, Memory<T, X_ROWS, D>& mem, Stage stage) {
  int phase = 1;
  for (int i = 0, which = QKV;; which < DOWN ? ++which : (++i, which = i < m.layer_count ? QKV : HEAD)) {
    const Product p = m.product(mem.layers[i], i, which, mem.own[which]);
    if (which != HEAD) tma_prefetch(p.map + 1);  // the next product's
    prefetch_beside<T>(p);
    load_weights<T>(p, mem.ring, stage, {phase++, IN_FLIGHT, IN_L2, m.pace});
    if (which == QKV) load_keys<T, X_ROWS, D>(m, mem.lengths, i, phase++, mem.ring, stage);
    if (which == HEAD) break;
  }
}

template <typename T, int X_ROWS, int D>
constexpr int SLOTS = (227 * 1024 - int(sizeof(Memory<T, X_ROWS, D>))) / STAGE_BYTES;

template <typename T, int X_ROWS, int D, typename Math>
__global__ void __launch_bounds__(THREADS, 1) step_kernel(const __grid_constant__ Model m) {
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& mem = *reinterpret_cast<Memory<T, X_ROWS, D>*>(raw);
  constexpr int ADDRESSES = sizeof(Layer) / sizeof(void*);
  for (int i = threadIdx.x; i < m.layer_count * ADDRESSES; i += THREADS)
    reinterpret_cast<const void**>(mem.layers)[i] = reinterpret_cast<const void* const*>(m.layers)[i];
  if (threadIdx.x < m.rows) mem.lengths[threadIdx.x] = m.lengths[threadIdx.x];
  for (int i = threadIdx.x; i <= HEAD * m.layer_count; i += THREADS) acquire_map(m.maps + i);
  if (threadIdx.x < PRODUCTS) mem.own[threadIdx.x] = m.own(threadIdx.x);
  if (m.gpus > 1 && threadIdx.x == 0) {
    mem.inboxes = {{}, m.rank, m.gpus, m.rows, m.hidden, m.layer_count, unsigned(m.counters[BEFORE * APART])};
    for (int gpu = 0; gpu < m.gpus; ++gpu) mem.inboxes.of[gpu] = m.inboxes[gpu];
  }
  if (threadIdx.x == COMPUTE) tma_prefetch(&m.k_map), tma_prefetch(&m.v_map);
  start(mem.ring, SLOTS<T, X_ROWS, D>);
  Stage stage = {SLOTS<T, X_ROWS, D>, STAGE_BYTES};
  if (__shfl_sync(~0u, threadIdx.x / 32, 0) < WARPS) {
    compute_step<T, X_ROWS, D, Math>(m, mem, stage);
  } else if (threadIdx.x == COMPUTE) {
    load_step<T, X_ROWS, D>(m, mem, stage);
  }
}

// ---- Host

static cudaError_t launch_together(void (*kernel)(Model), int blocks, int bytes, cudaStream_t stream, const Model& m) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks), config.blockDim = dim3(THREADS), config.dynamicSmemBytes = bytes;
  config.stream = stream, config.attrs = &attribute, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, m);
}

template <typename T, int X_ROWS, int D, typename Math>
static cudaError_t launch(Model& m, int blocks, cudaStream_t stream) {
  constexpr auto kernel = step_kernel<T, X_ROWS, D, Math>;
  constexpr int bytes = sizeof(Memory<T, X_ROWS, D>) + SLOTS<T, X_ROWS, D> * STAGE_BYTES;
  static_assert(bytes <= 227 * 1024, "a block has at most 227 KiB of shared memory");
  constexpr int most_in_flight = IN_FLIGHT * (STAGE_BYTES / (2 * TILE<T, D>));
  static_assert(most_in_flight <= SLOTS<T, X_ROWS, D> && SLOTS<T, X_ROWS, D> <= MOST_STAGES, "the ring has them");
  if (cudaError_t error = allow_shared_memory<kernel, bytes>()) return error;
  const int64_t token = m.kv_heads * D, layers_rows = m.layer_stride * (m.layer_count - 1) + m.rows;
  for (auto [map, data] : {std::pair(&m.k_map, m.k_cache), std::pair(&m.v_map, m.v_cache)}) {
    const View cache = {data, {layers_rows, m.max_seq, m.kv_heads, D}, {m.max_seq * token, token, D, 1}};
    if (cudaError_t error = make_rows_map<T>(map, cache, KEYS<T, D>, D)) return error;
  }
  for (Shape& shape : m.shapes) {
    Product p = {};
    p.N = shape.N, p.activation = &shape == &m.shapes[UP] ? m.activation : 0;
    p.share(blocks, Math::UNITS);
    shape.units = p.units, shape.per_stage = p.per_stage, shape.pieces = p.pieces;
  }
  return launch_together(kernel, blocks, bytes, stream, m);
}

template <typename T, int D>
static cudaError_t launch(Model& m, int blocks, cudaStream_t stream) {
  if constexpr (sizeof(T) == 2) {
    return m.rows <= 1   ? launch<T, 1, D, TensorCores<T, 1>>(m, blocks, stream)
           : m.rows <= 4 ? launch<T, 4, D, TensorCores<T, 4>>(m, blocks, stream)
                         : launch<T, 8, D, TensorCores<T, 8>>(m, blocks, stream);
  } else {
    return m.rows <= 1   ? launch<T, 1, D, CudaCores<1>>(m, blocks, stream)
           : m.rows <= 4 ? launch<T, 4, D, CudaCores<4>>(m, blocks, stream)
                         : launch<T, 8, D, CudaCores<8>>(m, blocks, stream);
  }
}

// The tensor map of a matrix of weights, in device memory.
static __global__ void keep_map(const __grid_constant__ CUtensorMap map, CUtensorMap* to) {
  constexpr int VECTORS = sizeof(CUtensorMap) / sizeof(uint4);
  if (threadIdx.x < VECTORS)
    reinterpret_cast<uint4*>(to)[threadIdx.x] = reinterpret_cast<const uint4*>(&map)[threadIdx.x];
}
extern "C" cudaError_t map_weights(View w, void* map, int dtype, cudaStream_t stream) {
  return with_dtype(dtype, [&](auto zero) {
    CUtensorMap made;
    if (cudaError_t error = make_weights_map<decltype(zero)>(&made, w.data, w.strides[0], w.sizes[0], w.sizes[1]))
      return error;
    keep_map<<<1, 32, 0, stream>>>(made, static_cast<CUtensorMap*>(map));
    return cudaGetLastError();
  });
}

// layers: (layers, 8) addresses in the order of Layer; maps: (4 layers + 1, 128) bytes, by map_weights(); k_cache,
// v_cache: the first layer's (batch, max_seq, kv_heads, head_dim), and the next layer's layer_stride sequences behind
// it; x_even, x_within, inner, x_odd: (batch, columns), one behind the other; blocks: no more than fit at once, one on
// each SM; inboxes: the addresses of all GPUs' inboxes, as this one sees them, or null for one GPU; bytes_per_cycle: of
// the memory, in cycles of the SMs.
extern "C" cudaError_t step(const void* layers, const void* maps, int layer_count, View embedding,
                            const void* positions, const void* norm, View head, const void* head_sums,
                            const void* head_bias, const float* cos, const float* sin, View x_even, View x_within,
                            View inner, View x_odd, View qkv, View o, void* logits, void* partial, void* best,
                            int* counters, int* lengths, int64_t* tokens, int64_t* clocks, View k_cache, View v_cache,
                            int layer_stride, const void* inboxes, int rank, int gpus, int heads, int activation,
                            int splits, float eps, float scale, float bytes_per_cycle, int blocks, int dtype,
                            cudaStream_t stream) {
  Model m = {};
  m.layers = static_cast<const Layer*>(layers), m.layer_count = layer_count;
  m.maps = static_cast<const CUtensorMap*>(maps);
  m.embedding = embedding.data, m.positions = positions, m.norm = norm;
  m.head_sums = head_sums, m.head_bias = head_bias, m.cos = cos, m.sin = sin;
  m.x[0] = x_even.data, m.within = x_within.data, m.inner = inner.data, m.x[1] = x_odd.data;
  m.qkv = qkv.data, m.o = o.data, m.logits = logits;
  m.partial = static_cast<Word<float>*>(partial);
  m.best = static_cast<unsigned long long*>(best), m.counters = counters, m.lengths = lengths, m.tokens = tokens,
  m.clocks = clocks;
  m.inboxes = static_cast<uint64_t* const*>(inboxes), m.rank = rank, m.gpus = gpus;
  m.k_cache = k_cache.data, m.v_cache = v_cache.data, m.layer_stride = layer_stride;
  m.rows = x_even.sizes[0], m.hidden = x_even.sizes[1], m.max_seq = k_cache.sizes[1];
  m.heads = heads, m.kv_heads = k_cache.sizes[2];
  const int group = heads / m.kv_heads, head_dim = k_cache.sizes[3];
  m.shared_by = min(group, MOST_HEADS), m.sets = ceil_div(group, MOST_HEADS);
  m.activation = activation, m.splits = splits, m.eps = eps, m.scale = scale;
  m.pace = int(STAGE_BYTES * blocks / bytes_per_cycle);
  const int attention = heads * head_dim, wide = inner.sizes[1];
  m.shapes[QKV] = {int(qkv.sizes[1]), m.hidden}, m.shapes[O] = {m.hidden, attention};
  m.shapes[UP] = {activation == SWIGLU ? 2 * wide : wide, m.hidden}, m.shapes[DOWN] = {m.hidden, wide};
  m.shapes[HEAD] = {int(head.sizes[0]), m.hidden};
  return with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return head_dim == 64 ? launch<T, 64>(m, blocks, stream) : launch<T, 128>(m, blocks, stream);
  });
}
