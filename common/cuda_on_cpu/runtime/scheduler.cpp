// Running a block: which fiber goes next, barriers, and what to report when none can go on.
#include <algorithm>
#include <cstring>
#include <sstream>
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
    case Order::random:
      return (index + launch->settings.seed % launch->blocks) % launch->blocks;
  }
  return index;
}

void Worker::begin_block(uint64_t index) {
  const dim3& grid = launch->config.grid;
  block.index = {unsigned(index % grid.x), unsigned(index / grid.x % grid.y),
                 unsigned(index / grid.x / grid.y)};
  current_block = &block;
  shared.begin_block(launch->config.dynamic_shared_bytes);

  block_serial = ++block_serials;
  if (block_serial == 0) block_serial = ++block_serials;
  phase = 0;
  alive_ = threads_;
  block_failed_ = false;
  conflict_.what.clear();
  ready_head_ = ready_count_ = 0;
  barrier_.arrived = 0;
  if (launch->settings.count && launch->site.checked && index == 0) trace_ = std::make_unique<SharedTrace>();

  for (unsigned w = 0; w * 32 < threads_; ++w) {
    unsigned lanes = std::min(32u, threads_ - w * 32);
    warps_[w].alive = lanes == 32 ? ~0u : (1u << lanes) - 1;
    warps_[w].waiting = 0;
  }
  bool reverse = launch->settings.order == Order::reverse;
  for (unsigned k = 0; k < threads_; ++k) {
    Fiber& fiber = *fibers_[reverse ? threads_ - 1 - k : k];
    if (!fiber.saved) fiber.saved = fiber.stack.start(fiber_main);
    fiber.state = Fiber::State::ready;
    fiber.copy_group = 0;
    fiber.return_file = nullptr;
    fiber.return_line = 0;
    if (launch->site.checked) {
      fiber.clock = 1;
      fiber.calls.clear();
      std::memset(fiber.seen, 0, sizeof fiber.seen);
    }
    push(fiber.rank);
  }
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
    if (barrier_.arrived == alive_) {
      if (has_conflict()) fail_now();
      release_barrier();
    } else {
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

void Worker::yield(const void* pc) {
  Fiber& me = running();
  if (overdue()) fail_overdue(show_place(pc));
  push(me.rank);
  switch_from(me);
}

void Worker::thread_returned() {
  Fiber& me = running();
  if (!me.copies.empty()) land_copies(me, 0, true);
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

int Worker::barrier(BarrierResult wanted, bool predicate, const char* file, int line) {
  Fiber& me = running();
  me.file = file;
  me.line = line;
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

// ---- errors

std::string show_place(const void* return_address, const Fiber& thread) {
  std::vector<const void*> chain{return_address};
  for (unsigned i = thread.calls.depth(); i-- > 0;) chain.push_back(thread.calls[i]);
  return show_place(chain.data(), chain.size());
}

std::string Worker::in_kernel(const uint3& thread) const {
  return format("\n  in kernel %s, block %s, thread %s, launched at %s:%d", launch->site.kernel,
                show(block.index).c_str(), show(thread).c_str(), launch->site.file, launch->site.line);
}

/// "threads 0 to 31, 64 to 95, 128 to 159 and 32 more", of an ascending list.
static std::string show_threads(const std::vector<unsigned>& list) {
  constexpr int kMaxRuns = 3;
  std::string text = list.size() == 1 ? "thread " : "threads ";
  int runs = 0;
  for (size_t i = 0; i < list.size();) {
    size_t j = i + 1;
    while (j < list.size() && list[j] == list[i] + (j - i)) ++j;
    if (++runs > kMaxRuns) return text + format(" and %zu more", list.size() - i);
    if (runs > 1) text += ", ";
    text += j == i + 1 ? format("%u", list[i]) : format("%u to %u", list[i], list[j - 1]);
    i = j;
  }
  return text;
}

/// A line for all threads of which `describe` says the same; "" leaves a thread out.
template <class Describe>
static std::string group_threads(unsigned threads, const Describe& describe) {
  std::vector<std::pair<std::string, std::vector<unsigned>>> groups;
  for (unsigned i = 0; i < threads; ++i) {
    const std::string what = describe(i);
    if (what.empty()) continue;
    const auto is_same = [&](const auto& group) { return group.first == what; };
    auto group = std::find_if(groups.begin(), groups.end(), is_same);
    if (group == groups.end()) group = groups.insert(group, {what, {}});
    group->second.push_back(i);
  }
  std::string text;
  for (const auto& [what, list] : groups) text += "\n    " + show_threads(list) + what;
  return text;
}

static std::string show_return(const Fiber& fiber) {
  return fiber.return_file ? format(" returned at %s:%d", fiber.return_file, fiber.return_line) : " returned";
}

/// Which threads had returned when the others came to a barrier, or "". It is the reason for many a conflict: they load
/// nothing, and are not waited for.
std::string Worker::early_returns() const {
  const std::string text = group_threads(threads_, [&](unsigned i) {
    const Fiber& fiber = *fibers_[i];
    if (fiber.state != Fiber::State::returned) return std::string();
    return fiber.returned_in_phase != phase || barrier_.arrived > 0 ? show_return(fiber) : std::string();
  });
  if (text.empty()) return text;
  return text + format("\n    and the others have come to the __syncthreads() at %s:%d: a thread that returns does "
                       "nothing more for the block, and is not waited for",
                       barrier_.file, barrier_.line);
}

void Worker::fail_at_barrier(const std::string& what, const std::string& place) {
  if (has_conflict()) return;
  conflict_ = {what, place, running().index, 0};
}

/// The first conflict of the block, if there is one. What is reported after it no longer counts.
void Worker::report_conflict(const std::string& besides) {
  if (!has_conflict()) return;
  block_failed_ = true;
  const std::string text =
      conflict_.place + ": " + conflict_.what + besides + early_returns() + in_kernel(conflict_.thread);
  conflict_.what.clear();
  launch->fail(cudaErrorLaunchFailure, text);
}

void Worker::fail_now() {
  report_conflict();
  abandon(running());
}

void Worker::fail_block(cudaError_t code, const std::string& what) {
  report_conflict();
  block_failed_ = true;
  launch->fail(code,
               what + format("\n  in kernel %s, block %s, launched at %s:%d", launch->site.kernel,
                             show(block.index).c_str(), launch->site.file, launch->site.line));
}

void Worker::fail(cudaError_t code, const std::string& what, const std::string& place) {
  Fiber& me = running();
  report_conflict();
  block_failed_ = true;
  launch->fail(code, place + ": " + what + in_kernel(me.index));
  abandon(me);
}

void Worker::fail_divergent(const char* file, int line) {
  const Fiber& me = running();
  const Fiber& first = *fibers_[barrier_.first];
  const std::string what = format(
      "divergent __syncthreads(): thread %s waits at %s:%d, and thread %s has come to another one, at %s:%d; one of "
      "the two stands under a condition that not all threads meet, and every thread of the block must reach the same "
      "barrier",
      show(first.index).c_str(), barrier_.file, barrier_.line, show(me.index).c_str(), file, line);
  report_conflict("\n    " + what);
  fail(what, file, line);
}

void Worker::fail_overdue(const char* file, int line) { fail_overdue(format("%s:%d", file, line)); }

void Worker::fail_overdue(const std::string& place) {
  report_overdue(running(), place);
  abandon(running());
}

void Worker::report_overdue(const Fiber& thread, const std::string& place) {
  report_conflict();
  block_failed_ = true;
  launch->fail(cudaErrorLaunchTimeout,
               format("did not end within %g s: thread %s of block %s is at %s\n  in kernel %s, launched at %s:%d",
                      launch->settings.limit, show(thread.index).c_str(), show(block.index).c_str(), place.c_str(),
                      launch->site.kernel, launch->site.file, launch->site.line));
}

void Worker::fail(const std::string& what, const char* file, int line) {
  fail(cudaErrorLaunchFailure, what, format("%s:%d", file, line));
}

/// No thread can go on. Reports which ones wait where.
void Worker::report_deadlock() {
  const std::string waiting = group_threads(threads_, [&](unsigned i) {
    const Fiber& fiber = *fibers_[i];
    if (fiber.state == Fiber::State::returned) return show_return(fiber);
    if (fiber.state == Fiber::State::at_barrier) return format(" at __syncthreads(), %s:%d", fiber.file, fiber.line);
    return format(" at %s with mask 0x%08x, %s:%d", fiber.operation, fiber.mask, fiber.file, fiber.line);
  });
  fail_block(cudaErrorLaunchFailure, "deadlock: no thread of the block can go on" + waiting);
}

void Worker::report_fault() {
  Fault seen = fault;
  fault = Fault();
  if (seen.signal == kInterrupt) {
    const char* exact = launch->site.checked ? "" : ", or near it; with --check the line is exact";
    return report_overdue(*seen.fiber, show_place(seen.pc, *seen.fiber) + exact);
  }
  current_thread = seen.fiber;
  std::string what;
  if (seen.signal == kDivisionFault) {
    what = "integer division by zero (a GPU would go on with a meaningless result)";
  } else if (seen.is_misaligned()) {
    what =
        "probably a misaligned vector access: a float4 must be at a multiple of 16 bytes; the check build names the "
        "tensor";
  } else if (seen.fiber->stack.guard_contains(seen.address)) {
    what = format("stack overflow: the local variables of a thread need more than %zu KiB",
                  Stack::kUsable / 1024);
  } else {
    what = format("illegal memory access at address 0x%zx; the check build names the tensor",
                  size_t(seen.address));
  }
  const std::string text = show_place(seen.pc, *seen.fiber) + ": " + what + in_kernel(seen.fiber->index);
  report_conflict();
  current_thread = nullptr;
  block_failed_ = true;
  launch->fail(cudaErrorIllegalAddress, text);
}

}  // namespace cuda_on_cpu
