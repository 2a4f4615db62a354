// Rung 14, persistent: a block stays on its SM, and the epilogue of one tile overlaps the prologue of the next.
// architectures: sm_90a cpu
// FlashAttention-2 forward [FA2] arXiv:2307.08691, Algorithm 1, scheduled as in [FA3] arXiv:2407.08608, section 3.
//
//   q, out (batch, q_len, heads, head_dim)     k, v (batch, kv_len, kv_heads, head_dim)     fp16 or bf16, sums in fp32
//   grid  (at most one block per SM)           each computes tile after tile: B_r rows of one head
//   block (128 (1 + CONSUMERS))                one per SM: it has all the registers
//     warp 0, one thread   the producer: loads K_j and V_j by TMA as soon as a buffer is free
//     warp 1, one thread   the scheduler: takes the next tile, and loads its Q_i by TMA
//     warps 2 and 3        exit at once; setmaxnreg moves registers of whole warpgroups
//     the other warps      consumers: warpgroup w has the rows 64 w ... 64 w + 63 of Q_i, all columns
//   head_dim 64, 128 or 256, scale above 0, pointers and strides multiples of 16 bytes: checked by the caller
//
//   line  8    S   = Q_i K_j^T                 wgmma, both operands from shared memory
//   line  9    m'  = max(m_i, rowmax(S))       four lanes share a row: two shuffles
//              P   = exp(S - m'),  l_i = exp(m_i - m') l_i + rowsum(P)
//   line 10    O_i = diag(exp(m_i - m')) O_i + P V_j      wgmma, P from registers
//   line 12    O_i = diag(l_i)^-1 O_i          once, at the end
//
// Against rung 13, where a block computes nothing before its first Q_i and K_j arrive, nor while it stores its last
// rows. With B_r = 128, head_dim 128 and 2,048 keys a tile is 134 MFLOP, 26 us at 680 TFLOP/s; with 512 keys it is
// 6.5 us. Pauses of a few microseconds are a good part of that. Scheduler, producer and roles are in persistent.cuh
//   pipeline   Q_i has two buffers. The next tile's Q_i and first K_j and V_j load while this one is computed. The last
//              P V_j of a tile is issued behind the first S of the next one
//   epilogue   O_i is stored through shared memory and TMA beside the second S. The next P V_j waits only until O_i has
//              left its registers
//   prologue   what the first S of a tile does not need, like 1 / l_i of the previous tile, is computed while S runs
//   order      causal: a dynamic tile scheduler, longest row blocks first, in groups of heads whose K and V fit in L2
//              (16 MiB, 8 MiB up to 512 keys)
//   diagonal   a warpgroup whose rows do not see the last 64 keys of their first block does not multiply those keys
//   softmax    the wait for P V_j stands between exponentials; one instruction takes the maximum of three (softmax.cuh)
//
// What limits it: a warp scheduler has one warp of each consumer, and their softmaxes need nearly all of the time of
// their products.
//
// Shared memory, aligned to 1,024 bytes for the swizzle: Q_i twice, K_j and V_j in rings of two, and O_i for its store:
//   (Q_STAGES B_r + 4 B_c + B_r) head_dim 2 bytes
//   head_dim 64: 112 or 136 KiB;  128: 224 KiB;  256: 224 KiB, with one Q_i and no O_i
// Registers: a block starts with 65,536 / threads per thread. Then a thread of the producer's warpgroup keeps 24 (32),
// and one of 2 (3) consumers has 240 (160): O_i takes head_dim / 2, S B_c / 2, P B_c / 4.
#include <cuda_runtime.h>

#include <type_traits>

#include "attention.cuh"
#include "hopper.cuh"
#include "persistent.cuh"
#include "softmax.cuh"
#include "warpgroup.cuh"

// A warpgroup's rows of the tiles. A thread has two rows of its warp's 16: g (h = 0) and g + 8 (h = 1).
template <typename T, int D, int CONSUMERS, int B_c, int Q_STAGES>
struct Consumer {
  static constexpr int B_r = 64 * CONSUMERS, HALF = B_c == 128 ? 64 : B_c;
  using Memory = Shared<D, CONSUMERS, B_c, Q_STAGES>;

  const Attention& a;
  const CUtensorMap& out_map;
  Memory& s;
  const int wg, warp = threadIdx.x % WARPGROUP / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const float scale = a.scale * LOG2_E;
  Ring<Q_STAGES> q = {};
  Ring<STAGES> k = {}, v = {};

  float S[B_c / 2], O_i[D / 2], m_i[2], l_i[2] = {0.0f, 0.0f}, rescale[2], shift[2];
  float inverse[2] = {};         // 1 / l_i of the previous tile
  uint32_t P[B_c / 4];
  Tile tile = {};
  int j = 0;                     // the block of keys whose S is next
  int row = 0, seen[2] = {};     // row g in the sequence; the keys each row sees, from the thread's first column on
  int whole = 0;                 // all rows of the warpgroup see all blocks before this one
  bool half = false;             // no row sees more than HALF keys of the tile's first block
  bool pending = false;          // the previous tile's last P V_j is not issued yet
  int add = 0;                   // 0: the next P V_j is its tile's first, and O_i holds the previous tile

  // Consumers alternate. While a consumer's products run, it computes its softmax, and the next consumer's products
  // queue behind them.
  DEVICE void wait_for_turn() { barrier_sync(TURN + wg, 2 * WARPGROUP); }
  DEVICE void pass_turn() { barrier_arrive(TURN + (wg + 1) % CONSUMERS, 2 * WARPGROUP); }

  DEVICE void end_PV() {
    finish_PV(O_i, P);
    arrive_as_warp(&s.v_empty[v.index]);  // V_j has been read
    v.next();
  }

  DEVICE T* out_of(const Tile& tile, int row) const {
    return a.out_head<T>(tile.b, tile.head) + int64_t(row) * a.out_strides.row + 8 * t;
  }

  DEVICE void store_previous() {  // line 12
    const Tile& previous = s.previous[wg * 4 + warp];
    const int row_in_tile = wg * 64 + warp * 16;
    if constexpr (D < 256) {
      store_rows<T, D>(s.O + row_in_tile * D, &out_map, previous, row_in_tile, O_i, inverse);
    } else {
      const int row = previous.row_0 + row_in_tile + g;
      write_rows<D>(out_of(previous, row), a.out_strides.row, a.q_len - row, O_i, inverse);
    }
  }

  // Waits for the next tile and its Q_i. Returns false if there are no more tiles.
  DEVICE bool next_tile() {
    mbarrier_wait(&s.q_full[q.index], q.parity);
    tile = s.q_tile[q.index];
    __syncwarp();
    tile.blocks = __shfl_sync(~0u, tile.blocks, 0);  // shuffled: warp-uniform for the compiler
    return tile.blocks >= 0;
  }

  DEVICE void release_Q() {
    arrive_as_warp(&s.q_empty[q.index]);
    q.next();
  }

  DEVICE void store_zeros() {
    for (int e = 0; e < D; e += 32) {
      if (row < a.q_len) *reinterpret_cast<uint4*>(out_of(tile, row) + e) = make_uint4(0, 0, 0, 0);
      if (row + 8 < a.q_len) *reinterpret_cast<uint4*>(out_of(tile, row + 8) + e) = make_uint4(0, 0, 0, 0);
    }
  }

  // The first S of a tile, beside the last P V_j of the previous tile. KEYS: how many keys of the block some row sees.
  template <int KEYS>
  DEVICE void first_S(int row_w, int& first_sees) {
    const auto while_S_runs = [&] {
      first_sees = a.visible(row_w);
      whole = first_sees / B_c;
      seen[0] = a.visible(row) - 2 * t;
      seen[1] = a.visible(row + 8) - 2 * t;
      invert_fast(inverse, l_i);
    };
    begin_S<T, D, B_r, B_c, KEYS>(S, s.Q[q.index] + wg * 64 * 64, s.K[k.index]);  // line 8
    if (pending) {
      mbarrier_wait(&s.v_full[v.index], v.parity);
      begin_PV<T, D, B_c>(O_i, P, s.V[v.index], add);  // line 10
      pass_turn();
      while_S_runs();
      wgmma_wait<1>();
    } else {
      pass_turn();
      while_S_runs();
      wgmma_wait<0>();
    }
    keep_here(S);
  }

  DEVICE void first_step(int row_w) {
    j = tile.blocks - 1;
    half = HALF < B_c && a.visible(row_w + 63) <= j * B_c + HALF;
    mbarrier_wait(&s.k_full[k.index], k.parity);
    wait_for_turn();
    int first_sees;  // how many keys the warpgroup's first row sees
    if (half) {
      first_S<HALF>(row_w, first_sees);
    } else {
      first_S<B_c>(row_w, first_sees);
    }
    m_i[0] = m_i[1] = -INFINITY;
    l_i[0] = l_i[1] = 0.0f;
    if (first_sees < (j + 1) * B_c) {
      if (a.causal) {
        mask_diagonal<B_c>(S, row + a.kv_len - a.q_len + 1 - 2 * t - j * B_c);
      } else {
        mask<B_c>(S, 0, seen[0] - j * B_c);
        mask<B_c>(S, 1, seen[1] - j * B_c);
      }
    }
    constexpr int BEFORE = Order<D>::FIRST_BEFORE;
    float sum[2][2] = {};
    new_maxima<Maxima::FLOATS, B_c>(S, m_i, rescale, shift, scale, false);  // line 9
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (m_i[h] == -INFINITY) shift[h] = 0.0f;  // no key so far: -inf - -inf would be NaN
    exponentials<0, BEFORE, B_c>(S, sum, shift, scale);
    arrive_after(&s.k_empty[k.index], sum[BEFORE > B_c / 4][1]);
    k.next();
    finish_PV(O_i, P);  // of the previous tile
    if (pending) {
      arrive_as_warp(&s.v_empty[v.index]);
      v.next();
    }
    exponentials<BEFORE, B_c / 2, B_c>(S, sum, shift, scale);
#pragma unroll
    for (int h = 0; h < 2; ++h) l_i[h] = sum[h][0] + sum[h][1];
    pack_P<T, B_c>(P, S);
    add = 0;
    if (tile.blocks == 1) store_previous();
    --j;
  }

  // Each further S beside the P V_j of the previous block: S is complete first, and its softmax runs beside P V_j.
  DEVICE void begin_step() {
    mbarrier_wait(&s.k_full[k.index], k.parity);
    wait_for_turn();
    begin_S<T, D, B_r, B_c>(S, s.Q[q.index] + wg * 64 * 64, s.K[k.index]);  // line 8
    const bool first = !add;
    if (first) store_previous();
    mbarrier_wait(&s.v_full[v.index], v.parity);
    if (first && half) {
      begin_PV<T, D, B_c, HALF>(O_i, P, s.V[v.index], add);  // line 10
    } else {
      begin_PV<T, D, B_c>(O_i, P, s.V[v.index], add);
    }
    pass_turn();
    add = 1;
    wgmma_wait<1>();
  }

  DEVICE void masked_step() {
    begin_step();
    arrive_as_warp(&s.k_empty[k.index]);
    k.next();
    softmax<true, B_c>(S, m_i, l_i, rescale, scale, {seen[0] - j * B_c, seen[1] - j * B_c});  // line 9
    end_PV();
    rescale_O<D>(O_i, rescale);  // line 10
    pack_P<T, B_c>(P, S);
  }

  DEVICE void step() {
    const bool negative = Order<D>::MAXIMA == Maxima::INTEGERS && some_negative(m_i);
    begin_step();
    constexpr int BEFORE = Order<D>::BEFORE;
    float sum[2][2] = {};
    new_maxima<Order<D>::MAXIMA, B_c>(S, m_i, rescale, shift, scale, negative);  // line 9
    if (Order<D>::L_FIRST) sum[0][0] = l_i[0] * rescale[0], sum[1][0] = l_i[1] * rescale[1];
    exponentials<0, BEFORE, B_c>(S, sum, shift, scale);
    arrive_after(&s.k_empty[k.index], sum[BEFORE > B_c / 4][1]);
    k.next();
    end_PV();
    exponentials<BEFORE, B_c / 2, B_c>(S, sum, shift, scale);
    for (int h = 0; h < 2; ++h)
      l_i[h] = Order<D>::L_FIRST ? sum[h][0] + sum[h][1] : l_i[h] * rescale[h] + sum[h][0] + sum[h][1];
    rescale_O<D>(O_i, rescale);  // line 10
    pack_P<T, B_c>(P, S);
  }

  DEVICE void end_tile() {
    __syncwarp();
    if (lane == 0) s.previous[wg * 4 + warp] = s.q_tile[q.index];
    pending = true;
  }

  DEVICE void finish() {
    if (wg == 0) wait_for_turn();  // the last consumer's last pass_turn(): no barrier is left with arrivals
    if (!pending) return;
    mbarrier_wait(&s.v_full[v.index], v.parity);
    begin_PV<T, D, B_c>(O_i, P, s.V[v.index], add);
    invert_fast(inverse, l_i);
    end_PV();
    store_previous();
    tma_store_wait();
  }

  DEVICE void run() {
    if (wg == CONSUMERS - 1) pass_turn();  // consumer 0 begins
    for (; next_tile(); release_Q()) {
      const int row_w = tile.row_0 + wg * 64;
      row = row_w + warp * 16 + g;
      if (tile.blocks == 0) {  // none of the rows sees a key
        store_zeros();
        continue;
      }
      first_step(row_w);
#pragma unroll 1
      for (; j >= whole; --j) masked_step();
#pragma unroll 1
      for (; j >= 0; --j) step();
      end_tile();
    }
    finish();
  }
};

template <typename T, int D, int CONSUMERS, int B_c, int Q_STAGES>
__global__ void __launch_bounds__((1 + CONSUMERS) * WARPGROUP, 1)
attention_kernel(const __grid_constant__ Attention a, const __grid_constant__ CUtensorMap q_map,
                 const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                 const __grid_constant__ CUtensorMap out_map, const TileOrder order) {
  using Role = Consumer<T, D, CONSUMERS, B_c, Q_STAGES>;
  run_roles<Role, T, D, CONSUMERS, B_c, Q_STAGES>(a, q_map, k_map, v_map, out_map, order);
}

template <typename T>
struct Rung {
  template <int D, int CONSUMERS, int B_c, int Q_STAGES>
  static cudaError_t launch(const Attention& a, cudaStream_t stream) {
    constexpr auto kernel = attention_kernel<T, D, CONSUMERS, B_c, Q_STAGES>;
    return launch_persistent<kernel, T, D, CONSUMERS, B_c, Shared<D, CONSUMERS, B_c, Q_STAGES>>(a, stream);
  }
};

extern "C" cudaError_t attention(View q, View k, View v, View out, void* workspace, float scale, int causal, int dtype,
                                 cudaStream_t stream) {
  const Attention a = make_attention(q, k, v, out, workspace, scale, causal);
  if (dtype == FLOAT16) return launch_tile_sizes<Rung<__half>>(a, stream);
  if (dtype == BFLOAT16) return launch_tile_sizes<Rung<__nv_bfloat16>>(a, stream);
  return cudaErrorInvalidValue;
}
