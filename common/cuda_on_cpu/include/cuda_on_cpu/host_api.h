// The part of CUDA's runtime API that launchers use. Everything is synchronous here: a launch has
// finished when it returns, so streams and synchronisation have nothing to wait for. But on a GPU a
// launcher that was given a stream is wrong if it uses another one, and so it is an error here.
#pragma once

#include "runtime_abi.h"
#include "types.h"

namespace cuda_on_cpu {

cudaError_t last_error(bool clear);
const char* error_string(cudaError_t error);
const char* error_name(cudaError_t error);
cudaError_t set_max_dynamic_shared(const void* kernel, int bytes);
cudaError_t device_attribute(int* value, cudaDeviceAttr attribute);
int blocks_per_multiprocessor(int threads, size_t dynamic_shared_bytes);
cudaError_t allocate(void** address, size_t bytes);
cudaError_t release(void* address);

/// Reports work on another stream than the one that Python gave to the launcher. `what` is such as
/// "cudaMemset runs on".
cudaError_t on_stream(const char* what, cudaStream_t stream, const char* instead, const char* file,
                      int line);
/// Reports an operation that waits for all streams, in a launcher that was given one.
cudaError_t host_waits(const char* operation, const char* file, int line);

}  // namespace cuda_on_cpu

static inline cudaError_t cudaGetLastError() { return cuda_on_cpu::last_error(true); }
static inline cudaError_t cudaPeekAtLastError() { return cuda_on_cpu::last_error(false); }
static inline const char* cudaGetErrorString(cudaError_t error) {
  return cuda_on_cpu::error_string(error);
}
static inline const char* cudaGetErrorName(cudaError_t error) {
  return cuda_on_cpu::error_name(error);
}

static inline cudaError_t cudaDeviceSynchronize(CUDA_ON_CPU_CALLER) {
  return cuda_on_cpu::host_waits("cudaDeviceSynchronize()", file, line);
}
static inline cudaError_t cudaStreamSynchronize(cudaStream_t stream, CUDA_ON_CPU_CALLER) {
  if (cudaError_t error = cuda_on_cpu::on_stream("cudaStreamSynchronize waits for", stream,
                                                 "cudaStreamSynchronize(stream)", file, line))
    return error;
  return cuda_on_cpu::last_error(false);
}

static inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
static inline cudaError_t cudaSetDevice(int device) {
  return device == 0 ? cudaSuccess : cudaErrorInvalidDevice;
}
static inline cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
static inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  return cuda_on_cpu::device_attribute(value, attribute);
}

template <class Kernel>
inline cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  return cuda_on_cpu::set_max_dynamic_shared(reinterpret_cast<const void*>(kernel), value);
}
template <class Kernel>
inline cudaError_t cudaFuncSetCacheConfig(Kernel*, cudaFuncCache) {
  return cudaSuccess;
}

/// By threads, blocks and dynamic shared memory; registers and static shared memory are not known
/// here.
template <class Kernel>
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel*, int threads,
                                                                 size_t dynamic_shared_bytes) {
  *blocks = cuda_on_cpu::blocks_per_multiprocessor(threads, dynamic_shared_bytes);
  return cudaSuccess;
}

template <class T>
inline cudaError_t cudaMalloc(T** address, size_t bytes) {
  return cuda_on_cpu::allocate(reinterpret_cast<void**>(address), bytes);
}
template <class T>
inline cudaError_t cudaMallocAsync(T** address, size_t bytes, cudaStream_t stream,
                                   CUDA_ON_CPU_CALLER) {
  if (cudaError_t error = cuda_on_cpu::on_stream("cudaMallocAsync runs on", stream,
                                                 "cudaMallocAsync(..., stream)", file, line))
    return error;
  return cudaMalloc(address, bytes);
}
static inline cudaError_t cudaFree(void* address) { return cuda_on_cpu::release(address); }
static inline cudaError_t cudaFreeAsync(void* address, cudaStream_t stream, CUDA_ON_CPU_CALLER) {
  if (cudaError_t error = cuda_on_cpu::on_stream("cudaFreeAsync runs on", stream,
                                                 "cudaFreeAsync(..., stream)", file, line))
    return error;
  return cudaFree(address);
}

static inline cudaError_t cudaMemsetAsync(void* target, int byte, size_t bytes,
                                          cudaStream_t stream = nullptr, CUDA_ON_CPU_CALLER) {
  if (cudaError_t error = cuda_on_cpu::on_stream("cudaMemsetAsync runs on", stream,
                                                 "cudaMemsetAsync(..., stream)", file, line))
    return error;
  __builtin_memset(target, byte, bytes);
  return cudaSuccess;
}
static inline cudaError_t cudaMemset(void* target, int byte, size_t bytes, CUDA_ON_CPU_CALLER) {
  if (cudaError_t error = cuda_on_cpu::on_stream("cudaMemset runs on", nullptr,
                                                 "cudaMemsetAsync(..., stream)", file, line))
    return error;
  __builtin_memset(target, byte, bytes);
  return cudaSuccess;
}
static inline cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes,
                                          cudaMemcpyKind, cudaStream_t stream = nullptr,
                                          CUDA_ON_CPU_CALLER) {
  if (cudaError_t error = cuda_on_cpu::on_stream("cudaMemcpyAsync runs on", stream,
                                                 "cudaMemcpyAsync(..., stream)", file, line))
    return error;
  __builtin_memmove(target, source, bytes);
  return cudaSuccess;
}
static inline cudaError_t cudaMemcpy(void* target, const void* source, size_t bytes, cudaMemcpyKind,
                                     CUDA_ON_CPU_CALLER) {
  if (cudaError_t error = cuda_on_cpu::on_stream("cudaMemcpy runs on", nullptr,
                                                 "cudaMemcpyAsync(..., stream)", file, line))
    return error;
  __builtin_memmove(target, source, bytes);
  return cudaSuccess;
}

/// __constant__ and __device__ variables are ordinary globals here; `symbol` is the variable
/// itself.
namespace cuda_on_cpu {
template <class T>
inline cudaError_t copy_symbol(const T& symbol, size_t offset, size_t bytes, void* to,
                               const void* from) {
  if (offset > sizeof(T) || bytes > sizeof(T) - offset) return cudaErrorInvalidValue;
  char* place = (char*)&symbol + offset;
  __builtin_memcpy(to ? to : place, from ? from : place, bytes);
  return cudaSuccess;
}
}  // namespace cuda_on_cpu
template <class T>
inline cudaError_t cudaMemcpyToSymbol(T& symbol, const void* source, size_t bytes,
                                      size_t offset = 0, cudaMemcpyKind = cudaMemcpyHostToDevice,
                                      CUDA_ON_CPU_CALLER) {
  if (cudaError_t error = cuda_on_cpu::on_stream("cudaMemcpyToSymbol runs on", nullptr,
                                                 "cudaMemcpyToSymbolAsync(..., stream)", file, line))
    return error;
  return cuda_on_cpu::copy_symbol(symbol, offset, bytes, nullptr, source);
}
template <class T>
inline cudaError_t cudaMemcpyToSymbolAsync(T& symbol, const void* source, size_t bytes,
                                           size_t offset, cudaMemcpyKind,
                                           cudaStream_t stream = nullptr, CUDA_ON_CPU_CALLER) {
  if (cudaError_t error = cuda_on_cpu::on_stream("cudaMemcpyToSymbolAsync runs on", stream,
                                                 "cudaMemcpyToSymbolAsync(..., stream)", file, line))
    return error;
  return cuda_on_cpu::copy_symbol(symbol, offset, bytes, nullptr, source);
}
template <class T>
inline cudaError_t cudaMemcpyFromSymbol(void* target, const T& symbol, size_t bytes,
                                        size_t offset = 0,
                                        cudaMemcpyKind = cudaMemcpyDeviceToHost,
                                        CUDA_ON_CPU_CALLER) {
  if (cudaError_t error =
          cuda_on_cpu::on_stream("cudaMemcpyFromSymbol runs on", nullptr,
                                 "cudaMemcpyFromSymbolAsync(..., stream)", file, line))
    return error;
  return cuda_on_cpu::copy_symbol(symbol, offset, bytes, target, nullptr);
}
template <class T>
inline cudaError_t cudaMemcpyFromSymbolAsync(void* target, const T& symbol, size_t bytes,
                                             size_t offset, cudaMemcpyKind,
                                             cudaStream_t stream = nullptr, CUDA_ON_CPU_CALLER) {
  if (cudaError_t error =
          cuda_on_cpu::on_stream("cudaMemcpyFromSymbolAsync runs on", stream,
                                 "cudaMemcpyFromSymbolAsync(..., stream)", file, line))
    return error;
  return cuda_on_cpu::copy_symbol(symbol, offset, bytes, target, nullptr);
}
template <class T>
inline cudaError_t cudaGetSymbolAddress(void** address, T& symbol) {
  return *address = (void*)&symbol, cudaSuccess;
}
