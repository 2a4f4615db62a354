#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>

#if defined(__APPLE__)
#define SYMBOL(name) "_" #name
#else
#define SYMBOL(name) #name
#endif

// The switch saves what the calling convention says a function must preserve, and nothing else.
#if defined(__x86_64__)
asm(".text\n"
    ".globl " SYMBOL(cuda_on_cpu_switch) "\n"
    ".globl " SYMBOL(cuda_on_cpu_resume) "\n" SYMBOL(cuda_on_cpu_switch) ":\n"
    "  pushq %rbp\n"
    "  pushq %rbx\n"
    "  pushq %r12\n"
    "  pushq %r13\n"
    "  pushq %r14\n"
    "  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n" SYMBOL(cuda_on_cpu_resume) ":\n"
    "  popq %r15\n"
    "  popq %r14\n"
    "  popq %r13\n"
    "  popq %r12\n"
    "  popq %rbx\n"
    "  popq %rbp\n"
    "  ret\n");
namespace {
constexpr size_t kFrameWords = 8;   // six registers, the return address, and one word to align the stack
constexpr size_t kReturnAddress = 6;
}  // namespace
#elif defined(__aarch64__)
asm(".text\n"
    ".globl " SYMBOL(cuda_on_cpu_switch) "\n"
    ".globl " SYMBOL(cuda_on_cpu_resume) "\n"
    ".p2align 2\n" SYMBOL(cuda_on_cpu_switch) ":\n"
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp, #0]\n"
    "  stp x21, x22, [sp, #16]\n"
    "  stp x23, x24, [sp, #32]\n"
    "  stp x25, x26, [sp, #48]\n"
    "  stp x27, x28, [sp, #64]\n"
    "  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n"
    "  stp d10, d11, [sp, #112]\n"
    "  stp d12, d13, [sp, #128]\n"
    "  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n"
    "  str x9, [x0]\n"
    "  mov sp, x1\n" SYMBOL(cuda_on_cpu_resume) ":\n"
    "  ldp x19, x20, [sp, #0]\n"
    "  ldp x21, x22, [sp, #16]\n"
    "  ldp x23, x24, [sp, #32]\n"
    "  ldp x25, x26, [sp, #48]\n"
    "  ldp x27, x28, [sp, #64]\n"
    "  ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n"
    "  ldp d10, d11, [sp, #112]\n"
    "  ldp d12, d13, [sp, #128]\n"
    "  ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #160\n"
    "  ret\n");
namespace {
constexpr size_t kFrameWords = 20;
constexpr size_t kReturnAddress = 11;  // x30
}  // namespace
#else
#error "cuda_on_cpu runs on x86-64 and arm64; another processor needs its own cuda_on_cpu_switch"
#endif

namespace cuda_on_cpu {
namespace {

constexpr size_t kStacksPerSlab = 32;

// Every guard page splits a mapping in two, and Linux allows 65,530 mappings a process. Beyond this
// many stacks (16 OS threads with full blocks) the rest does without.
constexpr int kMaxGuards = 16 * 1024;
std::atomic<int> guards{0};

/// Slabs are kept for the next worker of this OS thread; a thread-local needs no lock.
char* stack_memory(size_t index) {
  static __thread char* slab;
  if (index % kStacksPerSlab == 0) {
    void* memory = mmap(nullptr, kStacksPerSlab * Stack::kBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    slab = static_cast<char*>(memory);
  }
  return slab + index % kStacksPerSlab * Stack::kBytes;
}

}  // namespace

Stack::Stack(size_t index) : bottom_(reinterpret_cast<uintptr_t>(stack_memory(index))), guard_bytes_(0) {
  size_t page = size_t(sysconf(_SC_PAGESIZE));
  if (guards.fetch_add(1) < kMaxGuards && mprotect(reinterpret_cast<void*>(bottom_), page, PROT_NONE) == 0) {
    guard_bytes_ = page;
  }
  stagger_ = index * 320 % kStagger;
}

StackPointer Stack::start(void (*entry)()) {
  uintptr_t top = bottom_ + kBytes - stagger_;
  void** frame = reinterpret_cast<void**>(top) - kFrameWords;
  std::memset(frame, 0, kFrameWords * sizeof(void*));
  frame[kReturnAddress] = reinterpret_cast<void*>(entry);
  return frame;
}

}  // namespace cuda_on_cpu
