// Weights as a stream: two warps of a block have them brought to shared memory, stage after stage, for eight warps that
// multiply. Hopper and later.
#pragma once
#include <cuda_runtime.h>

#ifndef __CUDACC__
#include <chrono>
#endif

#include "../../task4/ladder/hopper.cuh"
#include "launch.cuh"
#include "product.cuh"

// One warp issues a copy in 30 ns: of 1 KiB, two of them ask for more than the memory has.
constexpr int WARPS = 8, LOADERS = 2, COMPUTE = 32 * WARPS, THREADS = COMPUTE + 32 * LOADERS;
constexpr int UNIT = 8, MOST_UNITS = 4;          // rows of w of a unit; units of a stage at most
constexpr int BYTES = 1024, PITCH = BYTES + 64;  // of a piece of a row: lanes of a quarter-warp read different banks
constexpr int STAGE_PIECES = UNIT * MOST_UNITS;  // of a stage: of fewer rows it has more of each
constexpr int STEPS = BYTES / (64 * WARPS);      // of a piece: in each a warp has 64 bytes of a row
constexpr int MOST_STAGES = 20;
constexpr int STAGE_BYTES = STAGE_PIECES * BYTES;  // of weights

// Of w: those from `first` to `last`.
struct Units {
  int first, last;
};
// Each block's are neighbours, at most one more than another one's.
DEVICE Units own_units(int units) {
  const int block = blockIdx.x, blocks = gridDim.x;
  return {units * block / blocks, units * (block + 1) / blocks};
}

struct Product : Arguments {
  int units, per_stage, pieces;  // of w; of a stage; of a row in a stage
  Units own;                     // the block's
  unsigned tag;                  // of x, where it has tags

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
    per_stage = ceil_div(of_a_block, ceil_div(of_a_block, most)), pieces = MOST_UNITS / per_stage;
  }
};

template <int X_ROWS>
struct Shared {
  uint64_t full[MOST_STAGES], empty[MOST_STAGES];
  // Of the warps: a pass's sums, while the pass before is finished.
  using Sums = float[WARPS][X_ROWS][MOST_UNITS * UNIT + 1];
  Sums sums[2];
  Moments moments[WARPS][X_ROWS];
  alignas(1024) uint8_t stages[];  // as TMA needs it
};

// Where a warp is in the ring of stages.
struct Stage {
  int stages, bytes;  // how many; of one
  int in_flight;      // so many are on their way at a time: x and the counters would queue behind more
  int index = 0, parity = 0;

  DEVICE uint8_t* at(uint8_t* first) const { return first + index * bytes; }
  DEVICE void next() {
    if (++index == stages) index = 0, parity ^= 1;
  }
};

#ifdef __CUDACC__
// As mbarrier_wait, but for a limited time: whether the phase is over.
DEVICE bool mbarrier_try_wait(uint64_t* barrier, int parity) {
  constexpr int NANOSECONDS = 500;
  int over;
  asm volatile(
      "{\n.reg .pred over;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2, %3;\n"
      "selp.s32 %0, 1, 0, over;\n}" : "=r"(over) : "r"(shared_address(barrier)), "r"(parity), "r"(NANOSECONDS)
      : "memory");
  return over;
}
DEVICE void prefetch_to_L2(const void* from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
DEVICE int64_t cycles() { return clock64(); }
#else
DEVICE bool mbarrier_try_wait(uint64_t* barrier, int parity) {
  mbarrier_wait(barrier, parity);
  return true;
}
DEVICE void prefetch_to_L2(const void*, int) {}
DEVICE int64_t cycles() { return std::chrono::steady_clock::now().time_since_epoch().count(); }
#endif

// One lane: what was asked for `in_flight` stages ago has come.
template <int X_ROWS>
DEVICE void wait_for_earlier(Shared<X_ROWS>& mem, const Stage& stage) {
  const int before = stage.index - stage.in_flight, i = before < 0 ? before + stage.stages : before;
  mbarrier_wait(&mem.full[i], before < 0 ? stage.parity ^ 1 : stage.parity);
}
// One lane: the stage may be loaded.
template <int X_ROWS>
DEVICE void wait_until_free(Shared<X_ROWS>& mem, const Stage& stage) {
  wait_for_earlier(mem, stage);
  mbarrier_wait(&mem.empty[stage.index], stage.parity ^ 1);
}

template <int X_ROWS>
DEVICE void start(Shared<X_ROWS>& mem, int stages, int bytes) {
  if (threadIdx.x == 0) {
    may_be_anything(mem.stages, stages * bytes);  // where there are no rows of w, whose sums are no part of out
    for (int i = 0; i < stages; ++i) mbarrier_init(&mem.full[i], LOADERS), mbarrier_init(&mem.empty[i], WARPS);
    mbarrier_init_fence();
  }
  __syncthreads();  // barriers initialised before any thread uses them
}

// As bulk_load, of what nobody reads again before much else has come: x, results and counters stay in L2.
DEVICE void bulk_load_once(void* to, const void* from, int bytes, uint64_t* barrier) {
#ifdef __CUDACC__
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(EVICT_FIRST)
      : "memory");
#else
  bulk_load(to, from, bytes, barrier);
#endif
}

// A lane's piece of each stage of a block's units, one stage after the other.
template <typename T>
struct WeightPiece {
  static constexpr int CHUNK = BYTES / sizeof(T);
  const Product* p;
  int unit, last, row, of_row, place;  // of_row, place: which piece of its row, and of the stage
  int first = 0;                       // column of the stage
  const T* from;                       // the row
  bool has;

  DEVICE WeightPiece(const Product& p) : p(&p), unit(p.own.first), last(p.own.last) {
    const int rows = p.per_stage * UNIT, each = rows * p.pieces / LOADERS, lane = threadIdx.x % 32;
    place = threadIdx.x / 32 % LOADERS * each + lane;
    row = lane < each ? place % rows : -1, of_row = place / rows;
    find_row();
  }
  DEVICE void find_row() {
    const int own = unit + row / UNIT;
    has = row >= 0 && own < last && p->has_row(own, row % UNIT);
    from = static_cast<const T*>(p->w) + p->row_of(own, row % UNIT) * p->w_stride;
  }
  DEVICE bool any() const { return unit < last; }  // of this stage; the same for all lanes
  DEVICE void next() {
    if ((first += p->pieces * CHUNK) < p->K) return;
    first = 0, unit += p->per_stage;
    find_row();
  }
  DEVICE int k() const { return first + of_row * CHUNK; }
  DEVICE const T* source() const { return from + k(); }
  DEVICE int bytes() const { return has ? max(0, min(CHUNK, p->K - k())) * int(sizeof(T)) : 0; }
};

// What L2 may have of a product before there is room for it in the ring.
struct Ahead {
  int stages = 0;
  int pace = 0;  // cycles in which the memory delivers a stage of all blocks
};

// While the ring is full, the memory is idle: stages are brought to L2 at its pace, and as many more while those come
// from L2 to the ring.
template <typename T, int X_ROWS>
DEVICE void load_weights(const Product& p, Shared<X_ROWS>& mem, Stage& stage, Ahead most = {}) {
  WeightPiece<T> piece(p), later = piece;  // later: what L2 is asked for next
  int ahead = 0;                     // stages, from the one to the other
  int64_t due = 0;                   // cycles, when the memory may be asked again
  const bool leads = threadIdx.x % 32 == 0;
  const auto fetch_ahead = [&] {
    if (ahead >= most.stages || !later.any() || !__shfl_sync(~0u, cycles() >= due, 0)) return;
    if (const int bytes = later.bytes()) prefetch_to_L2(later.source(), bytes);
    later.next(), ++ahead, due = cycles() + most.pace;
  };
  for (; piece.any(); piece.next()) {
    const int bytes = piece.bytes(), all = __reduce_add_sync(~0u, bytes);
    if (leads) wait_for_earlier(mem, stage);
    const int parity = stage.parity ^ 1;
    if (most.stages > 0) {
      while (!__shfl_sync(~0u, leads && mbarrier_try_wait(&mem.empty[stage.index], parity), 0)) fetch_ahead();
    }
    if (leads) {
      mbarrier_wait(&mem.empty[stage.index], parity);
      mbarrier_arrive_expect(&mem.full[stage.index], all);
    }
    __syncwarp();
    if (bytes > 0)
      bulk_load_once(stage.at(mem.stages) + piece.place * PITCH, piece.source(), bytes, &mem.full[stage.index]);
    stage.next();
    if (most.stages == 0) continue;
    if (ahead > 0) {
      --ahead;
      fetch_ahead();
    } else {
      later.next(), due = cycles() + most.pace;
    }
  }
}
