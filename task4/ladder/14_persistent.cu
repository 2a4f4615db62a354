// Rung 14, persistent: blocks stay, one tile's end overlaps the next one's beginning, and in long rows the maximum stays.
// architectures: sm_90a
// FlashAttention-2 forward [FA2] arXiv:2307.08691, Algorithm 1, scheduled as in [FA3] arXiv:2407.08608, section 3.
//
//   q, out (batch, q_len, heads, head_dim)      k, v (batch, kv_len, kv_heads, head_dim)      fp16 or bf16, sums in fp32
//   tile   B_r rows of one head, and of K and V what they see, in blocks of B_c keys, the last one first
//   grid   (as many blocks as multiprocessors)  each takes tile after tile
//   block  (128 (1 + CONSUMERS))                one to a multiprocessor: it has all the registers
//     warp 0, one thread   the producer: asks TMA for K_j and V_j as soon as a buffer is free
//     warp 1, one thread   the scheduler: says which tile comes next, and asks TMA for its Q_i
//     warps 2 and 3        leave at once; registers are handed over by whole warpgroups
//     the other warps      consumers: warpgroup w has the rows 64 w ... 64 w + 63 of Q_i, and all columns
//   head_dim 64, 128 or 256, scale above 0, pointers and strides multiples of 16 bytes: the caller has checked
//
//   line  8    S   = Q_i K_j^T                  wgmma, both operands from shared memory
//   line  9    m'  = max(m_i, rowmax(S))        four lanes share a row: two shuffles. In long rows soon left out, see below
//              P   = exp(S - m'),  l_i = exp(m_i - m') l_i + rowsum(P)
//   line 10    O_i = diag(exp(m_i - m')) O_i + P V_j      wgmma, P from registers
//   line 12    O_i = diag(l_i)^-1 O_i           once, at the end
//
// Against rung 13: a block there computes nothing before its first Q_i and K_j arrive, nor while its last rows are written;
// with B_r = 128, head_dim 128 and 2,048 keys a tile is 134 MFLOP, 26 us at 680 TFLOP/s, and at 512 keys 6.5: pauses of a
// few microseconds are a good part of it. Here
//   pipeline   Q_i has two buffers, and the next tile's is on its way while this one is computed; so are its first K_j and
//              V_j. The last P V_j of a tile is issued behind the first S of the next one, and O_i is written beside the
//              second. What is left of a tile's border costs about a step more: at 512 keys, four steps a tile, it runs at
//              not quite three quarters of its speed at 16,384
//   borders    what the first S of a tile does not need, like 1 / l_i of the tile before, is computed while it runs
//   output     the next P V_j has to wait until O_i is out of its registers. By way of shared memory and TMA that is soonest
//   order      causal: the longest row blocks first, of as many heads as L2 holds K and V of; whoever is done takes the
//              next one from a counter, the workspace, which is 0 before and after
//   diagonal   a warpgroup whose rows see none of the last 64 keys of their first block does not multiply them
//   softmax    the tensor cores are done with P V_j when the softmax is somewhere in its exponentials. Waiting for them
//              earlier is idle time, and later O_i and P are too late for the gaps that the exponentials leave. ptxas puts
//              the wait first unless something holds it back: arrive_after() below
//   maximum    of three numbers by one instruction: row_maximum_of_three()
//   tile sizes by head_dim, q_len and kv_len: the table at the end of the file
// What holds it: beside wgmma the other instructions are slower, and a scheduler's two softmaxes need nearly all of the time
// that their products do (NOTES.md). So long rows do without the maximum.
//
// STAY: the maximum stays. exp(S - m) / sum(exp(S - m)) is the same for any m, which only has to keep P, l_i and O_i in range.
// Looking for the maximum of S, and the scaling that follows, is a third of a softmax's instructions; nothing else can begin
// before it is found; and after a few hundred keys it hardly ever moves. So from then on P = exp(S - m_i) with the m_i that is
// there, and P is looked at: rowsum(P) has sums of four on its way, and where the largest of them is above TOP, the warp
// scales P, O_i and l_i by TOP / max(P). ([FA4] arXiv:2603.05451 leaves such scaling out while it is by less than 256, but
// still looks for the maximum.)
//   precision   FlashAttention-2 rounds P to 16 bits, but the largest of a row, exp(0) = 1, is exact: with an m_i that is not
//               the maximum it would be rounded too, and where it is much of its row that shows. So TOP stands for a share
//               of l_i that does not: SHARE / sqrt(keys / 128) of what l_i will be if all keys are like the first ones
//   overflow    a score may be above m_i by more than exp() can take. Then l_i is no number, and the scheduler hands the tile
//               out again, to be computed with maxima
//   few large P make up a row: m_i would have to move all the time. A warpgroup that finds such rows goes on with maxima
//
// Shared memory, with 1,024-byte alignment for the swizzle: Q_i twice, K_j and V_j in rings of two, O_i on its way out:
//   (Q_STAGES B_r + 4 B_c + B_r) head_dim 2 bytes     64: 112 or 136 KiB,  128: 224 KiB,  256: 224 KiB, one Q_i and no O_i
// Registers: launched with 65,536 / threads for each. Then the producer's warpgroup keeps 24 (32), and each of 2 (3)
// consumers has 240 (160): O_i head_dim / 2, S B_c / 2, P B_c / 4.
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "attention.cuh"
#include "hopper.cuh"
#include "warpgroup.cuh"

constexpr int STAGES = 2;  // of the rings of K and V

// STAY: the keys that a tile must see to be worth it; those with maxima behind the masked ones; and SHARE / sqrt(keys / 128) of
// l_i is what a P may be. Causal, the largest errors are those of rows with few keys, so there may be more of it.
constexpr int ENOUGH = 768;
constexpr int EXACT = 384, EXACT_CAUSAL = 256;
constexpr float SHARE = 1.0f / 8, SHARE_CAUSAL = 1.0f / 6;
// What P stays below. In fp16 it may be 64 times smaller than with m_i = max, and must not lose bits.
template <typename T>
constexpr float TOP = std::is_same_v<T, __half> ? 64.0f : 1.0f;

// ptxas orders these 400 instructions as it likes, and how well they fill each other's gaps is up to 5 % of the speed. What
// can be said is said here: the best of those tried with nvcc 13.0 on an H200, for each head_dim (NOTES.md).
// Maxima: of two floats or of three integers at a time, see new_maxima().
enum class Maxima { FLOATS,
                    INTEGERS };

template <int D>
struct Order;
template <>
struct Order<64> {
  static constexpr int BEFORE = 8;       // of a thread's B_c / 2 exponentials: those before the wait for P V_j
  static constexpr bool L_FIRST = true;  // the sum begins with what l_i was, and does not end with it
  static constexpr Maxima MAXIMA = Maxima::INTEGERS;
  static constexpr int STAY_BEFORE = 16;   // BEFORE where the maximum stays
  static constexpr int FIRST_BEFORE = 24;  // and in a tile's first step
};
template <>
struct Order<128> {
  static constexpr int BEFORE = 52;
  static constexpr bool L_FIRST = true;
  static constexpr Maxima MAXIMA = Maxima::INTEGERS;
  static constexpr int STAY_BEFORE = 32, FIRST_BEFORE = 20;
};
template <>
struct Order<256> {
  static constexpr int BEFORE = 20;
  static constexpr bool L_FIRST = false;
  static constexpr Maxima MAXIMA = Maxima::FLOATS;
  static constexpr int STAY_BEFORE = 16, FIRST_BEFORE = 20;
};

// What the scheduler hands out. blocks: of K and V; -1: no more tiles
struct Tile {
  int row_0, head, b, blocks;
};

template <int D, int CONSUMERS, int B_c, int Q_STAGES>
struct Shared {
  static constexpr int B_r = 64 * CONSUMERS;
  alignas(1024) uint16_t Q[Q_STAGES][B_r * D];
  alignas(1024) uint16_t K[STAGES][B_c * D], V[STAGES][B_c * D];
  uint16_t O[D < 256 ? B_r * D : 1];  // on its way out, the 16 rows of a warp together
  Tile tile, again;  // the next one, for the producer; one that has overflowed
  Tile before[4 * CONSUMERS];  // what each of the consumers' warps has yet to write
  // full: the buffer's contents have arrived. empty: all its readers are done with it
  uint64_t q_full[Q_STAGES], q_empty[Q_STAGES], k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
  uint64_t tile_full, tile_empty;
  // The tiles whose Q_i are in the buffers: consumers find them there when q_full says that Q_i has come. For STAY also
  // whether consumer w has to find maxima to the end, and whether it has turned out that it should have
  struct {
    Tile tile;
    int exact[CONSUMERS], overflowed;
  } given[Q_STAGES];
};

// The order of the tiles. Heads come in groups; of a group, first one row block of each head, then the next of each. Block b
// of the grid has tiles b, b + blocks, b + 2 blocks, ... Counted: longest first, and a block takes what nobody has taken.
struct Plan {
  int row_blocks, group, tiles;
  bool counted;
};

// Arrives, and so does whatever comes behind it, when `computed` is there. It never is this NaN: ptxas cannot know that.
DEVICE void arrive_after(uint64_t* barrier, float computed) {
  if (threadIdx.x % 32 == 0 && __float_as_uint(computed) != 0xfffffffe) mbarrier_arrive(barrier);
}

// The maximum of row g (h = 0) or g + 8 like row_maximum(), in half the instructions: Hopper compares three integers at once.
// The bits of floats, taken as signed integers, have the floats' order unless both are negative: of a row without any score
// of 0 or above the result is some score, and not the largest.
template <int B_c>
DEVICE float row_maximum_of_three(const float (&S)[B_c / 2], int h) {
  int top[2] = {__float_as_int(S[2 * h]), __float_as_int(S[2 * h + 1])};
#pragma unroll
  for (int c = 1; c < B_c / 8; ++c)
    top[c % 2] = __vimax3_s32(top[c % 2], __float_as_int(S[4 * c + 2 * h]), __float_as_int(S[4 * c + 2 * h + 1]));
  const float of_thread = __int_as_float(max(top[0], top[1]));
  const float of_two = fmaxf(of_thread, __shfl_xor_sync(~0u, of_thread, 1));
  return fmaxf(of_two, __shfl_xor_sync(~0u, of_two, 2));
}

// mask() for both rows below a diagonal, of which row g + 8 sees 8 keys more: half of the comparisons.
template <int B_c>
DEVICE void mask_diagonal(float (&S)[B_c / 2], int end) {
#pragma unroll
  for (int c = -1; c < B_c / 8; ++c) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const bool unseen = 8 * c + e >= end;
      if (c >= 0 && unseen) S[4 * c + e] = -INFINITY;
      if (c + 1 < B_c / 8 && unseen) S[4 * (c + 1) + 2 + e] = -INFINITY;
    }
  }
}

// Whether one of the warp's rows has no maximum of 0 or above: then integers will not do.
DEVICE bool some_negative(const float (&m)[2]) { return __any_sync(~0u, fminf(m[0], m[1]) < 0.0f); }

// Line 9 in two parts. First the maxima: rescale is the factor that O_i is due, shift what an exponential subtracts. negative:
// some_negative(m_i), asked before S was there.
template <Maxima MAXIMA, int B_c>
DEVICE void new_maxima(float (&S)[B_c / 2], float (&m_i)[2], float (&rescale)[2], float (&shift)[2], float scale,
                       bool negative) {
  keep_here(S);
  float m_new[2];
  const auto find = [&](auto maximum) {
#pragma unroll
    for (int h = 0; h < 2; ++h) m_new[h] = fmaxf(m_i[h], maximum(h));
  };
  const auto in_floats = [&](int h) { return row_maximum<B_c>(S, h); };
  const auto in_integers = [&](int h) { return row_maximum_of_three<B_c>(S, h); };
  if (MAXIMA == Maxima::FLOATS || negative) {
    find(in_floats);
  } else {
    find(in_integers);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    shift[h] = m_new[h] * scale;
    rescale[h] = fast_exp2((m_i[h] - m_new[h]) * scale);
    m_i[h] = m_new[h];
  }
}

// Then the exponentials FROM ... TO - 1 of both rows, row g's first, and their sums: two of a row, so that no addition waits
// for the one before.
template <int FROM, int TO, int B_c>
DEVICE void exponentials(float (&S)[B_c / 2], float (&sum)[2][2], const float (&shift)[2], float scale) {
#pragma unroll
  for (int n = FROM; n < TO; ++n) {
    const int h = n / (B_c / 4), i = n % (B_c / 4);
    float& s = S[i / 2 * 4 + 2 * h + i % 2];
    s = fast_exp2(fmaf(s, scale, -shift[h]));
    sum[h][i % 2] += s;
  }
}

// For STAY: the exponentials FROM ... TO - 1, and the largest sum of four of them, in bits: no sum is negative.
template <int FROM, int TO, int B_c>
DEVICE void watched_exponentials(float (&S)[B_c / 2], float (&sum)[2][2], int& top, const float (&shift)[2], float scale) {
  static_assert(FROM % 8 == 0 && TO % 8 == 0);
#pragma unroll
  for (int n = FROM; n < TO; n += 8) {
    float four[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int h = (n / 4 + e) / (B_c / 16), c = (n / 4 + e) % (B_c / 16);
      float* s = &S[8 * c + 2 * h];
#pragma unroll
      for (int i : {0, 1, 4, 5}) s[i] = fast_exp2(fmaf(s[i], scale, -shift[h]));
      four[e] = (s[0] + s[1]) + (s[4] + s[5]);
      sum[h][c % 2] += four[e];
    }
    top = __vimax3_s32(top, __float_as_int(four[0]), __float_as_int(four[1]));
  }
}

// Stores 1 if x is infinite or NaN in some lane. Predicated, since a branch at its place makes ptxas serialise the products
// before it; and lane 0 does it, which arrives at the barriers.
DEVICE void note_unless_finite(int* to, float x) {
  asm volatile(
      "{\n.reg .pred finite, noted;\n.reg .u32 lane;\n"
      "setp.lt.f32 finite, %0, 0f7F800000;\n"
      "vote.sync.any.pred noted, !finite, 0xffffffff;\n"
      "mov.u32 lane, %%laneid;\n"
      "setp.eq.and.u32 noted, lane, 0, noted;\n"
      "@noted st.shared.u32 [%1], 1;\n}" ::"f"(x),
      "r"(shared_address(to)) : "memory");
}

// invert() without a call for exact division, which has no place beside products.
DEVICE void invert_fast(float (&inverse)[2], const float (&l_i)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float l = l_i[h];
    l += __shfl_xor_sync(~0u, l, 1), l += __shfl_xor_sync(~0u, l, 2);
    inverse[h] = l == 0.0f ? 0.0f : __fdividef(1.0f, l);
  }
}

// Line 12 for a warp's 16 rows, from `row` of the tile on: packed in O as TMA loads a tile, and TMA takes them from there.
template <typename T, int D>
DEVICE void store_rows(uint16_t* O, const CUtensorMap* map, const Tile& tile, int row, const float (&O_i)[D / 2],
                       const float (&factor)[2]) {
  tma_store_wait();  // the tile before has left
  __syncwarp();
  // Four 8 x 8 matrices at a time, 16 columns of both halves of the rows: a lane says where row lane % 16 of chunk
  // c + lane / 16 stands. c is even, so that adding it and the swizzle can change places
  const int lane = threadIdx.x % 32;
  const uint32_t to = shared_address(O) + lane % 16 * 128 + (lane / 16 ^ lane % 8) * 16;
#pragma unroll
  for (int c = 0; c < D / 8; c += 2) {
    uint32_t x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = O_i + 4 * (c + i / 2) + 2 * (i % 2);
      x[i] = pack<T>(pair[0] * factor[i % 2], pair[1] * factor[i % 2]);
    }
    store_matrices((to ^ c % 8 * 16) + c / 8 * (16 * 128), x);
  }
  fence_async_proxy();
  __syncwarp();
  if (lane == 0) tma_store(map, O, tile.row_0 + row, tile.head, tile.b);
}

template <typename T, int D, int CONSUMERS, int B_c, int Q_STAGES, bool STAY>
__global__ void __launch_bounds__((1 + CONSUMERS) * WARPGROUP, 1)
attention_kernel(const __grid_constant__ Attention a, const __grid_constant__ CUtensorMap q_map,
                 const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                 const __grid_constant__ CUtensorMap out_map, const Plan plan) {
  constexpr int B_r = 64 * CONSUMERS, HALF = B_c == 128 ? 64 : B_c;
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& s = *reinterpret_cast<Shared<D, CONSUMERS, B_c, Q_STAGES>*>(raw);

  const int warpgroup = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);  // the shuffle tells the compiler: one for all lanes
  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&q_map, &k_map, &v_map, &out_map}) tma_prefetch(map);
    for (int i = 0; i < Q_STAGES; ++i) {
      mbarrier_init(&s.q_full[i], 1), mbarrier_init(&s.q_empty[i], 4 * CONSUMERS);
      if (STAY) s.given[i].overflowed = 0;
    }
    for (Tile& none : s.before) none = {a.q_len, 0, 0, 0};  // rows past the end: nothing is written
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(&s.k_full[i], 1), mbarrier_init(&s.k_empty[i], 4 * CONSUMERS);  // the consumers' warps
      mbarrier_init(&s.v_full[i], 1), mbarrier_init(&s.v_empty[i], 4 * CONSUMERS);
    }
    mbarrier_init(&s.tile_full, 1), mbarrier_init(&s.tile_empty, 1);
    mbarrier_init_fence();
  }
  __syncthreads();  // barriers initialised before anyone uses them

  if (warpgroup == 0) {
    registers_give<CONSUMERS == 2 ? 24 : 32>();
    Ring<1> tiles;
    if (threadIdx.x == 32) {  // the scheduler
      Ring<Q_STAGES> q;
      const auto wait = [&] { mbarrier_wait(&s.tile_empty, tiles.parity ^ 1); };  // until the tile before is taken
      const auto give = [&](const Tile& tile) {
        wait();
        s.tile = tile;
        mbarrier_arrive(&s.tile_full);
        tiles.next();
      };
      const auto hand_out = [&](Tile tile, int exact) {  // and then what had its buffer, if that has overflowed
        for (;; exact = 1) {  // s.tile instead of tile: there are 24 registers
          give(tile);
          mbarrier_wait(&s.q_empty[q.index], q.parity ^ 1);
          auto& given = s.given[q.index];
          const bool again = STAY && given.overflowed;
          if (again) s.again = given.tile;
          given.tile = s.tile;
          if (STAY) {
            given.overflowed = 0;
            for (int w = 0; w < CONSUMERS; ++w) given.exact[w] = exact;
          }
          if (s.tile.blocks > 0) {
            mbarrier_arrive_expect(&s.q_full[q.index], B_r * D * sizeof(T));
            tma_load(s.Q[q.index], &q_map, &s.q_full[q.index], s.tile.row_0, s.tile.head, s.tile.b, EVICT_FIRST);
          } else {
            mbarrier_arrive(&s.q_full[q.index]);
          }
          q.next();
          if (!again) return;
          tile = s.again;
        }
      };
      const int all_heads = a.batch * a.heads;
      for (int tile = blockIdx.x; tile < plan.tiles;) {
        const int first = tile / (plan.group * plan.row_blocks) * plan.group;  // its group's first head
        const int heads = min(plan.group, all_heads - first);                  // the last group may have fewer
        const int i = tile - first * plan.row_blocks, block = i / heads, head = first + i % heads;
        const int row_0 = (plan.counted ? plan.row_blocks - 1 - block : block) * B_r;
        const int blocks = ceil_div(a.visible(min(row_0 + B_r, a.q_len) - 1), B_c), b = head / a.heads;
        hand_out({row_0, head - b * a.heads, b, blocks}, 0);
        wait();  // counted: whoever is done first gets the next one, so no earlier than necessary
        // With the last of plan.tiles counts it is 0 again: the next launch finds it as this one did
        tile = gridDim.x + (plan.counted ? atomicInc(static_cast<unsigned*>(a.workspace), plan.tiles - 1) : tile);
      }
      for (int right = STAY ? 0 : Q_STAGES; right < Q_STAGES;) {  // of the last tiles
        Ring<Q_STAGES> last = q;
        for (int i = 0; i < right; ++i) last.next();
        mbarrier_wait(&s.q_empty[last.index], last.parity ^ 1);
        if (s.given[last.index].overflowed) {
          s.given[last.index].overflowed = 0;
          hand_out(s.given[last.index].tile, 1);
          right = 0;
        } else {
          ++right;
        }
      }
      hand_out({0, 0, 0, -1}, 0);
    } else if (threadIdx.x == 0) {  // the producer
      Ring<STAGES> k, v;
      while (true) {
        mbarrier_wait(&s.tile_full, tiles.parity);
        tiles.next();
        const Tile tile = s.tile;
        if (tile.blocks <= 0) mbarrier_arrive(&s.tile_empty);
        if (tile.blocks < 0) break;
        const int kv_head = tile.head / (a.heads / a.kv_heads);
        for (int j = tile.blocks - 1; j >= -1 && tile.blocks; --j) {  // line 7, in the order of use: K, K V, K V, ..., V
          if (j == 0) mbarrier_arrive(&s.tile_empty);  // in time for the next tile's Q_i and K_j to come behind these
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
    return;
  }

  // ---- A consumer
  registers_take<CONSUMERS == 2 ? 240 : 160>();
  const int wg = warpgroup - 1, warp = threadIdx.x % WARPGROUP / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const float scale = a.scale * LOG2_E;
  Ring<Q_STAGES> q;
  Ring<STAGES> k, v;

  // Consumers take turns: named barrier 1 + w lets consumer w issue its products. While they run, it does its softmax, and
  // the next consumer's products queue up behind them.
  const auto wait_for_turn = [&] { barrier_sync(1 + wg, 2 * WARPGROUP); };
  const auto pass_turn = [&] { barrier_arrive(1 + (wg + 1) % CONSUMERS, 2 * WARPGROUP); };
  if (wg == CONSUMERS - 1) pass_turn();  // the first one begins

  float S[B_c / 2], O_i[D / 2], m_i[2], l_i[2] = {0.0f, 0.0f}, rescale[2];  // row g: h = 0, row g + 8: h = 1
  uint32_t P[B_c / 4];
  const auto make_P = [&] {
#pragma unroll
    for (int i = 0; i < B_c / 4; ++i) P[i] = pack<T>(S[2 * i], S[2 * i + 1]);
  };
  const auto end_PV = [&] {
    finish_PV(O_i, P);
    arrive_as_warp(&s.v_empty[v.index]);  // V_j has been read
    v.next();
  };

  bool pending = false;  // the tile before still lacks its last P V_j
  Tile& before = s.before[wg * 4 + warp];
  const auto out_of = [&](const Tile& tile, int row) {
    return a.out_head<T>(tile.b, tile.head) + int64_t(row) * a.out_strides.row + 8 * t;
  };
  const auto write_before = [&](const float (&inverse)[2]) {  // line 12
    const int row_in_tile = wg * 64 + warp * 16;
    if constexpr (D < 256) {
      store_rows<T, D>(s.O + row_in_tile * D, &out_map, before, row_in_tile, O_i, inverse);
    } else {
      const int row = before.row_0 + row_in_tile + g;
      write_rows<D>(out_of(before, row), a.out_strides.row, a.q_len - row, O_i, inverse);
    }
  };
  int add = 0;  // 0: P V_j is its tile's first, and O_i still holds the tile before

  while (true) {
    mbarrier_wait(&s.q_full[q.index], q.parity);
    Tile tile = s.given[q.index].tile;
    __syncwarp();
    tile.blocks = __shfl_sync(~0u, tile.blocks, 0);  // tells the compiler: one for all lanes
    if (tile.blocks < 0) break;
    const int row_w = tile.row_0 + wg * 64, row = row_w + warp * 16 + g;
    if (tile.blocks == 0) {  // none of the rows sees a key
      for (int e = 0; e < D; e += 32) {
        if (row < a.q_len) *reinterpret_cast<uint4*>(out_of(tile, row) + e) = make_uint4(0, 0, 0, 0);
        if (row + 8 < a.q_len) *reinterpret_cast<uint4*>(out_of(tile, row + 8) + e) = make_uint4(0, 0, 0, 0);
      }
      arrive_as_warp(&s.q_empty[q.index]);
      q.next();
      continue;
    }

    // The first S of this tile, beside the last P V_j of the one before. keys: how many of the block some row sees
    int j = tile.blocks - 1;
    const bool half = HALF < B_c && a.visible(row_w + 63) <= j * B_c + HALF;
    mbarrier_wait(&s.k_full[k.index], k.parity);
    wait_for_turn();
    int first_sees, whole, seen[2];  // whole: all rows see the blocks before. seen: counted from this thread's first column
    float inverse[2];                // 1 / l_i of the tile before
    const auto while_S_runs = [&] {
      first_sees = a.visible(row_w);
      whole = first_sees / B_c;
      seen[0] = a.visible(row) - 2 * t;
      seen[1] = a.visible(row + 8) - 2 * t;
      invert_fast(inverse, l_i);
    };
    const auto first_step = [&](auto keys) {
      begin_S<T, D, B_r, B_c, keys.value>(S, s.Q[q.index] + wg * 64 * 64, s.K[k.index]);  // line 8
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
    };
    if (half) {
      first_step(std::integral_constant<int, HALF>{});
    } else {
      first_step(std::integral_constant<int, B_c>{});
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
    float shift[2];
    constexpr int BEFORE = Order<D>::FIRST_BEFORE;
    float sum[2][2] = {};
    new_maxima<Maxima::FLOATS, B_c>(S, m_i, rescale, shift, scale, false);  // line 9
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (m_i[h] == -INFINITY) shift[h] = 0.0f;  // no key so far: -inf - -inf would be NaN
    exponentials<0, BEFORE, B_c>(S, sum, shift, scale);
    arrive_after(&s.k_empty[k.index], sum[BEFORE > B_c / 4][1]);
    k.next();
    finish_PV(O_i, P);  // of the tile before
    if (pending) {
      arrive_as_warp(&s.v_empty[v.index]);
      v.next();
    }
    exponentials<BEFORE, B_c / 2, B_c>(S, sum, shift, scale);
#pragma unroll
    for (int h = 0; h < 2; ++h) l_i[h] = sum[h][0] + sum[h][1];
    make_P();
    add = 0;

    if (tile.blocks == 1) write_before(inverse);

    // Each further S, beside the P V_j of the block before: S is complete first, and softmax runs while P V_j still does
    const auto begin_step = [&] {
      mbarrier_wait(&s.k_full[k.index], k.parity);
      wait_for_turn();
      begin_S<T, D, B_r, B_c>(S, s.Q[q.index] + wg * 64 * 64, s.K[k.index]);  // line 8
      const bool first = !add;
      if (first) write_before(inverse);
      mbarrier_wait(&s.v_full[v.index], v.parity);
      if (first && half) {
        begin_PV<T, D, B_c, HALF>(O_i, P, s.V[v.index], add);  // line 10
      } else {
        begin_PV<T, D, B_c>(O_i, P, s.V[v.index], add);
      }
      pass_turn();
      add = 1;
      wgmma_wait<1>();
    };
#pragma unroll 1
    for (--j; j >= whole; --j) {
      begin_step();
      arrive_as_warp(&s.k_empty[k.index]);
      k.next();
      softmax<true, B_c>(S, m_i, l_i, rescale, scale, {seen[0] - j * B_c, seen[1] - j * B_c});  // line 9
      end_PV();
#pragma unroll
      for (int i = 0; i < D / 2; ++i) O_i[i] *= rescale[i / 2 % 2];  // line 10
      make_P();
    }
    // The blocks in which the maximum stays: before them, the last of the steps with maxima decides on it
    const int with_maxima = a.causal ? ceil_div(EXACT_CAUSAL, B_c) : ceil_div(EXACT, B_c);
    int staying = STAY && tile.blocks >= ceil_div(ENOUGH, B_c) ? max(j + 1 - with_maxima, 0) : 0;
    const auto exact_step = [&](auto deciding) {
      const bool negative = Order<D>::MAXIMA == Maxima::INTEGERS && some_negative(m_i);
      float most[2];
      if constexpr (deciding.value) {
        // For now in units of m_i: the share of what l_i will be if all keys are like those that the row has seen
        const float share = (a.causal ? SHARE_CAUSAL : SHARE) * rsqrtf(tile.blocks * (B_c / 128.0f)) * tile.blocks * B_c;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          most[h] = __fdividef(share * l_i[h], seen[h] + 2 * t - (j + 1) * B_c);
          most[h] += __shfl_xor_sync(~0u, most[h], 1);
          most[h] += __shfl_xor_sync(~0u, most[h], 2);
        }
      }
      begin_step();
      constexpr int BEFORE = Order<D>::BEFORE;
      float sum[2][2] = {};
      new_maxima<Order<D>::MAXIMA, B_c>(S, m_i, rescale, shift, scale, negative);  // line 9
      if constexpr (deciding.value) {
        volatile int* exact = &s.given[q.index].exact[wg];
        const bool few = fminf(most[0] * rescale[0], most[1] * rescale[1]) < 2;  // a few large P make up these rows
        if (__popc(__ballot_sync(~0u, few)) > 12 && lane == 0) *exact = 1;
        barrier_sync(1 + CONSUMERS + wg, WARPGROUP);  // all of its warps have said it
        int found = 0;
        if (lane == 0) found = *exact;
        if (__shfl_sync(~0u, found, 0)) {
          staying = 0;
        } else {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float to = fminf(fmaxf(most[h] * rescale[h], 1.0f), 64.0f);
            shift[h] += __log2f(to / TOP<T>);
            rescale[h] *= __fdividef(TOP<T>, to);
          }
        }
      }
      if (Order<D>::L_FIRST) sum[0][0] = l_i[0] * rescale[0], sum[1][0] = l_i[1] * rescale[1];
      exponentials<0, BEFORE, B_c>(S, sum, shift, scale);
      arrive_after(&s.k_empty[k.index], sum[BEFORE > B_c / 4][1]);
      k.next();
      end_PV();
      exponentials<BEFORE, B_c / 2, B_c>(S, sum, shift, scale);
      for (int h = 0; h < 2; ++h)
        l_i[h] = Order<D>::L_FIRST ? sum[h][0] + sum[h][1] : l_i[h] * rescale[h] + sum[h][0] + sum[h][1];
#pragma unroll
      for (int i = 0; i < D / 2; ++i) O_i[i] *= rescale[i / 2 % 2];  // line 10
      make_P();
    };
#pragma unroll 1
    for (const int to = staying ? staying + 1 : 0; j >= to; --j) exact_step(std::false_type{});
    if constexpr (STAY) {
      if (staying) {
        exact_step(std::true_type{});
        --j;
      }
#pragma unroll 1
      for (; !staying && j >= 0; --j) exact_step(std::false_type{});
    }
#pragma unroll 1
    for (; STAY && j >= 0; --j) {
      begin_step();
      keep_here(S);
      constexpr int BEFORE = Order<D>::STAY_BEFORE;
      float sum[2][2] = {{l_i[0], 0.0f}, {l_i[1], 0.0f}};
      int top = 0;
      watched_exponentials<0, BEFORE, B_c>(S, sum, top, shift, scale);  // line 9
      arrive_after(&s.k_empty[k.index], sum[BEFORE > B_c / 4][1]);
      k.next();
      end_PV();
      watched_exponentials<BEFORE, B_c / 2, B_c>(S, sum, top, shift, scale);
      make_P();
      if (__any_sync(~0u, top > __float_as_int(TOP<T>))) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float largest = row_maximum_of_three<B_c>(S, h);
          if (!__any_sync(~0u, largest > TOP<T>)) continue;
          // Above 2^126 __fdividef() gives 0, and above 2^128 they are infinite: computed again
          const float grown = fmaxf(largest, TOP<T>), times = largest > 1e30f ? NAN : __fdividef(TOP<T>, grown);
          shift[h] += __log2f(grown / TOP<T>);
          sum[h][0] *= times, sum[h][1] *= times;
#pragma unroll
          for (int i = 0; i < D / 4; ++i) O_i[i / 2 * 4 + 2 * h + i % 2] *= times;  // line 10
#pragma unroll
          for (int i = h; i < B_c / 4; i += 2) P[i] = pack<T>(S[2 * i] * times, S[2 * i + 1] * times);
        }
      }
      for (int h = 0; h < 2; ++h) l_i[h] = sum[h][0] + sum[h][1];
    }
    if (STAY) note_unless_finite(&s.given[q.index].overflowed, staying ? l_i[0] + l_i[1] : 0.0f);
    __syncwarp();
    if (lane == 0) before = s.given[q.index].tile;
    pending = true;
    arrive_as_warp(&s.q_empty[q.index]);
    q.next();
  }
  if (wg == 0) wait_for_turn();  // the last consumer's last pass_turn(): no barrier is left half full
  if (pending) {
    mbarrier_wait(&s.v_full[v.index], v.parity);
    begin_PV<T, D, B_c>(O_i, P, s.V[v.index], add);
    float inverse[2];
    invert_fast(inverse, l_i);
    end_PV();
    write_before(inverse);
    tma_store_wait();
  }
}

template <typename T, int D, int CONSUMERS, int B_c, int Q_STAGES, bool STAY = false>
static cudaError_t launch_tiles(const Attention& a, cudaStream_t stream) {
  constexpr int B_r = 64 * CONSUMERS, bytes = sizeof(Shared<D, CONSUMERS, B_c, Q_STAGES>);
  static_assert(bytes <= 227 * 1024, "what a block can have");
  CUtensorMap q_map, k_map, v_map, out_map;
  cudaError_t error;
  if ((error = make_tensor_map<T>(&q_map, a.q, a.q_strides, a.batch, a.q_len, a.heads, D, B_r))) return error;
  if ((error = make_tensor_map<T>(&k_map, a.k, a.k_strides, a.batch, a.kv_len, a.kv_heads, D, B_c))) return error;
  if ((error = make_tensor_map<T>(&v_map, a.v, a.v_strides, a.batch, a.kv_len, a.kv_heads, D, B_c))) return error;
  if ((error = make_tensor_map<T>(&out_map, a.out, a.out_strides, a.batch, a.q_len, a.heads, D, 16))) return error;
  const auto kernel = attention_kernel<T, D, CONSUMERS, B_c, Q_STAGES, STAY>;
  if ((error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))) return error;
  int device, multiprocessors;
  if ((error = cudaGetDevice(&device))) return error;
  if ((error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device))) return error;

  const int heads = a.batch * a.heads, row_blocks = ceil_div(a.q_len, B_r);
  Plan plan = {row_blocks, 1, heads * row_blocks, a.workspace && heads * row_blocks > multiprocessors};
  if (plan.counted) {
    const int64_t in_l2 = (32 << 20) / (int64_t(a.kv_len) * D * 4) * (a.heads / a.kv_heads);
    plan.group = std::clamp<int64_t>(in_l2, 1, heads);
  }
  const int grid = std::min(multiprocessors, plan.tiles);
  kernel<<<grid, (1 + CONSUMERS) * WARPGROUP, bytes, stream>>>(a, q_map, k_map, v_map, out_map, plan);
  return cudaGetLastError();
}

// Tile sizes, as measured on an H200.
template <typename T>
static cudaError_t launch(const Attention& a, int head_dim, cudaStream_t stream) {
  const bool stay = a.kv_len >= 2048;
  switch (head_dim) {
    case 64:  // 192 rows: for each K and V fetched, half as much again is computed. But 512 rows are 2.67 of them, and a
              // causal diagonal wastes more: up to 1,024 rows 128 were faster there. Not causal, 192 were at 512 and 2,048
              // (NOTES.md)
      if (a.q_len <= (a.causal ? 1024 : 128)) return launch_tiles<T, 64, 2, 128, 2>(a, stream);
      if (stay) return launch_tiles<T, 64, 3, 128, 2, true>(a, stream);
      return launch_tiles<T, 64, 3, 128, 2>(a, stream);
    case 128:  // O_i 64, S 64 and P 32 of 240 registers; all of 192 KiB
      if (stay) return launch_tiles<T, 128, 2, 128, 2, true>(a, stream);
      return launch_tiles<T, 128, 2, 128, 2>(a, stream);
    case 256:  // O_i alone has 128 registers, Q_i 64 KiB: more than 80 keys, or a second Q_i, there is no room for
      if (stay) return launch_tiles<T, 256, 2, 80, 1, true>(a, stream);
      return launch_tiles<T, 256, 2, 80, 1>(a, stream);
  }
  return cudaErrorInvalidValue;
}

extern "C" cudaError_t attention(const void* q, const void* k, const void* v, void* out, void* workspace, int batch,
                                 int heads, int kv_heads, int q_len, int kv_len, int head_dim, Strides q_strides,
                                 Strides k_strides, Strides v_strides, Strides out_strides, float scale, int causal,
                                 int dtype, cudaStream_t stream) {
  const Attention a = {q, k, v, out, workspace, batch, heads, kv_heads, q_len, kv_len,
                       q_strides, k_strides, v_strides, out_strides, scale, causal != 0};
  if (dtype == FLOAT16) return launch<__half>(a, head_dim, stream);
  if (dtype == BFLOAT16) return launch<__nv_bfloat16>(a, head_dim, stream);
  return cudaErrorInvalidValue;
}
