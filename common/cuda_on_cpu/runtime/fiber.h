// Fibers: stacks, and the switch from one to another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace cuda_on_cpu {

/// What is left of a fiber that is not running: where its stack was.
using StackPointer = void*;

/// Leaves the running fiber, storing its stack pointer in `*from`, and continues the one at `to`.
extern "C" void cuda_on_cpu_switch(StackPointer* from, StackPointer to);

/// Continues the fiber at the stack pointer in the machine's stack pointer register: the second
/// half of the switch. A signal handler returns to it to leave a fiber that cannot go on.
extern "C" void cuda_on_cpu_resume();

/// Memory for one fiber's stack, with a page below it that must not be touched.
class Stack {
 public:
  static constexpr size_t kBytes = 256 * 1024;

  // The stacks begin at different distances from a page's start, up to this one, so that their hot
  // ends do not all fall into the same few cache sets. (With 4 KiB of this, a barrier takes twice
  // as long.)
  static constexpr size_t kStagger = 64 * 1024;
  static constexpr size_t kUsable = kBytes - kStagger;

  /// `memory` has kBytes, of which the lowest `guard_bytes` cannot be touched.
  Stack(char* memory, size_t guard_bytes, size_t index)
      : bottom_(reinterpret_cast<uintptr_t>(memory)),
        guard_bytes_(guard_bytes),
        stagger_(index * 320 % kStagger) {}

  /// Prepares the stack so that a switch to the result calls `entry`, which must not return.
  StackPointer start(void (*entry)());

  bool contains(uintptr_t address) const { return address - bottom_ < kBytes; }
  bool guard_contains(uintptr_t address) const { return address - bottom_ < guard_bytes_; }

 private:
  uintptr_t bottom_;
  size_t guard_bytes_, stagger_;
};

/// The stacks of one worker. Their memory comes in slabs and is given back with the pool.
class StackPool {
 public:
  StackPool() = default;
  StackPool(const StackPool&) = delete;
  ~StackPool();

  Stack next();

 private:
  static constexpr size_t kStacksPerSlab = 32;

  std::vector<char*> slabs_;
  size_t count_ = 0;
};

}  // namespace cuda_on_cpu
