// What Hopper (sm_90a) adds, as functions: each is one PTX instruction, or a few that belong together.
//
//   TMA        one thread starts the copy of a whole tile to or from shared memory. A load arrives swizzled, and an
//              mbarrier counts its bytes
//   mbarrier   full: the tile has arrived. empty: its readers are done. A waiter passes the parity of the phase
//   wgmma      the four warps of a warpgroup multiply a 64 x 16 tile by a 16 x N one, asynchronously
//   registers  one warpgroup releases registers, another one allocates them (setmaxnreg)
//   barriers   named barriers synchronise some of a block's warps
//
// Without a GPU they are emulated: hopper_on_cpu.cuh.
//
// A tile [rows][d] of 16-bit values is stored in shared memory as [d / 64][rows][64]. 64 values are the 128 bytes of a
// swizzle row: TMA and wgmma both store 16-byte chunk c of row r as chunk c ^ (r % 8). A tile starts at a multiple of
// 1024 bytes.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "tensor.cuh"

// ---- Tensor maps (host): a tensor's address, sizes and strides for TMA. Passed by value as __grid_constant__.

// A (batch, rows, heads, head_dim) tensor in boxes of box_rows rows of one head. The map has five dimensions: (64
// values or 32 floats, which are 128 bytes; row; 128-byte part of a row; head; batch). So one load brings a tile in the
// layout above. Rows past the end are loaded as zeros and are not stored. Pointer and strides have to be multiples of
// 16 bytes.
template <typename T>
inline cudaError_t make_tensor_map(CUtensorMap* map, const void* data, Strides strides, int batch, int rows, int heads,
                                   int head_dim, int box_rows) {
  constexpr cuuint32_t WIDTH = 128 / sizeof(T);
  static const auto encode = [] {  // the driver's function, looked up through the runtime: libcuda is not linked
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  if (!encode) return cudaErrorNotSupported;
  const auto bytes = [](int64_t stride, int size) { return size > 1 ? cuuint64_t(stride) * sizeof(T) : 16; };
  const cuuint64_t sizes[5] = {WIDTH, cuuint64_t(rows), head_dim / WIDTH, cuuint64_t(heads), cuuint64_t(batch)};
  const cuuint64_t pitches[4] = {bytes(strides.row, rows), 128, bytes(strides.head, heads),
                                 bytes(strides.batch, batch)};
  const cuuint32_t box[5] = {WIDTH, cuuint32_t(box_rows), head_dim / WIDTH, 1, 1}, steps[5] = {1, 1, 1, 1, 1};
  const auto type = std::is_same_v<T, float>    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                    : std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUresult result =
      encode(map, type, 5, const_cast<void*>(data), sizes, pitches, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

#define DEVICE __device__ __forceinline__

#ifdef __CUDACC__

DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// For the check build: what is there may be read before it is written. Nothing depends on it then.
DEVICE void may_be_anything(void*, int) {}

// ---- mbarrier

DEVICE void mbarrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}

// Makes the inits visible to TMA as well: after them, before a __syncthreads().
DEVICE void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives, and adds this many bytes to what the phase waits for.
DEVICE void mbarrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// Waits until the phase of this parity is over. A new barrier is in phase 0: waiting for parity 1 returns at once.
DEVICE void mbarrier_wait(uint64_t* barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\nbra again;\nover:\n}" ::"r"(shared_address(barrier)),
      "r"(parity) : "memory");
}

// ---- TMA

DEVICE void tma_prefetch(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Loads the box at these coordinates of dimensions 1 to 4, or has it brought to L2. barrier counts the bytes.
DEVICE void tma_load_box(void* tile, const CUtensorMap* map, uint64_t* barrier, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(shared_address(tile)),
      "l"(map), "r"(shared_address(barrier)), "r"(0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
DEVICE void tma_prefetch_box(const CUtensorMap* map, int c1, int c2, int c3, int c4) {
  asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1, %2, %3, %4, %5}];" ::"l"(map), "r"(0),
               "r"(c1), "r"(c2), "r"(c3), "r"(c4)
               : "memory");
}

// L2 eviction policies of a load, in createpolicy's encoding for the whole of an access.
constexpr uint64_t EVICT_NORMAL = 0x1000000000000000, EVICT_FIRST = 0x12f0000000000000, EVICT_LAST = 0x14f0000000000000;

// Loads the box that starts at `row` of one head, all of head_dim. barrier counts the bytes.
DEVICE void tma_load(void* tile, const CUtensorMap* map, uint64_t* barrier, int row, int head, int b,
                     uint64_t policy = EVICT_NORMAL) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %3, %5, %6}], [%2], %7;" ::"r"(shared_address(tile)),
      "l"(map), "r"(shared_address(barrier)), "r"(0), "r"(row), "r"(head), "r"(b), "l"(policy)
      : "memory");
}

// Stores the box that starts at `row` of one head. tma_store_wait(): this thread's stores are complete.
DEVICE void tma_store(const CUtensorMap* map, const void* tile, int row, int head, int b) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %2, %4, %5}], [%1];\n"
      "cp.async.bulk.commit_group;" ::"l"(map),
      "r"(shared_address(tile)), "r"(0), "r"(row), "r"(head), "r"(b) : "memory");
}
DEVICE void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Loads contiguous bytes, a multiple of 16, without a map. barrier counts them.
DEVICE void bulk_load(void* to, const void* from, int bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

// Makes what this thread has written to shared memory visible to TMA. A barrier has to follow.
DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- stmatrix

// Writes four 8 x 8 matrices of 16-bit values. x[i] has two values of matrix i: row g, columns 2 t and 2 t + 1, with
// g = lane / 4 and t = lane % 4, the layout of mma and wgmma. Lane l passes the address of row l % 8 of matrix l / 8.
DEVICE void store_matrices(uint32_t row, const uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}

// Writes two 8 x 8 matrices, transposed: lane l passes the address of column l % 8 of matrix l / 8 % 2.
DEVICE void store_transposed(uint32_t column, uint32_t x, uint32_t y) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(column), "r"(x), "r"(y)
               : "memory");
}

// ---- Warpgroups

template <int Registers>
DEVICE void registers_give() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers)); }
template <int Registers>
DEVICE void registers_take() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers)); }

// Barrier 0 is __syncthreads().
DEVICE void barrier_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEVICE void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

#else

#include "hopper_on_cpu.cuh"

#endif

// ---- wgmma: d (64 x N, float) += a (64 x 16) b (16 x N)
//
// d[4 i + 0, 1]: row g, columns 8 i + 2 t and 8 i + 2 t + 1. d[4 i + 2, 3]: row g + 8, the same columns. Row 0 of warp
// w is row 16 w of the tile, g = lane / 4, t = lane % 4: mma_m16n8k16's layout of c, repeated over N. An a in registers
// has mma_m16n8k16's layout of a.

// The low word of the descriptor of a tile [64-wide part][row][64]. The high word is the same for all tiles: 128-byte
// swizzle, groups of 8 rows 1024 bytes apart. The low 14 bits are the address / 16, so an addition moves the tile: 2 to
// the next 16 values of a row, 8 to the next row, (rows 128 / 16) to the next 64-wide part.
//   Q, K: the product sums along the rows of 64; block_bytes is not used
//   V:    the product sums over rows; the 64-wide parts are block_bytes apart
DEVICE uint32_t wgmma_descriptor(const void* tile, int block_bytes = 16) {
  return uint32_t(block_bytes >> 4) << 16 | (shared_address(tile) & 0x3ffff) >> 4;
}

#ifdef __CUDACC__

// Orders register writes before wgmma's reads: before the first wgmma, and again after each write to its registers.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until all but the newest `Groups` committed groups are complete.
template <int Groups>
DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Groups) : "memory"); }

// Keeps the compiler from moving uses of these registers across this line. It does not know that wgmma still runs.
template <typename T, int N>
DEVICE void keep_here(T (&registers)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if constexpr (std::is_same_v<T, float>) {
      asm volatile("" : "+f"(registers[i])::"memory");
    } else {
      asm volatile("" : "+r"(registers[i])::"memory");
    }
  }
}

// Wgmma<T, N, TRANS_B>::run(d, a, b, add) is one instruction. add = 0 starts from zero instead of d. a is a descriptor
// or four registers. TRANS_B: the product sums over b's rows (V).
template <typename T, int N, int TRANS_B>
struct Wgmma;

#define WGMMA_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_D8(i) WGMMA_D4(i), WGMMA_D4(i + 4)
#define WGMMA_D32 WGMMA_D8(0), WGMMA_D8(8), WGMMA_D8(16), WGMMA_D8(24)
#define WGMMA_D40 WGMMA_D32, WGMMA_D8(32)
#define WGMMA_D64 WGMMA_D40, WGMMA_D8(40), WGMMA_D8(48), WGMMA_D8(56)
#define WGMMA_D128                                                                                               \
  WGMMA_D64, WGMMA_D8(64), WGMMA_D8(72), WGMMA_D8(80), WGMMA_D8(88), WGMMA_D8(96), WGMMA_D8(104), WGMMA_D8(112), \
      WGMMA_D8(120)
#define WGMMA_R32                                                        \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15" \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_R40 WGMMA_R32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_R64                                                                    \
  WGMMA_R40                                                                          \
  ", %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55" \
  ", %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_R128                                                                               \
  WGMMA_R64                                                                                      \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"             \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"             \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// x0 to x6: the numbers of the operands after the R accumulators.
// clang-format off: it would indent the strings past column 120
#define WGMMA_SHAPE(N, R, TYPE, PTX_TYPE, x0, x1, x2, x3, x4, x5, x6)                                          \
  template <int TRANS_B>                                                                                       \
  struct Wgmma<TYPE, N, TRANS_B> {                                                                             \
    DEVICE static void run(float (&d)[R], uint32_t a, uint32_t b, int add = 1) {                               \
      asm volatile(                                                                                            \
          "{\n.reg .pred p;\n.reg .b64 x, y;\nsetp.ne.b32 p, %" #x2 ", 0;\n"                                   \
          "mov.b64 x, {%" #x0 ", 0x40000040};\nmov.b64 y, {%" #x1 ", 0x40000040};\n"                           \
          "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." PTX_TYPE "." PTX_TYPE " {" WGMMA_R##R "}, "        \
          "x, y, p, 1, 1, 0, %" #x3 ";\n}"                                                                     \
          : WGMMA_D##R : "r"(a), "r"(b), "r"(add), "n"(TRANS_B));                                              \
    }                                                                                                          \
    DEVICE static void run(float (&d)[R], const uint32_t* a, uint32_t b, int add = 1) {                        \
      asm volatile(                                                                                            \
          "{\n.reg .pred p;\n.reg .b64 y;\nsetp.ne.b32 p, %" #x5 ", 0;\n"                                      \
          "mov.b64 y, {%" #x4 ", 0x40000040};\n"                                                               \
          "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." PTX_TYPE "." PTX_TYPE " {" WGMMA_R##R "}, "        \
          "{%" #x0 ", %" #x1 ", %" #x2 ", %" #x3 "}, y, p, 1, 1, %" #x6 ";\n}"                                 \
          : WGMMA_D##R : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add), "n"(TRANS_B));          \
    }                                                                                                          \
  };
// clang-format on
#define WGMMA_SHAPES(N, R, ...)                 \
  WGMMA_SHAPE(N, R, __half, "f16", __VA_ARGS__) \
  WGMMA_SHAPE(N, R, __nv_bfloat16, "bf16", __VA_ARGS__)

WGMMA_SHAPES(64, 32, 32, 33, 34, 35, 36, 37, 38)
WGMMA_SHAPES(80, 40, 40, 41, 42, 43, 44, 45, 46)
WGMMA_SHAPES(128, 64, 64, 65, 66, 67, 68, 69, 70)
WGMMA_SHAPES(256, 128, 128, 129, 130, 131, 132, 133, 134)

#endif
