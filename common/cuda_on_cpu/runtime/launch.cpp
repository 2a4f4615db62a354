// From k<<<...>>>(...) to blocks on the pool.
#include "launch.h"

#include <pthread.h>
#if defined(__linux__)
#include <sched.h>
#endif

#include <algorithm>
#include <map>
#include <thread>

#include "faults.h"
#include "launcher_call.h"
#include "pool.h"
#include "time_limit.h"
#include "worker.h"

namespace cuda_on_cpu {
namespace {

/// What cudaFuncSetAttribute was asked for, by kernel.
std::map<const void*, int>& dynamic_limits() {
  static auto* limits = new std::map<const void*, int>();
  return *limits;
}

/// A child process has one thread, whatever its parent had.
void prepare_for_forks() {
  static bool done = false;
  if (done) return;
  done = true;
  pthread_atfork([] { launch_lock().lock(); }, [] { launch_lock().unlock(); },
                 [] {
                   launch_lock().unlock();
                   forget_pool();
                   forget_watchdog();
                 });
}

/// The cores that this process may use: on a cluster's node often not all of them.
int cores() {
#if defined(__linux__)
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) return CPU_COUNT(&allowed);
#endif
  return int(std::thread::hardware_concurrency());
}

/// The dynamic shared memory that this kernel may ask for, or -1 if no launcher asked for more than
/// 48 KiB. A kernel whose address is not known gets what was granted to any kernel.
long granted_dynamic(const void* entry_point) {
  long granted = -1;
  for (const auto& [kernel, bytes] : dynamic_limits()) {
    if (entry_point == nullptr || kernel == entry_point) granted = std::max(granted, long(bytes));
  }
  return granted;
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
    return format("a block has at most %u threads; this one has %llu", kMaxThreads,
                  (unsigned long long)threads);
  }
  if (block.z > 64) return "the z dimension of a block is at most 64";
  if (grid.x > 0x7fffffffu) return "the x dimension of a grid is at most 2^31 - 1";
  if (grid.y > 65535 || grid.z > 65535) return "the y and z dimensions of a grid are at most 65535";

  if (config.cluster != 1 && arch.number < 90) {
    return format("clusters need sm_90; this is sm_%d", arch.number);
  }
  if (config.cluster == 0 || config.cluster > 16) return "a cluster has from 1 to 16 blocks, neighbours in x";
  if (grid.x % config.cluster != 0) {
    return format("the x dimension of the grid must be a multiple of the cluster's %u blocks", config.cluster);
  }
  code = cudaErrorCooperativeLaunchTooLarge;
  const uint64_t blocks = uint64_t(grid.x) * grid.y * grid.z;
  if (config.cooperative && blocks > uint64_t(arch.multiprocessors)) {
    return format("a cooperative launch of %llu blocks; here at most %d run at once, one on a multiprocessor",
                  (unsigned long long)blocks, arch.multiprocessors);
  }

  code = cudaErrorInvalidValue;
  size_t dynamic = config.dynamic_shared_bytes;
  if (dynamic > arch.shared_per_block) {
    return format("too much shared memory: %zu bytes dynamic, and a block on sm_%d has at most %zu",
                  dynamic, arch.number, arch.shared_per_block);
  }
  if (dynamic > kSharedWithoutAsking && long(dynamic) > granted) {
    return format(
        "too much shared memory: more than %zu bytes have to be asked for with "
        "cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, %zu)%s",
        kSharedWithoutAsking, dynamic,
        granted >= 0 ? format("; what was asked for is %ld", granted).c_str() : "");
  }
  return "";
}

}  // namespace

std::mutex& launch_lock() {
  static auto* lock = new std::mutex();  // outlives main, as do Python threads
  return *lock;
}

void grant_dynamic_shared(const void* kernel, int bytes) { dynamic_limits()[kernel] = bytes; }

void Launch::fail(cudaError_t code, std::string text) {
  std::lock_guard<std::mutex> guard(error_lock);
  if (failed.load()) return;
  error = code;
  error_text = std::move(text);
  failed.store(true);
}

void launch_blocks(const LaunchConfig& config, const LaunchSite& site, ThreadBody body,
                   void* argument) {
  if (current_thread) gpu_only("a launch from inside a kernel", site.file, site.line);
  LauncherCall& call = launcher_call();
  if (config.stream != call.stream &&
      on_stream(format("%s is launched on", site.kernel).c_str(), config.stream,
                "<<<grid, block, bytes, stream>>>", site.file, site.line))
    return;
  std::lock_guard<std::mutex> guard(launch_lock());
  prepare_for_forks();

  const Architecture& arch = current_architecture();
  long granted = granted_dynamic(site.entry_point);
  cudaError_t code;
  std::string wrong = wrong_configuration(config, granted, arch, code);
  if (!wrong.empty()) {
    set_host_error(
        code,
        format("%s:%d: invalid launch configuration: %s\n  kernel %s, grid %s, block %s, "
               "%zu bytes of dynamic shared memory",
               site.file, site.line, wrong.c_str(), site.kernel, show(uint3(config.grid)).c_str(),
               show(uint3(config.block)).c_str(), config.dynamic_shared_bytes));
    return;
  }

  size_t max_shared = granted >= 0 ? arch.shared_per_block : kSharedWithoutAsking;
  Launch launch{config, site, body, argument, settings(), arch, max_shared};
  launch.blocks = uint64_t(config.grid.x) * config.grid.y * config.grid.z;
  launch.team = config.cooperative ? unsigned(launch.blocks) : config.cluster;
  if (config.cluster > 1) launch.clusters = std::vector<Cluster>(launch.blocks / config.cluster);
  for (Cluster& cluster : launch.clusters)
    cluster.begin(uint64_t(config.cluster) * config.block.x * config.block.y * config.block.z);
  GlobalMemory& global = registered_tensors();
  if (site.checked && !global.empty()) {
    global.begin_launch(upcoming_block_serial());
    launch.global = &global;
  }
  if (call.stream) call.kernels.push_back(site.kernel);
  int threads = launch.settings.threads > 0 ? launch.settings.threads : cores();
  threads = std::max(threads, int(launch.team));
  threads = int(std::min<uint64_t>(uint64_t(std::max(threads, 1)), launch.blocks));
  {
    FaultHandlers handlers;
    TimeLimit limit(launch, call);
    run_on_pool(launch, threads);
  }
  call.counts += launch.counts;
  if (launch.failed) set_host_error(launch.error, std::move(launch.error_text));
}

}  // namespace cuda_on_cpu
