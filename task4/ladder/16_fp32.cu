// Rung 15. fp32 in and out with fp32's accuracy, on tensor cores that multiply fp16.
// architectures: sm_90a
//
// A float x becomes two fp16 values: with t = 2^n x, hi = fp16(t) and lo = fp16(t - hi), 22 bits together. Then
//   x y = 2^-(n + n') (lo hi' + hi lo' + hi hi')       lo lo' is below what is kept
// is three products of fp16, exact in the tensor core and added up there in fp32. That is what 3xTF32 does too, at twice
// the speed. What fp16 lacks is range, so each row of Q, each tile of K and each tile of V has a power of two of its own
// that brings its largest |x| to 2^14 ... 2^15. Values down to 2^-17 of that largest one keep all 22 bits (lo is a whole
// number of 2^-24: fp16 ends there), smaller ones an error of 2^-40 of the largest. For S that is nothing: its errors
// count by their size, not by S's. P, at most 1, has the factor 2^15.
//
// A tensor core cuts off what it adds up instead of rounding it, and thousands of sums that are all cut off drift. So each
// P V_j starts at zero and is added to O_i by ordinary, rounded fp32 additions, which rescale O_i in the same stroke:
// against float64 the error is a tenth of that of a kernel that lets O_i grow in the tensor cores.
//
//   split      one block for each K_j and each V_j: the largest |x|, then hi and lo as they will stand in shared memory
//   workspace  batch * kv_heads * ceil(kv_len / B_c) * 2 Records of 32896 bytes, K_1 V_1 K_2 V_2 ... of each head;
//              128-byte aligned, not initialised. B_c = 64 keys for head_dim 128, 128 keys for 64
//   attention  one block for each SM, which takes B_r rows after B_r rows: a thread that loads, and two warpgroups of 64
//              rows that take turns: while one has the tensor cores (P V_j and the next S), the other computes its softmax
//
// Pointers and strides are multiples of 16 bytes. Not finite: a NaN in K or V reaches the rows that see it, and so does an
// infinity, as a NaN.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "attention.cuh"
#include "hopper.cuh"
#include "warpgroup.cuh"

constexpr int ROWS = 64, B_r = 2 * ROWS;       // of a warpgroup, of a block
constexpr int TILE_BYTES = 32768, LO = 16384;  // K_j or V_j: 8192 values hi, and from byte LO on lo
constexpr int SPLIT_THREADS = 256;
constexpr float P_FACTOR = 32768;

struct alignas(128) Record {
  uint8_t tile[TILE_BYTES];
  float4 factor;  // .x: what its products are to be multiplied by. A bulk copy is of 16 bytes at least
  int taken;      // in the first record: how many tiles of rows were taken, besides the first one of each block
};

// B_r rows of one head; row_0 = -1: no more.
struct Tile {
  int row_0, head, b;
};

template <int D>
struct Shared {
  static constexpr int B_c = 8192 / D;             // keys of a K_j or V_j
  static constexpr int STAGES = D == 128 ? 5 : 6;  // as many as there is room for
  uint8_t kv[STAGES][TILE_BYTES];                  // K_j and V_j in turn; wgmma wants multiples of 1024
  uint8_t q[2][4 * ROWS * D];                      // Q_i of each warpgroup: floats, then hi and lo
  float4 factors[STAGES];                          // in .x
  Tile tile;                                       // the next one
  // full: the buffer's contents have arrived. empty: all its readers are done with it
  uint64_t full[STAGES], empty[STAGES], q_full[2], q_empty[2], tile_full, tile_empty;
};

// Where (row, column) stands, in bytes, in a tile [D / 64][rows][64] of fp16 with swizzled rows.
DEVICE int place(int row, int column, int rows) {
  return (column / 64 * rows + row) * 128 + ((column % 64 * 2) ^ (row % 8 * 16));
}

// What is not finite does not count: it must not squash its neighbours to 0.
DEVICE float largest_of(float largest, float4 x) {
  for (const float y : {x.x, x.y, x.z, x.w}) largest = fabsf(y) < INFINITY ? fmaxf(largest, fabsf(y)) : largest;
  return largest;
}

// The power of two that brings `largest` to 2^14 ... 2^15; at most 2^111, so that 2^-15 / it is a normal float.
DEVICE float factor_for(float largest) {
  return __uint_as_float(min(127 + 14 + 127 - (__float_as_uint(largest) >> 23), 127 + 111) << 23);
}

// hi of both, lo of both
DEVICE uint2 split(float x, float y) {
  const __half2 hi = __floats2half2_rn(x, y);
  const float2 back = __half22float2(hi);
  const __half2 lo = __floats2half2_rn(x - back.x, y - back.y);
  return {reinterpret_cast<const uint32_t&>(hi), reinterpret_cast<const uint32_t&>(lo)};
}

DEVICE void store_split(uint8_t* hi, uint8_t* lo, float4 x, float factor) {
  const uint2 left = split(factor * x.x, factor * x.y), right = split(factor * x.z, factor * x.w);
  *reinterpret_cast<uint2*>(hi) = {left.x, right.x};
  *reinterpret_cast<uint2*>(lo) = {left.y, right.y};
}

template <int D>
__global__ void __launch_bounds__(SPLIT_THREADS) split_kernel(const Attention a, int kv_tiles) {
  constexpr int B_c = Shared<D>::B_c, N = B_c * D / 4 / SPLIT_THREADS;
  const bool is_v = blockIdx.x % 2;  // blocks in the order of the records
  const int j = blockIdx.x / 2 % kv_tiles, kv_head = blockIdx.x / 2 / kv_tiles % a.kv_heads;
  const int b = blockIdx.x / 2 / kv_tiles / a.kv_heads, head = kv_head * (a.heads / a.kv_heads);
  const float* rows = is_v ? a.v_head<float>(b, head) : a.k_head<float>(b, head);
  const int64_t stride = is_v ? a.v_strides.row : a.k_strides.row;
  float4 x[N];
  float largest = 0;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int e = 4 * (n * SPLIT_THREADS + threadIdx.x), key = j * B_c + e / D;
    x[n] = key < a.kv_len ? *reinterpret_cast<const float4*>(rows + key * stride + e % D) : make_float4(0, 0, 0, 0);
  }
#pragma unroll
  for (int n = 0; n < N; ++n) largest = largest_of(largest, x[n]);
  __shared__ uint32_t of_warp[SPLIT_THREADS / 32];
  of_warp[threadIdx.x / 32] = __reduce_max_sync(~0u, __float_as_uint(largest));
  __syncthreads();  // all warps have written theirs
  for (const uint32_t bits : of_warp) largest = fmaxf(largest, __uint_as_float(bits));

  const float factor = factor_for(largest);
  Record& record = static_cast<Record*>(a.workspace)[blockIdx.x];
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int e = 4 * (n * SPLIT_THREADS + threadIdx.x), at = place(e / D, e % D, B_c);
    store_split(record.tile + at, record.tile + LO + at, x[n], factor);
  }
  if (threadIdx.x == 0) record.factor = {1 / factor / (is_v ? P_FACTOR : 1), 0, 0, 0};
  if (threadIdx.x == 0) record.taken = 0;
}

// Bytes that lie in global memory as they shall stand in shared memory.
DEVICE void bulk_load(void* to, const void* from, int bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}

// In groups of heads whose K and V fit into the L2 cache, the longest rows of a group come first.
DEVICE Tile tile_of(const Attention& a, int number, int group) {
  const int row_tiles = ceil_div(a.q_len, B_r), first = number / (group * row_tiles) * group;  // first: the group's first head
  const int heads = min(group, a.batch * a.heads - first), i = number - first * row_tiles, of_all = first + i % heads;
  return {(row_tiles - 1 - i / heads) * B_r, of_all % a.heads, of_all / a.heads};
}

template <int D>
__global__ void __launch_bounds__(384, 1)
attention_kernel(const __grid_constant__ Attention a, const __grid_constant__ CUtensorMap q_map, int row_tiles, int group) {
  constexpr int B_c = Shared<D>::B_c, STAGES = Shared<D>::STAGES, Q_LO = 2 * ROWS * D;
  extern __shared__ __align__(1024) uint8_t bytes[];
  Shared<D>& s = *reinterpret_cast<Shared<D>*>(bytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) mbarrier_init(&s.full[i], 1), mbarrier_init(&s.empty[i], 8);  // warps that read it
    for (int i = 0; i < 2; ++i) mbarrier_init(&s.q_full[i], 1), mbarrier_init(&s.q_empty[i], 4);
    mbarrier_init(&s.tile_full, 1), mbarrier_init(&s.tile_empty, 256);
    mbarrier_init_fence();
  }
  __syncthreads();  // the mbarriers are there

  Ring<STAGES> kv;
  Ring<1> q, tiles;
  // How many K_j the rows of warpgroup w see, at least one. If causal, those of warpgroup 1 may see one more.
  const auto kv_tiles = [&](int row_0, int w) {
    return max(1, ceil_div(a.visible(min(row_0 + (w + 1) * ROWS, a.q_len) - 1), B_c));
  };

  const int w = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the warpgroup: shuffled, it is known to be the same for a warp
  if (w == 2) {
    registers_give<40>();
    Record* records = static_cast<Record*>(a.workspace);
    if (threadIdx.x != 256) return;
    // Takes the next tile when the last load of this one is under way: whoever is done first gets it.
    for (int i = blockIdx.x; true; i = gridDim.x + atomicAdd(&records->taken, 1), q.next(), tiles.next()) {
      const Tile tile = i < row_tiles ? tile_of(a, i, group) : Tile{-1};
      mbarrier_wait(&s.tile_empty, tiles.parity ^ 1);
      s.tile = tile;
      mbarrier_arrive(&s.tile_full);
      if (tile.row_0 < 0) return;
      const int kv_head = tile.b * a.kv_heads + tile.head / (a.heads / a.kv_heads);
      const Record* record = records + 2 * int64_t(kv_head) * ceil_div(a.kv_len, B_c);
      for (int i = 0; i < 2 * kv_tiles(tile.row_0, 1); ++i, ++record, kv.next()) {  // line 7: K_1 Q V_1 K_2 V_2 ...
        mbarrier_wait(&s.empty[kv.index], kv.parity ^ 1);
        mbarrier_arrive_expect(&s.full[kv.index], TILE_BYTES + 16);
        bulk_load(s.kv[kv.index], record->tile, TILE_BYTES, &s.full[kv.index]);
        bulk_load(&s.factors[kv.index], &record->factor, 16, &s.full[kv.index]);
        for (int w = 0; w < 2 && i == 0; ++w) {
          mbarrier_wait(&s.q_empty[w], q.parity ^ 1);
          mbarrier_arrive_expect(&s.q_full[w], sizeof(s.q[w]));
          tma_load(s.q[w], &q_map, &s.q_full[w], tile.row_0 + w * ROWS, tile.head, tile.b);
        }
      }
    }
  }

  registers_take<232>();
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, row_w = threadIdx.x / 32 % 4 * 16 + g;
  const auto next_stage = [&]() -> int {  // with the next K_j or V_j, once it has arrived
    const int stage = kv.index;
    mbarrier_wait(&s.full[stage], kv.parity);
    kv.next();
    return stage;
  };
  const auto take_tile = [&] {
    mbarrier_wait(&s.tile_full, tiles.parity);
    const Tile tile = s.tile;
    mbarrier_arrive(&s.tile_empty);
    tiles.next();
    return tile;
  };
  const auto release = [&](int stage) {
    __syncwarp();  // all lanes have read it
    arrive_as_warp(&s.empty[stage]);
  };
  // Barriers 3 and 4: the warpgroups' turns on the tensor cores. Both have the same number of them, warpgroup 0 the first.
  const auto wait_for_turn = [&] { barrier_sync(3 + w, 256); };
  const auto end_turn = [&] { barrier_arrive(4 - w, 256); };
  if (w == 1) end_turn();

  for (Tile tile; (tile = take_tile()).row_0 >= 0;) {
    const int row_0 = tile.row_0 + w * ROWS, row = row_0 + row_w, n_tiles = kv_tiles(tile.row_0, w);

    // A thread has two rows, and of these in Q_i the floats 4 t ... 4 t + 3 of each 16. They come to where their hi and lo
    // will stand: that is as many bytes, as if they were pairs of fp16.
    int row_q = row_w;
    asm volatile("" : "+r"(row_q));  // or the compiler keeps these addresses, in registers that it needs, for all tiles
    const auto q_at = [&](int n, int width) {
      return s.q[w] + place(row_q + n % 2 * 8, (n / 2 * 16 + 4 * t) * width, ROWS);
    };
    float4 x[D / 8];
    float largest[2] = {}, q_factor[2];
    mbarrier_wait(&s.q_full[w], q.parity);
    q.next();
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      x[n] = *reinterpret_cast<const float4*>(q_at(n, 2));
      for (float* y : {&x[n].x, &x[n].y, &x[n].z, &x[n].w}) *y *= a.scale * LOG2_E;
      largest[n % 2] = largest_of(largest[n % 2], x[n]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      largest[r] = fmaxf(largest[r], __shfl_xor_sync(~0u, largest[r], 1));
      largest[r] = fmaxf(largest[r], __shfl_xor_sync(~0u, largest[r], 2));
      q_factor[r] = 1 / factor_for(largest[r]);
    }
    __syncwarp();  // all lanes have read theirs
#pragma unroll
    for (int n = 0; n < D / 8; ++n) store_split(q_at(n, 1), q_at(n, 1) + Q_LO, x[n], factor_for(largest[n % 2]));
    fence_async_proxy();
    barrier_sync(1 + w, 128);  // Q_i complete, for wgmma too

    float O_i[D / 2] = {}, PV[D / 2], S[B_c / 2];  // in pairs: columns 8 c + 2 t, + 1 of row, the same of row + 8
    uint32_t P_hi[B_c / 4], P_lo[B_c / 4];
    float m_i[2] = {-INFINITY, -INFINITY}, l_i[2] = {}, rescale[2];  // l_i: of this thread's columns

    // S = Q_i K_j^T, the small products first: a sum is cut off at its own size. Returns K_j's stage.
    const auto start_S = [&]() -> int {
      const int stage = next_stage();
      const uint32_t Q = wgmma_descriptor(s.q[w]), K = wgmma_descriptor(s.kv[stage]);
      wgmma_fence();
#pragma unroll
      for (int n = 0; n < 3 * D / 16; ++n) {
        const int product = n / (D / 16), block = n % (D / 16) / 4, e = n % 4 * 2;
        Wgmma<__half, B_c, 0>::run(S, Q + (product == 0 ? Q_LO / 16 : 0) + block * ROWS * 8 + e,
                                   K + (product == 1 ? LO / 16 : 0) + block * B_c * 8 + e, n > 0);
      }
      wgmma_commit();
      return stage;
    };
    // PV = P V_j, likewise, when it is this warpgroup's turn. Returns V_j's stage.
    const auto start_PV = [&]() -> int {
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
      const float v_factor = s.factors[stage].x;
      release(stage);
#pragma unroll
      for (int i = 0; i < D / 2; ++i) O_i[i] = fmaf(O_i[i], rescale[i / 2 % 2], v_factor * PV[i]);
    };

    int k_stage = start_S();  // line 8
    for (int j = 0;; ++j) {
      wgmma_wait<0>();
      keep_here(S);
      const float k_factor = s.factors[k_stage].x;
      release(k_stage);
      if ((j + 1) * B_c > a.visible(row_0)) {
#pragma unroll
        for (int i = 0; i < B_c / 2; ++i)
          if (j * B_c + i / 4 * 8 + 2 * t + i % 2 >= a.visible(row + i / 2 % 2 * 8)) S[i] = -INFINITY;
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {  // line 9
        // A power of two, so S factor is exact. Not 0, even if q and k are so small that it should be: -inf * 0 is NaN.
        const float factor = fmaxf(q_factor[r] * k_factor, 1.17549435e-38f);
        float m_new = -INFINITY, sum = 0;
#pragma unroll
        for (int i = r; i < B_c / 4; i += 2) m_new = fmaxf(m_new, fmaxf(S[2 * i], S[2 * i + 1]));
        m_new = fmaxf(m_new, __shfl_xor_sync(~0u, m_new, 1));
        m_new = fmaxf(m_new, __shfl_xor_sync(~0u, m_new, 2));
        m_new = fmaxf(m_i[r], m_new * factor);
        const float shift = m_new == -INFINITY ? 0.0f : m_new;  // no key so far: -inf - -inf would be NaN
        rescale[r] = fast_exp2(m_i[r] - shift);
        m_i[r] = m_new;
#pragma unroll
        for (int i = r; i < B_c / 4; i += 2) {
          const float left = fast_exp2(fmaf(S[2 * i], factor, -shift)), right = fast_exp2(fmaf(S[2 * i + 1], factor, -shift));
          sum += left + right;
          const uint2 P = split(P_FACTOR * left, P_FACTOR * right);  // not in the exponent: 15 + x has lost four bits of x
          P_hi[i] = P.x;
          P_lo[i] = P.y;
        }
        l_i[r] = fmaf(l_i[r], rescale[r], sum);
      }
      if (j + 1 == n_tiles) break;
      const int stage = start_PV();
      k_stage = start_S();
      end_turn();
      wgmma_wait<1>();
      add_PV(stage);
    }
    arrive_as_warp(&s.q_empty[w]);  // the last S is complete
    const int stage = start_PV();
    end_turn();
    wgmma_wait<0>();
    add_PV(stage);
    if (n_tiles < kv_tiles(tile.row_0, 1)) {  // warpgroup 0 does not see the last tile
      release(next_stage());
      release(next_stage());
      wait_for_turn();
      end_turn();
    }

    float* out = a.out_head<float>(tile.b, tile.head) + row * a.out_strides.row + 2 * t;
#pragma unroll
    for (int r = 0; r < 2; ++r, out += 8 * a.out_strides.row) {  // line 12
      l_i[r] += __shfl_xor_sync(~0u, l_i[r], 1);
      l_i[r] += __shfl_xor_sync(~0u, l_i[r], 2);
      const float inverse = 1 / l_i[r];
      if (row + 8 * r >= a.q_len) continue;
#pragma unroll
      for (int i = r; i < D / 4; i += 2)
        *reinterpret_cast<float2*>(out + 4 * (i - r)) =
            l_i[r] == 0 ? make_float2(0, 0) : make_float2(O_i[2 * i] * inverse, O_i[2 * i + 1] * inverse);
    }
  }
}

template <int D>
static cudaError_t launch(const Attention& a, cudaStream_t stream) {
  const int kv_tiles = ceil_div(a.kv_len, Shared<D>::B_c);
  const int64_t heads = int64_t(a.batch) * a.heads, row_tiles = heads * ceil_div(a.q_len, B_r);
  const int64_t records = int64_t(a.batch) * a.kv_heads * kv_tiles * 2;
  if (records > INT32_MAX || row_tiles > INT32_MAX / 2) return cudaErrorInvalidValue;
  const int64_t in_l2 = (24 << 20) / (2 * kv_tiles * sizeof(Record)) * (a.heads / a.kv_heads);  // in half of it
  const int64_t group = max(int64_t(1), min(in_l2, heads));
  int device, sms;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  CUtensorMap q_map;
  cudaError_t error;
  if ((error = make_tensor_map<float>(&q_map, a.q, a.q_strides, a.batch, a.q_len, a.heads, D, ROWS))) return error;
  constexpr int bytes = sizeof(Shared<D>);
  if ((error = cudaFuncSetAttribute(attention_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))) return error;
  split_kernel<D><<<records, SPLIT_THREADS, 0, stream>>>(a, kv_tiles);
  attention_kernel<D><<<min(int64_t(sms), row_tiles), 384, bytes, stream>>>(a, q_map, row_tiles, group);
  return cudaGetLastError();
}

extern "C" cudaError_t attention(const void* q, const void* k, const void* v, void* out, void* workspace, int batch,
                                 int heads, int kv_heads, int q_len, int kv_len, int head_dim, Strides q_strides,
                                 Strides k_strides, Strides v_strides, Strides out_strides, float scale, int causal,
                                 int dtype, cudaStream_t stream) {
  const Attention a = {q, k, v, out, workspace, batch, heads, kv_heads, q_len, kv_len,
                       q_strides, k_strides, v_strides, out_strides, scale, causal != 0};
  if (dtype != FLOAT32 || workspace == nullptr) return cudaErrorInvalidValue;
  const auto misaligned = [](const void* p, Strides strides) {
    return reinterpret_cast<uintptr_t>(p) % 16 != 0 || (strides.batch | strides.row | strides.head) % 4 != 0;
  };
  if (misaligned(q, q_strides) || misaligned(k, k_strides) || misaligned(v, v_strides) || misaligned(out, out_strides))
    return cudaErrorMisalignedAddress;
  if (head_dim == 64) return launch<64>(a, stream);
  if (head_dim == 128) return launch<128>(a, stream);
  return cudaErrorInvalidValue;
}
