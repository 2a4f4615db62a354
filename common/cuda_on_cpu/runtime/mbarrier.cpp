// mbarriers: how many arrivals and bytes a phase still waits for.
//
// All of it is in the barrier's own 64 bits, which the blocks of a cluster update too:
//   bit 0        the phase's parity
//   bits 1-20    arrivals that each phase waits for
//   bits 21-40   arrivals that are missing
//   bits 41-62   bytes that are missing, + 2^21: they may land before they are expected
//   bit 63       0 once it is initialised: shared memory begins as ones
#include "mbarrier.h"

#include "checker.h"

namespace cuda_on_cpu {
namespace {

constexpr int kMostArrivals = (1 << 20) - 1, kMostBytes = (1 << 20) - 1, kNoBytes = 1 << 21;

struct Fields {
  unsigned parity;
  int arrivals, missing, bytes;

  explicit Fields(uint64_t word)
      : parity(word & 1),
        arrivals(int(word >> 1 & 0xfffff)),
        missing(int(word >> 21 & 0xfffff)),
        bytes(int(word >> 41 & 0x3fffff) - kNoBytes) {}
  uint64_t word() const {
    return uint64_t(bytes + kNoBytes) << 41 | uint64_t(missing) << 21 | uint64_t(arrivals) << 1 | parity;
  }
  void complete() {
    if (missing == 0 && bytes == 0) parity ^= 1, missing = arrivals;
  }
};

uint64_t load(const void* barrier) { return __atomic_load_n(static_cast<const uint64_t*>(barrier), __ATOMIC_ACQUIRE); }

/// What is wrong with a barrier, or null.
template <class Change>
const char* update(uint64_t* barrier, Change change) {
  uint64_t before = load(barrier), after;
  do {
    if (before >> 63) return "the mbarrier is not initialised";
    Fields fields(before);
    if (const char* wrong = change(fields)) return wrong;
    fields.complete();
    after = fields.word();
  } while (!__atomic_compare_exchange_n(barrier, &before, after, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
  return nullptr;
}

void check_address(const uint64_t* barrier, const char* operation, const char* file, int line) {
  Worker& worker = *this_worker;
  const uintptr_t address = reinterpret_cast<uintptr_t>(barrier);
  if (!worker.shared.contains(address))
    worker.fail(format("%s: the mbarrier is not in shared memory", operation), file, line);
  if (address % 8 != 0) worker.fail(format("%s: the mbarrier is not at a multiple of 8 bytes", operation), file, line);
}

bool is_over(const Fiber& fiber) { return (load(fiber.awaited) & 1) != fiber.awaited_value; }

}  // namespace

void check_mbarrier(const uint64_t* barrier, const char* operation, const void* pc, const char* file, int line) {
  check_address(barrier, operation, file, line);
  if (load(barrier) >> 63) this_worker->fail(format("%s: the mbarrier is not initialised", operation), file, line);
  // It may be so by chance: of what is done with an mbarrier its init has to be ordered, a write.
  if (this_worker->launch->site.checked) check_after_write(barrier, sizeof *barrier, pc);
}

const char* count_bytes(uint64_t* barrier, unsigned bytes) {
  return update(barrier, [bytes](Fields& fields) -> const char* {
    fields.bytes -= int(bytes);
    return fields.bytes < -kMostBytes ? "more bytes than an mbarrier counts" : nullptr;
  });
}

std::string show_mbarrier(const uint64_t* barrier) {
  const Fields fields(load(barrier));
  std::string text = format("phase %u misses %d of %d arrivals", fields.parity, fields.missing, fields.arrivals);
  if (fields.bytes > 0) text += format(" and %d bytes", fields.bytes);
  if (fields.bytes < 0) text += format(", and %d bytes more have landed than it expects", -fields.bytes);
  return text;
}

void mbarrier_init(uint64_t* barrier, int arrivals, const char* file, int line) {
  check_address(barrier, "mbarrier_init", file, line);
  if (arrivals < 1 || arrivals > kMostArrivals)
    this_worker->fail(format("mbarrier_init: a phase waits for 1 to %d arrivals; got %d", kMostArrivals, arrivals),
                      file, line);
  Fields fields(0);
  fields.arrivals = fields.missing = arrivals, fields.bytes = 0;
  if (this_worker->launch->site.checked)
    check_access(barrier, sizeof *barrier, Access::write, __builtin_return_address(0));
  __atomic_store_n(barrier, fields.word(), __ATOMIC_RELEASE);
}

void mbarrier_arrive(uint64_t* barrier, unsigned bytes, const char* file, int line) {
  check_mbarrier(barrier, "mbarrier_arrive", __builtin_return_address(0), file, line);
  this_worker->release(barrier);
  const char* wrong = update(barrier, [bytes](Fields& fields) -> const char* {
    if (fields.missing == 0) return "more arrivals than the phase waits for";
    --fields.missing, fields.bytes += int(bytes);
    return fields.bytes > kMostBytes ? "more bytes than an mbarrier counts" : nullptr;
  });
  if (wrong) this_worker->fail(format("mbarrier_arrive: %s", wrong), file, line);
  this_worker->let_waiting_go_on();
}

void mbarrier_wait(uint64_t* barrier, int parity, const char* file, int line) {
  Worker& worker = *this_worker;
  check_mbarrier(barrier, "mbarrier_wait", __builtin_return_address(0), file, line);
  if (parity != 0 && parity != 1) worker.fail(format("mbarrier_wait: parity is 0 or 1; got %d", parity), file, line);
  worker.wait_until("mbarrier_wait", is_over, barrier, uint64_t(parity), file, line);
  worker.acquire(barrier);
}

}  // namespace cuda_on_cpu
