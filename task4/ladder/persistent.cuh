// What rungs 14 and 15 share: persistent blocks. A block stays on its SM and computes tile after tile, so that the
// epilogue of one tile overlaps the prologue of the next.
//
//   tile       B_r rows of one head, and the keys that they see, in blocks of B_c keys, the last block first
//   Shared     the buffers and their mbarriers
//   TileOrder  the order of the tiles, and the dynamic tile scheduler's counter
//   scheduler  one thread: takes the next tile, passes it to the producer, and loads its Q_i
//   producer   one thread: loads K_j and V_j as soon as a buffer is free
//   epilogue   O_i goes from registers through shared memory and TMA to global memory
//   run_roles  which warps do what
//   host       tensor maps, grid, tile sizes
#pragma once
#include <algorithm>

#include "attention.cuh"
#include "hopper.cuh"
#include "warpgroup.cuh"

constexpr int STAGES = 2;  // of the rings of K and V
constexpr int MAX_CONSUMERS = 3;

// Named barriers; 0 is __syncthreads().
enum NamedBarrier {
  TURN = 1,                        // TURN + w: consumer w may issue its products
  DECISION = TURN + MAX_CONSUMERS  // DECISION + w: every warp of consumer w has voted (rung 15)
};

// blocks: of K and V that some row sees. -1: no more tiles. Aligned: loaded at once, and nothing beside it is
struct alignas(16) Tile {
  int row_0, head, b, blocks;
};

// full: the buffer's contents have arrived. empty: all its readers are done
template <int D, int CONSUMERS, int B_c, int Q_STAGES>
struct Shared {
  static constexpr int B_r = 64 * CONSUMERS;
  alignas(1024) uint16_t Q[Q_STAGES][B_r * D];
  alignas(1024) uint16_t K[STAGES][B_c * D], V[STAGES][B_c * D];
  uint16_t O[D < 256 ? B_r * D : 1];  // on its way to global memory, each warp's 16 rows together
  Tile tile;                          // the next tile, for the producer
  Tile q_tile[Q_STAGES];              // the tiles whose Q_i are in the buffers, for the consumers
  Tile previous[4 * CONSUMERS];       // per consumer warp: the tile whose O_i is not stored yet
  uint64_t q_full[Q_STAGES], q_empty[Q_STAGES], k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
  uint64_t tile_full, tile_empty;

  // By one thread, before a __syncthreads(). What precedes the first tile gets rows past the end, which are not stored.
  DEVICE void init(int q_len) {
    for (int i = 0; i < Q_STAGES; ++i) mbarrier_init(&q_full[i], 1), mbarrier_init(&q_empty[i], 4 * CONSUMERS);
    for (Tile& none : previous) none = {q_len, 0, 0, 0};
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(&k_full[i], 1), mbarrier_init(&k_empty[i], 4 * CONSUMERS);  // the consumers' warps
      mbarrier_init(&v_full[i], 1), mbarrier_init(&v_empty[i], 4 * CONSUMERS);
    }
    mbarrier_init(&tile_full, 1), mbarrier_init(&tile_empty, 1);
    mbarrier_init_fence();
  }
};

// The order of tiles: group after group of heads whose K and V fit in L2 together. Within a group, one row block of
// every head, then the next row block of every head.
struct TileOrder {
  int row_blocks, group, tiles;
  bool dynamic;  // longest row blocks first, and a block that is done takes the next tile. Else block b has the tiles
                 // b, b + gridDim.x, ...

  DEVICE Tile tile(const Attention& a, int number, int B_r, int B_c) const {
    const int first = number / (group * row_blocks) * group;  // the group's first head
    const int heads = min(group, a.batch * a.heads - first);  // the last group may have fewer
    const int i = number - first * row_blocks, block = i / heads, head = first + i % heads;
    const int row_0 = (dynamic ? row_blocks - 1 - block : block) * B_r;
    const int blocks = ceil_div(a.visible(min(row_0 + B_r, a.q_len) - 1), B_c), b = head / a.heads;
    return {row_0, head - b * a.heads, b, blocks};
  }

  // Dynamic tile scheduler: the workspace counts the tiles taken. atomicInc() sets it back to 0 at the last one, for
  // the next launch.
  DEVICE int next(const Attention& a, int number) const {
    return gridDim.x + (dynamic ? atomicInc(static_cast<unsigned*>(a.workspace), tiles - 1) : number);
  }
};

template <typename T, int D, typename Shared, int Q_STAGES>
DEVICE void run_scheduler(Shared& s, const Attention& a, const CUtensorMap& q_map, const TileOrder& order, int B_c) {
  Ring<1> tiles;
  Ring<Q_STAGES> q;
  const auto wait_until_taken = [&] { mbarrier_wait(&s.tile_empty, tiles.parity ^ 1); };
  const auto send = [&](const Tile& tile) {
    wait_until_taken();
    s.tile = tile;
    mbarrier_arrive(&s.tile_full);
    tiles.next();
    mbarrier_wait(&s.q_empty[q.index], q.parity ^ 1);
    s.q_tile[q.index] = s.tile;  // s.tile instead of tile: a thread has 24 registers
    if (s.tile.blocks > 0) {
      mbarrier_arrive_expect(&s.q_full[q.index], Shared::B_r * D * sizeof(T));
      tma_load(s.Q[q.index], &q_map, &s.q_full[q.index], s.tile.row_0, s.tile.head, s.tile.b, EVICT_FIRST);
    } else {
      mbarrier_arrive(&s.q_full[q.index]);
    }
    q.next();
  };
  for (int number = blockIdx.x; number < order.tiles; number = order.next(a, number)) {
    send(order.tile(a, number, Shared::B_r, B_c));
    wait_until_taken();  // no tile is taken early: with dynamic the next one goes to the first block that is done
  }
  send({0, 0, 0, -1});
}

template <typename T, int D, int B_c, typename Shared>
DEVICE void run_producer(Shared& s, const Attention& a, const CUtensorMap& k_map, const CUtensorMap& v_map) {
  Ring<1> tiles;
  Ring<STAGES> k, v;
  while (true) {
    mbarrier_wait(&s.tile_full, tiles.parity);
    tiles.next();
    const Tile tile = s.tile;
    if (tile.blocks <= 0) mbarrier_arrive(&s.tile_empty);
    if (tile.blocks < 0) break;
    const int kv_head = tile.head / (a.heads / a.kv_heads);
    for (int j = tile.blocks - 1; j >= -1 && tile.blocks; --j) {  // line 7, in the order of use: K, K V, K V, ..., V
      if (j == 0) mbarrier_arrive(&s.tile_empty);  // now, so that the next tile's Q_i and K_j load right behind these
      if (j >= 0) {
        mbarrier_wait(&s.k_empty[k.index], k.parity ^ 1);
        mbarrier_arrive_expect(&s.k_full[k.index], B_c * D * sizeof(T));
        tma_load(s.K[k.index], &k_map, &s.k_full[k.index], j * B_c, kv_head, tile.b, EVICT_LAST);
        k.next();
      }
      if (j < tile.blocks - 1) {
        mbarrier_wait(&s.v_empty[v.index], v.parity ^ 1);
        mbarrier_arrive_expect(&s.v_full[v.index], B_c * D * sizeof(T));
        tma_load(s.V[v.index], &v_map, &s.v_full[v.index], (j + 1) * B_c, kv_head, tile.b, EVICT_LAST);
        v.next();
      }
    }
  }
}

// Line 12 for a warp's 16 rows, from `row` of the tile on: written to O in the layout of a tile, and stored by TMA.
template <typename T, int D>
DEVICE void store_rows(uint16_t* O, const CUtensorMap* map, const Tile& tile, int row, const float (&O_i)[D / 2],
                       const float (&factor)[2]) {
  tma_store_wait();  // O is free: the previous tile is stored
  __syncwarp();
  // Four 8 x 8 matrices at a time: 16 columns of all 16 rows. A lane passes the address of row lane % 16 of chunk
  // c + lane / 16. c is even, so adding it commutes with the swizzle
  const int lane = threadIdx.x % 32;
  const uint32_t address = shared_address(O) + lane % 16 * 128 + (lane / 16 ^ lane % 8) * 16;
#pragma unroll
  for (int c = 0; c < D / 8; c += 2) {
    uint32_t x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = O_i + 4 * (c + i / 2) + 2 * (i % 2);
      x[i] = pack<T>(pair[0] * factor[i % 2], pair[1] * factor[i % 2]);
    }
    store_matrices((address ^ c % 8 * 16) + c / 8 * (16 * 128), x);
  }
  fence_async_proxy();
  __syncwarp();
  if (lane == 0) tma_store(map, O, tile.row_0 + row, tile.head, tile.b);
}

// A block's warps in their roles. Consumer::run() computes what warpgroup Consumer::wg has of every tile.
template <typename Consumer, typename T, int D, int CONSUMERS, int B_c, int Q_STAGES>
DEVICE void run_roles(const Attention& a, const CUtensorMap& q_map, const CUtensorMap& k_map, const CUtensorMap& v_map,
                      const CUtensorMap& out_map, const TileOrder& order) {
  using Memory = typename Consumer::Memory;
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& s = *reinterpret_cast<Memory*>(raw);

  const int warpgroup = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);  // shuffled: the compiler sees it as warp-uniform
  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&q_map, &k_map, &v_map, &out_map}) tma_prefetch(map);
    s.init(a.q_len);
  }
  __syncthreads();  // barriers initialised before any thread uses them

  if (warpgroup == 0) {
    registers_give<CONSUMERS == 2 ? 24 : 32>();
    if (threadIdx.x == 32) run_scheduler<T, D, Memory, Q_STAGES>(s, a, q_map, order, B_c);
    if (threadIdx.x == 0) run_producer<T, D, B_c>(s, a, k_map, v_map);
  } else {
    registers_take<CONSUMERS == 2 ? 240 : 160>();
    Consumer{a, out_map, s, warpgroup - 1}.run();
  }
}

// ---- Host

template <auto kernel, typename T, int D, int CONSUMERS, int B_c, typename Shared>
cudaError_t launch_persistent(const Attention& a, cudaStream_t stream) {
  constexpr int B_r = 64 * CONSUMERS, bytes = sizeof(Shared);
  static_assert(bytes <= 227 * 1024, "a block has at most 227 KiB of shared memory");
  CUtensorMap q_map, k_map, v_map, out_map;
  cudaError_t error;
  if ((error = make_tensor_map<T>(&q_map, a.q, a.q_strides, a.batch, a.q_len, a.heads, D, B_r))) return error;
  if ((error = make_tensor_map<T>(&k_map, a.k, a.k_strides, a.batch, a.kv_len, a.kv_heads, D, B_c))) return error;
  if ((error = make_tensor_map<T>(&v_map, a.v, a.v_strides, a.batch, a.kv_len, a.kv_heads, D, B_c))) return error;
  if ((error = make_tensor_map<T>(&out_map, a.out, a.out_strides, a.batch, a.q_len, a.heads, D, 16))) return error;
  if ((error = allow_shared_memory<kernel, bytes>())) return error;
  int sms;
  if ((error = count_sms(&sms))) return error;

  const int heads = a.batch * a.heads, row_blocks = ceil_div(a.q_len, B_r);
  TileOrder order = {row_blocks, 1, heads * row_blocks, a.workspace && heads * row_blocks > sms};
  if (order.dynamic) {
    // K and V of a group are 16 MiB, a quarter of L2. Up to 512 keys they are 8 MiB: a group is one wave of tiles even
    // so. With 32 MiB, causal rows of 512 keys were 4 % slower on an H200 and up to 10 % slower on an H100 (NOTES.md)
    const int64_t group_bytes = a.kv_len <= 512 && D < 256 ? 8 << 20 : 16 << 20, head_bytes = int64_t(a.kv_len) * D * 4;
    order.group = std::clamp<int64_t>(group_bytes / head_bytes * (a.heads / a.kv_heads), 1, heads);
  }
  const int grid = std::min(sms, order.tiles);
  kernel<<<grid, (1 + CONSUMERS) * WARPGROUP, bytes, stream>>>(a, q_map, k_map, v_map, out_map, order);
  return cudaGetLastError();
}

// The tile sizes, chosen by time on an H200. Rung::launch<head_dim, CONSUMERS, B_c, Q_STAGES>() launches one of them.
template <typename Rung>
cudaError_t launch_tile_sizes(const Attention& a, cudaStream_t stream) {
  switch (a.head_dim) {
    case 64:  // 192 rows: half as much again is computed per K and V fetched. But 512 rows are 2.67 tiles of 192, and a
              // causal diagonal wastes more of them. Causal, 128 rows were faster up to a q_len of 1,024; not causal,
              // 192 rows were faster at 512 and 2,048 (NOTES.md)
      if (a.q_len <= (a.causal ? 1024 : 128)) return Rung::template launch<64, 2, 128, 2>(a, stream);
      return Rung::template launch<64, 3, 128, 2>(a, stream);
    case 128:  // O_i 64, S 64 and P 32 of 240 registers; 224 KiB of shared memory
      return Rung::template launch<128, 2, 128, 2>(a, stream);
    case 256:  // O_i alone takes 128 registers, Q_i 64 KiB: no room for more than 80 keys or for a second Q_i
      return Rung::template launch<256, 2, 80, 1>(a, stream);
  }
  return cudaErrorInvalidValue;
}
