// kernel<<<grid, block, bytes, stream>>>(arguments), which the rewriter turns into a call of
// launch().
#pragma once

#include "runtime_abi.h"

#define threadIdx (::cuda_on_cpu::current_thread->index)
#define blockIdx (::cuda_on_cpu::current_block->index)
#define blockDim (::cuda_on_cpu::current_block->block_dim)
#define gridDim (::cuda_on_cpu::current_block->grid_dim)
static constexpr int warpSize = 32;

namespace cuda_on_cpu {

/// A kernel's return;
inline void returned_at(const char* file, int line) {
  current_thread->return_file = file;
  current_thread->return_line = line;
}

/// Picks the kernel's address, if its name alone says which kernel it is. `Tag` only makes the call
/// depend on a template parameter, so that a name which needs its arguments is not an error.
template <class Tag, class... Parameters>
inline const void* entry_point(Tag, void (*kernel)(Parameters...)) {
  return reinterpret_cast<const void*>(kernel);
}

template <class AddressOf>
inline auto entry_point_or_null(AddressOf address_of, int) -> decltype(address_of(0)) {
  return address_of(0);
}
template <class AddressOf>
inline const void* entry_point_or_null(AddressOf, long) {
  return nullptr;
}

/// Runs `call(arguments...)` as every thread of the grid. The arguments are copied once, as CUDA
/// does.
template <class Call, class AddressOf, class... Arguments>
inline void launch(const char* kernel, const char* file, int line, Call call, AddressOf address_of,
                   const LaunchConfig& config, Arguments... arguments) {
  auto thread = [&] { call(arguments...); };
  LaunchSite site{kernel, entry_point_or_null(address_of, 0), file, line, CUDA_ON_CPU_CHECKED != 0};
  launch_blocks(
      config, site, [](void* body) { (*static_cast<decltype(thread)*>(body))(); }, &thread);
}

}  // namespace cuda_on_cpu
