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
  if (worker.launch->config.cluster == 1) {  // without clusters ptxas has all threads of the block wait for each other
    worker.barrier(BarrierResult::none, false, file, line, "wait_for_cluster");
    return;
  }
  worker.wait_until(
      "wait_for_cluster",
      [](const Fiber& fiber) { return fiber.worker->cluster().have_all_arrived(fiber.awaited_value); },
      &worker.cluster(), worker.running().cluster_arrivals, file, line);
  worker.acquire(&worker.cluster());
}

namespace {

/// An access to a shared variable of another block.
struct ClusterAccess {
  const char *name, *to;  // "store", "to"
  int rank;
  unsigned bytes;
  const char* file;
  int line;

  std::string site() const { return format("%s:%d", file, line); }

  /// That block.
  Worker& other(Worker& own) const {
    if (rank < 0 || unsigned(rank) >= own.launch->config.cluster)
      own.fail(format("a %s %s block %d of a cluster of %u", name, to, rank, own.launch->config.cluster), file, line);
    if (Worker* other = own.cluster().members[rank]) return *other;
    if (own.launch->failed) own.leave_failed();
    own.fail(format("a %s %s block %d of the cluster, which has not begun, or has ended", name, to, rank), file, line);
  }

  /// Where the variable is among the shared ones.
  size_t offset(Worker& own, const void* variable) const {
    const auto address = reinterpret_cast<uintptr_t>(variable);
    if (!own.shared.contains(address))
      own.fail(cudaErrorIllegalAddress,
               format("a %s %s another block: the variable is not in shared memory", name, to), site());
    const size_t offset = own.shared.offset(address);
    if (offset % bytes != 0)
      own.fail(cudaErrorMisalignedAddress,
               format("a %s %s another block: the address is not a multiple of %u bytes", name, to, bytes), site());
    if (!own.shared.find(offset, bytes))
      own.fail(cudaErrorIllegalAddress,
               format("out of range: a %s of %u bytes %s another block, outside of all shared variables", name, bytes,
                      to),
               site());
    return offset;
  }
};

}  // namespace

void cluster_store(int rank, void* variable, const void* value, unsigned bytes, uint64_t* barrier, const char* file,
                   int line) {
  Worker& own = *this_worker;
  const ClusterAccess store{"store", "to", rank, bytes, file, line};
  const size_t offset = store.offset(own, variable);
  const auto barrier_address = reinterpret_cast<uintptr_t>(barrier);
  if (barrier && !own.shared.contains(barrier_address))
    own.fail(cudaErrorIllegalAddress, "a store to another block: the mbarrier is not in shared memory", store.site());
  Worker& other = store.other(own);
  if (own.launch->site.checked)
    write_from_outside(other.shared_cells.get() + offset, bytes, other.block_serial, __builtin_return_address(0));
  std::memcpy(other.shared.at(offset), value, bytes);
  if (!barrier) return;
  if (const char* wrong = count_bytes(
          reinterpret_cast<uint64_t*>(other.shared.at(own.shared.offset(barrier_address))), bytes))
    own.fail(format("a store to block %d of the cluster: %s", rank, wrong), file, line);
}

void cluster_load(int rank, const void* variable, void* value, unsigned bytes, const char* file, int line) {
  Worker& own = *this_worker;
  const ClusterAccess load{"load", "from", rank, bytes, file, line};
  const size_t offset = load.offset(own, variable);
  Worker& other = load.other(own);
  if (own.launch->site.checked && !written(other.shared_cells.get() + offset, bytes, other.block_serial))
    own.fail(format("uninitialised shared memory: a load from block %d of the cluster reads what no thread of it has "
                    "written",
                    rank),
             file, line);
  std::memcpy(value, other.shared.at(offset), bytes);
}

}  // namespace cuda_on_cpu
