#include "async_copy.h"

#include <cstring>

#include "checker.h"
#include "worker.h"

namespace cuda_on_cpu {
namespace {

void land(const AsyncCopy& copy) {
  std::memcpy(copy.target, copy.source, copy.valid_bytes);
  std::memset(static_cast<char*>(copy.target) + copy.valid_bytes, 0, copy.bytes - copy.valid_bytes);
}

}  // namespace

void land_copies(Fiber& thread, unsigned pending, bool all) {
  Worker& worker = *thread.worker;
  size_t kept = 0;
  for (const AsyncCopy& copy : thread.copies) {
    if (!all && copy.group + pending >= thread.copy_group) {
      thread.copies[kept++] = copy;
      continue;
    }
    if (!worker.launch->settings.eager_copies) land(copy);
    if (worker.launch->site.checked) {
      size_t offset = worker.shared.offset(reinterpret_cast<uintptr_t>(copy.target));
      land_copy(worker.shared_cells.get() + offset, copy.bytes, thread, thread.clock);
    }
  }
  thread.copies.resize(kept);
}

void async_copy(void* shared, const void* global, unsigned bytes, unsigned valid_bytes,
                const char* file, int line) {
  Worker& worker = *this_worker;
  Fiber& me = worker.running();
  uintptr_t to = reinterpret_cast<uintptr_t>(shared), from = reinterpret_cast<uintptr_t>(global);
  if (to % bytes != 0 || from % bytes != 0) {
    const bool target = to % bytes != 0;
    std::string where = show_address(target ? shared : global);
    if (!where.empty()) where = ", in " + where + ",";
    worker.fail(cudaErrorMisalignedAddress,
                format("cp_async<%u>: the %s address%s is not a multiple of %u bytes", bytes,
                       target ? "shared" : "global", where.c_str(), bytes),
                format("%s:%d", file, line));
  }
  if (!worker.shared.contains(to)) {
    worker.fail(cudaErrorIllegalAddress,
                format("cp_async<%u>: the target is not in shared memory", bytes),
                format("%s:%d", file, line));
  }
  if (worker.launch->site.checked) {
    const void* pc = __builtin_return_address(0);
    check_access(global, valid_bytes, Access::read, pc);
    check_access(shared, bytes, Access::copy_in_flight, pc);
  }
  me.copies.push_back({shared, global, bytes, valid_bytes, me.copy_group});
  if (worker.launch->settings.eager_copies) land(me.copies.back());
}

void async_copy_commit() { ++this_worker->running().copy_group; }

void async_copy_wait(int pending_groups) {
  land_copies(this_worker->running(), unsigned(pending_groups), false);
}

void async_copy_wait_all() { land_copies(this_worker->running(), 0, true); }

}  // namespace cuda_on_cpu
