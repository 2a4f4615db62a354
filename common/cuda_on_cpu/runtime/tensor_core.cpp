// mma and ldmatrix, with the register layouts of the PTX manual (see ptx.cuh).
#include <cstring>

#include "../include/cuda_on_cpu/float16.h"
#include "checker.h"
#include "tensor_core.h"

namespace cuda_on_cpu {
namespace {

struct Mma : WarpOperands {
  float* d;
  const uint32_t *a, *b;
  const float* c;
};

/// The `half`-th 16-bit value of a register.
template <class Format>
float unpack(uint32_t word, int half) {
  return Format::decode(uint16_t(word >> 16 * half));
}

/// d = a b + c for one warp: (16 x k) times (k x 8), summed in float, k ascending.
template <int K>
void multiply(const float (&a)[16][K], const float (&b)[K][8], void* const* arguments) {
  float sum[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const Mma& mma = *static_cast<const Mma*>(arguments[lane]);
    int row = lane / 4, column = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) sum[row + i / 2 * 8][column + i % 2] = mma.c[i];
  }
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < K; ++k) {
      for (int column = 0; column < 8; ++column) sum[row][column] += a[row][k] * b[k][column];
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    const Mma& mma = *static_cast<const Mma*>(arguments[lane]);
    int row = lane / 4, column = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) mma.d[i] = sum[row + i / 2 * 8][column + i % 2];
  }
}

template <class Format>
void mma_16_bit(void* const* arguments) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const Mma& mma = *static_cast<const Mma*>(arguments[lane]);
    int row = lane / 4, k = lane % 4 * 2, column = lane / 4;
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < 4; ++i)
        a[row + i % 2 * 8][k + half + i / 2 * 8] = unpack<Format>(mma.a[i], half);
      for (int i = 0; i < 2; ++i) b[k + half + i * 8][column] = unpack<Format>(mma.b[i], half);
    }
  }
  multiply(a, b, arguments);
}

void mma_tf32(void* const* arguments) {
  float a[16][8], b[8][8];
  auto value = [](uint32_t bits) {
    return float_of(bits & ~0x1fffu);
  };  // the hardware ignores 13 bits
  for (int lane = 0; lane < 32; ++lane) {
    const Mma& mma = *static_cast<const Mma*>(arguments[lane]);
    int row = lane / 4, k = lane % 4, column = lane / 4;
    for (int i = 0; i < 4; ++i) a[row + i % 2 * 8][k + i / 2 * 4] = value(mma.a[i]);
    for (int i = 0; i < 2; ++i) b[k + i * 4][column] = value(mma.b[i]);
  }
  multiply(a, b, arguments);
}

struct LoadMatrix : WarpOperands {
  const char* row;  // 16 bytes
  uint32_t registers[4];
};

uint16_t element(void* const* arguments, int matrix, int row, int column) {
  uint16_t value;
  const char* begin = static_cast<const LoadMatrix*>(arguments[matrix * 8 + row])->row;
  std::memcpy(&value, begin + column * 2, sizeof value);
  return value;
}

template <int Matrices, bool Transposed>
void load_matrices(void* const* arguments) {
  for (int matrix = 0; matrix < Matrices; ++matrix) {
    for (int lane = 0; lane < 32; ++lane) {
      int row = lane / 4, column = lane % 4 * 2;
      uint32_t low = Transposed ? element(arguments, matrix, column, row)
                                : element(arguments, matrix, row, column);
      uint32_t high = Transposed ? element(arguments, matrix, column + 1, row)
                                 : element(arguments, matrix, row, column + 1);
      static_cast<LoadMatrix*>(arguments[lane])->registers[matrix] = low | high << 16;
    }
  }
}

WarpFunction loader(int matrices, bool transposed) {
  switch (matrices * 2 + transposed) {
    case 2:
      return if_whole<load_matrices<1, false>>;
    case 3:
      return if_whole<load_matrices<1, true>>;
    case 4:
      return if_whole<load_matrices<2, false>>;
    case 5:
      return if_whole<load_matrices<2, true>>;
    case 8:
      return if_whole<load_matrices<4, false>>;
    default:
      return if_whole<load_matrices<4, true>>;
  }
}

}  // namespace

void whole_warp(const char* operation, WarpFunction run, WarpOperands* operands, const char* file, int line) {
  Worker& worker = *this_worker;
  operands->lanes = worker.warp_of(worker.running()).alive;
  if (operands->lanes == ~0u) worker.collective(operation, run, ~0u, operands, file, line);
  if (operands->lanes != ~0u) {
    worker.fail(format("%s needs all 32 lanes of the warp; %d are there", operation,
                       __builtin_popcount(operands->lanes)),
                file, line);
  }
}

void mma_16x8(MmaType type, float* d, const uint32_t* a, const uint32_t* b, const float* c,
              const char* file, int line) {
  Mma mma{{}, d, a, b, c};
  WarpFunction run = type == MmaType::bf16  ? if_whole<mma_16_bit<BFloat16>>
                     : type == MmaType::f16 ? if_whole<mma_16_bit<Binary16>>
                                            : if_whole<mma_tf32>;
  whole_warp(type == MmaType::tf32 ? "mma_m16n8k8_tf32" : "mma_m16n8k16", run, &mma, file, line);
}

void ldmatrix(int matrices, bool transposed, uint32_t* registers, const void* row, const char* file,
              int line) {
  Worker& worker = *this_worker;
  LoadMatrix load{{}, static_cast<const char*>(row), {}};
  if (int(worker.running().lane) < matrices * 8) {  // the other lanes' addresses are not used
    uintptr_t address = reinterpret_cast<uintptr_t>(row);
    if (address % 16 != 0) {
      worker.fail(cudaErrorMisalignedAddress,
                  "ldmatrix: the address of a row is not a multiple of 16 bytes",
                  format("%s:%d", file, line));
    }
    if (!worker.shared.contains(address)) {
      worker.fail(cudaErrorIllegalAddress, "ldmatrix: the address of a row is not in shared memory",
                  format("%s:%d", file, line));
    }
    if (worker.launch->site.checked)
      check_access(row, 16, Access::read, __builtin_return_address(0));
  }
  whole_warp("ldmatrix", loader(matrices, transposed), &load, file, line);
  std::memcpy(registers, load.registers, sizeof(uint32_t) * size_t(matrices));
}

}  // namespace cuda_on_cpu
