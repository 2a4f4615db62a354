// Fibers: stacks, and the switch from one to another.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cuda_on_cpu {

/// What is left of a fiber that is not running: where its stack was.
using StackPointer = void*;

/// Leaves the running fiber, storing its stack pointer in `*from`, and continues the one at `to`.
extern "C" void cuda_on_cpu_switch(StackPointer* from, StackPointer to);

/// Continues the fiber at the stack pointer in the machine's stack pointer register: the second half
/// of the switch. A signal handler returns to it to leave a fiber that cannot go on.
extern "C" void cuda_on_cpu_resume();

/// Memory for one fiber's stack, with a page below it that nobody may touch.
class Stack {
 public:
  static constexpr size_t kBytes = 256 * 1024;

  // The stacks begin at different distances from a page's start, up to this one, so that their hot ends
  // do not all fall into the same few cache sets. (With 4 KiB of this, a barrier takes twice as long.)
  static constexpr size_t kStagger = 64 * 1024;
  static constexpr size_t kUsable = kBytes - kStagger;

  /// The `index`-th stack of one OS thread; they are made in slabs and live as long as the process.
  explicit Stack(size_t index);

  /// Prepares the stack so that a switch to the result calls `entry`, which must not return.
  StackPointer start(void (*entry)());

  bool contains(uintptr_t address) const { return address - bottom_ < kBytes; }
  bool guard_contains(uintptr_t address) const { return address - bottom_ < guard_bytes_; }

 private:
  uintptr_t bottom_;
  size_t guard_bytes_;
  size_t stagger_;
};

}  // namespace cuda_on_cpu
