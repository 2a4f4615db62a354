// What a persistent step knows of its model, and what a block of it has in shared memory.
#pragma once
#include <cuda_runtime.h>

#include "attention.cuh"
#include "inboxes.cuh"
#include "stream.cuh"
#include "words.cuh"

constexpr int IN_FLIGHT = 2;  // stages, before their phase: x and the counters would queue behind more
constexpr int IN_L2 = 8;      // stages: two thirds of it, of all blocks
// Of x, o and inner; that of qkv is by tag.
template <int X_ROWS>
constexpr Arrival ARRIVAL = X_ROWS == 1 ? Arrival::BY_TAG : Arrival::BY_VALUE;
// Of x in shared memory. Of one row there are no more, or six stages would not fit. In fp32 16 pieces of four rows are
// 4,096 columns, which stay then; models with heads of 64 have fewer columns, and a fifth stage is worth more to them.
template <typename T, int X_ROWS, int D>
constexpr int X_PIECES = X_ROWS == 1 ? 12 : (X_ROWS > 4 ? 3 : (sizeof(T) == 4 && D == 128 ? 16 : 8));

struct Layer {
  const void *norm_1, *qkv_sums, *qkv_bias, *o_bias, *norm_2, *up_sums, *up_bias, *down_bias;
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
enum Counter { CAME,     // to the ends of all phases
               DONE,     // with the step
               BEFORE,   // steps, not blocks: never 0 again
               MERGED }; // of each pair, whose parts of attention are written, in all layers
constexpr int APART = 32;  // ints

struct Model {
  const Layer* layers;
  const CUtensorMap* maps;                                           // of the layers' qkv, o, up and down, and of head
  const void *embedding, *positions, *norm, *head_sums, *head_bias;  // positions: null with RoPE
  const float *cos, *sin;                                            // (max_seq, head_dim / 2), or null
  void *x[2], *within, *inner;  // x before layers of even and of odd numbers, and within each
  void *qkv, *o, *logits;
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
  int pace;  // cycles in which the memory delivers a stage of all blocks
  Shape shapes[PRODUCTS];

  DEVICE int items() const { return rows * kv_heads * sets * splits; }
  // m and l of each head of each item.
  template <int D>
  DEVICE Word<float>* partial_ml() const {
    return partial + int64_t(items()) * shared_by * D;
  }
  DEVICE Units own(int which) const {
    return own_units(shapes[which].units, units_together(which == UP ? activation : NONE));
  }
  // The `which` of layer i, and the logits behind all layers.
  DEVICE const CUtensorMap* map(int i, int which) const { return maps + HEAD * i + which % HEAD; }
  DEVICE Product product(const Layer& l, int i, int which, Units own, unsigned tag = 0) const {
    Product p = {};
    p.map = map(i, which), p.own = own, p.tag = tag;
    const Shape& shape = shapes[which];
    p.rows = rows, p.N = shape.N, p.K = shape.K, p.units = shape.units, p.per_stage = shape.per_stage;
    p.pieces = shape.pieces, p.eps = eps;
    p.x_stride = shape.K, p.out_stride = p.residual_stride = shape.N;
    void *before = x[i % 2], *behind = x[(i + 1) % 2];
    if (which == QKV) p.x = before, p.norm = l.norm_1, p.row_sums = l.qkv_sums, p.bias = l.qkv_bias;
    if (which == QKV) p.out = qkv;
    if (which == O) p.x = o, p.bias = l.o_bias, p.residual = before, p.out = within;
    if (which == UP) {
      p.x = within, p.norm = l.norm_2, p.row_sums = l.up_sums, p.bias = l.up_bias, p.out = inner;
      p.activation = activation;
      if (activation == SWIGLU) p.out_stride = shape.N / 2;
    }
    if (which == DOWN) p.x = inner, p.bias = l.down_bias, p.residual = within, p.out = behind;
    if (which == HEAD) p.x = before, p.norm = norm, p.row_sums = head_sums, p.bias = head_bias, p.out = logits;
    return p;
  }
};

template <typename T, int X_ROWS, int D>
struct Memory {
  union {
    Parts<T, AttentionOf<T, D>::PARTS, D> parts;  // in attention
    alignas(128) XMemory<X_ROWS, X_PIECES<T, X_ROWS, D>> x;  // in products
  };
  unsigned long long best[X_ROWS];
  bool last;
  Layer layers[MOST_LAYERS + 1];  // of the model, a copy; behind them what the logits' product takes for its layer
  int lengths[X_ROWS];        // a copy too: the last block of all changes them while others may still read
  Units own[PRODUCTS];        // the block's
  Inboxes inboxes;
  alignas(1024) Shared<X_ROWS> ring;
};
