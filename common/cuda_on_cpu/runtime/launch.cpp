// From k<<<...>>>(...) to blocks on the pool: checks of the configuration, errors, and the C API.
#include "launch.h"

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <new>
#include <thread>

#include "faults.h"
#include "pool.h"
#include "worker.h"

namespace cuda_on_cpu {

uint32_t next_block_serial();

namespace {

// One launch at a time; it has all cores.
std::mutex launch_lock;

/// What cudaFuncSetAttribute was asked for, by kernel.
std::map<const void*, int>& dynamic_limits() {
  static auto* limits = new std::map<const void*, int>();
  return *limits;
}

/// As in CUDA, an error belongs to the host thread that made it.
struct HostErrors {
  cudaError_t last = cudaSuccess;
  std::string text;       // of the last error
  bool reported = false;  // has Python taken the text?
};
thread_local HostErrors host_errors;

void set_host_error(cudaError_t code, std::string text) {
  if (host_errors.last != cudaSuccess && !host_errors.reported) return;  // the first one explains the rest
  host_errors = {code, std::move(text), false};
}

/// A child process has one thread, whatever its parent had.
void prepare_for_forks() {
  static bool done = false;
  if (done) return;
  done = true;
  pthread_atfork([] { launch_lock.lock(); }, [] { launch_lock.unlock(); },
                 [] {
                   launch_lock.unlock();
                   forget_pool();
                 });
}

std::string show(const dim3& d) { return format("(%u,%u,%u)", d.x, d.y, d.z); }

/// The dynamic shared memory that this kernel may ask for, or -1 if nobody has asked for more than 48 KiB.
/// A kernel whose address is not known gets what was granted to any kernel.
long granted_dynamic(const void* entry_point) {
  long most = -1;
  for (const auto& [kernel, bytes] : dynamic_limits()) {
    if (entry_point == nullptr || kernel == entry_point) most = std::max(most, long(bytes));
  }
  return most;
}

/// What is wrong with the launch's configuration, or "".
std::string wrong_configuration(const LaunchConfig& config, long granted, const Architecture& arch,
                                cudaError_t& code) {
  const dim3 &grid = config.grid, &block = config.block;
  uint64_t threads = uint64_t(block.x) * block.y * block.z;
  code = cudaErrorInvalidConfiguration;
  if (block.x == 0 || block.y == 0 || block.z == 0 || grid.x == 0 || grid.y == 0 || grid.z == 0) {
    return "every dimension of grid and block must be at least 1";
  }
  if (block.x > kMaxThreads || block.y > kMaxThreads || threads > kMaxThreads) {
    return format("a block has at most %u threads; this one has %llu", kMaxThreads, (unsigned long long)threads);
  }
  if (block.z > 64) return "the z dimension of a block is at most 64";
  if (grid.x > 0x7fffffffu) return "the x dimension of a grid is at most 2^31 - 1";
  if (grid.y > 65535 || grid.z > 65535) return "the y and z dimensions of a grid are at most 65535";

  code = cudaErrorInvalidValue;
  size_t dynamic = config.dynamic_shared_bytes;
  if (dynamic > arch.shared_per_block) {
    return format("too much shared memory: %zu bytes of dynamic shared memory, and a block on sm_%d has at most %zu",
                  dynamic, arch.number, arch.shared_per_block);
  }
  if (dynamic > kSharedWithoutAsking && long(dynamic) > granted) {
    return format("too much shared memory: more than %zu bytes have to be asked for with "
                  "cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, %zu)%s",
                  kSharedWithoutAsking, dynamic,
                  granted >= 0 ? format("; what was asked for is %ld", granted).c_str() : "");
  }
  return "";
}

}  // namespace

// ---- formatting

std::string format(const char* pattern, ...) {
  va_list arguments, again;
  va_start(arguments, pattern);
  va_copy(again, arguments);
  std::string text(size_t(std::vsnprintf(nullptr, 0, pattern, arguments)), '\0');
  std::vsnprintf(&text[0], text.size() + 1, pattern, again);
  va_end(again);
  va_end(arguments);
  return text;
}

std::string show(const uint3& i) { return format("(%u,%u,%u)", i.x, i.y, i.z); }

std::string show_place(const void* return_address) {
  const char* pc = static_cast<const char*>(return_address) - 1;  // inside the call, not after it
  Dl_info info;
  if (!dladdr(pc, &info) || !info.dli_fname) return format("address %p", static_cast<const void*>(pc));
  return format("{%s+0x%zx}", info.dli_fname, size_t(pc - static_cast<const char*>(info.dli_fbase)));
}

// ---- launching

void Launch::fail(cudaError_t code, std::string text) {
  std::lock_guard<std::mutex> guard(error_lock);
  if (failed.load()) return;
  error = code;
  error_text = std::move(text);
  failed.store(true);
}

void launch_blocks(const LaunchConfig& config, const LaunchSite& site, ThreadBody body, void* argument) {
  if (current_thread) gpu_only("a launch from inside a kernel", site.file, site.line);
  std::lock_guard<std::mutex> guard(launch_lock);
  prepare_for_forks();

  const Architecture& arch = architecture(settings().arch);
  long granted = granted_dynamic(site.entry_point);
  cudaError_t code;
  std::string wrong = wrong_configuration(config, granted, arch, code);
  if (!wrong.empty()) {
    set_host_error(code, format("%s:%d: invalid launch configuration: %s\n  kernel %s, grid %s, block %s, "
                                "%zu bytes of dynamic shared memory",
                                site.file, site.line, wrong.c_str(), site.kernel, show(config.grid).c_str(),
                                show(config.block).c_str(), config.dynamic_shared_bytes));
    return;
  }

  size_t max_shared = granted >= 0 ? arch.shared_per_block : kSharedWithoutAsking;
  Launch launch{config, site, body, argument, settings(), arch, max_shared};
  launch.blocks = uint64_t(config.grid.x) * config.grid.y * config.grid.z;
  GlobalMemory& global = registered_tensors();
  if (site.checked && !global.empty()) {
    global.begin_launch(next_block_serial());
    launch.global = &global;
  }
  int threads = launch.settings.threads > 0 ? launch.settings.threads : int(std::thread::hardware_concurrency());
  threads = int(std::min<uint64_t>(uint64_t(std::max(threads, 1)), launch.blocks));
  {
    FaultHandlers handlers;
    run_on_pool(launch, threads);
  }
  if (launch.failed) set_host_error(launch.error, std::move(launch.error_text));
}

void* Worker::shared_variable(int site, const SharedDeclaration& declaration, const char* file, int line) {
  void* address = shared.variable(site, declaration, file, line);
  size_t static_bytes = shared.static_bytes(), dynamic_bytes = block.dynamic_shared_bytes;
  if (address && static_bytes <= kSharedWithoutAsking && static_bytes + dynamic_bytes <= launch->max_shared_bytes) {
    return address;
  }
  if (!address || static_bytes > kSharedWithoutAsking) {
    fail(cudaErrorInvalidConfiguration,
         format("too much shared memory: with '%s' (%zu bytes) the kernel declares %zu bytes, and static shared "
                "memory is at most %zu; use extern __shared__ for more",
                declaration.name, declaration.bytes, static_bytes, kSharedWithoutAsking),
         format("%s:%d", file, line));
  }
  fail(cudaErrorInvalidConfiguration,
       format("too much shared memory: %zu bytes static and %zu dynamic, and a block has at most %zu%s", static_bytes,
              dynamic_bytes, launch->max_shared_bytes,
              launch->max_shared_bytes == kSharedWithoutAsking
                  ? " (more with cudaFuncAttributeMaxDynamicSharedMemorySize)"
                  : format(" on sm_%d", launch->arch.number).c_str()),
       format("%s:%d", file, line));
}

// ---- called by kernels

int barrier(BarrierResult wanted, bool predicate, const char* file, int line) {
  return this_worker->barrier(wanted, predicate, file, line);
}

void yield() {
  if (current_thread) this_worker->yield();
}

void fence() {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  if (current_thread && this_worker->launch->global) this_worker->launch->global->fence();
}

void fail(const char* what, const char* file, int line) { this_worker->fail(what, file, line); }

void gpu_only(const char* instruction, const char* file, int line) {
  if (current_thread) {
    this_worker->fail(cudaErrorNotSupported, format("%s runs on a GPU only", instruction), format("%s:%d", file, line));
  }
  std::fprintf(stderr, "%s:%d: %s runs on a GPU only\n", file, line, instruction);
  std::abort();
}

void* shared_variable(int* site, const SharedDeclaration& declaration, const char* file, int line) {
  static std::atomic<int> sites{0};
  int number = __atomic_load_n(site, __ATOMIC_RELAXED);
  if (number == 0) {
    int expected = 0, fresh = ++sites;
    bool first = __atomic_compare_exchange_n(site, &expected, fresh, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    number = first ? fresh : expected;
  }
  return this_worker->shared_variable(number, declaration, file, line);
}

void name_dynamic_shared(const char* name, size_t element_bytes) {
  this_worker->shared.name_dynamic(name, element_bytes);
}

// ---- the runtime API

cudaError_t last_error(bool clear) {
  cudaError_t error = host_errors.last;
  if (clear) host_errors.last = cudaSuccess;
  return error;
}

const char* error_name(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
    case cudaErrorInvalidDeviceFunction: return "cudaErrorInvalidDeviceFunction";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
    case cudaErrorAssert: return "cudaErrorAssert";
    case cudaErrorMisalignedAddress: return "cudaErrorMisalignedAddress";
    case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
  }
  return "unrecognized error code";
}

const char* error_string(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorInvalidDeviceFunction: return "invalid device function";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorAssert: return "device-side assert triggered";
    case cudaErrorMisalignedAddress: return "misaligned address";
    case cudaErrorLaunchFailure: return "unspecified launch failure";
    case cudaErrorNotSupported: return "operation not supported";
  }
  return "unrecognized error code";
}

cudaError_t set_max_dynamic_shared(const void* kernel, int bytes) {
  std::lock_guard<std::mutex> guard(launch_lock);
  const Architecture& arch = architecture(settings().arch);
  if (bytes < 0 || size_t(bytes) > arch.shared_per_block) {
    set_host_error(cudaErrorInvalidValue,
                   format("too much shared memory: cudaFuncSetAttribute asks for %d bytes, and a block on sm_%d has "
                          "at most %zu",
                          bytes, arch.number, arch.shared_per_block));
    return cudaErrorInvalidValue;
  }
  dynamic_limits()[kernel] = bytes;
  return cudaSuccess;
}

cudaError_t device_attribute(int* value, cudaDeviceAttr attribute) {
  std::lock_guard<std::mutex> guard(launch_lock);
  const Architecture& arch = architecture(settings().arch);
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = kMaxThreads; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = int(kSharedWithoutAsking); break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = int(arch.shared_per_block); break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = int(arch.shared_per_multiprocessor); break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *value = arch.number >= 80 ? 1024 : 0; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = arch.threads_per_multiprocessor; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = arch.blocks_per_multiprocessor; break;
    case cudaDevAttrMultiProcessorCount: *value = arch.multiprocessors; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = 65536; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrComputeCapabilityMajor: *value = arch.number / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = arch.number % 10; break;
    default: return cudaErrorInvalidValue;
  }
  return cudaSuccess;
}

int blocks_per_multiprocessor(int threads, size_t dynamic_shared_bytes) {
  std::lock_guard<std::mutex> guard(launch_lock);
  const Architecture& arch = architecture(settings().arch);
  if (threads <= 0 || threads > int(kMaxThreads)) return 0;
  size_t reserved = arch.number >= 80 ? 1024 : 0;
  size_t by_shared = arch.shared_per_multiprocessor / std::max<size_t>(dynamic_shared_bytes + reserved, 1);
  int by_threads = arch.threads_per_multiprocessor / ((threads + 31) / 32 * 32);
  return int(std::min<size_t>(by_shared, size_t(std::min(by_threads, arch.blocks_per_multiprocessor))));
}

}  // namespace cuda_on_cpu

// ---- the C API, for Python (runtime.py)

using namespace cuda_on_cpu;

extern "C" void cuda_on_cpu_configure(const char* name, const char* value) {
  std::lock_guard<std::mutex> guard(launch_lock);
  Settings& s = settings();
  std::string setting = name;
  if (setting == "order") {
    s.order = value[0] == 'f' ? Order::forward : value[1] == 'e' ? Order::reverse : Order::random;
  } else if (setting == "seed") {
    s.seed = std::strtoull(value, nullptr, 10);
  } else if (setting == "eager_copies") {
    s.eager_copies = value[0] == '1';
  } else if (setting == "threads") {
    s.threads = std::atoi(value);
  } else if (setting == "arch") {
    s.arch = std::atoi(value);
  }
}

extern "C" void cuda_on_cpu_register(const char* name, const void* address, size_t bytes) {
  registered_tensors().add(name, reinterpret_cast<uintptr_t>(address), bytes);
}

extern "C" void cuda_on_cpu_clear_registered() { registered_tensors().clear(); }

extern "C" const char* cuda_on_cpu_take_error() {
  static thread_local std::string taken;
  if (host_errors.text.empty() || host_errors.reported) return nullptr;
  taken = host_errors.text;
  host_errors.reported = true;
  host_errors.last = cudaSuccess;
  return taken.c_str();
}
