// A product of few rows whose weights are a stream: each block has some rows of w. Hopper and later.
#pragma once
#include <cuda_runtime.h>

#include "sums.cuh"
#include "weights.cuh"
#include "x.cuh"

DEVICE void meet() { barrier_sync(1, COMPUTE); }  // of the warps that compute

// Which value of out a thread finishes, of some units: the i-th.
struct Place {
  int row, column, n;  // column: of these units
  bool any;

  DEVICE Place(const Product& p, int i, int unit, int units) {
    row = i / (units * UNIT), column = i - row * units * UNIT;
    n = p.column(unit + column / UNIT, column % UNIT);
    any = row < p.rows && n < p.rows_of_w() && column / UNIT % p.together() == 0;
  }
};

// The block's units of a product, some in each pass. Made before x is there: what does not depend on it is found and
// loaded. MOST_PIECES: of a row in a stage; X_PIECES: of x, that there is room for; ARRIVAL: of x, and if by tag, the
// residual is words too.
template <typename T, int X_ROWS, typename Math, int MOST_PIECES, int X_PIECES, Arrival ARRIVAL = Arrival::FENCED>
struct Share {
  using Lanes = typename Math::Lanes;
  static constexpr bool TAGGED = ARRIVAL == Arrival::BY_TAG;
  static_assert(MOST_PIECES == 1 || (MOST_PIECES == MOST_UNITS && Math::UNITS == MOST_UNITS), "in a stage");
  static constexpr int CHUNK = BYTES / sizeof(T);
  const Product& p;
  Shared<X_ROWS>& mem;
  Stage& stage;
  int first = p.own.first, last = p.own.last, pass = 0;  // units
  Place place = Place(p, thread(), first, max(1, units(first)));
  Beside<T> beside = {};
  std::conditional_t<TAGGED, XWords<T, X_PIECES>, XCopies<T, X_ROWS, X_PIECES, Lanes, ARRIVAL == Arrival::BY_VALUE>> x;

  DEVICE Share(const Product& p, Shared<X_ROWS>& mem, XMemory<X_ROWS, X_PIECES>& x_memory, Stage& stage)
      : p(p), mem(mem), stage(stage), x(p, x_memory, ceil_div(last - first, p.per_stage)) {
    if (place.any) beside = load_beside<T, TAGGED>(p, place.row, place.n);
  }
  DEVICE int units(int unit) const { return min(p.per_stage, last - unit); }
  // A few warps finish a pass, in turn, while the others are at the next one.
  DEVICE int thread() const { return (threadIdx.x - pass * 32) % COMPUTE; }
  DEVICE void find_place(int i, int unit) {
    place = Place(p, i, unit, units(unit));
    if (place.any) beside = load_beside<T, TAGGED>(p, place.row, place.n);  // on its way while sums are formed
  }

  // complete(row, column, sum) has the sum over k of which the row of w has all or a part; use(row, column, value) puts
  // the value of out.
  template <typename Complete, typename Use>
  DEVICE void compute(Complete complete, Use use) {
    Math math;
    x.start(p);
    for (int unit = first; unit < last; unit += p.per_stage, ++pass) {
      if (pass > 0) find_place(thread(), unit);
      math.start();
      if (MOST_PIECES == 1 || p.pieces == 1) {
        multiply<1>(math, units(unit));
      } else if (p.pieces == 2) {
        multiply<(MOST_PIECES > 2 ? 2 : MOST_PIECES)>(math, units(unit));
      } else {
        multiply<MOST_PIECES>(math, units(unit));
      }
      math.put(mem.sums[pass % 2][threadIdx.x / 32]);
      if (p.norm && pass == 0) x.put(mem.moments[threadIdx.x / 32]);
      meet();  // the sums complete, and those of the pass before consumed
      finish(unit, complete, use);
    }
  }

  // All stages of some units. Of a stage's rows the first ones are the units' first pieces, then come the second ones:
  // each piece is summed as units of its own.
  template <int PIECES>
  DEVICE void multiply(Math& math, int units) {
    constexpr int EACH = Math::UNITS / PIECES;  // units
    const int of_warp = threadIdx.x / 32 * (UNIT * 128);
#pragma unroll 1
    for (int chunk = 0; chunk < p.K; chunk += PIECES * CHUNK) {
      mbarrier_wait(&mem.full[stage.index], stage.parity);
      const uint8_t* from = stage.at(mem.stages) + of_warp;
      uint4 w[STEPS][Math::UNITS];
#pragma unroll
      for (int i = 0; i < STEPS; ++i) {
        const int r = Lanes::row(i), vector = Lanes::vector(i) ^ r;  // TMA swizzles rows of 128 bytes
#pragma unroll
        for (int u = 0; u < Math::UNITS; ++u) {
          w[i][u] = {};
          if (u % EACH < units && chunk + u / EACH * CHUNK < p.K)
            w[i][u] = *reinterpret_cast<const uint4*>(from + r * 128 + vector * 16 + u * BOX);
        }
      }
      __syncwarp();
      if (threadIdx.x % 32 == 0) mbarrier_arrive(&mem.empty[stage.index]);
      stage.next();
      add<0, EACH>(math, w);
      if constexpr (PIECES > 1) {
        if (chunk + CHUNK < p.K) add<EACH, 2 * EACH>(math, w);
      }
      if constexpr (PIECES > 2) {
        if (chunk + 2 * CHUNK < p.K) add<2, 3>(math, w);
        if (chunk + 3 * CHUNK < p.K) add<3, 4>(math, w);
      }
    }
#pragma unroll
    for (int u = EACH; u < PIECES * EACH; ++u) math.move(u, u % EACH);
  }
  template <int FIRST, int LAST>
  DEVICE void add(Math& math, const uint4 (&w)[STEPS][Math::UNITS]) {
    math.template add<FIRST, LAST>(x.next(p), w);
    if (decltype(x)::EACH_PIECE || FIRST == 0) x.scale_next(p);
  }

  // The warps' sums of some units become columns of out.
  template <typename Complete, typename Use>
  DEVICE void finish(int unit, Complete complete, Use use) {
    for (int i = thread(); i < units(unit) * UNIT * p.rows; i += COMPUTE) {
      if (i >= COMPUTE) find_place(i, unit);
      if (!place.any) continue;
      float sum = 0.0f, up = 0.0f;
      Moments moments = {};
#pragma unroll
      for (int warp = 0; warp < WARPS; ++warp) {
        const auto& of_row = mem.sums[pass % 2][warp][place.row];
        sum += of_row[place.column];
        if (p.activation == SWIGLU) up += of_row[place.column + UNIT];
        if (p.norm) moments.add(mem.moments[warp][place.row]);
      }
      sum = complete(place.row, place.n, sum);
      use(place.row, place.n, finished<T>(p, sum, up, moments, beside));
    }
  }
};
