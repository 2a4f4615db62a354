// Counts the bank conflicts of one block's accesses to shared memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <utility>

namespace cuda_on_cpu {

struct Fiber;

/// What each line of a kernel costs in shared memory. The accesses that the threads of a warp make at one place for the
/// n-th time between two barriers are one instruction. Shared memory has 32 banks of 4 bytes. A pass serves one word
/// of each bank, whichever lanes want it, and 32 lanes with up to 4 bytes, 16 with 8 or 8 with 16.
class SharedTrace {
 public:
  /// An access of the running thread, in the phase between two barriers; `offset` in the block's shared memory.
  void add(const Fiber& thread, uint32_t phase, size_t offset, size_t bytes, bool writes, const void* pc);

  /// A line for each place: "PLACE|reads or writes|bytes|instructions|passes|passes without conflicts"; forgets all.
  std::string take();

 private:
  struct Instruction {
    uint32_t offsets[32];
    unsigned lanes = 0;
  };
  struct Count {
    std::string place;
    size_t bytes = 0;
    bool writes = false;
    uint64_t instructions = 0, passes = 0, least = 0;
  };
  using Site = std::tuple<const void*, const void*, bool>;  // the access, the call that it is in, whether it writes

  void end_phase();

  uint32_t phase_ = 0;
  std::map<Site, Count> counts_;
  std::map<std::tuple<Count*, unsigned, unsigned>, Instruction> instructions_;  // by place, warp and occurrence
  std::map<std::pair<Count*, unsigned>, unsigned> occurrences_;  // by place and thread
};

}  // namespace cuda_on_cpu
