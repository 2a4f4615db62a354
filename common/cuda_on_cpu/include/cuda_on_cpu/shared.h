// __shared__ variables. The rewriter turns
//     __shared__ float tile[32][32];        into   a reference to memory of the running block
//     extern __shared__ float buffer[];     into   a pointer to the launch's dynamic shared memory
#pragma once

#include <type_traits>

#include "runtime_abi.h"

namespace cuda_on_cpu {

template <class T, size_t Alignment = alignof(T)>
inline T& shared(int* site, const char* name, CUDA_ON_CPU_CALLER) {
  static_assert(std::is_trivially_default_constructible_v<T>,
                "a __shared__ variable cannot have a constructor");
  const SharedDeclaration declaration{
      name,
      sizeof(T),
      Alignment < 16 ? 16 : Alignment,
      sizeof(std::remove_all_extents_t<T>),
      {std::extent_v<T, 0>, std::extent_v<T, 1>, std::extent_v<T, 2>}};
  return *static_cast<T*>(shared_variable(site, declaration, file, line));
}

template <class T>
inline T* dynamic_shared(const char* name) {
  if (CUDA_ON_CPU_CHECKED) name_dynamic_shared(name, sizeof(T));
  return reinterpret_cast<T*>(current_block->dynamic_shared);
}

}  // namespace cuda_on_cpu
