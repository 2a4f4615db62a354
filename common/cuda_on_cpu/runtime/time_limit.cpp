#include "time_limit.h"

#include <dlfcn.h>
#if defined(__APPLE__)
#include <mach-o/getsect.h>
#else
#include <link.h>
#endif

#include <chrono>
#include <condition_variable>
#include <thread>

#include "faults.h"

namespace cuda_on_cpu {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kBetweenSignals = std::chrono::milliseconds(3);

double now_in_seconds() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

/// The machine code of the library that holds this address.
MachineCode code_around(uintptr_t address) {
  MachineCode code;
#if defined(__APPLE__)
  Dl_info info;
  unsigned long bytes = 0;
  if (!dladdr(reinterpret_cast<const void*>(address), &info) || !info.dli_fbase) return code;
  const auto* header = static_cast<const mach_header_64*>(info.dli_fbase);
  if (const uint8_t* text = getsegmentdata(header, "__TEXT", &bytes)) {
    code.begin = reinterpret_cast<uintptr_t>(text);
    code.end = code.begin + bytes;
  }
#else
  struct Search {
    uintptr_t address;
    MachineCode found;
  } search{address, {}};
  dl_iterate_phdr(
      [](dl_phdr_info* library, size_t, void* data) {
        Search& search = *static_cast<Search*>(data);
        for (int i = 0; i < library->dlpi_phnum; ++i) {
          const auto& segment = library->dlpi_phdr[i];
          if (segment.p_type != PT_LOAD || !(segment.p_flags & PF_X)) continue;
          const uintptr_t begin = library->dlpi_addr + segment.p_vaddr;
          if (search.address - begin >= segment.p_memsz) continue;
          search.found = {begin, begin + segment.p_memsz};
          return 1;
        }
        return 0;
      },
      &search);
  code = search.found;
#endif
  return code;
}

/// A thread that sleeps until a launch is overdue. A launch wakes it only if it would sleep too long: usually it still
/// sleeps towards the deadline of an earlier launch, and goes back to sleep then.
class Watchdog {
 public:
  void watch(Launch& launch, Clock::time_point deadline) {
    std::lock_guard<std::mutex> guard(lock_);
    launch_ = &launch;
    deadline_ = deadline;
    if (!started_) {
      started_ = true;
      std::thread([this] { run(); }).detach();
    } else if (deadline < wakes_at_) {
      wake_.notify_one();
    }
  }

  /// No signal is sent after this returns.
  void forget() {
    std::lock_guard<std::mutex> guard(lock_);
    launch_ = nullptr;
  }

 private:
  void run() {
    std::unique_lock<std::mutex> guard(lock_);
    for (;;) {
      if (!launch_) {
        wakes_at_ = Clock::time_point::max();
        wake_.wait(guard);
        continue;
      }
      wakes_at_ = deadline_;
      if (Clock::now() >= deadline_) {
        interrupt(*launch_);
        wakes_at_ = Clock::now() + kBetweenSignals;
      }
      wake_.wait_until(guard, wakes_at_);
    }
  }

  static void interrupt(Launch& launch) {
    if (!launch.overdue) {
      launch.kernel_code = code_around(reinterpret_cast<uintptr_t>(launch.body));
      launch.overdue = true;
    }
    std::lock_guard<std::mutex> guard(launch.workers_lock);
    for (pthread_t worker : launch.workers) pthread_kill(worker, kInterrupt);
  }

  std::mutex lock_;
  std::condition_variable wake_;
  Launch* launch_ = nullptr;
  Clock::time_point deadline_, wakes_at_ = Clock::time_point::min();
  bool started_ = false;
};

Watchdog* watchdog = nullptr;  // never destroyed: its thread is detached

}  // namespace

TimeLimit::TimeLimit(Launch& launch, LauncherCall& call) : limited_(launch.settings.limit > 0), call_(call) {
  if (!limited_) return;
  began_ = now_in_seconds();
  const std::chrono::duration<double> left(std::min(launch.settings.limit - call.seconds, 1e9));
  if (!watchdog) watchdog = new Watchdog();
  watchdog->watch(launch, Clock::now() + std::chrono::duration_cast<Clock::duration>(left));
}

TimeLimit::~TimeLimit() {
  if (!limited_) return;
  watchdog->forget();
  if (call_.stream) call_.seconds += now_in_seconds() - began_;
}

void forget_watchdog() { watchdog = nullptr; }

}  // namespace cuda_on_cpu
