// Weights as a stream: one thread of a block has them brought to shared memory, stage after stage, for eight warps that
// multiply. Hopper and later.
#pragma once
#include <cuda_runtime.h>

#ifndef __CUDACC__
#include <chrono>
#endif

#include "../../task4/ladder/hopper.cuh"
#include "../../task5/ladder/tensor_map.cuh"
#include "launch.cuh"
#include "product.cuh"

constexpr int WARPS = 8, COMPUTE = 32 * WARPS, THREADS = COMPUTE + 32;  // the last warp's first thread loads
constexpr int UNIT = 8, MOST_UNITS = 4;  // rows of w of a unit; units of a stage at most
constexpr int BYTES = 1024;              // of a piece of a row
constexpr int BOX = UNIT * BYTES;        // of the pieces of a unit, which TMA copies together: [BYTES / 128][UNIT][128]
constexpr int STEPS = BYTES / (64 * WARPS);  // of a piece: in each a lane has 16 bytes of every unit
constexpr int MOST_STAGES = 20;
constexpr int STAGE_BYTES = MOST_UNITS * BOX;  // of fewer rows a stage has more pieces of each

// Of w: those from `first` to `last`.
struct Units {
  int first, last;
};
// With SwiGLU units are gate's and up's in turn: two of them belong together.
__host__ DEVICE int units_together(int activation) { return activation == SWIGLU ? 2 : 1; }
// Each block's are neighbours, at most one more than another one's, or as many as belong together.
DEVICE Units own_units(int units, int together) {
  const int block = blockIdx.x, blocks = gridDim.x, groups = units / together;
  return {groups * block / blocks * together, groups * (block + 1) / blocks * together};
}

struct Product : Arguments {
  const CUtensorMap* map;        // of w, in boxes of a unit's pieces
  int units, per_stage, pieces;  // of w; of a stage; of a row in a stage
  Units own;                     // the block's
  unsigned tag;                  // of x, where it has tags

  __host__ __device__ int together() const { return units_together(activation); }
  __host__ __device__ int rows_of_w() const { return N / together(); }  // of gate, and of up
  DEVICE int column(int unit, int r) const { return UNIT * (unit / together()) + r; }  // of out
  DEVICE int first_row(int unit) const { return column(unit, 0) + unit % together() * rows_of_w(); }

  // So many units are a stage that each block of so many has equally large ones.
  __host__ __device__ void share(int blocks, int most) {
    const int groups = ceil_div(rows_of_w(), UNIT), of_a_block = ceil_div(groups, blocks);
    units = groups * together();
    per_stage = ceil_div(of_a_block, ceil_div(of_a_block, most / together())) * together();
    pieces = MOST_UNITS / per_stage;
  }
};

// The map of a matrix of N rows whose length is a multiple of 128 bytes.
template <typename T>
inline cudaError_t make_weights_map(CUtensorMap* map, const void* w, int64_t stride, int N, int K) {
  constexpr cuuint32_t WIDTH = 128 / sizeof(T);
  const cuuint64_t sizes[5] = {WIDTH, cuuint64_t(N), cuuint64_t(K) / WIDTH, 1, 1};
  const cuuint64_t pitches[4] = {pitch_of<T>(stride, N), 128, 16, 16};
  return make_box_map<T>(map, w, sizes, pitches, {WIDTH, UNIT, BYTES / 128, 1, 1});
}

template <int X_ROWS>
struct Shared {
  uint64_t full[MOST_STAGES], empty[MOST_STAGES];
  int phase;  // that the block's warps are at, of a kernel with several: by atomics, as what loads looks at any time
  // Of the warps: a pass's sums, while the pass before is finished.
  using Sums = float[WARPS][X_ROWS][MOST_UNITS * UNIT + 1];
  Sums sums[2];
  Moments moments[WARPS][X_ROWS];
  alignas(1024) uint8_t stages[];  // as TMA needs it
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

// What others change at some time or other.
template <typename T>
DEVICE T peek(const T* at) {
#ifdef __CUDACC__
  return *static_cast<const volatile T*>(at);
#else
  return __atomic_load_n(at, __ATOMIC_RELAXED);
#endif
}

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
DEVICE int64_t cycles() { return clock64(); }
// Of a map in device memory, before a block uses it.
DEVICE void acquire_map(const CUtensorMap* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}
#else
DEVICE void acquire_map(const CUtensorMap*) {}
DEVICE bool mbarrier_try_wait(uint64_t* barrier, int parity) {
  mbarrier_wait(barrier, parity);
  return true;
}
DEVICE int64_t cycles() { return std::chrono::steady_clock::now().time_since_epoch().count(); }
#endif

// Blocks do not get what they need at the same time, and those that have theirs go on to the next phase's. That waits:
// so few stages of a later phase may be on their way at a time, but the whole ring of the warps' own, for all blocks
// wait for the last one.
template <int X_ROWS>
DEVICE int in_flight(Shared<X_ROWS>& mem, const Stage& stage, int phase, int of_later_ones) {
  return atomicOr(&mem.phase, 0) < phase ? of_later_ones : stage.stages;
}
// What was asked for `in_flight` stages ago has come.
template <int X_ROWS>
DEVICE void wait_for_earlier(Shared<X_ROWS>& mem, const Stage& stage, int in_flight) {
  const int before = stage.index - in_flight, i = before < 0 ? before + stage.stages : before;
  mbarrier_wait(&mem.full[i], before < 0 ? stage.parity ^ 1 : stage.parity);
}
// The stage may be loaded.
template <int X_ROWS>
DEVICE void wait_until_free(Shared<X_ROWS>& mem, const Stage& stage, int in_flight) {
  wait_for_earlier(mem, stage, in_flight);
  mbarrier_wait(&mem.empty[stage.index], stage.parity ^ 1);
}

template <int X_ROWS>
DEVICE void start(Shared<X_ROWS>& mem, int stages) {
  if (threadIdx.x == 0) {
    mem.phase = 0;
    for (int i = 0; i < stages; ++i) mbarrier_init(&mem.full[i], 1), mbarrier_init(&mem.empty[i], WARPS);
    mbarrier_init_fence();
  }
  __syncthreads();  // barriers initialised before any thread uses them
}

// A block's boxes of a product, one stage after the other.
struct Boxes {
  static constexpr int PARTS = BYTES / 128;
  const Product& p;
  int pieces;  // of a row
  int unit, piece = 0;

  DEVICE Boxes(const Product& p, int chunk) : p(p), pieces(ceil_div(p.K, chunk)), unit(p.own.first) {}
  DEVICE bool any() const { return unit < p.own.last; }
  DEVICE void next() {
    if ((piece += p.pieces) >= pieces) piece = 0, unit += p.per_stage;
  }
  // use(box, row, part) of the stage's boxes: of all units the first piece, then the next one. How many there are.
  template <typename Use>
  DEVICE int of_stage(Use use) const {
    const int units = min(p.per_stage, p.own.last - unit), each = min(p.pieces, pieces - piece);
    for (int i = 0; i < each; ++i) {
      for (int u = 0; u < units; ++u) use(i * p.per_stage + u, p.first_row(unit + u), (piece + i) * PARTS);
    }
    return units * each;
  }
  DEVICE int count() const {
    return of_stage([](int, int, int) {});
  }
};

// What may be asked for of a product before its phase.
struct Ahead {
  int phase = 0;      // the product's
  int in_flight = 0;  // stages that are on their way at a time
  int in_L2 = 0;      // stages that there is no room for in the ring yet
  int pace = 0;       // cycles in which the memory delivers a stage of all blocks
};

// One thread. While the ring is full, the memory is idle: stages are brought to L2 at its pace, and as many more while
// those come from L2 to the ring.
template <typename T, int X_ROWS>
DEVICE void load_weights(const Product& p, Shared<X_ROWS>& mem, Stage& stage, Ahead most = {}) {
  Boxes boxes(p, BYTES / sizeof(T)), later = boxes;  // later: what L2 is asked for next
  int ahead = 0;    // stages, from the one to the other
  int64_t due = 0;  // cycles, when the memory may be asked again
  const auto fetch_ahead = [&] {
    if (ahead >= most.in_L2 || !later.any() || cycles() < due) return;
    later.of_stage([&](int, int row, int part) { tma_prefetch_box(p.map, row, part, 0, 0); });
    later.next(), ++ahead, due = cycles() + most.pace;
  };
  for (; boxes.any(); boxes.next()) {
    wait_for_earlier(mem, stage, in_flight(mem, stage, most.phase, most.in_flight));
    const int parity = stage.parity ^ 1;
    if (most.in_L2 > 0) {
      while (!mbarrier_try_wait(&mem.empty[stage.index], parity)) fetch_ahead();
    }
    mbarrier_wait(&mem.empty[stage.index], parity);
    uint64_t* full = &mem.full[stage.index];
    mbarrier_arrive_expect(full, boxes.count() * BOX);
    uint8_t* to = stage.at(mem.stages);
    boxes.of_stage([&](int i, int row, int part) { load_box_once(to + i * BOX, p.map, full, row, part, 0, 0); });
    stage.next();
    if (most.in_L2 == 0) continue;
    if (ahead > 0) {
      --ahead;
      fetch_ahead();
    } else {
      later.next(), due = cycles() + most.pace;
    }
  }
}
