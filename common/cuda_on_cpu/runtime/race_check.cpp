#include "race_check.h"

#include <algorithm>
#include <new>

#include "worker.h"

namespace cuda_on_cpu {
namespace {

struct Judge {
  const Fiber& thread;
  uint32_t first_block;
  bool blocks_are_ordered;

  bool counts(const Stamp& stamp) const {
    return stamp.access != Access::none && int32_t(stamp.block - first_block) >= 0;
  }

  bool ordered(const Stamp& earlier) const {
    const Worker& worker = *thread.worker;
    if (earlier.block != worker.block_serial) return blocks_are_ordered;
    if (earlier.thread == thread.rank || earlier.phase != worker.phase) return true;
    if (earlier.thread / 32u == thread.warp && thread.seen[earlier.thread % 32] >= earlier.clock) return true;
    return earlier.thread < thread.known.size() && thread.known[earlier.thread] >= earlier.clock;
  }

  bool conflicts(const Stamp& earlier) const { return counts(earlier) && !ordered(earlier); }

  /// Which reader is kept does not matter where only a __syncthreads orders warps. With mbarriers it does, and each has
  /// to be kept in some run.
  bool prefers_another() const { return thread.worker->keeps_any_reader(); }
};

/// Keeps `now` among the readers, dropping one that comes before it.
void remember_reader(Cell& cell, const Stamp& now, const Judge& judge) {
  Stamp &first = cell.readers[0], &second = cell.readers[1];
  if (!judge.conflicts(first)) {
    first = now;
    if (!judge.conflicts(second)) second = Stamp();
  } else if (!judge.conflicts(second) || judge.prefers_another() ||
             (second.thread / 32 == first.thread / 32 && now.thread / 32 != first.thread / 32)) {
    second = now;
  }
}

}  // namespace

Cells make_cells(size_t count) {
  Cells cells(static_cast<Cell*>(
      std::calloc(count, sizeof(Cell))));  // calloc: pages of zeros, taken lazily
  if (!cells) throw std::bad_alloc();
  return cells;
}

Conflict record_access(Cell* cells, size_t bytes, Access access, const Fiber& thread,
                       const void* pc, uint32_t first_block, bool must_be_written,
                       bool blocks_are_ordered) {
  const Judge judge{thread, first_block, blocks_are_ordered};
  const Worker& worker = *thread.worker;
  Stamp now{worker.block_serial, worker.phase,
            thread.clock, uint32_t(reinterpret_cast<uintptr_t>(pc)),
            uint16_t(thread.rank), access};
  for (size_t i = 0; i < bytes; ++i) {
    Cell& cell = cells[i];
    const Stamp& write = cell.write;
    bool written = judge.counts(write);
    bool both_atomic = access == Access::atomic && write.access == Access::atomic;

    if (written && (write.access == Access::copy_in_flight || judge.conflicts(write)) &&
        !both_atomic) {
      return {write, access, false, i};
    }
    if (!written && must_be_written && (access == Access::read || access == Access::atomic)) {
      return {Stamp(), access, true, i};
    }
    if (access == Access::read) {
      remember_reader(cell, now, judge);
      continue;
    }
    for (const Stamp& reader : cell.readers) {
      if (judge.conflicts(reader)) return {reader, access, false, i};
    }
    cell.write = now;
    cell.readers[0] = cell.readers[1] = Stamp();
  }
  return {};
}

Conflict unordered_write(const Cell* cells, size_t bytes, const Fiber& thread) {
  const Judge judge{thread, thread.worker->block_serial, false};
  for (size_t i = 0; i < bytes; ++i)
    if (judge.conflicts(cells[i].write)) return {cells[i].write, Access::read, false, i};
  return {};
}

void land_copy(Cell* cells, size_t bytes, const Fiber& thread, uint32_t clock) {
  const Worker& worker = *thread.worker;
  for (size_t i = 0; i < bytes; ++i) {
    Stamp& write = cells[i].write;
    if (write.access != Access::copy_in_flight || write.thread != thread.rank) continue;
    write.access = Access::write;
    write.phase = worker.phase;
    write.clock = clock;
  }
}

void write_from_outside(Cell* cells, size_t bytes, uint32_t block, const void* pc) {
  constexpr uint32_t kNoPhase = ~0u;
  const Stamp stamp{block, kNoPhase, 0, uint32_t(reinterpret_cast<uintptr_t>(pc)), 0, Access::write};
  for (size_t i = 0; i < bytes; ++i) cells[i].write = stamp;
}

bool written(const Cell* cells, size_t bytes, uint32_t block) {
  return std::all_of(cells, cells + bytes, [=](const Cell& cell) { return cell.write.block == block; });
}

const void* code_address(const Stamp& stamp, const void* nearby) {
  uintptr_t base = reinterpret_cast<uintptr_t>(nearby);
  return reinterpret_cast<const void*>(base +
                                       uintptr_t(intptr_t(int32_t(stamp.pc - uint32_t(base)))));
}

}  // namespace cuda_on_cpu
