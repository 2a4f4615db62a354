// The shared memory of the block that one worker is running.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "../include/cuda_runtime.h"

namespace cuda_on_cpu {

struct SharedVariable {
  size_t offset;
  SharedDeclaration declaration;
  const char* file;  // where it is declared; null for dynamic shared memory
  int line;
  int site;

  size_t end() const { return offset + declaration.bytes; }
  /// The element that holds this byte of the variable: "tile[3][5]".
  std::string element(size_t byte) const;
};

/// What a pointer into dynamic shared memory names, up to the next part.
struct SharedPart {
  const char* name;
  size_t offset, element_bytes;
  std::vector<size_t> extents;  // empty: not known
  bool one;  // false: the threads do not agree where it begins, so it is a thread's own pointer
};

/// An arena in which each variable is followed by a guard zone. Variables and guards begin as 0xff
/// bytes: read as a number, what was never written is NaN (or -1).
class SharedMemory {
 public:
  static constexpr size_t kArena = 512 * 1024;
  static constexpr size_t kGuard = 64;

  SharedMemory();
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;

  void begin_block(size_t dynamic_bytes);

  /// The variable declared at `site`, placed when the first thread of the block gets there. Null if
  /// the arena is full, which is far beyond any GPU's limit.
  void* variable(int site, const SharedDeclaration& declaration, const char* file, int line);

  void name_dynamic(const char* name, size_t element_bytes);

  void name_part(const char* name, const void* first, size_t element_bytes, const size_t* extents, size_t count);

  /// The element that holds this byte of the variable, by the name of its part if it has parts.
  std::string element(const SharedVariable& variable, size_t byte) const;

  /// The variable whose guard zone the block wrote into, or null.
  const SharedVariable* damaged() const;

  bool contains(uintptr_t address) const {
    return address - reinterpret_cast<uintptr_t>(arena_) < kArena;
  }
  size_t offset(uintptr_t address) const { return address - reinterpret_cast<uintptr_t>(arena_); }

  /// The variable that holds these bytes, or null; and the last one that begins before them.
  const SharedVariable* find(size_t offset, size_t bytes) const;
  const SharedVariable* nearest(size_t offset) const;

  char* at(size_t offset) const { return arena_ + offset; }
  char* dynamic() const { return arena_ + kLead; }
  size_t static_bytes() const { return static_bytes_; }

 private:
  // Before the first variable: room for negative indices, and the alignment of dynamic shared
  // memory.
  static constexpr size_t kLead = 1024;

  SharedVariable& place(size_t offset, const SharedDeclaration& declaration, const char* file,
                        int line, int site);

  char* arena_;
  std::vector<SharedVariable> variables_;
  std::vector<SharedPart> parts_;  // of the dynamic one
  std::vector<int> variable_of_site_;  // index into variables_, or -1
  size_t end_ = 0, static_bytes_ = 0;
};

}  // namespace cuda_on_cpu
