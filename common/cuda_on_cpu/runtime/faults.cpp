#include "faults.h"

#include <sys/ucontext.h>

#include "worker.h"

namespace cuda_on_cpu {
namespace {

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE};
struct sigaction previous_actions[3], previous_interrupt;

// Where the machine's registers are in a signal's context.
struct Registers {
  uintptr_t pc, sp;
};

Registers get(const ucontext_t& context) {
#if defined(__APPLE__) && defined(__aarch64__)
  return {uintptr_t(context.uc_mcontext->__ss.__pc), uintptr_t(context.uc_mcontext->__ss.__sp)};
#elif defined(__APPLE__)
  return {uintptr_t(context.uc_mcontext->__ss.__rip), uintptr_t(context.uc_mcontext->__ss.__rsp)};
#elif defined(__aarch64__)
  return {uintptr_t(context.uc_mcontext.pc), uintptr_t(context.uc_mcontext.sp)};
#else
  return {uintptr_t(context.uc_mcontext.gregs[REG_RIP]),
          uintptr_t(context.uc_mcontext.gregs[REG_RSP])};
#endif
}

void set(ucontext_t& context, Registers registers) {
#if defined(__APPLE__) && defined(__aarch64__)
  context.uc_mcontext->__ss.__pc = registers.pc;
  context.uc_mcontext->__ss.__sp = registers.sp;
#elif defined(__APPLE__)
  context.uc_mcontext->__ss.__rip = registers.pc;
  context.uc_mcontext->__ss.__rsp = registers.sp;
#elif defined(__aarch64__)
  context.uc_mcontext.pc = registers.pc;
  context.uc_mcontext.sp = registers.sp;
#else
  context.uc_mcontext.gregs[REG_RIP] = greg_t(registers.pc);
  context.uc_mcontext.gregs[REG_RSP] = greg_t(registers.sp);
#endif
}

/// Takes a note and continues the scheduler in place of the fiber.
void leave_fiber(ucontext_t& context, int signal, const siginfo_t& info) {
  Worker& worker = *this_worker;
  worker.fault = {signal, info.si_code, reinterpret_cast<uintptr_t>(info.si_addr),
                  // + 1: show_place expects a return address
                  reinterpret_cast<const void*>(get(context).pc + 1), &worker.running()};
  set(context, {reinterpret_cast<uintptr_t>(&cuda_on_cpu_resume),
                reinterpret_cast<uintptr_t>(worker.scheduler)});
}

void on_fault(int signal, siginfo_t* info, void* context_) {
  if (!this_worker || !current_thread) {  // not in a kernel: let the previous handler have it
    for (int i = 0; i < 3; ++i) {
      if (kSignals[i] == signal) sigaction(signal, &previous_actions[i], nullptr);
    }
    return;  // the instruction faults again
  }
  leave_fiber(*static_cast<ucontext_t*>(context_), signal, *info);
}

/// Only the kernel's own instructions can be left at any moment: the runtime, or libc, may hold a lock. The runtime
/// looks at `overdue` itself, and the next signal tries again.
void on_interrupt(int signal, siginfo_t* info, void* context_) {
  ucontext_t& context = *static_cast<ucontext_t*>(context_);
  if (!this_worker || !current_thread) return;
  const Launch& launch = *this_worker->launch;
  if (launch.overdue && launch.kernel_code.contains(get(context).pc)) leave_fiber(context, signal, *info);
}

}  // namespace

FaultHandlers::FaultHandlers() {
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  for (int i = 0; i < 3; ++i) sigaction(kSignals[i], &action, &previous_actions[i]);
  action.sa_sigaction = on_interrupt;
  action.sa_flags |= SA_RESTART;
  sigaction(kInterrupt, &action, &previous_interrupt);
}

FaultHandlers::~FaultHandlers() {
  for (int i = 0; i < 3; ++i) sigaction(kSignals[i], &previous_actions[i], nullptr);
  sigaction(kInterrupt, &previous_interrupt, nullptr);
}

SignalStack::SignalStack(char* memory) {
  stack_t stack = {};
  stack.ss_sp = memory;
  stack.ss_size = kBytes;
  sigaltstack(&stack, &previous_);
}

SignalStack::~SignalStack() { sigaltstack(&previous_, nullptr); }

}  // namespace cuda_on_cpu
