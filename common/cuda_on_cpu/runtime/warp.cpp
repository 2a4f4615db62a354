// Warp collectives: the lanes named in a mask meet, and the last one computes the results of all.
#include <algorithm>

#include "worker.h"

namespace cuda_on_cpu {

// ---- meeting

void Worker::collective(const char* operation, WarpFunction run, unsigned mask, void* argument,
                        const char* file, int line) {
  Fiber& me = running();
  if (__builtin_expect(overdue(), 0)) fail_overdue(file, line);
  if (!(mask >> me.lane & 1)) {
    fail(format("%s: lane %u calls it with mask 0x%08x, which leaves lane %u out", operation,
                me.lane, mask, me.lane),
         file, line);
  }
  me.operation = operation;
  me.run = run;
  me.mask = mask;
  me.argument = argument;
  me.file = file;
  me.line = line;
  me.state = Fiber::State::in_collective;
  warps_[me.warp].waiting |= 1u << me.lane;
  if (!try_complete(me.warp, me)) {
    switch_from(me);
  } else if (launch->settings.order != Order::forward) {
    push(me.rank);  // another lane may go first
    switch_from(me);
  }
}

/// Lets the lanes that `one` waits for go on, if all of them are there.
bool Worker::try_complete(unsigned warp_index, Fiber& one) {
  const Warp& warp = warps_[warp_index];
  unsigned lanes = one.mask & warp.alive;
  if ((warp.waiting & lanes) != lanes) return false;
  for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
    const Fiber& other = *fibers_[warp_index * 32 + unsigned(__builtin_ctz(rest))];
    if (other.mask == one.mask && other.run == one.run) continue;
    if (current_thread == &one) {
      fail(format("%s with mask 0x%08x waits for lane %u, which is in %s with mask 0x%08x at %s:%d",
                  one.operation, one.mask, other.lane, other.operation, other.mask, other.file,
                  other.line),
           one.file, one.line);
    }
    return false;
  }
  complete(warp_index, lanes, one);
  return true;
}

void Worker::complete(unsigned warp_index, unsigned lanes, Fiber& one) {
  void* arguments[32] = {};
  for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
    unsigned lane = unsigned(__builtin_ctz(rest));
    arguments[lane] = fibers_[warp_index * 32 + lane]->argument;
  }
  if (one.run) {
    one.run(arguments, lanes);
  } else if (launch->site.checked) {
    join_clocks(warp_index, lanes);
  }
  warps_[warp_index].waiting &= ~lanes;
  bool reverse = launch->settings.order == Order::reverse;
  for (unsigned k = 0; k < 32; ++k) {
    unsigned lane = reverse ? 31 - k : k;
    if (!(lanes >> lane & 1)) continue;
    Fiber& fiber = *fibers_[warp_index * 32 + lane];
    fiber.state = Fiber::State::ready;
    if (&fiber != current_thread) push(fiber.rank);
  }
}

/// After a __syncwarp, all that any of these lanes has done or seen comes before what they do next.
void Worker::join_clocks(unsigned warp_index, unsigned lanes) {
  uint32_t joined[32] = {};
  for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
    const Fiber& fiber = *fibers_[warp_index * 32 + unsigned(__builtin_ctz(rest))];
    for (int i = 0; i < 32; ++i) joined[i] = std::max(joined[i], fiber.seen[i]);
    joined[fiber.lane] = std::max(joined[fiber.lane], fiber.clock);
  }
  for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
    Fiber& fiber = *fibers_[warp_index * 32 + unsigned(__builtin_ctz(rest))];
    std::copy(joined, joined + 32, fiber.seen);
    ++fiber.clock;
  }
  std::vector<uint32_t> known;
  for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
    const Fiber& fiber = *fibers_[warp_index * 32 + unsigned(__builtin_ctz(rest))];
    if (known.size() < fiber.known.size()) known.resize(fiber.known.size());
    for (size_t i = 0; i < fiber.known.size(); ++i) known[i] = std::max(known[i], fiber.known[i]);
  }
  if (known.empty()) return;
  for (unsigned rest = lanes; rest != 0; rest &= rest - 1)
    fibers_[warp_index * 32 + unsigned(__builtin_ctz(rest))]->known = known;
}

void Worker::release(const void* object) {
  if (!launch->site.checked) return;
  Fiber& me = running();
  std::vector<uint32_t>& clocks = clocks_[object];
  clocks.resize(threads_);
  for (size_t i = 0; i < me.known.size(); ++i) clocks[i] = std::max(clocks[i], me.known[i]);
  for (unsigned i = 0; i < 32 && me.warp * 32 + i < threads_; ++i)
    clocks[me.warp * 32 + i] = std::max(clocks[me.warp * 32 + i], me.seen[i]);
  clocks[me.rank] = me.clock++;
}

void Worker::acquire(const void* object) {
  if (!launch->site.checked) return;
  Fiber& me = running();
  const auto found = clocks_.find(object);
  if (found == clocks_.end()) return;
  const std::vector<uint32_t>& clocks = found->second;
  me.known.resize(threads_);
  for (unsigned i = 0; i < threads_; ++i) me.known[i] = std::max(me.known[i], clocks[i]);
}

// ---- what they compute

namespace {

struct Shuffle {
  uint64_t value, result;
  unsigned source;
};

/// A lane that is absent contributes all ones (NaN), so that no kernel relies on its value.
void shuffle_lanes(void* const* arguments, unsigned lanes) {
  for (; lanes != 0; lanes &= lanes - 1) {
    auto& mine = *static_cast<Shuffle*>(arguments[__builtin_ctz(lanes)]);
    auto* other = static_cast<const Shuffle*>(arguments[mine.source]);
    mine.result = other ? other->value : ~uint64_t(0);
  }
}

struct Word {
  unsigned value, result;
};

template <class Operator>
void fold_lanes(void* const* arguments, unsigned lanes, Operator combine) {
  unsigned result = static_cast<Word*>(arguments[__builtin_ctz(lanes)])->value;
  for (unsigned rest = lanes & (lanes - 1); rest != 0; rest &= rest - 1) {
    result = combine(result, static_cast<Word*>(arguments[__builtin_ctz(rest)])->value);
  }
  for (; lanes != 0; lanes &= lanes - 1)
    static_cast<Word*>(arguments[__builtin_ctz(lanes)])->result = result;
}

template <ReduceOp op>
void reduce_lanes(void* const* arguments, unsigned lanes) {
  fold_lanes(arguments, lanes, [](unsigned a, unsigned b) -> unsigned {
    switch (op) {
      case ReduceOp::add:
        return a + b;
      case ReduceOp::min_signed:
        return int(a) < int(b) ? a : b;
      case ReduceOp::max_signed:
        return int(a) > int(b) ? a : b;
      case ReduceOp::min_unsigned:
        return a < b ? a : b;
      case ReduceOp::max_unsigned:
        return a > b ? a : b;
      case ReduceOp::bit_and:
        return a & b;
      case ReduceOp::bit_or:
        return a | b;
      case ReduceOp::bit_xor:
        return a ^ b;
    }
    return a;
  });
}

struct Operation {
  const char* name;
  WarpFunction run;
};
constexpr Operation kReductions[] = {
    {"__reduce_add_sync", reduce_lanes<ReduceOp::add>},
    {"__reduce_min_sync", reduce_lanes<ReduceOp::min_signed>},
    {"__reduce_max_sync", reduce_lanes<ReduceOp::max_signed>},
    {"__reduce_min_sync", reduce_lanes<ReduceOp::min_unsigned>},
    {"__reduce_max_sync", reduce_lanes<ReduceOp::max_unsigned>},
    {"__reduce_and_sync", reduce_lanes<ReduceOp::bit_and>},
    {"__reduce_or_sync", reduce_lanes<ReduceOp::bit_or>},
    {"__reduce_xor_sync", reduce_lanes<ReduceOp::bit_xor>},
};

void ballot_lanes(void* const* arguments, unsigned lanes) {
  unsigned result = 0;
  for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
    int lane = __builtin_ctz(rest);
    if (static_cast<Word*>(arguments[lane])->value) result |= 1u << lane;
  }
  for (; lanes != 0; lanes &= lanes - 1)
    static_cast<Word*>(arguments[__builtin_ctz(lanes)])->result = result;
}

/// For each lane, the lanes whose value is the same; the answer goes where the source lane was.
void match_lanes(void* const* arguments, unsigned lanes) {
  for (unsigned mine = lanes; mine != 0; mine &= mine - 1) {
    auto& me = *static_cast<Shuffle*>(arguments[__builtin_ctz(mine)]);
    me.source = 0;
    for (unsigned theirs = lanes; theirs != 0; theirs &= theirs - 1) {
      int lane = __builtin_ctz(theirs);
      if (static_cast<Shuffle*>(arguments[lane])->value == me.value) me.source |= 1u << lane;
    }
  }
}

}  // namespace

void warp_sync(unsigned mask, const char* file, int line) {
  this_worker->collective("__syncwarp", nullptr, mask, nullptr, file, line);
}

uint64_t warp_shuffle(unsigned mask, uint64_t value, unsigned source_lane, const char* file,
                      int line) {
  Shuffle lane{value, value, source_lane % 32};
  this_worker->collective("a shuffle", shuffle_lanes, mask, &lane, file, line);
  return lane.result;
}

unsigned warp_ballot(unsigned mask, bool predicate, const char* file, int line) {
  Word lane{predicate, 0};
  this_worker->collective("a warp vote", ballot_lanes, mask, &lane, file, line);
  return lane.result;
}

unsigned warp_reduce(unsigned mask, ReduceOp op, unsigned value, const char* file, int line) {
  Word lane{value, 0};
  const Operation& operation = kReductions[int(op)];
  this_worker->collective(operation.name, operation.run, mask, &lane, file, line);
  return lane.result;
}

unsigned warp_match(unsigned mask, uint64_t value, const char* file, int line) {
  Shuffle lane{value, 0, 0};
  this_worker->collective("__match_any_sync", match_lanes, mask, &lane, file, line);
  return lane.source;
}

unsigned warp_active_mask() { return this_worker->warp_of(this_worker->running()).alive; }

}  // namespace cuda_on_cpu
