// Rung 15, fp32: in and out, and as accurate, on tensor cores that multiply fp16.
// architectures: sm_90a
//
// A float x becomes two fp16 values: with t = 2^n x, hi = fp16(t) and lo = fp16(t - hi), 22 bits together. Then
//   x y = 2^-(n + n') (hi hi' + hi lo' + lo hi')       lo lo' is below what is kept
// is three products of fp16, exact in the tensor core and added up there in fp32. That is what 3xTF32 does too, at twice
// the speed. What fp16 lacks is range, so each row of Q, each tile of K and each tile of V has a power of two of its own
// that brings its largest |x| to 2^14 ... 2^15. Values down to 2^-17 of that largest one keep all 22 bits (lo is a whole
// number of 2^-24: fp16 ends there), smaller ones an error of 2^-40 of the largest. For S that is nothing: its errors
// count by their size, not by S's. P, at most 1, has the factor 2^15.
//
// A tensor core cuts off what it adds up instead of rounding it, and thousands of sums that are all cut off drift. So each
// product starts at zero and is added to O by ordinary, rounded fp32 additions, which rescale O in the same stroke: against
// float64 the error is a tenth of that of a kernel that lets O grow in the tensor cores.
//
//   split      one block for each tile of K and of V: the largest |x|, then hi and lo as they will stand in shared memory
//   workspace  batch * kv_heads * ceil(kv_len / (8192 / head_dim)) * 2 * 32896 bytes, 128-byte aligned, not initialised:
//              K_0 V_0 K_1 V_1 ... of each head, each 32 KiB and, at their end, what its products are multiplied by
//   attention  one block for 128 rows of Q: a warp that loads, and two warpgroups of 64 rows that compute in turns: while
//              one has the tensor cores (P_j V_j, S_j+1), the other computes its softmax
//
// Not finite: a NaN in K or V reaches the rows that see it, and so does an infinity, as a NaN.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "attention.cuh"
#include "hopper.cuh"

constexpr int ROWS = 64;                       // of a warpgroup
constexpr int B_r = 2 * ROWS;                  // of a block
constexpr int TILE_BYTES = 32768;              // hi and lo of a tile of K or V: 8192 values
constexpr int RECORD_BYTES = TILE_BYTES + 128;  // with its factor
constexpr float P_FACTOR = 32768;

template <int D>
struct Tile {
  static constexpr int B_c = TILE_BYTES / (4 * D);              // keys
  static constexpr int Q_BYTES = 4 * ROWS * D;                  // hi and lo, one warpgroup
  static constexpr int STAGES = (226 * 1024 - 2 * Q_BYTES) / TILE_BYTES;
  // Shared memory, in this order: what wgmma reads at multiples of 1024.
  static constexpr int Q = STAGES * TILE_BYTES, FACTOR = Q + 2 * Q_BYTES, Q_FACTOR = FACTOR + 16 * STAGES,
                       FULL = Q_FACTOR + 4 * B_r, EMPTY = FULL + 8 * STAGES, BYTES = EMPTY + 8 * STAGES;
  static_assert(BYTES <= 227 * 1024, "more shared memory than a block can have");
};

// ---- Splitting

// Where (row, column) stands, in bytes, in a tile [D / 64][rows][64] of fp16 with swizzled rows.
DEVICE int place(int row, int column, int rows) {
  return (column / 64 * rows + row) * 128 + ((column % 64 * 2) ^ (row % 8 * 16));
}

DEVICE float4 load4(const float* p, bool aligned) {
  return aligned ? *reinterpret_cast<const float4*>(p) : make_float4(p[0], p[1], p[2], p[3]);
}

// |x| as an integer that orders as it does, 0 for what is not finite: an infinity must not squash its neighbours to 0.
DEVICE uint32_t magnitude(float x) {
  const uint32_t bits = __float_as_uint(x) & 0x7fffffff;
  return bits < 0x7f800000 ? bits : 0;
}
DEVICE uint32_t magnitude(float4 x) {
  return max(max(magnitude(x.x), magnitude(x.y)), max(magnitude(x.z), magnitude(x.w)));
}

// The power of two that brings `largest` (a magnitude) to 2^14 ... 2^15; at most 2^111, so that 2^-15 / it is a normal float.
DEVICE float scale_for(uint32_t largest) { return __uint_as_float(min(127 + 14 + 127 - (largest >> 23), 127 + 111) << 23); }
// 1 / scale, where scale is a power of two.
DEVICE float reciprocal(float scale) { return __uint_as_float((254 << 23) - __float_as_uint(scale)); }

DEVICE uint32_t to_bits(__half2 x) { return *reinterpret_cast<uint32_t*>(&x); }

DEVICE void split2(float x, float y, uint32_t& hi, uint32_t& lo) {
  const __half2 high = __floats2half2_rn(x, y);
  const float2 back = __half22float2(high);
  hi = to_bits(high);
  lo = to_bits(__floats2half2_rn(x - back.x, y - back.y));
}

DEVICE void store_split(uint8_t* hi, uint8_t* lo, int at, float4 x, float scale) {
  uint2 high, low;
  split2(x.x * scale, x.y * scale, high.x, low.x);
  split2(x.z * scale, x.w * scale, high.y, low.y);
  *reinterpret_cast<uint2*>(hi + at) = high;
  *reinterpret_cast<uint2*>(lo + at) = low;
}

constexpr int SPLIT_THREADS = 256;

template <int D>
__global__ void __launch_bounds__(SPLIT_THREADS) split_kernel(const Attention a, int tiles) {
  constexpr int B_c = Tile<D>::B_c, N = B_c * D / (4 * SPLIT_THREADS);
  const bool is_v = blockIdx.x % 2;  // blocks in the order of the records: K_0 V_0 K_1 V_1 ...
  const int j = blockIdx.x / 2 % tiles, kv_head = blockIdx.x / 2 / tiles % a.kv_heads, b = blockIdx.x / 2 / tiles / a.kv_heads;
  const Strides strides = is_v ? a.v_strides : a.k_strides;
  const float* rows = static_cast<const float*>(is_v ? a.v : a.k) + b * strides.batch + kv_head * strides.head;
  const bool aligned = reinterpret_cast<uintptr_t>(rows) % 16 == 0 && strides.row % 4 == 0;

  float4 x[N];
  uint32_t largest = 0;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int e = 4 * (n * SPLIT_THREADS + threadIdx.x), key = j * B_c + e / D;
    x[n] = key < a.kv_len ? load4(rows + key * strides.row + e % D, aligned) : make_float4(0, 0, 0, 0);
  }
#pragma unroll
  for (int n = 0; n < N; ++n) largest = max(largest, magnitude(x[n]));
  __shared__ uint32_t warp_largest[SPLIT_THREADS / 32];
  warp_largest[threadIdx.x / 32] = __reduce_max_sync(~0u, largest);
  __syncthreads();  // all warps have written theirs
#pragma unroll
  for (int w = 0; w < SPLIT_THREADS / 32; ++w) largest = max(largest, warp_largest[w]);

  const float scale = scale_for(largest);
  uint8_t* record = static_cast<uint8_t*>(a.workspace) + int64_t(blockIdx.x) * RECORD_BYTES;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int e = 4 * (n * SPLIT_THREADS + threadIdx.x);
    store_split(record, record + TILE_BYTES / 2, place(e / D, e % D, B_c), x[n], scale);
  }
  if (threadIdx.x == 0) {
    const float factor = is_v ? reciprocal(scale) / P_FACTOR : reciprocal(scale);
    *reinterpret_cast<float4*>(record + TILE_BYTES) = make_float4(factor, 0, 0, 0);  // a bulk copy has 16 bytes at least
  }
}

// ---- Attention

// Bytes that lie in global memory as they shall stand in shared memory.
DEVICE void bulk_load(void* to, const void* from, int bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The stage whose turn it is, and the parity of its phase.
template <int STAGES>
struct Ring {
  int stage = 0, parity = 0;
  DEVICE void next() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// The 64 rows of a warpgroup, times factor, split: each warp its own 16. q_factor: what S is to be multiplied by.
template <int D>
DEVICE void load_q(uint8_t* Q_i, float* q_factor, const float* q, int64_t stride, int first, int end, float factor) {
  constexpr int LANES = D / 4;  // that share a row
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, column = lane % LANES * 4;
  const bool aligned = reinterpret_cast<uintptr_t>(q) % 16 == 0 && stride % 4 == 0;
  float4 x[16 * LANES / 32];
#pragma unroll
  for (int n = 0; n < 16 * LANES / 32; ++n) {
    const int row = first + 16 * warp + n * (32 / LANES) + lane / LANES;
    x[n] = row < end ? load4(q + row * stride + column, aligned) : make_float4(0, 0, 0, 0);
  }
#pragma unroll
  for (int n = 0; n < 16 * LANES / 32; ++n) {
    const int row = 16 * warp + n * (32 / LANES) + lane / LANES;
    x[n] = make_float4(factor * x[n].x, factor * x[n].y, factor * x[n].z, factor * x[n].w);
    uint32_t largest = magnitude(x[n]);
    for (int other = LANES / 2; other > 0; other /= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, other));
    const float scale = scale_for(largest);
    store_split(Q_i, Q_i + Tile<D>::Q_BYTES / 2, place(row, column, ROWS), x[n], scale);
    if (column == 0) q_factor[row] = reciprocal(scale);
  }
}

// S = Q_i K_j^T, the small products first: the sum is cut off at its own size.
template <int D, int B_c>
DEVICE void issue_S(float (&S)[B_c / 2], uint32_t Q, uint32_t K) {
  constexpr int Q_LO = Tile<D>::Q_BYTES / 2 / 16, K_LO = TILE_BYTES / 2 / 16;
  wgmma_fence();
#pragma unroll
  for (int product = 0; product < 3; ++product) {
#pragma unroll
    for (int e = 0; e < D; e += 16) {
      const uint32_t q = Q + (product == 0 ? Q_LO : 0) + e / 64 * (ROWS * 8) + e % 64 / 8;
      const uint32_t k = K + (product == 1 ? K_LO : 0) + e / 64 * (B_c * 8) + e % 64 / 8;
      Wgmma<__half, B_c, 0>::run(S, q, k, product != 0 || e != 0);
    }
  }
  wgmma_commit();
}

// PV = P V_j, likewise
template <int D, int B_c>
DEVICE void issue_PV(float (&PV)[D / 2], const uint32_t (&P_hi)[B_c / 4], const uint32_t (&P_lo)[B_c / 4], uint32_t V) {
  constexpr int V_LO = TILE_BYTES / 2 / 16;
  wgmma_fence();
#pragma unroll
  for (int product = 0; product < 3; ++product) {
#pragma unroll
    for (int c = 0; c < B_c; c += 16) {
      const uint32_t v = V + (product == 1 ? V_LO : 0) + c * 8;
      Wgmma<__half, D, 1>::run(PV, product == 0 ? &P_lo[c / 4] : &P_hi[c / 4], v, product != 0 || c != 0);
    }
  }
  wgmma_commit();
}

template <int D>
__global__ void __launch_bounds__(384, 1) attention_kernel(const Attention a, int tiles) {
  using Tile = Tile<D>;
  constexpr int B_c = Tile::B_c, STAGES = Tile::STAGES;
  extern __shared__ __align__(1024) uint8_t shared[];
  float4* factors = reinterpret_cast<float4*>(shared + Tile::FACTOR);  // of each stage, in .x
  uint64_t* full = reinterpret_cast<uint64_t*>(shared + Tile::FULL);
  uint64_t* empty = reinterpret_cast<uint64_t*>(shared + Tile::EMPTY);
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      mbarrier_init(&full[s], 1);
      mbarrier_init(&empty[s], 8);  // warps that read it
    }
    mbarrier_init_fence();
  }
  __syncthreads();  // the mbarriers are there

  const int row_tiles = ceil_div(a.q_len, B_r);
  const int row_0 = (row_tiles - 1 - blockIdx.x % row_tiles) * B_r;  // causal: the longest rows of a head start first
  const int head = blockIdx.x / row_tiles % a.heads, b = blockIdx.x / row_tiles / a.heads;
  // Tiles that the rows of warpgroup w see. If causal, those of warpgroup 1 may see one more.
  const auto tiles_of = [&](int w) { return ceil_div(a.visible(min(row_0 + (w + 1) * ROWS, a.q_len) - 1), B_c); };
  const int w = threadIdx.x / 128;

  if (w == 2) {
    registers_give<24>();
    if (threadIdx.x == 256) {
      const int kv_head = head / (a.heads / a.kv_heads), units = 2 * tiles_of(1);
      const uint8_t* record = static_cast<const uint8_t*>(a.workspace) +
                              (int64_t(b) * a.kv_heads + kv_head) * tiles * 2 * RECORD_BYTES;
      Ring<STAGES> to;
      for (int unit = 0; unit < units; ++unit, to.next(), record += RECORD_BYTES) {
        mbarrier_wait(&empty[to.stage], to.parity ^ 1);
        mbarrier_arrive_expect(&full[to.stage], TILE_BYTES + 16);
        bulk_load(shared + to.stage * TILE_BYTES, record, TILE_BYTES, &full[to.stage]);
        bulk_load(&factors[to.stage], record + TILE_BYTES, 16, &full[to.stage]);
      }
    }
  } else {
    registers_take<240>();
    const int n = tiles_of(w), first = row_0 + w * ROWS, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    uint8_t* Q_i = shared + Tile::Q + w * Tile::Q_BYTES;
    float* q_factors = reinterpret_cast<float*>(shared + Tile::Q_FACTOR) + w * ROWS;
    load_q<D>(Q_i, q_factors, a.q_head<float>(b, head), a.q_strides.row, first, a.q_len, a.scale * LOG2_E);
    fence_async_proxy();
    barrier_sync(1 + w, 128);  // Q_i is complete, for wgmma too

    // This thread has the rows row and row + 8 (r = 0, 1), of S the columns 8 i + column, + 1, of O the same.
    const int row = first + 16 * warp + lane / 4, column = 2 * (lane % 4);
    const int unmasked = a.visible(first), visible[2] = {a.visible(row), a.visible(row + 8)};
    const float q_factor[2] = {q_factors[16 * warp + lane / 4], q_factors[16 * warp + lane / 4 + 8]};
    float O[D / 2] = {}, PV[D / 2], S[B_c / 2];
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {}, rescale[2];  // l: of this thread's columns
    uint32_t P_hi[B_c / 4], P_lo[B_c / 4];
    Ring<STAGES> from;

    const auto release = [&](int stage) {
      __syncwarp();  // all lanes have read it
      if (lane == 0) mbarrier_arrive(&empty[stage]);
    };
    const auto next_stage = [&]() -> int {  // once the next tile, K_0 V_0 K_1 V_1 ..., is there
      const int stage = from.stage;
      mbarrier_wait(&full[stage], from.parity);
      from.next();
      return stage;
    };
    const auto start_S = [&]() -> int {  // returns K_j's stage
      const int stage = next_stage();
      issue_S<D, B_c>(S, wgmma_descriptor(Q_i), wgmma_descriptor(shared + stage * TILE_BYTES));
      return stage;
    };
    const auto softmax = [&](int j, float k_factor) {
      if ((j + 1) * B_c > unmasked) {
#pragma unroll
        for (int i = 0; i < B_c / 2; ++i)
          if (j * B_c + i / 4 * 8 + column + i % 2 >= visible[i / 2 % 2]) S[i] = -INFINITY;
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // A power of two, so S factor is exact. Not 0, even if q and k are so small that it should be: -inf * 0 is NaN.
        const float factor = fmaxf(q_factor[r] * k_factor, 1.17549435e-38f);
        float top = -INFINITY;
#pragma unroll
        for (int i = 2 * r; i < B_c / 2; i += 4) top = fmaxf(top, fmaxf(S[i], S[i + 1]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        const float m_new = fmaxf(m[r], top * factor), shift = m_new == -INFINITY ? 0.0f : m_new;
        rescale[r] = exp2_approx(m[r] - shift);
        m[r] = m_new;
        float sum = 0.0f;
#pragma unroll
        for (int i = 2 * r; i < B_c / 2; i += i % 2 ? 3 : 1) {
          const float P = exp2_approx(fmaf(S[i], factor, -shift));
          sum += P;
          S[i] = P * P_FACTOR;  // not in the exponent: 15 + x has lost four bits of x
        }
        l[r] = fmaf(l[r], rescale[r], sum);
      }
#pragma unroll
      for (int i = 0; i < B_c / 4; ++i) split2(S[2 * i], S[2 * i + 1], P_hi[i], P_lo[i]);
    };
    const auto add_PV = [&](float v_factor) {
#pragma unroll
      for (int i = 0; i < D / 2; ++i) O[i] = fmaf(O[i], rescale[i / 2 % 2], v_factor * PV[i]);
    };

    // The warpgroups take turns on the tensor cores, warpgroup 0 first: barrier 3 is its turn, 4 that of warpgroup 1. Both
    // have the same number of turns, and are told of each but the very first.
    const int turns = tiles_of(1);
    const auto wait_for_turn = [&](int j) {
      if (w == 1 || j > 0) barrier_sync(3 + w, 256);
    };
    const auto end_turn = [&](int j) {
      if (w == 0 || j + 1 < turns) barrier_arrive(4 - w, 256);
    };

    if (n > 0) {
      int k_stage = start_S();
      wgmma_wait<0>();
      keep_here(S);
      const float k_factor = factors[k_stage].x;
      release(k_stage);
      softmax(0, k_factor);
      for (int j = 0; j + 1 < n; ++j) {
        const int v_stage = next_stage();
        wait_for_turn(j);
        keep_here(P_hi);
        keep_here(P_lo);
        issue_PV<D, B_c>(PV, P_hi, P_lo, wgmma_descriptor(shared + v_stage * TILE_BYTES, B_c * 128));
        k_stage = start_S();
        end_turn(j);
        wgmma_wait<1>();
        keep_here(PV);
        const float v_factor = factors[v_stage].x;
        release(v_stage);
        add_PV(v_factor);
        wgmma_wait<0>();
        keep_here(S);
        const float k_factor = factors[k_stage].x;
        release(k_stage);
        softmax(j + 1, k_factor);
      }
      const int v_stage = next_stage();
      wait_for_turn(n - 1);
      keep_here(P_hi);
      keep_here(P_lo);
      issue_PV<D, B_c>(PV, P_hi, P_lo, wgmma_descriptor(shared + v_stage * TILE_BYTES, B_c * 128));
      end_turn(n - 1);
      wgmma_wait<0>();
      keep_here(PV);
      add_PV(factors[v_stage].x);
    }
    if (n < turns) {  // warpgroup 0 sees a tile less, and passes
      wait_for_turn(n);
      end_turn(n);
    }

    float* out = a.out_head<float>(b, head);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      l[r] += __shfl_xor_sync(~0u, l[r], 1);
      l[r] += __shfl_xor_sync(~0u, l[r], 2);
      const float inverse = l[r] == 0.0f ? 0.0f : 1.0f / l[r];
      if (row + 8 * r >= a.q_len) continue;
      float* to = out + (row + 8 * r) * a.out_strides.row + column;
#pragma unroll
      for (int i = 0; i < D / 8; ++i)
        *reinterpret_cast<float2*>(to + 8 * i) = make_float2(O[4 * i + 2 * r] * inverse, O[4 * i + 2 * r + 1] * inverse);
    }
  }
}

template <int D>
static cudaError_t launch(const Attention& a, cudaStream_t stream) {
  const int tiles = ceil_div(a.kv_len, Tile<D>::B_c);
  const int64_t records = int64_t(a.batch) * a.kv_heads * tiles * 2;
  const int64_t blocks = int64_t(a.batch) * a.heads * ceil_div(a.q_len, B_r);
  if (records > INT32_MAX || blocks > INT32_MAX) return cudaErrorInvalidValue;
  const cudaError_t error =
      cudaFuncSetAttribute(attention_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile<D>::BYTES);
  if (error != cudaSuccess) return error;
  split_kernel<D><<<records, SPLIT_THREADS, 0, stream>>>(a, tiles);
  attention_kernel<D><<<blocks, 384, Tile<D>::BYTES, stream>>>(a, tiles);
  return cudaGetLastError();
}

extern "C" cudaError_t attention(const void* q, const void* k, const void* v, void* out, void* workspace, int batch,
                                 int heads, int kv_heads, int q_len, int kv_len, int head_dim, Strides q_strides,
                                 Strides k_strides, Strides v_strides, Strides out_strides, float scale, int causal,
                                 int dtype, cudaStream_t stream) {
  const Attention a = {q, k, v, out, workspace, batch, heads, kv_heads, q_len, kv_len,
                       q_strides, k_strides, v_strides, out_strides, scale, causal != 0};
  if (dtype != FLOAT32 || workspace == nullptr) return cudaErrorInvalidValue;
  if (reinterpret_cast<uintptr_t>(out) % 8 || (out_strides.batch | out_strides.row | out_strides.head) % 2)
    return cudaErrorMisalignedAddress;  // O is written as float2
  if (head_dim == 64) return launch<64>(a, stream);
  if (head_dim == 128) return launch<128>(a, stream);
  return cudaErrorInvalidValue;
}
