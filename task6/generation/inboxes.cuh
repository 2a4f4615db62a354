// A step's sums over several GPUs, within its one launch. Each GPU has a part of each value, and an inbox to which the
// others write theirs.
//
//   inbox  [o, down][GPU that sends][row][column], then [GPU that sends][row][2]: the best logit
//
// A word has 64 bits: half of a number's, or all of a float's, and a tag that the place did not have before. It comes
// as a whole, so nothing is fenced and nothing counted: who waits for a number looks at its place until the tag is
// there.
// No place is written to again before it has been read. A GPU that sends its part of a layer's o has all parts of down
// of the layer before, and those were sent by blocks that had come through o there; and so on in turn.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

constexpr int MOST_GPUS = 8;

struct Inboxes {
  uint64_t* of[MOST_GPUS];
  int rank, gpus;            // this GPU
  int rows, columns, layers;
  unsigned before;  // steps

  // A value of a layer's o or down, of which this GPU has `own`. All GPUs add in the same order, to the same bits.
  DEVICE float sum(int layer, bool down, int row, int column, float own) const {
    const unsigned tag = before * layers + layer + 1;
    const int64_t of_a_gpu = int64_t(rows) * columns;
    const int64_t first = (down ? gpus * of_a_gpu : 0) + int64_t(row) * columns + column;
    for (int gpu = 0; gpu < gpus; ++gpu)
      if (gpu != rank) send(of[gpu] + first + rank * of_a_gpu, __float_as_uint(own), tag);
    float all = 0.0f;
    for (int gpu = 0; gpu < gpus; ++gpu)
      all += gpu == rank ? own : __uint_as_float(receive(of[rank] + first + gpu * of_a_gpu, tag));
    return all;
  }

  // The largest number of all GPUs, of which this one's is `own`.
  DEVICE uint64_t largest(int row, uint64_t own) const {
    const unsigned tag = before + 1;
    const int64_t first = int64_t(2) * gpus * rows * columns + 2 * row;
    for (int gpu = 0; gpu < gpus; ++gpu) {
      if (gpu == rank) continue;
      uint64_t* to = of[gpu] + first + 2 * rank * rows;
      send(to, unsigned(own), tag), send(to + 1, unsigned(own >> 32), tag);
    }
    for (int gpu = 0; gpu < gpus; ++gpu) {
      if (gpu == rank) continue;
      const uint64_t* from = of[rank] + first + 2 * gpu * rows;
      const uint64_t low = receive(from, tag), high = receive(from + 1, tag);
      own = max(own, high << 32 | low);
    }
    return own;
  }

 private:
  static DEVICE void send(uint64_t* to, unsigned bits, unsigned tag) {
    const uint64_t word = uint64_t(tag) << 32 | bits;
#ifdef __CUDACC__
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
#else
    __atomic_store_n(to, word, __ATOMIC_RELAXED);
#endif
  }
  static DEVICE unsigned receive(const uint64_t* from, unsigned tag) {
    uint64_t word;
    do {
#ifdef __CUDACC__
      asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
#else
      cuda_on_cpu::yield();  // to the threads that it waits for
      word = __atomic_load_n(from, __ATOMIC_RELAXED);
#endif
    } while (unsigned(word >> 32) != tag);
    return unsigned(word);
  }
};
