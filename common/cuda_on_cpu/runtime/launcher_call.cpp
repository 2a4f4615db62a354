#include "launcher_call.h"

#include <atomic>

#include "errors.h"

namespace cuda_on_cpu {

LauncherCall& launcher_call() {
  static thread_local LauncherCall call;
  return call;
}

int& arch_of_source() {
  static thread_local int arch = 0;
  return arch;
}

const Architecture& current_architecture() {
  return architecture(arch_of_source() ? arch_of_source() : settings().arch);
}

cudaStream_t fresh_stream() {
  static std::atomic<uintptr_t> last{0x1000};  // small values name the default streams
  return reinterpret_cast<cudaStream_t>(last += 0x10);
}

cudaError_t on_stream(const char* what, cudaStream_t stream, const char* instead, const char* file, int line) {
  const cudaStream_t given = launcher_call().stream;
  if (!given || stream == given) return cudaSuccess;
  const bool by_default = !stream || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
  const char* which = by_default ? "the default stream; the launcher was given one"
                                 : "another stream than the launcher was given";
  set_host_error(cudaErrorInvalidResourceHandle, format("%s:%d: %s %s: %s", file, line, what, which, instead));
  return cudaErrorInvalidResourceHandle;
}

cudaError_t host_waits(const char* operation, const char* file, int line) {
  if (!launcher_call().stream) return last_error(false);
  set_host_error(cudaErrorInvalidResourceHandle,
                 format("%s:%d: %s waits for everything on the GPU, and not only for the stream that the launcher was "
                        "given; a launcher starts its kernels and returns",
                        file, line, operation));
  return cudaErrorInvalidResourceHandle;
}

}  // namespace cuda_on_cpu
