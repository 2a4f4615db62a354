// The call-back that gcc and clang insert with -fsanitize=alignment, where a pointer is used that is not aligned as its
// type demands.
#include <cstdint>
#include <cstring>

#include "checker.h"

namespace {

// What the compilers pass, as the sanitizer's own library declares it.
struct TypeDescriptor {
  uint16_t kind, info;
  char name[1];  // "'const float4'", with the quotes
};
struct TypeMismatch {
  const char* file;
  uint32_t line, column;
  const TypeDescriptor* type;
  unsigned char log_alignment;
  unsigned char use;  // 0 load, 1 store, 2 reference, 3 and more: a member
};

}  // namespace

extern "C" __attribute__((visibility("default"))) void __ubsan_handle_type_mismatch_v1(const TypeMismatch* found,
                                                                                       const void* pointer) {
  const bool is_copied = found->use == 2 && std::strstr(found->type->name, "const ");  // the constructor's reference
  const char* verb = found->use == 1 ? "writes" : found->use == 0 || is_copied ? "reads"
                                                                               : "uses";
  cuda_on_cpu::check_alignment(pointer, size_t(1) << found->log_alignment, verb, found->type->name,
                               __builtin_return_address(0));
}
