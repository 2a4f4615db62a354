// A decode step of a whole model in one launch.
// architectures: sm_90a cpu
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
//
// What blocks leave for each other has to be visible when it is read. For a meeting that would be a fence in each,
// which takes longer while weights stream. Of one row all results are words with tags instead (words.cuh), and a
// meeting says when to look. Of more rows words would be twice as many bytes, for all blocks to read.
//
// Several GPUs have heads and columns of the MLP each. o and down are sums over all of them then: each GPU sends its
// part of a value to the others as soon as it has it, and adds theirs.
#include <cuda_runtime.h>

#ifndef __CUDACC__
#include <chrono>
#endif
#include <utility>

#include "attention.cuh"
#include "inboxes.cuh"
#include "stream.cuh"
#include "words.cuh"

constexpr int SLOT = STAGE_PIECES * PITCH;  // bytes of a stage
constexpr int IN_FLIGHT = 2;                // stages
// Whether x, qkv, o and inner are words with tags.
template <int X_ROWS>
constexpr bool TAGGED = X_ROWS == 1;
// Of x in shared memory. Of one row there are no more, or six stages would not fit.
template <int X_ROWS>
constexpr int X_PIECES = X_ROWS == 1 ? 12 : X_ROWS <= 4 ? 8
                                                        : 3;

struct Layer {
  const void *norm_1, *qkv, *qkv_sums, *qkv_bias, *o, *o_bias, *norm_2, *up, *up_sums, *up_bias, *down, *down_bias;
};

struct Shape {
  int N, K, units, per_stage, pieces;
};
constexpr int MOST_LAYERS = 80;
enum Which { QKV,
             O,
             UP,
             DOWN,
             HEAD,
             PRODUCTS };

// Counters of blocks, 0 between launches. They have lines of memory of their own: who looks at one does not wait for
// those that are counted in another.
enum Counter { CAME,     // to all meetings
               DONE,     // with the step
               BEFORE,   // steps, not blocks: never 0 again
               MERGED }; // of each pair, whose parts of attention are written, in all layers
constexpr int APART = 32;  // ints

struct Model {
  const Layer* layers;
  const void *embedding, *positions, *norm, *head, *head_sums, *head_bias;  // positions: null with RoPE
  const float *cos, *sin;                                                   // (max_seq, head_dim / 2), or null
  void *x, *qkv, *o, *inner, *logits;
  CUtensorMap k_map, v_map;
  void *k_cache, *v_cache;   // (layer_stride layers, max_seq, kv_heads, head_dim): sequence b of a layer is row
  int layer_stride;          // layer_stride layer + b
  Word<float>* partial;      // [item][its head][head_dim], and behind all of them m, l
  unsigned long long* best;  // of each row of the logits, 0 between launches
  int *counters, *lengths;   // counters: Counter's, APART ints apart
  int64_t *tokens, *clocks;  // clocks: block 0's at the beginning, after each meeting and in the end; or null
  uint64_t* const* inboxes;  // (gpus), or null for one
  int rank, gpus;            // this GPU
  int layer_count, rows, hidden, heads, kv_heads, max_seq, activation, splits;
  int shared_by, sets;  // query heads of a kv head that share a read of its keys, and how many such sets there are
  float eps, scale;
  Shape shapes[PRODUCTS];

  template <typename T>
  DEVICE Product product(const Layer& l, int which, unsigned tag = 0) const {
    Product p = {};
    p.tag = tag;
    const Shape& shape = shapes[which];
    p.rows = rows, p.N = shape.N, p.K = shape.K, p.units = shape.units, p.per_stage = shape.per_stage;
    p.pieces = shape.pieces, p.eps = eps;
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

template <typename T, int X_ROWS, int D>
struct Memory {
  union {
    Parts<T, AttentionOf<T, D>::PARTS, D> parts;  // in attention
    alignas(128) XMemory<X_ROWS, X_PIECES<X_ROWS>> x;  // in products
  };
  unsigned long long best[X_ROWS];
  bool last;
  Layer layers[MOST_LAYERS + 1];  // of the model, a copy; behind them what the logits' product takes for its layer
  int lengths[X_ROWS];        // a copy too: the last block of all changes them while others may still read
  Inboxes inboxes;
  alignas(1024) Shared<X_ROWS> ring;
};

// ---- All blocks meet. The warps that load have no part in it.

#ifdef __CUDACC__
template <bool FENCED>
DEVICE int load_counter(const int* from) {
  int value;
  if (FENCED) {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  } else {
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  }
  return value;
}

template <bool FENCED>
DEVICE void add_to_counter(int* to, int value) {
  if (FENCED) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
  } else {
    asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
  }
}

DEVICE int64_t cycles() { return clock64(); }
#else
template <bool FENCED>
DEVICE int load_counter(const int* from) {
  cuda_on_cpu::yield();  // to the threads that it waits for
  const int value = __atomic_load_n(from, __ATOMIC_ACQUIRE);
  if (FENCED) __threadfence();
  return value;
}
template <bool FENCED>
DEVICE void add_to_counter(int* to, int value) {
  if (FENCED) __threadfence();
  atomicAdd(to, value);
}
DEVICE int64_t cycles() { return std::chrono::steady_clock::now().time_since_epoch().count(); }
#endif

// What others update atomically, at some time or other.
DEVICE unsigned long long peek(const unsigned long long* at) {
#ifdef __CUDACC__
  return *static_cast<const volatile unsigned long long*>(at);
#else
  return __atomic_load_n(at, __ATOMIC_RELAXED);
#endif
}

// FENCED: what a block wrote before it came is visible to all that have met.
template <bool FENCED>
struct Grid {
  int* came;        // blocks, to all meetings
  int64_t* clocks;  // of this thread, or null
  unsigned before;  // phases of all steps before
  int phases = 0, meetings = 0;

  // Of what the phase before has left, and of what this one leaves.
  DEVICE unsigned tag_read() const { return before + phases; }
  DEVICE unsigned tag_written() const { return before + phases + 1; }

  // From a phase to the next one, which looks for the results by itself.
  DEVICE void go_on() {
    meet();
    ++phases;
    look_at_the_clock();
  }
  DEVICE void come() {
    meet();
    ++phases, ++meetings;
    if (threadIdx.x == 0) add_to_counter<FENCED>(came, 1);
  }
  DEVICE void wait_for_all() {
    if (threadIdx.x == 0) {
      while (load_counter<FENCED>(came) < meetings * int(gridDim.x)) {
      }
    }
    meet();
    look_at_the_clock();
  }
  DEVICE void look_at_the_clock() {
    if (clocks) clocks[phases] = cycles();
  }
};

// ---- The phases that are no products

// A result, with its tag if it has one.
template <bool TAGGED, typename T>
DEVICE void leave(void* to, int64_t i, T value, unsigned tag) {
  if constexpr (TAGGED) {
    put_word(static_cast<Word<T>*>(to) + i, value, tag);
  } else {
    static_cast<T*>(to)[i] = value;
  }
}

// A block has those columns of x that it adds o and down to: it reads them again itself.
template <typename T, bool TAGGED>
DEVICE void embed(const Model& m, const Product& o, unsigned tag) {
  const int first = o.first_unit(blockIdx.x) * UNIT, last = min(o.first_unit(blockIdx.x + 1) * UNIT, m.hidden);
  for (int row = 0; row < m.rows; ++row) {
    for (int n = first + threadIdx.x; n < last; n += COMPUTE) {
      float value = to_float(static_cast<const T*>(m.embedding)[m.tokens[row] * m.hidden + n]);
      if (m.positions) value += to_float(static_cast<const T*>(m.positions)[int64_t(m.lengths[row]) * m.hidden + n]);
      leave<TAGGED>(m.x, int64_t(row) * m.hidden + n, from_float<T>(value), tag);
    }
  }
}

// ---- Attention. Keys and values come through the ring, tile by tile, like weights: they are on their way before q is.

template <typename T, int D>
constexpr int KEYS = AttentionOf<T, D>::KEYS;
template <typename T, int D>
constexpr int TILE = AttentionOf<T, D>::TILE;

// A share of a sequence's keys, for some query heads of a kv head.
template <typename T, int D>
struct Item {
  int pair, split, splits;            // the items of a pair are merged
  int b, kv_head, head, heads, set;   // heads from `head` on
  int len, begin, end;                // keys: with the new one, and this item's

  DEVICE Item(const Model& m, const int* lengths, int i) {
    pair = i / m.splits, split = i - pair * m.splits;
    const int kv_and_b = pair / m.sets, group = m.heads / m.kv_heads;
    set = pair - kv_and_b * m.sets, b = kv_and_b / m.kv_heads, kv_head = kv_and_b - b * m.kv_heads;
    head = kv_head * group + set * m.shared_by, heads = min(m.shared_by, group - set * m.shared_by);
    len = lengths[b] + 1;
    const int tiles = ceil_div(len, KEYS<T, D>);
    splits = min(m.splits, tiles);
    begin = tiles * split / splits * KEYS<T, D>;
    end = split < splits ? min(len, tiles * (split + 1) / splits * KEYS<T, D>) : begin;
  }
};
DEVICE int items_of(const Model& m) { return m.rows * m.kv_heads * m.sets * m.splits; }

template <typename T, int X_ROWS, int D>
DEVICE void load_keys(const Model& m, const int* lengths, int layer, Shared<X_ROWS>& mem, Stage& stage) {
  // One warp keys, one values.
  static_assert(LOADERS == 2 && 2 * TILE<T, D> <= SLOT);
  const int loader = threadIdx.x / 32 % LOADERS;
  stage.in_flight = IN_FLIGHT * (SLOT / (2 * TILE<T, D>));
  for (int i = blockIdx.x; i < items_of(m); i += gridDim.x) {
    const Item<T, D> item(m, lengths, i);
    for (int key = item.begin; key < item.end; key += KEYS<T, D>) {
      if (threadIdx.x % 32 == 0) {
        wait_until_free(mem, stage);
        mbarrier_arrive_expect(&mem.full[stage.index], TILE<T, D>);
        tma_load(stage.at(mem.stages) + loader * TILE<T, D>, loader ? &m.v_map : &m.k_map, &mem.full[stage.index], key,
                 item.kv_head, layer * m.layer_stride + item.b, EVICT_FIRST);
      }
      stage.next();
    }
  }
  stage.in_flight = IN_FLIGHT;
}

// tag_read: of q, k and v; tag_written: of o, and of the parts of those items that are merged, of any number of rows.
template <typename T, int X_ROWS, int D>
DEVICE void attend(const Model& m, int layer, Item<T, D> item, Memory<T, X_ROWS, D>& mem, Stage& stage,
                   unsigned tag_read, unsigned tag_written) {
  constexpr int AT_A_TIME = 4;  // parts
  constexpr bool WORDS = TAGGED<X_ROWS>;
  using Attention = AttentionOf<T, D>;
  constexpr int VECTOR = 16 / sizeof(T), VECTORS = D / VECTOR;
  using Vector = Values<T, VECTOR, WORDS>;
  Word<float>* partial_ml = m.partial + int64_t(items_of(m)) * m.shared_by * D;

  for (int i = blockIdx.x; i < items_of(m); i += gridDim.x) {
    if (i != blockIdx.x) item = Item<T, D>(m, mem.lengths, i);
    if (item.split >= item.splits) continue;
    // Once for all warps: words do not stay in L1.
    for (int n = threadIdx.x; n < (item.heads + 2) * VECTORS; n += COMPUTE) {
      const int head = n / VECTORS, e = n % VECTORS * VECTOR, which = head - item.heads;
      const int at = which < 0 ? item.head + head : m.heads + which * m.kv_heads + item.kv_head;
      const auto* from = static_cast<const typename Vector::Source*>(m.qkv) +
                         (int64_t(item.b) * (m.heads + 2 * m.kv_heads) + at) * D + e;
      Vector x;
      x.ask(from);
      while (!x.have(tag_read)) x.ask(from);
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) mem.parts.newest[which < 0 ? head : MOST_HEADS + which][e + i] = x[i];
    }
    meet();
    const int64_t angles = int64_t(item.len - 1) * (D / 2);
    const bool newest = item.end == item.len;
    const auto& of = mem.parts.newest;
    Attention attention({of[0], of[MOST_HEADS], of[MOST_HEADS + 1], m.cos + angles, m.sin + angles, item.heads, newest,
                         m.cos != nullptr},
                        m.scale * 1.44269504f, mem.parts);  // log2(e)
    meet();  // q, k and v consumed
#pragma unroll 1
    for (int first = item.begin; first < item.end; first += KEYS<T, D>) {
      mbarrier_wait(&mem.ring.full[stage.index], stage.parity);
      attention.add(stage.at(mem.ring.stages), first, min(item.end, item.len - 1));
      __syncwarp();
      if (threadIdx.x % 32 == 0) mbarrier_arrive(&mem.ring.empty[stage.index]);
      stage.next();
    }
    attention.put(mem.parts, item.heads);
    meet();  // the warps' parts complete
    if (newest && item.set == m.sets - 1 && threadIdx.x < 2 * VECTORS) {  // a block has read it for earlier sets
      const int64_t row = (int64_t(layer) * m.layer_stride + item.b) * m.max_seq + item.len - 1;
      const int64_t place = (row * m.kv_heads + item.kv_head) * VECTORS + threadIdx.x % VECTORS;
      const bool key = threadIdx.x < VECTORS;
      static_cast<uint4*>(key ? m.k_cache : m.v_cache)[place] =
          reinterpret_cast<const uint4*>(key ? mem.parts.k : mem.parts.v)[threadIdx.x % VECTORS];
    }
    const int64_t out = (int64_t(item.b) * m.heads + item.head) * D;
    for (int n = threadIdx.x; n < item.heads * D; n += COMPUTE) {
      const int h = n / D, column = n % D;
      Part<1> all;
#pragma unroll
      for (int part = 0; part < Attention::PARTS; ++part) {
        const float2 ml = mem.parts.ml[part][h];
        all.add(ml.x, ml.y, {mem.parts.O[part][h][column]});
      }
      if (item.splits == 1) {
        leave<WORDS>(m.o, out + n, from_float<T>(all.O[0] / all.l), tag_written);
      } else {
        const int64_t slot = int64_t(i) * m.shared_by + h;
        put_word(&m.partial[slot * D + column], all.O[0], tag_written);
        if (column < 2) put_word(&partial_ml[2 * slot + column], column == 0 ? all.m : all.l, tag_written);
      }
    }
    meet();  // the warps' parts consumed
    if (item.splits == 1) continue;

    // The last block of a pair merges its parts: the others have been written then, or are on their way.
    if (threadIdx.x == 0) {
      int* counter = &m.counters[MERGED * APART + item.pair];
      mem.last = atomicAdd(counter, 1) == (layer + 1) * item.splits - 1;
      if (mem.last && layer == m.layer_count - 1) *counter = 0;  // for the next step
    }
    meet();
    if (!mem.last) continue;
    // Four lanes have the same four columns, each of every fourth split.
    for (int n = threadIdx.x / 4; n < item.heads * D / 4; n += COMPUTE / 4) {
      const int h = 4 * n / D, column = 4 * n % D;
      Part<4> all;
#pragma unroll 1
      for (int first = threadIdx.x % 4; first < item.splits; first += 4 * AT_A_TIME) {
        const auto slot = [&](int k) {
          const int split = min(first + 4 * k, item.splits - 1);
          return (int64_t(item.pair) * m.splits + split) * m.shared_by + h;
        };
        const auto ml_at = [&](int k) { return &partial_ml[2 * slot(k)]; };
        const auto O_at = [&](int k) { return &m.partial[slot(k) * D + column]; };
        Scattered<float, 2, AT_A_TIME> ml;
        Scattered<float, 4, AT_A_TIME> O;
        ml.ask(ml_at), O.ask(O_at);
        ml.wait(ml_at, tag_written), O.wait(O_at, tag_written);
        float top = -INFINITY;
#pragma unroll
        for (int k = 0; k < AT_A_TIME; ++k) top = fmaxf(top, ml.of[k][0]);
        float l = 0.0f, sum[4] = {};
#pragma unroll
        for (int k = 0; k < AT_A_TIME; ++k) {
          const float factor = first + 4 * k < item.splits ? exp2f(ml.of[k][0] - top) : 0.0f;  // each has keys
          l += ml.of[k][1] * factor;
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[e] += O.of[k][e] * factor;
        }
        all.add(top, l, sum);
      }
#pragma unroll
      for (int step = 1; step <= 2; step *= 2) all.add_lanes(step);
      if (threadIdx.x % 4 == 0) {
#pragma unroll
        for (int e = 0; e < 4; ++e)
          leave<WORDS>(m.o, out + 4 * n + e, from_float<T>(all.O[e] / all.l), tag_written);
      }
    }
  }
}

// A key of a logit and its column, larger for larger logits and then for smaller columns.
DEVICE unsigned long long rank_of(float logit, int column) {
  const unsigned bits = __float_as_uint(logit);
  return uint64_t(bits >> 31 ? ~bits : bits | 0x80000000u) << 32 | ~unsigned(column);
}

template <typename T, int X_ROWS, int D, typename Math>
DEVICE void compute_step(const Model& m, Memory<T, X_ROWS, D>& mem, Stage stage) {
  constexpr bool WORDS = TAGGED<X_ROWS>;
  Grid<!WORDS> grid = {&m.counters[CAME * APART], blockIdx.x + threadIdx.x == 0 ? m.clocks : nullptr,
                       unsigned(m.counters[BEFORE * APART]) * (5 * m.layer_count + 1)};
  grid.look_at_the_clock();
  if (threadIdx.x < X_ROWS) mem.best[threadIdx.x] = 0;
  embed<T, WORDS>(m, m.product<T>(mem.layers[0], O), grid.tag_written());
  grid.come();
  for (int i = 0, which = QKV;; which < DOWN ? ++which : (++i, which = i < m.layer_count ? QKV : HEAD)) {
    const Product p = m.product<T>(mem.layers[i], which, grid.tag_read());
    Share<T, X_ROWS, Math, MOST_UNITS, X_PIECES<X_ROWS>, WORDS> share(p, mem.ring, mem.x, stage);
    grid.wait_for_all();
    share.compute(
        [&](int row, int column, float sum) {
          if (m.gpus == 1 || (which != O && which != DOWN)) return sum;
          return mem.inboxes.sum(i, which == DOWN, row, column, sum);
        },
        [&](int row, int column, T value) {
          if (which < HEAD) return leave<WORDS>(p.out, row * p.out_stride + column, value, grid.tag_written());
          put(p, row, column, value);
          const unsigned long long rank = rank_of(to_float(value), m.rank * p.N + column);
          if (rank > peek(&mem.best[row])) atomicMax(&mem.best[row], rank);
        });
    if (which == HEAD) break;
    // Words of q, k and v are looked for at once: a block needs those of a few others only.
    which == QKV&& WORDS ? grid.go_on() : grid.come();
    if (which > QKV) continue;
    const Item<T, D> item(m, mem.lengths, min(int(blockIdx.x), items_of(m) - 1));
    if (!WORDS) grid.wait_for_all();
    attend<T>(m, i, item, mem, stage, grid.tag_read(), grid.tag_written());
    grid.come();
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

// ---- The warps that load

#ifdef __CUDACC__
DEVICE void to_L2(const void* line) { asm volatile("prefetch.global.L2 [%0];" ::"l"(line)); }
#else
DEVICE void to_L2(const void*) {}
#endif

// What else a product takes from memory is in L2 by then: the memory's queue is long while weights are read.
template <typename T>
DEVICE void prefetch_beside(const Product& p) {
  constexpr int EACH = 128 / sizeof(T);  // a line
  const int own = (threadIdx.x - COMPUTE) * EACH, k = blockIdx.x * 32 * LOADERS * EACH + own;
  const int n = p.first_unit(blockIdx.x) * UNIT + own;
  if (p.norm && k < p.K) to_L2(static_cast<const T*>(p.norm) + k);
  if (n >= min(p.N, p.first_unit(blockIdx.x + 1) * UNIT)) return;
  if (p.bias) to_L2(static_cast<const T*>(p.bias) + n);
  if (p.row_sums) to_L2(static_cast<const T*>(p.row_sums) + n);
}

template <typename T, int X_ROWS, int D>
DEVICE void load_step(const Model& m, Memory<T, X_ROWS, D>& mem, Stage stage) {
  for (int i = 0, which = QKV;; which < DOWN ? ++which : (++i, which = i < m.layer_count ? QKV : HEAD)) {
    const Product p = m.product<T>(mem.layers[i], which);
    prefetch_beside<T>(p);
    load_weights<T>(p, mem.ring, stage);
    if (which == QKV) load_keys<T, X_ROWS, D>(m, mem.lengths, i, mem.ring, stage);
    if (which == HEAD) break;
  }
}

template <typename T, int X_ROWS, int D>
constexpr int SLOTS = (227 * 1024 - int(sizeof(Memory<T, X_ROWS, D>))) / SLOT;

template <typename T, int X_ROWS, int D, typename Math>
__global__ void __launch_bounds__(THREADS, 1) step_kernel(const __grid_constant__ Model m) {
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& mem = *reinterpret_cast<Memory<T, X_ROWS, D>*>(raw);
  constexpr int ADDRESSES = sizeof(Layer) / sizeof(void*);
  for (int i = threadIdx.x; i < m.layer_count * ADDRESSES; i += THREADS)
    reinterpret_cast<const void**>(mem.layers)[i] = reinterpret_cast<const void* const*>(m.layers)[i];
  if (threadIdx.x < m.rows) mem.lengths[threadIdx.x] = m.lengths[threadIdx.x];
  if (m.gpus > 1 && threadIdx.x == 0) {
    mem.inboxes = {{}, m.rank, m.gpus, m.rows, m.hidden, m.layer_count, unsigned(m.counters[BEFORE * APART])};
    for (int gpu = 0; gpu < m.gpus; ++gpu) mem.inboxes.of[gpu] = m.inboxes[gpu];
  }
  if (threadIdx.x == COMPUTE) tma_prefetch(&m.k_map), tma_prefetch(&m.v_map);
  start(mem.ring, SLOTS<T, X_ROWS, D>, SLOT);
  Stage stage = {SLOTS<T, X_ROWS, D>, SLOT, IN_FLIGHT};
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
  constexpr int bytes = sizeof(Memory<T, X_ROWS, D>) + SLOTS<T, X_ROWS, D> * SLOT;
  static_assert(bytes <= 227 * 1024, "a block has at most 227 KiB of shared memory");
  constexpr int most_in_flight = IN_FLIGHT * (SLOT / (2 * TILE<T, D>));
  static_assert(most_in_flight <= SLOTS<T, X_ROWS, D> && SLOTS<T, X_ROWS, D> <= MOST_STAGES, "the ring has them");
  if (cudaError_t error = allow_shared_memory<kernel, bytes>()) return error;
  const int layers_rows = m.layer_stride * (m.layer_count - 1) + m.rows;
  const Strides cache = {int64_t(m.max_seq) * m.kv_heads * D, int64_t(m.kv_heads) * D, D};
  for (auto [map, data] : {std::pair(&m.k_map, m.k_cache), std::pair(&m.v_map, m.v_cache)}) {
    if (cudaError_t error = make_tensor_map<T>(map, data, cache, layers_rows, m.max_seq, m.kv_heads, D, KEYS<T, D>))
      return error;
  }
  for (Shape& shape : m.shapes) {
    Product p = {};
    p.N = shape.N;
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

// layers: (layers, 12) addresses in the order of Layer; k_cache, v_cache: the first layer's (batch, max_seq, kv_heads,
// head_dim), and the next layer's layer_stride sequences behind it; blocks: no more than fit at once, one on each SM;
// inboxes: the addresses of all GPUs' inboxes, as this one sees them, or null for one GPU.
extern "C" cudaError_t step(const void* layers, int layer_count, View embedding, const void* positions,
                            const void* norm, View head, const void* head_sums, const void* head_bias, const float* cos,
                            const float* sin, View x, View qkv, View o, View inner, void* logits, void* partial,
                            void* best, int* counters, int* lengths, int64_t* tokens, int64_t* clocks,
                            View k_cache, View v_cache, int layer_stride, const void* inboxes, int rank, int gpus,
                            int heads, int activation, int splits, float eps, float scale, int blocks, int dtype,
                            cudaStream_t stream) {
  Model m = {};
  m.layers = static_cast<const Layer*>(layers), m.layer_count = layer_count;
  m.embedding = embedding.data, m.positions = positions, m.norm = norm;
  m.head = head.data, m.head_sums = head_sums, m.head_bias = head_bias, m.cos = cos, m.sin = sin;
  m.x = x.data, m.qkv = qkv.data, m.o = o.data, m.inner = inner.data, m.logits = logits;
  m.partial = static_cast<Word<float>*>(partial);
  m.best = static_cast<unsigned long long*>(best), m.counters = counters, m.lengths = lengths, m.tokens = tokens,
  m.clocks = clocks;
  m.inboxes = static_cast<uint64_t* const*>(inboxes), m.rank = rank, m.gpus = gpus;
  m.k_cache = k_cache.data, m.v_cache = v_cache.data, m.layer_stride = layer_stride;
  m.rows = x.sizes[0], m.hidden = x.sizes[1], m.max_seq = k_cache.sizes[1];
  m.heads = heads, m.kv_heads = k_cache.sizes[2];
  const int group = heads / m.kv_heads, head_dim = k_cache.sizes[3];
  m.shared_by = min(group, MOST_HEADS), m.sets = ceil_div(group, MOST_HEADS);
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
