// Rung 15, lazy maximum: in long rows the exponentials do not wait for a maximum. P is checked, and seldom rescaled.
// architectures: sm_90a cpu
// FlashAttention-2 forward [FA2] arXiv:2307.08691, Algorithm 1, scheduled as in [FA3] arXiv:2407.08608, section 3.
//
//   Tensors, grid, block, roles, prologue, epilogue and the first steps of a tile: as in rung 14
//
// Against rung 14: exp(S - m) / sum(exp(S - m)) is the same for any m that keeps P, l_i and O_i in range. The maximum
// of S and the rescaling by it are a third of the softmax's instructions, nothing else can begin before them, and after
// a few hundred keys the maximum hardly ever moves. From then on
//   line  9    P   = exp(S - m_i),  l_i = l_i + rowsum(P)       with the m_i of the previous step
//   line 10    O_i = O_i + P V_j
// rowsum(P) has sums of four as intermediate results. If the largest of them is above TOP, the warp moves m_i: it
// multiplies P, O_i and l_i by TOP / max(P). ([FA4] arXiv:2603.05451 skips rescaling by less than 256, but still
// computes the maximum.)
//   precision  FlashAttention-2 rounds P to 16 bits, but the largest P of a row, exp(0) = 1, is exact. Here it is
//              rounded too, and that shows where it is much of its row. So TOP stands for a share of l_i that is too
//              small to show: SHARE / sqrt(keys / 128) of what l_i will be if all keys are like the first ones
//   overflow   where a score exceeds m_i by more than exp() can take, P is infinite, S is overwritten, and K_j's buffer
//              may be too. The warp recomputes S by mma.sync from global memory, and moves m_i by the maximum of S
//   patience   rows whose maximum keeps moving (rising scores, a few keys that make up a row) would pay in every step.
//              A warp may move m_i once per tile plus once per PATIENCE blocks of keys; then its warpgroup goes on with
//              maxima. If the first steps show rows of a few large P, it never leaves them
//
// Rows of fewer than ENOUGH keys never become lazy: maxima are faster there.
#include <cuda_runtime.h>

#include <type_traits>

#include "attention.cuh"
#include "hopper.cuh"
#include "persistent.cuh"
#include "softmax.cuh"
#include "warpgroup.cuh"

constexpr int ENOUGH = 768;                     // keys that a tile must see for a lazy maximum
constexpr int EXACT = 384, EXACT_CAUSAL = 256;  // keys with maxima, after the masked ones, before the lazy steps
// P may be SHARE / sqrt(keys / 128) of l_i. Causal, rows with few keys have the largest errors, so P may be larger.
constexpr float SHARE = 1.0f / 8, SHARE_CAUSAL = 1.0f / 6;
// The limit of P. 64 in fp16: P may be 64 times smaller than with m_i = max, and must not lose bits.
template <typename T>
constexpr float TOP = std::is_same_v<T, __half> ? 64.0f : 1.0f;
constexpr int PATIENCE = 64;  // blocks of keys per further move of m_i

// What a consumer's warps share about a tile.
template <int D, int CONSUMERS, int B_c, int Q_STAGES>
struct LazyShared : Shared<D, CONSUMERS, B_c, Q_STAGES> {
  int few_large[CONSUMERS];  // few large P make up these rows
  int unfit[CONSUMERS][2];   // a warp's m_i moves too often; one flag for even steps, one for odd steps
  int moves[4 * CONSUMERS];  // how often each warp's m_i has moved
};

// A warpgroup's rows of the tiles. A thread has two rows of its warp's 16: g (h = 0) and g + 8 (h = 1).
template <typename T, int D, int CONSUMERS, int B_c, int Q_STAGES>
struct Consumer {
  static constexpr int B_r = 64 * CONSUMERS, HALF = B_c == 128 ? 64 : B_c;
  using Memory = LazyShared<D, CONSUMERS, B_c, Q_STAGES>;

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
  int blocks = 0, j = 0;         // of keys: how many the tile sees; the one whose S is next
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

  // Waits for the next tile and its Q_i. blocks is -1 if there are no more tiles.
  DEVICE Tile next_tile() {
    mbarrier_wait(&s.q_full[q.index], q.parity);
    const Tile tile = s.q_tile[q.index];
    __syncwarp();
    blocks = __shfl_sync(~0u, tile.blocks, 0);  // shuffled: warp-uniform for the compiler
    return tile;
  }

  DEVICE void release_Q() {
    arrive_as_warp(&s.q_empty[q.index]);
    q.next();
  }

  DEVICE void store_zeros(const Tile& tile) {
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
    j = blocks - 1;
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
    if (blocks == 1) store_previous();
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

  // DECIDE: this is the last step before the lazy ones, and returns whether they may follow.
  template <bool DECIDE>
  DEVICE bool step() {
    const bool negative = Order<D>::MAXIMA == Maxima::INTEGERS && some_negative(m_i);
    bool lazy = DECIDE;
    float limit[2];  // of P
    if constexpr (DECIDE) limit_P(limit);
    begin_step();
    constexpr int BEFORE = Order<D>::BEFORE;
    float sum[2][2] = {};
    new_maxima<Order<D>::MAXIMA, B_c>(S, m_i, rescale, shift, scale, negative);  // line 9
    if constexpr (DECIDE) lazy = decide(limit);
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
    return lazy;
  }

  // The limit of P, in units of the present m_i: a share of what l_i will be if all keys are like those so far.
  DEVICE void limit_P(float (&limit)[2]) const {
    const float share = (a.causal ? SHARE_CAUSAL : SHARE) * rsqrtf(blocks * (B_c / 128.0f)) * blocks * B_c;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      limit[h] = __fdividef(share * l_i[h], seen[h] + 2 * t - (j + 1) * B_c);
      limit[h] += __shfl_xor_sync(~0u, limit[h], 1);
      limit[h] += __shfl_xor_sync(~0u, limit[h], 2);
    }
  }

  // Whether the warpgroup's rows are fit for a lazy maximum: not if few large P make up the rows. If they are, moves
  // m_i so that the limit is TOP.
  DEVICE bool decide(const float (&limit)[2]) {
    volatile int* few_large = &s.few_large[wg];
    const bool few = fminf(limit[0] * rescale[0], limit[1] * rescale[1]) < 2;
    if (__popc(__ballot_sync(~0u, few)) > 12 && lane == 0) *few_large = 1;
    barrier_sync(DECISION + wg, WARPGROUP);  // every warp has voted
    int found = 0;
    if (lane == 0) found = *few_large;
    if (__shfl_sync(~0u, found, 0)) return false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float top = fminf(fmaxf(limit[h] * rescale[h], 1.0f), 64.0f);
      shift[h] += __log2f(top / TOP<T>);
      rescale[h] *= __fdividef(TOP<T>, top);
    }
    return true;
  }

  // Returns whether the next step may be lazy as well.
  DEVICE bool lazy_step() {
    begin_step();
    keep_here(S);
    constexpr int BEFORE = Order<D>::LAZY_BEFORE;
    float sum[2] = {};
    int top = 0;
    checked_exponentials<0, BEFORE, B_c>(S, sum, top, shift, scale);  // line 9
    arrive_after(&s.k_empty[k.index], sum[BEFORE > B_c / 4]);
    k.next();
    end_PV();
    // Written in the previous step. A turn's barrier lies in between, and another one before it is written again
    volatile int* unfit = s.unfit[wg];
    const int leave = unfit[(j + 1) % 2];
    checked_exponentials<BEFORE, B_c / 2, B_c>(S, sum, top, shift, scale);
    pack_P<T, B_c>(P, S);
    if (__any_sync(~0u, top > __float_as_int(TOP<T>))) {
      move_maximum(sum);
      if (lane == 0 && ++s.moves[wg * 4 + warp] > 1 + s.q_tile[q.index].blocks / PATIENCE) unfit[j % 2] = 1;
    }
    for (int h = 0; h < 2; ++h) l_i[h] += sum[h];
    return !__shfl_sync(~0u, leave, 0);
  }

  // Moves m_i up so that this step's P is at most TOP, and rescales l_i, O_i and P.
  DEVICE void move_maximum(float (&sum)[2]) {
    bool overflow = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float largest = row_maximum_of_three<B_c>(S, h);
      if (!__any_sync(~0u, largest > TOP<T>)) continue;
      if (__any_sync(~0u, largest > 1e30f)) {  // __fdividef() takes up to 2^126
        overflow = true;
        break;
      }
      const float grown = fmaxf(largest, TOP<T>), factor = __fdividef(TOP<T>, grown);
      shift[h] += __log2f(grown / TOP<T>);
      sum[h] *= factor, l_i[h] *= factor;
#pragma unroll
      for (int i = 0; i < D / 4; ++i) O_i[i / 2 * 4 + 2 * h + i % 2] *= factor;  // line 10
#pragma unroll
      for (int i = h; i < B_c / 4; i += 2) P[i] = pack<T>(S[2 * i] * factor, S[2 * i + 1] * factor);
    }
    if (overflow) repeat_softmax(sum);
  }

  // The same after an overflow, from S. A row whose m_i has moved already does not move it again.
  DEVICE void repeat_softmax(float (&sum)[2]) {
    const Tile tile = s.q_tile[q.index];
    const uint16_t* Q_i = s.Q[q.index] + (wg * 64 + warp * 16 + g) * 64;
    const T* K_j = a.k_head<T>(tile.b, tile.head) + int64_t(j) * B_c * a.k_strides.row;
    recompute_S<T, D, B_r, B_c>(S, Q_i, K_j, a.k_strides.row);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float needed = fmaxf(shift[h], fmaf(row_maximum<B_c>(S, h), scale, -__log2f(TOP<T>)));
      const float factor = fast_exp2(shift[h] - needed);
      shift[h] = needed;
      l_i[h] *= factor;
#pragma unroll
      for (int i = 0; i < D / 4; ++i) O_i[i / 2 * 4 + 2 * h + i % 2] *= factor;  // line 10
    }
    float halves[2][2] = {};
    exponentials<0, B_c / 2, B_c>(S, halves, shift, scale);
    for (int h = 0; h < 2; ++h) sum[h] = halves[h][0] + halves[h][1];
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
    for (Tile tile = next_tile(); blocks >= 0; release_Q(), tile = next_tile()) {
      const int row_w = tile.row_0 + wg * 64;
      row = row_w + warp * 16 + g;
      if (blocks == 0) {  // none of the rows sees a key
        store_zeros(tile);
        continue;
      }
      first_step(row_w);
      // Every warp is done with the previous tile's values: it has been at this tile's first turn
      if (lane == 0) s.moves[wg * 4 + warp] = 0;
      if (lane == 0 && warp == 0) s.few_large[wg] = s.unfit[wg][0] = s.unfit[wg][1] = 0;
#pragma unroll 1
      for (; j >= whole; --j) masked_step();
      // A few steps with maxima precede the lazy ones. The last of them decides whether these follow
      const int with_maxima = a.causal ? ceil_div(EXACT_CAUSAL, B_c) : ceil_div(EXACT, B_c);
      int lazy = blocks >= ceil_div(ENOUGH, B_c) ? max(j + 1 - with_maxima, 0) : 0;
#pragma unroll 1
      for (const int end = lazy ? lazy + 1 : 0; j >= end; --j) step<false>();
      if (lazy) {
        bool on = step<true>();
        --j;
#pragma unroll 1
        for (bool more = on; j >= 0 && more; --j) more = lazy_step();
        if (on)
          for (int h = 0; h < 2; ++h) m_i[h] = __fdividef(shift[h], scale);
#pragma unroll 1
        for (; j >= 0; --j) step<false>();
      }
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
    return launch_persistent<kernel, T, D, CONSUMERS, B_c, LazyShared<D, CONSUMERS, B_c, Q_STAGES>>(a, stream);
  }
};

extern "C" cudaError_t attention(View q, View k, View v, View out, void* workspace, float scale, int causal, int dtype,
                                 cudaStream_t stream) {
  const Attention a = make_attention(q, k, v, out, workspace, scale, causal);
  if (dtype == FLOAT16) return launch_tile_sizes<Rung<__half>>(a, stream);
  if (dtype == BFLOAT16) return launch_tile_sizes<Rung<__nv_bfloat16>>(a, stream);
  return cudaErrorInvalidValue;
}
