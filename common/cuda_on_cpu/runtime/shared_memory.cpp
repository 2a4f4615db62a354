#include "shared_memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

namespace cuda_on_cpu {
namespace {

constexpr int kDynamicSite = -1;  // dynamic shared memory has no declaration of its own

}  // namespace

SharedMemory::SharedMemory() {
  void* memory = nullptr;
  if (posix_memalign(&memory, 4096, kArena) != 0) throw std::bad_alloc();
  arena_ = static_cast<char*>(memory);
  std::memset(arena_, 0xff, kLead);
}

SharedMemory::~SharedMemory() { std::free(arena_); }

void SharedMemory::begin_block(size_t dynamic_bytes) {
  for (const SharedVariable& v : variables_) {
    if (v.site != kDynamicSite) variable_of_site_[size_t(v.site)] = -1;
  }
  variables_.clear();
  parts_.clear();
  static_bytes_ = 0;
  end_ = kLead;
  if (dynamic_bytes > 0) {
    place(kLead, {"dynamic shared memory", dynamic_bytes, 16, 0, {}}, nullptr, 0, kDynamicSite);
  }
}

void SharedMemory::name_dynamic(const char* name, size_t element_bytes) {
  if (variables_.empty() || variables_[0].site != kDynamicSite) return;
  SharedDeclaration& dynamic = variables_[0].declaration;
  dynamic.name = name;
  dynamic.element_bytes = element_bytes;
  dynamic.extents[0] = dynamic.bytes / element_bytes;
}

SharedVariable& SharedMemory::place(size_t offset, const SharedDeclaration& declaration,
                                    const char* file, int line, int site) {
  std::memset(arena_ + offset, 0xff, declaration.bytes + kGuard);
  end_ = offset + declaration.bytes + kGuard;
  variables_.push_back({offset, declaration, file, line, site});
  return variables_.back();
}

void* SharedMemory::variable(int site, const SharedDeclaration& declaration, const char* file,
                             int line) {
  size_t s = size_t(site);
  if (s >= variable_of_site_.size()) variable_of_site_.resize(s + 16, -1);
  int known = variable_of_site_[s];
  if (known >= 0) return arena_ + variables_[size_t(known)].offset;

  size_t bytes = declaration.bytes;
  size_t offset =
      (end_ + declaration.alignment - 1) / declaration.alignment * declaration.alignment;
  static_bytes_ += bytes;
  if (bytes > kArena || offset + bytes + kGuard > kArena) return nullptr;
  variable_of_site_[s] = int(variables_.size());
  return arena_ + place(offset, declaration, file, line, site).offset;
}

std::string SharedVariable::element(size_t byte) const {
  const SharedDeclaration& d = declaration;
  std::string text = d.name;
  if (d.element_bytes == 0) return text + " at byte " + std::to_string(byte);
  size_t index = byte / d.element_bytes, inner = 1;
  for (size_t extent : d.extents) inner *= extent ? extent : 1;
  for (size_t extent : d.extents) {
    if (extent == 0) break;
    inner /= extent;
    text += "[" + std::to_string(index / inner) + "]";
    index %= inner;
  }
  return text;
}

void SharedMemory::name_part(const char* name, const void* first, size_t element_bytes, const size_t* extents,
                             size_t count) {
  if (variables_.empty() || variables_[0].site != kDynamicSite) return;
  const size_t offset = this->offset(reinterpret_cast<uintptr_t>(first));
  if (offset < kLead || offset >= variables_[0].end()) return;
  for (SharedPart& part : parts_) {
    if (std::strcmp(part.name, name) == 0) {
      part.one &= part.offset == offset;
      return;
    }
  }
  parts_.push_back({name, offset, element_bytes, std::vector<size_t>(extents, extents + count), true});
}

std::string SharedMemory::element(const SharedVariable& variable, size_t byte) const {
  const size_t offset = variable.offset + byte;
  const SharedPart* best = nullptr;
  size_t end = variable.end();
  if (variable.site == kDynamicSite) {
    for (const SharedPart& part : parts_) {
      if (!part.one) continue;
      if (part.offset > offset) {
        end = std::min(end, part.offset);
      } else if (!best || part.offset > best->offset) {  // of two at one place, the first
        best = &part;
      }
    }
  }
  if (!best) return variable.element(byte);
  size_t index = (offset - best->offset) / best->element_bytes, outer = 1;
  std::string text = best->name;
  std::vector<size_t> extents = best->extents;
  for (size_t i = 0; i + 1 < extents.size(); ++i) outer *= extents[i];
  if (end != variable.end() && !extents.empty() && outer > 0) {  // rows may be longer than what is in them
    const size_t row = (end - best->offset) / best->element_bytes / outer;
    if (row >= extents.back() && row < 2 * extents.back()) extents.back() = row;
  }
  for (size_t i = 1; i < extents.size(); ++i) {
    size_t inner = 1;
    for (size_t k = i; k < extents.size(); ++k) inner *= extents[k];
    if (inner == 0) return text + "[" + std::to_string(index) + "]";
    text += "[" + std::to_string(index / inner) + "]";
    index %= inner;
  }
  return text + "[" + std::to_string(index) + "]";
}

const SharedVariable* SharedMemory::damaged() const {
  auto intact = [this](size_t offset) {
    uint64_t words[kGuard / 8], all = ~uint64_t(0);
    std::memcpy(words, arena_ + offset, kGuard);
    for (uint64_t word : words) all &= word;
    return all == ~uint64_t(0);
  };
  for (const SharedVariable& v : variables_) {
    if (!intact(v.end())) return &v;
  }
  return !variables_.empty() && !intact(kLead - kGuard) ? &variables_.front() : nullptr;
}

const SharedVariable* SharedMemory::find(size_t offset, size_t bytes) const {
  for (const SharedVariable& v : variables_) {
    if (offset >= v.offset && offset + bytes <= v.end()) return &v;
  }
  return nullptr;
}

const SharedVariable* SharedMemory::nearest(size_t offset) const {
  const SharedVariable* best = nullptr;
  for (const SharedVariable& v : variables_) {
    if (v.offset <= offset && (!best || v.offset > best->offset)) best = &v;
  }
  if (!best && !variables_.empty()) best = &variables_.front();
  return best;
}

}  // namespace cuda_on_cpu
