// The C API, which runtime.py wraps.
#include <cstdlib>
#include <cstring>
#include <utility>

#include "launch.h"
#include "launcher_call.h"

using namespace cuda_on_cpu;

/// order forward|reverse|random, seed, eager_copies 0|1, threads (0: one per core), arch (80 for
/// sm_80), limit (seconds; 0: none), count 0|1
extern "C" void cuda_on_cpu_configure(const char* name, const char* value) {
  std::lock_guard<std::mutex> guard(launch_lock());
  Settings& s = settings();
  auto is = [name](const char* setting) { return std::strcmp(name, setting) == 0; };
  if (is("order")) {
    bool forward = std::strcmp(value, "forward") == 0, reverse = std::strcmp(value, "reverse") == 0;
    s.order = forward ? Order::forward : reverse ? Order::reverse
                                                 : Order::random;
  }
  if (is("seed")) s.seed = std::strtoull(value, nullptr, 10);
  if (is("eager_copies")) s.eager_copies = std::strcmp(value, "0") != 0;
  if (is("threads")) s.threads = std::atoi(value);
  if (is("arch")) s.arch = std::atoi(value);
  if (is("count")) s.count = std::strcmp(value, "0") != 0;
  if (is("limit")) s.limit = std::strtod(value, nullptr);
}

/// Registers a tensor for the calling thread's next launches.
extern "C" void cuda_on_cpu_register(const char* name, const void* address, size_t bytes) {
  registered_tensors().add(name, reinterpret_cast<uintptr_t>(address), bytes);
}

extern "C" void cuda_on_cpu_clear_registered() { registered_tensors().clear(); }

/// What went wrong in the calling thread's launches since the last call, or null. Valid until the
/// next.
extern "C" const char* cuda_on_cpu_take_error() { return take_host_error(); }

/// The calling thread is about to call functions of a source that is for this GPU alone: 90 for sm_90a, 0 for any.
extern "C" void cuda_on_cpu_of_arch(int arch) { arch_of_source() = arch; }

/// The calling thread is about to call a launcher with the returned stream. Forgets what the thread's
/// earlier launchers did.
extern "C" void* cuda_on_cpu_begin() {
  LauncherCall& call = launcher_call();
  call = LauncherCall();
  call.stream = fresh_stream();
  return call.stream;
}

/// The launcher has returned. What it did can be taken until the next begin.
extern "C" void cuda_on_cpu_end() { launcher_call().stream = nullptr; }

/// The kernels that the launcher launched, one per line; takes them. Valid until the next call.
extern "C" const char* cuda_on_cpu_take_launched() {
  static thread_local std::string text;
  text.clear();
  for (const char* kernel : launcher_call().kernels) text.append(kernel).append("\n");
  launcher_call().kernels.clear();
  return text.c_str();
}

/// What was counted in the launcher's kernels, while configured; takes it. Valid until the next call. Lines:
///   kernel|NAME|threads of a block|static and dynamic bytes of shared memory
///   block|X Y Z|barriers that it passed
///   shared|... of block (0, 0, 0), see SharedTrace::take
extern "C" const char* cuda_on_cpu_take_counts() {
  static thread_local std::string text;
  text = std::exchange(launcher_call().counts, "");
  return text.c_str();
}

/// The bytes that the launcher asked for with cudaMalloc and cudaMallocAsync; takes them.
extern "C" size_t cuda_on_cpu_take_allocated() {
  return std::exchange(launcher_call().allocated_bytes, 0);
}
