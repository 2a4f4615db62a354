// Running a block: which fiber goes next, and barriers.
#include <algorithm>
#include <cstring>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

#include "async_copy.h"
#include "faults.h"
#include "worker.h"

namespace cuda_on_cpu {

CUDA_ON_CPU_THREAD_LOCAL ThreadContext* current_thread;
CUDA_ON_CPU_THREAD_LOCAL BlockContext* current_block;
CUDA_ON_CPU_THREAD_LOCAL Worker* this_worker;

namespace {

std::atomic<uint32_t> block_serials{0};

[[noreturn]] void fiber_main() {
  for (;;) {  // a fiber that has returned begins again in the next block
    Worker& worker = *this_worker;
    worker.launch->body(worker.launch->argument);
    worker.thread_returned();
  }
}

}  // namespace

uint32_t upcoming_block_serial() { return block_serials.load() + 1; }

Worker::Worker() : signal_stack_(new char[SignalStack::kBytes]) {}
Worker::~Worker() { this_worker = nullptr; }

Worker& Worker::of_this_thread() {
  static thread_local std::unique_ptr<Worker> owner;  // gone with the thread
  if (!this_worker) {
    owner = std::make_unique<Worker>();
    this_worker = owner.get();
  }
  return *this_worker;
}

namespace {

/// While this exists, the launch knows that the calling thread runs blocks of it.
class RunsBlocks {
 public:
  explicit RunsBlocks(Launch& launch) : launch_(launch) {
    if (launch_.settings.limit <= 0) return;
    std::lock_guard<std::mutex> guard(launch_.workers_lock);
    launch_.workers.push_back(pthread_self());
  }
  ~RunsBlocks() {
    if (launch_.settings.limit <= 0) return;
    std::lock_guard<std::mutex> guard(launch_.workers_lock);
    auto& workers = launch_.workers;
    workers.erase(std::find(workers.begin(), workers.end(), pthread_self()));
  }

 private:
  Launch& launch_;
};

}  // namespace

void Worker::run(Launch& next) {
  RunsBlocks runs_blocks(next);
  launch = &next;
  prepare_fibers();
  SignalStack signal_stack(signal_stack_.get());
  while (!launch->failed.load(std::memory_order_relaxed)) {
    uint64_t index = launch->next_block++;
    if (index >= launch->blocks) break;
    if (overdue()) {
      launch->fail(cudaErrorLaunchTimeout,
                   format("did not end within %g s: %llu of %llu blocks have begun\n  in kernel %s, launched at %s:%d",
                          launch->settings.limit, (unsigned long long)index, (unsigned long long)launch->blocks,
                          launch->site.kernel, launch->site.file, launch->site.line));
      break;
    }
    run_block(permuted(index));
  }
  launch = nullptr;
  current_block = nullptr;
}

void Worker::prepare_fibers() {
  const dim3& dim = launch->config.block;
  threads_ = dim.x * dim.y * dim.z;
  while (fibers_.size() < threads_) {
    fibers_.push_back(std::make_unique<Fiber>(this, stacks_.next(), fibers_.size()));
  }
  for (unsigned rank = 0; rank < threads_; ++rank) {
    Fiber& fiber = *fibers_[rank];
    fiber.index = {rank % dim.x, rank / dim.x % dim.y, rank / (dim.x * dim.y)};
    fiber.lane = rank % 32;
    fiber.warp = rank / 32;
  }
  block.block_dim = dim;
  block.grid_dim = launch->config.grid;
  block.dynamic_shared = shared.dynamic();
  block.dynamic_shared_bytes = launch->config.dynamic_shared_bytes;
  random_state_ = 0x9e3779b97f4a7c15u ^ (launch->settings.seed + 1) * 0xd1342543de82ef95u;
  if (launch->site.checked && !shared_cells) shared_cells = make_cells(SharedMemory::kArena);
}

/// Blocks run in the chosen order too: from the last one, or from somewhere in the middle.
uint64_t Worker::permuted(uint64_t index) const {
  switch (launch->settings.order) {
    case Order::forward:
      return index;
    case Order::reverse:
      return launch->blocks - 1 - index;
    case Order::random: {
      const uint64_t begin = launch->settings.seed % launch->blocks;
      return (index + begin / launch->team * launch->team) % launch->blocks;  // teams stay together
    }
  }
  return index;
}

void Worker::begin_block(uint64_t index) {
  const dim3& grid = launch->config.grid;
  block.index = {unsigned(index % grid.x), unsigned(index / grid.x % grid.y),
                 unsigned(index / grid.x / grid.y)};
  current_block = &block;
  block_index = index;
  shared.begin_block(launch->config.dynamic_shared_bytes);

  block_serial = ++block_serials;
  if (block_serial == 0) block_serial = ++block_serials;
  phase = 0;
  alive_ = threads_;
  block_failed_ = false;
  conflict_.what.clear();
  ready_head_ = ready_count_ = 0;
  barrier_.arrived = 0;
  waiting_.clear();
  in_flight_.clear();
  clocks_.clear();
  for (NamedBarrier& named : named_) named = NamedBarrier();
  if (launch->settings.count && launch->site.checked && index == 0) trace_ = std::make_unique<SharedTrace>();

  for (unsigned w = 0; w * 32 < threads_; ++w) {
    unsigned lanes = std::min(32u, threads_ - w * 32);
    warps_[w].alive = lanes == 32 ? ~0u : (1u << lanes) - 1;
    warps_[w].waiting = 0;
    warps_[w].products.clear();
    warps_[w].product_group = 0;
  }
  bool reverse = launch->settings.order == Order::reverse;
  for (unsigned k = 0; k < threads_; ++k) {
    Fiber& fiber = *fibers_[reverse ? threads_ - 1 - k : k];
    if (!fiber.saved) fiber.saved = fiber.stack.start(fiber_main);
    fiber.state = Fiber::State::ready;
    fiber.copy_group = 0;
    fiber.cluster_arrivals = 0;
    fiber.return_file = nullptr;
    fiber.return_line = 0;
    if (launch->site.checked) {
      fiber.clock = 1;
      fiber.calls.clear();
      std::memset(fiber.seen, 0, sizeof fiber.seen);
      fiber.known.clear();
    }
    push(fiber.rank);
  }
  if (launch->clusters.empty()) alone.begin(threads_);
  cluster().members[index % launch->config.cluster] = this;
  ++launch->running_blocks;
}

void Worker::run_block(uint64_t index) {
  begin_block(index);
  Fiber& first = pop();
  current_thread = &first;
  cuda_on_cpu_switch(&scheduler, first.saved);
  current_thread = nullptr;
  if (fault.signal != 0) report_fault();
  end_block();
}

void Worker::count_shared(size_t offset, size_t bytes, Access access, const void* pc) {
  const Fiber& me = running();
  if (access == Access::copy_in_flight || me.state != Fiber::State::ready) return;
  trace_->add(me, phase, offset, bytes, access != Access::read, pc);
}

/// Adds what was counted in this block to what the launch counts.
void Worker::keep_counts() {
  std::lock_guard<std::mutex> guard(launch->counts_lock);
  const uint3& at = block.index;
  launch->counts += format("block|%u %u %u|%u\n", at.x, at.y, at.z, phase);
  if (!trace_) return;
  launch->counts += format("kernel|%s|%u|%zu|%zu\n", launch->site.kernel, threads_, shared.static_bytes(),
                           block.dynamic_shared_bytes);
  std::istringstream lines(trace_->take());
  for (std::string line; std::getline(lines, line);) launch->counts += "shared|" + line + "\n";
  trace_.reset();
}

void Worker::end_block() {
  if (launch->settings.count && launch->site.checked) keep_counts();
  cluster().members[block_index % launch->config.cluster] = nullptr;
  --launch->running_blocks;
  if (!block_failed_ && !in_flight_.empty()) {
    const BulkCopy& copy = in_flight_.front();
    fail_block(cudaErrorLaunchFailure,
               format("%s:%d: a copy of %u bytes to shared memory was still in flight when the block ended; wait for "
                      "its mbarrier",
                      copy.file, copy.line, copy.bytes));
  }
  if (!block_failed_) {
    if (const SharedVariable* v = shared.damaged()) {
      std::string declared = v->file ? format(" (declared at %s:%d)", v->file, v->line) : "";
      fail_block(
          cudaErrorIllegalAddress,
          format(
              "out of range: something was written just past '%s'%s, %zu bytes of shared memory; "
              "the check build names the line",
              v->declaration.name, declared.c_str(), v->declaration.bytes));
    }
  }
  if (block_failed_) {  // what is on the fibers' stacks will not be continued
    for (auto& fiber : fibers_) {
      fiber->saved = nullptr;
      fiber->copies.clear();
      fiber->stores.clear();
    }
  }
}

// ---- switching

uint64_t Worker::random() {  // xorshift64
  random_state_ ^= random_state_ << 13;
  random_state_ ^= random_state_ >> 7;
  random_state_ ^= random_state_ << 17;
  return random_state_;
}

Fiber& Worker::pop() {
  if (launch->settings.order == Order::random) {
    unsigned pick = (ready_head_ + unsigned(random() % ready_count_)) % kMaxThreads;
    std::swap(ready_[ready_head_], ready_[pick]);
  }
  unsigned rank = ready_[ready_head_];
  ready_head_ = (ready_head_ + 1) % kMaxThreads;
  --ready_count_;
  return *fibers_[rank];
}

/// Leaves `me`, which waits or has returned, for a fiber that is ready.
void Worker::switch_from(Fiber& me) {
  if (ready_count_ == 0 && alive_ > 0) {
    const bool woken = !waiting_.empty() && go_on_waiting();
    if (!woken && barrier_.arrived == alive_) {
      if (has_conflict()) fail_now();
      release_barrier();
    } else if (!woken) {
      report_deadlock();
      abandon(me);
    }
  }
  if (ready_count_ == 0) {  // all have returned: the block is done
    report_conflict();
    cuda_on_cpu_switch(&me.saved, scheduler);
    return;
  }
  Fiber& next = pop();
  if (&next == &me) return;
  current_thread = &next;
  cuda_on_cpu_switch(&me.saved, next.saved);
}

void Worker::abandon(Fiber& me) {
  cuda_on_cpu_switch(&me.saved, scheduler);
  __builtin_unreachable();
}

void Worker::leave_failed() {
  block_failed_ = true;
  abandon(running());
}

void Worker::yield(const void* pc) {
  Fiber& me = running();
  if (overdue()) fail_overdue(show_place(pc));
  if (++yields_ > ready_count_) {  // all that are ready may be waiting in this way
    yields_ = 0;
    if (!wake_waiting()) land_next_copy();
    if (launch->team > 1) {
      if (launch->failed.load(std::memory_order_relaxed)) leave_failed();
      std::this_thread::yield();
    }
  }
  push(me.rank);
  switch_from(me);
}

void Worker::thread_returned() {
  Fiber& me = running();
  if (!me.copies.empty()) land_copies(me, 0, true);
  for (auto& store : me.stores) store();
  me.stores.clear();
  cluster().leave(me.cluster_arrivals);
  me.state = Fiber::State::returned;
  me.returned_in_phase = phase;
  --alive_;
  Warp& warp = warps_[me.warp];
  warp.alive &= ~(1u << me.lane);
  // Lanes that have returned are no longer waited for; another one may be able to go on now.
  for (unsigned waiting = warp.waiting; waiting != 0; waiting &= warp.waiting) {
    unsigned lane = unsigned(__builtin_ctz(waiting));
    if (!try_complete(me.warp, *fibers_[me.warp * 32 + lane])) waiting &= waiting - 1;
  }
  switch_from(me);
}

// ---- __syncthreads

int Worker::barrier(BarrierResult wanted, bool predicate, const char* file, int line, const char* operation) {
  Fiber& me = running();
  me.file = file;
  me.line = line;
  me.operation = operation;
  if (__builtin_expect(overdue(), 0)) fail_overdue(file, line);
  if (barrier_.arrived == 0) {
    barrier_ = {0, 0, file, line, me.rank};
  } else if (barrier_.line != line || std::strcmp(barrier_.file, file) != 0) {
    fail_divergent(file, line);
  }
  ++barrier_.arrived;
  barrier_.votes += predicate;
  me.state = Fiber::State::at_barrier;
  switch_from(me);
  switch (wanted) {
    case BarrierResult::none:
      return 0;
    case BarrierResult::any:
      return released_.votes > 0;
    case BarrierResult::all:
      return released_.votes == released_.arrived;
    case BarrierResult::count:
      return int(released_.votes);
  }
  return 0;
}

void Worker::release_barrier() {
  released_ = {barrier_.arrived, barrier_.votes};
  barrier_.arrived = 0;
  ++phase;
  bool reverse = launch->settings.order == Order::reverse;
  for (unsigned k = 0; k < threads_; ++k) {
    Fiber& fiber = *fibers_[reverse ? threads_ - 1 - k : k];
    if (fiber.state != Fiber::State::at_barrier) continue;
    fiber.state = Fiber::State::ready;
    push(fiber.rank);
  }
}

}  // namespace cuda_on_cpu
