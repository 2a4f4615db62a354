// nvcuda::wmma: fragments in and out of memory, and their products.
//
// A matrix is cut, row by row, into runs of 32 elements, one per lane. Run i is x[i] of the lanes, turned by
// i * turn lanes: no lane has a whole row or column, and fragments of different types disagree.
#include <algorithm>
#include <cstring>

#include "../include/cuda_on_cpu/float16.h"
#include "checker.h"
#include "tensor_core.h"

namespace cuda_on_cpu {
namespace {

bool operator==(const WmmaTile& s, const WmmaTile& t) {
  return s.type == t.type && s.rows == t.rows && s.columns == t.columns && s.turn == t.turn;
}

size_t element_bytes(WmmaType type) { return type == WmmaType::f16 || type == WmmaType::bf16 ? 2 : 4; }

/// The lane that holds an element (counted row by row) of the matrix, in its x[element / 32].
unsigned lane_of(const WmmaTile& tile, int element) { return unsigned(element + element / 32 * tile.turn) % 32; }

// ---- memory

struct Move : WarpOperands {
  const WmmaTile* tile;
  void* x;
  char* matrix;
  size_t ldm;
  bool by_columns;
  bool differ;  // some lane names another matrix
};

const Move& move_of(void* const* operands, unsigned lane) { return *static_cast<const Move*>(operands[lane]); }

template <class Bits, bool Load>
void move_elements(void* const* operands) {
  const Move& first = move_of(operands, 0);
  bool differ = false;
  for (unsigned lane = 1; lane < 32; ++lane) {
    const Move& move = move_of(operands, lane);
    differ |= move.matrix != first.matrix || move.ldm != first.ldm || move.by_columns != first.by_columns ||
              !(*move.tile == *first.tile);
  }
  for (unsigned lane = 0; lane < 32; ++lane) static_cast<Move*>(operands[lane])->differ = differ;
  if (differ) return;
  const WmmaTile& tile = *first.tile;
  const size_t row_step = first.by_columns ? 1 : first.ldm, column_step = first.by_columns ? first.ldm : 1;
  for (int i = 0; i < tile.rows * tile.columns; ++i) {
    Bits* inside = static_cast<Bits*>(move_of(operands, lane_of(tile, i)).x) + i / 32;
    char* outside =
        first.matrix + (size_t(i / tile.columns) * row_step + size_t(i % tile.columns) * column_step) * sizeof(Bits);
    Load ? std::memcpy(inside, outside, sizeof(Bits)) : std::memcpy(outside, inside, sizeof(Bits));
  }
}

void move_matrix(const char* operation, bool load, Move& move, const char* file, int line, const void* pc) {
  Worker& worker = *this_worker;
  const WmmaTile& tile = *move.tile;
  const size_t bytes = element_bytes(tile.type);
  if (reinterpret_cast<uintptr_t>(move.matrix) % 32 != 0) {
    worker.fail(cudaErrorMisalignedAddress,
                format("%s: the address of the matrix is not a multiple of 32 bytes", operation),
                format("%s:%d", file, line));
  }
  if (move.ldm * bytes % 16 != 0) {
    worker.fail(format("%s: ldm must be a multiple of %zu elements (16 bytes); it is %zu", operation, 16 / bytes,
                       move.ldm),
                file, line);
  }
  const int lines = move.by_columns ? tile.columns : tile.rows, along = tile.rows * tile.columns / lines;
  if (int(move.ldm) < along) {
    worker.fail(format("%s: ldm, the distance of %s, is %zu, but they have %d elements", operation,
                       move.by_columns ? "columns" : "rows", move.ldm, along),
                file, line);
  }
  if (worker.launch->site.checked) {  // each lane looks at an equal part of the matrix
    const int part = tile.rows * tile.columns / 32, begin = int(worker.running().lane) * part;
    check_access(move.matrix + (size_t(begin / along) * move.ldm + size_t(begin % along)) * bytes, size_t(part) * bytes,
                 load ? Access::read : Access::write, pc);
  }
  const WarpFunction two = load ? if_whole<move_elements<uint16_t, true>> : if_whole<move_elements<uint16_t, false>>;
  const WarpFunction four = load ? if_whole<move_elements<uint32_t, true>> : if_whole<move_elements<uint32_t, false>>;
  whole_warp(operation, bytes == 2 ? two : four, &move, file, line);
  if (move.differ) {
    worker.fail(format("%s: all lanes of a warp must give the same address, ldm and layout", operation), file, line);
  }
}

// ---- products

struct Multiply : WarpOperands {
  const WmmaShapes* shapes;
  void* d;
  const void *a, *b, *c;
};

const Multiply& multiply_of(void* const* operands, unsigned lane) {
  return *static_cast<const Multiply*>(operands[lane]);
}

/// The matrix of a fragment, row by row.
template <class Operand>
void gather(const WmmaTile& tile, Operand operand, float* matrix) {
  for (int i = 0; i < tile.rows * tile.columns; ++i) {
    const void* x = operand(lane_of(tile, i));
    if (tile.type == WmmaType::f16) {
      matrix[i] = Binary16::decode(static_cast<const uint16_t*>(x)[i / 32]);
    } else if (tile.type == WmmaType::bf16) {
      matrix[i] = BFloat16::decode(static_cast<const uint16_t*>(x)[i / 32]);
    } else {
      matrix[i] = static_cast<const float*>(x)[i / 32];
    }
  }
}

/// d = a b + c, summed in float, k ascending.
void multiply_fragments(void* const* operands) {
  const WmmaShapes& shapes = *multiply_of(operands, 0).shapes;
  float a[32 * 16], b[16 * 32], sum[256];
  gather(shapes.a, [&](unsigned lane) { return multiply_of(operands, lane).a; }, a);
  gather(shapes.b, [&](unsigned lane) { return multiply_of(operands, lane).b; }, b);
  gather(shapes.c, [&](unsigned lane) { return multiply_of(operands, lane).c; }, sum);
  const int m = shapes.a.rows, n = shapes.b.columns, depth = shapes.a.columns;
  for (int row = 0; row < m; ++row) {
    for (int k = 0; k < depth; ++k) {
      for (int column = 0; column < n; ++column) sum[row * n + column] += a[row * depth + k] * b[k * n + column];
    }
  }
  for (int i = 0; i < m * n; ++i) {
    void* x = multiply_of(operands, lane_of(shapes.d, i)).d;
    if (shapes.d.type == WmmaType::f16) {
      static_cast<uint16_t*>(x)[i / 32] = Binary16::encode(sum[i]);
    } else {
      static_cast<float*>(x)[i / 32] = sum[i];
    }
  }
}

/// Is this a number that tf32 does not have?
bool is_not_tf32(float x) {
  const uint32_t bits = bits_of(x);
  return (bits & 0x7f800000) != 0x7f800000 && (bits & 0x1fff) != 0;
}

}  // namespace

void wmma_load(const WmmaTile& tile, void* x, const void* matrix, unsigned ldm, bool by_columns, const char* file,
               int line) {
  Move move{{}, &tile, x, static_cast<char*>(const_cast<void*>(matrix)), ldm, by_columns, false};
  move_matrix("load_matrix_sync", true, move, file, line, __builtin_return_address(0));
}

void wmma_store(const WmmaTile& tile, const void* x, void* matrix, unsigned ldm, bool by_columns, const char* file,
                int line) {
  Move move{{}, &tile, const_cast<void*>(x), static_cast<char*>(matrix), ldm, by_columns, false};
  move_matrix("store_matrix_sync", false, move, file, line, __builtin_return_address(0));
}

void wmma_multiply(const WmmaShapes& shapes, void* d, const void* a, const void* b, const void* c, const char* file,
                   int line) {
  if (shapes.a.type == WmmaType::tf32) {
    for (const void* x : {a, b}) {
      const float* elements = static_cast<const float*>(x);
      const int count = shapes.a.rows * shapes.a.columns / 32;
      if (std::any_of(elements, elements + count, is_not_tf32)) {
        this_worker->fail(format("mma_sync: an element of %s is not a tf32 number; "
                                 "convert it with wmma::__float_to_tf32",
                                 x == a ? "a" : "b"),
                          file, line);
      }
    }
  }
  Multiply multiply{{}, &shapes, d, a, b, c};
  whole_warp("mma_sync", if_whole<multiply_fragments>, &multiply, file, line);
}

}  // namespace cuda_on_cpu
