// A product of few rows whose weights are a stream: two warps of a block have them brought to shared memory, stage
// after stage, and eight warps multiply. Hopper and later.
#pragma once
#include <cuda_runtime.h>

#include "../../task4/ladder/hopper.cuh"
#include "dtype.cuh"
#include "launch.cuh"
#include "product.cuh"
#include "ptx.cuh"

// One warp issues a copy in 30 ns: of 1 KiB, two of them ask for more than the memory has.
constexpr int WARPS = 8, LOADERS = 2, COMPUTE = 32 * WARPS, THREADS = COMPUTE + 32 * LOADERS;
constexpr int UNIT = 8, MOST_UNITS = 4;          // rows of w of a unit; units of a stage at most
constexpr int BYTES = 1024, PITCH = BYTES + 64;  // of a row in a stage: lanes of a quarter-warp read different banks
constexpr int ROWS = UNIT * MOST_UNITS / LOADERS;  // of a stage, of a warp that loads
constexpr int STEPS = BYTES / (64 * WARPS);        // of a stage: in each a warp has 64 bytes of a row
constexpr int MOST_STAGES = 20;

struct Product : Arguments {
  int units, per_stage;  // of w; of a stage

  // With SwiGLU the first four rows of a unit are gate's, the others up's.
  DEVICE int row_of(int unit, int r) const {
    return activation == SWIGLU ? 4 * unit + r % 4 + (r < 4 ? 0 : N / 2) : UNIT * unit + r;
  }
  DEVICE bool has_row(int unit, int r) const {
    return activation == SWIGLU ? 4 * unit + r % 4 < N / 2 : UNIT * unit + r < N;
  }
  // So many units are a stage that each block of so many has equally large ones.
  __host__ __device__ void share(int blocks, int most) {
    units = ceil_div(N, UNIT);
    const int of_a_block = ceil_div(units, blocks);
    per_stage = ceil_div(of_a_block, ceil_div(of_a_block, most));
  }
  DEVICE int first_unit(int block) const { return int64_t(units) * block / gridDim.x; }
};

template <int X_ROWS>
struct Shared {
  uint64_t full[MOST_STAGES], empty[MOST_STAGES];
  struct Sums {  // of the warps
    float part[WARPS][X_ROWS][MOST_UNITS * UNIT + 1];
    Moments moments[WARPS][X_ROWS];
  } sums[2];  // a pass's, while the pass before is finished
  alignas(128) uint8_t stages[];
};

// Where a warp is in the ring of stages.
struct Stage {
  int stages, bytes;  // how many; of one
  int index = 0, parity = 0;

  DEVICE uint8_t* at(uint8_t* first) const { return first + index * bytes; }
  DEVICE void next() {
    if (++index == stages) index = 0, parity ^= 1;
  }
};

template <int X_ROWS>
DEVICE void start(Shared<X_ROWS>& mem, int stages) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < stages; ++i) mbarrier_init(&mem.full[i], LOADERS), mbarrier_init(&mem.empty[i], WARPS);
    mbarrier_init_fence();
  }
  __syncthreads();  // barriers initialised before any thread uses them
}

// ---- The warps that load

DEVICE void copy_row(void* to, const void* from, int bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

template <typename T, int X_ROWS>
DEVICE void load_weights(const Product& p, Shared<X_ROWS>& mem, Stage& stage) {
  constexpr int CHUNK = BYTES / sizeof(T);
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % LOADERS * ROWS + lane;
  const int last = p.first_unit(blockIdx.x + 1);
  for (int unit = p.first_unit(blockIdx.x); unit < last; unit += p.per_stage) {
    const int own = unit + row / UNIT;
    const bool loads = lane < ROWS && row / UNIT < min(p.per_stage, last - unit) && p.has_row(own, row % UNIT);
    const int number = __popc(__ballot_sync(~0u, loads));
    const T* from = static_cast<const T*>(p.w) + p.row_of(own, row % UNIT) * p.w_stride;
    for (int k = 0; k < p.K; k += CHUNK) {
      const int bytes = min(CHUNK, p.K - k) * int(sizeof(T));
      if (lane == 0) {
        mbarrier_wait(&mem.empty[stage.index], stage.parity ^ 1);
        mbarrier_arrive_expect(&mem.full[stage.index], number * bytes);
      }
      __syncwarp();
      if (loads) copy_row(stage.at(mem.stages) + row * PITCH, from + k, bytes, &mem.full[stage.index]);
      stage.next();
    }
  }
}

// ---- The warps that compute. Lane g = lane / 4, t = lane % 4 has row g of each unit, and in each step the 16 bytes
// from 16 (4 warp + t) on.

// In 16 bits: m16n8k16 with rows of x as the 16 rows and a unit as the 8 columns. A lane has 8 neighbours in k where a
// fragment has 2, and 2 that are 8 apart: the sum over k has no order, so both operands are taken in the same other
// one.
template <typename T, int X_ROWS>
struct TensorCores {
  static constexpr int UNITS = MOST_UNITS;
  static constexpr int AHEAD = STEPS;  // so many steps before they are needed, columns of x are on their way
  static constexpr int H = (X_ROWS + 7) / 8;
  struct X {
    uint4 x[H], by;
  };
  float sum[UNITS][4];
  Moments moments[H];

  DEVICE void start() {
#pragma unroll
    for (auto& of_unit : sum) of_unit[0] = of_unit[1] = of_unit[2] = of_unit[3] = 0.0f;
#pragma unroll
    for (Moments& of_row : moments) of_row = {};
  }
  DEVICE static X load_x(const Product& p, int k) {  // of this lane; zeros past the end
    const int g = threadIdx.x % 32 / 4;
    X found;
#pragma unroll
    for (int h = 0; h < H; ++h) {
      const T* from = static_cast<const T*>(p.x) + (8 * h + g) * p.x_stride + k;
      found.x[h] = k < p.K && 8 * h + g < p.rows ? *reinterpret_cast<const uint4*>(from) : uint4{};
    }
    found.by = p.norm && k < p.K ? *reinterpret_cast<const uint4*>(static_cast<const T*>(p.norm) + k) : uint4{};
    return found;
  }
  // w: this lane's 16 bytes of the first unit's row. What is past the end of k there is anything.
  DEVICE void add(const Product& p, const X& of_k, const uint8_t* w, int units, int k) {
    uint4 x[H];
#pragma unroll
    for (int h = 0; h < H; ++h) x[h] = of_k.x[h];
    if (p.norm) {
      const uint4& by = of_k.by;
#pragma unroll
      for (int h = 0; h < H; ++h) {
        moments[h].template add<T>(x[h]);
        x[h] = make_uint4(scaled<T>(x[h].x, by.x), scaled<T>(x[h].y, by.y), scaled<T>(x[h].z, by.z),
                          scaled<T>(x[h].w, by.w));
      }
    }
    const uint4 zero = {}, &a = x[0], &a_8 = H == 2 ? x[H - 1] : zero;
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      if (u >= units) break;
      const uint4 b = k < p.K ? *reinterpret_cast<const uint4*>(w + u * UNIT * PITCH) : zero;
      mma_m16n8k16<T>(sum[u], {a.x, a_8.x, a.y, a_8.y}, {b.x, b.y}, sum[u]);
      mma_m16n8k16<T>(sum[u], {a.z, a_8.z, a.w, a_8.w}, {b.z, b.w}, sum[u]);
    }
  }
  DEVICE void put(typename Shared<X_ROWS>::Sums& mem, int warp) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int h = 0; h < H; ++h) {
      moments[h].add_lanes(1), moments[h].add_lanes(2);
      if (8 * h + g >= X_ROWS) continue;
      if (t == 0) mem.moments[warp][8 * h + g] = moments[h];
#pragma unroll
      for (int u = 0; u < UNITS; ++u) {
#pragma unroll
        for (int i = 0; i < 2; ++i) mem.part[warp][8 * h + g][UNIT * u + 2 * t + i] = sum[u][2 * h + i];
      }
    }
  }
};

// In fp32, on CUDA cores: row g of each unit with all rows of x.
template <int X_ROWS, int STEPS_AHEAD>
struct CudaCores {
  static constexpr int AHEAD = X_ROWS <= 4 ? STEPS_AHEAD : 0;
  static constexpr int UNITS = AHEAD ? MOST_UNITS : 2;  // there are registers for no more
  struct X {
    float4 x[X_ROWS], by;
  };
  float sum[UNITS][X_ROWS];
  Moments moments[X_ROWS];

  DEVICE void start() {
#pragma unroll
    for (int row = 0; row < X_ROWS; ++row) {
      moments[row] = {};
#pragma unroll
      for (int u = 0; u < UNITS; ++u) sum[u][row] = 0.0f;
    }
  }
  DEVICE static X load_x(const Product& p, int k) {
    X found;
#pragma unroll
    for (int row = 0; row < X_ROWS; ++row) {
      const float* from = static_cast<const float*>(p.x) + row * p.x_stride + k;
      found.x[row] = k < p.K && row < p.rows ? *reinterpret_cast<const float4*>(from) : float4{};
    }
    found.by = p.norm && k < p.K ? *reinterpret_cast<const float4*>(static_cast<const float*>(p.norm) + k) : float4{};
    return found;
  }
  DEVICE void add(const Product& p, const X& of_k, const uint8_t* w, int units, int k) {
    if (k >= p.K) return;
    float4 x[X_ROWS];
#pragma unroll
    for (int row = 0; row < X_ROWS; ++row) x[row] = of_k.x[row];
    if (p.norm) {
      const float4& by = of_k.by;
#pragma unroll
      for (int row = 0; row < X_ROWS; ++row) {
        float4& b = x[row];
        moments[row].add(b);
        b.x *= by.x, b.y *= by.y, b.z *= by.z, b.w *= by.w;
      }
    }
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      if (u >= units) break;
      const float4 a = *reinterpret_cast<const float4*>(w + u * UNIT * PITCH);
#pragma unroll
      for (int row = 0; row < X_ROWS; ++row) {
        const float4& b = x[row];
        sum[u][row] = fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum[u][row]))));
      }
    }
  }
  DEVICE void put(typename Shared<X_ROWS>::Sums& mem, int warp) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int row = 0; row < X_ROWS; ++row) {
      moments[row].add_lanes(1), moments[row].add_lanes(2);  // the same in the lanes of all g
      if (threadIdx.x % 32 == 0) mem.moments[warp][row] = moments[row];
#pragma unroll
      for (int u = 0; u < UNITS; ++u) {
        float of_row = sum[u][row];
        of_row += __shfl_xor_sync(~0u, of_row, 1), of_row += __shfl_xor_sync(~0u, of_row, 2);
        if (t == 0) mem.part[warp][row][UNIT * u + g] = of_row;
      }
    }
  }
};

DEVICE void meet() { barrier_sync(1, COMPUTE); }  // of the warps that compute

// Which value of out a thread finishes, of some units: the i-th.
struct Place {
  int row, column, n;  // column: of these units

  DEVICE Place(const Product& p, int i, int unit, int units) {
    row = i / (units * UNIT), column = i - row * units * UNIT;
    n = p.row_of(unit + column / UNIT, column % UNIT);
    if (!p.has_row(unit + column / UNIT, column % UNIT) || (p.activation == SWIGLU && column % UNIT >= 4)) row = p.rows;
  }
  DEVICE bool any(const Product& p) const { return row < p.rows; }
};

// The warps' sums of some units become columns of out. use(row, column, value) sees them. `beside` is the first one's.
template <typename T, typename Sums, typename Use>
DEVICE void finish(const Product& p, const Sums& mem, int thread, int unit, int units, Beside beside, Use use) {
  for (int i = thread; i < units * UNIT * p.rows; i += COMPUTE) {
    const Place at(p, i, unit, units);
    if (!at.any(p)) continue;
    if (i != thread) beside = load_beside<T>(p, at.row, at.n);
    float sum = 0.0f, up = 0.0f;
    Moments moments = {};
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
      sum += mem.part[warp][at.row][at.column];
      if (p.activation == SWIGLU) up += mem.part[warp][at.row][at.column + 4];
      moments.add(mem.moments[warp][at.row]);
    }
    use(at.row, at.n, write<T>(p, at.row, at.n, sum, up, moments, beside));
  }
}

// The block's units of a product, some in each pass. A few warps finish a pass, in turn, while the others are at the
// next one.
template <typename T, int X_ROWS, typename Math, typename Use>
DEVICE void compute(const Product& p, Shared<X_ROWS>& mem, Stage& stage, Use use) {
  constexpr int CHUNK = BYTES / sizeof(T), STEP = CHUNK / STEPS, AHEAD = Math::AHEAD;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int k_0 = warp * (STEP / WARPS) + t * (16 / sizeof(T)), last = p.first_unit(blockIdx.x + 1);
  uint8_t* own = mem.stages + g * PITCH + k_0 * sizeof(T);
  Math math;
  typename Math::X next[AHEAD > 0 ? AHEAD : 1];
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) next[i] = Math::load_x(p, k_0 + i * STEP);
  int pass = 0;
  for (int unit = p.first_unit(blockIdx.x); unit < last; unit += p.per_stage, ++pass) {
    const int units = min(p.per_stage, last - unit);
    auto& sums = mem.sums[pass % 2];
    const int thread = (threadIdx.x - pass * 32) % COMPUTE;
    const Place own_place(p, thread, unit, units);
    Beside beside = {};
    if (own_place.any(p)) beside = load_beside<T>(p, own_place.row, own_place.n);  // on its way while sums are formed
    math.start();
#pragma unroll 1
    for (int chunk = 0; chunk < p.K; chunk += CHUNK) {
      mbarrier_wait(&mem.full[stage.index], stage.parity);
      const int chunk_after = chunk + CHUNK < p.K ? chunk + CHUNK : 0;  // 0: that of the next pass
#pragma unroll
      for (int i = 0; i < STEPS; ++i) {
        const int k = chunk + i * STEP + k_0, then = i + AHEAD;
        typename Math::X x;
        if constexpr (AHEAD > 0) {
          x = next[i % AHEAD];
          next[i % AHEAD] = Math::load_x(p, k_0 + (then < STEPS ? chunk : chunk_after) + then % STEPS * STEP);
        } else {
          x = Math::load_x(p, k);
        }
        math.add(p, x, stage.at(own) + i * STEP * sizeof(T), units, k);
      }
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&mem.empty[stage.index]);
      stage.next();
    }
    math.put(sums, warp);
    meet();  // the sums complete, and those of the pass before consumed
    finish<T>(p, sums, thread, unit, units, beside, use);
  }
}
