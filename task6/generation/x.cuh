// x on its way to shared memory: each warp has the columns that it multiplies, piece after piece. If there is room for
// all of x it stays, or some pieces are ahead, again for each pass.
#pragma once
#include <cuda_runtime.h>

#include "dtype.cuh"
#include "ptx.cuh"
#include "sums.cuh"
#include "weights.cuh"
#include "words.cuh"

template <int X_ROWS, int PIECES>
using XMemory = XPiece<X_ROWS>[WARPS][PIECES];

// Which half of a row's 128 bytes a lane brings.
DEVICE int own_half() { return threadIdx.x / 4 % 2; }
// On along a row of x from its column `first`, and back to it.
template <int BY>
DEVICE void go_round(int& k, int first, int K) {
  k += BY;
  if (k - first >= K) k = first;
}

// In copies. A lane asks for 16 bytes of every fourth row of a piece. Lanes: who reads it; BY_VALUE: of what was not
// there yet, again.
template <typename T, int X_ROWS, int PIECES, typename Lanes, bool BY_VALUE>
struct XCopies {
  static constexpr int CHUNK = BYTES / sizeof(T), HALF = 64 / sizeof(T), GROUPS = ceil_div(X_ROWS, 4);
  static constexpr bool EACH_PIECE = true;  // is scaled by itself

  XPiece<X_ROWS>* own;
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
  static DEVICE int row_of(int i) { return 4 * i + threadIdx.x % 32 / 8; }
  static DEVICE int first_k() {
    const int warp = threadIdx.x / 32, t = threadIdx.x % 4;
    return (2 * warp + own_half()) * HALF + t * int(16 / sizeof(T));
  }
  DEVICE uint8_t* place(int piece, int row) const {
    return own[piece] + Lanes::template half_at<X_ROWS>(row, own_half()) + threadIdx.x % 4 * 16;
  }
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
      ++asked, go_round<CHUNK>(next_k, first_k(), p.K);
    }
    cp_async_commit();
    if (++to == PIECES) to = 0;
  }
  DEVICE void load_norm(const Product& p) {
    if (!p.norm) return;
    if (next_norm < p.K) norm = *reinterpret_cast<const uint4*>(static_cast<const T*>(p.norm) + next_norm);
    go_round<CHUNK>(next_norm, first_k(), p.K);
  }
  // The next piece, scaled by the norm, is here; the one before it is not needed any more.
  DEVICE const XPiece<X_ROWS>& next(const Product& p) {
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
    const bool look = BY_VALUE && taken < pieces;  // what has been there once stays
    if (!look && !p.norm) return;
    uint4* of_row[GROUPS];
    uint4 x[GROUPS];
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
      of_row[i] = reinterpret_cast<uint4*>(place(at + 1 == size ? 0 : at + 1, min(row_of(i), X_ROWS - 1)));
      x[i] = *of_row[i];
    }
    if (look) {
      bool missing = false;
#pragma unroll
      for (int i = 0; i < GROUPS; ++i) missing = missing || some_empty<T>(x[i]);
      if (__any_sync(~0u, missing)) {
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) *of_row[i] = x[i] = wait_for(p, row_of(i), x[i]);
      }
    }
    if (!p.norm) return;
    const uint4 by = norm;
    load_norm(p);
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
      if (X_ROWS % 4 > 0 && row_of(i) >= X_ROWS) continue;
      if (taken < pieces) moments[i].template add<T>(x[i]);
      *of_row[i] = scaled<T>(x[i], by);
    }
  }
  DEVICE uint4 wait_for(const Product& p, int row, uint4 x) const {
    const T* from = static_cast<const T*>(p.x) + row * p.x_stride + first_k() + taken % pieces * CHUNK;
    while (some_empty<T>(x)) x = look_at(from);
    return x;
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
  static constexpr int TURN = 4, TURNS = PIECES / TURN;  // pieces of a turn; turns that there is room for
  static constexpr int CHUNK = BYTES / sizeof(T), HALF = 64 / sizeof(T), RUN = 8 / sizeof(T);
  static constexpr bool EACH_PIECE = false;
  static_assert(PIECES % TURN == 0, "whole turns");
  struct Coming {
    Values<T, RUN> runs[2];
    int k;  // this lane's first column: behind p.K are zeros
  };

  XPiece<1>* own;
  int pieces, turns, of_row;  // of a row; which piece of it was taken last
  int fresh, taken = 0;       // turns: of all passes, or of one if they stay; so far
  int size, at;               // of the ring, in turns; where the one that was taken last is
  int asked = 0;              // turns
  int next_k, next_norm;      // this lane's first column of the turn that is asked for next, and of norm
  uint2 norm[2] = {};         // this lane's, for the turn that is scaled next
  Coming coming[2] = {};      // even turns, odd ones; without values they would keep registers throughout a step
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
  static DEVICE int first_k() {
    const int warp = threadIdx.x / 32, t = threadIdx.x % 4;
    return group() * CHUNK + (2 * warp + own_half()) * HALF + t * RUN;
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
    ++asked, go_round<TURN * CHUNK>(next_k, first_k(), p.K);
  }
  DEVICE void load_norm(const Product& p) {
    if (!p.norm) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int k = column(next_norm, i);
      if (k < p.K) norm[i] = *reinterpret_cast<const uint2*>(static_cast<const T*>(p.norm) + k);
    }
    go_round<TURN * CHUNK>(next_norm, first_k(), p.K);
  }
  // The next piece, scaled by the norm, is here; the turn before its own is not needed any more.
  DEVICE const XPiece<1>& next(const Product&) {
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
    uint2* to = reinterpret_cast<uint2*>(own[(at + 1 == size ? 0 : at + 1) * TURN + group()] + 64 * own_half());
    to[threadIdx.x % 4] = make_uint2(x.bits.x, x.bits.y), to[4 + threadIdx.x % 4] = make_uint2(x.bits.z, x.bits.w);
  }
  DEVICE void put(Moments (&of_rows)[1]) const {
    Moments all = moments;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) all.add_lanes(step);
    if (threadIdx.x % 32 == 0) of_rows[0] = all;
  }
};
