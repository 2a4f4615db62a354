// wgmma and stmatrix. The four warps of a warpgroup have 16 rows of a product each and need nothing of one another, so
// here a warp computes its own. A product runs until it is waited for: what it reads may not change before, and d is
// not there.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "../include/cuda_on_cpu/float16.h"
#include "checker.h"
#include "tensor_core.h"

namespace cuda_on_cpu {
namespace {

constexpr int kDepth = 16;

/// Where a descriptor's tile has an element, as an offset in shared memory. The 128 bytes of a row are swizzled.
///   by_rows = false: 64 values of k in a row, one row for each m or n
///   by_rows = true:  64 values of m or n in a row, one row for each k; the next 64 are `next` bytes further
struct Tile {
  size_t begin, next;
  bool by_rows;

  Tile(uint32_t descriptor, bool by_rows_)
      : begin(size_t(descriptor & 0x3fff) << 4), next(size_t(descriptor >> 16 & 0x3fff) << 4), by_rows(by_rows_) {}

  size_t offset(int mn, int k) const {
    const size_t row = size_t(by_rows ? k : mn), column = size_t(by_rows ? mn % 64 : k);
    const size_t offset = begin + (by_rows ? size_t(mn / 64) * next : 0) + row * 128 + column * 2;
    return offset ^ (offset >> 7 & 7) << 4;
  }
};

struct Memory {
  Worker& worker;
  const void* pc;

  template <class Format>
  float load(const Tile& tile, int mn, int k) const {
    uint16_t bits;
    std::memcpy(&bits, worker.shared.at(tile.offset(mn, k)), sizeof bits);
    return Format::decode(bits);
  }
  /// In the check build: 8 neighbours are read at a time, which are 16 bytes.
  void check(const Tile& tile, int first, int count) const {
    if (!worker.launch->site.checked) return;
    for (int mn = first; mn < first + count; mn += tile.by_rows ? 8 : 1) {
      for (int k = 0; k < kDepth; k += tile.by_rows ? 1 : 8)
        check_access(worker.shared.at(tile.offset(mn, k)), 16, Access::read, pc);
    }
  }
};

template <class Format>
void multiply(const WgmmaInFlight& product, int warp, const Memory& memory) {
  const WgmmaOperands& o = product.operands;
  const Tile of_a(o.a, o.a_by_rows), of_b(o.b, o.b_by_rows);
  float a[16][kDepth];
  std::vector<float> b(size_t(kDepth) * size_t(o.columns));
  const int first = warp % 4 * 16;
  if (o.a_registers) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 8; ++i) {
        const uint32_t word = product.a[lane][i / 2];
        a[lane / 4 + i / 2 % 2 * 8][lane % 4 * 2 + i % 2 + i / 4 * 8] = Format::decode(uint16_t(word >> 16 * (i % 2)));
      }
    }
  } else {
    memory.check(of_a, first, 16);
    for (int m = 0; m < 16; ++m) {
      for (int k = 0; k < kDepth; ++k) a[m][k] = memory.load<Format>(of_a, first + m, k);
    }
  }
  memory.check(of_b, 0, o.columns);
  for (int k = 0; k < kDepth; ++k) {
    for (int n = 0; n < o.columns; ++n) b[size_t(k * o.columns + n)] = memory.load<Format>(of_b, n, k);
  }
  std::vector<float> sum(size_t(o.columns));
  for (int m = 0; m < 16; ++m) {
    const auto d = [&](int n) -> float& {
      return product.d[m % 8 * 4 + n % 8 / 2][n / 8 * 4 + m / 8 * 2 + n % 2];
    };
    for (int n = 0; n < o.columns; ++n) sum[size_t(n)] = o.add ? d(n) : 0.0f;
    for (int k = 0; k < kDepth; ++k) {
      for (int n = 0; n < o.columns; ++n) sum[size_t(n)] += a[m][k] * b[size_t(k * o.columns + n)];
    }
    for (int n = 0; n < o.columns; ++n) d(n) = sum[size_t(n)];
  }
}

void run(const WgmmaInFlight& product, unsigned warp, const void* pc) {
  const Memory memory{*this_worker, pc};
  if (product.operands.type == MmaType::f16) {
    multiply<Binary16>(product, int(warp), memory);
  } else {
    multiply<BFloat16>(product, int(warp), memory);
  }
}

/// What was read in the name of one lane has been read for all.
void share_reads(Worker& worker) {
  if (!worker.launch->site.checked) return;
  Fiber& reader = worker.running();
  for (unsigned lane = 0; lane < 32; ++lane) worker.fiber(reader.warp * 32 + lane).seen[reader.lane] = reader.clock;
  ++reader.clock;
}

struct Product : WarpOperands {
  const WgmmaOperands* operands;
  float* d;
  const void* pc;
};

void start(void* const* arguments) {
  Worker& worker = *this_worker;
  const unsigned warp_index = worker.running().warp;
  Warp& warp = worker.warp_of(worker.running());
  WgmmaInFlight product;
  for (int lane = 0; lane < 32; ++lane) {
    const Product& own = *static_cast<const Product*>(arguments[lane]);
    product.d[lane] = own.d;
    if (own.operands->a_registers) std::memcpy(product.a[lane], own.operands->a_registers, sizeof product.a[lane]);
  }
  product.operands = *static_cast<const Product*>(arguments[0])->operands;
  product.group = warp.product_group;
  if (worker.launch->settings.eager_copies) {
    run(product, warp_index, static_cast<const Product*>(arguments[0])->pc);
    share_reads(worker);
  } else {
    if (!product.operands.add) {  // so that no kernel relies on what is there before it waits
      for (float* d : product.d) std::fill_n(d, product.operands.columns / 2, NAN);
    }
    warp.products.push_back(product);
  }
}

void commit(void* const*) { ++this_worker->warp_of(this_worker->running()).product_group; }

struct Wait : WarpOperands {
  int pending;
  const void* pc;
};

void wait(void* const* arguments) {
  const Wait& how = *static_cast<const Wait*>(arguments[0]);
  Worker& worker = *this_worker;
  Warp& warp = worker.warp_of(worker.running());
  size_t done = 0;
  while (done < warp.products.size() && warp.products[done].group + unsigned(how.pending) < warp.product_group)
    run(warp.products[done++], worker.running().warp, how.pc);
  warp.products.erase(warp.products.begin(), warp.products.begin() + std::ptrdiff_t(done));
  if (done > 0) share_reads(worker);
  // The lanes meet here, and kernels take it for a __syncwarp(): then one of them says that the warp is done.
  worker.join_lanes();
}

struct StoreMatrix : WarpOperands {
  int matrices;
  bool transposed;
  uint32_t row;
  const uint32_t* registers;
  const void* pc;
};

void store_matrices(void* const* arguments) {
  Worker& worker = *this_worker;
  const auto& first = *static_cast<const StoreMatrix*>(arguments[0]);
  for (int matrix = 0; matrix < first.matrices; ++matrix) {
    for (int lane = 0; lane < 32; ++lane) {
      const uint32_t word = static_cast<const StoreMatrix*>(arguments[lane])->registers[matrix];
      for (int half = 0; half < 2; ++half) {
        const int along = lane % 4 * 2 + half, across = lane / 4;
        const int row = first.transposed ? along : across, column = first.transposed ? across : along;
        const uint16_t value = uint16_t(word >> 16 * half);
        const uint32_t begin = static_cast<const StoreMatrix*>(arguments[matrix * 8 + row])->row;
        std::memcpy(worker.shared.at(begin) + column * 2, &value, sizeof value);
      }
    }
  }
}

}  // namespace

void wgmma(const WgmmaOperands& operands, float* d, const char* file, int line) {
  Product product{{}, &operands, d, __builtin_return_address(0)};
  whole_warp("wgmma", if_whole<start>, &product, file, line);
}

void wgmma_commit(const char* file, int line) {
  WarpOperands none;
  whole_warp("wgmma_commit", if_whole<commit>, &none, file, line);
}

void wgmma_wait(int pending_groups, const char* file, int line) {
  Wait how{{}, pending_groups, __builtin_return_address(0)};
  whole_warp("wgmma_wait", if_whole<wait>, &how, file, line);
}

void stmatrix(int matrices, bool transposed, uint32_t row, const uint32_t* registers, const char* file, int line) {
  Worker& worker = *this_worker;
  StoreMatrix store{{}, matrices, transposed, row, registers, __builtin_return_address(0)};
  if (int(worker.running().lane) < matrices * 8) {
    if (row % 16 != 0)
      worker.fail(cudaErrorMisalignedAddress, "stmatrix: the address of a row is not a multiple of 16 bytes",
                  format("%s:%d", file, line));
    if (row >= SharedMemory::kArena)
      worker.fail(cudaErrorIllegalAddress, "stmatrix: the address of a row is not in shared memory",
                  format("%s:%d", file, line));
    if (worker.launch->site.checked) check_access(worker.shared.at(row), 16, Access::write, store.pc);
  }
  whole_warp("stmatrix", if_whole<store_matrices>, &store, file, line);
}

}  // namespace cuda_on_cpu
