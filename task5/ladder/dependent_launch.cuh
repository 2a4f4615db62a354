// Launches that begin before the launch ahead of them is complete, and wait for that themselves. Hopper and later.
#pragma once
#include <cuda_runtime.h>

#define DEPENDENT_LAUNCH
constexpr bool DEPENDENT = true;

#ifdef __CUDACC__
__device__ __forceinline__ void wait_for_the_launch_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void begin_the_next_launch() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ __forceinline__ void prefetch_L2(const void* line) { asm volatile("prefetch.global.L2 [%0];" ::"l"(line)); }
#else  // launches run one after the other
inline void wait_for_the_launch_before() {}
inline void begin_the_next_launch() {}
inline void prefetch_L2(const void*) {}
#endif

// How many clusters of so many blocks the GPU holds at once; 0 if that cannot be said.
template <typename Arguments>
inline int most_clusters(void (*kernel)(Arguments), int threads, int bytes, int blocks_of_a_cluster) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {unsigned(blocks_of_a_cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks_of_a_cluster), config.blockDim = dim3(threads), config.dynamicSmemBytes = bytes;
  config.attrs = &attribute, config.numAttrs = 1;
  int clusters = 0;
  return cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) ? 0 : clusters;
}

// Of each `blocks_of_a_cluster` neighbours in x a cluster.
template <typename Arguments>
inline cudaError_t launch_kernel(void (*kernel)(Arguments), dim3 grid, int threads, int bytes, cudaStream_t stream,
                                 const Arguments& a, int blocks_of_a_cluster = 1) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {unsigned(blocks_of_a_cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = grid, config.blockDim = dim3(threads), config.dynamicSmemBytes = bytes;
  config.stream = stream, config.attrs = attributes, config.numAttrs = blocks_of_a_cluster > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, a);
}
