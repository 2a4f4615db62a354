// x @ w.T + bias in fp32, with fp32's accuracy, on tensor cores that multiply fp16.
// architectures: sm_90a cpu
//
//   x (M, K), w (N, K), bias (N), out (M, N)   fp32. x and out: rows of any stride
//   parts   (2, rows, K rounded up to 64) of fp16, and units (rows) of fp32: what rows_kernel makes of x and of w
//
// Scheme: H. Ootomo and R. Yokota, "Recovering single precision accuracy from Tensor Cores while surpassing the FP32
// theoretical peak performance", arXiv:2203.03341. A row of x or w is unit (hi + lo), with a power of two of its own
// (split.cuh). Both units are outside of the sum over K, so the scale of a row does not matter.
//
// Root mean square of the error, in units of 2^-24 of a typical out[m][n], for normally distributed values:
//   1.0                hi and lo keep 22 to 23 of 24 bits
//   0.7                lo lo' is left out
//   1.7 to 3           tensor cores truncate instead of rounding. Of 64 k, lo hi' and hi lo' are added first, while the
//                      sum is small; then four steps lose up to one last bit of it each
//   0.3 sqrt(K / 64)   the sums of 64 k are added to `left` and `right` in ordinary, rounded fp32 (their section 3.2)
// Together 3 to 4 for K = 4096. An fp32 product that rounds K times has 0.3 sqrt(K), which is 19. Sums of all K in the
// tensor cores would have 40 to 80. (common/tests/test_products.py computes these.)
//
//   grid   one block per SM, which computes one tile of 128 x 256 of out after another
//   block  a producer thread, and two consumer warpgroups of 64 rows. A step is 64 k and 128 columns, left or right: 12
//          wgmmas. The warpgroups take turns: while one's step runs, the other adds its sum, or stores a tile
//
// An infinity or a NaN reaches only its row or column of out, as in fp32. Infinity times a value of less than 2^-39 of
// its row's largest is NaN, not infinite: hi is 0.
#include <cuda_runtime.h>

#include "../../task4/ladder/hopper.cuh"
#include "../../task4/ladder/split.cuh"
#include "../../task4/ladder/warpgroup.cuh"
#include "launch.cuh"
#include "tensor.cuh"

constexpr int ROWS = 128, DEPTH = 64;  // of x or w, and of K, in a slot
constexpr int TILE_M = ROWS, TILE_N = 2 * ROWS;
constexpr int PART = ROWS * DEPTH * 2, SLOT = 2 * PART;  // bytes: hi, then lo
constexpr int SLOTS = 7;                                 // as many as fit
constexpr int GROUP = 16;  // tiles along M that are computed with the same columns at about the same time, out of L2

struct Product {
  const float *x_units, *w_units, *bias;  // bias: null if there is none
  float* out;
  int64_t out_stride;
  int M, N, steps;  // steps: of DEPTH along K
  bool pairs;       // out can be stored in pairs of columns

  __host__ __device__ int tiles() const { return ceil_div(M, TILE_M) * ceil_div(N, TILE_N); }
};

struct Shared {
  uint8_t slots[SLOTS][SLOT];  // of x, left of w, right of w, in turn. wgmma wants multiples of 1024
  // full: the slot's contents have arrived. empty: all its readers are done with it
  uint64_t full[SLOTS], empty[SLOTS];
};
static_assert(sizeof(Shared) <= 227 * 1024, "a block has at most 227 KiB of shared memory");

// ---- scheduler and producer

struct Tile {
  int row, column;  // of out, its first
};

// Group after group of GROUP rows of tiles; in a group, column after column.
DEVICE Tile tile_of(const Product& p, int number) {
  const int columns = ceil_div(p.N, TILE_N), first = number / (GROUP * columns) * GROUP, i = number - first * columns;
  const int rows = min(GROUP, ceil_div(p.M, TILE_M) - first);
  return {(first + i % rows) * TILE_M, i / rows * TILE_N};
}

// One thread loads all slots of all tiles. Past the last row they are zeros.
DEVICE void produce(const Product& p, Shared& s, const CUtensorMap& x_map, const CUtensorMap& w_map) {
  Ring<SLOTS> ring;
  const auto load = [&](const CUtensorMap& map, int row, int step) {
    uint64_t* full = &s.full[ring.index];
    uint8_t* slot = s.slots[ring.index];
    mbarrier_wait(&s.empty[ring.index], ring.parity ^ 1);
    mbarrier_arrive_expect(full, SLOT);
    for (int part = 0; part < 2; ++part) tma_load(slot + part * PART, &map, full, row, step, part);
    ring.next();
  };
  for (int i = blockIdx.x; i < p.tiles(); i += gridDim.x) {
    const Tile tile = tile_of(p, i);
    for (int step = 0; step < p.steps; ++step) {
      load(x_map, tile.row, step);
      load(w_map, tile.column, step);
      load(w_map, tile.column + ROWS, step);
    }
  }
}

// ---- consumers

constexpr int TURN = 1;  // named barriers, + w: the tensor cores are warpgroup w's

// By both units in turn, the smaller first: their product need not be a float.
DEVICE float scaled(float sum, float x_unit, float w_unit) {
  return sum * fminf(x_unit, w_unit) * fmaxf(x_unit, w_unit);
}

// Stores this thread's part of 64 rows and 128 columns, from (row, column) on, and sets sum to 0.
DEVICE void store(const Product& p, int row, int column, float (&sum)[ROWS / 2]) {
  row += threadIdx.x % WARPGROUP / 32 * 16 + threadIdx.x % 32 / 4;
  column += threadIdx.x % 4 * 2;
  const int left = p.N - column;  // so many columns from there on
  const float *w_units = p.w_units + column, *bias = p.bias + column;
  float *out[2], x_unit[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    out[r] = p.out + (row + 8 * r) * p.out_stride + column;
    x_unit[r] = __ldg(p.x_units + min(row + 8 * r, p.M - 1));
  }
#pragma unroll
  for (int c = 0; c < ROWS; c += 8) {
    float w_unit[2] = {}, b[2] = {};
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (c + e < left) w_unit[e] = __ldg(w_units + c + e);
      if (c + e < left && p.bias) b[e] = __ldg(bias + c + e);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float x = scaled(sum[c / 2 + 2 * r], x_unit[r], w_unit[0]) + b[0];
      const float y = scaled(sum[c / 2 + 2 * r + 1], x_unit[r], w_unit[1]) + b[1];
      const bool inside = row + 8 * r < p.M;
      if (inside && c + 1 < left && p.pairs) *reinterpret_cast<float2*>(out[r] + c) = {x, y};
      if (inside && c < left && !p.pairs) out[r][c] = x;
      if (inside && c + 1 < left && !p.pairs) out[r][c + 1] = y;
    }
  }
  for (float& x : sum) x = 0.0f;
}

DEVICE void consume(const Product& p, Shared& s, int w) {
  Ring<SLOTS> ring;
  float left[ROWS / 2] = {}, right[ROWS / 2] = {}, sum[ROWS / 2];
  const auto take = [&]() -> int {  // the next slot, once its contents have arrived
    const int slot = ring.index;
    mbarrier_wait(&s.full[slot], ring.parity);
    ring.next();
    return slot;
  };
  const auto begin = [&](int x_slot, int w_slot) {  // sum = x w.T, over DEPTH
    const uint32_t x = wgmma_descriptor(s.slots[x_slot] + w * (PART / 2)), y = wgmma_descriptor(s.slots[w_slot]);
    barrier_sync(TURN + w, 2 * WARPGROUP);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < 12; ++n) {
      const int product = n / 4, k = n % 4 * 2;  // lo hi', hi lo', hi hi'
      Wgmma<__half, ROWS, 0>::run(sum, x + (product == 0 ? PART / 16 : 0) + k, y + (product == 1 ? PART / 16 : 0) + k,
                                  n > 0);
      if (n == 7) wgmma_commit();
    }
    wgmma_commit();
    wgmma_wait<1>();  // the other warpgroup's step follows when a third of this one is left
    barrier_arrive(TURN + 1 - w, 2 * WARPGROUP);
  };
  const auto finish = [&](float (&total)[ROWS / 2], int w_slot) {  // total += sum
    wgmma_wait<0>();
    keep_here(sum);
    arrive_as_warp(&s.empty[w_slot]);
#pragma unroll
    for (int i = 0; i < ROWS / 2; ++i) total[i] += sum[i];
    keep_here(total);  // added before the next step overwrites sum
  };
  if (w == 1) barrier_arrive(TURN, 2 * WARPGROUP);  // warpgroup 0 begins

  Tile before = {p.M, 0};  // whose right half is not stored yet: at first none, rows past the end
  for (int i = blockIdx.x; i < p.tiles(); i += gridDim.x) {
    const Tile tile = tile_of(p, i);
    for (int step = 0; step < p.steps; ++step) {
      const int x_slot = take(), left_slot = take();
      begin(x_slot, left_slot);
      if (step == 0) store(p, before.row + w * 64, before.column + ROWS, right);
      finish(left, left_slot);
      const int right_slot = take();
      begin(x_slot, right_slot);
      if (step == p.steps - 1) store(p, tile.row + w * 64, tile.column, left);
      finish(right, right_slot);
      arrive_as_warp(&s.empty[x_slot]);
    }
    before = tile;
  }
  store(p, before.row + w * 64, before.column + ROWS, right);
}

__global__ void __launch_bounds__(3 * WARPGROUP, 1)
product_kernel(const __grid_constant__ Product p, const __grid_constant__ CUtensorMap x_map,
               const __grid_constant__ CUtensorMap w_map) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  Shared& s = *reinterpret_cast<Shared*>(bytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < SLOTS; ++i) mbarrier_init(&s.full[i], 1), mbarrier_init(&s.empty[i], 8);  // consumers' warps
    mbarrier_init_fence();
  }
  __syncthreads();  // the mbarriers are initialised
  const int w = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);  // the warpgroup; by the shuffle ptxas sees one value
  if (w == 2) {
    registers_give<24>();
    if (threadIdx.x == 2 * WARPGROUP) produce(p, s, x_map, w_map);
  } else {
    registers_take<240>();
    consume(p, s, w);
  }
}

// ---- hi and lo

// One block per row of x: its largest finite |x|, then the parts. aligned: rows are multiples of 16 bytes, K of 4.
__global__ void __launch_bounds__(SPLIT_THREADS) rows_kernel(const float* x, int64_t stride, int K, bool aligned,
                                                             uint8_t* parts, int64_t part_bytes, float* units) {
  x += blockIdx.x * stride;
  const auto load = [&](int k) -> float4 {
    if (aligned) return k < K ? *reinterpret_cast<const float4*>(x + k) : make_float4(0, 0, 0, 0);
    const auto at = [&](int i) { return i < K ? x[i] : 0.0f; };
    return {at(k), at(k + 1), at(k + 2), at(k + 3)};
  };
  float largest = 0;
#pragma unroll 4
  for (int k = 4 * threadIdx.x; k < K; k += 4 * SPLIT_THREADS) {
    const float4 y = load(k);
    for (const float z : {y.x, y.y, y.z, y.w})
      if (fabsf(z) < INFINITY) largest = fmaxf(largest, fabsf(z));
  }
  __shared__ uint32_t of_warp[SPLIT_THREADS / 32];
  largest = largest_of_block(largest, of_warp);

  const float factor = factor_for(largest);
  const int padded = ceil_div(K, DEPTH) * DEPTH;
  uint8_t* hi = parts + int64_t(blockIdx.x) * padded * 2;
#pragma unroll 4
  for (int k = 4 * threadIdx.x; k < padded; k += 4 * SPLIT_THREADS)
    store_split(hi + 2 * k, hi + part_bytes + 2 * k, load(k), factor);
  if (threadIdx.x == 0) units[blockIdx.x] = 1 / factor;
}

// ---- launchers

static cudaError_t split_rows(const float* x, int64_t stride, int rows, int K, const View& parts, const View& units,
                              cudaStream_t stream) {
  const bool aligned = reinterpret_cast<uintptr_t>(x) % 16 == 0 && stride % 4 == 0 && K % 4 == 0;
  rows_kernel<<<rows, SPLIT_THREADS, 0, stream>>>(x, stride, K, aligned, parts.as<uint8_t>(), parts.strides[0] * 2,
                                                  units.as<float>());
  return cudaGetLastError();
}

// parts in boxes of ROWS rows of DEPTH values: DEPTH of K is what make_tensor_map() calls a head, hi or lo a batch.
static cudaError_t map_of(CUtensorMap* map, const View& parts, int rows) {
  const Strides strides = {parts.strides[0], parts.strides[1], DEPTH};
  return make_tensor_map<__half>(map, parts.data, strides, 2, rows, parts.sizes[2] / DEPTH, DEPTH, ROWS);
}

// w (N, K) into w_parts (2, N, K rounded up) and w_units (N).
extern "C" cudaError_t split(View w, View w_parts, View w_units, cudaStream_t stream) {
  return split_rows(w.as<float>(), w.strides[0], w.sizes[0], w.sizes[1], w_parts, w_units, stream);
}

// x_parts (2, rows, K rounded up) and x_units (rows) are scratch: of x that many rows are multiplied at a time.
extern "C" cudaError_t product(View x, View w_parts, View w_units, const void* bias, View x_parts, View x_units,
                               View out, cudaStream_t stream) {
  const int M = x.sizes[0], N = w_parts.sizes[1], K = x.sizes[1], rows = x_parts.sizes[1];
  constexpr int bytes = sizeof(Shared);
  int sms;
  if (cudaError_t error = count_sms(&sms)) return error;
  if (cudaError_t error = allow_shared_memory<product_kernel, bytes>()) return error;
  CUtensorMap x_map, w_map;
  if (cudaError_t error = map_of(&w_map, w_parts, N)) return error;
  Product p = {x_units.as<float>(), w_units.as<float>(), static_cast<const float*>(bias)};
  p.N = N, p.steps = w_parts.sizes[2] / DEPTH, p.out_stride = out.strides[0];
  p.pairs = reinterpret_cast<uintptr_t>(out.data) % 8 == 0 && (out.strides[0] | N) % 2 == 0;
  for (int64_t row = 0; row < M; row += rows) {
    p.M = min(int64_t(rows), M - row), p.out = out.as<float>() + row * out.strides[0];
    if (cudaError_t error = split_rows(x.as<float>() + row * x.strides[0], x.strides[0], p.M, K, x_parts, x_units,
                                       stream))
      return error;
    if (cudaError_t error = map_of(&x_map, x_parts, p.M)) return error;
    product_kernel<<<min(sms, p.tiles()), 3 * WARPGROUP, bytes, stream>>>(p, x_map, w_map);
  }
  return cudaGetLastError();
}
