// What a block reports when it cannot go on: which thread did what where, and which wait for what.
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "faults.h"
#include "mbarrier.h"
#include "worker.h"

namespace cuda_on_cpu {

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

std::string Worker::still_waits_for(const Fiber& fiber) const {
  std::string text = format(" at %s, %s:%d", fiber.operation, fiber.file, fiber.line);
  if (std::strcmp(fiber.operation, "mbarrier_wait") == 0) {
    const auto* barrier = static_cast<const uint64_t*>(fiber.awaited);
    text += format(": parity %d; %s", int(fiber.awaited_value), show_mbarrier(barrier).c_str());
  } else if (fiber.awaited >= named_ && fiber.awaited < named_ + 16) {
    const auto* named = static_cast<const NamedBarrier*>(fiber.awaited);
    text += format(": barrier %d has %d of %d threads", int(named - named_), named->arrived, named->threads);
  }
  return text;
}

/// No thread can go on. Reports which ones wait where.
void Worker::report_deadlock() {
  const std::string waiting = group_threads(threads_, [&](unsigned i) {
    const Fiber& fiber = *fibers_[i];
    if (fiber.state == Fiber::State::returned) return show_return(fiber);
    if (fiber.state == Fiber::State::at_barrier)
      return format(" at %s, %s:%d", fiber.operation, fiber.file, fiber.line);
    if (fiber.state == Fiber::State::waiting) return still_waits_for(fiber);
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
