#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <new>

#if defined(__APPLE__)
#define SYMBOL(name) "_" #name
#else
#define SYMBOL(name) #name
#endif

// clang-format off
// The switch saves what the calling convention says a function must preserve, and nothing else.
#if defined(__x86_64__)
asm(".text\n"
    ".globl " SYMBOL(cuda_on_cpu_switch) "\n"
    ".globl " SYMBOL(cuda_on_cpu_resume) "\n"
    SYMBOL(cuda_on_cpu_switch) ":\n"
    "  pushq %rbp\n"
    "  pushq %rbx\n"
    "  pushq %r12\n"
    "  pushq %r13\n"
    "  pushq %r14\n"
    "  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    SYMBOL(cuda_on_cpu_resume) ":\n"
    "  popq %r15\n"
    "  popq %r14\n"
    "  popq %r13\n"
    "  popq %r12\n"
    "  popq %rbx\n"
    "  popq %rbp\n"
    "  ret\n");
constexpr size_t kFrameWords = 8;  // six registers, the return address, and one to align the stack
constexpr size_t kReturnAddress = 6;
#elif defined(__aarch64__)
asm(".text\n"
    ".globl " SYMBOL(cuda_on_cpu_switch) "\n"
    ".globl " SYMBOL(cuda_on_cpu_resume) "\n"
    ".p2align 2\n"
    SYMBOL(cuda_on_cpu_switch) ":\n"
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
    "  mov sp, x1\n"
    SYMBOL(cuda_on_cpu_resume) ":\n"
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
constexpr size_t kFrameWords = 20;
constexpr size_t kReturnAddress = 11;  // x30
#else
#error "cuda_on_cpu runs on x86-64 and arm64; another processor needs its own cuda_on_cpu_switch"
#endif
// clang-format on

namespace cuda_on_cpu {
namespace {

// Every guard page splits a mapping in two, and Linux allows 65,530 mappings per process. Beyond this
// many stacks (16 OS threads with full blocks) the others have no guard page.
constexpr long kMaxGuards = 16 * 1024;
std::atomic<long> guards{0};

}  // namespace

Stack StackPool::next() {
  size_t place = count_ % kStacksPerSlab;
  if (place == 0) {
    void* slab = mmap(nullptr, kStacksPerSlab * Stack::kBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
    if (slab == MAP_FAILED) throw std::bad_alloc();
    slabs_.push_back(static_cast<char*>(slab));
  }
  char* memory = slabs_.back() + place * Stack::kBytes;
  size_t page = size_t(sysconf(_SC_PAGESIZE));
  bool guarded = guards++ < kMaxGuards && mprotect(memory, page, PROT_NONE) == 0;
  return Stack(memory, guarded ? page : 0, count_++);
}

StackPool::~StackPool() {
  for (char* slab : slabs_) munmap(slab, kStacksPerSlab * Stack::kBytes);
  guards -= long(count_);
}

StackPointer Stack::start(void (*entry)()) {
  uintptr_t top = bottom_ + kBytes - stagger_;
  void** frame = reinterpret_cast<void**>(top) - kFrameWords;
  std::memset(frame, 0, kFrameWords * sizeof(void*));
  frame[kReturnAddress] = reinterpret_cast<void*>(entry);
  return frame;
}

}  // namespace cuda_on_cpu
