// A step's sums over several GPUs, within its one launch. Each GPU has a part of each value, and an inbox to which the
// others write theirs.
//
//   inbox  [o, down][GPU that sends][row][column], then [GPU that sends][row][2]: the best logit
//
// They are words with tags (words.cuh): nothing is fenced and nothing counted.
// No place is written to again before it has been read. A GPU that sends its part of a layer's o has all parts of down
// of the layer before, and those were sent by blocks that had come through o there; and so on in turn.
#pragma once
#include <cuda_runtime.h>

#include "words.cuh"

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
      if (gpu != rank) put_word(of[gpu] + first + rank * of_a_gpu, own, tag);
    float all = 0.0f;
    for (int gpu = 0; gpu < gpus; ++gpu)
      all += gpu == rank ? own : receive<float>(of[rank] + first + gpu * of_a_gpu, tag);
    return all;
  }

  // The largest number of all GPUs, of which this one's is `own`.
  DEVICE uint64_t largest(int row, uint64_t own) const {
    const unsigned tag = before + 1;
    const int64_t first = int64_t(2) * gpus * rows * columns + 2 * row;
    for (int gpu = 0; gpu < gpus; ++gpu) {
      if (gpu == rank) continue;
      uint64_t* to = of[gpu] + first + 2 * rank * rows;
      put_word(to, unsigned(own), tag), put_word(to + 1, unsigned(own >> 32), tag);
    }
    for (int gpu = 0; gpu < gpus; ++gpu) {
      if (gpu == rank) continue;
      const uint64_t* from = of[rank] + first + 2 * gpu * rows;
      const uint64_t low = receive<unsigned>(from, tag), high = receive<unsigned>(from + 1, tag);
      own = max(own, high << 32 | low);
    }
    return own;
  }

 private:
  template <typename T>
  static DEVICE T receive(const uint64_t* from, unsigned tag) {
    Values<T, 1> x;
    x.ask(from), x.wait(from, tag);
    return x[0];
  }
};
