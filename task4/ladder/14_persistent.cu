// Rung 14, persistent: a block stays on its SM, and one tile's epilogue overlaps the next one's prologue.
// architectures: sm_90a
// FlashAttention-2 forward [FA2] arXiv:2307.08691, Algorithm 1, scheduled as in [FA3] arXiv:2407.08608, section 3.
//
//   q, out (batch, q_len, heads, head_dim)      k, v (batch, kv_len, kv_heads, head_dim)      fp16 or bf16, sums in fp32
//   grid   (at most one block per SM)           each works on tile after tile: B_r rows of one head
//   block  (128 (1 + CONSUMERS))                one per SM: it has all the registers
//     warp 0, one thread   the producer: asks TMA for K_j and V_j as soon as a buffer is free
//     warp 1, one thread   the scheduler: takes the next tile, and asks TMA for its Q_i
//     warps 2 and 3        leave at once; registers are handed over by whole warpgroups
//     the other warps      consumers: warpgroup w has the rows 64 w ... 64 w + 63 of Q_i, and all columns
//   head_dim 64, 128 or 256, scale above 0, pointers and strides multiples of 16 bytes: the caller has checked
//
//   line  8    S   = Q_i K_j^T                  wgmma, both operands from shared memory
//   line  9    m'  = max(m_i, rowmax(S))        four lanes share a row: two shuffles
//              P   = exp(S - m'),  l_i = exp(m_i - m') l_i + rowsum(P)
//   line 10    O_i = diag(exp(m_i - m')) O_i + P V_j      wgmma, P from registers
//   line 12    O_i = diag(l_i)^-1 O_i           once, at the end
//
// Against rung 13: there a block computes nothing before its first Q_i and K_j arrive, nor while its last rows are stored. With
// B_r = 128, head_dim 128 and 2,048 keys a tile is 134 MFLOP, 26 us at 680 TFLOP/s, and 6.5 us at 512 keys: pauses of a few
// microseconds are a good part of it. Here
//   pipeline   Q_i has two buffers, and the next tile's is loaded while this one is computed; so are its first K_j and V_j.
//              The last P V_j of a tile is issued behind the first S of the next one
//   epilogue   O_i leaves through shared memory and TMA beside the second S: the next P V_j waits only until it is out of
//              its registers
//   prologue   what the first S of a tile does not need, like 1 / l_i of the previous tile, is computed while it runs
//   order      causal: the longest row blocks first, of as many heads as L2 holds K and V of, by a dynamic tile scheduler
//   diagonal   a warpgroup whose rows see none of the last 64 keys of their first block does not multiply them
//   softmax    the wait for P V_j stands between exponentials; the maximum of three numbers by one instruction (softmax.cuh)
//
// What limits it: the softmaxes of the two warps that share a scheduler need nearly all of the time that their products do.
//
// Shared memory, with 1,024-byte alignment for the swizzle: Q_i twice, K_j and V_j in rings of two, O_i on its way out:
//   (Q_STAGES B_r + 4 B_c + B_r) head_dim 2 bytes     64: 112 or 136 KiB,  128: 224 KiB,  256: 224 KiB, one Q_i and no O_i
// Registers: launched with 65,536 / threads for each. Then the producer's warpgroup keeps 24 (32), and each of 2 (3)
// consumers has 240 (160): O_i head_dim / 2, S B_c / 2, P B_c / 4.
#include <cuda_runtime.h>

#include <type_traits>

#include "attention.cuh"
#include "hopper.cuh"
#include "persistent.cuh"
#include "softmax.cuh"
#include "warpgroup.cuh"

// A warpgroup's part of the tiles. Of a thread's two rows of a tile, g and g + 8 of its warp's 16, the first is h = 0.
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
  int row = 0, seen[2] = {};     // row g of the sequence; the keys that both rows see, from this thread's first column on
  int whole = 0;                 // every row of the warpgroup sees all of the blocks before this one
  bool half = false;             // no row sees more than HALF keys of the tile's first block
  bool pending = false;          // the previous tile still lacks its last P V_j
  int add = 0;                   // 0: P V_j is its tile's first, and O_i still holds the previous tile

  // Consumers alternate: while one's products run, it computes its softmax, and the other's products queue up behind them.
  DEVICE void wait_for_turn() { barrier_sync(TURN + wg, 2 * WARPGROUP); }
  DEVICE void pass_turn() { barrier_arrive(TURN + (wg + 1) % CONSUMERS, 2 * WARPGROUP); }

  DEVICE void make_P() {
#pragma unroll
    for (int i = 0; i < B_c / 4; ++i) P[i] = pack<T>(S[2 * i], S[2 * i + 1]);
  }

  DEVICE void rescale_O() {  // line 10
#pragma unroll
    for (int i = 0; i < D / 2; ++i) O_i[i] *= rescale[i / 2 % 2];
  }

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

  // The next tile, once its Q_i is there; false if there is none.
  DEVICE bool next_tile() {
    mbarrier_wait(&s.q_full[q.index], q.parity);
    tile = s.q_tile[q.index];
    __syncwarp();
    tile.blocks = __shfl_sync(~0u, tile.blocks, 0);  // tells the compiler: the same for all lanes
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

  // The first S of a tile, beside the last P V_j of the previous one. KEYS: how many of the block some row sees.
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
    make_P();
    add = 0;
    if (tile.blocks == 1) store_previous();
    --j;
  }

  // Each further S, beside the P V_j of the block before: S is complete first, and softmax runs while P V_j still does.
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
    rescale_O();
    make_P();
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
    rescale_O();
    make_P();
  }

  DEVICE void end_tile() {
    __syncwarp();
    if (lane == 0) s.previous[wg * 4 + warp] = s.q_tile[q.index];
    pending = true;
  }

  DEVICE void finish() {
    if (wg == 0) wait_for_turn();  // the last consumer's last pass_turn(): no barrier is left half full
    if (!pending) return;
    mbarrier_wait(&s.v_full[v.index], v.parity);
    begin_PV<T, D, B_c>(O_i, P, s.V[v.index], add);
    invert_fast(inverse, l_i);
    end_PV();
    store_previous();
    tma_store_wait();
  }

  DEVICE void run() {
    if (wg == CONSUMERS - 1) pass_turn();  // the first consumer begins
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
  using Memory = Shared<D, CONSUMERS, B_c, Q_STAGES>;
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& s = *reinterpret_cast<Memory*>(raw);

  const int warpgroup = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);  // tells the compiler: the same for all lanes
  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&q_map, &k_map, &v_map, &out_map}) tma_prefetch(map);
    s.init(a.q_len);
  }
  __syncthreads();  // barriers initialised before anyone uses them

  if (warpgroup == 0) {
    registers_give<CONSUMERS == 2 ? 24 : 32>();
    if (threadIdx.x == 32) run_scheduler<T, D, Memory, Q_STAGES>(s, a, q_map, order, B_c);
    if (threadIdx.x == 0) run_producer<T, D, B_c>(s, a, k_map, v_map);
  } else {
    registers_take<CONSUMERS == 2 ? 240 : 160>();
    Consumer<T, D, CONSUMERS, B_c, Q_STAGES>{a, out_map, s, warpgroup - 1}.run();
  }
}

template <typename T, int D, int CONSUMERS, int B_c, int Q_STAGES>
static cudaError_t launch_tiles(const Attention& a, cudaStream_t stream) {
  constexpr auto kernel = attention_kernel<T, D, CONSUMERS, B_c, Q_STAGES>;
  return launch_persistent<kernel, T, D, CONSUMERS, B_c, Shared<D, CONSUMERS, B_c, Q_STAGES>>(a, stream);
}

// Tile sizes, as measured on an H200.
template <typename T>
static cudaError_t launch(const Attention& a, cudaStream_t stream) {
  switch (a.head_dim) {
    case 64:  // 192 rows: half as much again is computed per K and V fetched. But 512 rows are 2.67 of them, and a causal
              // diagonal wastes more: up to 1,024 rows 128 were faster there. Not causal, 192 were at 512 and 2,048 (NOTES.md)
      if (a.q_len <= (a.causal ? 1024 : 128)) return launch_tiles<T, 64, 2, 128, 2>(a, stream);
      return launch_tiles<T, 64, 3, 128, 2>(a, stream);
    case 128:  // O_i 64, S 64 and P 32 of 240 registers; all of 192 KiB
      return launch_tiles<T, 128, 2, 128, 2>(a, stream);
    case 256:  // O_i alone has 128 registers, Q_i 64 KiB: there is no room for more than 80 keys, or a second Q_i
      return launch_tiles<T, 256, 2, 80, 1>(a, stream);
  }
  return cudaErrorInvalidValue;
}

extern "C" cudaError_t attention(View q, View k, View v, View out, void* workspace, float scale, int causal, int dtype,
                                 cudaStream_t stream) {
  const Attention a = make_attention(q, k, v, out, workspace, scale, causal);
  if (dtype == FLOAT16) return launch<__half>(a, stream);
  if (dtype == BFLOAT16) return launch<__nv_bfloat16>(a, stream);
  return cudaErrorInvalidValue;
}
