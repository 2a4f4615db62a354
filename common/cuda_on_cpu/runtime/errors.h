// The text of an error, and where it is kept until the host asks for it.
#pragma once

#include <string>

#include "../include/cuda_runtime.h"

namespace cuda_on_cpu {

/// printf into a std::string.
std::string format(const char* pattern, ...) __attribute__((format(printf, 1, 2)));

std::string show(const uint3& index);

/// The place of the call that returns to this address, as {library+0xoffset}; Python turns it into
/// file:line with the debug information. Calls that lead there follow, the last one first, as far as they are in the
/// same library: {library+0xoffset,0xoffset}.
std::string show_place(const void* const* return_addresses, size_t count);
std::string show_place(const void* return_address);

/// As in CUDA, errors belong to the host thread that made them. The first one is kept, because it
/// explains those that follow.
void set_host_error(cudaError_t code, std::string text);

/// Takes the text of this thread's error; null if there is none.
const char* take_host_error();

}  // namespace cuda_on_cpu
