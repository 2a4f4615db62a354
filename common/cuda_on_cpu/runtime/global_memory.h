// The tensors that a kernel may touch, registered by name for the check build.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "race_check.h"

namespace cuda_on_cpu {

struct Tensor {
  std::string name;
  uintptr_t address;
  size_t bytes;
  size_t first_cell;  // into GlobalMemory::cells, or kNoCells

  static constexpr size_t kNoCells = SIZE_MAX;
  bool contains(uintptr_t a, size_t n) const {
    return a - address < bytes && n <= bytes - (a - address);
  }
};

/// The tensors of one host thread.
class GlobalMemory {
 public:
  void add(const char* name, uintptr_t address, size_t bytes);
  void clear();
  bool empty() const { return tensors_.empty(); }

  const Tensor* find(uintptr_t address, size_t bytes) const;
  /// The tensor that an access outside all of them was probably meant for, or null.
  const Tensor* nearest(uintptr_t address) const;

  Cell* cells_of(const Tensor& tensor, uintptr_t address) {
    return tensor.first_cell == Tensor::kNoCells
               ? nullptr
               : &cells_[tensor.first_cell + (address - tensor.address)];
  }

  void begin_launch(uint32_t first_block);
  uint32_t first_block() const { return first_block_; }

  /// A __threadfence: from now on blocks may hand each other data, and how is not followed.
  void fence() { fenced_.store(true, std::memory_order_relaxed); }
  bool fenced() const { return fenced_.load(std::memory_order_relaxed); }

  /// Is the address on the stack of the host thread that launches (a kernel's arguments are)?
  bool on_host_stack(uintptr_t address) const { return address - stack_low_ < stack_bytes_; }

 private:
  void reserve_cells(size_t count);

  std::vector<Tensor> tensors_;
  Cells cells_;
  size_t cells_used_ = 0, cell_capacity_ = 0;
  uint32_t first_block_ = 0;
  std::atomic<bool> fenced_{false};
  uintptr_t stack_low_ = 0;
  size_t stack_bytes_ = 0;
};

/// The tensors registered by the calling host thread.
GlobalMemory& registered_tensors();

/// Memory from cudaMalloc is global memory too.
bool is_allocated(uintptr_t address, size_t bytes);

}  // namespace cuda_on_cpu
