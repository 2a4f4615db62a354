// A product of few rows whose weights are a stream: two warps of a block have them brought to shared memory, stage
// after stage, and eight warps multiply. Hopper and later.
#pragma once
#include <cuda_runtime.h>

#ifndef __CUDACC__
#include <chrono>
#endif

#include "../../task4/ladder/hopper.cuh"
#include "dtype.cuh"
#include "launch.cuh"
#include "product.cuh"
#include "ptx.cuh"
#include "words.cuh"

// One warp issues a copy in 30 ns: of 1 KiB, two of them ask for more than the memory has.
constexpr int WARPS = 8, LOADERS = 2, COMPUTE = 32 * WARPS, THREADS = COMPUTE + 32 * LOADERS;
constexpr int UNIT = 8, MOST_UNITS = 4;          // rows of w of a unit; units of a stage at most
constexpr int BYTES = 1024, PITCH = BYTES + 64;  // of a piece of a row: lanes of a quarter-warp read different banks
constexpr int STAGE_PIECES = UNIT * MOST_UNITS;  // of a stage: of fewer rows it has more of each
constexpr int STEPS = BYTES / (64 * WARPS);      // of a piece: in each a warp has 64 bytes of a row
constexpr int MOST_STAGES = 20;
constexpr int STAGE_BYTES = STAGE_PIECES * BYTES;  // of weights

struct Product : Arguments {
  int units, per_stage, pieces;  // of w; of a stage; of a row in a stage
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
  DEVICE int first_unit(int block) const { return units * block / int(gridDim.x); }
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

// ---- The warps that load

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
struct Piece {
  static constexpr int CHUNK = BYTES / sizeof(T);
  const Product* p;
  int unit, last, row, of_row, place;  // of_row, place: which piece of its row, and of the stage
  int first = 0;                       // column of the stage
  const T* from;                       // the row
  bool has;

  DEVICE Piece(const Product& p)
      : p(&p), unit(p.first_unit(blockIdx.x)), last(p.first_unit(blockIdx.x + 1)) {
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
  Piece<T> piece(p), later = piece;  // later: what L2 is asked for next
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

// ---- The warps that compute. Lane g = lane / 4, t = lane % 4 has row g of each unit, and in each step the 16 bytes
// from 16 (4 warp + t) on.

// In 16 bits: m16n8k16, with weights as the 16 rows. A lane has 8 neighbours in k of one row where a fragment has 2 of
// rows g and g + 8, and 2 that are 8 apart: the sum over k has no order, so its first and third pair are those of row
// g, the others of g + 8. The 8 columns are 4 rows of x, twice: once as row g needs them, once as g + 8 does.
template <typename T, int X_ROWS>
struct TensorCores {
  static constexpr int UNITS = MOST_UNITS, GROUPS = ceil_div(X_ROWS, 4);
  float sum[UNITS][GROUPS][4];

  DEVICE void start() {
#pragma unroll
    for (auto& of_unit : sum)
#pragma unroll
      for (auto& s : of_unit) s[0] = s[1] = s[2] = s[3] = 0.0f;
  }
  // Units from FIRST to LAST; w: this lane's 16 bytes of each one's row.
  template <int FIRST, int LAST>
  DEVICE void add(const uint8_t (*x)[64], const uint4 (&w)[UNITS]) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {  // what is summed for no row of x is not put
      const uint4 b = *reinterpret_cast<const uint4*>(x[min(4 * i + g % 4, X_ROWS - 1)] + 16 * t);
      const uint32_t first = g < 4 ? b.x : b.y, second = g < 4 ? b.z : b.w;
#pragma unroll
      for (int u = FIRST; u < LAST; ++u)
        mma_m16n8k16<T>(sum[u][i], {w[u].x, w[u].y, w[u].z, w[u].w}, {first, second}, sum[u][i]);
    }
  }
  // What was summed as unit `from` is of unit `to`.
  DEVICE void move(int from, int to) {
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
#pragma unroll
      for (int n = 0; n < 4; ++n) sum[to][i][n] += sum[from][i][n];
    }
  }
  DEVICE void put(float (*part)[UNITS * UNIT + 1]) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
#pragma unroll
      for (int i = 0; i < GROUPS; ++i) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const float whole = sum[u][i][n] + __shfl_xor_sync(~0u, sum[u][i][2 + n], 2);
          if (t < 2 && 4 * i + 2 * t + n < X_ROWS) part[4 * i + 2 * t + n][UNIT * u + g] = whole;
        }
      }
    }
  }
};

// In fp32, on CUDA cores: row g of each unit with all rows of x.
template <int X_ROWS, int UNITS_ = MOST_UNITS>
struct CudaCores {
  static constexpr int UNITS = UNITS_;
  float sum[UNITS][X_ROWS];

  DEVICE void start() {
#pragma unroll
    for (auto& of_unit : sum)
#pragma unroll
      for (float& s : of_unit) s = 0.0f;
  }
  template <int FIRST, int LAST>
  DEVICE void add(const uint8_t (*x)[64], const uint4 (&w)[UNITS]) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int row = 0; row < X_ROWS; ++row) {
      const float4 b = *reinterpret_cast<const float4*>(x[row] + 16 * t);
#pragma unroll
      for (int u = FIRST; u < LAST; ++u) {
        const Vector16<float> a = {w[u]};
        float& s = sum[u][row];
        s = fmaf(a.values[0], b.x, fmaf(a.values[1], b.y, fmaf(a.values[2], b.z, fmaf(a.values[3], b.w, s))));
      }
    }
  }
  DEVICE void move(int from, int to) {
#pragma unroll
    for (int row = 0; row < X_ROWS; ++row) sum[to][row] += sum[from][row];
  }
  DEVICE void put(float (*part)[MOST_UNITS * UNIT + 1]) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int row = 0; row < X_ROWS; ++row) {
#pragma unroll
      for (int u = 0; u < UNITS; ++u) {
        float of_row = sum[u][row];
        of_row += __shfl_xor_sync(~0u, of_row, 1), of_row += __shfl_xor_sync(~0u, of_row, 2);
        if (t == 0) part[row][UNIT * u + g] = of_row;
      }
    }
  }
};

DEVICE void meet() { barrier_sync(1, COMPUTE); }  // of the warps that compute

// Which value of out a thread finishes, of some units: the i-th.
struct Place {
  int row, column, n;  // column: of these units
  bool any;

  DEVICE Place(const Product& p, int i, int unit, int units) {
    row = i / (units * UNIT), column = i - row * units * UNIT;
    n = p.row_of(unit + column / UNIT, column % UNIT);
    any = row < p.rows && p.has_row(unit + column / UNIT, column % UNIT);
    if (p.activation == SWIGLU) any = any && column % UNIT < 4;
  }
};

// x on its way to shared memory: each warp has the columns that it multiplies, piece after piece. If there is room for
// all of x it stays, or some pieces are ahead, again for each pass.
template <int X_ROWS, int PIECES>
using XMemory = uint8_t[WARPS][PIECES][STEPS][X_ROWS][64];

// In copies. A lane asks for 16 bytes of every fourth row of a piece.
template <typename T, int X_ROWS, int PIECES>
struct XCopies {
  using Piece = uint8_t[STEPS][X_ROWS][64];
  static constexpr int CHUNK = BYTES / sizeof(T), STEP = CHUNK / STEPS, GROUPS = ceil_div(X_ROWS, 4);
  static constexpr bool EACH_PIECE = true;  // is scaled by itself
  static_assert(STEPS == 2, "eight lanes have a row of a piece");

  Piece* own;
  int fresh, taken = 0;          // pieces: of all passes, or of one if they stay; so far
  int pieces, size;              // of a row; of the ring
  int asked = 0, to = 0, at;     // pieces; where the next one goes, and where the one that was taken last is
  int next_k, next_norm;         // this lane's first column of the piece that is asked for next, and of norm
  uint4 norm = {};               // this lane's 16 bytes, for the piece that is scaled next
  Moments moments[GROUPS] = {};  // of this lane's columns of every fourth row

  DEVICE XCopies(const Product& p, XMemory<X_ROWS, PIECES>& mem, int passes) : own(mem[threadIdx.x / 32]) {
    pieces = ceil_div(p.K, CHUNK);
    const bool stay = pieces <= PIECES;
    fresh = (stay ? min(passes, 1) : passes) * pieces, size = stay ? pieces : PIECES, at = size - 1;
    next_k = next_norm = first_k();
    load_norm(p);
  }
  // x is there.
  DEVICE void start(const Product& p) {
    for (int i = 0; i < PIECES - 1; ++i) ask(p);
    scale_next(p);
  }
  static DEVICE int step() { return threadIdx.x / 4 % STEPS; }
  static DEVICE int row_of(int i) { return 4 * i + threadIdx.x % 32 / 8; }
  static DEVICE int first_k() {
    const int warp = threadIdx.x / 32, t = threadIdx.x % 4;
    return step() * STEP + warp * (STEP / WARPS) + t * int(16 / sizeof(T));
  }
  static DEVICE void advance(int& k, int K) {
    k += CHUNK;
    if (k - first_k() >= K) k = first_k();
  }
  DEVICE uint8_t* place(int piece, int row) const { return own[piece][step()][row] + threadIdx.x % 4 * 16; }
  DEVICE void ask(const Product& p) {
    if (asked < fresh) {
      const bool inside = next_k < p.K;  // or zeros
#pragma unroll
      for (int i = 0; i < GROUPS; ++i) {
        const int row = row_of(i);
        const bool has = inside && row < p.rows;
        if (row < X_ROWS)
          cp_async<16>(place(to, row), static_cast<const T*>(p.x) + (has ? row * p.x_stride + next_k : 0), has);
      }
      ++asked, advance(next_k, p.K);
    }
    cp_async_commit();
    if (++to == PIECES) to = 0;
  }
  DEVICE void load_norm(const Product& p) {
    if (!p.norm) return;
    if (next_norm < p.K) norm = *reinterpret_cast<const uint4*>(static_cast<const T*>(p.norm) + next_norm);
    advance(next_norm, p.K);
  }
  // The next piece, scaled by the norm, is here; the one before it is not needed any more.
  DEVICE const Piece& next(const Product& p) {
    if (++at == size) at = 0;
    if (taken++ < fresh) {
      __syncwarp();
      ask(p);
    }
    return own[at];
  }
  // What this lane asked for, of the piece behind that: while that one is multiplied.
  DEVICE void scale_next(const Product& p) {
    if (taken >= fresh) return;
    cp_async_wait<PIECES - 2>();
    if (!p.norm) return;
    const uint4 by = norm;
    load_norm(p);
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
      const int row = row_of(i);
      if (row >= p.rows) continue;
      uint4& x = *reinterpret_cast<uint4*>(place(at + 1 == size ? 0 : at + 1, row));
      if (taken < pieces) moments[i].template add<T>(x);
      x = scaled<T>(x, by);
    }
  }
  DEVICE void put(Moments (&of_rows)[X_ROWS]) const {
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
      Moments all = moments[i];
#pragma unroll
      for (int step = 1; step < 8; step *= 2) all.add_lanes(step);
      if (threadIdx.x % 8 == 0 && row_of(i) < X_ROWS) of_rows[row_of(i)] = all;
    }
  }
};

// In words with tags, of one row. They come to registers, two turns of four pieces ahead, and from there to shared
// memory. Of a piece a lane has two runs of words, 16 bytes each, so that four lanes ask for 64 bytes in a row.
template <typename T, int PIECES>
struct XWords {
  using Piece = uint8_t[STEPS][1][64];
  static constexpr int TURN = 4, TURNS = PIECES / TURN;  // pieces of a turn; turns that there is room for
  static constexpr int CHUNK = BYTES / sizeof(T), STEP = CHUNK / STEPS, RUN = 8 / sizeof(T);
  static constexpr bool EACH_PIECE = false;
  static_assert(STEPS == 2 && PIECES % TURN == 0, "eight lanes have a piece");
  struct Coming {
    Values<T, RUN> runs[2];
    int k;  // this lane's first column: behind p.K are zeros
  };

  Piece* own;
  int pieces, turns, of_row;  // of a row; which piece of it was taken last
  int fresh, taken = 0;       // turns: of all passes, or of one if they stay; so far
  int size, at;               // of the ring, in turns; where the one that was taken last is
  int asked = 0;              // turns
  int next_k, next_norm;      // this lane's first column of the turn that is asked for next, and of norm
  uint2 norm[2] = {};         // this lane's, for the turn that is scaled next
  Coming coming[2] = {};      // even turns, odd ones
  Moments moments = {};       // of this lane's columns

  DEVICE XWords(const Product& p, XMemory<1, PIECES>& mem, int passes) : own(mem[threadIdx.x / 32]) {
    pieces = ceil_div(p.K, CHUNK), turns = ceil_div(pieces, TURN), of_row = pieces - 1;
    const bool stay = turns <= TURNS;
    fresh = (stay ? min(passes, 1) : passes) * turns, size = stay ? turns : TURNS, at = size - 1;
    next_k = next_norm = first_k();
    load_norm(p);
  }
  // x is there, or on its way.
  DEVICE void start(const Product& p) {
    ask(p, coming[0]), ask(p, coming[1]);
    scale_next(p);
  }
  static DEVICE int group() { return threadIdx.x % 32 / 8; }
  static DEVICE int step() { return threadIdx.x / 4 % STEPS; }
  static DEVICE int first_k() {
    const int warp = threadIdx.x / 32, t = threadIdx.x % 4;
    return group() * CHUNK + step() * STEP + warp * (STEP / WARPS) + t * RUN;
  }
  static DEVICE void advance(int& k, int K) {
    k += TURN * CHUNK;
    if (k - first_k() >= K) k = first_k();
  }
  static DEVICE int column(int k, int run) { return k + run * 4 * RUN; }
  static DEVICE const Word<T>* words(const Product& p) { return static_cast<const Word<T>*>(p.x); }
  DEVICE void ask(const Product& p, Coming& turn) {
    if (asked >= fresh) return;
    turn.k = next_k;
    const Word<T>* from = words(p) + next_k;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (column(next_k, i) < p.K) turn.runs[i].ask(from + column(0, i));
    ++asked, advance(next_k, p.K);
  }
  DEVICE void load_norm(const Product& p) {
    if (!p.norm) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int k = column(next_norm, i);
      if (k < p.K) norm[i] = *reinterpret_cast<const uint2*>(static_cast<const T*>(p.norm) + k);
    }
    advance(next_norm, p.K);
  }
  // The next piece, scaled by the norm, is here; the turn before its own is not needed any more.
  DEVICE const Piece& next(const Product&) {
    if (++of_row == pieces) of_row = 0;
    if (of_row % TURN == 0) {
      if (++at == size) at = 0;
      if (taken++ < fresh) __syncwarp();
    }
    return own[at * TURN + of_row % TURN];
  }
  // The turn behind that one: while the turn's first piece is multiplied.
  DEVICE void scale_next(const Product& p) {
    if (taken >= fresh || (taken > 0 && of_row % TURN > 0)) return;
    if (taken % 2 == 0) {
      take(p, coming[0]);
    } else {
      take(p, coming[1]);
    }
  }
  DEVICE void take(const Product& p, Coming& turn) {
    Vector16<T> x = {};
    const Word<T>* from = words(p) + turn.k;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (column(turn.k, i) >= p.K) continue;
      turn.runs[i].wait(from + column(0, i), p.tag);
#pragma unroll
      for (int e = 0; e < RUN; ++e) x.values[i * RUN + e] = turn.runs[i][e];
    }
    ask(p, turn);
    if (p.norm) {
      if (taken < turns) moments.template add<T>(x.bits);
      x.bits = scaled<T>(x.bits, make_uint4(norm[0].x, norm[0].y, norm[1].x, norm[1].y));
      load_norm(p);
    }
    uint2* to = reinterpret_cast<uint2*>(own[(at + 1 == size ? 0 : at + 1) * TURN + group()][step()][0]);
    to[threadIdx.x % 4] = make_uint2(x.bits.x, x.bits.y), to[4 + threadIdx.x % 4] = make_uint2(x.bits.z, x.bits.w);
  }
  DEVICE void put(Moments (&of_rows)[1]) const {
    Moments all = moments;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) all.add_lanes(step);
    if (threadIdx.x % 32 == 0) of_rows[0] = all;
  }
};

// The block's units of a product, some in each pass. Made before x is there: what does not depend on it is found and
// loaded. MOST_PIECES: of a row in a stage; X_PIECES: of x, that there is room for; TAGGED: x and the residual are
// words with tags.
template <typename T, int X_ROWS, typename Math, int MOST_PIECES, int X_PIECES, bool TAGGED = false>
struct Share {
  static_assert(MOST_PIECES == 1 || (MOST_PIECES == MOST_UNITS && Math::UNITS == MOST_UNITS), "in a stage");
  static constexpr int CHUNK = BYTES / sizeof(T), STEP = CHUNK / STEPS;
  const Product& p;
  Shared<X_ROWS>& mem;
  Stage& stage;
  int first = p.first_unit(blockIdx.x), last = p.first_unit(blockIdx.x + 1), pass = 0;  // units
  Place place = Place(p, thread(), first, max(1, units(first)));
  Beside<T> beside = {};
  std::conditional_t<TAGGED, XWords<T, X_PIECES>, XCopies<T, X_ROWS, X_PIECES>> x;

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
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int k_0 = threadIdx.x / 32 * (STEP / WARPS) + t * (16 / sizeof(T));
#pragma unroll 1
    for (int chunk = 0; chunk < p.K; chunk += PIECES * CHUNK) {
      mbarrier_wait(&mem.full[stage.index], stage.parity);
      const uint8_t* from = stage.at(mem.stages) + g * PITCH + k_0 * sizeof(T);
      uint4 w[STEPS][Math::UNITS];
#pragma unroll
      for (int i = 0; i < STEPS; ++i) {
#pragma unroll
        for (int u = 0; u < Math::UNITS; ++u) {
          w[i][u] = {};
          if (u % EACH < units && chunk + u / EACH * CHUNK + i * STEP + k_0 < p.K)  // behind the end is anything
            w[i][u] = *reinterpret_cast<const uint4*>(from + i * STEP * sizeof(T) + u * UNIT * PITCH);
        }
      }
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&mem.empty[stage.index]);
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
    const auto& piece = x.next(p);
#pragma unroll
    for (int i = 0; i < STEPS; ++i) math.template add<FIRST, LAST>(piece[i], w[i]);
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
        if (p.activation == SWIGLU) up += of_row[place.column + 4];
        if (p.norm) moments.add(mem.moments[warp][place.row]);
      }
      sum = complete(place.row, place.n, sum);
      use(place.row, place.n, finished<T>(p, sum, up, moments, beside));
    }
  }
};
