// A worker is one OS thread that runs blocks, one at a time; the threads of its block are fibers.
#pragma once

#include <csignal>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "fiber.h"
#include "launch.h"
#include "race_check.h"
#include "shared_memory.h"
#include "shared_trace.h"

namespace cuda_on_cpu {

class Worker;

/// A copy that an mbarrier counts, issued and not yet landed.
struct BulkCopy {
  std::function<void()> move;
  void* target;
  unsigned bytes;
  uint64_t* barrier;
  const char* file;
  int line;
  unsigned thread = 0;  // that issued it, and its clock then
  uint32_t clock = 0;
};

/// A wgmma that has been issued, of one warp.
struct WgmmaInFlight {
  WgmmaOperands operands;
  uint32_t a[32][4];
  float* d[32];
  unsigned group;
};

/// A cp.async that has been issued and not yet waited for.
struct AsyncCopy {
  void* target;
  const void* source;
  unsigned bytes, valid_bytes;  // the rest of the target is zeroed
  unsigned group;
};

/// What all lanes of a warp agree on when they meet. `run` computes every lane's result from
/// arguments[lane], which is null for lanes that are absent.
using WarpFunction = void (*)(void* const* arguments, unsigned lanes);

/// The calls that a thread is in, as return addresses, the kernel's own first. Known in the check build.
class Calls {
 public:
  void push(const void* return_address) {
    if (depth_ < kKept) addresses_[depth_] = return_address;
    ++depth_;
  }
  void pop() { depth_ -= depth_ > 0; }
  void clear() { depth_ = 0; }
  unsigned depth() const { return depth_ < kKept ? depth_ : kKept; }
  const void* operator[](unsigned i) const { return addresses_[i]; }

 private:
  static constexpr unsigned kKept = 32;
  const void* addresses_[kKept];
  unsigned depth_ = 0;
};

/// A thread of the block.
struct Fiber : ThreadContext {
  enum class State : uint8_t {
    ready,
    at_barrier,
    in_collective,
    waiting,  // until `done`
    returned
  };

  Fiber(Worker* owner, Stack memory, size_t rank_) : worker(owner), stack(memory) {
    rank = unsigned(rank_);
  }

  Worker* worker;
  Stack stack;
  StackPointer saved = nullptr;  // null: the fiber has to be started afresh
  State state = State::ready;

  uint32_t returned_in_phase = 0;

  // Where it waits, for barriers and collectives.
  const char* file = nullptr;
  int line = 0;

  // The collective it waits in.
  const char* operation = nullptr;
  WarpFunction run = nullptr;
  unsigned mask = 0;
  void* argument = nullptr;

  // What it waits for.
  bool (*done)(const Fiber&) = nullptr;
  const void* awaited = nullptr;
  uint64_t awaited_value = 0;

  std::vector<std::function<void()>> stores;  // bulk stores that were not waited for
  unsigned cluster_arrivals = 0;  // in this block

  std::vector<AsyncCopy> copies;
  unsigned copy_group = 0;  // groups committed so far

  // For the race checker: how often this lane has passed a __syncwarp, and which passings of the
  // other lanes come before what it does now.
  uint32_t clock = 1;
  uint32_t seen[32] = {};
  std::vector<uint32_t> known;  // the same of all threads of the block; empty before the first acquire

  Calls calls;  // last: the fast build does not touch them
};

struct Warp {
  unsigned alive = 0;  // lanes that have not returned
  unsigned waiting = 0;  // lanes that wait in a collective
  std::vector<WgmmaInFlight> products;
  unsigned product_group = 0;  // groups committed so far
};

/// A barrier with a number, for some of the block's warps.
struct NamedBarrier {
  int arrived = 0, threads = 0;
  uint64_t generation = 0;  // how often it was complete
};

class Worker {
 public:
  Worker();
  Worker(const Worker&) = delete;
  ~Worker();

  /// The calling OS thread's worker, made on first use.
  static Worker& of_this_thread();

  /// Runs blocks until none is left or one has failed.
  void run(Launch& launch);

  // ---- called by a running fiber
  Fiber& running() const { return *static_cast<Fiber*>(current_thread); }
  int barrier(BarrierResult wanted, bool predicate, const char* file, int line,
              const char* operation = "__syncthreads()");
  void collective(const char* operation, WarpFunction run, unsigned mask, void* argument,
                  const char* file, int line);
  void yield(const void* pc);
  void thread_returned();

  /// The running fiber waits until `done` holds for it.
  void wait_until(const char* operation, bool (*done)(const Fiber&), const void* awaited, uint64_t value,
                  const char* file, int line);
  void named_barrier(int id, int threads, bool waits, const char* file, int line);
  /// The running fiber has arrived somewhere. In random order those that waited for it may go on before others come.
  void let_waiting_go_on() {
    if (launch->settings.order == Order::random && random() % 2) wake_waiting();
  }
  void start_copy(BulkCopy copy);
  /// Another block has failed: this one cannot go on.
  [[noreturn]] void leave_failed();

  /// For the race checker: what the running fiber has done or seen comes before what a fiber does that acquires the
  /// same object later.
  void release(const void* object);
  void acquire(const void* object);
  bool has_async_barriers() const { return !clocks_.empty(); }
  bool keeps_any_reader() { return has_async_barriers() && launch->settings.order == Order::random && random() % 2; }
  /// The same among the lanes of the running fiber's warp, which have met.
  void join_lanes() {
    if (launch->site.checked) join_clocks(running().warp, ~0u);
  }

  /// Reports an error of the running fiber and never comes back. `place` is file:line or
  /// show_place().
  [[noreturn]] void fail(cudaError_t code, const std::string& what, const std::string& place);
  [[noreturn]] void fail(const std::string& what, const char* file, int line);

  /// Reports a conflict of the running fiber with another thread of the block, but only at the next barrier: whether
  /// all threads come to it may be the reason.
  void fail_at_barrier(const std::string& what, const std::string& place);
  bool has_conflict() const { return !conflict_.what.empty(); }
  /// To be called at every access: a thread that waits for what it cannot see would never come to a barrier.
  void count_access_after_conflict() {
    if (has_conflict() && ++conflict_.accesses > kMaxAccessesAfterConflict) fail_now();
  }

  /// Ends the launch here if it has run longer than it may. `place` as for fail.
  bool overdue() const { return launch->overdue.load(std::memory_order_relaxed); }
  [[noreturn]] void fail_overdue(const std::string& place);
  [[noreturn, gnu::cold, gnu::noinline]] void fail_overdue(const char* file, int line);

  /// Reports an error of the block as a whole.
  void fail_block(cudaError_t code, const std::string& what);

  /// Only what a thread does by itself is counted: not what lands later, nor what a warp does as a whole.
  [[gnu::cold, gnu::noinline]] void count_shared(size_t offset, size_t bytes, Access access, const void* pc);
  bool counts() const { return trace_ != nullptr; }

  Warp& warp_of(const Fiber& fiber) { return warps_[fiber.warp]; }
  Fiber& fiber(unsigned rank) { return *fibers_[rank]; }
  unsigned threads() const { return threads_; }
  void* shared_variable(int site, const SharedDeclaration& declaration, const char* file, int line);

  // ---- for the signal handler, which can only take notes and leave
  struct Fault {
    int signal = 0, code = 0;
    uintptr_t address = 0;
    const void* pc = nullptr;
    Fiber* fiber = nullptr;

    /// x86 names no address where a vector instruction needs an aligned one. (Nor for a pointer with impossible high
    /// bits, which is rarer.)
    bool is_misaligned() const {
#if defined(SI_KERNEL)
      return signal == SIGSEGV && code == SI_KERNEL && address == 0;
#else
      return signal == SIGBUS && code == BUS_ADRALN;
#endif
    }
  };
  Fault fault;
  StackPointer scheduler = nullptr;  // where run_block continues

  Launch* launch = nullptr;
  BlockContext block{};
  SharedMemory shared;
  Cells shared_cells;  // null until the first check build
  uint32_t block_serial = 0;  // unique in the process
  uint32_t phase = 0;  // barriers passed by this block
  uint64_t block_index = 0;  // in the grid
  Cluster alone;             // of this block, where clusters are not asked for
  Cluster& cluster() {
    return launch->clusters.empty() ? alone : launch->clusters[block_index / launch->config.cluster];
  }

 private:
  void prepare_fibers();
  void run_block(uint64_t index);
  uint64_t permuted(uint64_t index) const;
  void begin_block(uint64_t index);
  void end_block();
  void keep_counts();
  void report_fault();
  void report_overdue(const Fiber& thread, const std::string& place);

  std::string early_returns() const;
  void report_conflict(const std::string& besides = "");
  [[noreturn, gnu::cold, gnu::noinline]] void fail_now();
  [[noreturn, gnu::cold, gnu::noinline]] void fail_divergent(const char* file, int line);
  std::string in_kernel(const uint3& thread) const;

  void switch_from(Fiber& me);
  [[noreturn]] void abandon(Fiber& me);
  void release_barrier();
  void report_deadlock();

  bool wake_waiting();
  bool land_next_copy();
  bool go_on_waiting();
  void land(const BulkCopy& copy);
  std::string still_waits_for(const Fiber& fiber) const;

  bool try_complete(unsigned warp_index, Fiber& latest);
  void complete(unsigned warp_index, unsigned lanes, Fiber& latest);
  void join_clocks(unsigned warp_index, unsigned lanes);

  void push(unsigned rank) {
    ready_[(ready_head_ + ready_count_++) % kMaxThreads] = uint16_t(rank);
  }
  Fiber& pop();
  uint64_t random();

  StackPool stacks_;
  std::unique_ptr<char[]> signal_stack_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  unsigned threads_ = 0;  // of the block: fibers_ may be more
  Warp warps_[kMaxThreads / 32];

  uint16_t ready_[kMaxThreads];
  unsigned ready_head_ = 0, ready_count_ = 0;
  unsigned alive_ = 0;
  bool block_failed_ = false;
  std::vector<unsigned> waiting_;    // ranks of the fibers that wait for something
  std::vector<BulkCopy> in_flight_;  // oldest first
  NamedBarrier named_[16];
  unsigned yields_ = 0;  // since the waiting ones were last looked at
  std::unordered_map<const void*, std::vector<uint32_t>> clocks_;  // of objects, by thread; see release

  static constexpr unsigned kMaxAccessesAfterConflict = 1 << 20;
  struct {
    std::string what, place;  // "": none yet
    uint3 thread{};
    unsigned accesses = 0;  // of the block since then
  } conflict_;
  uint64_t random_state_ = 1;

  struct {
    unsigned arrived = 0, votes = 0;
    const char* file = nullptr;
    int line = 0;
    unsigned first = 0;  // rank of the thread that came first
  } barrier_;
  struct {
    unsigned arrived = 0, votes = 0;
  } released_;
  std::unique_ptr<SharedTrace> trace_;  // of this block's accesses, if they are counted
};

/// The place of what a thread does, like show_place() but with the calls that lead there.
std::string show_place(const void* return_address, const Fiber& thread);

/// No block that begins from now on has a lower serial number.
uint32_t upcoming_block_serial();

/// Null on a thread that runs no blocks.
extern CUDA_ON_CPU_THREAD_LOCAL Worker* this_worker;

}  // namespace cuda_on_cpu
