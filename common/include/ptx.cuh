// The few PTX instructions that attention kernels need, as functions. Under nvcc each is one line
// of assembly; without a GPU each is emulated, with the checks that the hardware does not make.
//
//   mma_m16n8k16<T>(d, a, b, c)    d = a b + c on tensor cores, T = __half or __nv_bfloat16   sm_80
//   mma_m16n8k8_tf32(d, a, b, c)   the same for tf32; to_tf32(x) rounds a float to it         sm_80
//   ldmatrix_x1 _x2 _x4 (_trans)   8x8 matrices of 16-bit values, shared memory to registers  sm_75
//   cp_async<Bytes>(to, from, ok)  4, 8 or 16 bytes, global to shared memory; zeros if !ok    sm_80
//   cp_async_commit(), cp_async_wait<N>(), cp_async_wait_all()
//
// Fragments. With lane = threadIdx.x % 32, g = lane / 4 and t = lane % 4, the tile is a (16 x k)
// times b (k x 8) plus c (16 x 8), and each register of a and b holds two neighbours in k:
//   a[0] row g,     k 2t, 2t+1      a[2] row g,     k 2t+8, 2t+9      b[0] k 2t,   2t+1,  column g
//   a[1] row g + 8, k 2t, 2t+1      a[3] row g + 8, k 2t+8, 2t+9      b[1] k 2t+8, 2t+9,  column g
//   c[0] c[1] row g, columns 2t, 2t+1          c[2] c[3] row g + 8, columns 2t, 2t+1
// tf32 (k = 8), one value per register: a[0] row g, k t;  a[1] row g + 8, k t;  a[2] row g, k t + 4;
//   a[3] row g + 8, k t + 4;  b[0] k t, column g;  b[1] k t + 4, column g.
//
// ldmatrix: lane 8 i + r passes the address of row r of matrix i (16 bytes, 16-byte aligned), and
// receives in register i the elements 2t, 2t+1 of row g of matrix i; _trans: of column g.
//
// cp_async: what was copied may be read after cp_async_wait by the thread that copied it, and by the
// others after a __syncthreads() that follows. cp_async_wait<N>() leaves the N newest groups in
// flight.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#ifdef __CUDACC__

#include <type_traits>

// Code for an older architecture still compiles; running it there stops the kernel.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define PTX_SM80(...) __trap()
#else
#define PTX_SM80(...) asm volatile(__VA_ARGS__)
#endif

#define PTX_MMA(shape, type)                                                                     \
  PTX_SM80("mma.sync.aligned." shape ".row.col.f32." type "." type ".f32 "                       \
           "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};\n" : "=f"(d[0]), \
           "=f"(d[1]), "=f"(d[2]), "=f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]),      \
           "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]))

template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4],
                                             const uint32_t (&b)[2], const float (&c)[4]) {
  static_assert(std::is_same<T, __half>::value || std::is_same<T, __nv_bfloat16>::value,
                "mma_m16n8k16 multiplies __half or __nv_bfloat16");
  if constexpr (std::is_same<T, __half>::value) {
    PTX_MMA("m16n8k16", "f16");
  } else {
    PTX_MMA("m16n8k16", "bf16");
  }
}

__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4],
                                                 const uint32_t (&b)[2], const float (&c)[4]) {
  PTX_MMA("m16n8k8", "tf32");
}

__device__ __forceinline__ uint32_t to_tf32(float x) {
  uint32_t bits = 0;
  PTX_SM80("cvt.rna.tf32.f32 %0, %1;\n" : "=r"(bits) : "f"(x));
  return bits;
}

__device__ __forceinline__ uint32_t ptx_shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

#define PTX_LDMATRIX(name, count, modifier, registers, ...)                                    \
  __device__ __forceinline__ void name(uint32_t (&r)[count], const void* row) {                \
    asm volatile("ldmatrix.sync.aligned.m8n8.x" #count modifier ".shared.b16 " registers ";\n" \
                 : __VA_ARGS__                                                                 \
                 : "r"(ptx_shared_address(row))                                                \
                 : "memory");                                                                  \
  }
PTX_LDMATRIX(ldmatrix_x1, 1, "", "{%0}, [%1]", "=r"(r[0]))
PTX_LDMATRIX(ldmatrix_x2, 2, "", "{%0, %1}, [%2]", "=r"(r[0]), "=r"(r[1]))
PTX_LDMATRIX(ldmatrix_x4, 4, "", "{%0, %1, %2, %3}, [%4]", "=r"(r[0]), "=r"(r[1]), "=r"(r[2]),
             "=r"(r[3]))
PTX_LDMATRIX(ldmatrix_x1_trans, 1, ".trans", "{%0}, [%1]", "=r"(r[0]))
PTX_LDMATRIX(ldmatrix_x2_trans, 2, ".trans", "{%0, %1}, [%2]", "=r"(r[0]), "=r"(r[1]))
PTX_LDMATRIX(ldmatrix_x4_trans, 4, ".trans", "{%0, %1, %2, %3}, [%4]", "=r"(r[0]), "=r"(r[1]),
             "=r"(r[2]), "=r"(r[3]))

template <int Bytes>
__device__ __forceinline__ void cp_async(void* shared, const void* global, bool inside = true) {
  static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16, "cp_async copies 4, 8 or 16 bytes");
  [[maybe_unused]] uint32_t to = ptx_shared_address(shared);
  [[maybe_unused]] int valid = inside ? Bytes : 0;  // the rest is filled with zeros
  if constexpr (Bytes == 16) {  // .cg: past L1, which only 16 bytes can
    PTX_SM80("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(global),
             "r"(valid) : "memory");
  } else {
    PTX_SM80("cp.async.ca.shared.global [%0], [%1], %2, %3;\n" ::"r"(to), "l"(global), "n"(Bytes),
             "r"(valid) : "memory");
  }
}

__device__ __forceinline__ void cp_async_commit() {
  PTX_SM80("cp.async.commit_group;\n" :: : "memory");
}

template <int Groups>
__device__ __forceinline__ void cp_async_wait() {
  PTX_SM80("cp.async.wait_group %0;\n" ::"n"(Groups) : "memory");
}

__device__ __forceinline__ void cp_async_wait_all() {
  PTX_SM80("cp.async.wait_all;\n" :: : "memory");
}

#undef PTX_LDMATRIX
#undef PTX_MMA
#undef PTX_SM80

#else  // the CPU: the same functions, emulated by the runtime of cuda_on_cpu

template <class T>
inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                         const float (&c)[4], CUDA_ON_CPU_CALLER) {
  static_assert(std::is_same<T, __half>::value || std::is_same<T, __nv_bfloat16>::value,
                "mma_m16n8k16 multiplies __half or __nv_bfloat16");
  using cuda_on_cpu::MmaType;
  constexpr MmaType type = std::is_same<T, __half>::value ? MmaType::f16 : MmaType::bf16;
  cuda_on_cpu::mma_16x8(type, d, a, b, c, file, line);
}

inline void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                             const float (&c)[4], CUDA_ON_CPU_CALLER) {
  cuda_on_cpu::mma_16x8(cuda_on_cpu::MmaType::tf32, d, a, b, c, file, line);
}

inline uint32_t to_tf32(float x) {  // 10 bits of mantissa, ties away from zero
  uint32_t bits = cuda_on_cpu::bits_of(x);
  return (bits & 0x7f800000) == 0x7f800000 ? bits : (bits + 0x1000) & ~0x1fffu;
}

#define PTX_LDMATRIX(name, count, transposed)                                   \
  inline void name(uint32_t (&r)[count], const void* row, CUDA_ON_CPU_CALLER) { \
    cuda_on_cpu::ldmatrix(count, transposed, r, row, file, line);               \
  }
PTX_LDMATRIX(ldmatrix_x1, 1, false)
PTX_LDMATRIX(ldmatrix_x2, 2, false)
PTX_LDMATRIX(ldmatrix_x4, 4, false)
PTX_LDMATRIX(ldmatrix_x1_trans, 1, true)
PTX_LDMATRIX(ldmatrix_x2_trans, 2, true)
PTX_LDMATRIX(ldmatrix_x4_trans, 4, true)
#undef PTX_LDMATRIX

template <int Bytes>
inline void cp_async(void* shared, const void* global, bool inside = true, CUDA_ON_CPU_CALLER) {
  static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16, "cp_async copies 4, 8 or 16 bytes");
  cuda_on_cpu::async_copy(shared, global, Bytes, inside ? Bytes : 0, file, line);
}

inline void cp_async_commit() { cuda_on_cpu::async_copy_commit(); }

template <int Groups>
inline void cp_async_wait() {
  cuda_on_cpu::async_copy_wait(Groups);
}

inline void cp_async_wait_all() { cuda_on_cpu::async_copy_wait_all(); }

#endif
