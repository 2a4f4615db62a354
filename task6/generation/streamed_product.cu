// product.cu's products on Hopper: the weights are a stream that does not stop between launches.
// architectures: sm_90a cpu
//
//   x (rows, K) with up to 16 rows, w (N, K)   fp32, fp16 or bf16, sums in fp32; out, norm, SwiGLU, residual as there
//
//   grid  (SMs): a block has neighbouring units of 8 rows of w, at most one more than another one
//   block (288): eight warps that compute, each an eighth of a stage's columns, and one of which one thread loads
//
// Against product.cu,
//   loads       one thread has the copy engine bring 1 KiB of each of up to 32 rows, stage after stage, as far ahead
//               as there is shared memory. Nobody else waits to issue a load, and no load waits for a sum
//   launches    the launch after this one begins at once, on the half of the SM that this one leaves, and fills its
//               stages: weights depend on nothing. Only x is waited for. So a step reads weights all the time
#include "../../task5/ladder/dependent_launch.cuh"
#include "stream.cuh"

// Bytes of shared memory: those of two launches fit on an SM, up to 8 rows.
template <int X_ROWS>
constexpr int ROOM = (X_ROWS <= 8 ? 113 : 227) * 1024;
template <int X_ROWS>
constexpr int X_PIECES = X_ROWS <= 4 ? 8 : 3;

struct Launch : Product {
  int stages, bytes;  // of shared memory; of one
  CUtensorMap of_w;
};

template <int X_ROWS>
struct Memory {
  alignas(128) XMemory<X_ROWS, X_PIECES<X_ROWS>> x;
  alignas(1024) Shared<X_ROWS> ring;
};

template <typename T, int X_ROWS, typename Math>
__global__ void __launch_bounds__(THREADS, X_ROWS <= 8 ? 2 : 1) product_kernel(const __grid_constant__ Launch launch) {
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& mem = *reinterpret_cast<Memory<X_ROWS>*>(raw);
  begin_the_next_launch();
  Product p = launch;
  p.own = own_units(p.units, p.together()), p.map = &launch.of_w;
  start(mem.ring, launch.stages);
  Stage stage = {launch.stages, launch.bytes};
  if (__shfl_sync(~0u, threadIdx.x / 32, 0) >= WARPS) {
    if (threadIdx.x == COMPUTE) load_weights<T>(p, mem.ring, stage);  // of this launch: the one before may still run
  } else {
    wait_for_the_launch_before();
    Share<T, X_ROWS, Math, 1, X_PIECES<X_ROWS>>(p, mem.ring, mem.x, stage)
        .compute([](int, int, float sum) { return sum; }, [&](int row, int n, T value) { put(p, row, n, value); });
  }
}

// ---- Host

template <typename T, int X_ROWS, typename Math>
static cudaError_t launch(Launch p, cudaStream_t stream) {
  constexpr auto kernel = product_kernel<T, X_ROWS, Math>;
  int sms;
  if (cudaError_t error = count_sms(&sms)) return error;
  const int blocks = min(sms, ceil_div(p.N, UNIT));
  // Of 4 rows two units are a stage, unless x does not stay: it is read again for each stage of N.
  const bool stays = p.K * int(sizeof(T)) <= X_PIECES<X_ROWS> * BYTES;
  p.share(blocks, X_ROWS == 4 && stays ? 2 : Math::UNITS);
  p.pieces = 1, p.bytes = p.per_stage * BOX;
  p.stages = min(MOST_STAGES, int(ROOM<X_ROWS> - sizeof(Memory<X_ROWS>)) / p.bytes);
  if (cudaError_t error = make_weights_map<T>(&p.of_w, p.w, p.w_stride, p.N, p.K)) return error;
  if (cudaError_t error = allow_shared_memory<kernel, ROOM<X_ROWS>>()) return error;
  return launch_kernel<Launch>(kernel, dim3(blocks), THREADS, sizeof(Memory<X_ROWS>) + p.stages * p.bytes, stream, p);
}

template <typename T>
static cudaError_t launch_16_bits(const Launch& p, cudaStream_t stream) {
  return p.rows <= 1   ? launch<T, 1, TensorCores<T, 1>>(p, stream)
         : p.rows <= 4 ? launch<T, 4, TensorCores<T, 4>>(p, stream)
         : p.rows <= 8 ? launch<T, 8, TensorCores<T, 8>>(p, stream)
                       : launch<T, 16, TensorCores<T, 16>>(p, stream);
}

extern "C" cudaError_t product(View x, View w, const void* norm, const void* row_sums, const void* bias, View residual,
                               int has_residual, View out, int activation, float eps, int blocks, int dtype,
                               cudaStream_t stream) {
  const Launch p = {{make_arguments(x, w, norm, row_sums, bias, residual, has_residual, out, activation, eps)}};
  if (dtype == FLOAT16) return launch_16_bits<__half>(p, stream);
  if (dtype == BFLOAT16) return launch_16_bits<__nv_bfloat16>(p, stream);
  return p.rows <= 1   ? launch<float, 1, CudaCores<1>>(p, stream)
         : p.rows <= 4 ? launch<float, 4, CudaCores<4>>(p, stream)
         : p.rows <= 8 ? launch<float, 8, CudaCores<8, 2>>(p, stream)
                       : launch<float, 16, CudaCores<16, 2>>(p, stream);  // there are registers for no more units
}
