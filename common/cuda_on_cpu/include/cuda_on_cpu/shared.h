// __shared__ variables. The rewriter turns
//     __shared__ float tile[32][32];        into   a reference to memory of the running block
//     extern __shared__ float buffer[];     into   a pointer to the launch's dynamic shared memory
#pragma once

#include <initializer_list>
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

/// Says that `first`, a pointer into dynamic shared memory, begins a part of it that messages call by its name. The
/// last extent may be less than the distance of rows.
template <class T>
inline void name_part(const char* name, T* first, std::initializer_list<size_t> extents = {}) {
  if constexpr (CUDA_ON_CPU_CHECKED && !std::is_void_v<T> && !std::is_function_v<T>)
    name_shared_part(name, (const void*)first, sizeof(*first), extents.begin(), extents.size());
}
template <class T>
inline void name_part(const char*, const T&, std::initializer_list<size_t> = {}) {}  // auto x = shared[3];

}  // namespace cuda_on_cpu
