// cudaLaunchKernelEx, clusters and cooperative launches. Launches run one after the other here, so a dependent launch
// is one like any other.
#pragma once

#include "host_api.h"
#include "launch.h"

enum cudaLaunchAttributeID {
  cudaLaunchAttributeCooperative = 2,
  cudaLaunchAttributeClusterDimension = 4,
  cudaLaunchAttributeProgrammaticStreamSerialization = 6,
};
union cudaLaunchAttributeValue {
  int cooperative;
  struct {
    unsigned x, y, z;
  } clusterDim;
  int programmaticStreamSerializationAllowed;
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  cudaLaunchAttributeValue val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim_, blockDim_;  // the rewriter's names: gridDim and blockDim are macros
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

namespace cuda_on_cpu {

inline LaunchConfig launch_config(const cudaLaunchConfig_t& config) {
  LaunchConfig result(config.gridDim_, config.blockDim_, config.dynamicSmemBytes, config.stream);
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config.attrs[i];
    if (attribute.id == cudaLaunchAttributeCooperative) result.cooperative = attribute.val.cooperative != 0;
    if (attribute.id != cudaLaunchAttributeClusterDimension) continue;
    const auto& size = attribute.val.clusterDim;
    result.cluster = size.y == 1 && size.z == 1 ? size.x : 0;  // 0: not possible here
  }
  return result;
}

template <class... Parameters, class... Arguments>
inline cudaError_t launch_ex(const char* name, const char* file, int line, const cudaLaunchConfig_t* config,
                             void (*kernel)(Parameters...), const Arguments&... arguments) {
  auto call = [kernel](auto&... a) { kernel(a...); };
  auto address = [kernel](auto tag) -> decltype(entry_point(tag, kernel)) { return entry_point(tag, kernel); };
  launch(name, file, line, call, address, launch_config(*config), Parameters(arguments)...);
  return cudaGetLastError();
}

}  // namespace cuda_on_cpu

#define cudaLaunchKernelEx(config, kernel, ...) \
  ::cuda_on_cpu::launch_ex(#kernel, __FILE__, __LINE__, config, kernel, ##__VA_ARGS__)

/// By threads and shared memory alone.
template <class Kernel>
inline cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, Kernel*, const cudaLaunchConfig_t* config) {
  const dim3& block = config->blockDim_;
  int sms = 0;
  if (cudaError_t error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0)) return error;
  const int each = cuda_on_cpu::blocks_per_multiprocessor(int(block.x * block.y * block.z), config->dynamicSmemBytes);
  const unsigned size = cuda_on_cpu::launch_config(*config).cluster;
  *clusters = size ? each * sms / int(size) : 0;
  return cudaSuccess;
}
