// elementwise.cu's norm for Hopper: the launch begins while the one before it ends, and lets the one after it begin.
// architectures: sm_90a cpu
//
// Compared with elementwise.cu, the launch, its wait and the next launch's start differ: dependent_launch.cuh.
#include "../../task5/ladder/dependent_launch.cuh"
#include "rms_norm.cuh"

extern "C" cudaError_t add_rms_norm(View x, View delta, int has_delta, View weight, View out, float eps, int dtype,
                                    cudaStream_t stream) {
  return launch_add_rms_norm(x, delta, has_delta, weight, out, eps, dtype, stream);
}
