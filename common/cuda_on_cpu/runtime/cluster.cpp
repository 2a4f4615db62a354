// What the blocks of a cluster share. Each runs on an OS thread of its own.
#include <cstring>

#include "checker.h"
#include "mbarrier.h"

namespace cuda_on_cpu {

void cluster_arrive(const char*, int) {
  Worker& worker = *this_worker;
  ++worker.running().cluster_arrivals;
  worker.release(&worker.cluster());
  worker.cluster().arrive();
}

void cluster_wait(const char* file, int line) {
  Worker& worker = *this_worker;
  worker.wait_until(
      "wait_for_cluster",
      [](const Fiber& fiber) { return fiber.worker->cluster().have_all_arrived(fiber.awaited_value); },
      &worker.cluster(), worker.running().cluster_arrivals, file, line);
  worker.acquire(&worker.cluster());
}

void cluster_store(int rank, void* variable, const void* value, unsigned bytes, uint64_t* barrier, const char* file,
                   int line) {
  Worker& own = *this_worker;
  const auto address = reinterpret_cast<uintptr_t>(variable);
  if (!own.shared.contains(address) || (barrier && !own.shared.contains(reinterpret_cast<uintptr_t>(barrier))))
    own.fail(cudaErrorIllegalAddress, "a store to another block: the variable is not in shared memory",
             format("%s:%d", file, line));
  if (rank < 0 || unsigned(rank) >= own.launch->config.cluster)
    own.fail(format("a store to block %d of a cluster of %u", rank, own.launch->config.cluster), file, line);
  Worker* other = own.cluster().members[rank];
  if (!other) {
    if (own.launch->failed) own.leave_failed();
    own.fail(format("a store to block %d of the cluster, which has not begun, or has ended", rank), file, line);
  }
  const size_t offset = own.shared.offset(address);
  if (offset % bytes != 0)
    own.fail(cudaErrorMisalignedAddress,
             format("a store to another block: the address is not a multiple of %u bytes", bytes),
             format("%s:%d", file, line));
  if (!own.shared.find(offset, bytes))
    own.fail(cudaErrorIllegalAddress,
             format("out of range: a store of %u bytes to another block, outside of all shared variables", bytes),
             format("%s:%d", file, line));
  char* target = other->shared.at(offset);
  if (own.launch->site.checked)
    write_from_outside(other->shared_cells.get() + offset, bytes, other->block_serial, __builtin_return_address(0));
  std::memcpy(target, value, bytes);
  if (!barrier) return;
  const size_t at = own.shared.offset(reinterpret_cast<uintptr_t>(barrier));
  if (const char* wrong = count_bytes(reinterpret_cast<uint64_t*>(other->shared.at(at)), bytes))
    own.fail(format("a store to block %d of the cluster: %s", rank, wrong), file, line);
}

}  // namespace cuda_on_cpu
