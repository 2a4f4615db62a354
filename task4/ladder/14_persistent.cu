// Rung 14, persistent: blocks stay, and one tile's end overlaps the next one's beginning.
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
//   line  9    m'  = max(m_i, rowmax(S))        four lanes share a row: two shuffles
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
//              three quarters of its speed at 16,384
//   order      causal: the longest row blocks first, of as many heads as L2 holds K and V of; whoever is done takes the
//              next one from a counter, which has to be zeroed by a launch of its own
//   diagonal   a warpgroup whose rows see none of the last 64 keys of their first block does not multiply them
//   softmax    the tensor cores are done with P V_j when the softmax is somewhere in its exponentials. Waiting for them
//              earlier is idle time, and later O_i and P are too late for the gaps that the exponentials leave. ptxas puts
//              the wait first unless something holds it back: arrive_after() below
//   maximum    of three numbers by one instruction: row_maximum_of_three()
//   What holds it now: beside wgmma the other instructions are slower, and a scheduler's two softmaxes need nearly all of
//   the time that their products do (NOTES.md)
//   tile sizes by head_dim and q_len: the table at the end of the file
//
// Shared memory, with 1,024-byte alignment for the swizzle: Q_i twice, K_j and V_j in rings of two:
//   (Q_STAGES B_r + 4 B_c) head_dim 2 bytes     64: 96 or 112 KiB,  128: 192 KiB,  256: 224 KiB with one Q_i
// Registers: launched with 65,536 / threads for each. Then the producer's warpgroup keeps 24 (32), and each of 2 (3)
// consumers has 240 (160): O_i head_dim / 2, S B_c / 2, P B_c / 4.
#include <cuda_runtime.h>

#include <algorithm>

#include "attention.cuh"
#include "hopper.cuh"
#include "warpgroup.cuh"

constexpr int STAGES = 2;  // of the rings of K and V

// ptxas orders these 400 instructions as it likes, and how well they fill each other's gaps is up to 5 % of the speed. What
// can be said is said here: the best of those tried with nvcc 13.0 on an H200, for each head_dim (NOTES.md).
// Maxima: of two floats or of three integers at a time, see new_maxima().
enum class Maxima { FLOATS,
                    INTEGERS,
                    INTEGERS_ASK_FIRST };

template <int D>
struct Order;
template <>
struct Order<64> {
  static constexpr int BEFORE = 8;       // of a thread's B_c / 2 exponentials: those before the wait for P V_j
  static constexpr bool L_FIRST = true;  // the sum begins with what l_i was, and does not end with it
  static constexpr bool MEET = false;    // a warp's threads meet when they have taken a tile
  static constexpr Maxima MAXIMA = Maxima::INTEGERS_ASK_FIRST;
};
template <>
struct Order<128> {
  static constexpr int BEFORE = 52;
  static constexpr bool L_FIRST = true, MEET = true;
  static constexpr Maxima MAXIMA = Maxima::INTEGERS;
};
template <>
struct Order<256> {
  static constexpr int BEFORE = 20;
  static constexpr bool L_FIRST = false, MEET = true;
  static constexpr Maxima MAXIMA = Maxima::FLOATS;
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
  Tile tile;  // the next one
  // full: the buffer's contents have arrived. empty: all its readers are done with it
  uint64_t q_full[Q_STAGES], q_empty[Q_STAGES], k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
  uint64_t tile_full, tile_empty;
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

// Whether one of the warp's rows has no maximum of 0 or above: then integers will not do.
DEVICE bool some_negative(const float (&m)[2]) { return __any_sync(~0u, fminf(m[0], m[1]) < 0.0f); }

// Line 9 in two parts. First the maxima: rescale is the factor that O_i is due, shift what an exponential subtracts. negative:
// some_negative(m_i), if it has been asked.
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
  if (MAXIMA == Maxima::FLOATS) {
    find(in_floats);
  } else if (MAXIMA == Maxima::INTEGERS) {
    find(in_integers);
    if (some_negative(m_new)) find(in_floats);
  } else if (negative) {
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

template <typename T, int D, int CONSUMERS, int B_c, int Q_STAGES>
__global__ void __launch_bounds__((1 + CONSUMERS) * WARPGROUP, 1)
attention_kernel(const __grid_constant__ Attention a, const __grid_constant__ CUtensorMap q_map,
                 const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map, const Plan plan) {
  constexpr int B_r = 64 * CONSUMERS, HALF = B_c == 128 ? 64 : B_c;
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& s = *reinterpret_cast<Shared<D, CONSUMERS, B_c, Q_STAGES>*>(raw);

  const int warpgroup = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);  // the shuffle tells the compiler: one for all lanes
  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&q_map, &k_map, &v_map}) tma_prefetch(map);
    for (int i = 0; i < Q_STAGES; ++i) mbarrier_init(&s.q_full[i], 1), mbarrier_init(&s.q_empty[i], 4 * CONSUMERS);
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(&s.k_full[i], 1), mbarrier_init(&s.k_empty[i], 4 * CONSUMERS);  // the consumers' warps
      mbarrier_init(&s.v_full[i], 1), mbarrier_init(&s.v_empty[i], 4 * CONSUMERS);
    }
    mbarrier_init(&s.tile_full, 1), mbarrier_init(&s.tile_empty, CONSUMERS * WARPGROUP + 1);  // and the producer
    mbarrier_init_fence();
  }
  __syncthreads();  // barriers initialised before anyone uses them

  Ring<1> tiles;
  const auto take_tile = [&] {  // the next one
    mbarrier_wait(&s.tile_full, tiles.parity);
    tiles.next();
    return s.tile;
  };

  if (warpgroup == 0) {
    registers_give<CONSUMERS == 2 ? 24 : 32>();
    if (threadIdx.x == 32) {  // the scheduler
      Ring<Q_STAGES> q;
      const auto wait = [&] { mbarrier_wait(&s.tile_empty, tiles.parity ^ 1); };  // until the tile before is taken
      const auto hand_out = [&](Tile tile) {
        wait();
        s.tile = tile;
        mbarrier_arrive(&s.tile_full);
        tiles.next();
        if (tile.blocks <= 0) return;
        mbarrier_wait(&s.q_empty[q.index], q.parity ^ 1);
        mbarrier_arrive_expect(&s.q_full[q.index], B_r * D * sizeof(T));
        tma_load(s.Q[q.index], &q_map, &s.q_full[q.index], tile.row_0, tile.head, tile.b, EVICT_FIRST);
        q.next();
      };
      const int all_heads = a.batch * a.heads;
      for (int tile = blockIdx.x; tile < plan.tiles;) {
        const int first = tile / (plan.group * plan.row_blocks) * plan.group;  // its group's first head
        const int heads = min(plan.group, all_heads - first);                  // the last group may have fewer
        const int i = tile - first * plan.row_blocks, block = i / heads, head = first + i % heads;
        const int row_0 = (plan.counted ? plan.row_blocks - 1 - block : block) * B_r;
        const int blocks = ceil_div(a.visible(min(row_0 + B_r, a.q_len) - 1), B_c), b = head / a.heads;
        hand_out({row_0, head - b * a.heads, b, blocks});
        wait();  // counted: whoever is done first gets the next one, so no earlier than necessary
        tile = gridDim.x + (plan.counted ? atomicAdd(static_cast<int*>(a.workspace), 1) : tile);
      }
      hand_out({0, 0, 0, -1});
    } else if (threadIdx.x == 0) {  // the producer
      Ring<STAGES> k, v;
      while (true) {
        const Tile tile = take_tile();
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

  // The tile that still lacks its last P V_j, and is not written.
  bool pending = false;
  T* pending_out = nullptr;
  int pending_rows = 0;
  int add = 0;  // 0: P V_j is its tile's first, and O_i still holds the tile before

  while (true) {
    const Tile tile = take_tile();
    if (Order<D>::MEET) __syncwarp();
    mbarrier_arrive(&s.tile_empty);
    if (tile.blocks < 0) break;
    const int row = tile.row_0 + wg * 64 + warp * 16 + g;
    T* out = a.out_head<T>(tile.b, tile.head) + int64_t(row) * a.out_strides.row + 8 * t;
    if (tile.blocks == 0) {  // none of the rows sees a key
      for (int e = 0; e < D; e += 32) {
        if (row < a.q_len) *reinterpret_cast<uint4*>(out + e) = make_uint4(0, 0, 0, 0);
        if (row + 8 < a.q_len) *reinterpret_cast<uint4*>(out + 8 * a.out_strides.row + e) = make_uint4(0, 0, 0, 0);
      }
      continue;
    }
    const int row_w = tile.row_0 + wg * 64, first_sees = a.visible(row_w), last_sees = a.visible(row_w + 63);
    const int seen[2] = {a.visible(row) - 2 * t, a.visible(row + 8) - 2 * t};  // counted from this thread's first column
    const int whole = first_sees / B_c;                                        // all rows see all of the blocks before

    // The first S of this tile, beside the last P V_j of the one before. keys: how many of the block some row sees
    int j = tile.blocks - 1;
    const bool half = HALF < B_c && last_sees <= j * B_c + HALF;
    mbarrier_wait(&s.q_full[q.index], q.parity);
    mbarrier_wait(&s.k_full[k.index], k.parity);
    wait_for_turn();
    const auto first_step = [&](auto keys) {
      begin_S<T, D, B_r, B_c, keys.value>(S, s.Q[q.index] + wg * 64 * 64, s.K[k.index]);  // line 8
      if (pending) {
        mbarrier_wait(&s.v_full[v.index], v.parity);
        begin_PV<T, D, B_c>(O_i, P, s.V[v.index], add);  // line 10
        pass_turn();
        wgmma_wait<1>();
      } else {
        pass_turn();
        wgmma_wait<0>();
      }
      keep_here(S);
    };
    if (half) {
      first_step(std::integral_constant<int, HALF>{});
    } else {
      first_step(std::integral_constant<int, B_c>{});
    }
    arrive_as_warp(&s.k_empty[k.index]);  // S is complete: K_j has been read
    k.next();
    invert(l_i);
    const float inverse[2] = {l_i[0], l_i[1]};
    m_i[0] = m_i[1] = -INFINITY;
    l_i[0] = l_i[1] = 0.0f;
    if (first_sees < (j + 1) * B_c) {
      mask<B_c>(S, 0, seen[0] - j * B_c);
      mask<B_c>(S, 1, seen[1] - j * B_c);
    }
    softmax<true, B_c>(S, m_i, l_i, rescale, scale, {B_c, B_c});  // line 9; masked already
    finish_PV(O_i, P);
    if (pending) {
      arrive_as_warp(&s.v_empty[v.index]);
      v.next();
    }
    make_P();
    add = 0;

    const auto write = [&] {  // the tile before, and this one becomes the next to be written
      if (pending) write_rows<D>(pending_out, a.out_strides.row, pending_rows, O_i, inverse);  // line 12
      pending = true;
      pending_out = out;
      pending_rows = a.q_len - row;
    };
    if (tile.blocks == 1) write();

    // Each further S, beside the P V_j of the block before: S is complete first, and softmax runs while P V_j still does
    const auto begin_step = [&] {
      mbarrier_wait(&s.k_full[k.index], k.parity);
      wait_for_turn();
      begin_S<T, D, B_r, B_c>(S, s.Q[q.index] + wg * 64 * 64, s.K[k.index]);  // line 8
      if (!add) write();
      mbarrier_wait(&s.v_full[v.index], v.parity);
      if (!add && half) {
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
#pragma unroll 1
    for (; j >= 0; --j) {
      const bool negative = Order<D>::MAXIMA == Maxima::INTEGERS_ASK_FIRST && some_negative(m_i);
      begin_step();
      constexpr int BEFORE = Order<D>::BEFORE;
      float shift[2], sum[2][2] = {};
      new_maxima<Order<D>::MAXIMA, B_c>(S, m_i, rescale, shift, scale, negative);  // line 9
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
    }
    arrive_as_warp(&s.q_empty[q.index]);
    q.next();
  }
  if (wg == 0) wait_for_turn();  // the last consumer's last pass_turn(): no barrier is left half full
  if (pending) {
    mbarrier_wait(&s.v_full[v.index], v.parity);
    begin_PV<T, D, B_c>(O_i, P, s.V[v.index], add);
    invert(l_i);
    end_PV();
    write_rows<D>(pending_out, a.out_strides.row, pending_rows, O_i, l_i);
  }
}

template <typename T, int D, int CONSUMERS, int B_c, int Q_STAGES>
static cudaError_t launch_tiles(const Attention& a, cudaStream_t stream) {
  constexpr int B_r = 64 * CONSUMERS, bytes = sizeof(Shared<D, CONSUMERS, B_c, Q_STAGES>);
  static_assert(bytes <= 227 * 1024, "what a block can have");
  CUtensorMap q_map, k_map, v_map;
  cudaError_t error;
  if ((error = make_tensor_map<T>(&q_map, a.q, a.q_strides, a.batch, a.q_len, a.heads, D, B_r))) return error;
  if ((error = make_tensor_map<T>(&k_map, a.k, a.k_strides, a.batch, a.kv_len, a.kv_heads, D, B_c))) return error;
  if ((error = make_tensor_map<T>(&v_map, a.v, a.v_strides, a.batch, a.kv_len, a.kv_heads, D, B_c))) return error;
  const auto kernel = attention_kernel<T, D, CONSUMERS, B_c, Q_STAGES>;
  if ((error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))) return error;
  int device, multiprocessors;
  if ((error = cudaGetDevice(&device))) return error;
  if ((error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device))) return error;

  const int heads = a.batch * a.heads, row_blocks = ceil_div(a.q_len, B_r);
  Plan plan = {row_blocks, 1, heads * row_blocks, a.workspace && heads * row_blocks > multiprocessors};
  if (plan.counted) {
    const int64_t in_l2 = (32 << 20) / (int64_t(a.kv_len) * D * 4) * (a.heads / a.kv_heads);
    plan.group = std::clamp<int64_t>(in_l2, 1, heads);
    if ((error = cudaMemsetAsync(a.workspace, 0, sizeof(int), stream))) return error;
  }
  const int grid = std::min(multiprocessors, plan.tiles);
  kernel<<<grid, (1 + CONSUMERS) * WARPGROUP, bytes, stream>>>(a, q_map, k_map, v_map, plan);
  return cudaGetLastError();
}

// Tile sizes, as measured on an H200.
template <typename T>
static cudaError_t launch(const Attention& a, int head_dim, cudaStream_t stream) {
  switch (head_dim) {
    case 64:  // 192 rows: for each K and V fetched, half as much again is computed. But 512 rows are 2.67 of them, and a
              // causal diagonal wastes more: up to 1,024 rows 128 were faster there. Not causal, 192 always were (NOTES.md)
      if (a.q_len <= (a.causal ? 1024 : 128)) return launch_tiles<T, 64, 2, 128, 2>(a, stream);
      return launch_tiles<T, 64, 3, 128, 2>(a, stream);
    case 128:  // O_i 64, S 64 and P 32 of 240 registers; all of 192 KiB
      return launch_tiles<T, 128, 2, 128, 2>(a, stream);
    case 256:  // O_i alone has 128 registers, Q_i 64 KiB: more than 80 keys, or a second Q_i, there is no room for
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
