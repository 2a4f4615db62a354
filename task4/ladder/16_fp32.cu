// Rung 16. fp32 in and out with fp32's accuracy, on tensor cores that multiply fp16.
// architectures: sm_90a cpu
//
// Every operand is split into two of fp16, hi and lo: split.cuh, whose kernel splits K and V before this one runs. Q_i
// and P are split here. P, at most 1, is scaled by 2^15.
//
// A tensor core truncates its sums instead of rounding them, and thousands of truncated sums drift. So each P V_j
// starts from zero and is added to O_i in ordinary, rounded fp32, in the FFMA that rescales O_i: against float64 the
// error is a tenth of that of a kernel that accumulates O_i in the tensor cores.
//
//   grid   one block per SM, which computes one tile of B_r rows after another
//   block  a producer thread, and two consumer warpgroups of 64 rows in ping-pong: while one has the tensor cores
//          (P V_j and the next S), the other computes its softmax. B_c = 64 keys for head_dim 128, 128 keys for 64
//
// Pointers and strides are multiples of 16 bytes. A NaN in K or V reaches the rows that see it. An infinite key is
// absent for rows whose score is -inf, and makes rows NaN whose score is +inf.
#include <cuda_runtime.h>

#include "attention.cuh"
#include "hopper.cuh"
#include "split.cuh"
#include "warpgroup.cuh"

constexpr int ROWS = 64, B_r = 2 * ROWS;  // of a warpgroup, of a block

// B_r rows of one head; row_0 = -1: no more.
struct Tile {
  int row_0, head, b;
};

template <int D>
struct Shared {
  static constexpr int B_c = TILE_VALUES / D;      // keys of a K_j or V_j
  static constexpr int STAGES = D == 128 ? 5 : 6;  // as many as fit
  uint8_t kv[STAGES][TILE_BYTES];                  // K_j and V_j in turn; wgmma wants multiples of 1024
  uint8_t q[2][4 * ROWS * D];                      // Q_i of each warpgroup: floats, then hi and lo
  float4 units[STAGES];                            // of the Records
  Tile tile;                                       // the next one
  // full: the buffer's contents have arrived. empty: all its readers are done with it
  uint64_t full[STAGES], empty[STAGES], q_full[2], q_empty[2], tile_full, tile_empty;
};

// Named barriers of warpgroup w.
enum Barrier {
  Q_SPLIT = 1,  // + w: Q_i is split
  TURN = 3,     // + w: the tensor cores are this warpgroup's
};

// ---- scheduler and producer

// In groups of heads whose K and V fit into the L2 cache, the longest rows of a group come first.
DEVICE Tile tile_of(const Attention& a, int number, int group) {
  const int row_tiles = ceil_div(a.q_len, B_r), first = number / (group * row_tiles) * group;  // head of the group
  const int heads = min(group, a.batch * a.heads - first), i = number - first * row_tiles, of_all = first + i % heads;
  return {(row_tiles - 1 - i / heads) * B_r, of_all % a.heads, of_all / a.heads};
}

// How many K_j the rows of warpgroup w see, at least one. If causal, those of warpgroup 1 may see one more.
template <int D>
DEVICE int kv_tiles_of(const Attention& a, int row_0, int w) {
  return max(1, ceil_div(a.visible(min(row_0 + (w + 1) * ROWS, a.q_len) - 1), Shared<D>::B_c));
}

// One thread loads all tiles. It takes the next one when the last load of this one is under way: dynamic scheduling.
template <int D>
DEVICE void produce(const Attention& a, const CUtensorMap* q_map, Shared<D>& s, int tiles, int group) {
  Record* records = static_cast<Record*>(a.workspace);
  Ring<Shared<D>::STAGES> kv;
  Ring<1> q, next;
  for (int i = blockIdx.x; true; i = gridDim.x + atomicAdd(&records->tiles_taken, 1), q.next(), next.next()) {
    const Tile tile = i < tiles ? tile_of(a, i, group) : Tile{-1};
    mbarrier_wait(&s.tile_empty, next.parity ^ 1);
    s.tile = tile;
    mbarrier_arrive(&s.tile_full);
    if (tile.row_0 < 0) return;
    const int kv_head = tile.b * a.kv_heads + tile.head / (a.heads / a.kv_heads);
    const Record* record = records + 2 * int64_t(kv_head) * ceil_div(a.kv_len, Shared<D>::B_c);
    for (int n = 0; n < 2 * kv_tiles_of<D>(a, tile.row_0, 1); ++n, ++record, kv.next()) {  // line 7: K_1 Q V_1 ...
      mbarrier_wait(&s.empty[kv.index], kv.parity ^ 1);
      mbarrier_arrive_expect(&s.full[kv.index], TILE_BYTES + sizeof(record->unit));
      bulk_load(s.kv[kv.index], record->tile, TILE_BYTES, &s.full[kv.index]);
      bulk_load(&s.units[kv.index], &record->unit, sizeof(record->unit), &s.full[kv.index]);
      for (int w = 0; w < 2 && n == 0; ++w) {
        mbarrier_wait(&s.q_empty[w], q.parity ^ 1);
        mbarrier_arrive_expect(&s.q_full[w], sizeof(s.q[w]));
        tma_load(s.q[w], q_map, &s.q_full[w], tile.row_0 + w * ROWS, tile.head, tile.b);
      }
    }
  }
}

// ---- consumers. Registers are in pairs: columns 8 c + 2 t, + 1 of row g, the same of row g + 8

// This thread's part of Q_i, from floats to hi and lo of scale log2(e) Q_i: rows `row` and row + 8, and of these the
// values 4 t ... 4 t + 3 of each 16. hi and lo replace the floats, which take as many bytes. unit[r]: what a row's S is
// to be multiplied by.
template <int D>
DEVICE void split_Q(uint8_t* q, float scale, int row, float (&unit)[2]) {
  asm volatile("" : "+r"(row));  // or the compiler keeps these addresses for all tiles, in registers that it needs
  const auto at = [&](int n, int width) {
    return q + place(row + n % 2 * 8, (n / 2 * 16 + threadIdx.x % 4 * 4) * width, ROWS);
  };
  float4 x[D / 8];
  float largest[2] = {}, factor[2];  // largest may be infinite: such a row has no finite score
#pragma unroll
  for (int n = 0; n < D / 8; ++n) {
    x[n] = *reinterpret_cast<const float4*>(at(n, 2));
    for (float* y : {&x[n].x, &x[n].y, &x[n].z, &x[n].w}) {
      *y *= scale * LOG2_E;
      largest[n % 2] = fmaxf(largest[n % 2], fabsf(*y));
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    largest[r] = fmaxf(largest[r], __shfl_xor_sync(~0u, largest[r], 1));
    largest[r] = fmaxf(largest[r], __shfl_xor_sync(~0u, largest[r], 2));
    factor[r] = factor_for(largest[r]);
    unit[r] = 1 / factor[r];
  }
  __syncwarp();  // all lanes have read theirs
#pragma unroll
  for (int n = 0; n < D / 8; ++n) store_split(at(n, 1), at(n, 1) + 2 * ROWS * D, x[n], factor[n % 2]);
}

// Line 9 for row g (r = 0) or g + 8: S becomes P; rescale is the factor due to O_i. S unit is exact: a power of two.
template <int B_c>
DEVICE void split_softmax(const float (&S)[B_c / 2], uint32_t (&P_hi)[B_c / 4], uint32_t (&P_lo)[B_c / 4], int r,
                          float unit, float& m_i, float& l_i, float& rescale) {
  const float m_new = fmaxf(m_i, unit * row_maximum<B_c>(S, r));
  const float shift = m_new == -INFINITY ? 0.0f : m_new;  // no key so far: -inf - -inf would be NaN
  rescale = fast_exp2(m_i - shift);
  m_i = m_new;
  float sum = 0;
#pragma unroll
  for (int i = r; i < B_c / 4; i += 2) {
    const float left = fast_exp2(fmaf(S[2 * i], unit, -shift)), right = fast_exp2(fmaf(S[2 * i + 1], unit, -shift));
    sum += left + right;
    const float x = P_FACTOR * left, y = P_FACTOR * right;  // not 15 in the exponent, where four bits would be lost
    const __half2 hi = __floats2half2_rn(x, y);
    P_hi[i] = bits(hi);
    P_lo[i] = bits(remainder(x, y, hi));
  }
  l_i = fmaf(l_i, rescale, sum);
}

// Line 12. out: row g, this thread's first column; rows from `inside` on are past the end.
template <int D>
DEVICE void store(float* out, int64_t row_stride, int inside, const float (&O_i)[D / 2], float (&l_i)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    l_i[r] += __shfl_xor_sync(~0u, l_i[r], 1);
    l_i[r] += __shfl_xor_sync(~0u, l_i[r], 2);
    const float inverse = 1 / l_i[r];
    if (8 * r >= inside) continue;
#pragma unroll
    for (int c = 0; c < D / 8; ++c)
      *reinterpret_cast<float2*>(out + 8 * r * row_stride + 8 * c) =
          l_i[r] == 0 ? make_float2(0, 0) : make_float2(O_i[4 * c + 2 * r] * inverse, O_i[4 * c + 2 * r + 1] * inverse);
  }
}

template <int D>
DEVICE void consume(const Attention& a, Shared<D>& s, int w) {
  constexpr int B_c = Shared<D>::B_c;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, row_w = threadIdx.x / 32 % 4 * 16 + g;
  Ring<Shared<D>::STAGES> kv;
  Ring<1> q, next;
  const auto next_stage = [&]() -> int {  // with the next K_j or V_j, once it has arrived
    const int stage = kv.index;
    mbarrier_wait(&s.full[stage], kv.parity);
    kv.next();
    return stage;
  };
  const auto release = [&](int stage) {
    __syncwarp();  // all lanes have read it
    arrive_as_warp(&s.empty[stage]);
  };
  const auto take_tile = [&] {
    mbarrier_wait(&s.tile_full, next.parity);
    const Tile tile = s.tile;
    mbarrier_arrive(&s.tile_empty);
    next.next();
    return tile;
  };
  // The warpgroups alternate on the tensor cores, warpgroup 0 first, with as many turns each.
  const auto wait_for_turn = [&] { barrier_sync(TURN + w, 2 * WARPGROUP); };
  const auto end_turn = [&] { barrier_arrive(TURN + 1 - w, 2 * WARPGROUP); };
  if (w == 1) end_turn();

  for (Tile tile; (tile = take_tile()).row_0 >= 0;) {
    const int row_0 = tile.row_0 + w * ROWS, row = row_0 + row_w, kv_tiles = kv_tiles_of<D>(a, tile.row_0, w);
    float q_unit[2];
    mbarrier_wait(&s.q_full[w], q.parity);
    q.next();
    split_Q<D>(s.q[w], a.scale, row_w, q_unit);
    fence_async_proxy();
    barrier_sync(Q_SPLIT + w, WARPGROUP);  // Q_i complete, for wgmma too

    float O_i[D / 2] = {}, PV[D / 2], S[B_c / 2];
    uint32_t P_hi[B_c / 4], P_lo[B_c / 4];
    float m_i[2] = {-INFINITY, -INFINITY}, l_i[2] = {}, rescale[2];  // l_i: of this thread's columns
    // Line 8: S = Q_i K_j^T, the small products first: a sum is truncated at its own size. Returns K_j's stage.
    const auto begin_S = [&]() -> int {
      const int stage = next_stage();
      const uint32_t Q = wgmma_descriptor(s.q[w]), K = wgmma_descriptor(s.kv[stage]);
      wgmma_fence();
#pragma unroll
      for (int n = 0; n < 3 * D / 16; ++n) {
        const int product = n / (D / 16), block = n % (D / 16) / 4, e = n % 4 * 2;
        Wgmma<__half, B_c, 0>::run(S, Q + (product == 0 ? 2 * ROWS * D / 16 : 0) + block * ROWS * 8 + e,
                                   K + (product == 1 ? LO / 16 : 0) + block * B_c * 8 + e, n > 0);
      }
      wgmma_commit();
      return stage;
    };
    // PV = P V_j, likewise, when it is this warpgroup's turn. Returns V_j's stage.
    const auto begin_PV = [&]() -> int {
      const int stage = next_stage();
      const uint32_t V = wgmma_descriptor(s.kv[stage], B_c * 128);
      wait_for_turn();
      keep_here(P_hi);
      keep_here(P_lo);
      wgmma_fence();
#pragma unroll
      for (int n = 0; n < 3 * B_c / 16; ++n) {
        const int product = n / (B_c / 16), c = n % (B_c / 16);
        Wgmma<__half, D, 1>::run(PV, product == 0 ? &P_lo[4 * c] : &P_hi[4 * c],
                                 V + (product == 1 ? LO / 16 : 0) + c * 128, n > 0);
      }
      wgmma_commit();
      return stage;
    };
    const auto add_PV = [&](int stage) {  // line 10
      keep_here(PV);
      keep_here(P_hi);  // until here the tensor cores own its registers
      keep_here(P_lo);
      const float v_unit = s.units[stage].x;
      release(stage);
#pragma unroll
      for (int i = 0; i < D / 2; ++i) O_i[i] = fmaf(O_i[i], rescale[i / 2 % 2], v_unit * PV[i]);
    };

    int k_stage = begin_S();
    for (int j = 0;; ++j) {
      wgmma_wait<0>();
      keep_here(S);
      const float k_unit = s.units[k_stage].x;
      release(k_stage);
      if ((j + 1) * B_c > a.visible(row_0))
        for (int r = 0; r < 2; ++r) mask<B_c>(S, r, a.visible(row + 8 * r) - j * B_c - 2 * t);
      for (int r = 0; r < 2; ++r) {  // unit is not 0, even if q and k are so small that it should be: -inf * 0 is NaN
        const float unit = fmaxf(q_unit[r] * k_unit, 1.17549435e-38f);
        split_softmax<B_c>(S, P_hi, P_lo, r, unit, m_i[r], l_i[r], rescale[r]);
      }
      if (j + 1 == kv_tiles) break;
      const int v_stage = begin_PV();
      k_stage = begin_S();
      end_turn();
      wgmma_wait<1>();
      add_PV(v_stage);
    }
    arrive_as_warp(&s.q_empty[w]);  // the last S is complete
    const int v_stage = begin_PV();
    end_turn();
    wgmma_wait<0>();
    add_PV(v_stage);
    if (kv_tiles < kv_tiles_of<D>(a, tile.row_0, 1)) {  // warpgroup 0 does not see the last K_j
      for (int i = 0; i < 2; ++i) release(next_stage());
      wait_for_turn();
      end_turn();
    }
    float* out = a.out_head<float>(tile.b, tile.head) + row * a.out_strides.row + 2 * t;
    store<D>(out, a.out_strides.row, a.q_len - row, O_i, l_i);
  }
}

template <int D>
__global__ void __launch_bounds__(3 * WARPGROUP, 1)
attention_kernel(const __grid_constant__ Attention a, const __grid_constant__ CUtensorMap q_map, int tiles, int group) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  Shared<D>& s = *reinterpret_cast<Shared<D>*>(bytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shared<D>::STAGES; ++i) mbarrier_init(&s.full[i], 1), mbarrier_init(&s.empty[i], 8);
    for (int i = 0; i < 2; ++i) mbarrier_init(&s.q_full[i], 1), mbarrier_init(&s.q_empty[i], 4);  // warps that read it
    mbarrier_init(&s.tile_full, 1), mbarrier_init(&s.tile_empty, 2 * WARPGROUP);
    mbarrier_init_fence();
  }
  __syncthreads();  // the mbarriers are initialised
  const int w = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);  // the warpgroup; by the shuffle ptxas sees one value
  if (w == 2) {
    registers_give<40>();
    if (threadIdx.x == 2 * WARPGROUP) produce<D>(a, &q_map, s, tiles, group);
    return;
  }
  registers_take<232>();
  consume<D>(a, s, w);
}

// ---- launcher

template <int D>
static int64_t records(int64_t batch, int64_t kv_heads, int kv_len) {
  return 2 * batch * kv_heads * ceil_div(kv_len, Shared<D>::B_c);
}

template <int D>
static cudaError_t launch(const Attention& a, cudaStream_t stream) {
  const int64_t heads = int64_t(a.batch) * a.heads, tiles = heads * ceil_div(a.q_len, B_r);
  const int64_t to_split = records<D>(a.batch, a.kv_heads, a.kv_len), kv_tiles = ceil_div(a.kv_len, Shared<D>::B_c);
  if (to_split > INT32_MAX || tiles > INT32_MAX / 2) return cudaErrorInvalidValue;
  const int64_t in_l2 = (24 << 20) / (2 * kv_tiles * sizeof(Record)) * (a.heads / a.kv_heads);  // in half of it
  const int64_t group = max(int64_t(1), min(in_l2, heads));
  int device, sms;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  constexpr int bytes = sizeof(Shared<D>);
  if (cudaError_t error = allow_shared_memory<attention_kernel<D>, bytes>()) return error;
  CUtensorMap q_map;
  if (cudaError_t error = make_tensor_map<float>(&q_map, a.q, a.q_strides, a.batch, a.q_len, a.heads, D, ROWS))
    return error;
  split_kernel<D><<<to_split, SPLIT_THREADS, 0, stream>>>(a, kv_tiles);
  attention_kernel<D><<<min(int64_t(sms), tiles), 3 * WARPGROUP, bytes, stream>>>(a, q_map, tiles, group);
  return cudaGetLastError();
}

extern "C" int64_t workspace_bytes(View q, View k) {
  const auto of = q.sizes[3] == 64 ? records<64> : records<128>;
  return of(k.sizes[0], k.sizes[2], k.sizes[1]) * sizeof(Record);
}

extern "C" cudaError_t attention(View q, View k, View v, View out, void* workspace, float scale, int causal, int dtype,
                                 cudaStream_t stream) {
  const Attention a = make_attention(q, k, v, out, workspace, scale, causal);
  if (dtype != FLOAT32 || workspace == nullptr) return cudaErrorInvalidValue;
  for (const View& x : {q, k, v, out})
    if (reinterpret_cast<uintptr_t>(x.data) % 16 != 0 || (x.strides[0] | x.strides[1] | x.strides[2]) % 4 != 0)
      return cudaErrorMisalignedAddress;
  if (a.head_dim == 64) return launch<64>(a, stream);
  if (a.head_dim == 128) return launch<128>(a, stream);
  return cudaErrorInvalidValue;
}
