#include "checker.h"

#include <dlfcn.h>

#include <algorithm>

#include "worker.h"

namespace cuda_on_cpu {
namespace {

const char* verb(Access access) {
  switch (access) {
    case Access::read:
      return "reads";
    case Access::write:
      return "writes";
    case Access::atomic:
      return "updates atomically";
    case Access::copy_in_flight:
      return "copies asynchronously to";
    case Access::none:
      break;
  }
  return "touches";
}

const char* past(Access access) {
  switch (access) {
    case Access::read:
      return "read it";
    case Access::write:
      return "wrote it";
    case Access::atomic:
      return "updated it atomically";
    case Access::copy_in_flight:
      return "copied to it asynchronously";
    case Access::none:
      break;
  }
  return "touched it";
}

/// `where` is the element that both accesses touch.
std::string describe(const Conflict& conflict, const std::string& where, Worker& worker,
                     const void* pc) {
  if (conflict.uninitialised) {
    return format("uninitialised shared memory: reads %s, which no thread of the block has written",
                  where.c_str());
  }
  const Stamp& earlier = conflict.earlier;
  std::string there = show_place(code_address(earlier, pc));
  if (earlier.block != worker.block_serial) {
    return format("race on %s: %s what another block %s at %s, and blocks run in any order",
                  where.c_str(), verb(conflict.access),
                  earlier.access == Access::read ? "reads" : "writes", there.c_str());
  }
  const Fiber& other = worker.fiber(earlier.thread);
  std::string who = format("thread %s", show(other.index).c_str());
  if (earlier.access == Access::copy_in_flight) {
    const bool by_thread = !other.copies.empty();  // or it is an mbarrier that counts its bytes
    return format("race on %s: %s it while the %s that %s issued at %s is in flight; %s first", where.c_str(),
                  verb(conflict.access), by_thread ? "cp_async" : "copy", who.c_str(), there.c_str(),
                  by_thread ? "cp_async_wait" : "wait for its mbarrier");
  }
  const char* hazard = conflict.access == Access::read  ? "read after write"
                       : earlier.access == Access::read ? "write after read"
                                                        : "write after write";
  bool same_warp = other.warp == worker.running().warp;
  const char* between = worker.has_async_barriers() ? ", mbarrier or other barrier"
                        : same_warp                 ? " or __syncwarp()"
                                                    : "";
  return format("race on %s (%s): %s it, and %s %s at %s, with no __syncthreads()%s between", where.c_str(), hazard,
                verb(conflict.access), who.c_str(), past(earlier.access), there.c_str(), between);
}

/// What is wrong with an access that is not inside `name`, `size` bytes from `begin`.
std::string overrun(const std::string& name, size_t size, uintptr_t begin, uintptr_t address,
                    size_t bytes, Access access) {
  std::string where = address < begin
                          ? format("%zu bytes before its start", size_t(begin - address))
                          : format("at byte %zu", size_t(address - begin));
  return format("out of range: %s %zu bytes of %s %s; it has %zu bytes", verb(access), bytes,
                name.c_str(), where.c_str(), size);
}

std::string overrun(const SharedVariable& variable, uintptr_t begin, uintptr_t address,
                    size_t bytes, Access access) {
  const SharedDeclaration& d = variable.declaration;
  std::string name = format("shared memory '%s'", d.name);
  bool one_dimension = d.element_bytes > 0 && d.extents[1] == 0;
  if (one_dimension && address >= begin) {
    name += format(", element %zu of %zu,", (address - begin) / d.element_bytes, d.extents[0]);
  }
  return overrun(name, d.bytes, begin, address, bytes, access);
}

void check_shared(Worker& worker, uintptr_t address, size_t bytes, Access access, const void* pc) {
  size_t offset = worker.shared.offset(address);
  const SharedVariable* variable = worker.shared.find(offset, bytes);
  if (!variable) {
    const SharedVariable* near = worker.shared.nearest(offset);
    std::string what =
        near ? overrun(*near, address - offset + near->offset, address, bytes, access)
             : "out of range: the kernel has no shared memory; was its size given in the launch?";
    worker.fail(cudaErrorIllegalAddress, what, show_place(pc, worker.running()));
  }
  if (__builtin_expect(worker.counts(), 0)) worker.count_shared(offset, bytes, access, pc);
  Cell* cells = worker.shared_cells.get() + offset;
  Conflict conflict =
      record_access(cells, bytes, access, worker.running(), pc, worker.block_serial, true, false);
  if (conflict && !worker.has_conflict()) {
    std::string element = worker.shared.element(*variable, offset + conflict.byte - variable->offset);
    worker.fail_at_barrier(describe(conflict, element, worker, pc), show_place(pc, worker.running()));
  }
}

// Blocks run on several OS threads, and the cells of a tensor are shared between them.
class CellLock {
 public:
  explicit CellLock(uintptr_t address) : flag_(flags_[address / kLine % kLocks]) {
    while (flag_.test_and_set(std::memory_order_acquire)) {}
  }
  ~CellLock() { flag_.clear(std::memory_order_release); }
  static constexpr uintptr_t kLine = 64;

 private:
  static constexpr size_t kLocks = 256;
  static std::atomic_flag flags_[kLocks];
  std::atomic_flag& flag_;
};
std::atomic_flag CellLock::flags_[CellLock::kLocks];

/// Addresses outside all tensors that a kernel may use: its arguments, globals of its library,
/// cudaMalloc.
bool is_known(const Launch& launch, uintptr_t address, size_t bytes) {
  Dl_info info;
  return launch.global->on_host_stack(address) || is_allocated(address, bytes) ||
         dladdr(reinterpret_cast<const void*>(address), &info) != 0;
}

void check_global(Worker& worker, uintptr_t address, size_t bytes, Access access, const void* pc) {
  GlobalMemory& global = *worker.launch->global;
  const Tensor* tensor = global.find(address, bytes);
  if (!tensor) {
    if (is_known(*worker.launch, address, bytes)) return;
    const Tensor* near = global.nearest(address);
    std::string what =
        near ? overrun("tensor '" + near->name + "'", near->bytes, near->address, address, bytes,
                       access)
             : format("out of range: %s %zu bytes at address 0x%zx, which is in no tensor",
                      verb(access), bytes, size_t(address));
    worker.fail(cudaErrorIllegalAddress, what, show_place(pc, worker.running()));
  }
  for (size_t done = 0; done < bytes;) {
    uintptr_t at = address + done;
    size_t part = std::min<size_t>(bytes - done, CellLock::kLine - at % CellLock::kLine);
    Cell* cells = global.cells_of(*tensor, at);
    if (!cells) return;
    Conflict conflict;
    {
      CellLock lock(at);
      conflict = record_access(cells, part, access, worker.running(), pc, global.first_block(),
                               false, global.fenced());
    }
    if (conflict && !worker.has_conflict()) {
      size_t byte = at + conflict.byte - tensor->address;
      worker.fail_at_barrier(describe(conflict, format("%s, byte %zu", tensor->name.c_str(), byte), worker, pc),
                             show_place(pc, worker.running()));
      return;
    }
    done += part;
  }
}

/// A type as the kernel's author writes it: a float4 for "'const struct float4'".
std::string plain_type(std::string name) {
  const auto remove = [&](const std::string& word) {
    for (size_t at; (at = name.find(word)) != std::string::npos;) name.erase(at, word.size());
  };
  for (const char* word : {"'", "const ", "volatile ", "struct ", "class ", "cuda_on_cpu::"}) remove(word);
  if (name.rfind("Float16x2", 0) == 0) name = "half2 or __nv_bfloat162";  // gcc leaves its parameter out
  return (name.rfind("int", 0) == 0 ? "an " : "a ") + name;
}

template <class T>
bool inside(const T* object, uintptr_t address) {
  return address - reinterpret_cast<uintptr_t>(object) < sizeof(T);
}

}  // namespace

void check_access(const void* pointer, size_t bytes, Access access, const void* pc) {
  if (!current_thread || bytes == 0) return;
  Worker& worker = *this_worker;
  if (worker.overdue()) worker.fail_overdue(show_place(pc, worker.running()));
  worker.count_access_after_conflict();
  const Fiber& thread = worker.running();
  uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  if (thread.stack.contains(address) || inside(&thread, address) || inside(&worker, address))
    return;
  if (worker.shared.contains(address)) {
    check_shared(worker, address, bytes, access, pc);
  } else if (worker.launch->global && !inside(&current_thread, address) &&
             !inside(&current_block, address)) {
    check_global(worker, address, bytes, access, pc);
  }
}

void check_after_write(const void* pointer, size_t bytes, const void* pc) {
  Worker& worker = *this_worker;
  const size_t offset = worker.shared.offset(reinterpret_cast<uintptr_t>(pointer));
  const SharedVariable* variable = worker.shared.find(offset, bytes);
  if (!variable || worker.has_conflict()) return;
  const Conflict conflict = unordered_write(worker.shared_cells.get() + offset, bytes, worker.running());
  if (!conflict) return;
  const std::string element = worker.shared.element(*variable, offset + conflict.byte - variable->offset);
  worker.fail_at_barrier(describe(conflict, element, worker, pc), show_place(pc, worker.running()));
}

std::string show_address(const void* pointer) {
  Worker& worker = *this_worker;
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  if (worker.shared.contains(address)) {
    const size_t offset = worker.shared.offset(address);
    const SharedVariable* variable = worker.shared.find(offset, 1);
    if (!variable) return "";
    const size_t byte = offset - variable->offset;
    return format("shared memory '%s' at byte %zu (%s)", variable->declaration.name, byte,
                  worker.shared.element(*variable, byte).c_str());
  }
  if (!worker.launch->global) return "";
  const Tensor* tensor = worker.launch->global->find(address, 1);
  if (tensor) return format("tensor '%s' at byte %zu", tensor->name.c_str(), size_t(address - tensor->address));
  return is_allocated(address, 1) ? format("memory from cudaMalloc at address 0x%zx", size_t(address)) : "";
}

void check_alignment(const void* pointer, size_t alignment, const char* verb, const std::string& type, const void* pc) {
  if (!current_thread) return;
  const std::string place = show_address(pointer);
  if (place.empty()) return;  // a thread's own variables, the kernel's arguments
  Worker& worker = *this_worker;
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  const Tensor* tensor = worker.launch->global ? worker.launch->global->find(address, 1) : nullptr;
  const size_t before = tensor ? tensor->address % alignment : 0;
  const std::string why = before ? format("and the tensor begins %zu bytes after a multiple of %zu", before, alignment)
                                 : format("which is not a multiple of %zu", alignment);
  worker.fail(cudaErrorMisalignedAddress,
              format("misaligned: %s %s of %s, %s", verb, plain_type(type).c_str(), place.c_str(), why.c_str()),
              show_place(pc, worker.running()));
}

}  // namespace cuda_on_cpu
