// Who last touched each byte, and whether two accesses are ordered.
//
// Within a block, an access comes before another one if the same thread made both, if a
// __syncthreads is between them, or if a __syncwarp, an mbarrier, a named barrier or a chain of these
// leads from one thread to the other. That is all that CUDA promises: shuffles and votes exchange
// registers and order no memory. Between blocks nothing is ordered.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

namespace cuda_on_cpu {

struct Fiber;

enum class Access : uint8_t { none,
                              read,
                              write,
                              atomic,
                              copy_in_flight };

/// One access to one byte.
struct Stamp {
  uint32_t block = 0;  // serial number of the block, unique in the process; 0: no access
  uint32_t phase = 0;  // barriers that the block had passed
  uint32_t clock = 0;  // __syncwarps that the lane had passed
  uint32_t pc = 0;  // low half of the code address; the other half is that of any code nearby
  uint16_t thread = 0;
  Access access = Access::none;
};

/// What is remembered of one byte: the last write, and the reads since. Two readers are enough where
/// only a __syncthreads orders warps: they are kept in different warps where there are such, and then
/// any unordered writer differs from one. With mbarriers a third warp that is too early may be missed
/// in one order of the threads; in random order each may be kept beside the first.
struct Cell {
  Stamp write, readers[2];
};

struct FreeCells {
  void operator()(Cell* cells) const { std::free(cells); }
};
using Cells = std::unique_ptr<Cell[], FreeCells>;

/// Cells without any access. They take 60 bytes per byte, but only where they are touched.
Cells make_cells(size_t count);

struct Conflict {
  Stamp earlier;
  Access access = Access::none;  // what the later access wanted to do
  bool uninitialised = false;
  size_t byte = 0;  // which byte of the access
  explicit operator bool() const { return access != Access::none; }
};

/// Records an access to `bytes` bytes whose cells begin at `cells`, and returns the first conflict.
/// Stamps of blocks before `first_block` count as no access. `must_be_written`: reading a byte that
/// was never written is a conflict (shared memory).
Conflict record_access(Cell* cells, size_t bytes, Access access, const Fiber& thread,
                       const void* pc, uint32_t first_block, bool must_be_written,
                       bool blocks_are_ordered);

/// The first of these bytes whose last write nothing orders before what `thread` does now. Nothing is recorded.
Conflict unordered_write(const Cell* cells, size_t bytes, const Fiber& thread);

/// The copy that `thread` began has landed: from now on its bytes were written by an ordinary
/// write, at this clock.
void land_copy(Cell* cells, size_t bytes, const Fiber& thread, uint32_t clock);

/// Another block of the cluster has written these bytes of block `block`. What orders such writes is not followed.
void write_from_outside(Cell* cells, size_t bytes, uint32_t block, const void* pc);

/// Whether block `block` has written all of these bytes. What orders them and the one who asks is not followed.
bool written(const Cell* cells, size_t bytes, uint32_t block);

/// The full code address of a stamp, given one from the same library.
const void* code_address(const Stamp& stamp, const void* nearby);

}  // namespace cuda_on_cpu
