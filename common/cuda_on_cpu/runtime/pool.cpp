#include "pool.h"

#include <condition_variable>
#include <mutex>
#include <thread>

#include "worker.h"

namespace cuda_on_cpu {
namespace {

/// Threads that wait for a launch to help with. The caller does not wait for helpers to wake up: it
/// begins at once, and one that comes too late finds no launch.
class Pool {
 public:
  void run(Launch& launch, int helpers) {
    {
      std::lock_guard<std::mutex> guard(lock_);
      while (started_ < helpers) {
        ++started_;
        std::thread([this] { help(); }).detach();
      }
      launch_ = &launch;
      wanted_ = helpers;
    }
    wake_.notify_all();
    Worker::of_this_thread().run(launch);
    std::unique_lock<std::mutex> guard(lock_);
    launch_ = nullptr;
    wanted_ = 0;
    idle_.wait(guard, [this] { return busy_ == 0; });
  }

 private:
  void help() {
    std::unique_lock<std::mutex> guard(lock_);
    for (;;) {
      wake_.wait(guard, [this] { return wanted_ > 0; });
      --wanted_;
      ++busy_;
      Launch& launch = *launch_;
      guard.unlock();
      Worker::of_this_thread().run(launch);
      guard.lock();
      if (--busy_ == 0) idle_.notify_one();
    }
  }

  std::mutex lock_;
  std::condition_variable wake_, idle_;
  Launch* launch_ = nullptr;
  int wanted_ = 0, busy_ = 0, started_ = 0;
};

Pool* pool = nullptr;

}  // namespace

void run_on_pool(Launch& launch, int threads) {
  if (threads <= 1) {
    Worker::of_this_thread().run(launch);
    return;
  }
  if (!pool) pool = new Pool();  // never destroyed: its threads are detached
  pool->run(launch, threads - 1);
}

void forget_pool() { pool = nullptr; }

}  // namespace cuda_on_cpu
