// A tile of a chunk: arguments, shared memory, and which rows and keys a block has of it. See chunk.cuh.
#pragma once
#include "../../task4/ladder/attention.cuh"
#include "../../task4/ladder/hopper.cuh"
#include "dependent_launch.cuh"
#include "lazy_maximum.cuh"
#include "tensor_map.cuh"

// A kernel has said whether there are GAPS, or pages; and whether it is BATCH_INVARIANT.

constexpr int MOST_CONSUMERS = 3;
constexpr int MOST_SPLITS = 8, MOST_CLUSTERS = 16;  // blocks of a cluster, clusters of a tile

enum NamedBarrier { MERGE = 1,     // K_j and V_j have been read
                    COMPLETE = 2,  // the parts are, or the zeros behind the keys
                    TURN = 3,      // TURN + w: consumer w may issue its products
                    DECISION = TURN + MOST_CONSUMERS,  // DECISION + w: every warp of consumer w has voted
                    ARRIVED = DECISION + MOST_CONSUMERS };  // the first K_j has

struct Chunk {
  CUtensorMap q_map, k_map, v_map;
  Attention a;
  int group, tokens, tiles;  // heads of a kv head, tokens of a tile, tiles of a kv head
  int splits, clusters;      // blocks of a cluster, clusters of a tile; by length, of a tile that is not cut: 1
  int at_once = 0;           // by length, of how many clusters each should have as much to do: chunk_by_length.cuh
  const int* seqlens_k;      // keys of each sequence, or null: all of kv_len
  // With GAPS:
  const int *leftpad_k = nullptr, *block_table = nullptr;  // keys to skip at the start of each sequence; its pages
  int max_pages = 0, page_size = 0, pages = 0;             // of a sequence; keys of a page; of the pool, or sequences
  unsigned pages_of_16_keys = 0;  // 16 / page_size, times 2^31 and rounded up
  int window = 0, box_bits;       // 0: no limit; 1 << box_bits keys are loaded at once
  // BATCH_INVARIANT: a tile's keys are cut into at most 1 << leaf_bits leaves. Of a warp's subtrees some wait for their
  // neighbours, those for which an SM has no room in a slot: there are as many as the GPU has blocks at once
  int leaf_bits = 0, slots = 0, levels = 0;
  float* waiting = nullptr;  // [slot][level][warp], a state
  int* taken = nullptr;      // of each slot whether a block has it, 0 between launches
  int64_t parts;             // of tiles with several clusters, one for each of these
  float* partial;            // [part][B_r][head_dim], and behind all of them m, l: [part][B_r][2]
  int* counters;             // [part][splits], the first of a tile's, 0 between launches
};

// What a cluster has to do: a tile, or a part of its keys.
struct Item {
  int b, kv_head, of_head;  // of_head: of the head's tiles
  int cluster, clusters;    // of the tile's; 0 clusters: there is nothing to do
  int64_t first_part;       // of the tile's
  int2 lengths;             // of the sequence, if they are known already
};

// Keys of a sequence, and those to skip.
DEVICE int2 lengths_of(const Chunk& c, int b) {
  return make_int2(c.seqlens_k ? min(max(__ldcg(c.seqlens_k + b), 0), c.a.kv_len) : c.a.kv_len,
                   GAPS && c.leftpad_k ? max(__ldcg(c.leftpad_k + b), 0) : 0);
}

// Keys of a block. BATCH_INVARIANT, 64 rows of head_dim 128 wait for the memory anyway, and in blocks of 64 leave room
// for what waits in shared memory.
constexpr int keys_of_a_block(int head_dim, int rows) {
  return BATCH_INVARIANT && head_dim == 128 && rows == 64 ? 64 : 128;
}

// BATCH_INVARIANT: what a warp has of its 16 rows from some leaves.
template <int D>
struct State {
  float4 O[D / 8][32], ml[8];  // [][lane]; both rows' m, then l, of four lanes
};
// Those that wait for their neighbours on their SM, of two consumers: of the smallest subtrees, and with head_dim 64 of
// those of two leaves. And the slot in which the others wait.
constexpr int WARPS = 2 * WARPGROUP / 32;
template <int D>
struct Waiting {
  static constexpr int LEVELS = D == 64 ? 2 : 1;
  State<D> states[LEVELS][WARPS];
  uint64_t lent, returned;
  int slot;
};
struct Nothing {};

// B_r: 64 rows for each consumer; or 64 altogether, whose blocks of keys two consumers share.
template <int D, int B_r>
struct Shared {
  static constexpr int CONSUMERS = B_r == 192 ? 3 : 2, THREADS = (1 + CONSUMERS) * WARPGROUP;
  static constexpr int SHARES = 64 * CONSUMERS / B_r, B_c = keys_of_a_block(D, B_r);
  static constexpr int STAGES = !BATCH_INVARIANT ? (D == 64 ? 6 : 3) : D * B_c == 128 * 128 ? 2
                                                                                            : 4;  // of K
  // V_j is there while K_j's softmax is computed: one more, if there is room.
  static constexpr int V_STAGES = STAGES == 4 ? 5 : STAGES;
  // Registers of a thread; loads from pages take more.
  static constexpr int OF_PRODUCER = CONSUMERS == 3 ? 32 : !GAPS   ? 24
                                                       : B_c == 64 ? 56
                                                                   : 40;
  static constexpr int OF_CONSUMER = CONSUMERS == 3 ? 160 : 252 - OF_PRODUCER / 2;
  static constexpr int PITCH = D + 8;  // of a row of parts: 8 rows' pairs are in different banks
  alignas(1024) uint16_t Q[B_r * D];
  union {
    struct {
      alignas(1024) uint16_t K[STAGES][B_c * D], V[V_STAGES][B_c * D];
    };
    struct {                          // when the last K_j and V_j have been read
      float O[SHARES * B_r * PITCH];  // [share][row][PITCH]
      float2 ml[SHARES * B_r];        // [share][row]
    } parts;
  };
  std::conditional_t<BATCH_INVARIANT, Waiting<D>, Nothing> waiting;
  // full: the buffer's contents have arrived. empty: all its readers are done
  uint64_t q_full, k_full[STAGES], k_empty[STAGES], v_full[V_STAGES], v_empty[V_STAGES];
  unsigned missing[STAGES];  // of K_j's boxes: bit i: the keys of box i are on no page
  LazyFlags lazy[CONSUMERS];
  Item item;
  bool last;  // of the tile's clusters
};

// BATCH_INVARIANT: of so many keys. A leaf has 128 or more, and from 4096 on 256.
DEVICE int bits_of_leaves(unsigned keys) {
  const int bits = 31 - __clz(int(max(1u, keys)));
  return max(0, bits - 7 - min(max(0, (bits - 10) / 2), 1));
}

// What a block has of its tile: rows, and a share of their keys.
template <int B_c>
struct Tile {
  const Chunk& c;
  const Item& item;  // in shared memory, for what comes last: registers are few
  int b, kv_head, of_head, split, cluster, clusters;
  int token_0, rows;  // its first token; rows that exist
  int each, own;      // rows that a block of a cluster merges; that this one does
  // Known behind the launch before: keys of the sequence, and those to skip; the first key that some row sees; of the
  // blocks of keys, those of this block
  int keys, skipped, begin, first, end;
  // BATCH_INVARIANT: the tile's blocks of keys, cut into 1 << leaf_bits leaves; where a second consumer's begin
  int first_of_all, all, leaf_bits, middle;

  // Where each tile has as many clusters.
  DEVICE Tile(const Chunk& c, const Item& item) : c(c), item(item), clusters(c.clusters) {
    // Neighbours are tiles that read the same keys: an L2 request of one is the other's as well.
    of_head = blockIdx.x / c.splits, split = blockIdx.x - of_head * c.splits;
    const int kv_heads = gridDim.y / clusters;
    cluster = blockIdx.y / kv_heads, kv_head = blockIdx.y - cluster * kv_heads, b = blockIdx.z;
    find_rows();
  }
  DEVICE void write(Item& to) const {
    const int64_t nth = (int64_t(b) * c.a.kv_heads + kv_head) * c.tiles + of_head;
    to.b = b, to.kv_head = kv_head, to.of_head = of_head;
    to.cluster = cluster, to.clusters = clusters, to.first_part = nth * clusters;
  }
  DEVICE void read_item() {
    b = item.b, kv_head = item.kv_head, of_head = item.of_head;
    cluster = item.cluster, clusters = item.clusters;
    find_rows();
  }
  DEVICE void find_rows() {
    token_0 = (c.tiles - 1 - of_head) * c.tokens;  // causal: the longest rows first
    rows = min(c.tokens, c.a.q_len - token_0) * c.group;
    each = ceil_div(rows, c.splits), own = max(0, min(each, rows - split * each));
  }
  template <bool BY_LENGTH>
  DEVICE void find_keys() {
    const int2 lengths = BY_LENGTH ? item.lengths : lengths_of(c, b);
    keys = lengths.x, skipped = lengths.y;
    begin = GAPS ? min(begins(token_0), keys) : 0;
    const int nth = cluster * c.splits + split, of = clusters * c.splits;  // of the tile's blocks
    first_of_all = begin / B_c, all = max(0, ceil_div(visible(last_token()), B_c) - first_of_all);
    if constexpr (BATCH_INVARIANT) {
      leaf_bits = min(c.leaf_bits, bits_of_leaves(unsigned(all) * B_c));
      first = leaf_begin(first_leaf(nth, of)), end = leaf_begin(first_leaf(nth + 1, of));
      middle = leaf_begin(first_leaf(2 * nth + 1, 2 * of));
    } else {
      first = first_of_all + int64_t(all) * nth / of, end = first_of_all + int64_t(all) * (nth + 1) / of;
    }
  }
  // Of `of` that share the tile, a power of two, each has neighbouring leaves: as many, or one if there are fewer.
  DEVICE int first_leaf(int nth, int of) const { return ((nth << leaf_bits) + of - 1) >> (31 - __clz(of)); }
  // A consumer has 1 << bits leaves, or with 0 bits none or one.
  DEVICE int bits_of_a_consumer(int shares) const {
    return max(0, leaf_bits - (31 - __clz(clusters * c.splits * shares)));
  }
  DEVICE int leaf_begin(int leaf) const { return first_of_all + int(int64_t(all) * leaf >> leaf_bits); }
  // The block of keys that this block reads as its nth. Consumers that share the keys have every other one; or, of
  // leaves, the first half and the second, in turns while there are both.
  template <int SHARES>
  DEVICE int read(int nth) const {
    if (!BATCH_INVARIANT || SHARES == 1) return end - 1 - nth;
    const int both = min(middle - first, end - middle);
    const bool second = nth < 2 * both ? nth % 2 : end - middle > both;
    return (second ? end : middle) - 1 - (nth < 2 * both ? nth / 2 : nth - both);
  }
  // In its sequence. A quotient, of 2^27 at most, that is exact without a division: those take as long as some loads.
  DEVICE int page_of(int key) const { return uint64_t(unsigned(key) / 16) * c.pages_of_16_keys >> 31; }
  DEVICE int last_token() const { return token_0 + rows / c.group - 1; }
  // Of the keys, those up to which a token sees them, and the first one that it may see.
  DEVICE int visible(int token) const {
    const int diagonal = token + keys - c.a.q_len + 1;
    return c.a.causal ? min(max(diagonal, 0), keys) : keys;
  }
  DEVICE int begins(int token) const {
    return GAPS && c.window ? max(skipped, token + keys - c.a.q_len + 1 - c.window) : skipped;
  }
};
