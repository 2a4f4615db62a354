#include "global_memory.h"

#include <pthread.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "../include/cuda_runtime.h"
#include "launcher_call.h"

namespace cuda_on_cpu {
namespace {

// Every byte of a tensor that races are looked for in costs sizeof(Cell) = 60 bytes, once touched.
constexpr size_t kMaxRaceCheckedBytes = 4 << 20;

// How far outside a tensor an access may be and still be called an overrun of it. Running over the
// end is the usual mistake; an access before the start has to be this many times nearer to be
// called one.
constexpr uintptr_t kNear = 16 << 20;
constexpr uintptr_t kBeforeStart = 256;

std::mutex allocations_lock;
std::map<uintptr_t, size_t>& allocations() {
  static auto* map =
      new std::map<uintptr_t, size_t>();  // never destroyed: kernels may outlive main
  return *map;
}

}  // namespace

void GlobalMemory::add(const char* name, uintptr_t address, size_t bytes) {
  size_t first_cell = Tensor::kNoCells;
  if (bytes <= kMaxRaceCheckedBytes) {
    first_cell = cells_used_;
    cells_used_ += bytes;
    reserve_cells(cells_used_);
  }
  tensors_.push_back({name, address, bytes, first_cell});
}

void GlobalMemory::clear() {
  tensors_.clear();
  cells_used_ = 0;
}

/// The stamps of earlier launches no longer count, so growing need not keep them.
void GlobalMemory::reserve_cells(size_t count) {
  if (count <= cell_capacity_) return;
  cell_capacity_ = std::max(count, 2 * cell_capacity_);
  cells_ = make_cells(cell_capacity_);
}

const Tensor* GlobalMemory::find(uintptr_t address, size_t bytes) const {
  for (const Tensor& t : tensors_) {
    if (t.contains(address, bytes)) return &t;
  }
  return nullptr;
}

const Tensor* GlobalMemory::nearest(uintptr_t address) const {
  const Tensor* best = nullptr;
  uintptr_t best_distance = kNear;
  for (const Tensor& t : tensors_) {
    uintptr_t distance = address < t.address             ? (t.address - address) * kBeforeStart
                         : address - t.address < t.bytes ? 0  // begins inside and runs over the end
                                                         : address - t.address - t.bytes;
    if (distance < best_distance) best = &t, best_distance = distance;
  }
  return best;
}

void GlobalMemory::begin_launch(uint32_t first_block) {
  first_block_ = first_block;
  fenced_ = false;
  if (stack_bytes_ != 0) return;
#if defined(__APPLE__)
  uintptr_t high = reinterpret_cast<uintptr_t>(pthread_get_stackaddr_np(pthread_self()));
  stack_bytes_ = pthread_get_stacksize_np(pthread_self());
  stack_low_ = high - stack_bytes_;
#else
  pthread_attr_t attributes;
  if (pthread_getattr_np(pthread_self(), &attributes) != 0) return;
  void* low = nullptr;
  pthread_attr_getstack(&attributes, &low, &stack_bytes_);
  stack_low_ = reinterpret_cast<uintptr_t>(low);
  pthread_attr_destroy(&attributes);
#endif
}

GlobalMemory& registered_tensors() {
  static thread_local GlobalMemory memory;
  return memory;
}

cudaError_t allocate(void** address, size_t bytes) {
  *address = nullptr;
  launcher_call().allocated_bytes += bytes;
  if (bytes == 0) return cudaSuccess;
  if (posix_memalign(address, 256, bytes) != 0) return cudaErrorMemoryAllocation;
  std::memset(*address, 0xff, bytes);  // NaN, so that no kernel relies on zeros
  std::lock_guard<std::mutex> guard(allocations_lock);
  allocations()[reinterpret_cast<uintptr_t>(*address)] = bytes;
  return cudaSuccess;
}

cudaError_t release(void* address) {
  if (!address) return cudaSuccess;
  {
    std::lock_guard<std::mutex> guard(allocations_lock);
    if (allocations().erase(reinterpret_cast<uintptr_t>(address)) == 0)
      return cudaErrorInvalidValue;
  }
  std::free(address);
  return cudaSuccess;
}

bool is_allocated(uintptr_t address, size_t bytes) {
  std::lock_guard<std::mutex> guard(allocations_lock);
  auto after = allocations().upper_bound(address);
  if (after == allocations().begin()) return false;
  --after;
  return address - after->first + bytes <= after->second;
}

}  // namespace cuda_on_cpu
