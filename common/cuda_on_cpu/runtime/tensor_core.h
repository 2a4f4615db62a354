// Instructions that a warp executes as a whole.
#pragma once

#include "worker.h"

namespace cuda_on_cpu {

/// What a lane brings to such an instruction. Each adds its operands.
struct WarpOperands {
  unsigned lanes = ~0u;  // the lanes that met
};

/// Runs `run` once all 32 lanes are there. Lanes that return before, or never were, are an error.
void whole_warp(const char* operation, WarpFunction run, WarpOperands* operands, const char* file, int line);

/// The WarpFunction for `run`, which is called with the operands of 32 lanes or not at all.
template <void (*run)(void* const* operands)>
void if_whole(void* const* operands, unsigned lanes) {
  if (lanes == ~0u) return run(operands);
  for (unsigned rest = lanes; rest != 0; rest &= rest - 1)
    static_cast<WarpOperands*>(operands[__builtin_ctz(rest)])->lanes = lanes;
}

}  // namespace cuda_on_cpu
