// The OS threads that share the blocks of a launch.
#pragma once

namespace cuda_on_cpu {

struct Launch;

/// Runs the launch's blocks on the calling thread and up to `threads` - 1 others. Under the launch
/// lock.
void run_on_pool(Launch& launch, int threads);

/// In the child of a fork the pool's threads do not exist; forget them.
void forget_pool();

}  // namespace cuda_on_cpu
