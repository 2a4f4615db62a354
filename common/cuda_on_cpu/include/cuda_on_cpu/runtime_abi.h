// What a compiled kernel calls in the runtime library, and nothing else: the runtime is built once
// from runtime/*.cpp, kernels are built from the student's file, and this header connects
// them.
#pragma once

#include "types.h"

// The two thread-locals below are read for every threadIdx and blockIdx. Fibers never move to
// another OS thread, so the fastest model is safe. (Mach-O knows only one model.)
#if defined(__APPLE__)
#define CUDA_ON_CPU_THREAD_LOCAL __thread
#else
#define CUDA_ON_CPU_THREAD_LOCAL __thread __attribute__((tls_model("initial-exec")))
#endif

// File and line of the caller, as default arguments: errors then name the student's own line.
#define CUDA_ON_CPU_CALLER const char *file = __builtin_FILE(), int line = __builtin_LINE()

// Is this kernel file compiled with the call-backs of the check build (-fsanitize=thread)?
#if defined(__SANITIZE_THREAD__)
#define CUDA_ON_CPU_CHECKED 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define CUDA_ON_CPU_CHECKED 1
#endif
#endif
#ifndef CUDA_ON_CPU_CHECKED
#define CUDA_ON_CPU_CHECKED 0
#endif

namespace cuda_on_cpu {

struct ThreadContext {
  uint3 index;  // threadIdx
  unsigned rank;  // index in the block, x fastest
  unsigned lane, warp;
  const char* return_file;  // where it returned early; null: nowhere
  int return_line;
};

struct BlockContext {
  uint3 index;  // blockIdx
  dim3 block_dim, grid_dim;
  char* dynamic_shared;
  size_t dynamic_shared_bytes;
};

extern CUDA_ON_CPU_THREAD_LOCAL ThreadContext* current_thread;
extern CUDA_ON_CPU_THREAD_LOCAL BlockContext* current_block;

// ---- launch
struct LaunchConfig {
  dim3 grid, block;
  size_t dynamic_shared_bytes;
  cudaStream_t stream;
  unsigned cluster = 1;      // so many neighbours in x run at once and reach each other's shared memory
  bool cooperative = false;  // all blocks run at once
  LaunchConfig(dim3 grid_, dim3 block_, size_t dynamic_shared_bytes_ = 0,
               cudaStream_t stream_ = nullptr)
      : grid(grid_), block(block_), dynamic_shared_bytes(dynamic_shared_bytes_), stream(stream_) {}
};

struct LaunchSite {
  const char* kernel;  // as written before <<<
  const void* entry_point;  // null when the arguments choose the template: k<<<...>>>(x)
  const char* file;
  int line;
  bool checked;
};

using ThreadBody = void (*)(void* argument);
void launch_blocks(const LaunchConfig& config, const LaunchSite& site, ThreadBody body,
                   void* argument);

// ---- block
enum class BarrierResult { none,
                           any,
                           all,
                           count };
int barrier(BarrierResult wanted, bool predicate, const char* file, int line);
void fence();
void yield();
[[noreturn]] void fail(const char* what, const char* file, int line);
[[noreturn]] void assertion_failed(const char* condition, const char* file, int line);

/// What a __shared__ variable is, so that errors can say tile[3][5].
struct SharedDeclaration {
  const char* name;
  size_t bytes, alignment;
  size_t element_bytes;
  size_t extents[3];  // 0: no such dimension
};

/// Address of a __shared__ variable in the block that runs now. `site` is a static of the
/// declaration: 0 at first, then its number.
void* shared_variable(int* site, const SharedDeclaration& declaration, const char* file, int line);

/// Gives the dynamic shared memory the name and type that the kernel declares it with.
void name_dynamic_shared(const char* name, size_t element_bytes);

/// A part of the dynamic shared memory has a name of its own, from `first` to the next part.
void name_shared_part(const char* name, const void* first, size_t element_bytes, const size_t* extents, size_t count);

// ---- warp. Every lane in `mask` that has not returned must make the same call.
enum class ReduceOp {
  add,
  min_signed,
  max_signed,
  min_unsigned,
  max_unsigned,
  bit_and,
  bit_or,
  bit_xor
};
void warp_sync(unsigned mask, const char* file, int line);
uint64_t warp_shuffle(unsigned mask, uint64_t value, unsigned source_lane, const char* file,
                      int line);
unsigned warp_ballot(unsigned mask, bool predicate, const char* file, int line);
unsigned warp_reduce(unsigned mask, ReduceOp op, unsigned value, const char* file, int line);
unsigned warp_match(unsigned mask, uint64_t value, const char* file, int line);
unsigned warp_active_mask();

// ---- tensor cores and asynchronous copies (ptx.cuh)
enum class MmaType { bf16,
                     f16,
                     tf32 };
void mma_16x8(MmaType type, float* d, const uint32_t* a, const uint32_t* b, const float* c,
              const char* file, int line);
void ldmatrix(int matrices, bool transposed, uint32_t* registers, const void* row, const char* file,
              int line);
void async_copy(void* shared, const void* global, unsigned bytes, unsigned valid_bytes,
                const char* file, int line);
void async_copy_commit();
void async_copy_wait(int pending_groups);
void async_copy_wait_all();

// ---- fragments of nvcuda::wmma (mma.h)
enum class WmmaType { f16,
                      bf16,
                      tf32,
                      f32 };
/// What a fragment holds: a matrix, spread over the lanes. `turn` tells the types of fragments apart; see wmma.cpp.
struct WmmaTile {
  WmmaType type;
  int rows, columns, turn;
};
/// d = a b + c; d has the shape of c.
struct WmmaShapes {
  WmmaTile a, b, c, d;
};
void wmma_load(const WmmaTile& tile, void* x, const void* matrix, unsigned ldm, bool by_columns, const char* file,
               int line);
void wmma_store(const WmmaTile& tile, const void* x, void* matrix, unsigned ldm, bool by_columns, const char* file,
                int line);
void wmma_multiply(const WmmaShapes& shapes, void* d, const void* a, const void* b, const void* c, const char* file,
                   int line);

// ---- Hopper
void mbarrier_init(uint64_t* barrier, int arrivals, const char* file, int line);
/// Arrives, and adds to the bytes that the phase waits for.
void mbarrier_arrive(uint64_t* barrier, unsigned bytes, const char* file, int line);
void mbarrier_wait(uint64_t* barrier, int parity, const char* file, int line);

/// Waits, unless it only arrives, until so many threads have come to the barrier of this number.
void named_barrier(int id, int threads, bool waits, const char* file, int line);

/// Copies that an mbarrier counts. They land later.
void bulk_load(void* shared, const void* global, unsigned bytes, uint64_t* barrier, const char* file, int line);
void tensor_load(void* shared, const void* map, const int (&at)[5], uint64_t* barrier, const char* file, int line);
void tensor_store(const void* map, const void* shared, const int (&at)[5], const char* file, int line);
void tensor_store_wait();

/// What is there may be read before it is written: the check build does not report that.
void may_be_anything(void* shared, size_t bytes);

/// What __cvta_generic_to_shared() gives: an offset.
uint32_t offset_in_shared(const void* shared);
void stmatrix(int matrices, bool transposed, uint32_t row, const uint32_t* registers, const char* file, int line);

/// d (64 x columns) = a (64 x 16) b (16 x columns), plus d if `add`, for the calling warp's 16 rows. a and b are
/// descriptors; a_registers, if not null, is in place of a. by_rows: the product sums over the rows of the tile in
/// shared memory.
struct WgmmaOperands {
  MmaType type;
  int columns;
  bool add, a_by_rows, b_by_rows;
  uint32_t a, b;
  const uint32_t* a_registers;
};
void wgmma(const WgmmaOperands& operands, float* d, const char* file, int line);
void wgmma_commit(const char* file, int line);
void wgmma_wait(int pending_groups, const char* file, int line);

void cluster_arrive(const char* file, int line);
void cluster_wait(const char* file, int line);
/// Stores 8 or 16 bytes where block `rank` of the cluster has this variable. Its mbarrier, if not null, counts them.
void cluster_store(int rank, void* variable, const void* value, unsigned bytes, uint64_t* barrier, const char* file,
                   int line);
/// Loads 8 or 16 bytes of what block `rank` of the cluster has in this variable.
void cluster_load(int rank, const void* variable, void* value, unsigned bytes, const char* file, int line);

/// Stops the kernel: `instruction` exists on a GPU only.
[[noreturn]] void gpu_only(const char* instruction, const char* file, int line);

}  // namespace cuda_on_cpu
