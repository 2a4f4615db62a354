#include "shared_trace.h"

#include <algorithm>
#include <set>

#include "worker.h"

namespace cuda_on_cpu {
namespace {

constexpr unsigned kBanks = 32, kWord = 4;

/// How often each bank has to be read or written for these words: once for each different word of it.
uint64_t busiest_bank(const std::set<uint32_t>& words) {
  uint64_t of_bank[kBanks] = {};
  for (uint32_t word : words) ++of_bank[word % kBanks];
  return *std::max_element(of_bank, of_bank + kBanks);
}

}  // namespace

void SharedTrace::add(const Fiber& thread, uint32_t phase, size_t offset, size_t bytes, bool writes, const void* pc) {
  if (phase != phase_) end_phase();
  phase_ = phase;
  const unsigned depth = thread.calls.depth();
  Count& count = counts_[{pc, depth ? thread.calls[depth - 1] : nullptr, writes}];
  if (count.place.empty()) {
    count.place = show_place(pc, thread);
    count.bytes = bytes;
    count.writes = writes;
  }
  const unsigned occurrence = occurrences_[{&count, thread.rank}]++;
  Instruction& instruction = instructions_[{&count, thread.warp, occurrence}];
  instruction.offsets[thread.lane] = uint32_t(offset);
  instruction.lanes |= 1u << thread.lane;
}

void SharedTrace::end_phase() {
  for (const auto& [key, instruction] : instructions_) {
    Count& count = *std::get<0>(key);
    const unsigned at_once = count.bytes <= 4 ? 32 : count.bytes <= 8 ? 16
                                                                      : 8;
    ++count.instructions;
    for (unsigned first = 0; first < 32; first += at_once) {
      std::set<uint32_t> words;
      for (unsigned lane = first; lane < first + at_once; ++lane) {
        if (!(instruction.lanes >> lane & 1)) continue;
        const uint32_t begin = instruction.offsets[lane];
        for (uint32_t word = begin / kWord; word <= (begin + count.bytes - 1) / kWord; ++word) words.insert(word);
      }
      count.passes += busiest_bank(words);
      count.least += !words.empty();
    }
  }
  instructions_.clear();
  occurrences_.clear();
}

std::string SharedTrace::take() {
  end_phase();
  std::string text;
  for (const auto& [site, count] : counts_) {
    text += format("%s|%s|%zu|%llu|%llu|%llu\n", count.place.c_str(), count.writes ? "writes" : "reads", count.bytes,
                   (unsigned long long)count.instructions, (unsigned long long)count.passes,
                   (unsigned long long)count.least);
  }
  counts_.clear();
  return text;
}

}  // namespace cuda_on_cpu
