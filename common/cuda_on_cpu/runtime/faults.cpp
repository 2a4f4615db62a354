#include "faults.h"

#include <sys/ucontext.h>

#include "worker.h"

namespace cuda_on_cpu {
namespace {

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE};
struct sigaction previous_actions[3];

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
void on_fault(int signal, siginfo_t* info, void* context_) {
  if (!this_worker || !current_thread) {  // not in a kernel: let the previous handler have it
    for (int i = 0; i < 3; ++i) {
      if (kSignals[i] == signal) sigaction(signal, &previous_actions[i], nullptr);
    }
    return;  // the instruction faults again
  }
  ucontext_t& context = *static_cast<ucontext_t*>(context_);
  Worker& worker = *this_worker;
  worker.fault = {signal, reinterpret_cast<uintptr_t>(info->si_addr),
                  // + 1: show_place expects a return address
                  reinterpret_cast<const void*>(get(context).pc + 1), &worker.running()};
  set(context, {reinterpret_cast<uintptr_t>(&cuda_on_cpu_resume),
                reinterpret_cast<uintptr_t>(worker.scheduler)});
}

}  // namespace

FaultHandlers::FaultHandlers() {
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  for (int i = 0; i < 3; ++i) sigaction(kSignals[i], &action, &previous_actions[i]);
}

FaultHandlers::~FaultHandlers() {
  for (int i = 0; i < 3; ++i) sigaction(kSignals[i], &previous_actions[i], nullptr);
}

SignalStack::SignalStack(char* memory) {
  stack_t stack = {};
  stack.ss_sp = memory;
  stack.ss_size = kBytes;
  sigaltstack(&stack, &previous_);
}

SignalStack::~SignalStack() { sigaltstack(&previous_, nullptr); }

}  // namespace cuda_on_cpu
