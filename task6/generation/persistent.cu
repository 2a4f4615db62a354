// A decode step of a whole model in one launch.
// architectures: sm_90a
//
//   grid  (SMs), all resident; block (320): eight warps that compute, and two that load
//
// The warps that load have the weights of all layers brought to shared memory, one matrix after the other, and never
// wait for a result. The others take the step's phases in turn, and meet all other blocks after each:
//
//   embedding | norm, q k v | RoPE, append, attention | o, residual | norm, gate and up | down, residual | ... | logits
//
// Products are those of stream.cuh. Attention reads each key once for all query heads of its group: a block has some
// keys of a kv head, and the last block of a kv head to come merges their parts.
#include <cuda_runtime.h>

#include "stream.cuh"

constexpr int SLOT = MOST_UNITS * UNIT * PITCH, SLOTS = 184 * 1024 / SLOT;  // bytes of a stage, and how many fit

struct Layer {
  const void *norm_1, *qkv, *qkv_sums, *qkv_bias, *o, *o_bias, *norm_2, *up, *up_sums, *up_bias, *down, *down_bias;
  void *k_cache, *v_cache;  // (rows, max_seq, kv_heads, head_dim)
};

struct Shape {
  int N, K, units, per_stage;
};
constexpr int MOST_HEADS = 4;  // of a group, at a time
constexpr int MOST_LAYERS = 80;
enum Which { QKV,
             O,
             UP,
             DOWN,
             HEAD,
             PRODUCTS };

struct Model {
  const Layer* layers;
  const void *embedding, *positions, *norm, *head, *head_sums, *head_bias;  // positions: null with RoPE
  const float *cos, *sin;                                                   // (max_seq, head_dim / 2), or null
  void *x, *qkv, *o, *inner, *logits;
  float* partial;            // [item][head of the group][head_dim], and behind all of them m, l
  unsigned long long* best;  // of each row of the logits, 0 between launches
  int *counters, *lengths;   // counters: 2, and one per kv head of a sequence; 0 between launches
  int64_t* tokens;
  int layer_count, rows, hidden, heads, kv_heads, max_seq, activation, splits;
  float eps, scale;
  Shape shapes[PRODUCTS];

  template <typename T>
  DEVICE Product product(const Layer& l, int which) const {
    Product p = {};
    const Shape& shape = shapes[which];
    p.rows = rows, p.N = shape.N, p.K = shape.K, p.units = shape.units, p.per_stage = shape.per_stage, p.eps = eps;
    p.w_stride = p.x_stride = shape.K, p.out_stride = p.residual_stride = shape.N;
    if (which == QKV) p.x = x, p.norm = l.norm_1, p.w = l.qkv, p.row_sums = l.qkv_sums, p.bias = l.qkv_bias;
    if (which == QKV) p.out = qkv;
    if (which == O) p.x = o, p.w = l.o, p.bias = l.o_bias, p.residual = p.out = x;
    if (which == UP) {
      p.x = x, p.norm = l.norm_2, p.w = l.up, p.row_sums = l.up_sums, p.bias = l.up_bias, p.out = inner;
      p.activation = activation;
      if (activation == SWIGLU) p.out_stride = shape.N / 2;
    }
    if (which == DOWN) p.x = inner, p.w = l.down, p.bias = l.down_bias, p.residual = p.out = x;
    if (which == HEAD) p.x = x, p.norm = norm, p.w = head, p.row_sums = head_sums, p.bias = head_bias, p.out = logits;
    return p;
  }
};

template <int X_ROWS, int D>
struct Memory {
  float O[WARPS][MOST_HEADS][D];
  float2 ml[WARPS][MOST_HEADS];
  unsigned long long best[X_ROWS];
  bool last;
  Layer layers[MOST_LAYERS];  // of the model, a copy
  alignas(128) Shared<X_ROWS> ring;
};

// ---- All blocks meet: what they wrote before is visible after. The warps that load have no part in it.

DEVICE int load_acquire(const int* from) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

struct Grid {
  int* counter;
  int target = 0;

  DEVICE void meet_all() {
    meet();
    if (threadIdx.x == 0) {
      target += gridDim.x;
      __threadfence();
      atomicAdd(counter, 1);
      while (load_acquire(counter) < target) {
      }
    }
    meet();
  }
};

// ---- The phases that are no products

template <typename T>
DEVICE void embed(const Model& m) {
  for (int i = blockIdx.x * COMPUTE + threadIdx.x; i < m.rows * m.hidden; i += gridDim.x * COMPUTE) {
    const int row = i / m.hidden, e = i - row * m.hidden;
    float value = to_float(static_cast<const T*>(m.embedding)[m.tokens[row] * m.hidden + e]);
    if (m.positions) value += to_float(static_cast<const T*>(m.positions)[int64_t(m.lengths[row]) * m.hidden + e]);
    static_cast<T*>(m.x)[i] = from_float<T>(value);
  }
}

template <typename T, int N>
struct alignas(16) Vector {
  T x[N];
};

// Elements e to e + N - 1 of a head, rotated by its position, as they are in the cache.
template <typename T, int D, int N>
DEVICE Vector<T, N> rotated(const Model& m, const T* head, int e, int position) {
  Vector<T, N> own = *reinterpret_cast<const Vector<T, N>*>(head + e);
  if (!m.cos) return own;
  const bool left = e < D / 2;
  const Vector<T, N> other = *reinterpret_cast<const Vector<T, N>*>(head + (left ? e + D / 2 : e - D / 2));
  const float *cos = m.cos + int64_t(position) * (D / 2) + e % (D / 2), *sin = m.sin + (cos - m.cos);
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float x = to_float(own.x[n]), y = to_float(other.x[n]);
    own.x[n] = from_float<T>(x * cos[n] + (left ? -y : y) * sin[n]);
  }
  return own;
}

// What is known of a row after some keys: N of its columns.
template <int N>
struct Part {
  float m = -INFINITY, l = 0.0f, O[N] = {};

  // COUNT keys, of which those with a score of -inf are none.
  template <int COUNT, typename T>
  DEVICE void add(const float (&S)[COUNT], const Vector<T, N> (&v)[COUNT]) {
    float top = m;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) top = fmaxf(top, S[i]);
    const float shift = top == -INFINITY ? 0.0f : top, rescale = exp2f(m - shift);
    m = top, l *= rescale;
#pragma unroll
    for (int n = 0; n < N; ++n) O[n] *= rescale;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const float P = exp2f(S[i] - shift);
      l += P;
#pragma unroll
      for (int n = 0; n < N; ++n) O[n] = fmaf(P, to_float(v[i].x[n]), O[n]);
    }
  }
  DEVICE void merge(float other_m, float other_l, const float (&other_O)[N]) {
    const float top = fmaxf(m, other_m), shift = top == -INFINITY ? 0.0f : top;
    const float rescale = exp2f(m - shift), factor = exp2f(other_m - shift);
    m = top, l = l * rescale + other_l * factor;
#pragma unroll
    for (int n = 0; n < N; ++n) O[n] = O[n] * rescale + other_O[n] * factor;
  }
};

// Keys that a block has at least, where a sequence is shared among several: what two steps of its warps take.
template <typename T, int D>
constexpr int FEWEST_KEYS = 2 * WARPS * 4 * (32 * 16 / int(sizeof(T)) / D);
template <typename T, int D>
DEVICE int splits_of(const Model& m, int len) { return min(m.splits, ceil_div(len, FEWEST_KEYS<T, D>)); }

// HEADS of a group at a time, and as many keys as keep the memory busy.
template <typename T, int HEADS, int X_ROWS, int D>
DEVICE void attend(const Model& m, const Layer& layer, Memory<X_ROWS, D>& mem) {
  constexpr int N = 16 / sizeof(T), LANES = D / N, AT_ONCE = 32 / LANES;  // of a key; keys of a warp
  constexpr int AT_A_TIME = 8;                                            // parts
  constexpr int AHEAD = HEADS == 1 ? 4 : 2;                               // of AT_ONCE keys
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, e = lane % LANES * N;
  const int group = m.heads / m.kv_heads, pairs = m.rows * m.kv_heads, items = pairs * m.splits;
  const int64_t row_stride = m.kv_heads * D;
  float2* partial_ml = reinterpret_cast<float2*>(m.partial + int64_t(items) * group * D);
  const float scale = m.scale * 1.44269504f;  // log2(e)

  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const int pair = item / m.splits, split = item - pair * m.splits, b = pair / m.kv_heads, kv = pair - b * m.kv_heads;
    const int len = m.lengths[b] + 1, splits = splits_of<T, D>(m, len);
    if (split >= splits) continue;
    const int begin = int64_t(len) * split / splits, end = int64_t(len) * (split + 1) / splits;
    const T* heads = static_cast<const T*>(m.qkv) + int64_t(b) * (m.heads + 2 * m.kv_heads) * D;
    const T *new_k = heads + (m.heads + kv) * D, *new_v = heads + (m.heads + m.kv_heads + kv) * D;
    const int64_t first = b * int64_t(m.max_seq) * row_stride + kv * D;
    T *k_cache = static_cast<T*>(layer.k_cache) + first, *v_cache = static_cast<T*>(layer.v_cache) + first;

    for (int h_0 = 0; h_0 < group; h_0 += HEADS) {
      Vector<T, N> k[AHEAD], v[AHEAD], next_k[AHEAD], next_v[AHEAD];
      const auto fetch = [&](int j_0, Vector<T, N>(&k)[AHEAD], Vector<T, N>(&v)[AHEAD]) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
          const int j = j_0 + i * WARPS * AT_ONCE;
          k[i] = v[i] = {};
          if (j >= end) continue;
          if (j == len - 1) {  // the new one
            k[i] = rotated<T, D, N>(m, new_k, e, j), v[i] = *reinterpret_cast<const Vector<T, N>*>(new_v + e);
            *reinterpret_cast<Vector<T, N>*>(k_cache + j * row_stride + e) = k[i];
            *reinterpret_cast<Vector<T, N>*>(v_cache + j * row_stride + e) = v[i];
          } else {
            k[i] = *reinterpret_cast<const Vector<T, N>*>(k_cache + j * row_stride + e);
            v[i] = *reinterpret_cast<const Vector<T, N>*>(v_cache + j * row_stride + e);
          }
        }
      };
      const int own = begin + warp * AT_ONCE + lane / LANES;
      fetch(own, next_k, next_v);
      Vector<T, N> q[HEADS];
      Part<N> part[HEADS];
#pragma unroll
      for (int h = 0; h < HEADS; ++h) {
        q[h] = {};
        if (h_0 + h < group) q[h] = rotated<T, D, N>(m, heads + (kv * group + h_0 + h) * D, e, len - 1);
      }
#pragma unroll 1
      for (int done = 0; begin + done < end; done += AHEAD * WARPS * AT_ONCE) {
        const int j_0 = own + done;
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) k[i] = next_k[i], v[i] = next_v[i];
        fetch(j_0 + AHEAD * WARPS * AT_ONCE, next_k, next_v);
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
          float S[AHEAD];
#pragma unroll
          for (int i = 0; i < AHEAD; ++i) {
            S[i] = 0.0f;
#pragma unroll
            for (int n = 0; n < N; ++n) S[i] = fmaf(to_float(q[h].x[n]), to_float(k[i].x[n]), S[i]);
          }
#pragma unroll
          for (int step = LANES / 2; step > 0; step /= 2) {
#pragma unroll
            for (float& sum : S) sum += __shfl_xor_sync(~0u, sum, step);
          }
#pragma unroll
          for (int i = 0; i < AHEAD; ++i) S[i] = j_0 + i * WARPS * AT_ONCE < end ? S[i] * scale : -INFINITY;
          part[h].add(S, v);
        }
      }
#pragma unroll
      for (int h = 0; h < HEADS; ++h) {
#pragma unroll
        for (int step = LANES; step < 32; step *= 2) {
          float O[N];
#pragma unroll
          for (int n = 0; n < N; ++n) O[n] = __shfl_xor_sync(~0u, part[h].O[n], step);
          const float other_m = __shfl_xor_sync(~0u, part[h].m, step), l = __shfl_xor_sync(~0u, part[h].l, step);
          part[h].merge(other_m, l, O);
        }
        if (lane >= LANES) continue;
#pragma unroll
        for (int n = 0; n < N; ++n) mem.O[warp][h][e + n] = part[h].O[n];
        if (lane == 0) mem.ml[warp][h] = make_float2(part[h].m, part[h].l);
      }
      meet();  // the warps' parts complete
      for (int i = threadIdx.x; i < min(HEADS, group - h_0) * D; i += COMPUTE) {
        const int h = i / D, column = i % D, head = h_0 + h;
        Part<1> all;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) all.merge(mem.ml[w][h].x, mem.ml[w][h].y, {mem.O[w][h][column]});
        if (splits == 1) {
          T* out = static_cast<T*>(m.o) + (int64_t(b) * m.heads + kv * group + head) * D;
          out[column] = from_float<T>(all.O[0] / all.l);
        } else {
          const int64_t slot = int64_t(item) * group + head;
          __stcg(&m.partial[slot * D + column], all.O[0]);
          if (column == 0) __stcg(&partial_ml[slot], make_float2(all.m, all.l));
        }
      }
      meet();  // the warps' parts consumed
    }
    if (splits == 1) continue;

    __threadfence();  // this thread's parts are visible to all blocks before the block is counted
    meet();
    if (threadIdx.x == 0) {
      int* counter = &m.counters[2 + pair];
      mem.last = atomicAdd(counter, 1) == splits - 1;
      if (mem.last) *counter = 0;  // for the next layer
      __threadfence();             // the other blocks' parts are read after the count
    }
    meet();
    if (!mem.last) continue;
    for (int i = threadIdx.x; i < group * D; i += COMPUTE) {
      const int head = i / D, column = i % D;
      Part<1> all;
      for (int first = 0; first < splits; first += AT_A_TIME) {
        float2 ml[AT_A_TIME];
        float O[AT_A_TIME];
#pragma unroll
        for (int n = 0; n < AT_A_TIME; ++n) {
          const int64_t slot = (int64_t(pair) * m.splits + min(first + n, splits - 1)) * group + head;
          ml[n] = __ldcg(&partial_ml[slot]), O[n] = __ldcg(&m.partial[slot * D + column]);
        }
#pragma unroll
        for (int n = 0; n < AT_A_TIME; ++n) {
          if (first + n < splits) all.merge(ml[n].x, ml[n].y, {O[n]});
        }
      }
      static_cast<T*>(m.o)[(int64_t(b) * m.heads + kv * group + head) * D + column] = from_float<T>(all.O[0] / all.l);
    }
  }
}

// A key of a logit and its column, larger for larger logits and then for smaller columns.
DEVICE unsigned long long rank_of(float logit, int column) {
  const unsigned bits = __float_as_uint(logit);
  return uint64_t(bits >> 31 ? ~bits : bits | 0x80000000u) << 32 | ~unsigned(column);
}

template <typename T, int X_ROWS, int D, typename Math>
DEVICE void compute_step(const Model& m, Memory<X_ROWS, D>& mem, Stage stage) {
  Grid grid = {m.counters};
  const auto nothing = [](int, int, float) {};
  if (threadIdx.x < X_ROWS) mem.best[threadIdx.x] = 0;
  embed<T>(m);
  grid.meet_all();
  for (int i = 0; i < m.layer_count; ++i) {
    const Layer& layer = mem.layers[i];
    compute<T, X_ROWS, Math>(m.product<T>(layer, QKV), mem.ring, stage, nothing);
    grid.meet_all();
    if (m.heads == m.kv_heads)
      attend<T, 1>(m, layer, mem);
    else
      attend<T, MOST_HEADS>(m, layer, mem);
    grid.meet_all();
    for (int which = O; which <= DOWN; ++which) {
      compute<T, X_ROWS, Math>(m.product<T>(layer, which), mem.ring, stage, nothing);
      grid.meet_all();
    }
  }
  compute<T, X_ROWS, Math>(m.product<T>({}, HEAD), mem.ring, stage, [&](int row, int column, float logit) {
    atomicMax(&mem.best[row], rank_of(logit, column));
  });
  meet();  // the block's best are known
  if (threadIdx.x < m.rows) atomicMax(&m.best[threadIdx.x], mem.best[threadIdx.x]);
  __threadfence();
  meet();
  if (threadIdx.x > 0 || atomicAdd(&m.counters[1], 1) < int(gridDim.x) - 1) return;
  __threadfence();  // the last block: all others are done
  m.counters[0] = m.counters[1] = 0;
  for (int row = 0; row < m.rows; ++row) {
    m.tokens[row] = ~unsigned(__ldcg(&m.best[row]));
    m.best[row] = 0;
    ++m.lengths[row];
  }
}

template <typename T, int X_ROWS, int D>
DEVICE void load_step(const Model& m, Memory<X_ROWS, D>& mem, Stage stage) {
  for (int i = 0; i < m.layer_count; ++i) {
    for (int which = QKV; which <= DOWN; ++which)
      load_weights<T>(m.product<T>(mem.layers[i], which), mem.ring, stage);
  }
  load_weights<T>(m.product<T>({}, HEAD), mem.ring, stage);
}

template <typename T, int X_ROWS, int D, typename Math>
__global__ void __launch_bounds__(THREADS, 1) step_kernel(const __grid_constant__ Model m) {
  extern __shared__ __align__(128) uint8_t raw[];
  auto& mem = *reinterpret_cast<Memory<X_ROWS, D>*>(raw);
  constexpr int ADDRESSES = sizeof(Layer) / sizeof(void*);
  for (int i = threadIdx.x; i < m.layer_count * ADDRESSES; i += THREADS)
    reinterpret_cast<const void**>(mem.layers)[i] = reinterpret_cast<const void* const*>(m.layers)[i];
  start(mem.ring, SLOTS);
  Stage stage = {SLOTS, SLOT};
  if (__shfl_sync(~0u, threadIdx.x / 32, 0) < WARPS) {
    compute_step<T, X_ROWS, D, Math>(m, mem, stage);
  } else {
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
  constexpr int bytes = sizeof(Memory<X_ROWS, D>) + SLOTS * SLOT;
  static_assert(bytes <= 227 * 1024, "a block has at most 227 KiB of shared memory");
  if (cudaError_t error = allow_shared_memory<kernel, bytes>()) return error;
  for (Shape& shape : m.shapes) {
    Product p = {};
    p.N = shape.N;
    p.share(blocks, Math::UNITS);
    shape.units = p.units, shape.per_stage = p.per_stage;
  }
  return launch_together(kernel, blocks, bytes, stream, m);
}

template <typename T, int D>
static cudaError_t launch(Model& m, int blocks, cudaStream_t stream) {
  if constexpr (sizeof(T) == 2) {
    return launch<T, 8, D, TensorCores<T, 8>>(m, blocks, stream);
  } else {
    return m.rows == 1   ? launch<T, 1, D, CudaCores<1, STEPS>>(m, blocks, stream)
           : m.rows <= 4 ? launch<T, 4, D, CudaCores<4, STEPS>>(m, blocks, stream)
                         : launch<T, 8, D, CudaCores<8, 0>>(m, blocks, stream);
  }
}

// layers: (layers, 14) addresses in the order of Layer; blocks: no more than fit at once, one on each SM.
extern "C" cudaError_t step(const void* layers, int layer_count, View embedding, const void* positions,
                            const void* norm, View head, const void* head_sums, const void* head_bias, const float* cos,
                            const float* sin, View x, View qkv, View o, View inner, void* logits, float* partial,
                            void* best, int* counters, int* lengths, int64_t* tokens, int heads, int kv_heads,
                            int head_dim, int max_seq, int activation, int splits, float eps, float scale, int blocks,
                            int dtype, cudaStream_t stream) {
  Model m = {};
  m.layers = static_cast<const Layer*>(layers), m.layer_count = layer_count;
  m.embedding = embedding.data, m.positions = positions, m.norm = norm;
  m.head = head.data, m.head_sums = head_sums, m.head_bias = head_bias, m.cos = cos, m.sin = sin;
  m.x = x.data, m.qkv = qkv.data, m.o = o.data, m.inner = inner.data, m.logits = logits, m.partial = partial;
  m.best = static_cast<unsigned long long*>(best), m.counters = counters, m.lengths = lengths, m.tokens = tokens;
  m.rows = x.sizes[0], m.hidden = x.sizes[1], m.heads = heads, m.kv_heads = kv_heads, m.max_seq = max_seq;
  m.activation = activation, m.splits = splits, m.eps = eps, m.scale = scale;
  const int attention = heads * head_dim, wide = inner.sizes[1];
  m.shapes[QKV] = {int(qkv.sizes[1]), m.hidden}, m.shapes[O] = {m.hidden, attention};
  m.shapes[UP] = {activation == SWIGLU ? 2 * wide : wide, m.hidden}, m.shapes[DOWN] = {m.hidden, wide};
  m.shapes[HEAD] = {int(head.sizes[0]), m.hidden};
  return with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return head_dim == 64 ? launch<T, 64>(m, blocks, stream) : launch<T, 128>(m, blocks, stream);
  });
}
