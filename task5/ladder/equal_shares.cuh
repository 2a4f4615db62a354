// Equal shares: all tiles, of all sequences and kv heads, form one line, of which every block gets as much. The parts
// of a pair go through global memory, and the last of its blocks to come merges them.
#pragma once
#include <cuda_runtime.h>

#include "count.cuh"
#include "pipeline.cuh"

struct EqualShares {
  static constexpr bool SEVERAL_SEGMENTS = true;  // a block's share may be of several pairs
  static constexpr bool TREE = false, BY_LENGTH = false;
  static constexpr int SEQUENCES = 1;
  static constexpr int TILE_WARPS = WARPS;        // a tile is of so many warps, of which each has its own keys
  static DEVICE int first_key(int keys) { return threadIdx.x / 32 * keys; }
  template <int ROWS_, int D_>
  struct Buffer {
    static constexpr int ROWS = ROWS_, D = D_;
    static constexpr int FLOATS = ROWS < 16 ? 256 : 32 * ROWS;  // of a warp's O_i at a time, while stages are in use
    float O[WARPS][FLOATS];
    bool last;
  };

  int total, blocks, size, larger;  // units; no more blocks than that; `larger` blocks have one more than `size`
  int begin, end;                   // this block's units, counted over chunks, then pairs, then sequences
  // Of the first 32 sequences each lane has one's lengths, before and after the launch ahead of this one is complete.
  int2 known, now;

  // Finds the share, and its first tile. Every warp does so for itself.
  DEVICE void find(const Decode& a, bool, Walk& w) {
    const int lane = threadIdx.x % 32, pairs = a.pairs.d;
    known = lengths_of_lane(a);
    total = lane < a.batch ? units_of(a, known) : 0;
    for (int b = lane + 32; b < a.batch; b += 32) total += units_of(a, lengths(a, b));
    for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(~0u, total, step);
    blocks = min(total, int(gridDim.x)), size = total / blocks, larger = total - size * blocks;
    begin = begin_of(blockIdx.x), end = begin_of(blockIdx.x + 1);
    w.b = 0, w.first_unit = 0;
    for (int first = 0; first < a.batch; first += 32) {
      const int2 of_lane = first == 0 ? known : lengths(a, min(first + lane, a.batch - 1));
      const int units = first + lane < a.batch ? units_of(a, of_lane) : 0;
      int sum = units;  // up to this lane's sequence
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
      }
      const int before = __popc(__ballot_sync(~0u, w.first_unit + sum <= begin && first + lane < a.batch));
      const int skipped = __shfl_sync(~0u, sum, before > 0 ? before - 1 : 0);
      if (before > 0) w.b += before, w.first_unit += skipped;
      if (before < 32) break;
    }
    w.b = min(w.b, a.batch - 1);  // even where lengths change while they are read early
    const int2 of_first = make_int2(__shfl_sync(~0u, known.x, w.b & 31), __shfl_sync(~0u, known.y, w.b & 31));
    w.s = sequence(a, w.b < 32 ? of_first : lengths(a, w.b));
    w.cut(a);
    w.at(a, min((begin - w.first_unit) / w.pair_units, pairs - 1));
    w.first_unit += w.pair * w.pair_units;
    w.left = end - begin;
    w.segment(begin - w.first_unit);
  }
  DEVICE bool any(const Walk&) const { return begin < end; }
  DEVICE bool has_nothing(const Walk& w) const { return !any(w); }
  // Whether the lengths are still those of which it was made. Of more sequences a lane would have to keep several.
  DEVICE static bool can_be_found_early(const Decode& a) { return a.batch <= 32; }
  DEVICE bool holds(const Decode&) const { return __all_sync(~0u, now.x == known.x && now.y == known.y); }
  template <typename Buffer>
  DEVICE void start(const Decode&, Buffer&) {}
  DEVICE void read_again(const Decode& a) { now = lengths_of_lane(a); }

  // A part, written by the block that has it and read by the one that merges.
  template <int ROWS, int D>
  DEVICE void put(const Decode& a, const Walk& w, Buffer<ROWS, D>&, int row, int e, const Part& p) const {
    const int64_t slot = a.chunks ? w.first_unit + (w.tile - 1) / w.chunk : 2 * blockIdx.x + (w.unit == 0);
    float* O = a.partial + (slot * ROWS + row) * D + e;
    float* ml = a.partial + a.slots * ROWS * D + (slot * ROWS + row) * 2;
    __stcg(reinterpret_cast<float4*>(O), p.O);
    if (e == 0) __stcg(reinterpret_cast<float2*>(ml), make_float2(p.m, p.l));
  }

  // The end of a segment of a pair that has several parts.
  template <typename T, int ROWS, int D>
  DEVICE void merge_blocks(const Decode& a, const Walk& w, Buffer<ROWS, D>& buffer) const {
    constexpr int QUADS = D / 4;
    const int row_0 = w.row_0 * ROWS, rows = min(ROWS, a.rows - row_0);
    const int first = owner(w.first_unit), last = owner(w.first_unit + w.pair_units - 1);
    if (first != last) {
      __syncthreads();  // the block's parts complete
      if (threadIdx.x == 0) {
        int* counter = &a.counters[w.b * int(a.pairs.d) + w.pair];
        buffer.last = add_acquire_release(counter, 1) == last - first;
        if (buffer.last) *counter = 0;  // for the next launch
      }
      __syncthreads();
      if (!buffer.last) return;
    } else {
      __syncthreads();  // the block's parts complete
    }
    const int parts = a.chunks ? w.pair_units : last - first + 1;
    auto merged = [&](int row, int e, int begin, int end) {
      return merge_parts(begin, end, [&](int n) -> Part {
        const int64_t slot = a.chunks ? w.first_unit + n : 2 * (first + n) + (n == 0);
        const float* O = a.partial + (slot * ROWS + row) * D + e;
        const float* ml = a.partial + a.slots * ROWS * D + (slot * ROWS + row) * 2;
        const float2 m_l = __ldcg(reinterpret_cast<const float2*>(ml));
        return {m_l.x, m_l.y, __ldcg(reinterpret_cast<const float4*>(O))};
      });
    };

    // A few rows are few threads: then groups of threads merge some of the parts each, and group 0 merges the groups'.
    const int items = rows * QUADS, groups = max(1, THREADS / items), each = ceil_div(parts, groups);
    if (groups == 1) {
      for (int i = threadIdx.x; i < items; i += THREADS)
        write_out<T>(a, w, row_0 + i / QUADS, i % QUADS * 4, merged(i / QUADS, i % QUADS * 4, 0, parts));
      return;
    }
    const int i = threadIdx.x % items, group = threadIdx.x / items, row = i / QUADS, e = i % QUADS * 4;
    static_assert(sizeof(buffer.O) >= THREADS * (sizeof(float4) + sizeof(float2)), "a part for each thread");
    float4* O = reinterpret_cast<float4*>(buffer.O);  // [THREADS], and behind it m, l
    float2* ml = reinterpret_cast<float2*>(O + THREADS);
    Part p;
    if (group < groups) {
      p = merged(row, e, group * each, min((group + 1) * each, parts));
      O[threadIdx.x] = p.O, ml[threadIdx.x] = make_float2(p.m, p.l);
    }
    __syncthreads();
    if (group > 0) return;
    for (int g = 1; g < groups; ++g) {
      const int n = g * items + i;
      const Part other[1] = {{ml[n].x, ml[n].y, O[n]}};
      merge(p, other);
    }
    write_out<T>(a, w, row_0 + row, e, p);
  }

  // Of a block.
  static int64_t most_tiles(const Decode& a, int blocks) {
    const int tiles = ceil_div(a.kv_len, 1 << a.tile_bits), of_a_unit = a.chunks ? ceil_div(tiles, a.chunks) : 1;
    const int64_t units = int64_t(a.chunks ? a.chunks : tiles) * a.batch * a.kv_heads * a.row_tiles.d;
    return (units + blocks - 1) / blocks * of_a_unit;
  }
  static cudaError_t launch(void (*kernel)(Decode), const Decode& a, int blocks, int bytes, cudaStream_t stream) {
    return launch_kernel(kernel, dim3(blocks), THREADS, bytes, stream, a);
  }

 private:
  static DEVICE int2 lengths_of_lane(const Decode& a) { return lengths(a, min(int(threadIdx.x % 32), a.batch - 1)); }
  static DEVICE int units_of(const Decode& a, int2 lengths) {
    Walk w;
    w.s = sequence(a, lengths);
    w.cut(a);
    return w.pair_units * int(a.pairs.d);
  }
  DEVICE int begin_of(int block) const { return block < blocks ? block * size + min(block, larger) : total; }
  DEVICE int owner(int unit) const {
    const int first = larger * (size + 1);  // of those of `size`
    return unit < first ? unit / (size + 1) : larger + (unit - first) / size;
  }
};
