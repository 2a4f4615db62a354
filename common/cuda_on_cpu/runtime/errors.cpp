#include "errors.h"

#include <dlfcn.h>

#include <cstdarg>
#include <cstdio>

namespace cuda_on_cpu {
namespace {

struct HostError {
  cudaError_t code = cudaSuccess;
  std::string text;
  bool taken = true;  // has Python taken the text?
};
thread_local HostError host_error;

}  // namespace

std::string format(const char* pattern, ...) {
  va_list arguments, again;
  va_start(arguments, pattern);
  va_copy(again, arguments);
  std::string text(size_t(std::vsnprintf(nullptr, 0, pattern, arguments)), '\0');
  std::vsnprintf(&text[0], text.size() + 1, pattern, again);
  va_end(again);
  va_end(arguments);
  return text;
}

std::string show(const uint3& i) { return format("(%u,%u,%u)", i.x, i.y, i.z); }

std::string show_place(const void* const* return_addresses, size_t count) {
  std::string text;
  const void* library = nullptr;
  for (size_t i = 0; i < count; ++i) {
    const char* pc = static_cast<const char*>(return_addresses[i]) - 1;  // inside the call, not after it
    Dl_info info;
    const bool known = dladdr(pc, &info) && info.dli_fname;
    if (i == 0 && !known) return format("address %p", static_cast<const void*>(pc));
    if (!known || (i > 0 && info.dli_fbase != library)) break;
    library = info.dli_fbase;
    text += i == 0 ? format("{%s+", info.dli_fname) : ",";
    text += format("0x%zx", size_t(pc - static_cast<const char*>(info.dli_fbase)));
  }
  return text + "}";
}

std::string show_place(const void* return_address) { return show_place(&return_address, 1); }

void set_host_error(cudaError_t code, std::string text) {
  if (host_error.code != cudaSuccess && !host_error.taken) return;
  host_error = {code, std::move(text), false};
}

const char* take_host_error() {
  static thread_local std::string text;
  if (host_error.taken) return nullptr;
  text = std::move(host_error.text);
  host_error = HostError();
  return text.c_str();
}

cudaError_t last_error(bool clear) {
  cudaError_t code = host_error.code;
  if (clear) host_error.code = cudaSuccess;
  return code;
}

const char* error_name(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration:
      return "cudaErrorInvalidConfiguration";
    case cudaErrorInvalidDeviceFunction:
      return "cudaErrorInvalidDeviceFunction";
    case cudaErrorInvalidDevice:
      return "cudaErrorInvalidDevice";
    case cudaErrorInvalidResourceHandle:
      return "cudaErrorInvalidResourceHandle";
    case cudaErrorIllegalAddress:
      return "cudaErrorIllegalAddress";
    case cudaErrorLaunchTimeout:
      return "cudaErrorLaunchTimeout";
    case cudaErrorAssert:
      return "cudaErrorAssert";
    case cudaErrorMisalignedAddress:
      return "cudaErrorMisalignedAddress";
    case cudaErrorLaunchFailure:
      return "cudaErrorLaunchFailure";
    case cudaErrorCooperativeLaunchTooLarge:
      return "cudaErrorCooperativeLaunchTooLarge";
    case cudaErrorNotSupported:
      return "cudaErrorNotSupported";
  }
  return "unrecognized error code";
}

const char* error_string(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorInvalidDeviceFunction:
      return "invalid device function";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorInvalidResourceHandle:
      return "invalid resource handle";
    case cudaErrorIllegalAddress:
      return "an illegal memory access was encountered";
    case cudaErrorLaunchTimeout:
      return "the launch timed out and was terminated";
    case cudaErrorAssert:
      return "device-side assert triggered";
    case cudaErrorMisalignedAddress:
      return "misaligned address";
    case cudaErrorLaunchFailure:
      return "unspecified launch failure";
    case cudaErrorCooperativeLaunchTooLarge:
      return "too many blocks in cooperative launch";
    case cudaErrorNotSupported:
      return "operation not supported";
  }
  return "unrecognized error code";
}

}  // namespace cuda_on_cpu
