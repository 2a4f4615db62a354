// Waiting for what other warps, copies or blocks do: mbarriers, numbered barriers, and when copies land.
#include <chrono>
#include <thread>
#include <utility>

#include "mbarrier.h"
#include "worker.h"

namespace cuda_on_cpu {

void Worker::wait_until(const char* operation, bool (*done)(const Fiber&), const void* awaited, uint64_t value,
                        const char* file, int line) {
  Fiber& me = running();
  if (__builtin_expect(overdue(), 0)) fail_overdue(file, line);
  me.operation = operation;
  me.done = done;
  me.awaited = awaited;
  me.awaited_value = value;
  me.file = file;
  me.line = line;
  if (done(me)) return;
  me.state = Fiber::State::waiting;
  waiting_.push_back(me.rank);
  switch_from(me);
}

/// Whether one that waits can go on now; then it is ready.
bool Worker::wake_waiting() {
  size_t kept = 0;
  for (const unsigned rank : waiting_) {
    Fiber& fiber = *fibers_[rank];
    if (!fiber.done(fiber)) {
      waiting_[kept++] = rank;
      continue;
    }
    fiber.state = Fiber::State::ready;
    push(rank);
  }
  const bool any = kept < waiting_.size();
  waiting_.resize(kept);
  return any;
}

/// Copies land when nothing else can happen, in no order that a kernel may rely on.
bool Worker::land_next_copy() {
  if (in_flight_.empty()) return false;
  const Order order = launch->settings.order;
  const size_t pick = order == Order::forward   ? 0
                      : order == Order::reverse ? in_flight_.size() - 1
                                                : size_t(random() % in_flight_.size());
  const BulkCopy copy = std::move(in_flight_[pick]);
  in_flight_.erase(in_flight_.begin() + std::ptrdiff_t(pick));
  copy.move();
  land(copy);
  return true;
}

void Worker::land(const BulkCopy& copy) {
  if (launch->site.checked) {
    land_copy(shared_cells.get() + shared.offset(reinterpret_cast<uintptr_t>(copy.target)), copy.bytes,
              *fibers_[copy.thread], copy.clock);
    std::vector<uint32_t>& clocks = clocks_[copy.barrier];
    clocks.resize(threads_);
    clocks[copy.thread] = std::max(clocks[copy.thread], copy.clock);
  }
  if (const char* wrong = count_bytes(copy.barrier, copy.bytes))
    fail(format("a copy of %u bytes lands: %s", copy.bytes, wrong), copy.file, copy.line);
}

void Worker::start_copy(BulkCopy copy) {
  Fiber& me = running();
  copy.thread = me.rank;
  copy.clock = me.clock++;
  if (launch->settings.eager_copies) {
    copy.move();
    land(copy);
  } else {
    in_flight_.push_back(std::move(copy));
  }
}

/// No fiber is ready. Whether one that waits becomes so, by a copy that lands or by what another block does.
bool Worker::go_on_waiting() {
  using Clock = std::chrono::steady_clock;
  constexpr auto kPatience = std::chrono::seconds(2);  // with blocks that look all the time
  for (;;) {
    if (wake_waiting()) return true;
    if (!land_next_copy()) break;
  }
  if (launch->team == 1) return false;
  ++launch->idle_blocks;
  Clock::time_point all_idle_since{};
  bool woken = false;
  while (!(woken = wake_waiting())) {
    if (launch->failed.load(std::memory_order_relaxed)) leave_failed();
    if (overdue()) {
      const Fiber& fiber = *fibers_[waiting_.front()];
      report_overdue(fiber, format("%s:%d", fiber.file, fiber.line));
      abandon(running());
    }
    if (launch->idle_blocks < launch->running_blocks) {
      all_idle_since = {};
    } else if (all_idle_since == Clock::time_point{}) {
      all_idle_since = Clock::now();
    } else if (Clock::now() - all_idle_since > kPatience) {
      break;
    }
    std::this_thread::yield();
  }
  --launch->idle_blocks;
  return woken;
}

void Worker::named_barrier(int id, int threads, bool waits, const char* file, int line) {
  const char* operation = waits ? "barrier_sync" : "barrier_arrive";
  if (id < 0 || id > 15) fail(format("%s: a block has barriers 0 to 15; got %d", operation, id), file, line);
  if (threads < 32 || threads % 32 != 0 || unsigned(threads) > (threads_ + 31) / 32 * 32)
    fail(format("%s: the number of threads that come must be a multiple of 32, up to the block's %u; got %d",
                operation, threads_, threads),
         file, line);
  NamedBarrier& named = named_[id];
  if (named.arrived > 0 && named.threads != threads)
    fail(format("%s: barrier %d is for %d threads here, and for %d where others wait at it", operation, id, threads,
                named.threads),
         file, line);
  release(&named);
  const uint64_t generation = named.generation;
  named.threads = threads;
  if (++named.arrived == threads) named.arrived = 0, ++named.generation, let_waiting_go_on();
  if (!waits) return;
  wait_until(
      operation,
      [](const Fiber& fiber) {
        return static_cast<const NamedBarrier*>(fiber.awaited)->generation != fiber.awaited_value;
      },
      &named, generation, file, line);
  acquire(&named);
}

}  // namespace cuda_on_cpu
