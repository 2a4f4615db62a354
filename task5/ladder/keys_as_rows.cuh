// What the warps of rung 5 have in common: the arguments, a block's share of the keys, shared memory, and the products.
#pragma once
#include "../../task4/ladder/hopper.cuh"
#include "decode.cuh"
#include "tensor_map.cuh"

constexpr int MOST_BLOCKS = 16;  // of a cluster: a power of two
constexpr int ALONE = 64;  // blocks that share a sequence by itself: a batch-invariant call has a part for each
constexpr int COMPUTE = 1;  // named barrier of the four warps that compute
constexpr int START = 2;    // of them and the one that loads, which does not wait for them

struct Arguments {
  Decode a;
  CUtensorMap k_map, v_map;
  int box_bits;                   // 1 << box_bits keys are loaded at once
  int buffers;                    // of shared memory: K_j, V_j, K_j+1, ...
  int block_bits;                // 1 << block_bits blocks of a cluster
  int part_bits;                 // 1 << part_bits parts of a pair at most, where a call is batch-invariant
  int items;                     // shares of all pairs: a cluster's block has one, a block by itself every so manieth
  Divisor shares, pairs;         // of a pair, of a sequence
};

// A share of a pair's keys.
struct Item {
  int share, pair;        // of the pair, of all pairs
  int b, kv_head, row_0;  // of the pair

  DEVICE Item(const Arguments& c, int n, int N) {
    pair = c.shares.quotient(n), share = n - pair * int(c.shares.d), b = c.pairs.quotient(pair);
    const int of_sequence = pair - b * int(c.pairs.d);
    kv_head = c.a.row_tiles.quotient(of_sequence), row_0 = (of_sequence - kv_head * int(c.a.row_tiles.d)) * N;
  }
};

// Of how many parts is a sequence, as a power of two; and which are a share's: from first_part(share) to that of the
// next one.
DEVICE int part_bits(const Arguments& c, const Sequence& s) {
  if (!c.a.chunks) return c.block_bits + c.a.cluster_bits;
  return max(0, min(c.part_bits, 30 - __clz(s.tiles)));  // of two tiles at least
}
DEVICE int first_part(const Arguments& c, int bits, int share) {
  const int shares = c.block_bits + c.a.cluster_bits;
  return ((share << bits) + (1 << shares) - 1) >> shares;
}
DEVICE int first_tile(const Sequence& s, int bits, int part) { return int64_t(s.tiles) * part >> bits; }

template <int D, int N>
struct Shared {
  static constexpr int KEYS = D == 64 ? 128 : 64, TILE = KEYS * D * 2;  // bytes of K_j, or of V_j
  static constexpr int PITCH = D + 4;                                   // of a row of O
  uint64_t full[6], empty[6], known, received;  // known: the sequence; received: the parts that the cluster sends here
  unsigned missing[6];  // of a buffer's boxes: bit i: keys of box i are on no page
  Sequence sequence;
  int skipped;  // buffers that were loaded in vain
  bool last;    // of the pair's clusters
  float2 maximum[2][WARPS][N / 2], sum[WARPS][N / 2], m[N / 2], l[N / 2];
  float2 ml[MOST_BLOCKS][N];           // the parts that are sent here
  alignas(16) float4 parts[N * D / 4];  // [block][quads of this block]
  alignas(1024) uint16_t Q[D / 64][N][64];
  alignas(1024) uint16_t P[KEYS / 64][N][64];
  alignas(1024) uint8_t KV[];

  static constexpr int O_BUFFERS = (N * PITCH * 4 + TILE - 1) / TILE;  // in the end the buffers are O
};
// As many buffers as let two blocks be on an SM, of 227 KiB, if these are enough.
template <int D, int N>
constexpr int room_for(int bytes) { return (bytes - int(sizeof(Shared<D, N>))) / Shared<D, N>::TILE; }
template <int D, int N>
constexpr bool TWO_FIT = room_for<D, N>(113 * 1024) >= (D == 256 ? 3 : 4);
template <int D, int N>
constexpr int BUFFERS = TWO_FIT<D, N> ? (room_for<D, N>(113 * 1024) > 6 ? 6 : room_for<D, N>(113 * 1024))
                                      : (room_for<D, N>(226 * 1024) > 6 ? 6 : room_for<D, N>(226 * 1024));

// d (64 x N) += a (64 x 16) b (16 x N), from descriptors. TRANS_A: the product sums over a's rows (V).
#ifndef __CUDACC__
template <typename T, int N, int TRANS_A>
struct Product {
  DEVICE static void run(float (&d)[N / 2], uint32_t a, uint32_t b, int add, CUDA_ON_CPU_CALLER) {
    cuda_on_cpu::wgmma({WGMMA_TYPE<T>, N, add != 0, TRANS_A != 0, false, a, b, nullptr}, d, file, line);
  }
};
#else
template <typename T, int N, int TRANS_A>
struct Product;

#define PRODUCT(N, R, TYPE, PTX_TYPE, REGISTERS, x0, x1, x2, x3, ...)                                  \
  template <int TRANS_A>                                                                               \
  struct Product<TYPE, N, TRANS_A> {                                                                   \
    DEVICE static void run(float (&d)[R], uint32_t a, uint32_t b, int add) {                           \
      asm volatile(                                                                                    \
          "{\n.reg .pred p;\n.reg .b64 x, y;\nsetp.ne.b32 p, %" #x2 ", 0;\n"                           \
          "mov.b64 x, {%" #x0 ", 0x40000040};\nmov.b64 y, {%" #x1 ", 0x40000040};\n"                   \
          "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." PTX_TYPE "." PTX_TYPE " {" REGISTERS "}, " \
          "x, y, p, 1, 1, %" #x3 ", 0;\n}"                                                             \
          : __VA_ARGS__ : "r"(a), "r"(b), "r"(add), "n"(TRANS_A));                                     \
    }                                                                                                  \
  };
#define PRODUCTS(...)                    \
  PRODUCT_OF(__half, "f16", __VA_ARGS__) \
  PRODUCT_OF(__nv_bfloat16, "bf16", __VA_ARGS__)
#define PRODUCT_OF(TYPE, PTX_TYPE, N, R, ...) PRODUCT(N, R, TYPE, PTX_TYPE, __VA_ARGS__)
#define REGISTERS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define REGISTERS_16 REGISTERS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
PRODUCTS(8, 4, "%0, %1, %2, %3", 4, 5, 6, 7, WGMMA_D4(0))
PRODUCTS(16, 8, REGISTERS_8, 8, 9, 10, 11, WGMMA_D8(0))
PRODUCTS(32, 16, REGISTERS_16, 16, 17, 18, 19, WGMMA_D8(0), WGMMA_D8(8))
PRODUCTS(64, 32, WGMMA_R32, 32, 33, 34, 35, WGMMA_D32)
#endif
