#include "settings.h"

#include <cstdlib>
#include <cstring>

namespace cuda_on_cpu {
namespace {

constexpr size_t KiB = 1024;
constexpr Architecture kArchitectures[] = {
    {75, 64 * KiB, 64 * KiB, 1024, 16, 40},
    {80, 163 * KiB, 164 * KiB, 2048, 32, 108},
    {86, 99 * KiB, 100 * KiB, 1536, 16, 82},
    {89, 99 * KiB, 100 * KiB, 1536, 24, 128},
    {90, 227 * KiB, 228 * KiB, 2048, 32, 132},
    {100, 227 * KiB, 228 * KiB, 2048, 32, 148},
    {120, 99 * KiB, 100 * KiB, 1536, 24, 188},
};
constexpr int kDefaultArchitecture = 80;

/// CUDA_ON_CPU_ARCH may say sm_90, 90 or 90a.
Settings from_environment() {
  Settings initial;
  if (const char* arch = std::getenv("CUDA_ON_CPU_ARCH")) {
    initial.arch = std::atoi(std::strncmp(arch, "sm_", 3) == 0 ? arch + 3 : arch);
  }
  return initial;
}

}  // namespace

Settings& settings() {
  static Settings current = from_environment();
  return current;
}

const Architecture& architecture(int number) {
  const Architecture* fallback = nullptr;
  for (const Architecture& known : kArchitectures) {
    if (known.number == number) return known;
    if (known.number == kDefaultArchitecture) fallback = &known;
  }
  return *fallback;
}

}  // namespace cuda_on_cpu
